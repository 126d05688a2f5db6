"""The command line: arguments in, text and progress bars out. Each command's file holds its options and its help.

Here are options and behaviour that several commands share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping

from ..core.errors import Corrupt, UserError, require_known
from ..core.settings import LARGEST, LARGEST_SEED, MOST_SEEDS, assemble, parse_assignments, split_methods
from ..core.text import for_terminal, quoted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..data.source import DatasetSource
    from ..data.settings import StreamSettings
    from ..records.store import Run
    from ..reports.selection import Source
    from ..runs.registry import Registry
    from ..runs.specs import RunSpec, Tuned, Where

_SHOWN = 3  # records that are left out and named


def names(text: str) -> tuple[str, ...]:
    """argparse type of a list of names."""
    parts = tuple(name.strip() for name in text.split(","))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"found '{text}', accepted: names with commas, as ft,reg")
    return parts


class Extend(argparse.Action):
    """Adds the parts of one or several lists, as of ``--table 2,3 4``, to those given before; the first use takes the
    place of the default."""

    def __call__(self, parser, namespace, values, option_string=None):
        lists = values if self.nargs else [values]
        before = getattr(namespace, self.dest)
        before = () if before is None or before is self.default else before
        setattr(namespace, self.dest, (*before, *itertools.chain.from_iterable(lists)))


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def whole(low: int, high: int) -> Callable[[str], int]:
    """argparse type of a whole number, in decimal."""
    def convert(text: str) -> int:
        if not re.fullmatch("0|[1-9][0-9]{0,18}", text) or not low <= int(text) <= high:
            limit = "" if high >= LARGEST and len(text) < 10 else f" to {high}"
            raise argparse.ArgumentTypeError(f"found {quoted(text)}, accepted: a whole number from {low}{limit}")
        return int(text)
    return convert


seed = whole(0, LARGEST_SEED)  # of --seed
count = whole(1, LARGEST)  # of what is there once at least
seeds = whole(1, MOST_SEEDS)  # of --seeds
workers = whole(1, 1024)  # threads, processes, shards


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LIST = {"type": names, "action": Extend, "metavar": "A,B"}
_TUNED = {"nargs": "?", "const": True, "type": Path, "metavar": "DIR"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "plugins": {"action": "append", "default": [], "metavar": "DIR", "type": Path,
                "help": "also load the plugin files of this folder; repeatable"},
    "results": {"type": Path, "default": Path("results"), "metavar": "DIR",
                "help": "folder of run records (default: ./results)"},
    "records": {"type": Path, "default": Path("results"), "metavar": "DIR",
                "help": "a results folder or a folder of compact records (default: ./results)"},
    "data-dir": {"metavar": "DIR", "type": Path, "help": "folder with NAME/NAME.inter or NAME.inter (default: ./data); "
                                                         "what is not there may be among RecBole's bundled files"},
    "set": {"action": "append", "default": [], "metavar": "NAME=VALUE", "dest": "assignments",
            "help": "change a setting; repeatable. `list METHOD` shows the names"},
    "methods": {**_LIST, "type": split_methods,
                "help": "methods, as ft,kd,f3crec, with settings of their own as f3crec:without=arm; repeatable"},
    "backbones": {**_LIST, "help": "backbones, as fedmf; repeatable"},
    "datasets": {**_LIST, "help": "datasets, as ml-100k, or paths of atomic files; repeatable"},
    "tuned": {**_TUNED, "help": "settings from `tune`, kept in DIR (without DIR: my-tuned/ in the results folder, then "
                                "the shipped results/tuned)"},
    "seed": {"type": seed, "default": 0, "metavar": "N", "help": "random seed (default: 0)"},
    "seeds": {"type": seeds, "metavar": "K", "help": "run K seeds (default: %(default)s)"},
    "paper": {"metavar": "NAME"},
    "table": {"type": counts, "action": Extend, "metavar": "N"},
    "jobs": {"type": workers, "metavar": "N",
             "help": f"runs at the same time (default: number of cores, here {cores()})"},
    "threads": {"type": workers, "default": 1, "metavar": "N", "help": "threads of PyTorch per run (default: 1)"},
    "device": {"choices": ("cpu", "cuda", "auto"), "help": "where to compute (default: cpu)"},
    "ray": {"metavar": "ADDRESS", "help": "over a Ray cluster: `local` starts one on this machine, HOST:PORT joins "
                                          "that of a head; see docs/privacy.md"},
    "by": {"type": names, "action": Extend, "default": (), "metavar": "GROUP,...",  # of evaluation/beyond_accuracy.py
           "help": "new-users, old-users, least-active, most-active, worst-decile, new-items, old-items, "
                   "popular-items, rare-items"},
    "metric": {"metavar": "NAME@K",
               "help": "default: that of the runs' validation, ndcg@20 on blocks and hit@10 on other streams"},
    "out": {"type": Path, "default": Path("results/figures"), "metavar": "DIR", "help": "default: ./results/figures"},
    "format": {**_LIST, "default": ("png", "pdf"), "help": "png, pdf, svg; repeatable (default: png,pdf)"},
    "dry-run": {"action": "store_true", "help": "show which runs there are and which have records"},
    "quiet": {"action": "store_true", "help": "no progress, only the result; otherwise a log gets a line a minute"},
    "json": {"action": "store_true", "help": "print one JSON object and nothing else on standard output"},
}
CELLS = ("methods", "backbones", "datasets")
POOL = ("data-dir", "results", "plugins", "jobs", "threads")  # where many runs are, and how many at the same time
DRAWN = ("out", "format")
OF_RECORDS = (  # of ``--tuned`` of commands that read records
    "of runs with the settings that `tune` wrote into DIR (without DIR: my-tuned/ in the folder of records, "
    "then the shipped results/tuned); without this option, of runs with default settings")


def add_options(parser: argparse._ActionsContainer, *shared: str, **helps: str) -> None:
    """Declare options that several commands have, in this order; then those of ``helps``, with a help text of the
    command's own. ``--by`` and ``--ray`` say after it what they take."""
    for name in (*shared, *helps):
        option, text = _OPTIONS[name], helps.get(name)
        if text and name in ("by", "ray"):
            text += f"{':' if name == 'by' else ''} {option['help']}"
        one = [f"--{name[:-1]}"] if name in CELLS else []
        parser.add_argument(f"--{name}", *one, **{**option, **({"help": text} if text else {})})


