"""Options and behaviour that several commands share."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterable, Iterator

from ...api.stopping import stop_between_rounds as stop_between_rounds
from ...core.errors import Corrupt, UserError, unknown
from ...core.text import for_terminal, quoted
from ...core.settings import LARGEST, LARGEST_SEED, MOST_SEEDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...runs.registry import Registry
    from ...runs.specs import RunSpec, Tuned, Where
_SHOWN = 3  # records that are left out and named



def add_plugins(parser: argparse.ArgumentParser) -> None:
    """``--plugins``."""
    parser.add_argument("--plugins", action="append", default=[], metavar="DIR", type=Path,
                        help="also load the plugin files of this folder; repeatable")


def add_results(parser: argparse.ArgumentParser) -> None:
    """``--results``."""
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR",
                        help="folder of run records (default: ./results)")


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """``--data-dir``."""
    parser.add_argument("--data-dir", metavar="DIR", type=Path,
                        help="folder with NAME/NAME.inter or NAME.inter (default: ./data, then RecBole's bundled "
                             "files)")


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """``--data-dir`` and ``--set``."""
    add_data_dir(parser)
    add_set(parser, "change a setting; repeatable. `list METHOD` shows the names")


def add_set(parser: argparse.ArgumentParser, help: str) -> None:
    """``--set``."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments", help=help)


def add_cells(parser: argparse.ArgumentParser) -> None:
    """``--methods``, ``--backbones`` and ``--datasets``."""
    for name, example in (("method", "ft,reg,kd,f3crec"), ("backbone", "fedmf"), ("dataset", "ml-100k")):
        paths = ", or paths of atomic files" if name == "dataset" else ""
        parser.add_argument(f"--{name}s", f"--{name}", type=names, action=Extend, metavar="A,B",
                            help=f"{name}s, as {example}{paths}; repeatable")


def add_records(parser: argparse.ArgumentParser) -> None:
    """``--records``."""
    parser.add_argument("--records", type=Path, default=Path("results"), metavar="DIR",
                        help="a results folder or a folder of compact records (default: ./results)")


def add_tuned(parser: argparse.ArgumentParser) -> None:
    """``--tuned`` of commands that read records."""
    parser.add_argument("--tuned", nargs="?", const=True, type=Path, metavar="DIR",
                        help="of runs with the settings that `tune` wrote into DIR (without DIR: my-tuned/ in the "
                             "folder of records, then the shipped results/tuned); without this option, of runs with "
                             "default settings")


def add_tuned_runs(parser: argparse.ArgumentParser) -> None:
    """``--tuned`` of commands that run something."""
    parser.add_argument("--tuned", nargs="?", type=Path, const=True, metavar="DIR",
                        help="settings from `tune`, kept in DIR (without DIR: my-tuned/ in the results folder, then "
                             "the shipped results/tuned)")


def results_where(args: argparse.Namespace) -> Where:
    """The folders that the options of a command that makes runs named."""
    from ...runs.specs import Where

    return Where(tuple(args.plugins), args.data_dir, args.results if args.results != Path("results") else None)


def records_where(args: argparse.Namespace) -> Where:
    """The folders that the options of a command that reads records named."""
    from ...runs.specs import Where

    return Where.of_records(args.records, args.plugins, getattr(args, "data_dir", None))


class LeftOut:
    """Says on standard error which records are left out and why, the first few of them one by one."""

    def __init__(self):
        self._count = 0

    def __call__(self, error: Corrupt) -> None:
        self._count += 1
        if self._count <= _SHOWN:
            print(for_terminal(f"left out: {error.wrong}."), file=sys.stderr)
        elif self._count == _SHOWN + 1:
            print("left out: more records, for reasons like these.", file=sys.stderr)


def say_tuned(tuned: Tuned | None, specs: Iterable[RunSpec], quiet: bool = False) -> None:
    """Say on standard error which tuned settings the specs have."""
    if tuned is not None and not quiet:
        print(tuned.used(specs), file=sys.stderr)


