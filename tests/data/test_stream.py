"""Data: interactions read in pieces, RecBole's filters, blocks, splits, fixed split files, the order of ties, and the
published counts."""

import hashlib
import math
import tracemalloc
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import recbole_config, stream_of
from hypothesis import given, strategies as st
from scipy import stats

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data import stream as stream_module
from fedcl_bench.data.files import recbole_files, table_reader
from fedcl_bench.data.files.recbole_files import Interactions, bundled, load_interactions, pieces, read_table
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.source import configured, load_config
from fedcl_bench.data.stream import (block_of_rows, build_blocks, build_static, by_user, places, read_split_file,
                                     split_of_rows, statistics)
from fedcl_bench.data.streams import prepared
from fedcl_bench.data.streams.domain_streams import build_domains
from fedcl_bench.data.streams.tie_order import SHIPPED, time_order
from fedcl_bench.runs.config import make_config, resolve

FIELDS = {"user": "user_id", "item": "item_id", "time": "timestamp"}


def test_expected_counts_agree_with_the_paper(shared):
    table = pd.read_csv(shared / "paper_tables" / "f3crec_table1.csv")
    names = {"# of accumulated users": "accumulated_users", "# of accumulated items": "accumulated_items",
             "# of interactions": "interactions", "sparsity (%)": "sparsity"}
    papers = {"ml-100k": "ML-100K", "ml-latest-small": "ML-Latest-Small", "hetrec2011-ml": "HetRec2011",
              "lastfm-2k": "Lastfm-2K"}
    for dataset, paper in papers.items():
        rows = table[table.dataset == paper]
        for metric, name in names.items():
            assert rows[rows.metric == metric].value.tolist() == load_config(dataset).expected[name]


def test_authors_split_file(registry, shared):
    stream = read_split_file(shared / "data" / "splits" / "ml-100k.f3crec_authors.tsv")
    found = statistics(stream)
    for name, values in load_config("ml-100k").expected.items():
        assert found[name] == list(values)
    assert stream.user_tokens.tolist() == [str(u) for u in range(943)]  # their numbering already grows with the blocks
    assert stream.item_tokens.tolist() == [str(i) for i in range(1152)]


@pytest.mark.parametrize("shift", [0, 2**63, 10**30])
def test_numbers_of_a_split_file_are_in_their_order(tmp_path, shift):
    """However large, and in the order of the blocks first."""
    rows = [(0, 9, 10), (0, 9, 2), (0, 11, 10), (1, 8, 1), (1, 9, 3)]
    path = tmp_path / "split.tsv"
    path.write_text("block\tuser\titem\tsplit\n" + "".join(
        f"{block}\t{user + shift}\t{item + shift}\ttrain\n" for block, user, item in rows))
    stream = read_split_file(path)
    assert [int(token) - shift for token in stream.user_tokens] == [9, 11, 8]
    assert [int(token) - shift for token in stream.item_tokens] == [2, 10, 1, 3]


def test_readers_and_filters_are_recboles():
    """Against RecBole's dataset. The file has no missing values, which RecBole leaves as they are under pandas 3."""
    interval, enough = "[1,2);(3,5]", "[30,inf)"
    ours = load_interactions(bundled("ml-100k") / "ml-100k.inter", 30, FIELDS, {"rating": interval})
    assert (ours.user.dtype, ours.item.dtype) == (np.int32, np.int32)
    with recbole_config():
        from recbole.config import Config
        from recbole.data.dataset import Dataset
        from recbole.model.general_recommender import BPR

        config = Config(model=BPR, dataset="ml-100k", config_dict={
            "load_col": {"inter": ["user_id", "item_id", "rating", "timestamp"]}, "val_interval": {"rating": interval},
            "user_inter_num_interval": enough, "item_inter_num_interval": enough, "use_gpu": False,
            "normalize_all": None})  # their settings for ml-100k scale times to [0, 1]
        theirs = Dataset(config)
    assert np.array_equal(ours.user + 1, theirs.inter_feat["user_id"])
    assert np.array_equal(ours.item + 1, theirs.inter_feat["item_id"])
    assert np.array_equal(ours.time, theirs.inter_feat["timestamp"])
    assert np.array_equal(ours.user_tokens, theirs.field2id_token["user_id"][1:])


def test_ids_by_first_appearance_and_fixed_ties():
    """Ties keep the order of the file; ids follow time."""
    data = Interactions(user=np.array([0, 1, 0, 1]), item=np.array([2, 0, 1, 2]), time=np.array([5.0, 1.0, 1.0, 5.0]),
                        user_tokens=np.array(["a", "b"]), item_tokens=np.array(["x", "y", "z"]))
    stream = build_blocks(data, StreamSettings(blocks=1), "toy")
    assert stream.user_tokens.tolist() == ["b", "a"] and stream.item_tokens.tolist() == ["x", "y", "z"]
    assert stream.steps[0].train.of(0).tolist() == [0, 2] and stream.steps[0].train.of(1).tolist() == [1, 2]


