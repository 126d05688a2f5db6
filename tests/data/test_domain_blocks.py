"""Domains over time: what a block trains on, validates and tests is what a plain loop over users would take."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedcl_bench.data import prepared
from fedcl_bench.data.datasets import load_stream, statistics
from fedcl_bench.data.domain_streams import build_domains
from fedcl_bench.data.recbole_files import Interactions
from fedcl_bench.data.stream import StreamSettings
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs.config import make_config


def shop(seed, users=9, items=7, rows=80):
    """Rows in no order, many of them with equal times; every user and item is in one."""
    generator = np.random.default_rng(seed)
    user, item = ([*range(count), *generator.integers(count, size=rows - count)] for count in (users, items))
    order = generator.permutation(rows)
    return Interactions(np.array(user)[order], np.array(item)[order], generator.integers(12, size=rows).astype(float),
                        np.array([f"u{u}" for u in range(users)]), np.array([f"i{i}" for i in range(items)]))


def by_hand(data, blocks, share, now):
    """Samples of a block, and of each user who is tested the histories up to what is held out."""
    order = sorted(range(len(data.time)), key=lambda row: (data.time[row], row))
    first, rest = int(share * len(order)), int((1 - share) * len(order) / (blocks - 1))
    block = {row: min(0 if place < first else 1 + (place - first) // rest if rest else blocks - 1, blocks - 1)
             for place, row in enumerate(order)}
    samples, held = [], {}
    for user in range(len(data.user_tokens)):
        rows = [row for row in order if data.user[row] == user and block[row] <= now]
        new = sum(block[row] == now for row in rows)
        items = [int(data.item[row]) for row in rows]
        tested = new >= 2 and len(rows) >= 3
        if tested:
            held[user] = items[:-1], items
        end = len(rows) - 2 * tested
        samples += [(user, items[:place + 1]) for place in range(max(1, len(rows) - new), end)]
    return samples, held


def found_in(step):
    """The same of a domain's step."""
    train, samples = step.sessions["train"], step.samples()
    users = np.repeat(np.arange(step.n_users), train.count.numpy())
    of = {int(first): int(user) for first, user in zip(train.start[:-1], users)}
    trained = [(of[int(first)], train.items[first:end].tolist()) for first, end in zip(samples.first, samples.end)]
    held = {}
    for split in ("valid", "test"):
        sessions = step.sessions[split]
        for user in range(step.n_users):
            for session in range(sessions.of_user[user], sessions.of_user[user + 1]):
                first, end = sessions.start[session:session + 2]
                held.setdefault(user, []).append(sessions.items[first:end].tolist())
                assert step.split(split).of(user).tolist() == sessions.items[end - 1:end].tolist()
    return trained, {user: tuple(histories) for user, histories in held.items()}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10 ** 6), blocks=st.integers(2, 4), share=st.sampled_from([0.3, 0.5, 0.6]))
def test_every_block_is_what_a_loop_over_users_takes(seed, blocks, share):
    shops = [("books", shop(seed)), ("games", shop(seed + 1, users=5, items=9, rows=60))]
    expected = [[by_hand(data, blocks, share, now) for _, data in shops] for now in range(blocks)]
    try:
        stream = build_domains(shops, StreamSettings(stream="domains", domain_blocks=blocks, base_share=share))
    except UserError as error:
        assert any(f"block {now}: " in str(error) and any(not samples or not held for samples, held in both)
                   for now, both in enumerate(expected))
        return
    assert [(step.n_users, step.n_items) for step in stream.steps] == [(14, 16)] * blocks
    for step, (samples, held) in zip(stream.units(), itertools.chain(*expected), strict=True):
        trained, tested = found_in(step)
        assert sorted(trained) == sorted(samples) and tested == held


def test_blocks_share_out_all_interactions_and_the_whole_is_one_block():
    shops, whole = [("books", shop(3)), ("games", shop(4))], StreamSettings(stream="domains")
    cut = build_domains(shops, StreamSettings(stream="domains", domain_blocks=3))
    assert [sum(domain.interactions) for domain in cut.domains] == [80, 80]
    assert statistics(cut)["interactions"] == [rows for step in range(3) for domain in cut.domains
                                               for rows in [domain.interactions[step]]]
    everything = build_domains(shops, whole)
    assert all("known" not in step.sessions for step in everything.steps)
    assert statistics(everything)["samples"] == [len(step.sessions["train"].prefixes().end)
                                                 for step in everything.units()]


@pytest.fixture
def shops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("books", 1), ("games", 2)):
        data = shop(seed)
        Path("data", name).mkdir(parents=True)
        Path("data", name, f"{name}.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(
            f"u{user}\ti{item}\t{time}\n" for user, item, time in zip(data.user, data.item, data.time)))


def test_prepared_blocks_are_the_same(shops, registry):
    def config(**changed):
        return make_config(registry, "ft", "sasrec", "books+games", overrides=[("test", changed)])
    cut, others = config(domain_blocks=3), [config(), config(domain_blocks=2)]
    stream, folder = load_stream(cut.source, cut.stream), prepared.folder_of(cut.source, cut.stream)
    prepared.save(stream, folder)
    kept = load_stream(cut.source, cut.stream)
    assert kept.domains == stream.domains
    assert [found_in(step) for step in kept.units()] == [found_in(step) for step in stream.units()]
    assert len({folder, *(prepared.folder_of(other.source, other.stream) for other in others)}) == 3
    assert len({cut.hash, *(other.hash for other in others)}) == 3
    assert config(domain_blocks=1).hash == config().hash and "domain_blocks" not in config().settings


@pytest.mark.parametrize("changed, message", [
    ({"domain_block": 1}, "unknown setting .*'domain_block'"),
    ({"base_share": 0.4}, "'base_share'.* has no effect with stream=domains and domain_blocks=1"),
    ({"domain_blocks": 0}, "'domain_blocks' .*: found 0")])
def test_blocks_that_there_are_not_are_refused(shops, registry, changed, message):
    with pytest.raises(UserError, match=message):
        make_config(registry, "ft", "sasrec", "books+games", overrides=[("test", changed)])


def test_a_block_in_which_nobody_is_tested_is_refused(shops, registry):
    config = make_config(registry, "ft", "sasrec", "books+games", overrides=[("test", {
        "domain_blocks": 60})])
    with pytest.raises(UserError, match=r"domain 'books', block \d+: no user has 3 interactions"):
        load_stream(config.source, config.stream)
