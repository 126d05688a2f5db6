"""Published sets of sessions: converted from pickles or tables, refused where they are anything else, made a stream."""

from __future__ import annotations

import pickle
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import stream_of

from fedcl_bench.cli.main import main
from fedcl_bench.data.files.convert import convert
from fedcl_bench.data.datasets import statistics
from fedcl_bench.data.source import PublishedDataset, load_config
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
    return convert(NAME, Path("raw"), Path("data"), published=PublishedDataset(), **options)


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickled_lists_and_tables_become_one_atomic_file(protocol):
    lay(protocol=protocol)
    done = converted()
    text = Path("data", NAME, f"{NAME}.inter").read_text()
    assert text.startswith(ATOMIC) and text.endswith("test-2\t3\t6\ttest\ntest-2\t9\t7\ttest\ntest-2\t4\t8\ttest\n")
    assert done.counts == {"rows": 14 + 8, "users": 5 + 3, "items": 6} and done.interactions == 22
    rows = {"train": TRAIN, "test": [[*sequence, target] for sequence, target in zip(*TEST)]}
    Path("tables").mkdir()
    for split, sessions in rows.items():
        pd.DataFrame([(number, item) for number, session in enumerate(sessions) for item in session],
                     columns=["session", "item_id"]).astype("int32").to_parquet(f"tables/{split}.parquet")
    assert not convert(NAME, Path("tables"), Path("data"), published=PublishedDataset()).changed


@pytest.mark.parametrize("train, test, message", [
    (b"", TEST, "all_train_seq.txt: is another pickle, or none, .* expected a pickled list of sessions"),
    (pickle.dumps(TRAIN)[:-9], TEST, "or is cut short"), (b"1\t2\n", TEST, "or none"),
    ({"a": 1}, TEST, "another pickle"),
    ([], TEST, "all_train_seq.txt: has no rows"), ([1, 2], TEST, "another pickle"),
    ([[1, 2], []], TEST, "all_train_seq.txt, row 3: field 'item' is '', expected an id"),
    ([[1, -2]], TEST, "row 2: field 'item' is '-2'"), ([[1, [2]]], TEST, r"'item' is '\[2\]'"),
    ([[1.5]], TEST, "'item' is '1.5'"), (TRAIN, [[1, 2]], "test.txt: is another pickle, .* expected a pickled pair"),
    (TRAIN, ([[1]], [2, 3]), "another pickle"), (TRAIN, ([1], [2]), "another pickle"),
    (TRAIN, ([[1]], [[2]]), "test.txt, row 2: field 'item'")])
def test_bad_files_are_named(train, test, message):
    lay(train, test)
    with pytest.raises(UserError, match=message):
        converted()
    assert not Path("data").exists()


@pytest.mark.parametrize("columns, message", [
    ({"session": [0, 0], "item": [1, 2]}, "no column 'item_id'; found session, item"),
    ({"session": [0, 0], "item_id": [1.5, 2.0]}, "row 1: field 'item' is '1.5', expected an id"),
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


def sessions_in(stream, split):
    """Every session of a split, by the publisher's ids."""
    some = stream.steps[0].sessions[split]
    return [[int(token) for token in stream.item_tokens[some.items[a:b]]] for a, b in zip(some.start, some.start[1:])]


@pytest.fixture
def stream(registry):
    """The stream of some sessions under some settings."""
    def made(train=TRAIN, **settings):
        lay(train)
        converted(force=True)
        return stream_of(registry, NAME, **settings)[1]
    return made


def test_the_last_training_sessions_validate_with_all_their_prefixes(stream):
    made = stream(valid_share=0.4)
    assert sessions_in(made, "train") == TRAIN[:3]
    assert sessions_in(made, "valid") == [[5, 1], [4, 2], [4, 2, 1]]
    assert sessions_in(made, "test") == [[1, 2, 3], [1, 2], [3, 4]]  # nobody trains on item 9
    step, = made.steps
    assert step.n_users == 1 and step.n_items == 5 and step.sessions["train"].of_user.tolist() == [0, 3]
    assert made.item_tokens[step.test.of(0)].tolist() == ["3", "2", "4"]


def test_a_share_is_of_the_most_recent_sessions(stream):
    made = stream(train_share=0.6, valid_share=0.34)
    assert sessions_in(made, "train") == [[2, 3, 1, 2], [5, 1]]
    assert sessions_in(made, "valid") == [[4, 2], [4, 2, 1]]
    assert sessions_in(made, "test") == [[1, 2, 3], [1, 2], [3, 4]]
    less, whole = stream(train_share=0.4, valid_share=0.5), stream(valid_share=0.4)
    assert sessions_in(less, "train") == [[5, 1]] and sessions_in(less, "valid") == [[4, 2], [4, 2, 1]]
    assert sessions_in(less, "test") == sessions_in(whole, "test") == [[1, 2, 3], [1, 2], [3, 4]]
    assert less.item_tokens.tolist() == ["5", "1", "4", "2", "3"] and set(less.item_tokens) == set(whole.item_tokens)
    assert less.steps[0].n_items == whole.steps[0].n_items == 5  # "3" is in no session that trains or validates


def test_a_share_of_former_meaning_has_another_hash(registry):
    """Which left out items and test sessions; the hash of all sessions is as it was."""
    lay(TRAIN)
    converted(force=True)
    def identity(**settings):
        config = make_config(registry, "ft", "sasrec", NAME, overrides=[("test", settings)])
        return config._identity(with_method=True)
    assert "items" not in identity() and identity(train_share=0.5)["items"] == "all"


def test_prefixes_are_looked_up_where_the_sessions_are(stream):
    prefixes = stream(valid_share=0.4).steps[0].sessions["train"].prefixes()
    written, every = prefixes.written_out(), torch.arange(len(prefixes.end))
    assert len(every) == 1 + 2 + 3 and written.lengths.tolist() == [2, 2, 3, 2, 3, 4]
    for ours, theirs in zip(prefixes.tail(every, 3), written.tail(every, 3)):
        assert torch.equal(ours, theirs)


def test_too_small_shares_are_refused(stream):
    with pytest.raises(UserError, match="no valid session has 2 interactions"):
        stream([[1, 2, 3, 4, 9]])
    with pytest.raises(UserError, match="no train session"):
        stream([[1, 2, 3, 4, 9]], valid_share=0.9)


@pytest.mark.parametrize("name, rows, samples, items, tests", [
    pytest.param("diginetica", 906_140, 719_470, 43_097, 60_858, marks=pytest.mark.long),
    ("retailrocket", 685_984, 559_816, 36_968, 15_132)])
def test_the_published_sets_have_their_counts(shared, registry, name, rows, samples, items, tests, capsys):
    assert main(["data", "convert", f"session-{name}", "--raw", str(shared / "data" / "session-sets" / name)]) == 0
    assert "as many rows, users, items as the publisher counts" in capsys.readouterr().out
    _, stream = stream_of(registry, f"session-{name}")
    found, expected = statistics(stream), load_config(f"session-{name}").expected
    assert {key: found[key] for key in expected} == expected
    step, = stream.steps
    trained, held = step.sessions["train"], step.sessions["valid"]
    ended = held.items[held.start[1:] - 1]  # a validation prefix of length 2 begins a session
    assert len(trained.items) + len(ended) + int((held.lengths == 2).sum()) == rows
    assert len(trained.prefixes().end) + len(ended) == samples
    assert (step.n_items, len(step.sessions["test"].lengths)) == (items, tests)
