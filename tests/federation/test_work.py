"""How many threads a run takes that was not told: by its size and the cores."""

import fedcl_bench as fb
import pytest
import torch
from helpers import threads

from fedcl_bench.api import seeds
from fedcl_bench.cli.main import main
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.federation.parts import numbers_at_once
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.trials import Pair

SMALL = {"k_core": 80, "rounds": 1, "blocks": 2}
JOB = ["--method", "ft", "--backbone", "fedmf", "--quiet", *(word for name, value in SMALL.items()
                                                            for word in ("--set", f"{name}={value}"))]


def test_the_size_of_the_work(registry, ml100k):
    """Of lists: samples of the largest block, each with a vector; of domains: a batch of histories."""
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("a test", {"dim": 16, "negatives": 3})])
    largest = max(len(step.train.values) for step in ml100k.steps)
    assert numbers_at_once(config.federation(ml100k)) == largest * 4 * 16 > SIZES.threaded
    pair = Pair(registry, "ft", "ffmsr", "domains", {"dim": 8, "max_length": 5, "batch_size": 2})
    assert numbers_at_once(pair.federation()) == 2 * 5 * 8 < SIZES.threaded


@pytest.fixture
def taken(monkeypatch, tmp_path):
    """The numbers of threads that runs were trained with, on four cores."""
    found, execute = [], seeds.execute

    def spied(config, load, *args, **options):
        def loaded():
            stream = load()
            found.append(torch.get_num_threads())
            return stream
        return execute(config, loaded, *args, **options)
    monkeypatch.setattr(seeds, "execute", spied)
    monkeypatch.chdir(tmp_path)
    with threads(4):
        yield found


def test_a_run_takes_what_is_chosen(taken, monkeypatch):
    """And its record says so; afterwards the process has as many as before."""
    monkeypatch.setattr(SIZES, "threaded", 1)
    run = fb.run("ft", "fedmf", progress=False, **SMALL)
    monkeypatch.setattr(SIZES, "threaded", 1 << 40)
    assert main(JOB + ["--seed", "1"]) == 0
    assert taken == [4, 1] and torch.get_num_threads() == 4
    assert run.runs[0].meta["environment"]["threads"] == 4
    assert main(JOB + ["--threads", "3", "--seed", "2"]) == 0
    again = fb.run("ft", "fedmf", progress=False, results="again", **SMALL)
    assert taken == [4, 1, 3, 1] and again.metrics.to_csv() == run.metrics.to_csv()  # no number depends on them
