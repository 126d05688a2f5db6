"""A working folder of its own for every test, and commands called in this process."""

import json

import pytest

from fedcl_bench.cli.main import main


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def output(capsys):
    """Runs a command that must succeed; what it printed on standard output."""
    def run(*arguments):
        assert main(list(arguments)) == 0, capsys.readouterr().err
        return capsys.readouterr().out
    return run


@pytest.fixture
def run_json(capsys):
    """Runs a command with ``--json``; its object, and what it printed on standard error."""
    def run(*arguments):
        assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
        captured = capsys.readouterr()
        (line,) = captured.out.splitlines()
        return json.loads(line), captured.err
    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail; its message of one or two lines, or three of a run that failed (status 1)."""
    def run(*arguments, status=2):
        capsys.readouterr()
        assert main(list(arguments)) == status
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        lines = [line for line in captured.err.strip().splitlines() if ", seed 0" not in line]  # a run's heading
        assert len(lines) in ((1, 2) if status == 2 else (2, 3)), captured.err
        return " ".join(" ".join(lines).split())
    return run
