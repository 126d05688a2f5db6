"""The command line: finds the command, and turns errors into one or two lines and an exit status."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Sequence

from ..errors import RunFailed, UserError, ran_out, unknown
from ..files import NO_SPACE, no_space
from ..ops.memory import importing
from ..version import __version__
from . import commands
from .commands.data import with_action

_READERS = ("tables", "compare", "figures", "reproduction")  # of records; nearly half their time goes into imports


class _Parser(argparse.ArgumentParser):
    """argparse with one- or two-line errors and exit status 2."""

    def error(self, message: str):
        raise UserError(f"{message}.\nSee {self.prog} --help.")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    modules = {name: importlib.import_module(f"{commands.__name__}.{name.replace('-', '_')}")
               for name in commands.NAMES}
    parser = _Parser(prog="run_bench.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                     epilog=modules["run"].EXAMPLES, allow_abbrev=False,
                     description="Benchmarks of federated continual recommendation. Without a command: run.")
    parser.add_argument("--version", action="version", version=f"fedcl_bench {__version__}",
                        help="show the version of the suite and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="{" + ",".join(commands.NAMES) + "}")
    for name, module in modules.items():
        module.add(subparsers)
        subparsers.choices[name].set_defaults(execute=module.run)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; ``run`` may be left out, as may the action of ``data``.

    Raises:
        UserError: for an unknown command or option.
    """
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands.NAMES:
        raise unknown("command", arguments[0], commands.NAMES)  # argparse would list choices; name the nearest
    if arguments and arguments[0] not in (*commands.NAMES, "-h", "--help", "--version"):
        arguments.insert(0, "run")
    if arguments[:1] == ["data"]:
        arguments[1:] = with_action(arguments[1:])
    return build_parser().parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments:
            build_parser().print_help()
            return 0
        args = parse(arguments)
        if args.command in _READERS:
            with importing():
                importlib.import_module("fedcl_bench.reports.tables")
        return args.execute(args)
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
    except Exception as error:
        if ran_out(error):  # before a run or after it, which says more
            text = f"out of memory ({' '.join(str(error).split())[:120] or 'no more is known'}).\n" \
                   f"What helps: a larger machine, fewer users and items; see ulimit -v for a limit of this shell."
        elif isinstance(error, OSError) and error.errno in NO_SPACE:
            text = str(no_space(error.filename or "the disk", error))
        else:
            raise
        print(f"run_bench.py: {text}", file=sys.stderr)
        return 2
