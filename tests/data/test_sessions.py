"""Streams of sessions: how logs are cut, split and filtered, the real XING file; published sets of sessions, converted
from pickles or tables and refused where they are anything else."""

import dataclasses
import pickle
from collections import Counter
from pathlib import Path

import helpers
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import lay_log, output_of, stream_of
from hypothesis import given, settings

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream, statistics
from fedcl_bench.data.files.convert import convert
from fedcl_bench.data.files.recbole_files import Interactions
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.source import PublishedDataset, load_config
from fedcl_bench.data.streams.session_streams import build_sessions
from fedcl_bench.runs.config import make_config

CUT = StreamSettings(stream="sessions", k_core=0)
READ = StreamSettings(stream="sessions", k_core=0, session_from="column", session_split="column")
SPLITS = ("train", "valid", "test")


def log(*rows, columns=False):
    """Interactions from rows of user, item, minute (, session, split)."""
    def numbered(i):
        tokens = list(dict.fromkeys(str(row[i]) for row in rows))
        return np.array([tokens.index(str(row[i])) for row in rows]), np.array(tokens)
    user, users = numbered(0)
    item, items = numbered(1)
    extra = {"session": np.array([str(row[3]) for row in rows], dtype=object),
             "split": np.array([SPLITS.index(row[4]) for row in rows], dtype=np.int8)} if columns else {}
    return Interactions(user, item, np.array([60.0 * row[2] for row in rows]), users, items, **extra)


def told(stream, split="train"):
    """Every session of a split as (user, its items, its minutes), by the publisher's ids."""
    some = stream.steps[0].sessions[split]
    return [(str(stream.user_tokens[u]), "".join(stream.item_tokens[some.items[a:b]]), (some.times[a:b] / 60).tolist())
            for u in range(len(stream.user_tokens)) for s in range(some.of_user[u], some.of_user[u + 1])
            for a, b in [(some.start[s], some.start[s + 1])]]


def targets(stream, split):
    """The item to find of each user, or None."""
    items = stream.steps[0].split(split)
    return {str(token): next(iter(stream.item_tokens[items.of(u)]), None)
            for u, token in enumerate(stream.user_tokens)}


# Two users; "y" has the last training row in time but the first in the file. Sessions are of 30 minutes.
TWO = [("y", "c", 300), ("y", "a", 300), ("x", "a", 0), ("x", "b", 30), ("x", "b", 60),  # a session of 60 minutes
       ("y", "b", 240), ("y", "d", 250), ("x", "e", 91), ("x", "a", 95),  # 31 minutes later
       ("x", "c", 200), ("x", "d", 201), ("x", "unseen", 202), ("x", "c", 300), ("x", "a", 301),
       ("y", "a", 400), ("y", "unseen", 401), ("y", "b", 402), ("y", "unseen", 500), ("y", "a", 501)]


def test_sessions_cut_at_inactivity():
    stream = build_sessions(log(*TWO), CUT, "two")
    assert told(stream) == [("x", "abb", [0, 30, 60]), ("x", "ea", [91, 95]), ("y", "bd", [240, 250]),
                            ("y", "ca", [300, 300])]
    assert told(stream, "valid") == [("x", "cd", [200, 201]), ("y", "ab", [400, 402])]
    assert told(stream, "test") == [("x", "ca", [300, 301])]  # that of y has one item left
    assert targets(stream, "valid") == {"x": "d", "y": "b"} and targets(stream, "test") == {"x": "a", "y": None}
    assert stream.user_tokens.tolist() == ["x", "y"] and stream.item_tokens.tolist() == ["a", "b", "e", "d", "c"]
    assert statistics(stream) == {
        "users": [2], "items": [5], "sessions": [7], "average_length": [2.14], "unfiltered_users": [2],
        "unfiltered_items": [6], "unfiltered_sessions": [8], "unfiltered_average_length": [2.38], "train_rows": [9],
        "train_sessions": [4], "valid_rows": [4], "valid_sessions": [2], "test_rows": [2], "test_sessions": [1]}


