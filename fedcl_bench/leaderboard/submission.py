"""The folder of a submission: a method's runs as compact records, its plugin's files, its tuned settings, and
``submission.json``, which says who submits what and has the digest of every file.

    results/leaderboard/NAME/submission.json    method, who and when, rows of the page, digests
    results/leaderboard/NAME/index.json         and *.parquet: compact records (``records/published.py``)
    results/leaderboard/NAME/plugins/*.py       files of plugins that do not come with the suite
    results/leaderboard/NAME/tuned/*.json       what `tune` wrote, where settings are tuned
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Iterable, Iterator, Literal, Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..core.errors import UserError, require_known
from ..core.files import folder_beside, read_json, read_required
from ..core.text import for_terminal, quoted, refuse_link, safe_name
from ..core.version import __version__
from ..records import published
from ..records.record import is_set_aside
from ..records.schema import Count, Name, Value
from ..records.store import LEAKS, Run, comparable, describe, leaks, load_all, protocol_text
from ..reports.comparison import changed_settings, headroom_rows, paired_tests
from ..reports.frame import common_seeds, over_seeds, paired_scores, same_tests, seed_averages
from ..reports.selection import Source, checked_spec, failure, find, find_all
from ..runs.config import RunConfig, make_config
from ..runs.metadata import RECBOLE
from ..runs.registry import Registry, discover
from ..runs.specs import RunSpec, has_settings, parse_method, read_tuned, seed_text, tuned_file
from ..stats.significance import detectable

FILE, PLUGINS, TUNED = "submission.json", "plugins", "tuned"
CURE = "Take the folder as it was submitted, or make it again with `run_bench.py submit`."
REFERENCE, BOUND = "ft", "joint"  # what a method is tested against; what could be reached
MIN_SEEDS = 3
_LONGEST = 100  # characters of an author
Place = tuple[str, str]  # backbone, dataset
Cells = Mapping[Place, Mapping[str, Sequence[Run]]]  # method to its runs, by seed


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is shown of a method on one backbone and dataset."""

    backbone: str
    dataset: str
    stream: str
    metric: str  # of the runs' validation; on the block just trained, averaged over the blocks after the first
    settings: dict[str, Value]  # that are not today's defaults
    tuned: bool  # whether the settings that `tune` chose are in the submission
    seeds: list[Count]
    users: Count  # of the paired t-test against FT
    mean: float  # over seeds
    deviation: float
    reference: float  # FT's mean over the same seeds
    difference: float  # of the test: the mean over users
    p: float  # without a correction
    detectable: float  # the difference that the test finds with probability .8
    share: list[float] | None  # of the headroom below the bound, with its 95 % interval; None without headroom or bound
    bounded: bool  # whether the submission has runs of the bound
    megabytes: float  # that all clients of a run send and receive
    privacy: str  # what clients upload, and what is guaranteed of it
    leaks: str  # which test items reach training
    gives_up: list[str]  # the statements of docs/constraints.md that the method gives up


