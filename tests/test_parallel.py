"""Threads over pieces of work: order, errors, and PyTorch's own setting."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from fedcl_bench.parallel import in_order, workers

CPU = torch.device("cpu")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3  # as it was before `workers`
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads(three_threads):
    seen = set()

    def work(i):
        seen.add(threading.get_ident())
        time.sleep(0.02 if i % 3 == 0 else 0.0)
        return i, torch.get_num_threads()
    with workers():
        assert torch.get_num_threads() == 1
        results = list(in_order(work, range(20), CPU))
    assert results == [(i, 1) for i in range(20)]
    assert threading.get_ident() not in seen and 1 < len(seen) <= 3


def test_outside_workers_nothing_is_threaded(three_threads):
    assert set(in_order(lambda i: threading.get_ident(), range(5), CPU)) == {threading.get_ident()}


def test_an_error_in_a_piece_is_raised(three_threads):
    def work(i):
        if i == 4:
            raise ValueError("piece 4")
        return i
    with workers(), pytest.raises(ValueError, match="piece 4"):
        list(in_order(work, range(20), CPU))