NAMED = [("x", "a", 0, 1, "train"), ("x", "b", 1, 1, "train"), ("x", "c", 2, 2, "train"), ("x", "a", 2, 2, "train"),
         ("x", "a", 3, 3, "valid"), ("x", "b", 4, 3, "valid"), ("x", "c", 5, 4, "test"), ("x", "a", 6, 4, "test"),
         ("y", "b", 9, 1, "train"), ("y", "a", 0, 1, "train"), ("y", "a", 50, 5, "test"), ("y", "new", 51, 5, "test"),
         ("y", "b", 52, 5, "test")]


def test_sessions_and_splits_of_columns():
    """Session 1 is one of x and another of y, and a pause does not end it; sessions that begin together keep the order
    of the file."""
    stream = build_sessions(log(*NAMED, columns=True), READ, "named")
    assert told(stream) == [("x", "ab", [0, 1]), ("x", "ca", [2, 2]), ("y", "ab", [0, 9])]
    assert told(stream, "valid") == [("x", "ab", [3, 4])]
    assert told(stream, "test") == [("x", "ca", [5, 6]), ("y", "ab", [50, 52])]
    assert targets(stream, "valid") == {"x": "b", "y": None} and targets(stream, "test") == {"x": "a", "y": "b"}
    assert "unfiltered_users" not in statistics(stream)
    last = build_sessions(log(*NAMED, columns=True), dataclasses.replace(READ, session_split="last"), "named")
    assert told(last) == told(stream)[:2] and last.user_tokens.tolist() == ["x"]  # y has two sessions
    cut = build_sessions(log(*[row for row in NAMED if row[0] == "y"], *[("x", *row[1:]) for row in NAMED[8:10]],
                             ("x", "a", 100, 9, "valid"), ("x", "b", 101, 9, "valid"), columns=True),
                         dataclasses.replace(READ, session_from="gap"), "named")
    assert told(cut) == [("y", "ab", [0, 9]), ("x", "ab", [0, 9])] and told(cut, "valid") == [("x", "ab", [100, 101])]
    rows = [("x", "b", 0, "late", "train"), ("x", "a", 0, "early", "train"), ("x", "b", 0, "late", "train"),
            ("x", "a", 0, "early", "train"), ("x", "a", 1, 3, "valid"), ("x", "b", 2, 3, "valid"),
            ("x", "a", 2, 4, "test"), ("x", "b", 3, 4, "test")]
    stream = build_sessions(log(*rows, columns=True), READ, "named")
    assert told(stream) == [("x", "bb", [0, 0]), ("x", "aa", [0, 0])]


@pytest.mark.parametrize("rows,message", [
    ([*NAMED, ("x", "b", 1.5, 4, "test")], "sessions '4' and '2' of user 'x' overlap in time.*session_from=gap"),
    ([*NAMED, ("x", "b", 2, 2, "valid")], "session '2' of user 'x' is in train and in valid; .*one value per session"),
    ([*NAMED, ("y", "b", 60, 6, "test"), ("y", "b", 61, 6, "test")], "user 'y' has several test sessions"),
    ([*NAMED, ("y", "b", 60, 6, "valid"), ("y", "b", 61, 6, "valid")], "user 'y' has a test session before a valid"),
    (NAMED[:4], "no valid session has 2 interactions with items that anybody trains on"),
    (NAMED[:6], "no test session has 2"),
    (NAMED[4:8], "no user has a training session of at least 2 interactions"),
])
def test_bad_columns(rows, message):
    with pytest.raises(UserError, match=f"^named: .*{message}"):
        build_sessions(log(*rows, columns=True), READ, "named")


def test_one_party_may_have_several_sessions_of_a_user_to_test():
    rows, central = log(*NAMED, ("y", "b", 60, 6, "test"), ("y", "b", 61, 6, "test"), columns=True), \
        dataclasses.replace(READ, topology="central")
    assert len(build_sessions(rows, central, "named").steps[0].sessions["test"].lengths) > 1
    with pytest.raises(UserError, match="'valid_share': has no effect on named with session_split=column"):
        build_sessions(rows, dataclasses.replace(central, valid_share=0.2), "named")


