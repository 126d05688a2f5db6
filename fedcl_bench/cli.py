"""The command line: ``run`` (the default), ``list``, ``data`` and ``doctor``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from .errors import RunFailed, UserError, unknown

EXAMPLES = """\
examples:
  run_bench.py --method f3crec --backbone fedmf              the main job: F3CRec on FedMF over MovieLens 100K
  run_bench.py --method ft --backbone fedmf --seeds 5        five seeds, mean and standard deviation
  run_bench.py --method f3crec --backbone fedmf --set eps=0.001 --set lambda_kd=0.01
  run_bench.py --method f3crec --backbone fedmf --set without=cc          an ablation of the paper
  run_bench.py --method kd --backbone fedmf --dataset ml-latest-small --data-dir ~/atomic
  run_bench.py list              methods, backbones and datasets
  run_bench.py list f3crec       the settings of one of them, their ranges and the paper's search
  run_bench.py data ml-100k      block statistics of a dataset
  run_bench.py doctor            check this installation

A run is kept under --results; the same command again shows the record, an interrupted one goes on where it stopped.
Exit status: 0 done, 1 the run failed, 2 something to fix in the command or the data, 130 interrupted.
"""


class _Parser(argparse.ArgumentParser):
    """argparse with one- or two-line errors and exit status 2."""

    def error(self, message: str):
        raise UserError(f"{message}.\nSee {self.prog} --help.")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plugins", action="append", default=[], metavar="DIR", type=Path,
                        help="also load the plugin files of this folder; repeatable")


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", type=Path,
                        help="folder with NAME/NAME.inter or NAME.inter (default: ./data, then RecBole's bundled files)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
                        help="change a setting; repeatable. `list METHOD` shows the names")


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"found '{text}', accepted: a whole number from 0")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found '{text}', accepted: a whole number from 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="run_bench.py", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES,
                     allow_abbrev=False,
                     description="Benchmarks of federated continual recommendation. Without a command: run.")
    commands = parser.add_subparsers(dest="command", metavar="{run,list,data,doctor}")

    run = commands.add_parser("run", help="run a method on a backbone and a dataset (the default)", epilog=EXAMPLES,
                              formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                              description="Run a method on a backbone and a dataset.")
    run.add_argument("--method", metavar="NAME", help="what makes it continual: ft, reg, kd, f3crec, ...")
    run.add_argument("--backbone", metavar="NAME", help="the federated recommender: fedmf, ...")
    run.add_argument("--dataset", metavar="NAME", help="default: ml-100k")
    run.add_argument("--seed", type=_seed, metavar="N", help="random seed (default: 0)")
    run.add_argument("--seeds", type=_count, metavar="K", help="run K seeds, from --seed on, and show mean and deviation")
    run.add_argument("--config", type=Path, metavar="FILE",
                     help="YAML file of `name: value` lines: method, backbone, dataset, seed, seeds, device, data_dir "
                          "and any setting; the command line wins")
    _add_dataset(run)
    run.add_argument("--device", choices=("cpu", "cuda", "auto"), help="where to compute (default: cpu)")
    run.add_argument("--threads", type=_count, metavar="N", help="threads of PyTorch (default: all cores)")
    run.add_argument("--results", type=Path, default=Path("results"), metavar="DIR",
                     help="folder of run records (default: ./results)")
    run.add_argument("--rerun", action="store_true", help="run again even if the record exists")
    run.add_argument("--quiet", action="store_true", help="no progress, only the result")
    run.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    _add_common(run)

    listing = commands.add_parser("list", help="show methods, backbones and datasets, or one in full",
                                  description="Show all methods, backbones and datasets, or one in full.")
    listing.add_argument("name", nargs="?", help="a method, backbone or dataset")
    _add_common(listing)

    data = commands.add_parser("data", help="show a dataset's blocks and compare them with the expected counts",
                               description="Show a dataset's blocks in the layout of F3CRec's Table 1 and compare them "
                                           "with the counts in its config.")
    data.add_argument("name", help="dataset")
    _add_dataset(data)

    doctor = commands.add_parser("doctor", help="check this installation and say what to fix",
                                 description="Check versions, data, device and the results folder.")
    doctor.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    _add_common(doctor)
    return parser


_FILE_KEYS = {"method": str, "backbone": str, "dataset": str, "seed": _seed, "seeds": _count, "device": str,
              "data_dir": Path}


def _merge_config_file(args: argparse.Namespace) -> dict[str, Any]:
    """Fill arguments that the command line left open from --config; return the settings of the file."""
    if args.config is None:
        return {}
    from .datasets import read_yaml

    settings = read_yaml(args.config)
    for name, convert in _FILE_KEYS.items():
        if name in settings:
            value = settings.pop(name)
            try:
                value = convert(str(value))
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{args.config}, field '{name}': {error}.") from None
            if getattr(args, name) is None:
                setattr(args, name, value)
    if args.device not in (None, "cpu", "cuda", "auto"):
        raise UserError(f"{args.config}, field 'device': found '{args.device}', accepted: cpu, cuda, auto.")
    return settings


@contextmanager
def _stop_between_rounds() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question asked after every round; a second Ctrl-C stops at once."""
    asked = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(args: argparse.Namespace) -> int:
    from .config import make_config, resolve_device
    from .datasets import load_stream
    from .progress import Display
    from .registry import discover
    from .report import combined, show_result
    from .runner import Interrupted, execute
    from .settings import parse_assignments

    from_file = _merge_config_file(args)
    registry = discover(args.plugins)
    for kind in ("method", "backbone"):
        if getattr(args, kind) is None:
            raise UserError(f"--{kind} is missing. Known: {', '.join(registry.names(kind))}.\n"
                            f"The main job is: run_bench.py --method f3crec --backbone fedmf")
    if args.threads:
        import torch
        torch.set_num_threads(args.threads)
    overrides = [(str(args.config), from_file), ("--set", parse_assignments(args.assignments, "--set"))]
    device = resolve_device(args.device or "cpu")
    first = args.seed or 0
    configs = [make_config(registry, args.method, args.backbone, args.dataset or "ml-100k", seed, overrides,
                           args.data_dir, device) for seed in range(first, first + (args.seeds or 1))]

    streams = []

    def load():
        if not streams:
            streams.append(load_stream(configs[0].source, configs[0].stream))
        return streams[0]

    outcomes = []
    try:
        with _stop_between_rounds() as stop:
            for config in configs:
                with Display(config, quiet=args.quiet) as display:
                    outcomes.append(execute(config, load, args.results, args.rerun, display.update, display.warn,
                                            display.note, stop))
    except Interrupted as error:
        print(f"run_bench.py: {error}", file=sys.stderr)
        return 130
    result = combined(outcomes) if args.seeds else outcomes[0]
    if args.json:
        json.dump(result, sys.stdout, allow_nan=False)
        print()
    else:
        show_result(configs[0], result)
    return 0


