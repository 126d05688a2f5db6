"""What each special path of local training gains of a whole job: the job without the path against the job with it.

    python benchmarks/strategies.py [--data-dir data] [--repeats 5] [--only "fused|sgd_step"]

A job is the first rounds of a run, training, averaging and validation, with one thread. With and without take turns;
the figure is the ratio of their least processor times, which other jobs on the machine disturb little. A path that
gains less than 15 % is not worth its code. Jobs on XING are skipped without ``--data-dir``. ``--only`` takes names
of paths apart by ``|``; all of them take some ten minutes of processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from machine import heading

from fedcl_bench import rng
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.evaluation import ranking
from fedcl_bench.federation import loop
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels import functional, memory, ops
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.toolbox import distillation
from fedcl_bench.training import list_trainer, sampling, session_trainer, strategies
from fedcl_bench.training.chunk_trainer import writable
from fedcl_bench.training.optimisers import LocalOptimiser

NO_OPS = SimpleNamespace(serve=lambda *_: False, REALS=ops.REALS, highest=ops.highest)


def no(*_):
    return None


def plain_optimiser(parameters, rates, settings):
    optimiser = LocalOptimiser(settings)

    def step(gradients):
        made = {name: torch.zeros_like(value) if gradient is None else gradient
                for (name, value), gradient in zip(parameters.items(), gradients)}
        with torch.no_grad():
            for name, update in optimiser.updates(writable(made), rates).items():
                parameters[name] += update
    return step


def return_freed_blocks():
    for name in (memory._M_TRIM_THRESHOLD, memory._M_MMAP_THRESHOLD):  # as glibc begins; its own rise is over
        ctypes.CDLL(None).mallopt(name, 128 << 10)


def dealt(trainer, epoch, by_kernels=list_trainer.ListTrainer._dealt):
    """Local batches by PyTorch's operations, of the type that other kernels read."""
    with mock.patch.object(list_trainer, "ops", NO_OPS):
        return by_kernels(trainer, epoch).int()


def plain_linear(inputs, weight, bias, constant):
    inputs = inputs if constant is None else torch.cat([inputs, constant], 2)
    if bias is None:
        return torch.bmm(inputs, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))


def plain_layer_norm(x, weight, bias, eps):
    normed = torch.nn.functional.layer_norm(x, x.shape[2:], eps=eps)
    return torch.addcmul(bias.unsqueeze(1), normed, weight.unsqueeze(1))


def plain_attention(scores, bias, scale):
    return torch.add(bias, scores, alpha=scale).softmax(-1)


