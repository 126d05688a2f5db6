"""Reading interactions in pieces, of which the texts are not kept."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pandas as pd
import pytest

from fedcl_bench.core.errors import UserError
from fedcl_bench.data.files import recbole_files, table_reader
from fedcl_bench.data import stream
from fedcl_bench.data.files.recbole_files import Interactions, load_interactions, pieces, read_table
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import build_blocks, by_user, places

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


def test_ids_are_numbered_by_first_appearance_over_all_pieces(tmp_path, rows):
    frame = read_table(written(tmp_path, rows), KINDS).to_pandas()
    codes, tokens = pd.factorize(np.array([user for user, _ in rows], dtype=object))
    assert frame["user_id"].cat.codes.tolist() == codes.tolist()
    assert list(frame["user_id"].cat.categories) == list(tokens)
    assert frame["time"].tolist() == [float(time) for _, time in rows]


def test_a_number_of_pandas_alone_has_it_read_them_all(tmp_path, rows):
    """It takes a text with a space, and rounds some others as Arrow does not."""
    path = written(tmp_path, [*rows, ("u1", " 2.5"), *rows])
    expected = pd.to_numeric(pd.Series([time for _, time in rows])).tolist()
    assert read_table(path, KINDS).to_pandas()["time"].tolist() == [*expected, 2.5, *expected]


@pytest.mark.parametrize("bad, field", [(("", "1"), "user_id"), (("u1", "later"), "time")])
def test_a_bad_value_in_a_later_piece_has_its_line(tmp_path, rows, bad, field):
    path = written(tmp_path, [*rows, bad, *rows])
    with pytest.raises(UserError, match=f"line 302: field '{field}' is '{bad[0] if field == 'user_id' else bad[1]}'"):
        read_table(path, KINDS)


@pytest.mark.parametrize("user, item", [([0, 1, 0, 2], [0, 0, 1, 2]), ([1, 0, 0, 2], [0, 0, 1, 2]),
                                        ([0, 1, 0, 1], [0, 0, 1, 2]), ([0, 1, 3, 2], [0, 0, 1, 2])])
def test_all_rows_in_their_order_are_numbered_anew_where_that_changes_something(user, item):
    data = Interactions(np.array(user), np.array(item), np.arange(4.0), np.array(list("abcd"))[:3 + (3 in user)],
                        np.array(list("xyz")))
    same = data.of_rows(np.arange(4))
    expected, tokens = pd.factorize(data.user)
    assert same.user.tolist() == expected.tolist() and same.user_tokens.tolist() == data.user_tokens[tokens].tolist()
    assert (same is data) == (user == [0, 1, 0, 2])


def test_rows_are_in_the_order_of_their_users():
    user = np.random.default_rng(0).integers(0, 50, 700).astype(np.int32)
    for users in (user, user + np.int32(2 ** 31 - 51), user + (1 << 40)):
        assert np.array_equal(by_user(users), np.argsort(users, kind="stable")) and by_user(users).dtype == np.int64
    assert not len(by_user(user[:0]))
    with pytest.raises(OverflowError, match="700 rows"):
        by_user(user + (1 << 54))


def test_ids_are_narrow_while_they_are_read_and_wide_in_the_stream(tmp_path):
    """Nothing that is calculated of ids in a stream overflows; and few bytes a row are held at a time."""
    users, each = 1000, 60
    user, item = np.repeat(np.arange(users), each), np.tile(np.arange(each), users)
    path = tmp_path / "a.inter"
    pd.DataFrame({"user_id:token": user, "item_id:token": item, "time:float": np.arange(len(user))}).to_csv(
        path, sep="\t", index=False)
    data = load_interactions(path, 0, {"user": "user_id", "item": "item_id", "time": "time"}, {})
    assert (data.user.dtype, data.item.dtype) == (np.int32, np.int32)
    for step in build_blocks(data, StreamSettings(blocks=2), "a").steps:
        lists = [getattr(step, split) for split in ("train", "valid", "test")]
        assert {str(part.dtype) for each in lists for part in (each.indptr, each.values)} == {"torch.int64"}


def test_a_stream_is_cut_in_few_bytes_a_row(monkeypatch):
    monkeypatch.setattr(stream, "pieces", partial(pieces, at_once=1 << 11))
    monkeypatch.setattr(recbole_files, "pieces", partial(pieces, at_once=1 << 11))
    rng, rows = np.random.default_rng(0), 200_000
    user = np.concatenate([np.arange(900), rng.integers(0, 900, rows - 900)]).astype(np.int32)
    item = np.concatenate([np.arange(90), rng.integers(0, 90, rows - 90)]).astype(np.int32)
    data = Interactions(user, item, np.arange(float(rows)), *(np.arange(n).astype(str) for n in (900, 90)))
    tracemalloc.start()
    build_blocks(data, StreamSettings(blocks=2), "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * rows, f"{peak / rows:.1f} bytes a row beside the 16 that there were"


def test_places_are_counts_of_rows_before():
    user = np.random.default_rng(0).integers(0, 9, 200)
    assert places(user).tolist() == [int((user[:row] == u).sum()) for row, u in enumerate(user)]
    assert len(places(user[:0])) == 0
