"""Shared fixtures: the real ML-100K stream, and the authors' split where it is on the machine."""

import functools
import gc
import os
import sys
from pathlib import Path

import hypothesis
import pytest
import threadpoolctl
import torch
from helpers import SameProcess

from fedcl_bench.cli import main
from fedcl_bench.core.tuning import quick_optimisers
from fedcl_bench.data import datasets, source
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.files.recbole_files import bundled
from fedcl_bench.federation import loop
from fedcl_bench.records import published
from fedcl_bench.runs import config, summary, registry as registry_of_plugins
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.experiments import pool

torch.manual_seed(0)
torch.set_num_threads(1)  # operations of tests are short; threads that wait for each other take ten times as long
threadpoolctl.threadpool_limits(1)  # NumPy's likewise
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of child processes
# Else each worker of xdist and each child process would compile the tests and the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A busy machine is no failure, and a failure must come back on the next run.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("suite")
gc.disable()  # until all tests are collected
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_finish():
    """What is imported by now is never searched for garbage."""
    gc.freeze()
    gc.set_threshold(20_000)  # else the search takes a twentieth of the time
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Tests neither use nor change the user's cache of plugins' metadata."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCL_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def read_once():
    """The ML-100K that RecBole bundles is parsed once for each set of filters, and cut into a stream once for each set
    of settings, as hundreds of tests run on it."""
    original, folder, streams = datasets.load_interactions, bundled("ml-100k"), {}
    build, fingerprint = datasets.build_stream, source.fingerprint
    of_bundled = functools.cache(fingerprint)

    @functools.cache
    def kept(path, k_core, fields, keep, drop_events):
        return original(path, k_core, dict(fields), dict(keep), drop_events)

    def load_interactions(path, k_core, fields, keep, drop_events=()):
        if path.parent != folder:
            return original(path, k_core, fields, keep, drop_events)
        return kept(path, k_core, tuple(fields.items()), tuple(keep.items()), tuple(drop_events))

    def build_stream(dataset, settings):
        if dataset.path.parent != folder or settings.split_file or dataset.parts:
            return build(dataset, settings)
        key = str(dataset), settings
        if key not in streams:
            streams[key] = build(dataset, settings)
        return streams[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_interactions", load_interactions)
        patch.setattr(datasets, "build_stream", build_stream)
        patch.setattr(source, "fingerprint", lambda path: (
            of_bundled if path.parent == folder else fingerprint)(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def made_once():
    """What hundreds of tests would make anew: the parser, descriptions of settings, which have no effect, versions of
    packages and files of published records."""
    without_effect = functools.lru_cache(1000)(config.inactive)
    quick_optimisers()  # oracles use PyTorch's, before any run of the package asks for them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "build_parser", functools.cache(main.build_parser))
        patch.setattr(summary, "version", functools.cache(summary.version))
        patch.setattr(config, "inactive", lambda parts: {**without_effect(tuple(parts))})
        patch.setattr(os, "fsync", lambda file: None)  # what tests write need not outlast the machine
        patch.setattr(loop, "give_back_freed_blocks", lambda: None)  # what a small run frees the next one needs
        patch.setattr(registry_of_plugins, "describe", functools.cache(registry_of_plugins.describe))
        patch.setattr(published, "_File", functools.lru_cache(128)(published._File))  # by content
        # Else `assert_close` imports what it needs for tensors of several machines, and SymPy with it.
        patch.setattr(torch.testing._comparison, "_HAS_DTENSOR", False, raising=False)
        yield


@pytest.fixture
def same_process(monkeypatch):
    """Grids and searches do their runs in this process: for tests of what becomes of runs, not of their processes."""
    monkeypatch.setattr(pool, "Processes", SameProcess)


@pytest.fixture(scope="session")
def registry():
    return discover()


@pytest.fixture(scope="session")
def ml100k(registry):
    """The default stream of RecBole's bundled ML-100K."""
    default = make_config(registry, "ft", "fedmf", "ml-100k")
    return load_stream(default.source, default.stream)


@pytest.fixture
def shared():
    """The folder of data that is not part of the project."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared (datasets and published splits), which is not on this machine")
    return SHARED


@pytest.fixture
def growing(tmp_path):
    """A log of 6 users in which every block has new items."""
    log = tmp_path / "growing.inter"
    log.write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(
        f"u{user}\ti{time * (user + 3) % (12 + time // 8)}\t{time}\n"
        for user in range(6) for time in range(user, 240, 4)))
    return log
