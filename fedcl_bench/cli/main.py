"""The command line: finds the command, and turns errors into one or two lines and an exit status."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import os
import sys
from types import ModuleType
from typing import Sequence, TextIO

from ..core.errors import RunFailed, UserError, ran_out, unknown
from ..core.files import NO_SPACE, no_space
from ..core.text import for_terminal
from ..core.tuning import importing
from ..core.version import __version__
from .commands import COMMANDS

# What takes half the time of a command, or of an action of `data`: it is imported without Python's search for
# unreachable objects.
_IMPORTS = {**dict.fromkeys(("tables", "compare", "headroom", "figures", "report", "checklist", "pack"),
                            "fedcl_bench.reports.tables"),
            **dict.fromkeys(("grid", "tune", "sensitivity", "audit", "check", "show", "prepare", "submit", "verify"),
                            "fedcl_bench.runs.config")}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}.\nSee {self.prog} --help.")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.commands.{name.replace('-', '_')}")


def build_parser(names: tuple[str, ...] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The command line; only these commands, whose modules are imported, have their options."""
    looks = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="run_bench.py", epilog=_module("run").EXAMPLES if "run" in names else None, **looks,
                     description="Benchmarks of federated continual recommendation. Without a command: run.")
    parser.add_argument("--version", action="version", version=f"fedcl_bench {__version__}",
                        help="show the version of the suite and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="{" + ",".join(COMMANDS) + "}")
    for name, text in COMMANDS.items():
        module = _module(name) if name in names else None
        command = subparsers.add_parser(name, help=text, description=getattr(module, "__doc__", None),
                                        epilog=getattr(module, "EXAMPLES", None), **looks)
        if module:
            module.add(command)
            command.set_defaults(execute=module.run, parser=command)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, and its ``words``; ``run`` may be left out, as may the action of ``data``. Raises
    UserError for an unknown command or option."""
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        error = unknown("command", arguments[0], COMMANDS)  # argparse would list choices; name the nearest
        raise UserError(f"{error} Methods and backbones stand behind options, as --method f3crec --backbone fedmf.")
    if arguments and arguments[0] not in (*COMMANDS, "-h", "--help", "--version"):
        arguments.insert(0, "run")
    name = arguments[0] if arguments[:1] and arguments[0] in COMMANDS else "run"
    if name == "data":
        arguments[1:] = _module(name).with_action(arguments[1:])
    parser = build_parser((name,))
    args, others = parser.parse_known_args(arguments, argparse.Namespace(words=arguments))
    if others:
        raise _unrecognized(getattr(args, "parser", parser), others)
    return args


def _unrecognized(parser: argparse.ArgumentParser, words: Sequence[str]) -> UserError:
    """The error for words that a command does not take: the nearest option, or the setting that was meant."""
    name = words[0].partition("=")[0]
    options = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.75) if name.startswith("--") else []
    hint = f"Did you mean '{near[0]}'? " if near else ""
    if not hint and not name.startswith("-"):
        hint = "Words belong behind an option, as --method ft. " if "--method" in options else ""
    elif not hint and "--set" in options:
        from ..runs.config import CORE_SETTINGS

        setting = name.strip("-").replace("-", "_")
        if any(setting == field.name for cls in CORE_SETTINGS for field in dataclasses.fields(cls)):
            hint = f"'{setting}' is a setting: --set {setting}=VALUE. "
    return UserError(f"unrecognized arguments: {' '.join(words)}.\n{hint}See {parser.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    if sys.stderr is None:  # closed by who called; the next file would get its number
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        _say("standard output: is closed, accepted: an open one; to see nothing, add > /dev/null.")
        return 2
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of ASCII shows ± as \xb1
    try:
        try:
            return _status(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        return 0
    except OSError as error:
        _give_up(sys.stdout)
        where = error.filename or "output or a file"
        _say(no_space(where, error) if error.errno in NO_SPACE else
             f"{where}: cannot be read or written ({error.strerror or error}).")
        return 2


def _status(arguments: list[str]) -> int:
    """Run the command line; its errors become messages and exit statuses."""
    try:
        if not arguments:
            build_parser(("run",)).print_help()
            return 0
        return _execute(parse(arguments))
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
    except Exception as error:
        if not ran_out(error):  # before a run or after it, which says more
            raise
        _say(f"out of memory ({' '.join(str(error).split())[:120] or 'no more is known'}).\n"
             f"What helps: a larger machine, fewer users and items; see ulimit -v for a limit of this shell.")
        return 2


def _execute(args: argparse.Namespace) -> int:
    if module := _IMPORTS.get(getattr(args, "action", args.command)):
        with importing():
            importlib.import_module(module)
    try:
        return args.execute(args) or 0
    except (UserError, RunFailed):
        raise
    except (Exception, SystemExit):
        if "fedcl_bench.runs.registry" not in sys.modules:  # no plugin was imported, which takes a second
            raise
        from ..runs.plugin_errors import named

        with named():
            raise


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