@given(n=st.integers(1, 5000), blocks=st.integers(1, 8), share=st.floats(0.05, 0.95))
def test_blocks_cover_rows_in_order(n, blocks, share):
    block = block_of_rows(n, blocks, share)
    assert len(block) == n and (np.diff(block) >= 0).all() and block.max(initial=0) < blocks
    sizes = np.bincount(block, minlength=blocks)
    if blocks > 1:
        assert sizes[0] == int(share * n)
        assert (sizes[1:-1] == int((1 - share) * n / (blocks - 1))).all() and sizes[-1] >= sizes[1:-1].max(initial=0)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=120), st.sampled_from(["random", "chronological"]),
       st.integers(0, 9))
def test_split_sizes_and_order(users, how, seed):
    user = np.array(users)
    split = split_of_rows(user, how, seed, 1)
    for u in set(users):
        mine = split[user == u]
        n = len(mine)
        test = math.ceil(n / 10) if n >= 3 else 0
        valid = math.ceil((n - test) / 9) if n >= 3 else 0
        assert [(mine == s).sum() for s in range(3)] == [n - test - valid, valid, test]
        if how == "chronological":
            assert (np.diff(mine) >= 0).all()


def test_random_split_is_per_user_and_keyed():
    """Another user's rows do not change a user's random split; another seed or block does."""
    user = np.repeat([0, 1, 2], 40)
    split = split_of_rows(user, "random", 0, 0)
    assert np.array_equal(split[user != 1], split_of_rows(user[user != 1], "random", 0, 0))
    assert not np.array_equal(split, split_of_rows(user, "random", 1, 0))
    assert not np.array_equal(split, split_of_rows(user, "random", 0, 1))
    assert not (np.diff(split[user == 0].astype(int)) >= 0).all()


def test_split_setting_changes_only_its_blocks(registry):
    default, random, other = (stream_of(registry, "ml-100k", "fedmf", **changed)[1]
                              for changed in ({}, {"inc_split": "random"}, {"split_seed": 1}))
    assert torch.equal(default.steps[0].test.values, random.steps[0].test.values)
    assert not torch.equal(default.steps[1].test.values, random.steps[1].test.values)
    assert not torch.equal(default.steps[0].test.values, other.steps[0].test.values)
    assert torch.equal(default.steps[1].test.values, other.steps[1].test.values)


def test_every_dataset_config_loads(registry):
    for name in configured():
        config = load_config(name)
        assert config.title and config.source.startswith("https://") and config.licence
        # Of sessions, only the authors' XING is known under settings that can be reproduced.
        assert config.expected or config.settings["stream"] == "sessions" and "Table 1" in config.notes
        for kind, settings in (("backbone", config.backbone_settings), ("method", config.method_settings)):
            assert all(registry.get(kind, plugin) for plugin in settings)


COMPUTED = ["file", "random"]
TIE_ORDERS = [*COMPUTED, *SHIPPED]


@pytest.mark.parametrize("tie_order,name", [("numpy_quicksort", "ml-100k with k_core=10"),
                                            ("numpy_avx512", "lastfm-2k with k_core=5")])
def test_other_rows_have_no_shipped_order(capsys, tie_order, name):
    assert main(["data", "ml-100k", "--set", f"tie_order={tie_order}", "--set", "k_core=50"]) == 2
    message = capsys.readouterr().err
    assert f"'tie_order': found {tie_order}, which is shipped for {name} alone" in message
    assert "--set tie_order=file, or --set tie_order=random" in message


def test_orders_of_ties():
    """MovieLens's shipped one is that of np.argsort of NumPy without AVX-512. At random of three rows of equal time all
    six orders are as frequent, in 3,000 such triples; and it is always the same."""
    order = time_order(np.repeat(np.arange(3000), 3), "random").reshape(-1, 3) % 3
    assert stats.chisquare(np.unique(order, axis=0, return_counts=True)[1]).pvalue > 1e-3
    assert order[:4].tolist() == [[0, 2, 1], [0, 2, 1], [0, 2, 1], [1, 0, 2]]
    times = load_interactions(bundled("ml-100k") / "ml-100k.inter", 10, FIELDS, {"rating": "(0,inf)"}).time
    order = time_order(times, "numpy_quicksort")
    assert (np.diff(times[order]) >= 0).all()
    assert hashlib.blake2b(order.astype("<i8").tobytes(), digest_size=8).hexdigest() == "64cd1f0c8a04e807"


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


