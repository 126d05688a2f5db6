"""``fedcl_bench.load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Sequence

from ..core.errors import UserError, unknown
from ..core.tuning import importing
from ..core.settings import as_text

with importing():
    from ..runs.registry import discover
    from ..records.run import Run
    from ..records.store import comparable, load_record, load_runs
    from .origin import Origin, located, warned
    from .results import Results
    from .running import folders


_DECIDE = ("stream", "split_file", "topology", "session_from")


def load(folder: str | Path, method: str | None = None, backbone: str | None = None, dataset: str | None = None, *,
         data_dir: str | Path | None = None, plugins: str | Path | Iterable[str | Path] = (),
         **settings: Any) -> Results:
    """Read finished runs; nothing is run.

    Args:
        folder: one record, a results folder, or a folder of compact records, as ``results/published/f3crec``.
        method, backbone, dataset: only runs of these; a dataset may be a path, as for ``run``.
        data_dir, plugins: as for ``run``; the data is read only when it is needed.
        settings: only runs with these values, as ``eps=0.01``.

    Returns:
        The runs of one combination. They differ in their seeds only.

    Raises:
        UserError: if there is no such run, or there are runs of several combinations (with what narrows them), or a
            record is damaged.
    """
    folder = Path(folder)
    dataset, data_dir = (dataset, data_dir and Path(data_dir)) if dataset is None else located(dataset, data_dir)
    single = (folder / "run.json").is_file()
    runs = [load_record(folder)] if single else load_runs(folder, warned)
    for key, wanted in (("method", method), ("backbone", backbone), ("dataset", dataset)):
        if wanted is not None:
            present = {run.head[key] for run in runs}
            chosen = {wanted} & present or {name for name in present if name.lower() == wanted.lower()}
            if not chosen:
                raise unknown(f"{key} in the records of {folder}", wanted, present)
            runs = [run for run in runs if run.head[key] in chosen]
    for name, value in settings.items():
        runs = _with_setting(runs, folder, name, value)
    # A record is in RESULTS/runs/NAME.
    records = folder.parent.parent if single and folder.resolve().parent.name == "runs" else folder
    origin = Origin(discover(folders(plugins)), records, data_dir, tuple(folders(plugins)))
    _check_combination(runs, folder)
    if not (runs := [run for run in runs if run.intact]):
        raise UserError(f"load: none of the records in {folder} can be used; the warnings say why.")
    return Results(runs, origin)


def _with_setting(runs: Sequence[Run], folder: Path, name: str, value: Any) -> list[Run]:
    """The runs in which a setting has a value, however it is written."""
    values = [run.head["settings"].get(name) for run in runs]
    present = {as_text(each) for each in values if each is not None}
    if not present:
        known = {key for run in runs for key in run.head["settings"]}
        raise unknown(f"setting in the records of {folder}", name, known)

    def same(found: Any) -> bool:
        listed = isinstance(found, list) and not isinstance(value, (list, tuple, str))
        wanted = list(value) if isinstance(value, tuple) else [value] if listed else value
        return found is not None and (found == wanted or as_text(found) == as_text(wanted))
    kept = [run for run, found in zip(runs, values) if same(found)]
    if not kept:
        raise UserError(f"setting '{name}': found {value!r}, accepted: what records in {folder} have, "
                        f"{', '.join(sorted(present))}.")
    return kept


def _check_combination(runs: Sequence[Run], folder: Path) -> None:
    """Raise UserError unless the runs differ in their seeds only, with what tells them apart."""
    for key in ("method", "backbone", "dataset"):
        values = sorted({run.head[key] for run in runs})
        if len(values) > 1:
            raise UserError(f"load: records of several {key}s in {folder}: {', '.join(values)}.\n"
                            f"Narrow them: load({str(folder)!r}, {key}={values[0]!r}).")
    settings = [comparable(run.head["settings"]) for run in runs]
    differing = {}
    # Others have other values, or no effect, for the sake of the first of these.
    for name in sorted({name for each in settings for name in each},
                       key=lambda name: (name not in _DECIDE, any(name not in each for each in settings), name)):
        found = (each.get(name) for each in settings)
        texts = {"no effect" if value is None else as_text(value) for value in found}
        if len(texts) > 1:
            differing[name] = f"{name} ({', '.join(sorted(texts))})"
    if differing:
        raise UserError(f"load: records in {folder} differ in settings: {'; '.join(list(differing.values())[:6])}.\n"
                        f"Narrow them, as with {next(iter(differing))}=VALUE, or load the folder of one record.")
    by_seed: dict[int, Run] = {}
    for run in runs:
        other = by_seed.setdefault(run.seed, run)
        if other is not run:
            raise UserError(f"load: two records of seed {run.seed} in {folder} have the same settings: "
                            f"{other.hash[:12]}, {run.hash[:12]} (other data, device or code).\nLoad one of them by "
                            f"its folder, or take it away.")
