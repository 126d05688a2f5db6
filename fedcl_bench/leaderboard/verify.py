"""Is a submission what it says? Its files, its records, its rows, and one seed that is run again.

Whoever submits could write any number into a record. So all that follows from something else is computed again, and
the digest of the records draws one dataset and seed of which all runs are repeated. On the machine of the records they
must come out the same. Another processor or version rounds differently, which acts like another seed; there they must
lie among the seeds of the submission.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from scipy import special

from ..core.errors import RunFailed
from ..records.store import Run, describe, incremental
from ..reports.frame import seed_averages
from ..runs.config import RunConfig
from ..runs.registry import Registry
from ..runs.specs import has_settings, read_tuned, tuned_file
from .submission import (TUNED, Cells, Place, Submission, cells_of, configs_of, digest_of_records, digests, read,
                         registry_of, rows_of)

TOLERANCE = 1e-6  # of means on one machine; packed scores are 32-bit numbers
LEVEL = 0.01  # how often an honest repetition on another machine may be refused
# What rounding depends on, of a record's environment.
_ROUNDING = ("processor", "instructions", "accelerator", "torch", "numpy", "compiled_kernels")
Rerun = Callable[[RunConfig], Run]


class Rejected(RunFailed):
    """A submission that is not what it says. Exit status 1."""


def verify(folder: Path, data_dir: Path | None, rerun: Rerun) -> Iterator[tuple[str, str]]:
    """What is found of a submission, one step after the other: a step and what was found, in words. ``rerun`` makes a
    run anew and returns its record. Raises Rejected at the first step that finds something wrong, UserError for a
    folder that is no submission, or whose data are not in ``data_dir``."""
    submission = read(folder)
    yield "files", _files(folder, submission)
    registry = registry_of(folder)
    cells = cells_of(folder, submission.method)
    yield "tuned settings", _tuned(folder, cells)
    configs = {}
    for run, config in configs_of(registry, cells, data_dir):
        if config.hash != run.hash:
            raise Rejected(f"{describe(run.head)}: has the hash {run.hash[:12]}, and its settings, data and plugins "
                           f"give {config.hash[:12]}.\nThe plugin, the suite or the data are others than those of the "
                           f"run.")
        configs[run.hash] = config
    yield "settings, data and plugins", f"{len(configs)} runs have the hashes that they give today"
    off = max(_means(run) for runs in cells.values() for several in runs.values() for run in several)
    yield "means", f"those over users in the records, to {off:.0e}"
    yield "rows", _rows(folder, submission, cells, registry)
    place, seed = drawn(submission, cells)
    yield "drawn", f"{place[0]} on {place[1]}, seed {seed}, by the digest of the records"
    for name, several in cells[place].items():
        (run,) = [run for run in several if run.seed == seed]
        yield f"again: {name}", repeated(rerun(configs[run.hash]), run, cells[place])


def drawn(submission: Submission, cells: Cells) -> tuple[Place, int]:
    """The backbone, dataset and seed that the digest of the records draws."""
    every = sorted((place, run.seed) for place, runs in cells.items() for run in runs[submission.method])
    return every[int(submission.records, 16) % len(every)]


def _files(folder: Path, submission: Submission) -> str:
    found = digests(folder)
    for name in sorted(found.keys() | submission.files.keys()):
        if found.get(name) != submission.files.get(name):
            how = "is missing" if name not in found else "was not submitted" if name not in submission.files else \
                "has changed since it was submitted"
            raise Rejected(f"{folder / name}: {how}.\nTake the files as they were, or submit again.")
    if digest_of_records(folder) != submission.records:
        raise Rejected(f"{folder}: field 'records' is not the digest of its Parquet files.\nSubmit again.")
    return f"{len(found)} have the digests that were submitted"


def _tuned(folder: Path, cells: Cells) -> str:
    count = 0
    for place, runs in cells.items():
        for name, several in runs.items():
            if (path := tuned_file(folder / TUNED, name, *place)).is_file():
                count += 1
                for key, value in read_tuned(path)["settings"].items():
                    if not has_settings(several[0].head, {key: value}):
                        raise Rejected(f"{path}: field 'settings.{key}' is {value}, and the runs have "
                                       f"{several[0].head['settings'][key]}.")
    return f"{count} files have those of the runs" if count else "none"


def _means(run: Run) -> float:
    """How far the means of a record are from those over its users, at most."""
    meta, users = run.meta, run.users
    if meta["settings"]["valid_metric"] not in users["metric"].unique():
        raise Rejected(f"{describe(meta)}: has no {meta['settings']['valid_metric']} of single users.")
    off = [0.0]
    for (metric, t, s), values in users.groupby(["metric", "trained_block", "tested_block"], observed=True)["value"]:
        off.append(_close(values.mean(), meta["matrix"][metric][t][s],
                          f"{describe(meta)}: {metric} on block {s} after block {t}"))
        if t == s and len(values) != meta["tested"]["users"][t]:
            raise Rejected(f"{describe(meta)}: field 'tested.users[{t}]' is {meta['tested']['users'][t]}, there are "
                           f"scores of {len(values)}.")
    for metric, values in meta["metrics"].items():
        if values["avg_incremental"] is not None:
            mean = np.mean([values["per_block"][t] for t in incremental(run)])
            off.append(_close(mean, values["avg_incremental"], f"{describe(meta)}: {metric} averaged over blocks"))
    return max(off)


def _close(found: float, said: float, what: str) -> float:
    if not abs(found - said) <= TOLERANCE * max(1.0, abs(said)) and not (np.isnan(found) and np.isnan(said)):
        raise Rejected(f"{what} is {said:.6f} in the record, and {found:.6f} by what it is the mean of.")
    return 0.0 if np.isnan(found) else float(abs(found - said))


def _rows(folder: Path, submission: Submission, cells: Cells, registry: Registry) -> str:
    said, found = (msgspec.to_builtins(rows) for rows in (
        submission.rows, rows_of(folder, cells, submission.method, registry)))
    if len(said) != len(found):
        raise Rejected(f"{folder}: found {len(said)} rows, and the records make {len(found)}.")
    for number, (mine, theirs) in enumerate(zip(said, found)):
        for name, value in theirs.items():
            if not _alike(mine[name], value):
                raise Rejected(f"{folder}: field 'rows[{number}].{name}' is {mine[name]}, the records give {value}.")
    return f"{len(found)} computed again from the records"


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are the same, numbers within rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, rtol=1e-5, atol=TOLERANCE))
    return bool(a == b)


# The same runs again


def repeated(again: Run, run: Run, runs: Mapping[str, Sequence[Run]]) -> str:
    """Whether a run that was made again is that of the record, in words; raises Rejected. ``runs``: those of its
    backbone and dataset, by method."""
    for name in ("tested", "privacy"):
        # Notes on privacy tell of rounds, which another machine may have more or fewer of.
        said, found = ({**each.meta[name], "notes": None} for each in (run, again))
        if said != found:
            raise Rejected(f"{describe(run.meta)}: field '{name}' is {said}, and run again {found}.")
    before, now = (each.meta["environment"] for each in (run, again))
    others = [f"{name} {now.get(name)} instead of {before.get(name)}" for name in _ROUNDING
              if now.get(name) != before.get(name)]
    return _in_spread(again, run, runs, others) if others else _exactly(again, run)


def _exactly(again: Run, run: Run) -> str:
    """On the same machine."""
    largest = 0.0
    for metric, matrix in run.meta["matrix"].items():
        for t, (said, found) in enumerate(zip(matrix, again.meta["matrix"].get(metric, []))):
            off = float(np.nanmax([0.0, *np.abs(np.subtract(said, found))]))
            if off > TOLERANCE:
                raise Rejected(f"{describe(run.meta)}: run again, {metric} after block {t} is {_numbers(found)}; "
                               f"recorded is {_numbers(said)}, more than {TOLERANCE:g} away.")
            largest = max(largest, off)
    for name in ("rounds", "best_round", "bytes", "privacy"):
        if again.meta[name] != run.meta[name]:
            raise Rejected(f"{describe(run.meta)}: run again, field '{name}' is {again.meta[name]}; recorded is "
                           f"{run.meta[name]}.")
    keys = ["trained_block", "tested_block", "user", "metric"]
    said, found = (each.load("users").astype({"metric": str}).set_index(keys)["value"].sort_index()
                   for each in (run, again))
    found = found[found.index.get_level_values("metric").isin(said.index.unique("metric"))]
    if not (said.index.equals(found.index) and np.allclose(said, found, TOLERANCE, TOLERANCE, equal_nan=True)):
        raise Rejected(f"{describe(run.meta)}: run again, users' scores are not those of the record.")
    return f"every mean is that of the record, to {largest:.0e}, and so is every user's score"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6f}" for value in values)


def _in_spread(again: Run, run: Run, runs: Mapping[str, Sequence[Run]], others: Sequence[str]) -> str:
    """On another machine: within the interval in which another seed lies with probability 1 - ``LEVEL`` for all
    methods together, by the deviation over seeds that they have in common (a prediction interval of Student's t)."""
    metric = run.meta["settings"]["valid_metric"]
    seeds = {name: seed_averages(several, metric).to_numpy() for name, several in runs.items()}
    mine, freedom = seeds[run.meta["method"]], sum(len(values) - 1 for values in seeds.values())
    deviation = (sum(((values - values.mean()) ** 2).sum() for values in seeds.values()) / freedom) ** 0.5
    width = float(special.stdtrit(freedom, 1.0 - LEVEL / 2.0 / len(seeds)) * deviation * (1.0 + 1.0 / len(mine)) ** 0.5)
    found, said = float(seed_averages([again], metric).iloc[0]), float(seed_averages([run], metric).iloc[0])
    text = (f"{metric} is {found:.4f}, recorded is {said:.4f}; here {', '.join(others)}, which rounds differently and "
            f"acts like another seed: ")
    if abs(found - mine.mean()) > max(width, TOLERANCE):
        raise Rejected(f"{describe(run.meta)}: {text}that lies within {width:.4f} of the mean over seeds, "
                       f"{mine.mean():.4f}.")
    return f"{text}within {width:.4f} of the mean over seeds, {mine.mean():.4f}"
