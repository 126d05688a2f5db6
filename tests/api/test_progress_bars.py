"""What a run says while it goes on: a line a minute where standard error is no terminal. The clock is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedcl_bench.api.progress_bars import Display
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover

STREAM = SimpleNamespace(domains=(), per_step=1, steps=[SimpleNamespace(interactions=n) for n in (200, 100, 100)])


def curve(rounds, step=0):
    return tuple({"step": step, "round": r, "valid": 0.1 + r / 100, "train_seconds": 1.0, "evaluate_seconds": 0.0}
                 for r in range(rounds))


@pytest.fixture
def config():
    return make_config(discover(), "ft", "fedmf", "ml-100k", overrides=[("a test", {"rounds": 10})])


def test_a_log_gets_a_line_a_minute(config, capsys):
    """Rounds of 25 s: the third and the fifth are the first after a minute each, and the block's end has its own."""
    now = [0.0]
    display = Display(config, clock=lambda: now[0])
    for round_ in range(1, 6):
        now[0] += 25.0
        display.update(STREAM, Progress(round=round_, curve=curve(round_)))
    now[0] += 100.0
    display.update(STREAM, Progress(round=6, trained=True, curve=curve(6)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0] == (  # 2 rounds took 50 s, 7 are left, and as many as 10 in later blocks
        "  block 0 of 0-2: 3 of at most 10, validation ndcg@20 0.1200, best 0.1200, at most 7:05 left, 1:15 elapsed")
    assert lines[1].startswith("  block 0: 6 rounds in 6.0 s, best validation")


def test_within_a_long_round_too(config, capsys):
    now = [0.0]
    display = Display(config, clock=lambda: now[0])
    display.update(STREAM, Progress(fraction_done=0.1))
    now[0] = 61.0
    display.update(STREAM, Progress(fraction_done=0.5))
    assert capsys.readouterr().err == "  block 0 of 0-2: 0 of at most 10, round 1: 50%, 1:01 elapsed\n"


def test_work_before_the_first_round_too(config, capsys):
    now = [0.0]
    with Display(config, clock=lambda: now[0]).counting("texts", 9) as advance:
        for now[0] in (1.0, 61.0):
            advance(2)
    assert capsys.readouterr().err == "  texts: 4 of 9, 1:01 elapsed\n"


def test_quiet_is_quiet(config, capsys):
    now = [0.0]
    display = Display(config, quiet=True, clock=lambda: now[0])
    for now[0] in (100.0, 200.0):
        display.update(STREAM, Progress(round=1, curve=curve(1)))
    with display.counting("texts", 9) as advance:
        now[0] = 900.0
        advance(1)
    assert capsys.readouterr().err == ""
