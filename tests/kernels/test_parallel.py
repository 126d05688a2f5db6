"""Threads over pieces of work: order, errors, and PyTorch's own setting."""

import threading
import time

import pytest
import torch
from helpers import threads

from fedcl_bench.core.parallel import in_order, workers

CPU = torch.device("cpu")


@pytest.fixture
def three_threads():
    with threads(3):
        yield
        assert torch.get_num_threads() == 3  # as it was before `workers`


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
    assert threading.get_ident() in seen and 1 < len(seen) <= 3


def test_who_takes_results_does_not_wait_for_another_to_begin(three_threads):
    """Others are held up in the first pieces; the rest is done here."""
    held, seen = threading.Event(), {}

    def work(i):
        seen[i] = threading.get_ident()
        if seen[i] != here:
            held.wait(20.0)
        elif len([i for i, who in seen.items() if who == here]) == 3:
            held.set()
        return i

    here = threading.get_ident()
    with workers():
        results = in_order(work, range(5), CPU)
        while len(seen) < 2:  # they begin before the first result is asked for
            time.sleep(0.001)
        assert here not in seen.values()
        assert list(results) == list(range(5))
    assert held.is_set() and list(seen.values()).count(here) == 3


def test_pieces_wait_for_results_to_be_taken(three_threads):
    begun = []
    with workers():
        results = in_order(begun.append, range(50), CPU)
        next(results)
        time.sleep(0.05)
        assert len(begun) <= 7
        results.close()
        time.sleep(0.05)
        assert len(begun) <= 7


def test_outside_workers_nothing_is_threaded(three_threads):
    assert set(in_order(lambda i: threading.get_ident(), range(5), CPU)) == {threading.get_ident()}


def test_an_error_in_a_piece_is_raised(three_threads):
    def work(i):
        if i == 4:
            raise ValueError("piece 4")
        return i
    with workers():
        results, taken = in_order(work, range(20), CPU), []
        with pytest.raises(ValueError, match="piece 4"):
            taken.extend(results)
    assert taken == [0, 1, 2, 3]  # in its turn, whoever did it
