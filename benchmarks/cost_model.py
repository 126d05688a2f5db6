"""Check the cost model of docs/privacy.md against measurements, and say what it predicts for larger federations.

    python benchmarks/cost_model.py benchmarks/results/scale_*.md [--nodes 100] [--bandwidth 10]

Reads the tables that `benchmarks/scale.py` prints, finds the time that each kind of work takes (least squares of
relative errors, none negative), and shows every measurement beside what the model says. A round costs

    samples a                             draws, dealing out, training on item rows and adding changes up
    samples x local epochs x d b log2 t   the same where the table of items is t > 1 times the processor's cache of 1
                                          MiB
    samples x local epochs x u g          in later local epochs: updates that a client has made before in the round, u
                                          on average; beside that, rows that are in the cache cost little
    items x d c                           tables that every round writes as a whole
    chunks h                              Python

Memory follows from sizes alone (see docs/privacy.md).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

TERMS = ("a, ns per sample", "b, ns per sample, local epoch, dimension and doubling of the table",
         "c, ns per item and dimension", "g, ns per sample, local epoch and earlier update", "h, us per chunk")
MIB = 1 << 20


@dataclass(frozen=True)
class Round:
    """A line of the benchmark; ``seconds`` and ``peak`` (MiB) are measured, ``data`` (MiB) is the process before the
    model and the chunks are made."""

    clients: float
    items: float
    dim: float
    local_epochs: float
    samples: float
    chunks: float
    seconds: float
    data: float
    peak: float

    def work(self) -> np.ndarray:
        """How much of each of ``TERMS`` there is, in units that make seconds; ``samples`` count once per local
        epoch."""
        beyond = max(0.0, np.log2(4.0 * self.items * self.dim / MIB))
        earlier = (self.local_epochs - 1.0) / 2.0  # most clients have one local batch per epoch
        once = self.samples / self.local_epochs
        return np.array([once, self.samples * self.dim * beyond, self.items * self.dim,
                         self.samples * earlier, 1e3 * self.chunks]) * 1e-9

    def memory(self, threads: int = 2) -> float:
        """MiB that the process grows by: while initial rows are drawn, or in a round, whichever is more."""
        drawing = 4.0 * self.dim * (self.items + self.clients) + 16.0 * self.dim * max(self.items, self.clients)
        tables = 4.0 * self.dim * (3.0 * self.items + 3.0 * self.clients)
        positives = self.samples / (5.0 * self.local_epochs)
        kept = 12.0 * positives if positives <= 1 << 24 else 0.0
        return max(drawing, tables + kept) / MIB + 24.0 * 3 * threads


def read(paths: list[Path]) -> list[Round]:
    """The lines of all tables with the benchmark's columns."""
    rounds, header = [], []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if "round s" in cells:
                header = cells
            elif header and len(cells) == len(header) and cells[0].replace(",", "").isdigit():
                row = {name: float(cell.replace(",", "")) for name, cell in zip(header, cells)}
                rounds.append(Round(*(row[name] for name in ("clients", "items", "dim", "local_epochs", "samples",
                                                             "chunks", "round s", "data MiB", "peak MiB"))))
            elif not cells:
                header = []
    return rounds


def fit(rounds: list[Round]) -> np.ndarray:
    """Time per unit of each of ``TERMS``, shape (terms,)."""
    work = np.stack([r.work() / r.seconds for r in rounds])
    return nnls(work, np.ones(len(rounds)))[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE", help="what benchmarks/scale.py printed")
    parser.add_argument("--nodes", type=int, default=100, help="of a cluster, each like the machine measured")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="of its network, Gbit/s per node")
    args = parser.parse_args()
    rounds = read(args.results)
    if len(rounds) < len(TERMS):
        parser.error(f"found {len(rounds)} measurements in {', '.join(map(str, args.results))}, needs {len(TERMS)}: "
                     f"keep what `python benchmarks/scale.py` prints in a file.")
    times = fit(rounds)
    for name, time in zip(TERMS, times):
        print(f"{time:10.3g}  {name}")
    print("\n| clients | items | d | epochs | round s | model s | model / measured | added MiB | model MiB | ratio |\n"
          "|---|---|---|---|---|---|---|---|---|---|")
    ratios, memory = [], []
    for r in rounds:
        predicted, added = float(r.work() @ times), r.peak - r.data
        ratios.append(predicted / r.seconds)
        memory.append((r.data + r.memory()) / r.peak)
        print(f"| {r.clients:,.0f} | {r.items:,.0f} | {r.dim:.0f} | {r.local_epochs:.0f} | {r.seconds:.3g} | "
              f"{predicted:.3g} | {ratios[-1]:.2f} | {added:,.0f} | {r.memory():,.0f} | {memory[-1]:.2f} |")
    print(f"\nmodel / measured: time {min(ratios):.2f} to {max(ratios):.2f}, memory of the process {min(memory):.2f} "
          f"to {max(memory):.2f}\n")
    print(f"On {args.nodes:,} nodes like this one, {args.bandwidth:g} Gbit/s each; 20 interactions per client, d 32, "
          f"10^6 items:\n")
    print("| clients | round s, one node | s on all nodes | of which sums s | GiB per node |\n|---|---|---|---|---|")
    for clients in (1e6, 1e7, 1e8, 1e9):
        whole = Round(clients, 1e6, 32, 1, 100 * clients, clients / 2600, 0.0, 0.0, 0.0)
        share = Round(clients / args.nodes, 1e6, 32, 1, 100 * clients / args.nodes, clients / args.nodes / 2600,
                      0.0, 0.0, 0.0)
        # Sums go to the command and back over its one link; it adds up 3 x 10^9 numbers a second.
        network = args.nodes * 32 * 1e6 * (2 * 4 * 8 / (args.bandwidth * 1e9) + 1e-9 / 3)
        gib = (share.memory() + 8 * (share.clients + share.samples / 5) / MIB) / 1024
        print(f"| {clients:,.0f} | {whole.work() @ times:,.0f} | {share.work() @ times + network:,.1f} "
              f"| {network:,.1f} | {gib:,.1f} |")


if __name__ == "__main__":
    main()
