"""Tables of real clients: one that is dealt out is read as the client's part of the stream; what is wrong is said."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from helpers import SMALL

from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.deployment.client_files import FEDERATION, Published, deal, read_client, read_published, table_of
from fedcl_bench.deployment.domain_files import deal_all
from fedcl_bench.experiments.partition import divide, stream_part
from fedcl_bench.runs.config import make_config

SESSIONS = {"min_session_length": 5, "min_sessions": 4, "stream": "sessions"}


@pytest.fixture
def dealt(registry, tmp_path):
    def make(**settings):
        config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", settings)])
        stream = load_stream(config.source, config.stream)
        names = divide(stream, 3)
        published = Published.of(config.source, config.stream, stream)
        return published, stream, names, deal(published, stream, names, tmp_path)
    return make


def same_stream(found, expected):
    for here, there in zip(found.steps, expected.steps, strict=True):
        sizes = [(step.n_users, step.n_items, step.old_users, step.old_items, step.interactions)
                 for step in (here, there)]
        assert sizes[0] == sizes[1]
        for split in ("train", "valid", "test"):
            assert torch.equal(here.split(split).indptr, there.split(split).indptr)
            assert torch.equal(here.split(split).values, there.split(split).values)
        assert here.sessions.keys() == there.sessions.keys()
        for split in here.sessions:
            for name in ("of_user", "start", "items", "times"):
                assert torch.equal(getattr(here.sessions[split], name), getattr(there.sessions[split], name))
    assert found.user_tokens.tolist() == expected.user_tokens.tolist()


@pytest.mark.parametrize("settings", [SMALL, {"stream": "static"}, SESSIONS])
def test_a_dealt_table_is_the_part_of_the_stream(dealt, tmp_path, settings):
    settings = {name: value for name, value in settings.items() if name not in ("rounds", "dim")}
    published, stream, names, tables = dealt(**settings)
    assert read_published(tmp_path / "server") == published
    for table, users in zip(tables, names):
        data = read_client(table, published)
        assert torch.equal(data.names, users) and data.unknown == 0
        same_stream(data.stream, stream_part(stream, users))


def test_rows_of_sessions_in_any_order_and_items_that_are_unknown(dealt):
    published, stream, names, tables = dealt(**SESSIONS)
    frame = pd.read_csv(tables[0], dtype=str)
    frame["timestamp"] = range(len(frame))
    frame.to_csv(tables[0], index=False)
    in_order = read_client(tables[0], published).stream
    frame.sample(frac=1.0, random_state=0).to_csv(tables[0], index=False)
    same_stream(read_client(tables[0], published).stream, in_order)
    first = frame["session"].eq(frame["session"][0]) & frame["user"].eq(frame["user"][0])
    frame.loc[first & (frame.index > 0), "item"] = "unheard of"
    frame.to_csv(tables[0], index=False)
    data = read_client(tables[0], published)
    assert data.unknown == first.sum() - 1
    assert all(int(split.lengths.min()) > 1 for step in data.stream.steps for split in step.sessions.values())
    frame.loc[frame["user"].eq(frame["user"][0]) & frame["split"].eq("train"), "item"] = "unheard of"
    frame.to_csv(tables[0], index=False)
    with pytest.raises(UserError, match="accepted: of each user a session to train on, of 2 interactions or more"):
        read_client(tables[0], published)


@pytest.mark.parametrize("settings", [{"k_core": 70}, {"stream": "static"}])
def test_a_table_of_times_is_cut_as_in_a_simulation(dealt, tmp_path, settings):
    """But for rows of equal time, whose order the table does not say: each row has a time of its own here."""
    published, stream, names, _ = dealt(**settings)
    frame = table_of(stream, names[0])
    order = {split: number for number, split in enumerate(("train", "valid", "test"))}
    if settings.get("stream") == "static":  # a user's last is test, the one before it valid
        frame["timestamp"] = frame.groupby("user").cumcount() + frame["split"].map(order) * 1e6
        published = Published(**{**vars(published), "until": []})
    else:  # only later blocks are split in the order of time
        frame["timestamp"] = frame["block"] * 1e9 + frame["split"].map(order) * 1e6 + range(len(frame))
        published = Published(**{**vars(published), "until": [1e9 - 1, 2e9 - 1, 3e9 - 1]})
    path = tmp_path / "mine.csv"
    frame.sample(frac=1.0, random_state=0).drop(columns=["block", "split"]).to_csv(path, sep="\t", index=False)
    found = read_client(path, published).stream
    for here, there in list(zip(found.steps, stream_part(stream, names[0]).steps))[len(found.steps) > 1:]:
        for split in ("valid", "test"):
            assert torch.equal(here.split(split).indptr, there.split(split).indptr)
            assert torch.equal(here.split(split).values, there.split(split).values)


def test_a_folder_keeps_no_texts_of_items_of_other_data(registry, tmp_path, growing):
    config = make_config(registry, "ft", "fedmf", str(growing), overrides=[("test", {"k_core": 0})])
    stream = load_stream(config.source, config.stream)
    published = Published.of(config.source, config.stream, stream)
    (described := growing.with_suffix(".item")).write_text("item_id:token\tname:token_seq\n")
    deal_all(published, config.source, stream, divide(stream, 2), tmp_path / "dealt")
    assert (texts := tmp_path / "dealt/server/federation.item").is_file()
    described.unlink()
    deal_all(published, config.source, stream, divide(stream, 2), tmp_path / "dealt")
    assert not texts.exists()


def test_ids_are_texts(dealt):
    """Also those that pandas takes for missing values or numbers."""
    published, _, _, tables = dealt(k_core=70)
    frame = pd.read_csv(tables[0], dtype=str)
    names = dict(zip(frame["item"].unique(), ["NA", "null", "nan", "None", "007", "1e3"]))
    frame.assign(item=frame["item"].replace(names)).to_csv(tables[0], index=False)
    renamed = replace(published, items=[names.get(item, item) for item in published.items])
    assert read_client(tables[0], renamed).unknown == 0


def test_unknown_items_are_left_out_and_counted(dealt):
    published, _, _, tables = dealt(k_core=70)
    frame = pd.read_csv(tables[0], dtype=str)
    frame.loc[[0, 3], "item"] = "nobody's"
    frame.to_csv(tables[0], index=False)
    data = read_client(tables[0], published)
    assert data.unknown == 2 and sum(len(step.train.values) for step in data.stream.steps) < len(frame)


def test_what_is_wrong_with_tables_and_files(dealt, tmp_path):
    published, stream, names, tables = dealt(k_core=70)
    with pytest.raises(UserError, match="holds client-3 of a deal among more clients; remove"):
        deal(published, stream, names[:2], tmp_path)
    frame = pd.read_csv(tables[0], dtype=str)
    late = published.users[published.steps[0][0]]
    first = replace(published, steps=[(published.steps[0][0], 1, 0), *published.steps[1:]])
    with pytest.raises(UserError, match="item '.*' is in block 0, accepted: from block 1 on"):
        read_client(tables[0], first)
    frame.drop(columns=["block", "split"]).assign(timestamp=1).to_csv(tables[0], index=False)
    with pytest.raises(UserError, match="accepted: user, item and block and split"):  # no time says when blocks end
        read_client(tables[0], replace(published, stream=replace(published.stream, split_file="blocks.tsv")))
    for changed, said in (
            (frame.drop(columns="item"), "no column item; found: user, block, split"),
            (frame.drop(columns=["block", "split"]).assign(timestamp="879959583000"), "in milliseconds .* in seconds"),
            (frame.drop(columns="split"), "accepted: user, item and timestamp, or user, item, block and split"),
            (frame.drop(columns="block"), "found the columns user, item, split, accepted: user, item and timestamp"),
            (frame.assign(user="stranger"), "user 'stranger' does not take part in the federation"),
            (frame.assign(user=late, block=0), f"user '{late}' is in block 0, accepted: from block 1 on"),
            (frame.assign(split="tset"), "column split: found 'tset', accepted: train, valid, test"),
            (frame.assign(block=4), "column block: accepted: 0 to 3"), (frame[:0], "at least one row"),
            (frame.assign(timestamp=["7", "2020-01-01"] * (len(frame) // 2) + ["7"] * (len(frame) % 2)),
             "row 2 below the header: column timestamp is '2020-01-01', accepted: a number"),
            (frame.assign(session=["", *frame["block"][1:]]), "in each a value in user, item, session"),
            (frame.assign(rating=["5", *["good"] * (len(frame) - 1)]), "row 2 .*: column rating is 'good'"),
            (frame.assign(rating=["5", *[""] * (len(frame) - 1)]), "row 2 .*: column rating is 'nan'")):
        changed.to_csv(tables[0], index=False)
        with pytest.raises(UserError, match=said):
            read_client(tables[0], published)
    with pytest.raises(UserError, match="cannot be read"):
        read_client(tmp_path / "none.csv", published)
    with pytest.raises(UserError, match=f"a folder with {FEDERATION}"):
        read_published(tmp_path / "client-1")
    (tmp_path / "server" / FEDERATION).write_text('{"dataset": 1}')
    with pytest.raises(UserError, match="is no description of a federation"):
        read_published(tmp_path / "server")
