"""``fedcl_bench.run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable

from ..core.errors import UserError
from ..core.files import closed_to_others
from ..core.text import quoted
from ..core.tuning import importing
from ..core.settings import LARGEST_SEED, MOST_SEEDS

with importing():
    from ..runs.config import make_config, resolve_device
    from ..runs.plugin_errors import named
    from ..runs.registry import discover
    from ..runs.runner import Interrupted
    from ..records.store import load_record
    from .origin import Origin, located
    from .results import Results
    from .seeds import Execution, run_seeds
    from .stopping import stop_between_rounds


def run(method: str, backbone: str | None = None, dataset: str = "ml-100k", seeds: int = 1, *,
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
    first, count = _whole("first_seed", first_seed, 0), _whole("seeds", seeds, 1, MOST_SEEDS)
    registry = discover(folders(plugins))
    names = *registry.pair(method, backbone), dataset
    overrides = [("fb.run", settings)]
    data_dir = None if data_dir is None else Path(data_dir)
    device = resolve_device(device)
    configs = [make_config(registry, *names, seed, overrides, data_dir, device) for seed in range(first, first + count)]
    try:
        with stop_between_rounds() as stop, named(), closed_to_others():
            done = run_seeds(configs, overrides, Execution(Path(results), stop, quiet=not progress))
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    return Results([load_record(Path(result["record"])) for result in done],
                   Origin(registry, Path(results), located(dataset, data_dir)[1], tuple(folders(plugins))))


def folders(plugins: str | Path | Iterable[str | Path]) -> list[Path]:
    return [Path(plugins)] if isinstance(plugins, (str, Path)) else [Path(folder) for folder in plugins]


def _whole(name: str, value: Any, low: int, high: int = LARGEST_SEED) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"run: found {name}={quoted(value)}, accepted: a whole number from {low} to {high}.")
    return value