LOGS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 400)), min_size=40, max_size=120)


def by_hand(rows, gap, length, sessions):
    """What the stream should hold, session by session: {user: [[(item, minute, row), ...], ...]}."""
    users = {}
    for user in {row[0] for row in rows}:
        cut = []
        for time, i, item in sorted((row[2], i, row[1]) for i, row in enumerate(rows) if row[0] == user):
            if not cut or time - cut[-1][-1][1] > gap:
                cut.append([])
            cut[-1].append((item, time, i))
        cut = [session for session in cut if len(session) >= length]
        if len(cut) >= sessions:
            users[user] = cut
    known = {item for cut in users.values() for session in cut[:-2] for item, _, _ in session}
    left = {user: [[row for row in session if row[0] in known] for session in cut[-2:]] for user, cut in users.items()}
    return users, left


@settings(max_examples=20)
@given(LOGS, st.sampled_from([5, 20]), st.integers(2, 3), st.integers(3, 4))
def test_any_log(rows, gap, length, sessions):
    users, left = by_hand(rows, gap, length, sessions)
    of_stream = dataclasses.replace(CUT, session_gap=gap, min_session_length=length, min_sessions=sessions)
    if any(not any(len(last[i]) > 1 for last in left.values()) for i in range(2)):
        with pytest.raises(UserError):
            build_sessions(log(*rows), of_stream, "any")
        return
    stream = build_sessions(log(*rows), of_stream, "any")
    step, = stream.steps
    text = {user: str(user) for user in users}

    def as_told(user, session):
        return text[user], "".join(str(row[0]) for row in session), [row[1] for row in session]

    train = {user: [as_told(user, session) for session in cut[:-2]] for user, cut in users.items()}
    order = stream.user_tokens.tolist()
    assert told(stream) == [session for user in order for session in train[int(user)]]
    for i, split in enumerate(SPLITS[1:]):
        expected = {str(user): as_told(user, last[i]) for user, last in left.items() if len(last[i]) > 1}
        assert told(stream, split) == [expected[user] for user in order if user in expected]
        assert targets(stream, split) == {user: expected[user][1][-1] if user in expected else None for user in order}
    # Ids by first appearance in the training data, which has every item; each of its rows is there once.
    trained = sorted((row[1], row[2], user, row[0]) for user, cut in users.items() for session in cut[:-2]
                     for row in session)
    assert order == list(dict.fromkeys(str(user) for _, _, user, _ in trained))
    assert stream.item_tokens.tolist() == list(dict.fromkeys(str(item) for _, _, _, item in trained))
    assert Counter((order[u], str(stream.item_tokens[i])) for u in range(step.n_users)
                   for i in step.train.of(u)) == Counter((str(user), str(item)) for _, _, user, item in trained)
    assert step.n_items == len(stream.item_tokens) == 1 + max(step.train.values)
    assert step.interactions == sum(len(some.items) for some in step.sessions.values())
    # A client's round.
    some, everyone = step.sessions["train"], torch.arange(step.n_users)
    for round_ in range(1 + int(some.count.max())):
        chosen = some.in_round(everyone, round_)
        lists = some.as_lists(chosen, step.n_users, everyone)
        items, times, real = some.tail(chosen, 3)
        for u, user in enumerate(order):
            mine = train[int(user)][round_ % len(train[int(user)])]
            assert "".join(stream.item_tokens[lists.of(u)]) == mine[1]
            last = mine[1][-3:]
            assert "".join(stream.item_tokens[items[u][real[u]]]) == last
            assert (times[u][real[u]] / 60).tolist() == mine[2][-3:]
            assert real[u].tolist() == [False] * (3 - len(last)) + [True] * len(last)


