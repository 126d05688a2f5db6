"""Full-ranking evaluation of many users against the bare matrix product with top-k.

    python benchmarks/evaluation.py [--users 100000] [--items 100000] [--dim 32] [--topk 20] [--threads N]

FedMF's scores of all items for every user, 20 of them masked and 5 to find, as a run validates. The bare product is
`torch.mm` of a block of users with the item table and `torch.topk` of the result, and nothing else: no mask, no item to
find, no metric. Its blocks have the size, and its threads the place (inside each operation, or one block each), that
are fastest on a sample of the users in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import time
from contextlib import nullcontext
from typing import Callable

import torch
from machine import heading
from torch import Tensor

from fedcl_bench.cli import count
from fedcl_bench.data.stream import Ragged
from fedcl_bench.evaluation.ranking import RankingTask, rank_all
from fedcl_bench.plugin.backbone import ITEM, USER
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.kernels.memory import keep_freed_blocks, peak_mib
from fedcl_bench.core.parallel import in_order, workers
from fedcl_bench.runs.registry import discover

MASKED, WANTED, SAMPLE = 20, 5, 2048
BLOCKS = (16, 32, 64, 128, 256, 512)


def seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def lists(users: int, items: int, each: int, seed: int) -> Ragged:
    """Random items, as many for every user."""
    drawn = torch.randint(items, (users * each,), generator=torch.Generator().manual_seed(seed))
    return Ragged(torch.arange(users + 1) * each, drawn)


def bare(vectors: Tensor, table: Tensor, topk: int, block: int, own_threads: bool) -> None:
    """The product and its top-k, block by block."""
    best = torch.empty(len(vectors), topk, dtype=torch.int64)

    def one(part: slice) -> None:
        best[part] = torch.mm(vectors[part], table.T).topk(topk, dim=1).indices

    parts = [slice(start, start + block) for start in range(0, len(vectors), block)]
    with workers() if own_threads else nullcontext():
        for _ in in_order(one, parts, vectors.device):
            pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=count, default=10 ** 5)
    parser.add_argument("--items", type=count, default=10 ** 5)
    parser.add_argument("--dim", type=count, default=32)
    parser.add_argument("--topk", type=count, default=20)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    torch.manual_seed(0)
    backbone = discover().get("backbone", "fedmf").cls
    backbone = backbone(backbone.Settings(dim=args.dim))
    vectors, table = torch.randn(args.users, args.dim), torch.randn(args.items, args.dim)
    model = Snapshot({ITEM: table}, {USER: vectors})
    wanted, masked = (lists(args.users, args.items, each, seed) for seed, each in enumerate((WANTED, MASKED)))

    def ours():
        with workers():
            rank_all(backbone, None, model, RankingTask(wanted, [masked], [args.topk]))

    print(heading(args.threads), flush=True)
    print(f"FedMF, d {args.dim}, {args.users:,} users, {args.items:,} items, top {args.topk}, {MASKED} items masked "
          f"and {WANTED} to find\n")
    before = peak_mib()
    took, peak = seconds(ours), peak_mib()
    sample = vectors[:SAMPLE]
    tried = {kind: min(seconds(lambda: bare(sample, table, args.topk, *kind)) for _ in range(2))
             for kind in itertools.product(BLOCKS, (False, True))}
    block, own_threads = min(tried, key=tried.get)
    alone = seconds(lambda: bare(vectors, table, args.topk, block, own_threads))
    again = seconds(ours)  # a machine that others use too: the slower of two moments counts
    print("| | seconds | us per user | peak MiB |\n|---|---|---|---|")
    print(f"| evaluation | {took:.1f} and {again:.1f} | {1e6 * max(took, again) / args.users:.0f} | {peak:,.0f} "
          f"({before:,.0f} before it) |")
    how = "one block each" if own_threads else "inside"
    print(f"| bare product with top-k, {block} users at once, threads {how} | "
          f"{alone:.1f} | {1e6 * alone / args.users:.0f} | |")
    print(f"\nevaluation / bare product: {max(took, again) / alone:.2f}")


if __name__ == "__main__":
    main()
