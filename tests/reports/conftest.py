"""Records that tests of several kinds of reports read."""

import fcntl
import os

import pytest

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.reports import draw
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import execute


@pytest.fixture(scope="session")
def records_of_two_rounds(registry, tmp_path_factory):
    """A folder whose ``results`` hold FT, KD and F3CRec with ``rounds=2`` on FedMF, seeds 0 and 1, and on FedNCF, seed
    0, and F3CRec on FedMF with two more values of eps, on the densest part of ML-100K (``k_core=60``). Not to be
    written to."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # that of all workers: whoever is first trains, and the others find it
        folder = folder.parent
    folder = folder / "records"
    folder.mkdir(exist_ok=True)
    runs = [(m, b, s, {}) for m in ("ft", "kd", "f3crec") for b, s in (("fedmf", 0), ("fedmf", 1), ("fedncf", 0))]
    runs += [("f3crec", "fedmf", 0, {"eps": eps}) for eps in (0.001, 0.009)]
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for method, backbone, seed, settings in runs:
            config = make_config(registry, method, backbone, "ml-100k", seed,
                                 [("test", {"rounds": 2, "k_core": 60, **settings})])
            execute(config, lambda: load_stream(config.source, config.stream), folder / "results")
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures that commands draw, by their files, which are left empty: to render one takes long."""
    figures = {}

    def save(figure, path):
        figures[path.name] = figure
        path.write_bytes(b"")
    monkeypatch.setattr(draw, "save", save)
    return figures


@pytest.fixture
def at_records(records_of_two_rounds, monkeypatch):
    monkeypatch.chdir(records_of_two_rounds)