def add_methods(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare methods as words, and ``--methods`` as other commands have it; ``methods_of`` gives both."""
    parser.add_argument("words_of_methods", nargs="*", metavar="METHOD", help=f"{text}; also as --methods A,B")
    parser.add_argument("--methods", "--method", **_LIST | {"type": split_methods, "default": (),
                                                            "help": argparse.SUPPRESS})


def methods_of(args: argparse.Namespace) -> list[str]:
    """The methods that a command of ``add_methods`` was given; UserError if there are none."""
    methods = [*args.words_of_methods, *args.methods]
    if not methods:
        raise UserError(f"{args.command}: a method is missing, as {args.command} f3crec ft.")
    return methods


def where_of(args: argparse.Namespace) -> Where:
    """The folders that the options named, of a command that reads records or makes runs."""
    from ..runs.specs import Where

    if hasattr(args, "records"):
        return Where.of_records(args.records, args.plugins, getattr(args, "data_dir", None))
    return Where.of_runs(args.results, args.plugins, args.data_dir)


def tuned_of(args: argparse.Namespace) -> Tuned | None:
    from ..runs.specs import Tuned

    return Tuned.of(args.tuned, args.records if hasattr(args, "records") else args.results, where_of(args))


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    return parse_assignments(args.assignments, "--set")


def source_of(args: argparse.Namespace, registry: Registry, needs_runs: bool = True,
              say: Callable[[Corrupt], None] | None = None, **more: Any) -> Source:
    """The records that the options name. ``say``: told which are left out; ``more``: other fields of ``Source``."""
    from ..records.store import load_all
    from ..reports.selection import Source

    runs, failed = load_all(args.records, say or left_out()) if needs_runs else ([], [])
    return Source(runs, registry, tuned_of(args), where=where_of(args), failed=failed, **more)


def whole_runs(records: Path, asked: Callable[[Mapping[str, Any]], bool] = lambda head: True
               ) -> tuple[list[Run], list[Mapping[str, Any]]]:
    """The finished runs of a folder that are asked for, given their heads, without those whose files are damaged; and
    the heads of those that failed. Raises UserError if no run is left."""
    from ..records.store import load_all

    every, failed = load_all(records, left_out())
    runs = [run for run in every if asked(run.head) and run.intact]
    if not runs:
        raise UserError(f"no finished run of these in {records} can be read; name others, or another folder with "
                        f"--records.")
    return runs, list(filter(asked, failed))


def backbones_of(args: argparse.Namespace, registry: Registry) -> tuple[str, ...]:
    """Those of a command that needs one; UserError if there are none."""
    if args.backbones is None:
        raise UserError(f"--backbone is missing. Known: {', '.join(registry.names('backbone'))}.")
    return args.backbones


def found_by_cell(args: argparse.Namespace, registry: Registry, methods: Iterable[str]
                  ) -> tuple[dict[str, RunSpec], dict[tuple[str, str], dict[str, list[Run]]]]:
    """What each method stands for in the first cell; and by backbone and dataset, the runs of each method."""
    from ..reports.selection import checked_spec, find_all, require_different
    from ..runs.specs import RunSpec

    changes, tuned = settings_of(args), tuned_of(args)
    cells = {cell: {text: checked_spec(registry, RunSpec.of(text, *cell), changes, tuned) for text in methods}
             for cell in itertools.product(backbones_of(args, registry), args.datasets or ("ml-100k",))}
    for row in cells.values():  # one that needs no backbone is the same with each
        require_different(row.values())
    specs = [spec for row in cells.values() for spec in row.values()]
    runs_of = find_all(source_of(args, registry), specs, args.records)
    say_tuned(tuned, specs)
    return (next(iter(cells.values())),
            {cell: {text: runs_of[spec] for text, spec in row.items()} for cell, row in cells.items()})


def located(name: str, data_dir: Path | None, changes: Mapping[str, Any]) -> tuple[DatasetSource, StreamSettings]:
    """A dataset's file and the settings of its stream, with the changes of ``--set``."""
    from ..data.source import locate, spelled
    from ..runs.config import CORE_SETTINGS, layers, refuse_inactive

    dataset, overrides = spelled(name, data_dir), [("--set", changes)]
    parts = assemble(CORE_SETTINGS, layers(dataset, overrides), "data")
    refuse_inactive(parts, overrides)
    return locate(dataset, data_dir, parts[0]), parts[0]


def left_out() -> Callable[[Corrupt], None]:
    """Says on standard error which records are left out and why, the first few of them one by one."""
    lines = itertools.count()

    def say(error: Corrupt) -> None:
        if (line := next(lines)) <= _SHOWN:
            text = f"{error.wrong}." if line < _SHOWN else "more records, for reasons like these."
            print(for_terminal(f"left out: {text}"), file=sys.stderr)
    return say


def say_tuned(tuned: Tuned | None, specs: Iterable[RunSpec], quiet: bool = False) -> None:
    if tuned is not None and not quiet:
        print(tuned.used(specs), file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON object, as a line; None for infinite numbers (t where all differences are the same)."""
    print(json.dumps(json.loads(json.dumps(value), parse_constant=lambda infinite: None)))


def check_formats(formats: Iterable[str]) -> None:
    from ..reports.draw import FORMATS

    require_known("format", formats, FORMATS)


def save_figure(file: str, figure: Figure, out: Path, formats: Iterable[str]) -> list[Path]:
    """Write a figure in every format asked for; the paths. ``file``: its name without suffix. Raises UserError if a
    file cannot be written."""
    from ..reports.draw import save

    paths = [out / f"{file}.{kind}" for kind in formats]
    for path in paths:
        with writing(path):
            save(figure, path)
    return paths


@contextmanager
def writing(path: Path, helps: str = "use --out DIR") -> Iterator[None]:
    """While a file that a command shows is written: its folder is made, and an error says what helps."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {helps}.") from None


def interrupted(kept: str = "finished runs and rounds are kept, the same command goes on from there.") -> int:
    """Say that the user stopped the command; returns the exit status."""
    print(f"run_bench.py: interrupted; {kept}", file=sys.stderr)
    return 130
