"""Published sets of sessions: converted from pickles or tables, refused where they are anything else, made a stream."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedcl_bench.cli.main import main
from fedcl_bench.data import prepared
from fedcl_bench.data.convert import convert
from fedcl_bench.data.datasets import load_stream, statistics
from fedcl_bench.data.source import Published, load_config
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs.config import make_config

NAME = "session-diginetica"
TRAIN = [[1, 2], [3, 4, 5], [2, 3, 1, 2], [5, 1], [4, 2, 1]]
TEST = ([[1, 2], [1], [3, 9]], [3, 2, 4])
ATOMIC = """\
user_id:token\titem_id:token\ttimestamp:float\tsplit:token
train-0\t1\t1\ttrain
train-0\t2\t2\ttrain
"""


def lay(train=TRAIN, test=TEST, folder="raw", protocol=2):
    Path(folder).mkdir(exist_ok=True)
    for name, value in (("all_train_seq.txt", train), ("test.txt", test)):
        Path(folder, name).write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol=protocol))


def converted(**options):
    return convert(NAME, Path("raw"), Path("data"), published=Published(), **options)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickled_lists_become_an_atomic_file(protocol):
    lay(protocol=protocol)
    done = converted()
    text = Path("data", NAME, f"{NAME}.inter").read_text()
    assert text.startswith(ATOMIC) and text.endswith("test-2\t3\t6\ttest\ntest-2\t9\t7\ttest\ntest-2\t4\t8\ttest\n")
    assert done.counts == {"rows": 14 + 8, "users": 5 + 3, "items": 6} and done.interactions == 22


def test_tables_give_the_same_file():
    lay()
    converted()
    rows = {"train": TRAIN, "test": [[*sequence, target] for sequence, target in zip(*TEST)]}
    Path("tables").mkdir()
    for split, sessions in rows.items():
        pd.DataFrame([(number, item) for number, session in enumerate(sessions) for item in session],
                     columns=["session", "item_id"]).astype("int32").to_parquet(f"tables/{split}.parquet")
    assert not convert(NAME, Path("tables"), Path("data"), published=Published()).changed


class Opens:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("content", [
    pickle.dumps([[1, 2], Opens((os.mkdir, ("opened",)))], protocol=0),
    pickle.dumps([[1, 2], Opens((os.mkdir, ("opened",)))], protocol=4), pickle.dumps([[1.5]]), pickle.dumps({"a": 1})],
    ids=["text", "call", "float", "dict"])
def test_a_pickle_of_anything_else_is_not_read(content):
    lay(content)
    with pytest.raises(UserError, match="pickle of more than lists of numbers"):
        converted()
    assert not Path("opened").exists() and not Path("data").exists()


@pytest.mark.parametrize("train, test, message", [
    (b"", TEST, "all_train_seq.txt: is no pickle, or is cut short, expected a pickled list of sessions"),
    (pickle.dumps(TRAIN)[:-9], TEST, "is no pickle, or is cut short"), (b"1\t2\n", TEST, "is no pickle"),
    ([], TEST, "holds no list of sessions"), ([1, 2], TEST, "holds in session 1 what is no list of item ids"),
    ([[1, 2], []], TEST, "session 2"), ([[1, -2]], TEST, "session 1"), ([[1, [2]]], TEST, "session 1"),
    (TRAIN, [[1, 2]], "test.txt: is no pair of lists of one length, expected a pickled pair"),
    (TRAIN, ([[1]], [2, 3]), "no pair of lists of one length"), (TRAIN, ([1], [2]), "no sequence"),
    (TRAIN, ([[1]], [[2]]), "session 1")])
def test_bad_files_are_named(train, test, message):
    lay(train, test)
    with pytest.raises(UserError, match=message):
        converted()
    assert not Path("data").exists()


@pytest.mark.parametrize("columns, message", [
    ({"session": [0, 0], "item": [1, 2]}, "no column 'item_id' of whole numbers"),
    ({"session": [0, 0], "item_id": [1.5, 2.0]}, "no column 'item_id' of whole numbers"),
    ({"session": [1, 0], "item_id": [1, 2]}, "column 'session' does not ascend")])
def test_bad_tables_are_named(columns, message):
    Path("raw").mkdir()
    for split in ("train", "test"):
        pd.DataFrame(columns).to_parquet(f"raw/{split}.parquet")
    with pytest.raises(UserError, match=message):
        converted()
    Path("raw/train.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="train.parquet: cannot be read as a Parquet table"):
        converted()


def stream_of(registry, **settings):
    config = make_config(registry, "ft", "sasrec", NAME, overrides=[("test", settings)])
    return config, load_stream(config.source, config.stream)


def sessions_in(stream, split):
    """Every session of a split, by the publisher's ids."""
    some = stream.steps[0].sessions[split]
    return [[int(token) for token in stream.item_tokens[some.items[a:b]]] for a, b in zip(some.start, some.start[1:])]


