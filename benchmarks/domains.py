"""Mini-batches of domains: samples per second of a processor's time, and RecBole's modules on the same batches.

    python benchmarks/domains.py --data-dir DIR [--domains online-retail-ffmsr+amazon-pantry] [--batches 4]

One thread, float32, with the optimiser's steps. Time of the processor and not of the clock, as others may be at work.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import torch
from machine import heading
from torch import Tensor

from fedcl_bench.training.mini_batches import Epoch, Point
from fedcl_bench.training.silo_modules import Domain, histories
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.rng import DrawKey
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover

OURS = {"sasrec": {}, "sasrec as RecBole's": {"architecture": "recbole", "layers": 2, "heads": 2, "dim": 64},
        "gru4rec as RecBole's": {"dim": 64, "hidden_size": 128}, "recbole:SASRec": {}, "recbole:GRU4Rec": {}}
RECBOLE = {"sasrec as RecBole's": "SASRec", "gru4rec as RecBole's": "GRU4Rec", "recbole:SASRec": "SASRec",
           "recbole:GRU4Rec": "GRU4Rec"}


def per_second(step: Callable[[], Any], batches: int, size: int) -> float:
    """Samples per second of batches, after one that is not counted."""
    step()
    began = time.process_time()
    for _ in range(batches):
        step()
    return batches * size / (time.process_time() - began)


def ours(dataset: str, data_dir: Path, name: str, batches: int) -> Iterator[tuple[str, Domain, float]]:
    """Name, domain and speed of each domain."""
    config = make_config(discover(), "ft", name.split()[0], dataset, 0, [("benchmark", OURS[name])], data_dir)
    f = config.federation(load_stream(config.source, config.stream))
    clients = CrossSilo(f)
    start = clients.start()
    for silo in clients.silos:
        domain, = silo.domains
        trained = Epoch(f.backbone, f.local, [domain], (), Point(), DrawKey(silo.seed, 0)).batches(start)
        speed = per_second(lambda: next(trained), batches, f.local.batch_size)
        yield f.stream.domains[domain.number].name, domain, speed


def recbole(name: str, domain: Domain, batches: int, size: int = 1024, length: int = 50) -> float:
    """Speed of RecBole's module with its own settings, on random samples of a domain."""
    class Items:
        def num(self, _field: str) -> int:
            return domain.step.n_items + 1

    del sys.argv[1:]  # RecBole's Config takes the command line for its own, and reads names that NumPy 2 removed
    for alias, value in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        setattr(np, alias, value)
    from recbole.config import Config
    from recbole.model import sequential_recommender

    module = getattr(sequential_recommender, name)(Config(model=name, dataset="ml-100k", config_dict={
        "train_neg_sample_args": None, "MAX_ITEM_LIST_LENGTH": length, "use_gpu": False}), Items())
    torch.autograd.set_detect_anomaly(False)  # RecBole turns it on
    optimiser, generator = torch.optim.Adam(module.parameters(), lr=0.001), torch.Generator().manual_seed(0)

    def batch() -> dict[str, Tensor]:
        chosen = torch.randint(len(domain.samples.end), (size,), generator=generator)
        batch, targets = histories(domain.samples, chosen, length, fixed=True)
        return {module.ITEM_SEQ: batch.items + 1, module.ITEM_SEQ_LEN: batch.lengths, module.POS_ITEM_ID: targets + 1}

    def step() -> None:
        optimiser.zero_grad()
        module.calculate_loss(batch()).backward()
        optimiser.step()

    return per_second(step, batches, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--domains", default="online-retail-ffmsr+amazon-pantry")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--names", nargs="+", choices=OURS, default=list(OURS), metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(heading())
    print("| backbone | domain | samples | samples per second | RecBole's | seconds of an epoch |")
    print("|---|---|--:|--:|--:|--:|")
    for name in args.names:
        for called, domain, speed in ours(args.domains, args.data_dir, name, args.batches):
            beside = f"{recbole(RECBOLE[name], domain, args.batches):,.0f}" if name in RECBOLE else ""
            count = len(domain.samples.end)
            print(f"| {name} | {called} | {count:,} | {speed:,.0f} | {beside} | {count / speed:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
