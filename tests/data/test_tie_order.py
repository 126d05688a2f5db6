"""Rows of equal time in the order of the file, a random one, or that of a paper's authors."""

from __future__ import annotations

import hashlib

import numpy as np
import pandas as pd
import pytest
from helpers import stream_of
from scipy import stats

from fedcl_bench.cli.main import main
from fedcl_bench.data.streams import prepared
from fedcl_bench.data.streams.domain_streams import build_domains
from fedcl_bench.data.files.recbole_files import Interactions, bundled, load_interactions
from fedcl_bench.data.source import configured
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import build_blocks, build_static
from fedcl_bench.data.streams.tie_order import SHIPPED, time_order
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs.config import make_config, resolve

COMPUTED = ["file", "random"]
TIE_ORDERS = [*COMPUTED, *SHIPPED]


def test_the_shipped_order_of_movielens():
    """As np.argsort of NumPy without AVX-512 gave it."""
    times = load_interactions(bundled("ml-100k") / "ml-100k.inter", 10,
                              {"user": "user_id", "item": "item_id", "time": "timestamp"}, {"rating": "(0,inf)"}).time
    order = time_order(times, "numpy_quicksort")
    assert (np.diff(times[order]) >= 0).all()
    assert hashlib.blake2b(order.astype("<i8").tobytes(), digest_size=8).hexdigest() == "64cd1f0c8a04e807"


@pytest.mark.parametrize("tie_order,name", [("numpy_quicksort", "ml-100k with k_core=10"),
                                            ("numpy_avx512", "lastfm-2k with k_core=5")])
def test_other_rows_have_no_shipped_order(capsys, tie_order, name):
    assert main(["data", "ml-100k", "--set", f"tie_order={tie_order}", "--set", "k_core=50"]) == 2
    message = capsys.readouterr().err
    assert f"'tie_order': found {tie_order}, which is shipped for {name} alone" in message
    assert "--set tie_order=file, or --set tie_order=random" in message


def test_a_random_order_is_uniform_among_ties():
    """Of three rows of equal time all six orders are as frequent, in 3,000 such triples; and it is always the same."""
    order = time_order(np.repeat(np.arange(3000), 3), "random").reshape(-1, 3) % 3
    assert stats.chisquare(np.unique(order, axis=0, return_counts=True)[1]).pvalue > 1e-3
    assert order[:4].tolist() == [[0, 2, 1], [0, 2, 1], [0, 2, 1], [1, 0, 2]]


def one_domain(data, settings, name):
    return build_domains([(name, data)], settings)


@pytest.mark.parametrize("build", [build_blocks, build_static, one_domain])
def test_streams_take_the_order(build):
    """As if the rows had stood in the file in that order."""
    rows = 3000
    user, item, time = np.arange(rows) % 60, np.arange(rows) * 7 % 97, np.arange(rows) * 11 % 13 * 1.0
    names = [np.array([str(i) for i in range(n)]) for n in (60, 97)]

    def built(order, tie_order):
        data = Interactions(user[order], item[order], time[order], *names)
        stream = build(data, StreamSettings(tie_order=tie_order), "w")
        return [stream.user_tokens.tolist(), stream.item_tokens.tolist(),
                [[step.split(split).values.tolist() for split in ("train", "valid", "test")] for step in stream.steps]]

    given_order = np.arange(rows)
    streams = [built(given_order, tie_order) for tie_order in COMPUTED]
    assert streams == [built(time_order(time, tie_order), "file") for tie_order in COMPUTED]
    assert streams[0] != streams[1]


def test_the_default_changes_no_name(registry):
    def config(**settings):
        return make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", settings)])
    hashes = [config(tie_order=tie_order).hash for tie_order in TIE_ORDERS]
    assert config().hash == hashes[0] and len(set(hashes)) == 4
    folders = [prepared.folder_of(config().source, StreamSettings(tie_order=tie_order)) for tie_order in TIE_ORDERS]
    assert len(set(folders)) == 4 and folders[0].name == "ml-100k.stream-77b93167181e"
    for other in ({"stream": "sessions"}, {"split_file": __file__}):
        with pytest.raises(UserError, match="'tie_order'.*no effect with"):
            config(tie_order="numpy_avx512", **other)


def test_only_last_fm_has_another_order(registry):
    orders = {name: resolve(registry, "ft", "fedmf", name).stream.tie_order for name in configured()}
    assert {name: order for name, order in orders.items() if order != "file"} == {"lastfm-2k": "numpy_avx512"}


def test_last_fm_is_the_authors_row_by_row(registry, shared):
    """Their order gives their Table 1, and the blocks that were made with NumPy's sort for AVX-512."""
    expected = pd.read_csv(shared / "data" / "splits" / "lastfm-2k.f3crec_blocks.tsv", sep="\t")
    _, stream = stream_of(registry, "lastfm-2k", "fedmf", shared / "data" / "atomic")
    for step, (_, block) in zip(stream.steps, expected.groupby("block"), strict=True):
        assert step.interactions == len(block)
        pairs = sorted((stream.user_tokens[user], stream.item_tokens[item])
                       for split in ("train", "valid", "test") for user in range(step.n_users)
                       for item in step.split(split).of(user).tolist())
        assert pairs == sorted(zip(block.user.astype(str), block.item.astype(str)))
        if step.index:  # which is split by time
            for user, rows in block.groupby("user").item:
                number = stream.user_tokens.tolist().index(str(user))
                parts = [step.split(split).of(number).tolist() for split in ("train", "valid", "test")]
                assert [stream.item_tokens[item] for part in parts for item in part] == rows.astype(str).tolist()
    for tokens, column in ((stream.user_tokens, expected.user), (stream.item_tokens, expected.item)):
        assert tokens.tolist() == column.drop_duplicates().astype(str).tolist()


def test_movielens_is_the_authors_block_by_block(registry, shared):
    """Their files for ML-100K come out with NumPy's sort without AVX-512, ids and later splits included."""
    expected = pd.read_csv(shared / "data" / "splits" / "ml-100k.f3crec_authors.tsv", sep="\t")
    for step in stream_of(registry, "ml-100k", "fedmf", tie_order="numpy_quicksort")[1].steps:
        block = expected[expected.block == step.index]
        splits = {split: {(user, item) for user in range(step.n_users) for item in step.split(split).of(user).tolist()}
                  for split in ("train", "valid", "test")}
        assert set().union(*splits.values()) == set(zip(block.user, block.item))
        if step.index:  # the base block is split at random
            for split, rows in block.groupby("split"):
                assert splits[split] == set(zip(rows.user, rows.item))
