"""How one client that holds all sessions learns, epoch by epoch: the curve that is compared with a released code's.

    python benchmarks/central.py miasrec --set train_share=0.02 --set batch_size=100 --epochs 4

Prints a line of CSV per epoch: loss in training, Recall@20 and MRR@20 on every n-th test sample (``--every``). Unlike a
run it neither validates nor chooses an epoch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fedcl_bench.training.silo_samples import Epoch, SampleSet
from fedcl_bench.training.mini_batches import Point
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.stream import Prefixes
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.sample_ranking import Ranking, rank_samples
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.plugin.state import Snapshot
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
    model, state = grow(Snapshot({}, {}), f.backbone, f.seed, step, torch.float32, f.device), {}
    print("backbone,dataset,seed,epoch,samples,loss,recall@20,mrr@20")
    for number in range(args.epochs):
        epoch = Epoch(f.backbone, f.local, model, Point(state), DrawKey(f.seed, 0, number))
        for _ in epoch.batches([SampleSet(samples, memory=model.memory)], model):
            pass
        model, state = epoch.trained(), epoch.state()
        scores = rank_samples(f.backbone, model, test, Ranking([20], f.metrics))
        print(f"{args.backbone},{args.dataset},{args.seed},{number + 1},{len(samples.end)},{epoch.loss:.4f},"
              f"{scores.mean('recall@20'):.4f},{scores.mean('mrr@20'):.4f}", flush=True)


if __name__ == "__main__":
    main()