def test_the_last_training_sessions_validate_with_all_their_prefixes(registry):
    lay()
    converted()
    _, stream = stream_of(registry, valid_share=0.4)
    assert sessions_in(stream, "train") == TRAIN[:3]
    assert sessions_in(stream, "valid") == [[5, 1], [4, 2], [4, 2, 1]]
    assert sessions_in(stream, "test") == [[1, 2, 3], [1, 2], [3, 4]]  # nobody trains on item 9
    step, = stream.steps
    assert step.n_users == 1 and step.n_items == 5 and step.sessions["train"].of_user.tolist() == [0, 3]
    assert stream.item_tokens[step.test.of(0)].tolist() == ["3", "2", "4"]


def test_a_share_is_of_the_most_recent_sessions(registry):
    lay()
    converted()
    _, stream = stream_of(registry, train_share=0.6, valid_share=0.34)
    assert sessions_in(stream, "train") == [[2, 3, 1, 2], [5, 1]]
    assert sessions_in(stream, "valid") == [[4, 2], [4, 2, 1]]
    assert sessions_in(stream, "test") == [[1, 2, 3], [1, 2], [3, 4]]
    _, stream = stream_of(registry, train_share=0.4, valid_share=0.5)
    assert sessions_in(stream, "test") == [[1, 2], [1, 2]]  # items of the validation sessions are known


def test_prefixes_are_looked_up_where_the_sessions_are(registry):
    lay()
    converted()
    prefixes = stream_of(registry, valid_share=0.4)[1].steps[0].sessions["train"].prefixes()
    written, every = prefixes.written_out(), torch.arange(len(prefixes.end))
    assert len(every) == 1 + 2 + 3 and written.lengths.tolist() == [2, 2, 3, 2, 3, 4]
    for ours, theirs in zip(prefixes.tail(every, 3), written.tail(every, 3)):
        assert torch.equal(ours, theirs)


def test_too_small_shares_are_refused(registry):
    lay([[1, 2, 3, 4, 9]])
    converted()
    with pytest.raises(UserError, match="no valid session has 2 interactions"):
        stream_of(registry)
    with pytest.raises(UserError, match="no train session"):
        stream_of(registry, valid_share=0.9)


def test_a_prepared_stream_is_of_its_topology(registry):
    lay()
    converted()
    config, stream = stream_of(registry, valid_share=0.4)
    prepared.save(stream, folder := prepared.folder_of(config.source, config.stream))
    assert sessions_in(prepared.load(folder), "valid") == sessions_in(stream, "valid")
    other = make_config(registry, "ft", "sasrec", NAME, overrides=[("test", {"valid_share": 0.2})])
    assert prepared.folder_of(other.source, other.stream) != folder


@pytest.mark.parametrize("name, rows, samples, items, tests", [
    pytest.param("diginetica", 906_140, 719_470, 43_097, 60_858, marks=pytest.mark.long),
    ("retailrocket", 685_984, 559_816, 36_968, 15_132)])
def test_the_published_sets_have_their_counts(shared, registry, name, rows, samples, items, tests, capsys):
    assert main(["data", "convert", f"session-{name}", "--raw", str(shared / "data" / "session-sets" / name)]) == 0
    assert "as many rows, users, items as the publisher counts" in capsys.readouterr().out
    config = make_config(registry, "ft", "sasrec", f"session-{name}")
    stream = load_stream(config.source, config.stream)
    found, expected = statistics(stream), load_config(f"session-{name}").expected
    assert {key: found[key] for key in expected} == expected
    step, = stream.steps
    trained, held = step.sessions["train"], step.sessions["valid"]
    ended = held.items[held.start[1:] - 1]  # a validation prefix of length 2 begins a session
    assert len(trained.items) + len(ended) + int((held.lengths == 2).sum()) == rows
    assert len(trained.prefixes().end) + len(ended) == samples
    assert (step.n_items, len(step.sessions["test"].lengths)) == (items, tests)
