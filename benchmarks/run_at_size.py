"""A whole run of FedMF by the number of clients: seconds and peak memory of each of its parts.

    python benchmarks/run_at_size.py [--clients 10000,100000,1000000] [--items 100000] [--dim 32] [--rounds 3]
        [--evaluate-users 1000] [--interactions-per-user 20] [--blocks 2] [--threads 1] [--folder DIR]

10^7 clients are `--clients 10000000`. Interactions are those of `data synth`. `prepare` is `data prepare`; `start` is
all that comes before a block's first round; `round` and `validation` are means over rounds, `test` and `drift`
(changes of ranks) sums over blocks; `save` is a checkpoint, `record` what follows the last round. `resume` is what a
run that was killed within its second round takes to its next one. A cell has seconds, processor seconds, and the most
MiB that the process held in that part, whatever held it. The first round of a block counts as its best, so that from
the second on a run holds two models, as it does at most. The last column says whether the killed run's record has the
bytes of the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable

import torch
from machine import heading

from fedcl_bench.cli import count, counts
from fedcl_bench.cli.main import main as run_bench
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.cross_device import CrossDevice
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels.memory import peak_mib
from fedcl_bench.runs.config import RunConfig, make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import Engine, RunOptions, execute

PARTS = ("prepare", "start", "round", "validation", "test", "drift", "save", "record", "resume")
SAME = ("model.pt", "users.parquet", "analysis.parquet", "metrics.parquet")  # whose bytes a kill may not change


class Clock:
    """Adds up what the parts of a process take; one part follows the other."""

    def __init__(self, part: str):
        self.wall, self.processor, self.peak = defaultdict(float), defaultdict(float), defaultdict(float)
        self._begin(part)

    def enter(self, part: str) -> None:
        """End the part before, and begin this one."""
        before, (wall, processor) = self._part, self._began
        self.wall[before] += time.perf_counter() - wall
        self.processor[before] += time.process_time() - processor
        self.peak[before] = max(self.peak[before], peak_mib())
        self._begin(part)

    def _begin(self, part: str) -> None:
        try:  # of the peak alone: freed memory stays with the process, as in any run
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass
        self._part, self._began = part, (time.perf_counter(), time.process_time())

    def parts(self, rounds: int) -> dict[str, tuple[float, float, float]]:
        """Seconds, processor seconds and MiB of each; of those in every round the mean."""
        self.enter("end")
        each = {part: rounds if part in ("round", "validation", "save") else 1 for part in self.wall}
        return {part: (self.wall[part] / n, self.processor[part] / n, self.peak[part]) for part, n in each.items()}


class Timed(Engine):
    """Tells a clock what a run is at."""

    save_every = 0.0  # after every round

    def __init__(self, clock: Clock, killed: bool):
        self.clock, self.rounds = clock, 0
        self.clients = timed_clients(clock, killed)

    def run(self, federation, progress):
        points = run(federation, progress, kind=self.clients)
        del progress  # its tables are not to be held besides
        for point in points:
            self.rounds += point.round > 0
            self.clock.enter("save" if point.round else "record")
            yield point
            self.clock.enter("start")
        self.clock.enter("record")


def timed_clients(clock: Clock, killed: bool) -> type[CrossDevice]:
    """Clients whose steps are timed, and whose first round is the best; ``killed``: the process is, when they have
    trained in the second round."""
    class Clients(CrossDevice):
        def train(self, progress, stops):
            clock.enter("round")
            update = yield from super().train(progress, stops)
            if killed and progress.round == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return update

        def validate(self, unit, model, round_):
            clock.enter("validation")
            super().validate(unit, model, round_)
            return -float(round_)

        def test(self, unit, best):
            clock.enter("test")
            return super().test(unit, best)

        def analyse(self, progress, model, best, ended):
            clock.enter("drift")
            return super().analyse(progress, model, best, ended)
    return Clients


def configured(args: argparse.Namespace, folder: Path) -> RunConfig:
    settings = {"rounds": args.rounds, "patience": 0, "dim": args.dim, "evaluate_users": args.evaluate_users}
    return make_config(discover(), "ft", "fedmf", "big", overrides=[("run_at_size", settings)], data_dir=folder)


def one(stage: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A stage, in this process: seconds and MiB of its parts, and digests of what it wrote."""
    clock = Clock("prepare" if stage == "prepare" else "start")
    if stage == "prepare":
        if run_bench(["data", "prepare", "big", "--data-dir", str(folder)]):
            sys.exit(f"{stage} failed")
        return {"parts": clock.parts(1)}
    config, engine = configured(args, folder), Timed(clock, stage == "killed")
    done = execute(config, lambda: load_stream(config.source, config.stream, config.features),
                   folder / ("whole" if stage == "run" else "killed"), options=RunOptions(engine=engine))
    return {"parts": clock.parts(engine.rounds), "rounds": engine.rounds,
            "written": {name: hashlib.blake2b(Path(done["record"], name).read_bytes()).hexdigest() for name in SAME}}


