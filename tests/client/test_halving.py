"""A chunk for which memory runs out is trained in halves, with the numbers of the whole; errors are injected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import one_step

from fedcl_bench.cli.main import main
from fedcl_bench.client.out_of_memory import in_halves, in_words
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.errors import OutOfMemory
from fedcl_bench.federation import round as rounds
from fedcl_bench.federation.loop import run
from fedcl_bench.method import Method, NoSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.sampling import LaterChunk, LocalSettings, draw_negatives, make_chunks
from fedcl_bench.sizes import SIZES
from fedcl_bench.testing.worlds import ragged

TEXT = ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 3.00 GiB is "
        "free. Process 7 has 13.00 GiB memory in use. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")
WORDS = ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 3.00 GiB "
         "is free.")


HALVES = [5, 3, 5, 4, 2, 5, 1]


def chunk_of(sizes):
    step = one_step(ragged(*(range(n) for n in sizes)), 40)
    chunk, = make_chunks(step, torch.arange(len(sizes)), LocalSettings(), 1)
    return chunk


@pytest.mark.parametrize("kept", [True, False])
def test_halves_hold_the_same_clients_and_draws(monkeypatch, kept):
    """Of chunks that are kept, and of those made when their turn comes."""
    chunk = chunk_of(HALVES)
    whole = dict(zip(chunk.users.tolist(), draw_negatives(chunk, LocalSettings(), 0, 0, 0).tolist()))
    tried = []
    if not kept:
        monkeypatch.setattr(SIZES, "kept_positives", 0)
        chunk = chunk_of(HALVES)
        assert isinstance(chunk, LaterChunk)

    def train(part):
        tried.append(part.users.tolist())
        part = part if kept else part.now()
        if len(part.users) > 2:
            raise torch.OutOfMemoryError(TEXT)
        return {user: (drawn, items, count) for user, drawn, items, count in zip(
            part.users.tolist(), draw_negatives(part, LocalSettings(), 0, 0, 0).tolist(), part.positives.tolist(),
            part.count.tolist())}

    found = in_halves(train, chunk, Method(NoSettings()))
    order = chunk.users.tolist()
    assert tried == [order, order[:3], order[:1], order[1:3], order[3:], order[3:5], order[5:]]
    assert [list(some) for some in found] == [order[:1], order[1:3], order[3:5], order[5:]]
    for some in found:
        assert all(drawn[:4 * count] == whole[user][:4 * count] for user, (drawn, _, count) in some.items())
    assert all(items[:count] == list(range(count)) for some in found for _, items, count in some.values())


def test_what_clients_wrote_is_put_back():
    """Also where a table of state ends before the newest users, and with nothing in it."""
    chunk, method = chunk_of([2, 2, 2]), Method(NoSettings())
    method.client_state = {"count": torch.zeros(3), "early": torch.zeros(2, 1), "none": torch.zeros(0)}

    def train(part):
        method.client_state["count"][part.users] += 1
        method.client_state["early"][part.users[part.users < 2]] += 1
        if len(part.users) > 1:
            raise torch.OutOfMemoryError(TEXT)

    in_halves(train, chunk, method)
    assert method.client_state["count"].tolist() == [1, 1, 1] and method.client_state["early"].tolist() == [[1], [1]]


def test_other_errors_are_not_caught():
    def train(part):
        raise RuntimeError("no such operator")

    with pytest.raises(RuntimeError, match="no such operator"):
        in_halves(train, chunk_of([1, 1]), Method(NoSettings()))


def test_a_client_that_does_not_fit_alone():
    def train(part):
        if 2 in part.users:
            raise torch.OutOfMemoryError(TEXT)

    with pytest.raises(OutOfMemory) as error:
        in_halves(train, chunk_of([1, 1, 1]), Method(NoSettings()))
    assert str(error.value) == f"out of GPU memory: {WORDS}\nThat was while training one client alone (user 2)."
    assert in_words(torch.OutOfMemoryError("")) == "out of GPU memory: no more is known."


def too_large(kind):
    """An error as PyTorch, NumPy and the compiled kernels raise it on the processor."""
    if kind == "torch":
        torch.empty(1 << 50)
    if kind == "numpy":
        np.empty(1 << 50)
    raise MemoryError("no memory for negatives")


@pytest.mark.parametrize("kind, words", [("torch", "Tried to allocate 4194304.00 GiB."),
                                         ("numpy", "Unable to allocate"), ("kernels", "no memory for negatives.")])
def test_memory_of_the_processor_can_run_out_too(kind, words):
    def train(part):
        if len(part.users) > most:
            too_large(kind)
        return part.users.tolist()

    most = 2
    assert [len(users) for users in in_halves(train, chunk_of(HALVES), Method(NoSettings()))] == [1, 2, 2, 2]
    most = 0
    with pytest.raises(OutOfMemory, match="^out of memory: .*\n.*one client alone") as error:
        in_halves(train, chunk_of(HALVES), Method(NoSettings()))
    assert words in str(error.value)


def test_memory_that_runs_out_elsewhere_in_a_run_is_said(registry, ml100k, monkeypatch, tmp_path, capsys):
    """In the evaluation, say."""
    monkeypatch.setattr("fedcl_bench.federation.loop.validate", lambda *arguments: too_large("torch"))
    assert main(["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "out of memory: Tried to allocate 4194304.00 GiB.\nThis run needs about" in error


def small_memory(monkeypatch, most):
    """Memory for so many clients at a time; it runs out when all work is done."""
    make, tried = rounds.trainer_of, []

    def trainer_of(*arguments, **named):
        train = make(*arguments, **named)

        def limited(chunk):
            trained = train(chunk)
            tried.append(len(chunk.users))
            if len(chunk.users) > most:
                raise torch.OutOfMemoryError(TEXT)
            return trained

        return limited

    monkeypatch.setattr(rounds, "trainer_of", trainer_of)
    return tried


SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4}
BLOCKS = {"blocks": 2, "base_share": 0.5, "k_core": 60, "client_ratio": 0.15}


@pytest.mark.parametrize("method,backbone,settings", [
    ("f3crec", "fedmf", BLOCKS), ("rlp2", "pfedrec", {**BLOCKS, "eval_item_table": "local"}),
    ("spp", "ncf", {**BLOCKS, "local_epochs": 1, "dim": 8, "hidden": "8"}),
    pytest.param("ft", "fedrap", {**BLOCKS, "dim": 8}, marks=pytest.mark.long),
    pytest.param("reg", "gpfedrec", {**BLOCKS, "dim": 4}, marks=pytest.mark.long),
    ("fcucr", "sasrec", {**SESSIONS, "teacher": "previous"}), ("ft", "fedmf", SESSIONS)])
def test_runs_come_out_the_same(registry, monkeypatch, method, backbone, settings):
    """Two rounds of every step with memory for 6 clients, and with enough, in double precision."""
    config = make_config(registry, method, backbone, "ml-100k", 0, [
        ("test", {"rounds": 2, "patience": 0, "precision": "float64", **settings})])
    stream = load_stream(config.source, config.stream)

    def last():
        *_, progress = run(config.federation(stream))
        return progress

    whole = last()
    tried = small_memory(monkeypatch, 6)
    halved = last()
    assert any(size > 6 for size in tried) and sum(size <= 6 for size in tried) > 4
    # Other chunks round otherwise, and layer normalisation of a session's padding enlarges that by up to 1e4 a layer.
    near = {"rtol": 1e-6, "atol": 1e-7} if backbone == "sasrec" else {"rtol": 1e-8, "atol": 1e-10}
    for a, b in zip(whole.model.tables(), halved.model.tables(), strict=True):
        torch.testing.assert_close(b, a, **near)
    assert whole.client_state.keys() == halved.client_state.keys()
    for name, rows in whole.client_state.items():
        torch.testing.assert_close(halved.client_state[name], rows, **near)
    assert [row["loss"] for row in halved.curve] == pytest.approx([row["loss"] for row in whole.curve], rel=1e-9)


def test_the_command_says_what_helps(monkeypatch, tmp_path, capsys):
    small_memory(monkeypatch, 0)
    assert main(["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"out of GPU memory: {WORDS}\nThat was while training one client alone (user " in error
    assert ").\nThis run needs about" in error
    assert "What helps: a smaller --set dim=N (now 32), a larger machine, fewer users and items." in error
