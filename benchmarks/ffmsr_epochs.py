"""Seconds of an epoch by the share of the data, as in FFMSR's Figures 8 and 9, and of its filters alone.

    python benchmarks/ffmsr_epochs.py --data-dir DIR [--domains A+B] [--users 1000] [--shares .2 .4 .6 .8 1]

A share has so many of a domain's training samples, drawn at random. FFMSR's epoch is one of its second stage, with
Fourier filters or with fully connected layers in their place. One thread, and seconds of the processor; models take
turns in each line, so that whatever else is at work slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch
from machine import heading
from torch import Tensor, nn

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.rng import DrawKey
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.toolbox.text_fusion import FourierFilter
from fedcl_bench.training.mini_batches import Epoch, Point

FC = {"without": "fourier"}
MODELS = {"FFMSR": ("ffmsr", "ffmsr", {}), "FC": ("ffmsr", "ffmsr", FC),
          "FC of positions": ("ffmsr", "ffmsr", {**FC, "connects": "positions"}),
          "UniSRec": ("ft", "unisrec", {"topology": "local"}),
          "BERT4Rec": ("ft", "recbole:BERT4Rec", {"topology": "local"})}
BATCH, LENGTH, DIM = 1024, 50, 300  # the paper's, for filters alone


def clients(args: argparse.Namespace, model: str) -> CrossSilo:
    """A model's untrained domains, in its last stage."""
    method, backbone, settings = MODELS[model]
    here = {"pilot_users": args.users, "pilot_core": 2, "dim": args.dim, "max_length": args.length, **settings}
    config = make_config(discover(), method, backbone, args.domains, 0, [("benchmark", here)], args.data_dir)
    silos = CrossSilo(config.federation(load_stream(config.source, config.stream, config.features)))
    silos.stage = len(silos.stages) - 1
    return silos


def epoch(silos: CrossSilo, number: int, share: float) -> float:
    """Seconds of an epoch on a share of a domain's samples."""
    f, domain, start = silos.federation, silos.domains[number], silos.start()
    order = torch.randperm(len(domain.samples.end), generator=torch.Generator().manual_seed(0))
    chosen = order[:round(share * len(order))]
    samples = replace(domain.samples, first=domain.samples.first[chosen], end=domain.samples.end[chosen])
    domain.load(start).stage = silos.stages[-1].name
    part = replace(domain, samples=samples)
    trained = Epoch(f.backbone, f.local, [part], (), Point(), DrawKey(domain.seed, 0)).batches(start)
    return seconds(lambda: list(trained))


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def filters() -> dict[str, Callable[[Tensor], Tensor]]:
    """FFMSR's filter, the same by fast Fourier transforms, and the two fully connected layers."""
    fourier, dims, positions = FourierFilter(LENGTH, DIM), nn.Linear(DIM, DIM), nn.Linear(LENGTH, LENGTH)

    def transforms(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(fourier.weight), n=LENGTH, dim=1)

    return {"Fourier filter": fourier, "the same by fast transforms": transforms, "FC": dims,
            "FC of positions": lambda x: positions(x.mT).mT}


def batch_seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds of a batch forward and back."""
    return seconds(lambda: layer(x).sum().backward())


def line(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def compared(measured: dict[str, list[float]]) -> list[str]:
    """Medians, and in parentheses by how much they are above the first."""
    medians = [statistics.median(values) for values in measured.values()]
    return [f"{median:.2f} ({median / medians[0]:.2f})" for median in medians]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--domains", default="online-retail-ffmsr+amazon-pantry")
    parser.add_argument("--users", type=int, default=1000, help="of each domain; 0: all")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{heading()}\n{args.users:,} users of each domain, d = {args.dim}, L = {args.length}\n")
    line("domain", "share", "samples", *MODELS)
    line("---", *["--:"] * (2 + len(MODELS)))
    silos = {model: clients(args, model) for model in MODELS}
    for number, part in enumerate(silos["FFMSR"].federation.stream.domains):
        count = len(silos["FFMSR"].domains[number].samples.end)
        for model in MODELS:  # the first epoch is not counted
            epoch(silos[model], number, args.shares[0])
        for share in args.shares:
            turns = [{model: epoch(silos[model], number, share) for model in MODELS} for _ in range(args.repeats)]
            line(part.name, f"{share:.0%}", f"{round(share * count):,}",
                 *compared({model: [turn[model] for turn in turns] for model in MODELS}))
    print(f"\nA filter alone, forward and back: {BATCH:,} sequences, d = {DIM}, L = {LENGTH}\n")
    layers, x = filters(), torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    line(*layers)
    line(*["--:"] * len(layers))
    turns = [{name: batch_seconds(layer, x) for name, layer in layers.items()} for _ in range(10)][1:]
    line(*compared({name: [turn[name] for turn in turns] for name in layers}))


if __name__ == "__main__":
    main()