def test_the_default_order_changes_no_name_and_only_last_fm_has_another(registry):
    def config(**settings):
        return make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", settings)])
    hashes = [config(tie_order=tie_order).hash for tie_order in TIE_ORDERS]
    assert config().hash == hashes[0] and len(set(hashes)) == 4
    files = [prepared.file_of(config().source, StreamSettings(tie_order=tie_order)) for tie_order in TIE_ORDERS]
    assert len(set(files)) == 4
    for other in ({"stream": "sessions"}, {"split_file": __file__}):
        with pytest.raises(UserError, match="'tie_order'.*no effect with"):
            config(tie_order="numpy_avx512", **other)
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


KINDS = {"user_id": "token", "time": "float"}


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(table_reader, "PIECE", 200)
    monkeypatch.setattr(recbole_files._Tokens, "_AT_ONCE", 2)
    rng = np.random.default_rng(0)
    return [(f"u{rng.integers(60)}", f"{rng.random():.17f}") for _ in range(300)]


def written(tmp_path, rows):
    path = tmp_path / "a.inter"
    path.write_text("user_id:token\ttime:float\n" + "".join(f"{user}\t{time}\n" for user, time in rows))
    return path


def test_ids_are_numbered_by_first_appearance_and_numbers_rounded_correctly(tmp_path, rows):
    """Over all pieces, also of those with a text that Arrow does not take for a number."""
    frame = read_table(written(tmp_path, rows), KINDS).to_pandas()
    codes, tokens = pd.factorize(np.array([user for user, _ in rows], dtype=object))
    assert frame["user_id"].cat.codes.tolist() == codes.tolist()
    assert list(frame["user_id"].cat.categories) == list(tokens)
    assert frame["time"].tolist() == [float(time) for _, time in rows]
    path = written(tmp_path, [*rows, ("u1", " +2.5"), *rows])
    expected = [float(time) for _, time in rows]
    assert read_table(path, KINDS).to_pandas()["time"].tolist() == [*expected, 2.5, *expected]


@pytest.mark.parametrize("fields, keep", [({**FIELDS, "session": "timestamp"}, {}), (FIELDS, {"user_id": "[0,9]"}),
                                          ({**FIELDS, "event": "rating"}, {"rating": "[0,9]"})])
def test_no_column_is_text_and_numbers(fields, keep):
    with pytest.raises(UserError, match="column '.*' is asked for as text .* and as numbers"):
        load_interactions(bundled("ml-100k") / "ml-100k.inter", 0, fields, keep)


@pytest.mark.parametrize("bad, field", [(("", "1"), "user_id"), (("u1", "1_0"), "time")])
def test_a_bad_value_in_a_later_piece_has_its_line(tmp_path, rows, bad, field):
    path = written(tmp_path, [*rows, bad, *rows])
    with pytest.raises(UserError, match=f"line 302: field '{field}' is '{bad[0] if field == 'user_id' else bad[1]}'"):
        read_table(path, KINDS)


def test_rows_are_in_the_order_of_their_users_and_places_are_counts_before():
    user = np.random.default_rng(0).integers(0, 50, 700).astype(np.int32)
    wide = user.astype(np.int64)
    for users in (user, user + np.int32(2 ** 31 - 51), wide + (1 << 40)):
        assert np.array_equal(by_user(users), np.argsort(users, kind="stable")) and by_user(users).dtype == np.int64
    assert not len(by_user(user[:0]))
    with pytest.raises(OverflowError, match="700 rows"):
        by_user(wide + (1 << 54))
    user = np.random.default_rng(0).integers(0, 9, 200)
    assert places(user).tolist() == [int((user[:row] == u).sum()) for row, u in enumerate(user)]
    assert len(places(user[:0])) == 0


def test_a_stream_is_cut_in_few_bytes_a_row(monkeypatch):
    """Ids are narrow until they are in the stream, where nothing that is calculated of them overflows."""
    monkeypatch.setattr(stream_module, "pieces", partial(pieces, at_once=1 << 11))
    monkeypatch.setattr(recbole_files, "pieces", partial(pieces, at_once=1 << 11))
    rng, rows = np.random.default_rng(0), 100_000
    user = np.concatenate([np.arange(900), rng.integers(0, 900, rows - 900)]).astype(np.int32)
    item = np.concatenate([np.arange(90), rng.integers(0, 90, rows - 90)]).astype(np.int32)
    data = Interactions(user, item, np.arange(float(rows)), *(np.arange(n).astype(str) for n in (900, 90)))
    tracemalloc.start()
    stream = build_blocks(data, StreamSettings(blocks=2), "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * rows, f"{peak / rows:.1f} bytes a row beside the 16 that there were"
    assert {str(part.dtype) for step in stream.steps for split in (step.train, step.valid, step.test)
            for part in (split.indptr, split.values)} == {"torch.int64"}