# Jobs: method, backbone, dataset, rounds, settings.
JOBS = {
    "fedmf": ("ft", "fedmf", "ml-100k", 10, {}),
    "fedncf": ("ft", "fedncf", "ml-100k", 5, {}),
    "f3crec": ("f3crec", "fedmf", "ml-100k", 16, {"rounds": 3}),
    "f3crec-fedncf": ("f3crec", "fedncf", "ml-100k", 12, {"rounds": 3}),
    "rlp2": ("rlp2", "fedmf", "ml-100k", 8, {"rounds": 3}),
    "adam": ("ft", "fedmf", "ml-100k", 3, {"optimiser": "adam"}),
    "fedrap": ("ft", "fedrap", "ml-100k", 1, {"client_ratio": 0.1}),
    "gpfedrec": ("ft", "gpfedrec", "ml-100k", 1, {}),
    "sasrec": ("ft", "sasrec", "xing", 1, {"client_ratio": 0.5}),
    "fcucr": ("fcucr", "sasrec", "xing", 1, {"client_ratio": 0.3}),
    "miasrec": ("ft", "miasrec", "xing", 1, {"client_ratio": 0.01}),
}
# Paths: the job that each is for, and what switches it off.
PATHS = {
    "fused": ("fedmf", [(strategies, "fused_layout", lambda *_: None)]),
    "fused, F3CRec": ("f3crec", [(strategies, "fused_layout", lambda *_: None)]),
    "factored": ("fedmf", [(strategies, "_is_factored", no)]),
    "factored, FedNCF": ("fedncf", [(strategies, "_is_factored", no)]),
    "dense factored": ("f3crec-fedncf", [(SIZES, "dense_items", 0), (SIZES, "dense_items_compiled", 0)]),
    "lazy_decay, FedRAP": ("fedrap", [(strategies, "_decays_lazily", no)]),
    "lazy_decay, GPFedRec": ("gpfedrec", [(strategies, "_decays_lazily", no)]),
    "sgd_step": ("fedrap", [(strategies.Training, "by_hand", False)]),
    "weighted batches": ("adam", [(SIZES, "weighted_batches", 1)]),
    "compiled_softmax": ("miasrec", [(strategies, "_compiles_softmax", no)]),
    "PyTorch's fused Adam": ("sasrec", [(session_trainer, "stacked_optimiser", plain_optimiser)]),
    "shared dense parameters": ("sasrec", [(functional, "shared", no)]),
    "keep_freed_blocks": ("fedmf", [(loop, "keep_freed_blocks", return_freed_blocks)]),
    "keep_freed_blocks, FCUCR": ("fcucr", [(loop, "keep_freed_blocks", return_freed_blocks)]),
    "kernel: group": ("adam", [(list_trainer.ListTrainer, "_dealt", dealt)]),
    "kernel: group, F3CRec": ("f3crec-fedncf", [(list_trainer.ListTrainer, "_dealt", dealt)]),
    "kernel: group, FedNCF": ("fedncf", [(list_trainer.ListTrainer, "_dealt", dealt)]),
    "kernel: weighted_bce": ("adam", [(functional, "ops", NO_OPS)]),
    "kernel: weighted_bce, F3CRec": ("f3crec-fedncf", [(functional, "ops", NO_OPS)]),
    "kernel: nearest": ("rlp2", [(functional, "ops", NO_OPS)]),
    "kernel: mixed": ("adam", [(rng, "ops", NO_OPS)]),
    "kernel: mixed, XING": ("sasrec", [(rng, "ops", NO_OPS)]),
    "kernel: ranks": ("fedmf", [(ranking, "ops", NO_OPS)]),
    "kernel: ranks, F3CRec": ("f3crec-fedncf", [(ranking, "ops", NO_OPS), (distillation, "ops", NO_OPS)]),
    "kernel: draws, sampling": ("adam", [(sampling, "ops", NO_OPS)]),
    "dot": ("adam", [(functional._Dot, "apply", lambda v, rows: torch.bmm(rows, v.unsqueeze(2)).squeeze(2))]),
    "linear": ("sasrec", [(functional._Linear, "apply", plain_linear)]),
    "linear, MLP": ("fedncf", [(functional._Linear, "apply", plain_linear), (strategies, "_is_factored", no)],
                    [(strategies, "_is_factored", no)]),
    "layer_norm": ("sasrec", [(functional._LayerNorm, "apply", plain_layer_norm)]),
    "attention": ("sasrec", [(functional._Attention, "apply", plain_attention)]),
}


def configured(job: str, data_dir: Path | None):
    method, backbone, dataset, rounds, settings = JOBS[job]
    return make_config(discover(), method, backbone, dataset, data_dir=None if dataset == "ml-100k" else data_dir,
                       overrides=[("the job", settings)])


def seconds(config, stream, rounds: int, switches) -> float:
    """Processor seconds of a job's first rounds."""
    memory.keep_freed_blocks.__wrapped__()
    with ExitStack() as off:
        for switch in switches:
            off.enter_context(mock.patch.object(*switch))
        began = time.process_time()
        for number, _ in enumerate(run(config.federation(stream)), start=1):
            if number == rounds:
                break
        return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(heading(1), flush=True)
    streams: dict = {}
    for path, (job, switches, *with_switches) in PATHS.items():
        dataset, rounds = JOBS[job][2:4]
        if (args.only and path not in args.only.split("|")) or (dataset != "ml-100k" and args.data_dir is None):
            continue
        config = configured(job, args.data_dir)
        if dataset not in streams:
            streams[dataset] = load_stream(config.source, config.stream)
        took = {True: [], False: []}
        for turn in range(args.repeats + 1):  # the first one warms up
            for with_it in took:
                switched = (with_switches[0] if with_switches else ()) if with_it else switches
                took[with_it].append(seconds(config, streams[dataset], rounds, switched))
        least = {with_it: min(times[1:]) for with_it, times in took.items()}
        print(f"{path:24}{job:10}{least[True]:8.2f} s with{least[False]:8.2f} s without"
              f"{least[False] / least[True]:7.2f}x", flush=True)


if __name__ == "__main__":
    main()
