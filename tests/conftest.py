"""Shared fixtures: the real ML-100K stream, and the authors' split where it is on the machine."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

from fedcl_bench.config import make_config
from fedcl_bench.datasets import load_stream
from fedcl_bench.registry import discover

torch.manual_seed(0)
# A busy machine is no failure, and a failure must come back on the next run.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")
SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def registry():
    return discover()


@pytest.fixture(scope="session")
def ml100k(registry):
    """The default stream of RecBole's bundled ML-100K."""
    config = make_config(registry, "ft", "fedmf", "ml-100k")
    return load_stream(config.source, config.stream)


@pytest.fixture
def shared():
    """The folder of data that is not part of the project."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared (datasets and published splits), which is not on this machine")
    return SHARED
