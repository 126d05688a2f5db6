"""A round of FedMF or SASRec by other frameworks, beside the engine: the same clients, samples and batches.

    python benchmarks/peers.py [--model fedmf] [--peers engine,tensors,loop,...] [--environments build/peers]
    python benchmarks/peers.py --model sasrec --data-dir FOLDER     # with xing/xing.inter

FedMF trains on ML-100K's block 0, SASRec on a session of each of XING's users. Every peer is a script of
``peer_rounds/``, and has an environment of its own with pinned versions, made when it is not there; one that cannot be
installed is left out with the reason. A script is run twice, with one round and with some more: a round's processor
time is what these add, over all processes that they start, and so leaves start-up out. Lines of user code are those
between two marks, of the script and of its model; of the engine the plugin's.
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
from typing import Mapping

import numpy as np
from engine_round import begun
from machine import heading

HERE = Path(__file__).parent / "peer_rounds"
TORCH = ("torch==2.13.0", "numpy==1.26.4")


@dataclass(frozen=True)
class Peer:
    """Attributes:
        title: its name in the table.
        rounds: that are timed, by model; a model that is not among them is not this peer's.
        lacks: what a method of federated continual recommendation needs and it has no word for.
        packages: of its environment; empty: this one.
        python: the interpreter that makes the environment; empty: this one.
    """

    title: str
    rounds: Mapping[str, int]
    lacks: str
    packages: tuple[str, ...] = ()
    python: str = ""


_OWN = "streams of blocks, private parameters, negatives, ranking"
PEERS = {
    "engine": Peer("fedcl_bench", {"fedmf": 1000, "sasrec": 20}, ""),
    "tensors": Peer("leanest loop of bare tensors", {"fedmf": 10}, f"{_OWN}, resuming, clients' sampling"),
    "loop": Peer("the usual PyTorch loop", {"fedmf": 5, "sasrec": 1}, f"{_OWN}, resuming, clients' sampling"),
    "pfl": Peer("pfl-research 0.6", {"fedmf": 10, "sasrec": 1}, _OWN, ("pfl==0.6.0", *TORCH)),
    "blaze": Peer("BlazeFL 2.0, one after the other", {"fedmf": 10, "sasrec": 1}, _OWN,
                  ("blazefl[contrib]==2.0.3", "torch==2.13.0", "numpy==2.3.5"), "python3.12"),
    "flower": Peer("Flower 1.42, simulation", {"fedmf": 2, "sasrec": 1}, "streams of blocks, negatives, ranking",
                   ("flwr[simulation]==1.42.0", *TORCH)),
}
PLUGINS = {"fedmf": "plugins/backbones/fedmf.py", "sasrec": "plugins/sequential/sasrec.py"}


def write_job(path: Path, model: str, data_dir: Path | None) -> str:
    """Write what all peers train on; returns it in words."""
    dataset = {"fedmf": "ml-100k", "sasrec": "xing"}[model]
    start = begun(model, dataset, data_dir)
    step, f, settings = start.step, start.f, start.config.backbone_settings
    if model == "fedmf":
        rates = f.backbone.learning_rates(step.n_items)
        user_rate, item_rate = rates["user_embedding.weight"], rates["item_embedding.weight"]
        lists = [step.train.of(int(user)).numpy() for user in start.users]
        samples = f"{(1 + f.local.negatives) * sum(map(len, lists)):,} samples a round"
    else:
        sessions = step.sessions["train"]
        user_rate = item_rate = settings.lr
        first = sessions.of_user[start.users].tolist()
        lists = [1 + sessions.items[sessions.start[n]:sessions.start[n + 1]].numpy()[-settings.max_length - 1:]
                 for n in first]
        samples = f"{f.local.local_epochs} epochs of a session each"
    np.savez(path, items=np.concatenate(lists), lengths=[len(of) for of in lists], model=model, dataset=dataset,
             data_dir=str(data_dir or ""), epochs=f.local.local_epochs, n_items=step.n_items, dim=settings.dim,
             batch_size=f.local.batch_size, negatives=f.local.negatives, user_rate=user_rate, item_rate=item_rate)
    return f"{f.backbone.name}, {dataset}: {len(lists)} clients, {samples}, one thread"


def python_of(name: str, folder: Path) -> str:
    """The interpreter of a peer's environment; raises subprocess.CalledProcessError if it cannot be made."""
    peer = PEERS[name]
    if not (packages := peer.packages):
        return sys.executable
    python = folder / name / "bin/python"
    if not (folder / name / "ready").exists():
        print(f"{peer.title}: installing {' '.join(packages)} into {folder / name}", flush=True)
        for command in ([peer.python or sys.executable, "-m", "venv", "--clear", folder / name],
                        [python, "-m", "pip", "install", "-q", *packages]):
            subprocess.run(command, check=True, capture_output=True)
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


def user_lines(name: str, model: str) -> int:
    """Lines of a peer's user code that are neither blank nor comments."""
    if name == "engine":
        return _lines((HERE.parent.parent / PLUGINS[model]).read_text(encoding="utf-8"))
    text = (HERE / f"{name}.py").read_text(encoding="utf-8")
    if "job.make()" in text:
        text += (HERE / f"{model}.py").read_text(encoding="utf-8")
    return sum(_lines(part.partition("# --- end\n")[0]) for part in text.split("# --- user code\n")[1:])


def _lines(text: str) -> int:
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fedmf", choices=PLUGINS)
    parser.add_argument("--data-dir", type=Path, help="folder of XING, for SASRec (default: data)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"separated by commas, of {', '.join(PEERS)}")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="where environments are made")
    args = parser.parse_args()
    names = args.peers.split(",")
    if wrong := [name for name in names if name not in PEERS]:
        parser.error(f"--peers: found '{wrong[0]}', accepted: {', '.join(PEERS)}")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    print(heading(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.npz"
        print(write_job(job, args.model, args.data_dir), flush=True)
        print(f"{'':33}{'processor s':>12}{'ratio':>8}{'peak MiB':>10}{'lines':>7}  lacks", flush=True)
        first = None
        for name in (name for name in names if args.model in PEERS[name].rounds):
            peer, rounds = PEERS[name], PEERS[name].rounds[args.model]
            try:
                command = [python_of(name, args.environments), str(HERE / f"{name}.py"), str(job)]
            except FileNotFoundError:
                print(f"{peer.title}: left out: needs {peer.python}", flush=True)
                continue
            except subprocess.CalledProcessError as error:
                print(f"{peer.title}: left out: {error.stderr.decode().strip().splitlines()[-1]}", flush=True)
                continue
            start, _ = cost([*command, "1"])
            whole, peak = cost([*command, str(1 + rounds)])
            seconds = (whole - start) / rounds
            first = first or seconds
            print(f"{peer.title:33}{seconds:12.4f}{seconds / first:8.1f}{peak:10.0f}"
                  f"{user_lines(name, args.model):7}  {peer.lacks}", flush=True)


if __name__ == "__main__":
    main()
