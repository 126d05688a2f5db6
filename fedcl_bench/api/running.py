"""``fedcl_bench.run`` and ``fedcl_bench.load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Sequence

from ..core.errors import UserError, unknown
from ..core.tuning import importing
from ..core.settings import MOST_SEEDS, as_text

with importing():
    from ..reports.comparison import at_default
    from ..runs.config import CORE_SETTINGS, make_config, resolve_device
    from ..runs.plugin_errors import named
    from ..runs.registry import discover
    from ..runs.runner import Interrupted
    from ..records.store import Run, comparable, load_record, load_runs
    from .arguments import as_dataset, as_path, as_paths, as_whole, check_texts, in_python
    from .origin import Origin, located, warned
    from .results import Results
    from .seeds import Execution, run_seeds
    from .stopping import stop_between_rounds

_DECIDE = ("stream", "split_file", "topology", "session_from")


@in_python()
def run(method: str, backbone: str | None = None, dataset: str | Path = "ml-100k", seeds: int = 1, *,
        results: str | Path = "results", data_dir: str | Path | None = None,
        plugins: str | Path | Iterable[str | Path] = (), device: str = "cpu", first_seed: int = 0,
        progress: bool = True, **settings: Any) -> Results:
    """Run a method on a backbone and a dataset, or take the records that are there already.

    The same call again returns the records at once. An interrupted run goes on where it was, to the same numbers.
    Ctrl-C stops after the round, with all finished rounds and seeds kept; a second one stops at once.

    Args:
        method: as ``"f3crec"``; ``"pfedrec"``, a federated recommender, is FT on that backbone.
        backbone: as ``"fedmf"``.
        dataset: as ``"ml-100k"``, which comes with RecBole; or the path of an atomic file, or of a folder with one.
        seeds: how many, from ``first_seed`` on.
        results: folder of records, the command's ``--results``.
        data_dir: folder with NAME/NAME.inter or NAME.inter; None: ``./data``. What is not there may be bundled with
            RecBole.
        plugins: folder or folders of plugin files.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        progress: show blocks and rounds on standard error.
        settings: any setting that ``run_bench.py list METHOD`` shows, as ``rounds=10``.

    Returns:
        The results of all seeds.

    Raises:
        UserError: for anything wrong with arguments, settings or data. RunFailed: if training diverges, or a plugin's
            hook raises an error.
        KeyboardInterrupt: after Ctrl-C.
    """
    first, count = as_whole("run", "first_seed", first_seed, 0), as_whole("run", "seeds", seeds, 1, MOST_SEEDS)
    check_texts("run", method=method, backbone=backbone)
    dataset = as_dataset("run", dataset)
    folders, results = as_paths("run", "plugins", plugins), as_path("run", "results", results)
    data_dir = None if data_dir is None else as_path("run", "data_dir", data_dir)
    registry, device = discover(folders), resolve_device(device)
    names = *registry.pair(method, backbone), dataset
    overrides = [("fb.run", settings)]
    configs = [make_config(registry, *names, seed, overrides, data_dir, device) for seed in range(first, first + count)]
    try:
        with stop_between_rounds() as stop, named():
            done = run_seeds(configs, overrides, Execution(results, stop, quiet=not progress))
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    return Results([load_record(Path(result["record"]).absolute()) for result in done],
                   Origin(registry, results, located(dataset, data_dir)[1], tuple(folders)))


@in_python()
def load(folder: str | Path, method: str | None = None, backbone: str | None = None,
         dataset: str | Path | None = None, *,
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
    check_texts("load", method=method, backbone=backbone)
    folder, folders = as_path("load", "folder", folder), tuple(as_paths("load", "plugins", plugins))
    data_dir = None if data_dir is None else as_path("load", "data_dir", data_dir)
    if dataset is not None:
        dataset, data_dir = located(as_dataset("load", dataset), data_dir)
    single = (folder / "run.json").is_file()
    at = folder.absolute()  # records are read when they are asked for, perhaps from another folder
    runs = [load_record(at)] if single else load_runs(at, warned)
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
    records = folder.resolve().parent.parent if single and folder.resolve().parent.name == "runs" else folder
    origin = Origin(discover(folders), records, data_dir, folders)
    _check_combination(runs, folder)
    if not (runs := [run for run in runs if run.intact]):
        raise UserError(f"load: none of the records in {folder} can be used; the warnings say why.")
    return Results(runs, origin)


def _with_setting(runs: Sequence[Run], folder: Path, name: str, value: Any) -> list[Run]:
    """The runs in which a setting has a value, however it is written."""
    values = [{**at_default(run.head, CORE_SETTINGS), **run.head["settings"]}.get(name) for run in runs]
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
                            f"{other.hash[:12]}, {run.hash[:12]} (other data, device, code or extra_metrics).\n"
                            f"Load one by its folder, narrow them with extra_metrics=, or take one away.")
