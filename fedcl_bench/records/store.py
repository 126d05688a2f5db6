"""Reading finished runs: from a results folder or from compact records, in the same form.

A results folder holds full records under ``runs/`` (``record.py``); a folder of compact records holds an
``index.json`` (``published.py``). Only what is verified is returned.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Sequence

from ..core.errors import Corrupt, UserError
from ..core.text import JOIN
from . import published
from .record import Record, Run, is_set_aside, refuse
from .schema import head_of, read_run

if TYPE_CHECKING:
    import pandas as pd

GIVEN = "given:"  # before a folder of items' vectors, in the setting ``encoder``
LeftOut = Callable[[Corrupt], None]

LEAKS = "leaks test items"
# Settings that say how numbers are taken.
PROTOCOL = ("stream", "candidates", "sampled_candidates", "candidate_lists", "mask_history", "evaluate_users",
            "pilot_users", "domain_blocks")


def domains_of(head: Mapping[str, Any]) -> list[str]:
    """The names of a run's domains, given its record or the head of it; none if its blocks are blocks."""
    return head["dataset"].split(JOIN) if head["settings"].get("stream") == "domains" else []


def block_names(domains: Sequence[str], blocks: int) -> list[str]:
    """What tables call the blocks of a run, given the names of its domains: of domains over time each one's."""
    if not domains:
        return [f"block {block}" for block in range(blocks)]
    steps = [f", block {step}" for step in range(blocks // len(domains))] if blocks > len(domains) else [""]
    return [name + step for step in steps for name in domains]


def why_no_groups(head: Mapping[str, Any], again: str = "run it again") -> str:
    """Why a record has no groups of users and items, given what makes it again."""
    if domains_of(head) or head["settings"].get("topology") == "central":
        return "they are measured where every client is a user"
    return f"it is of an older version; {again}"


def averaged_blocks(dataset: str, blocks: int) -> tuple[int, ...]:
    """The blocks of the steps of time 1, 2, ...; of the first if there is no other. Domains have one each in a step."""
    per_step = dataset.count(JOIN) + 1
    return tuple(range(per_step, blocks)) or tuple(range(blocks))


def continual(meta: Mapping[str, Any], metric: str) -> dict[str, float | None]:
    """A record's summaries of R[t, s] of a metric. Those that look back from a later step are None where there is none:
    records of domains that all train at once say 0."""
    found = dict(meta["continual"].get(metric, {}))
    later = averaged_blocks(meta["dataset"], len(meta["rounds"]))[0] > 0
    return found if later else {**found, "BWT": None, "forgetting": None}


def describe(meta: Mapping[str, Any]) -> str:
    return f"{meta['method']} on {meta['backbone']}, {meta['dataset']}, seed {meta['seed']}"


def leaks(settings: Mapping[str, Any]) -> bool:
    """Whether a run's negatives tell training which items are to be found, by its settings that have an effect."""
    return settings.get("negative_pool") == "untouched"


def leak_notes(settings_of: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A sentence on those of some runs, each with what it is called and its settings, that leak; none if none does."""
    each = list(settings_of)
    leaking = {name: None for name, settings in each if leaks(settings)}
    names = "; ".join(leaking) if len(leaking) < len(dict(each)) else ""
    return [f"{LEAKS.capitalize()}{f' ({names})' * bool(names)}: negatives are drawn from items that a client has in "
            f"no split (negative_pool=untouched), so an item to find is never one; see docs/leaks.md."] * bool(leaking)


def _open(folder: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a record's ``run.json``; raises Corrupt unless all of the record is what was written."""
    content = Record(folder).read()
    if content is None or head_of(content) != head:
        raise Corrupt(f"{folder}: has changed while it was read", "Give the command again.")
    return content


def _heads(results: Path, left_out: LeftOut) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder and head of every record of a results folder that ended, sorted by folder."""
    for path in sorted((results / "runs").iterdir()):
        if is_set_aside(path) or not path.is_dir():
            continue
        try:
            if content := read_run(path):
                yield path, head_of(content)
        except Corrupt as error:
            left_out(error)


def load_record(folder: Path) -> Run:
    """The finished run of one record's folder; raises UserError if it has not finished, is corrupt or is of another
    schema version."""
    content = Record(folder).read()
    if content is None or content["status"] != "finished":
        raise UserError(f"{folder}: has no finished run; the command that began it goes on with it.")
    return Run(head_of(content), folder, partial(dict, content), Record(folder).frame)


def load_runs(folder: Path, left_out: LeftOut | None = None) -> list[Run]:
    """All finished runs of a results folder, of a folder of compact records, or of a folder of such folders: one per
    hash, sorted by dataset, backbone, method, seed and hash. Raises UserError if there is none. ``left_out``: told why
    of each record that is not what was written, and that is left out; records are then verified when they are first
    used (``Run.intact``). None: all are verified now, and the first that is wrong raises."""
    return load_all(folder, left_out)[0]


def load_all(folder: Path, left_out: LeftOut | None = None) -> tuple[list[Run], list[Mapping[str, Any]]]:
    """``load_runs``, and the heads of the runs that failed; compact records hold none of those."""
    if not folder.is_dir():
        raise UserError(f"records: no folder {folder}; name a results folder, or one of compact records.")
    runs: dict[str, Run] = {}
    failed: list[Mapping[str, Any]] = []
    tell, broken = left_out or refuse, []

    def note(error: Corrupt) -> None:
        broken.append(error)
        tell(error)
    if (folder / "runs").is_dir():
        for path, head in _heads(folder, note):
            if head["status"] == "failed":
                failed.append(head)
            else:
                runs[head["hash"]] = Run(head, path, partial(_open, path, head), Record(path).frame, tell)
    else:
        inside = [folder] if published.is_compact(folder) else sorted(filter(published.is_compact, folder.iterdir()))
        for path in inside:
            for meta, load in published.read(path, note):
                runs.setdefault(meta["hash"], Run(head_of(meta), path, partial(dict, meta), load, tell))
    if not runs:
        says = f"; {len(failed)} failed, as {describe(failed[0])}: {why_failed(failed[0])}" if failed else ""
        says += f"; {len(broken)} cannot be used, as {broken[0].wrong}" if broken else ""
        raise UserError(f"records: no finished run in {folder}{says}.\nA results folder has runs/*/run.json, a folder "
                        f"of compact records {published.INDEX}; name another folder.")
    chosen = sorted(runs.values(), key=lambda run: (run.head["dataset"], run.head["backbone"], run.head["method"],
                                                    run.seed, run.hash))
    return [run for run in chosen if left_out or run.intact], failed


def why_failed(head: Mapping[str, Any]) -> str:
    return head["error"].partition("\n")[0].rstrip(".") or "no reason is recorded"


def short_name(encoder: str) -> str:
    """The encoder without the place of its files, which means nothing."""
    kind = GIVEN if encoder.startswith(GIVEN) else ""
    return kind + (Path(encoder.removeprefix(kind)).name or encoder)


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the form in which those of a record and of a spec are compared.

    A split file's bytes are in the data fingerprint and its place means nothing, so only whether there is one counts.
    Metrics that are taken besides change no other number, so they do not count. The same goes for the place of an
    encoder's files.
    """
    places: dict[str, Any] = {"split_file": bool(settings.get("split_file"))}
    if "text_layers" in settings:
        places["encoder"] = short_name(settings["encoder"])
    return {name: value for name, value in {**settings, **places}.items() if name != "extra_metrics"}


def one_data(runs: Iterable[Run]) -> None:
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.head["dataset"], run)
        if other.head["data_fingerprint"] != run.head["data_fingerprint"]:
            raise UserError(f"records of {run.head['dataset']} come from different data files and are not comparable: "
                            f"{describe(other.head)} ({other.hash[:12]}) and {describe(run.head)} ({run.hash[:12]}).\n"
                            f"Take the records of one of the two files away.")


def protocol(run: Run) -> tuple[tuple[str, Any], ...]:
    """How the run's numbers were taken: stream and candidates; settings that the run does not have are left out."""
    settings = {"stream": "blocks", "candidates": "all", **run.head["settings"]}  # where they are inactive
    return tuple((name, settings[name]) for name in PROTOCOL
                 if name in settings and (name != "domain_blocks" or settings[name] > 1))


def protocol_text(run: Run) -> str:
    return ", ".join(str(value) if name == "stream" else f"{name} {value}" for name, value in protocol(run))


def one_protocol(runs: Iterable[Run], where: str) -> None:
    """Raise UserError if runs that are to stand in one table, figure or test follow different protocols."""
    first: Run | None = None
    for run in runs:
        first = first or run
        if protocol(run) != protocol(first):
            words = [", ".join(f"{name}={value}" for name, value in protocol(r)) for r in (first, run)]
            raise UserError(f"{where}: records of different protocols are not comparable: {describe(first.head)} "
                            f"({words[0]}) and {describe(run.head)} ({words[1]}).\nPut them into separate ones.")


def incremental(run: Run) -> tuple[int, ...]:
    """The blocks that a run's means are over, see ``averaged_blocks``."""
    return averaged_blocks(run.head["dataset"], run.head["blocks"])


def user_scores(runs: Iterable[Run], metric: str, blocks: Sequence[int] | None = None) -> pd.Series:
    """One score per user, by its id, sorted: the metric on the block just trained, averaged over the runs' seeds and
    over those of ``blocks`` (None: ``incremental``) in which it has a test item."""
    import pandas as pd

    parts = []
    for run in runs:
        users = run.users
        users = users[(users["metric"] == metric).to_numpy()]  # one of many: the rest is asked of few rows
        keep = ((users["trained_block"] == users["tested_block"])
                & users["trained_block"].isin(incremental(run) if blocks is None else blocks))
        parts.append(users.loc[keep, ["user", "value"]])
    return pd.concat(parts).groupby("user")["value"].mean()
