"""The leakage audit: what a server reads off the uploads of a run, per level of noise, and how that is told.

Every level is a whole run with that noise, as noise changes what clients are sent later; the uploads of some rounds of
one block are attacked (``attack.py``). A finished level is kept in a file named by a hash of everything that can change
it, so an audit that was stopped goes on with the next level.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from .. import rng
from ..training.trained import Trained
from ..data.stream import Step, Stream
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
from .attack import METRICS, OF_UPLOAD, SUM, Sums, Uploads, attack

LEVELS = "levels"  # folder of finished levels
_VERSION = 3  # of the numbers; raised when a change of the attack changes them
HEADS = {"size_auc": "AUC", "size_precision": "precision", "size_auc_touched": "AUC, touched",
         "direction_auc": "AUC, direction", "direction_precision": "precision, direction"}
# What the papers' own noise is worth, however strong it is.
PAPERS = (
    "F3CRec's noise (Table 8: Laplace, uploads not clipped) bears no formal guarantee: nothing bounds what one client "
    "adds, so there is no epsilon.",
    "FCUCR's epsilon takes the sensitivity as 1, which nothing bounds, and is of Gaussian noise on the prototypes that "
    "clients receive (its code), not on what they upload: no formal guarantee.")


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
    """Run a level and attack its clients' uploads: one row per client and attacked round, ``round`` and what ``attack``
    returns. ``on_round`` is called and ``stop`` asked after every round. Raises Stopped when asked to, RunFailed when
    the run diverges."""
    federation, frames = level.config.federation(stream), []
    step = federation.as_trained_on(stream.steps[level.block])
    chosen = {number: _chosen(level, step, number - 1).cpu() for number in level.rounds}
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


def _chosen(level: Level, step: Step, round_: int) -> Tensor:
    """Ids of the participants of a round whose uploads are attacked: the same in all rounds that have the same.
    ``step``: as the clients train on it."""
    users = level.config.server.attendance.of(step, level.config.seed, round_).users
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


def title(audit: Mapping[str, Any]) -> str:
    seeds = audit["seeds"]
    return (f"{audit['method']} on {audit['backbone']}, {audit['dataset']}, block {audit['block']}, "
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")


def interval(value: Mapping[str, float] | None) -> str:
    return "–" if value is None else f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def table(audit: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: means over clients with 95 % intervals."""
    clipped = audit["settings"].get("upload_clip", 0.0) > 0.0
    heads = ["round", "noise", "uploads", *HEADS.values(), *["ε"] * clipped]
    rows = []
    for number in audit["rounds"]:
        for row in audit["levels"]:
            for uploads, prefix, epsilon in (("one", "", "epsilon"), ("sum", SUM, "epsilon_so_far")):
                if row["round"] == number and (number > 1 or not prefix):
                    rows.append([str(number), f"{row['noise']:g}", uploads,
                                 *(interval(row[prefix + name]) for name in OF_UPLOAD),
                                 *["none" if row[epsilon] is None else f"{row[epsilon]:.4g}"] * clipped])
    return heads, rows


def notes(audit: Mapping[str, Any]) -> list[str]:
    """How to read the table, and what it does not say."""
    chance, clients = audit["by_chance"], {row["clients"] for row in audit["levels"]}
    settings = audit["settings"]
    lines = [f"Mean over {' or '.join(map(str, sorted(clients)))} clients [95 % bootstrap interval]. AUC and precision "
             f"at n+ of items ranked by the size of their rows' change; touched: among the client's own positives and "
             f"negatives only; direction: by the change along the main direction. One: the upload of this round; sum: "
             f"all uploads of the client in the block up to it, added up, which averages noise out.",
             f"By chance: AUC .5, precision {chance['precision']:.3f}; knowing which rows changed, precision "
             f"{chance['precision_touched']:.3f}."]
    if settings.get("init") == "per_client":
        lines.append("The first upload, which is no change, is in no sum.")
    if settings.get("upload_clip", 0.0) > 0.0:
        norm = "L1" if settings.get("upload_mechanism", "laplace") == "laplace" else "L2"
        lines.append(f"Changes are clipped to an {norm} norm of {settings['upload_clip']:g}. " + (
            f"{', '.join(audit['not_attacked'])}, also uploaded, are not: no formal guarantee." if audit["not_attacked"]
            else f"ε for delta {audit['delta']:g}, all of a client's data replaced: of the one upload, or of all "
                 f"rounds so far, those of earlier blocks among them."))
        if any(row["epsilon_is_bound"] for row in audit["levels"]):
            lines.append(f"These are upper bounds; for tighter ones: {accounting.INSTALL}.")
    else:
        lines.append("Uploads are not clipped, so no level of noise bears a formal guarantee (--set upload_clip=C).")
    if audit["not_attacked"]:
        lines.append(f"Also uploaded and not attacked: {', '.join(audit['not_attacked'])}.")
    return [*lines, *PAPERS]


def markdown(audit: Mapping[str, Any]) -> str:
    heads, rows = table(audit)
    lines = [f"**{title(audit)}**", "", f"| {' | '.join(heads)} |", "|" + "--:|" * len(heads),
             *(f"| {' | '.join(row)} |" for row in rows), "", *(f"- {line}" for line in notes(audit))]
    return "\n".join(lines) + "\n"


def csv_text(audit: Mapping[str, Any]) -> str:
    """One line per noise, round and metric, in full precision."""
    rows = [{**{name: audit[name] for name in ("method", "backbone", "dataset", "block")},
             **{name: row[name] for name in ("round", "noise", "epsilon", "epsilon_so_far")}, "metric": metric,
             **row[metric], "clients": row["clients"]}
            for row in audit["levels"] for metric in METRICS if row[metric] is not None]
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
