"""FFMSR's second stage: samples per second of a processor's time, beside RecBole's SASRec and the authors' code.

    python benchmarks/ffmsr.py --data-dir DIR [--released FILE] [--domains A+B]

One thread, float32, vectors of 300 numbers, random encodings of 3 layers and 768 numbers. ``--released`` is the file of
the authors' repository (Sapphire-star/FFMSR) that has the class MLTRec.
"""

from __future__ import annotations

import argparse
import importlib.util
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from domains import per_second, speed_of
from machine import heading, ready_for_recbole
from torch import nn

from fedcl_bench.training.mini_batches import Epoch, Point
from fedcl_bench.training.silo_modules import Domain
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.plugin.silo import DomainData
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.rng import DrawKey
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.plugin.local_settings import LocalSettings

LAYERS, WIDTH, DIM, LENGTH = 3, 768, 300, 50
AUTHORS = {"train_stage": "transductive_ft", "temperature": 0.07, "lambda": 1e-3, "ft_layer": LAYERS, "plm_size": WIDTH,
           "n_exps": 8, "adaptor_layers": [WIDTH, DIM], "adaptor_dropout_prob": 0.2, "filter_dropout_prob": 0.2,
           "filter_layer": 2}


class Config(dict):
    """What RecBole's modules ask for; None for whatever is not there."""

    def __init__(self, **more: Any):
        super().__init__(
            USER_ID_FIELD="user", ITEM_ID_FIELD="item", LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="length",
            NEG_PREFIX="neg_", MAX_ITEM_LIST_LENGTH=LENGTH, device="cpu", n_layers=2, n_heads=2, hidden_size=DIM,
            inner_size=256, hidden_dropout_prob=0.5, attn_dropout_prob=0.5, hidden_act="gelu", layer_norm_eps=1e-12,
            initializer_range=0.02, loss_type="CE", **more)

    def __missing__(self, name: str) -> None:
        return None


def ours(domain: Domain, encodings: torch.Tensor, batches: int) -> float:
    cls = discover().get("backbone", "ffmsr").cls
    backbone = cls(cls.Settings(dim=DIM, max_length=LENGTH))
    module = backbone.module(DomainData(domain.step.n_users, domain.step.n_items, encodings, None))
    module.stage = "finetune"
    local = LocalSettings(batch_size=1024, optimiser="adam")
    epoch = Epoch(backbone, local, [replace(domain, module=module)], (), Point(), DrawKey(0, 0))
    trained = epoch.batches(Snapshot({}, {}))
    return per_second(lambda: next(trained), batches, local.batch_size)


def authors(file: Path, dataset: types.SimpleNamespace) -> nn.Module:
    spec = importlib.util.spec_from_file_location("released", file)
    released = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(released)
    return released.MLTRec(Config(**AUTHORS), dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--domains", default="online-retail-ffmsr+amazon-pantry")
    parser.add_argument("--released", type=Path)
    parser.add_argument("--batches", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = make_config(discover(), "ft", "sasrec", args.domains, 0, [], args.data_dir)
    f = config.federation(load_stream(config.source, config.stream))
    print(heading())
    print("| domain | FFMSR | RecBole's SASRec | the authors' FFMSR |")
    print("|---|--:|--:|--:|")
    for domain in CrossSilo(f).domains:
        encodings = torch.randn(domain.step.n_items, LAYERS, WIDTH, generator=torch.Generator().manual_seed(0))
        dataset = types.SimpleNamespace(num=lambda field: domain.step.n_items + 1,
                                        layer_embedding=torch.cat([torch.zeros(1, LAYERS, WIDTH), encodings]))
        speeds = [ours(domain, encodings, args.batches)]
        ready_for_recbole()
        from recbole.model.sequential_recommender.sasrec import SASRec

        modules = [SASRec(Config(), dataset), *([authors(args.released, dataset)] if args.released else [])]
        speeds += [speed_of(module, domain, args.batches) for module in modules]
        cells = [f"{speed:,.0f} ({speeds[0] / speed:.1f})" for speed in speeds]
        print(f"| {f.stream.domains[domain.number].name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