def add_paper(parser: argparse.ArgumentParser, paper: str, table: str) -> None:
    """``--paper`` and ``--table`` of commands that run what a paper needs, with the help texts of both."""
    parser.add_argument("--paper", metavar="NAME", help=paper)
    parser.add_argument("--table", type=counts, action=Extend, metavar="N", help=table)


def add_pool(parser: argparse.ArgumentParser) -> None:
    """Where many runs find their data and plugins, where they are kept, and how many run at the same time."""
    add_data_dir(parser)
    add_results(parser)
    add_plugins(parser)
    parser.add_argument("--jobs", type=workers, metavar="N",
                        help=f"runs at the same time (default: number of cores, here {cores()})")
    parser.add_argument("--threads", type=workers, default=1, metavar="N",
                        help="threads of PyTorch per run (default: 1)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), help="where to compute (default: cpu)")


def add_ray(parser: argparse.ArgumentParser, what: str) -> None:
    """``--ray``."""
    parser.add_argument("--ray", metavar="ADDRESS",
                        help=f"spread {what} over a Ray cluster: `local` starts one on this machine, HOST:PORT joins "
                             f"that of a head; see docs/privacy.md")


def add_by(parser: argparse._ActionsContainer, help: str) -> None:
    """``--by``; the groups are those of ``evaluation/beyond_accuracy.py``, which imports PyTorch."""
    parser.add_argument("--by", type=names, action=Extend, default=(), metavar="GROUP,...",
                        help=f"{help}: new-users, old-users, least-active, most-active, worst-decile, new-items, "
                             f"old-items, popular-items, rare-items")


def add_drawn(parser: argparse.ArgumentParser) -> None:
    """``--out`` and ``--format`` of commands that draw figures."""
    parser.add_argument("--out", type=Path, default=Path("results/figures"), metavar="DIR",
                        help="default: ./results/figures")
    parser.add_argument("--format", type=names, action=Extend, default=("png", "pdf"), metavar="A,B",
                        help="png, pdf, svg; repeatable (default: png,pdf)")


def check_formats(formats: Iterable[str]) -> None:
    """Raise UserError for a format that figures cannot have."""
    from ...reports.draw import FORMATS

    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)


def save_figure(file: str, figure: Figure, out: Path, formats: Iterable[str]) -> list[Path]:
    """Write a figure in every format asked for; the paths.

    Args:
        file: its name without suffix.

    Raises:
        UserError: if a file cannot be written.
    """
    from ...reports.draw import save

    paths = [out / f"{file}.{kind}" for kind in formats]
    for path in paths:
        with writing(path):
            save(figure, path)
    return paths


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While a file that a command shows is written: its folder is made, and an error says what helps."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); use --out DIR.") from None


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """``--quiet`` and ``--json``."""
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")


def interrupted() -> int:
    """Say that runs were stopped between rounds; returns the exit status."""
    print("run_bench.py: interrupted; finished runs and rounds are kept, the same command goes on from there.",
          file=sys.stderr)
    return 130


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """argparse type of positive numbers with commas."""
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


def split_federated_recommender(args: argparse.Namespace, registry: Registry) -> None:
    """``--method pfedrec`` is FT on that backbone: a federated recommender that is no continual method.

    Names of ``--method`` and ``--backbone`` are put into their spelling.
    """
    for kind in ("method", "backbone"):
        if name := getattr(args, kind):
            setattr(args, kind, registry.spelled(kind, name))
    if args.method and ("method", args.method) not in registry.plugins:
        args.method = registry.spelled("backbone", args.method)
    name = args.method
    if not registry.is_recommender(name):
        return
    if args.backbone not in (None, name):
        raise UserError(f"--method {name} names a backbone and stands for --method ft --backbone {name}; found "
                        f"--backbone {args.backbone} beside it, leave one of the two out.")
    args.method, args.backbone = "ft", name
