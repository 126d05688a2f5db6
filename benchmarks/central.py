"""How one client that holds all sessions learns, epoch by epoch: the curve that is compared with a released code's.

    python benchmarks/central.py miasrec --set train_share=0.02 --set batch_size=100 --epochs 4

Prints a line of CSV per epoch: loss in training, Recall@20 and MRR@20 on every n-th test sample (``--every``). Unlike a
run it neither validates nor chooses an epoch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from fedcl_bench.training.mini_batches import Epoch, Point
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.stream import Prefixes
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.session_ranking import Ranking, rank_by_module
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.training.silo_modules import exported
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.core.settings import parse_assignments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backbone")
    parser.add_argument("--dataset", default="session-diginetica")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    layers = [("--set", parse_assignments(args.set, "--set"))]
    config = make_config(discover(), "ft", args.backbone, args.dataset, args.seed, layers, args.data_dir)
    f = config.federation(load_stream(config.source, config.stream))
    config.check(f)
    step = f.stream.steps[0]
    samples, test = step.sessions["train"].prefixes(), step.sessions["test"]
    chosen = torch.arange(0, len(test.lengths), args.every)
    test = Prefixes(test, test.start[chosen], test.start[chosen + 1]).written_out()
    (domain,), state = CrossSilo(f).domains, {}
    thinned = replace(domain.step, sessions={**domain.step.sessions, "test": test})
    print("backbone,dataset,seed,epoch,samples,loss,recall@20,mrr@20")
    for number in range(args.epochs):
        epoch = Epoch(f.backbone, f.local, [domain], (), Point(state), DrawKey(f.seed, 0, number))
        for _ in epoch.batches(exported(domain.module, domain.prefix)):
            pass
        state = epoch.state()
        scores = rank_by_module(f.backbone, domain.module, thinned, "test", Ranking([20], f.metrics))
        print(f"{args.backbone},{args.dataset},{args.seed},{number + 1},{len(samples.end)},{epoch.loss:.4f},"
              f"{scores.mean('recall@20'):.4f},{scores.mean('mrr@20'):.4f}", flush=True)


if __name__ == "__main__":
    main()