def row(clients: int, args: argparse.Namespace, folder: Path, child: Callable[[str], dict[str, Any]]) -> list[str]:
    """A size as a line of the table."""
    made = ["data", "synth", "big", "--users", str(clients), "--items", str(args.items), "--blocks", str(args.blocks),
            "--interactions-per-user", str(args.interactions_per_user), "--out", str(folder), "--force"]
    subprocess.run([sys.executable, "-m", "fedcl_bench", *made], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    prepared, whole, killed, resumed = map(child, ("prepare", "run", "killed", "resume"))
    if killed:
        sys.exit("the run that was to be killed ended")
    same = whole["written"] == resumed["written"] and resumed["rounds"] == whole["rounds"] - 1
    parts = {**prepared["parts"], **whole["parts"], "resume": resumed["parts"]["start"]}
    cells = [f"{wall:.3g} ({processor:.3g}) {peak:,.0f}" for wall, processor, peak in map(parts.get, PARTS)]
    return [f"{clients:,}", *cells, "same bytes" if same else "OTHER BYTES"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=counts, default=(10 ** 4, 10 ** 5, 10 ** 6), metavar="N,N")
    parser.add_argument("--items", type=count, default=10 ** 5)
    parser.add_argument("--dim", type=count, default=32)
    parser.add_argument("--rounds", type=count, default=3, help="of each block, at least two")
    parser.add_argument("--blocks", type=count, default=2)
    parser.add_argument("--evaluate-users", type=int, default=1000, help="0: all")
    parser.add_argument("--interactions-per-user", type=float, default=20.0)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--folder", type=Path, help="where data and records are while they are needed")
    parser.add_argument("--stage", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.stage:
        print(json.dumps(one(args.stage[0], args, Path(args.stage[1]))))
        return
    print(heading(args.threads), flush=True)
    print(f"FedMF of dimension {args.dim}, {args.items:,} items, {args.interactions_per_user:g} interactions per "
          f"client, {args.blocks} blocks, {args.rounds} rounds each, evaluate_users={args.evaluate_users}; seconds "
          f"(of the processor) MiB\n")
    print("| " + " | ".join(("clients", *PARTS, "after a kill")) + " |\n|" + "---|" * (len(PARTS) + 2), flush=True)
    for clients in args.clients:
        with tempfile.TemporaryDirectory(prefix="fedcl_bench-", dir=args.folder) as folder:
            def child(stage: str) -> dict[str, Any]:
                done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--stage", stage, folder],
                                      stdout=subprocess.PIPE, text=True)
                if done.returncode and not (stage == "killed" and done.returncode == -signal.SIGKILL):
                    sys.exit(f"{stage} of {clients:,} clients ended with status {done.returncode}")
                return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
            print("| " + " | ".join(row(clients, args, Path(folder), child)) + " |", flush=True)


if __name__ == "__main__":
    main()