def test_the_real_xing(registry, shared, capsys):
    folder = str(shared / "data" / "atomic")
    out = output_of(capsys, "data", "xing", "--data-dir", folder)
    assert "All counts are those expected" in out and "does not tell how many" in out
    assert [" ".join(line.split()) for line in out.splitlines() if "Averaged" in line] == ["Averaged Length 14.03 same"]
    assert main(["data", "xing", "--data-dir", folder, "--set", "session_from=gap", "--set", "session_split=last"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Sessions before the item filter 3,792 " in out and "session_gap=60.0" in out
    _, stream = stream_of(registry, "xing", "fedmf", shared / "data" / "atomic")
    step, = stream.steps
    frame = pd.read_csv(shared / "data" / "atomic" / "xing" / "xing.inter", sep="\t", dtype=str)
    frame.columns = [name.split(":")[0] for name in frame.columns]
    frame["timestamp"] = frame["timestamp"].astype(float)
    for split in SPLITS:
        rows, some = frame[frame.split == split], step.sessions[split]
        sessions = rows.groupby(["user_id", "session_id"])["timestamp"]
        assert sorted(some.lengths.tolist()) == sorted(sessions.size())
        # Row by row: user, item, time and the session's first time; sorted by user, session and time.
        user = np.repeat(np.repeat(np.arange(step.n_users), some.count), some.lengths)
        began = np.repeat(some.times[some.start[:-1]].numpy(), some.lengths)
        ours = Counter(zip(stream.user_tokens[user], stream.item_tokens[some.items], some.times.tolist(), began))
        assert ours == Counter(zip(rows["user_id"], rows["item_id"], rows["timestamp"], sessions.transform("min")))
        assert np.array_equal(np.lexsort((some.times, began, user)), np.arange(len(user)))
    assert int((step.sessions["train"].count).median()) == 4 and int(step.sessions["train"].count.max()) == 33


def test_dropped_events_do_not_join_sessions(registry):
    """They go before sessions are cut, and only where sessions are read."""
    rows = ["user_id:token\titem_id:token\tinteraction_type:token\ttimestamp:float"]
    for start in (0, 10000, 20000):
        rows += [f"u\ti{item}\t{kind}\t{start + 3000 * item}" for item, kind in ((0, 1), (1, 4), (2, 2))]
    rows += [f"u\ti0\t1\t{start}" for start in (1, 6001, 10001, 16001, 20001, 26001)]
    rows += [f"u\ti2\t1\t{start}" for start in (2, 6002, 10002, 16002, 20002, 26002)]
    lay_log("xing", [f"{row}\n" for row in rows[1:]], rows[0])
    config, stream = stream_of(registry, "xing", session_from="gap", session_split="last", min_session_length=2)
    assert stream.item_tokens.tolist() == ["i0", "i2"] and statistics(stream)["sessions"] == [6]
    assert statistics(stream)["average_length"] == [3]
    blocks = dataclasses.replace(config.stream, stream="blocks", blocks=1)
    assert "i1" in load_stream(config.source, blocks).item_tokens


HEADER = "user_id:token\titem_id:token\tsession_id:token\tinteraction_type:float\ttimestamp:float\tsplit:token\n"
ROW = "u\t{}\t{}\t1\t{}\t{}\n"
GOOD = "".join(ROW.format(item, session, 100 * session + item, split) for session, split in enumerate(
    ["train", "train", "valid", "test"]) for item in (1, 2))


def refused(capsys, content, *words, name="xing"):
    lay_log(name, content.splitlines(keepends=True)[1:], content.partition("\n")[0])
    return helpers.refused(capsys, "data", name, *words)


@pytest.mark.parametrize("content,arguments,words", [
    (HEADER + GOOD + "u\t1\t3\t1\t999\tdev\n", [], ["xing.inter, line 10", "'split' is 'dev'", "train, valid or test"]),
    (HEADER + GOOD + "u\t1\t3\t1\tnever\ttest\n", [], ["xing.inter, line 10", "'timestamp' is 'never'"]),
    (HEADER + GOOD + "u\t1\t\t1\t999\ttest\n", [], ["xing.inter, line 10", "'session_id' is ''"]),
    (HEADER.replace("session_id", "basket") + GOOD, [],
     ["xing.inter", "'session_id'", "is missing", "session_from=gap"]),
    (HEADER.replace("split", "fold") + GOOD, [], ["xing.inter", "'split'", "is missing", "session_split=last"]),
    (HEADER.replace("session_id", "basket").replace("split", "fold") + GOOD, [],
     ["'session_id' (session) and 'split' (split) is missing", "session_from=gap", "session_split=last"]),
    (HEADER.replace("interaction_type", "type") + GOOD, [], ["'interaction_type'", "is missing", "drop_events"]),
    (HEADER + ROW.replace("1", "4").format(1, 2, 3, "train"), [],
     ["xing.inter", "every row", "'interaction_type'", "0, 4, 5"]),
    (HEADER + GOOD + "u\t1\t0\t1\t250\ttrain\n", [], ["xing.inter: sessions '", "of user 'u' overlap"]),
    (HEADER + GOOD, ["--set", "session_split=last"], ["xing.inter: no user has 5 sessions", "min_sessions=N"]),
    (HEADER + GOOD,
     "--set session_split=last --set session_from=gap --set min_sessions=3 --set min_session_length=2".split(),
     ["no user has 3 sessions", "interactions; take another stream, as --set stream=static, or --set session_gap=MI"]),
    (HEADER + ROW.format(1, 2, 1_600_000_000_000, "train"), ["--set", "session_from=gap"],
     ["xing.inter: found times in milliseconds (as 1600000000000)", "data convert --table"]),
    (HEADER + GOOD, ["--set", "session_gap=10"], ["'session_gap'", "no effect with session_from=column"]),
    (HEADER + GOOD, ["--set", "min_sessions=3"], ["'min_sessions'", "no effect with session_split=column"]),
])
def test_bad_files(capsys, content, arguments, words):
    message = refused(capsys, content, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("setting,field", [("session_from", "SESSION_FIELD"), ("session_split", "SPLIT_FIELD")])
def test_datasets_without_columns(capsys, setting, field):
    message = refused(capsys, HEADER + GOOD, "--set", "stream=sessions", "--set", f"{setting}=column", name="mine")
    assert f"setting '{setting}': dataset 'mine' has no" in message
    assert f"{field} in dataset_configs/mine.yaml" in message


def test_columns_are_part_of_a_runs_identity(registry, tmp_path, monkeypatch):
    """Of streams of sessions only, as far as they are read."""
    (tmp_path / "xing").mkdir()
    (tmp_path / "xing" / "xing.inter").write_text(HEADER + GOOD)
    original = load_config("xing")

    def name(settings=None, **changes):
        monkeypatch.setattr("fedcl_bench.data.source.load_config", lambda _: dataclasses.replace(original, **changes))
        return make_config(registry, "ft", "fedmf", "xing", 0, [("test", settings or {})], tmp_path).hash
    changes = {"SESSION_FIELD": "user_id", "SPLIT_FIELD": "user_id", "EVENT_FIELD": "user_id", "drop_events": ("4",)}
    cut = {"session_from": "gap", "session_split": "last"}
    blocks = {"stream": "blocks", "k_core": 0}
    for field, value in changes.items():
        assert name(**{field: value}) != name()
        assert (name(cut, **{field: value}) != name(cut)) == (field in ("EVENT_FIELD", "drop_events"))
        assert name(blocks, **{field: value}) == name(blocks)
    assert name(drop_events=(), EVENT_FIELD="") == name(drop_events=(), EVENT_FIELD="type")


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
    ([], TEST, "all_train_seq.txt: has no rows"), ([1, 2], TEST, "another pickle"),
    ([[1, 2], []], TEST, "all_train_seq.txt, row 3: field 'item' is '', expected an id"),
    ([[1, [2]]], TEST, r"'item' is '\[2\]'"),
    (TRAIN, [[1, 2]], "test.txt: is another pickle, .* expected a pickled pair"),
    (TRAIN, ([[1]], [2, 3]), "another pickle"),
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
    prefixes = step.sessions["train"].prefixes()
    written, every = prefixes.written_out(), torch.arange(len(prefixes.end))
    assert len(every) == 1 + 2 + 3 and written.lengths.tolist() == [2, 2, 3, 2, 3, 4]
    for ours, theirs in zip(prefixes.tail(every, 3), written.tail(every, 3)):
        assert torch.equal(ours, theirs)


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
