"""The leakage audit: what a server reads off the uploads of a run, per level of noise.

Every level is a whole run with that noise, as noise changes what clients are sent later; the uploads of some rounds of
one block are attacked (``attack.py``). A finished level is kept in a file named by a hash of everything that can change
it, so an audit that was stopped goes on with the next level.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import pandas as pd
import torch
from torch import Tensor

from .. import rng
from ..training.trained import Trained
from ..data.stream import Stream
from ..rng import DrawKey
from ..federation.loop import run
from ..core.errors import Corrupt
from ..core.files import read_bytes, write_atomically
from ..core.text import hash_of
from ..plugin.state import Snapshot
from ..runs.config import RunConfig
from ..records.frames import digest, parsed
from ..runs.summary import method_uploads
from ..stats import accounting
from ..stats.significance import mean_interval
from .attack import METRICS, Sums, Uploads, attack

LEVELS = "levels"  # folder of finished levels
_VERSION = 2  # of the numbers; raised when a change of the attack changes them


class Stopped(Exception):
    """The audit was asked to stop; finished levels are kept."""


@dataclass(frozen=True)
class Level:
    """One run of an audit: a noise level and a seed."""

    config: RunConfig  # every block has as many rounds as the last one attacked
    block: int  # whose uploads are attacked
    rounds: tuple[int, ...]  # which of its rounds, from 1, ascending
    clients: int = 0  # how many are attacked, drawn at random; 0: all

    @property
    def noise(self) -> float:
        return self.config.server.upload_noise

    @property
    def file(self) -> str:
        """Where its numbers are kept, below the audit's folder."""
        identity = [_VERSION, self.config.hash, self.block, self.rounds, self.clients]
        return f"{LEVELS}/{hash_of(identity, 12)}.parquet"


def attacked(level: Level, stream: Stream, on_round: Callable[[], None] = lambda: None,
             stop: Callable[[], bool] = lambda: False) -> pd.DataFrame:
    """Run a level and attack its clients' uploads; ``on_round`` is called and ``stop`` asked after every round.

    Returns:
        One row per client and attacked round: ``round`` and what ``attack`` returns.

    Raises:
        Stopped: when asked to. RunFailed: when the run diverges.
    """
    federation, frames = level.config.federation(stream), []
    chosen = {number: _chosen(level, stream, number - 1).cpu() for number in level.rounds}
    sums = Sums(torch.cat(list(chosen.values())).unique())

    def observe(key: DrawKey, model: Snapshot, trained: Trained) -> None:
        number, users = key.round + 1, trained.users
        some = trained.of(torch.isin(users, sums.users.to(users.device)))
        if key.step != level.block or number > level.rounds[-1] or not len(some.users):
            return
        own_start = number == 1 and federation.server.init == "per_client"  # no changes, which nothing is added to
        uploads = Uploads(key, model, some, federation.backbone, federation.server.protection, own_start)
        values = attack(uploads, Sums(sums.users) if own_start else sums, add_only=number not in chosen)
        if values:
            frame = pd.DataFrame({"round": number, **values})
            frames.append(frame[frame["user"].isin(chosen[number].tolist())])

    for progress in run(federation, observe=observe):
        if progress.round:  # after a step it is 0
            on_round()
        if progress.step == level.block and progress.round == level.rounds[-1]:
            break
        if stop():
            raise Stopped
    return pd.concat(frames).sort_values(["round", "user"], ignore_index=True)


def _chosen(level: Level, stream: Stream, round_: int) -> Tensor:
    """Ids of the participants of a round whose uploads are attacked: the same in all rounds that have the same."""
    users = level.config.server.attendance.of(stream.steps[level.block], level.config.seed, round_).users
    keys = rng.client_keys(rng.key(level.config.seed, "audited clients", level.block), users)
    order = rng.sort_keys(rng.bits(keys, torch.zeros_like(users))).argsort()
    return users[order[:level.clients or len(users)]]


def level_clients(level: Level, folder: Path, load: Callable[[], Stream], **options) -> tuple[pd.DataFrame, bool]:
    """``attacked``, or what an earlier audit in this folder found; and whether it was that."""
    path = folder / level.file
    checksum = path.with_name(f"{path.name}.b2sum")
    try:
        content = read_bytes(path, "")
        if read_bytes(checksum, "").decode(errors="replace").split()[:1] == [digest(content)]:
            return parsed(content, path, "", ["round", "user", "items", "positives", "touched", *METRICS]), True
    except (FileNotFoundError, Corrupt):  # not there, or not what was written: made anew
        pass
    frame = attacked(level, load(), **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_atomically(path, buffer.getvalue())
    write_atomically(checksum, f"{digest(buffer.getvalue())}  {path.name}\n".encode())
    return frame, False


def summarise(levels: Sequence[Level], frames: Sequence[pd.DataFrame], delta: float) -> list[dict[str, Any]]:
    """One row per noise and round: every metric's mean over clients with a 95 % bootstrap interval.

    A client counts once: its seeds are averaged first. ``epsilon`` is of the one upload, ``epsilon_so_far`` of all
    uploads up to it of a client that took part in every round; None without clipping or noise, or if the method sends
    more than public parameters, which is not clipped.
    """
    rows, unclipped = [], method_uploads(levels[0].config)
    for noise in dict.fromkeys(level.noise for level in levels):
        alike = [level for level in levels if level.noise == noise]
        every = pd.concat([frame for level, frame in zip(levels, frames) if level.noise == noise])
        for number in alike[0].rounds:
            clients = every[every["round"] == number].groupby("user").mean()
            protection = alike[0].config.server.protection
            done = alike[0].block * alike[0].rounds[-1] + number
            once, so_far = (None if unclipped else accounting.guarantee(protection, count, delta)
                            for count in (1, done))
            row = {"noise": noise, "round": number, "rounds_so_far": done, "clients": len(clients),
                   "epsilon": once and once.epsilon, "epsilon_so_far": so_far and so_far.epsilon,
                   "epsilon_is_bound": bool(once and not once.exact)}
            for metric in METRICS:
                values = clients[metric].dropna()
                row[metric] = dict(zip(("mean", "low", "high"), mean_interval(values))) if len(values) else None
            rows.append(row)
    return rows


def content(levels: Sequence[Level], frames: Sequence[pd.DataFrame], delta: float) -> dict[str, Any]:
    """All an audit found, JSON-ready."""
    config = levels[-1].config  # with noise, if any level has it
    first = frames[0][frames[0]["round"] == levels[0].rounds[0]]
    settings = {name: value for name, value in config.settings.items() if name != "upload_noise"}
    return {"method": config.method.name, "backbone": config.backbone.name, "dataset": config.source.name,
            "seeds": sorted({level.config.seed for level in levels}), "block": levels[0].block,
            "rounds": list(levels[0].rounds), "delta": delta, "settings": settings,
            "data_fingerprint": config.source.fingerprint,
            "by_chance": {"auc": 0.5, "precision": float((first["positives"] / first["items"]).mean()),
                          "precision_touched": float((first["positives"] / first["touched"]).mean())},
            "levels": summarise(levels, frames, delta), "not_attacked": method_uploads(config)}
