"""The command line: finds the command, and turns errors into one or two lines and an exit status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Sequence, TextIO

from ..errors import RunFailed, UserError, unknown
from ..files import closed_to_others
from ..names import for_terminal
from ..ops.memory import importing
from ..runs.faults import named
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
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of ASCII shows ± as \xb1
    try:
        with closed_to_others():
            try:
                return _status(list(sys.argv[1:] if arguments is None else arguments))
            finally:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        return 0
    except OSError as error:
        _give_up(sys.stdout)
        _say(f"{error.filename or 'output or a file'}: cannot be read or written ({error.strerror or error}).")
        return 2


def _status(arguments: list[str]) -> int:
    """Run the command line; its errors become messages and exit statuses."""
    try:
        if not arguments:
            build_parser().print_help()
            return 0
        args = parse(arguments)
        if args.command in _READERS:
            with importing():
                importlib.import_module("fedcl_bench.reports.tables")
        with named():
            return args.execute(args)
    except UserError as error:
        _say(str(error))
        return 2
    except RunFailed as error:
        _say(str(error))
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "fedcl_bench").split(".")[0] == "fedcl_bench":
            raise
        _say(f"the package '{error.name}' is not installed for {sys.executable}.\n"
             f"Install everything with: python -m pip install -c constraints.txt -e .")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; finished blocks are kept, the same command goes on from there.")
        return 130


def _say(text: str) -> None:
    """A message on standard error, if that can be written."""
    try:
        print(for_terminal(f"run_bench.py: {text}"), file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    """Lead what a stream still holds nowhere, so that Python does not fail at it when it ends."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