class Submission(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``submission.json``."""

    format: Literal[1]
    method: Name
    title: str  # the method, with settings that were chosen for it
    author: Annotated[str, Meta(min_length=1, max_length=_LONGEST)]  # who submits
    date: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d\Z")]  # the day, in UTC
    version: str  # of the suite
    # SHA-256 over the Parquet files in the order of their names, which draws the seed that `verify` repeats.
    records: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    files: dict[str, str]  # path in the folder to SHA-256, of all files but this one
    rows: Annotated[list[Row], Meta(min_length=1)]


def read(folder: Path) -> Submission:
    """What a folder says that it submits; raises UserError if it is no submission, Corrupt if ``submission.json`` has
    another form."""
    refuse_link(folder / FILE)
    try:
        return msgspec.convert(read_json(folder / FILE, Submission, CURE), Submission)
    except FileNotFoundError:
        raise UserError(f"{folder}: has no {FILE}; name the folder of a submission, as "
                        f"results/leaderboard/NAME, which `run_bench.py submit` makes.") from None


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a submission but ``submission.json``; raises UserError for a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        refuse_link(path)
        if path.is_file() and path != folder / FILE and "__pycache__" not in path.parts:
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(read_required(path, CURE)).hexdigest()
    return found


def digest_of_records(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.glob("*.parquet")):
        whole.update(read_required(path, CURE))
    return whole.hexdigest()


def registry_of(folder: Path) -> Registry:
    """All plugins, those of a submission among them."""
    return discover([folder / PLUGINS] if (folder / PLUGINS).is_dir() else [])


def configs_of(registry: Registry, cells: Cells, data_dir: Path | None) -> Iterator[tuple[Run, RunConfig]]:
    """Every run of a submission with the configuration that makes it again; raises UserError if its data or plugins are
    not here, or do not take its settings."""
    for runs in cells.values():
        for run in (run for several in runs.values() for run in several):  # seeds may differ in extra metrics
            meta = run.meta
            changes = changed_settings(registry, meta, meta["dataset"])
            yield run, make_config(registry, meta["method"], meta["backbone"], meta["dataset"], run.seed,
                                   [("record", changes)], data_dir, meta["device"])


# What its runs say


def cells_of(folder: Path, method: str) -> Cells:
    """The runs of a submission's folder, checked; raises UserError unless each backbone and dataset has the method and
    FT, with one setting and the same seeds each, at least ``MIN_SEEDS``; Corrupt."""
    cells: dict[Place, dict[str, list[Run]]] = {}
    for run in load_all(folder)[0]:
        cells.setdefault((run.head["backbone"], run.head["dataset"]), {}).setdefault(run.head["method"], []).append(run)
    require(cells, method)
    return cells


def require(cells: Cells, method: str) -> None:
    """Raise UserError unless these are runs of a submission: see ``cells_of``."""
    for (backbone, dataset), runs in cells.items():
        where = f"{method} on {backbone}, {dataset}"
        if lacking := [name for name in (method, REFERENCE) if name not in runs]:
            raise UserError(f"{where}: there is no run of {lacking[0]}, accepted: runs of {method} and {REFERENCE}.")
        if others := sorted(runs.keys() - {method, REFERENCE, BOUND}):
            raise UserError(f"{where}: found runs of {others[0]} too, accepted: {method}, {REFERENCE} and {BOUND}.")
        seeds = sorted(run.seed for run in runs[method])
        if len(seeds) < MIN_SEEDS:
            raise UserError(f"{where}: found {len(seeds)} seed{'s' * (len(seeds) > 1)} ({seed_text(seeds)}), accepted: "
                            f"{MIN_SEEDS} or more.\nRun more with `grid --seeds 5` and the same settings.")
        for name, several in runs.items():
            if (found := sorted(run.seed for run in several)) != seeds:
                raise UserError(f"{where}: {name} has seeds {seed_text(found)}, and {method} {seed_text(seeds)}; "
                                f"accepted: the same of both.\nRun those that lack with the same settings.")
            for run in several[1:]:
                if comparable(run.head["settings"]) != comparable(several[0].head["settings"]):
                    raise UserError(f"{describe(run.head)}: has other settings than seed {several[0].seed}, accepted: "
                                    f"the same for all seeds.")
        same_tests([run for several in runs.values() for run in several], "submit")


def rows_of(folder: Path, cells: Cells, method: str, registry: Registry) -> list[Row]:
    return [_row(folder, place, cells[place], method, registry) for place in sorted(cells, key=lambda p: p[::-1])]


def _row(folder: Path, place: Place, runs: Mapping[str, Sequence[Run]], method: str, registry: Registry) -> Row:
    mine, theirs, meta = runs[method], runs[REFERENCE], runs[method][0].meta
    metric = meta["settings"]["valid_metric"]
    test = paired_tests(mine, theirs, metric).users
    scores = paired_scores(common_seeds(mine, theirs), metric).dropna()
    over = over_seeds(seed_averages(mine, metric))
    shares = {row.method: row.against for row in headroom_rows(runs, REFERENCE, BOUND, metric)} if BOUND in runs else {}
    against, sent = shares.get(method), ", ".join(meta["privacy"]["uploaded"]) or "nothing"
    return Row(
        backbone=place[0], dataset=place[1], stream=protocol_text(mine[0]),
        metric=metric, settings=changed_settings(registry, meta, place[1]),
        tuned=tuned_file(folder / TUNED, method, *place).is_file(), seeds=sorted(run.seed for run in mine),
        users=test.n, mean=over.mean, deviation=over.deviation,
        reference=over_seeds(seed_averages(theirs, metric)).mean, difference=test.difference, p=test.p,
        detectable=detectable(float(np.std(scores["mine"] - scores["theirs"], ddof=1)), test.n),
        share=list(against.share) if against and against.share else None, bounded=BOUND in runs,
        megabytes=float(np.mean([run.meta["bytes"][way] for run in mine for way in ("total_up", "total_down")])) / 5e5,
        privacy=" ".join([f"Sends {sent}.", *(meta["privacy"]["notes"] or ["No formal guarantee."])]),
        leaks=LEAKS if leaks(meta["settings"]) else "none known",
        gives_up=list(registry.gives_up(method, meta["settings"])))


# From a results folder


def select(source: Source, text: str, places: Mapping[str, Iterable[str] | None], changes: Mapping[str, Any],
           records: Path) -> Cells:
    """The runs to submit of a folder of records: the method's, FT's and, where there are some, the bound's. Raises
    UserError for runs that failed, did not end, have several settings, or lack seeds; see ``require``.

    ``text``: the method, with settings of its own as ``f3crec:without=arm``; ``places``: ``backbone`` and ``dataset``
    to the names that are submitted, None: all that there are; ``changes``: settings of all runs."""
    source = replace(source, assignments=())  # ``changes`` are in all specs, where a method's own come first
    method = source.registry.get("method", parse_method(text)[0]).name
    if method == REFERENCE or not source.registry.get("method", method).cls.needs_backbone:
        raise UserError(f"submit: found the method {method}, accepted: one that is tested against {REFERENCE} on a "
                        f"backbone, as f3crec.")
    there = {(head["backbone"], head["dataset"]) for head in [*(run.head for run in source.runs), *source.failed]
             if head["method"] == method and all(names is None or head[kind] in names
                                                 for kind, names in places.items())}
    if not there:
        known = ", ".join(sorted({run.head["method"] for run in source.runs}))
        raise UserError(f"submit: no run of {method} in {records}, which has runs of {known}.\nMake them with: "
                        f"run_bench.py grid --methods {method},{REFERENCE},{BOUND} --backbones fedmf --seeds 5")
    for at, (kind, names) in enumerate(places.items()):
        require_known(f"{kind} of runs of {method}", names or (), {place[at] for place in there})
    cells: dict[Place, dict[str, list[Run]]] = {}
    for place in sorted(there):
        specs = {name: checked_spec(source.registry, RunSpec.of(named, *place), changes, source.tuned)
                 for name, named in ((method, text), (REFERENCE, REFERENCE))}
        found = find_all(source, specs.values(), records)
        cells[place] = {name: found[spec] for name, spec in specs.items()}
        _refuse_partial(source, specs, records)
        if not (changes or source.tuned or parse_method(text)[1]):
            _refuse_mixed(source, method, place, cells[place][method], records)
        cells[place] |= _of_bound(source, place, changes, cells[place][method]) if method != BOUND else {}
    seeds = {place: {run.seed for run in runs[method]} for place, runs in cells.items()}
    cells = {place: {name: [run for run in several if run.seed in seeds[place]] for name, several in runs.items()}
             for place, runs in cells.items()}
    require(cells, method)
    return cells


def _of_bound(source: Source, place: Place, changes: Mapping[str, Any], mine: list[Run]) -> dict[str, list[Run]]:
    """The bound's runs; none if they lack a seed, or if the bound does not go with the backbone."""
    try:
        found = find(source, checked_spec(source.registry, RunSpec(BOUND, *place), changes, source.tuned))[0]
    except UserError:
        return {}
    return {BOUND: found} if {run.seed for run in mine} <= {run.seed for run in found} else {}


def _refuse_partial(source: Source, specs: Mapping[str, RunSpec], records: Path) -> None:
    """Raise UserError if runs of these specs failed, or runs of their methods did not end."""
    for name, spec in specs.items():
        if failed := failure(source.failed, source.registry, spec, source.tuned):
            raise UserError(f"submit: {spec.title} on {spec.backbone}, {spec.dataset} {failed}; accepted: seeds of "
                            f"which none failed.\nMend it and run `grid --retry-failed`, or choose other settings.")
        names = "-".join((name, spec.backbone)).replace(":", "-")
        for path in sorted((records / "runs").glob(f"{names}-{spec.dataset}-s[0-9]*-*")):
            if path.is_dir() and not is_set_aside(path) and not (path / "run.json").is_file():
                raise UserError(f"submit: {path} has not ended; accepted: finished runs.\nGive the command that began "
                                f"it again, which goes on with it, or take its folder away.")


def _refuse_mixed(source: Source, method: str, place: Place, chosen: list[Run], records: Path) -> None:
    """Raise UserError if the method has runs of other settings there, and nothing said which are meant."""
    hashes = {run.hash for run in chosen}
    for run in source.runs:
        if (run.head["method"], run.head["backbone"], run.head["dataset"]) == (method, *place) \
                and run.hash not in hashes:
            mine, theirs = chosen[0].head["settings"], run.head["settings"]
            words = ", ".join(f"{name}={theirs[name]} beside {mine[name]}" for name in sorted(mine)
                              if name in theirs and mine[name] != theirs[name]) or "settings that only some have"
            raise UserError(f"submit: runs of {method} on {place[0]}, {place[1]} in {records} have several settings "
                            f"({words}); accepted: one.\nSay which with --set NAME=VALUE, --method {method}:NAME=VALUE "
                            f"or --tuned, or name a folder of records that has one.")


def write(out: Path, cells: Cells, source: Source, about: Mapping[str, str], command: str) -> Submission:
    """Make the folder of a submission, in the place of one that is there. Raises UserError if a run is not what plugins
    and data give today, or ``out`` is no submission. ``about``: ``method`` (its name), ``title`` and ``author``;
    ``command``: kept in the index of the records."""
    safe_name(out.name, "--out")
    author = about["author"].strip()
    if for_terminal(author) != author or "\n" in author or not 0 < len(author) <= _LONGEST:
        raise UserError(f"--author: found {quoted(about['author'])}, accepted: a name of at most {_LONGEST} "
                        f"characters.")
    if out.exists() and not (out / FILE).is_file() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"--out: found {out}, which is there and no submission; name another folder.")
    files = _plugin_files(cells, source)
    tuned = {path for place, runs in cells.items() for name, (run, *_) in runs.items()
             if source.tuned and (path := source.tuned.file(name, *place)).is_file()
             and has_settings(run.head, read_tuned(path)["settings"])}
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(out) as folder:
        published.write(folder, [run for runs in cells.values() for several in runs.values() for run in several],
                        command, lambda run: False)
        for kind, paths in ((PLUGINS, files), (TUNED, tuned)):
            for path in paths:
                (folder / kind).mkdir(exist_ok=True)
                shutil.copyfile(path, folder / kind / path.name)
        made = cells_of(folder, about["method"])
        submission = Submission(
            format=1, method=about["method"], title=about["title"], author=author,
            date=f"{datetime.now(timezone.utc):%Y-%m-%d}", version=__version__, records=digest_of_records(folder),
            files=digests(folder), rows=rows_of(folder, made, about["method"], source.registry))
        (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(submission), indent=1) + b"\n")
        folder.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)
    return submission


def _plugin_files(cells: Cells, source: Source) -> set[Path]:
    """The files of plugins of these runs that are the user's own; raises UserError for a run that is of other code,
    settings or data than there are today."""
    files = set()
    for run, config in configs_of(source.registry, cells, source.where.data_dir):
        if config.stream.split_file:
            raise UserError(f"{describe(run.head)}: has a split_file, accepted: runs on the dataset alone, so that "
                            f"others can repeat them.")
        if config.hash != run.hash:
            raise UserError(f"{describe(run.head)}: its record {run.hash[:12]} is of other plugin code, data or suite "
                            f"than those here, which give {config.hash[:12]}.\nRun it again, or bring back the file "
                            f"that it was made with.")
        files |= {path for plugin in (config.method, config.backbone, *config.metrics)
                  if isinstance(plugin.numbers, str) and not plugin.name.startswith(RECBOLE)
                  for path in (plugin.path, *plugin.helpers)}
    return files
