"""A job killed at chosen points of what it writes, then done again to its end: `python killed.py JOB FOLDER KILLS`.

Whatever changes a file or a folder is counted: a file made, written to, synced, renamed, removed. At the chosen number
the process kills itself: before the call, or with half of a write done. Of all numbers those that are no writes come
first, and writes in equal distances make up the rest of KILLS. Prints a line of JSON for each kill: the point, whether
the numbers are the same as without it, and which files are there besides or not.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from fedcl_bench.core import files
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.records import published
from fedcl_bench.runs import runner
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.records.store import load_runs

CALLS = ((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (os, "rename"), (os, "chmod"),
         (tempfile, "mkstemp"), (tempfile, "mkdtemp"), (np, "save"), (shutil, "rmtree"), (files._Watched, "write"))


class Points:
    """Counts the calls that write, and dies at one of them."""

    def __init__(self, last: int | None):
        self.last, self.names = last, []
        for owner, name in CALLS:
            setattr(owner, name, self._counted(getattr(owner, name), name))

    def _counted(self, call, name):
        def counted(*args, **options):
            self.names.append(name)
            if len(self.names) == self.last:
                if name == "write":
                    half = bytes(args[1])
                    call(args[0], half[:len(half) // 2])
                    args[0].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)
        return counted


def run(config, stream, results: Path, rerun: bool = False) -> None:
    runner.SAVE_EVERY = 0.0
    runner.execute(config, lambda: stream, results, options=runner.RunOptions(rerun))


def state_of_run(config, results: Path) -> dict:
    """The numbers of a finished run, and the names of all files in its results folder."""
    folder = results / "runs" / config.name
    content = json.loads((folder / "run.json").read_text())
    rounds = pd.read_parquet(folder / "rounds.parquet").drop(columns=["train_seconds", "evaluate_seconds"])
    kept = {name: digest for name, digest in content["files"].items() if name != "rounds.parquet"}
    return {"numbers": [content["matrix"], content["rounds"], kept, (folder / "model.pt.b2sum").read_text(),
                        hashlib.blake2b(rounds.to_csv().encode()).hexdigest()],
            "files": sorted(str(path.relative_to(results)) for path in results.rglob("*"))}


def state_of_pack(folder: Path) -> dict:
    return {"numbers": [run.hash for run in load_runs(folder)],
            "files": sorted((path.name, hashlib.blake2b(path.read_bytes()).hexdigest()) for path in folder.iterdir())}


def in_child(work) -> tuple[int, str]:
    """The exit status of work in a process of its own, and what it returned."""
    there, here = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(here, json.dumps(work()).encode())
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(here)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(there) as pipe:
        return status, pipe.read()


def chosen(names: list[str], kills: int) -> list[int]:
    """Numbers of calls, from 1, ascending; the last calls of all are among them."""
    def evenly(numbers, count):
        count = max(0, min(count, len(numbers)))
        return [numbers[-1 - i * len(numbers) // count] for i in range(count)]
    calls = evenly([i for i, name in enumerate(names, 1) if name != "write"], kills)
    return sorted(calls + evenly([i for i, name in enumerate(names, 1) if name == "write"], kills - len(calls)))


def main(job: str, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    config = make_config(discover(), "kd", "fedmf", "ml-100k", overrides=[("a test", {"rounds": 1, "k_core": 80})])
    stream = load_stream(config.source, config.stream)
    before, results = folder / "before", folder / "results"
    before.mkdir(parents=True)
    work, state = partial(run, config, stream, results, rerun=job == "rerun"), partial(state_of_run, config, results)
    if job != "run":
        in_child(partial(run, config, stream, before))
    if job == "pack":
        def work():
            published.write(results / "packed", load_runs(before), "a test", lambda run: True)
        state = partial(state_of_pack, results / "packed")

    def counted():
        points = Points(None)
        work()
        return points.names
    shutil.copytree(before, results)
    names = json.loads(in_child(counted)[1])
    expected = json.loads(in_child(state)[1])
    for last in chosen(names, kills):
        shutil.rmtree(results)
        shutil.copytree(before, results)

        def killed(last=last):
            Points(last)
            work()
        status, _ = in_child(killed)
        again, _ = in_child(work)
        found = json.loads(in_child(state)[1] or '{"numbers": null, "files": []}')
        print(json.dumps({"point": f"{last} of {len(names)}, {names[last - 1]}", "killed": status == -signal.SIGKILL,
                          "ended": again == 0, "same": found["numbers"] == expected["numbers"],
                          "left": [name for name in found["files"] if name not in expected["files"]],
                          "missing": [name for name in expected["files"] if name not in found["files"]]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