def _list(args: argparse.Namespace) -> int:
    from .config import CORE_SETTINGS
    from .datasets import configured, load_config
    from .registry import discover
    from .report import show_dataset, show_listing, show_plugin

    registry = discover(args.plugins)
    if args.name is None:
        show_listing(registry, {name: load_config(name) for name in configured()})
        return 0
    found = [plugin for (kind, name), plugin in registry.plugins.items() if name == args.name]
    if found:
        for plugin in found:
            show_plugin(plugin, CORE_SETTINGS)
    elif args.name in configured():
        show_dataset(args.name, load_config(args.name), configured()[args.name])
    elif args.name in registry.broken:
        raise UserError(f"'{args.name}' cannot be loaded: {registry.broken[args.name]}")
    else:
        raise unknown("method, backbone or dataset", args.name, [n for _, n in registry.plugins] + list(configured()))
    return 0


def _data(args: argparse.Namespace) -> int:
    from .config import CORE_SETTINGS, refuse_idle
    from .datasets import load_config, load_stream, locate
    from .report import show_statistics
    from .settings import assemble, parse_assignments
    from .stream import statistics

    config = load_config(args.name)
    changes = parse_assignments(args.assignments, "--set")
    settings = assemble(CORE_SETTINGS, [(f"dataset_configs/{args.name}.yaml", config.settings), ("--set", changes)],
                        "data")[0]
    refuse_idle(settings, [("--set", changes)])
    source = locate(args.name, args.data_dir, settings)
    stream = load_stream(source, settings)
    return show_statistics(source, settings, statistics(stream), config.expected if not changes else {})


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    return examine(args.results, args.plugins)


COMMANDS = {"run": _run, "list": _list, "data": _data, "doctor": _doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] not in COMMANDS and arguments[0] not in ("-h", "--help"):
        if not arguments[0].startswith("-"):
            arguments.insert(0, "")  # argparse would list choices; name the nearest instead
        else:
            arguments.insert(0, "run")
    try:
        if arguments and arguments[0] == "":
            raise unknown("command", arguments[1], COMMANDS)
        parser = build_parser()
        if not arguments:
            parser.print_help()
            return 0
        args = parser.parse_args(arguments)
        return COMMANDS[args.command](args)
    except UserError as error:
        print(f"run_bench.py: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"run_bench.py: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "fedcl_bench").split(".")[0] == "fedcl_bench":
            raise
        print(f"run_bench.py: the package '{error.name}' is not installed for {sys.executable}.\n"
              f"Install everything with: python -m pip install -c constraints.txt -e .", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_bench.py: interrupted; finished blocks are kept, the same command goes on from there.",
              file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        return 0
