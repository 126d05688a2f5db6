"""Every option of every command with values that it does not expect, taken from the argument parser itself.

A new option is covered without being named here. Whatever it is given, a command does its work, or ends with status 1
or 2, at most four lines and no traceback, in seconds.
"""

import argparse
import functools
import hashlib
import signal
from pathlib import Path

import pytest
from helpers import ROOT

from fedcl_bench.cli.main import build_parser, main
from fedcl_bench.errors import UserError

RECORDS = str(ROOT / "results" / "published" / "f3crec-authors-split")
JOB = ["--set", "rounds=1", "--set", "k_core=80"]
SECONDS = 60  # most that a command may take, on a busy machine
# Of each command, options with which it does little, in a folder of its own.
WORK = {
    "run": ["--method", "ft", "--backbone", "fedmf", "--quiet", *JOB],
    "grid": ["--methods", "ft", "--backbones", "fedmf", "--dry-run", *JOB],
    "tune": ["--methods", "ft", "--backbones", "fedmf", "--dry-run", *JOB],
    "tables": ["--table", "1", "--records", RECORDS],
    "compare": ["ft", "kd", "--backbone", "fedmf", "--records", RECORDS],
    "figures": ["--figure", "4", "--records", RECORDS, "--out", "drawn", "--format", "png"],
    "sensitivity": ["ft", "--backbone", "fedmf", "--dry-run", *JOB],
    "report": [RECORDS, "--out", "page.html"], "reproduction": ["--records", RECORDS, "--table", "1"],
    "audit": ["--method", "ft", "--backbone", "fedmf", "--rounds", "1", "--clients", "2", "--noise", "0", "--quiet",
              *JOB],
    "pack": ["--out", "packed", "--results", RECORDS], "list": [], "check": ["ft", "--with", "nobody"],
    "new-plugin": ["method", "mine", "--plugins", "mine"], "doctor": ["--quick"], "data show": ["mine.inter"],
    "data convert": ["made", "--csv", "table.csv", "--user", "u", "--item", "i", "--time", "t"],
    "data download": ["ml-100k"],
    "data synth": ["made", "--users", "20"], "data prepare": ["mine.inter"]}
VALUES = ("", " ", "-1", "0", "010", "1:30", "9" * 25, "1e400", "nan", "../x", "x" * 5000, "[/b]", "=1+1", "ä",
          "\udcff", "a\nb", "\x1b[2J", "{}", ",", "a,,b", "a=b", "=", "a=b=c", "lr=abc", "rounds=1", "split_file=[/b]",
          "split_file=[/b],x", "all", "%s%n", "1,2", "1-", "3-1", "ft:", "ft:x=", "f3crec:lr=x", "recbole:",
          "recbole:X", "file", "folder", "file/x", "nowhere/x/y", "link", "binary", "empty", "./folder", "table.csv",
          "mine.inter")


@functools.cache
def options():
    """Pairs (command, action) of all that take a value."""
    def below(parser, words=()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    yield from below(child, (*words, name))
            elif action.nargs != 0:
                yield " ".join(words), action
    return tuple(below(build_parser()))


def arguments(command, action, value):
    """A command line in which one option, or one argument without a name, is this value."""
    base = list(WORK[command])
    if action.option_strings:
        base.append(f"{action.option_strings[0]}={value}")
    else:
        named = [other for known, other in options() if known == command and not other.option_strings]
        place = named.index(action)
        base[place:place + 1] = [value if value[:1] != "-" else f"./{value}"]
    return [*command.split(), *base]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of all kinds, and nothing that is fetched, drawn or tried at length."""
    monkeypatch.chdir(tmp_path)
    rows = [(u, i, 100 * u + i) for u in range(4) for i in range(20)]
    Path("mine.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n"
                                  + "".join(f"{u}\t{i}\t{t}\n" for u, i, t in rows))
    Path("table.csv").write_text("u,i,t\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    Path("file").write_text("text: of no kind\n")
    Path("empty").touch()
    Path("binary").write_bytes(bytes(range(256)) * 20)
    Path("folder").mkdir()
    Path("link").symlink_to("nowhere")

    def refuse(*args, **options):
        raise UserError("it would begin now.")
    monkeypatch.setattr("fedcl_bench.data.archives.fetch", refuse)
    monkeypatch.setattr("fedcl_bench.workers.cluster.joined", refuse)
    return tmp_path


def ends_well(words, capsys):
    """What is wrong with how a command ends; empty if nothing is."""
    def hangs(number, frame):
        raise TimeoutError
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        status = main(words)
    except SystemExit as stopped:
        status = stopped.code
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    lines = capsys.readouterr().err.splitlines()
    if status not in (0, 1, 2):
        return f"status {status}"
    said = "\n".join(lines)
    return "" if status == 0 or 0 < len(lines) <= 4 and "Traceback" not in said and "\x1b" not in said else said[:2000]


def chosen(name, value, part):
    """Whether a value is in the part of all that every run of the tests tries."""
    return hashlib.blake2b(f"{name} {value}".encode("utf-8", "surrogateescape")).digest()[0] % part == 0


def check(command, part, capsys):
    wrong = []
    for known, action in options():
        for value in VALUES if known == command else ():
            if chosen(f"{command} {action.dest}", value, part):
                words = arguments(command, action, value)
                if fault := ends_well(words, capsys):
                    wrong.append((words[-3:] if len(value) < 100 else action.dest, fault))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_command_has_its_work():
    assert {command for command, _ in options()} == set(WORK)


@pytest.mark.parametrize("command", WORK)
def test_a_part_of_the_values(command, folder, capsys):
    assert main([*command.split(), *WORK[command]]) in (0, 1, 2)
    capsys.readouterr()
    check(command, 20, capsys)


@pytest.mark.long
@pytest.mark.parametrize("command", WORK)
def test_all_values(command, folder, capsys):
    check(command, 1, capsys)
