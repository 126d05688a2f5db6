"""What a run says while it goes on: a line a minute where standard error is no terminal. The clock is given."""

from types import SimpleNamespace

import pytest

from fedcl_bench.api.progress_bars import Display
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.config import make_config

STREAM = SimpleNamespace(domains=(), per_step=1, steps=[SimpleNamespace(interactions=n) for n in (200, 100, 100)])


def curve(rounds):
    return tuple({"step": 0, "round": r, "valid": 0.1 + r / 100, "train_seconds": 1.0, "evaluate_seconds": 0.0}
                 for r in range(rounds))


@pytest.fixture
def clock():
    """The seconds that displays read."""
    return [0.0]


@pytest.fixture
def display(registry, clock):
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("a test", {"rounds": 10})])
    return lambda **options: Display(config, clock=lambda: clock[0], **options)


def test_a_log_gets_a_line_a_minute(display, clock, capsys):
    """Rounds of 25 s: the third and the fifth are the first after a minute each, and the block's end has its own."""
    shown = display()
    for round_ in range(1, 6):
        clock[0] += 25.0
        shown.update(STREAM, Progress(round=round_, curve=curve(round_)))
    clock[0] += 100.0
    shown.update(STREAM, Progress(round=6, trained=True, curve=curve(6)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0] == (  # 2 rounds took 50 s, 7 are left, and as many as 10 in later blocks
        "  block 0 of 0-2: 3 of at most 10, validation ndcg@20 0.1200, best 0.1200, at most 7:05 left, 1:15 elapsed")
    assert lines[1].startswith("  block 0: 6 rounds in 6.0 s, best validation")


@pytest.mark.parametrize("quiet", [False, True])
def test_within_a_long_round_and_before_the_first_too(display, clock, capsys, quiet):
    shown = display(quiet=quiet)
    for clock[0], done in ((0.0, 0.1), (61.0, 0.5)):
        shown.update(STREAM, Progress(fraction_done=done))
    with display(quiet=quiet).counting("texts", 9) as advance:
        for clock[0] in (62.0, 122.0):
            advance(2)
    assert capsys.readouterr().err.splitlines() == ([] if quiet else [
        "  block 0 of 0-2: 0 of at most 10, round 1: 50%, 1:01 elapsed", "  texts: 4 of 9, 1:01 elapsed"])
