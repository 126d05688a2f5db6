"""Reading interactions in pieces, of which the texts are not kept."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedcl_bench.core.errors import UserError
from fedcl_bench.data import recbole_files, table_reader
from fedcl_bench.data.recbole_files import Interactions, read_table
from fedcl_bench.data.stream import places

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


def test_places_are_counts_of_rows_before():
    user = np.random.default_rng(0).integers(0, 9, 200)
    assert places(user).tolist() == [int((user[:row] == u).sum()) for row, u in enumerate(user)]
    assert len(places(user[:0])) == 0
