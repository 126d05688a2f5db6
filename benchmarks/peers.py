"""A round of FedMF by other frameworks, beside the engine: the same clients, samples and batches of ML-100K's block 0.

    python benchmarks/peers.py [--peers engine,tensors,loop,pfl,flower] [--environments build/peers]

Every peer is a script of ``peer_rounds/``, and has an environment of its own with pinned versions, made when it is not
there; one that cannot be installed is left out with the reason. A script is run twice, with one round and with some
more: a round's processor time is what these add, over all processes that they start, and so leaves start-up out.
Lines of user code are those of the script between its two marks, with its
model's; of the engine the plugin's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engine_round import block0
from machine import heading

HERE = Path(__file__).parent / "peer_rounds"
TORCH = ("torch==2.13.0", "numpy==1.26.4")


@dataclass(frozen=True)
class Peer:
    """Attributes:
        title: its name in the table.
        packages: of its environment; empty: this one.
        rounds: that are timed.
        lacks: what a method of federated continual recommendation needs and it has no word for.
    """

    title: str
    packages: tuple[str, ...]
    rounds: int
    lacks: str


_OWN = "streams of blocks, private parameters, negatives, ranking"
PEERS = {
    "engine": Peer("fedcl_bench", (), 1000, ""),
    "tensors": Peer("leanest loop of bare tensors", (), 10, f"{_OWN}, resuming, clients' sampling"),
    "loop": Peer("the usual PyTorch loop", (), 5, f"{_OWN}, resuming, clients' sampling"),
    "pfl": Peer("pfl-research 0.6", ("pfl==0.6.0", *TORCH), 10, _OWN),
    "flower": Peer("Flower 1.42, simulation", ("flwr[simulation]==1.42.0", *TORCH), 2, "streams of blocks, "
                   "negatives, ranking"),
}


def write_job(path: Path) -> str:
    """Write what all peers train on; returns it in words."""
    start = block0("fedmf")
    step, f, dim = start.step, start.f, start.config.backbone_settings.dim
    lists = [step.train.of(int(user)).numpy() for user in start.users]
    rates = f.backbone.learning_rates(step.n_items)
    np.savez(path, items=np.concatenate(lists), lengths=[len(of) for of in lists], n_items=step.n_items, dim=dim,
             batch_size=f.local.batch_size, negatives=f.local.negatives,
             user_rate=rates["user_embedding.weight"], item_rate=rates["item_embedding.weight"])
    samples = (1 + f.local.negatives) * sum(map(len, lists))
    return f"FedMF, ML-100K block 0: {len(lists)} clients, {samples:,} samples a round, one thread"


def python_of(name: str, folder: Path) -> str:
    """The interpreter of a peer's environment; raises subprocess.CalledProcessError if it cannot be made."""
    if not (packages := PEERS[name].packages):
        return sys.executable
    python = folder / name / "bin/python"
    if not (folder / name / "ready").exists():
        print(f"{PEERS[name].title}: installing {' '.join(packages)} into {folder / name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / name], check=True, capture_output=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, capture_output=True)
        (folder / name / "ready").touch()
    return str(python)


def cost(command: list[str]) -> tuple[float, float]:
    """Processor seconds of a command and of all that it starts, and the peak of its largest process in MiB."""
    began = os.times()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"})
        usage = 0.0
        while True:  # of orphans too, of which this process has made itself the parent
            try:
                pid, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            usage = max(usage, used.ru_maxrss / 1024)
            if pid == child.pid and status:
                said.seek(0)
                raise SystemExit(f"{' '.join(command)} failed:\n{said.read().decode()[-2000:]}")
    ended = os.times()
    return (ended.children_user + ended.children_system - began.children_user - began.children_system, usage)


def user_lines(name: str) -> int:
    """Lines of a peer's user code that are neither blank nor comments."""
    if name == "engine":
        return _lines((HERE.parent.parent / "plugins/backbones/fedmf.py").read_text(encoding="utf-8"))
    text = (HERE / f"{name}.py").read_text(encoding="utf-8")
    if "from model import" in text:
        text += (HERE / "model.py").read_text(encoding="utf-8")
    return sum(_lines(part.partition("# --- end\n")[0]) for part in text.split("# --- user code\n")[1:])


def _lines(text: str) -> int:
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"separated by commas, of {', '.join(PEERS)}")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="where environments are made")
    args = parser.parse_args()
    names = args.peers.split(",")
    if wrong := [name for name in names if name not in PEERS]:
        parser.error(f"--peers: found '{wrong[0]}', accepted: {', '.join(PEERS)}")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    print(heading(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(write_job(Path(folder) / "job.npz"), flush=True)
        print(f"{'':30}{'processor s':>12}{'ratio':>8}{'peak MiB':>10}{'lines':>7}  lacks", flush=True)
        first = None
        for name in names:
            peer, script = PEERS[name], HERE / f"{name}.py"
            try:
                command = [python_of(name, args.environments), str(script), str(Path(folder) / "job.npz")]
            except subprocess.CalledProcessError as error:
                print(f"{peer.title}: left out: {error.stderr.decode().strip().splitlines()[-1]}", flush=True)
                continue
            start, _ = cost([*command, "1"])
            whole, peak = cost([*command, str(1 + peer.rounds)])
            seconds = (whole - start) / peer.rounds
            first = first or seconds
            print(f"{peer.title:30}{seconds:12.4f}{seconds / first:8.1f}{peak:10.0f}{user_lines(name):7}  "
                  f"{peer.lacks}", flush=True)


if __name__ == "__main__":
    main()
