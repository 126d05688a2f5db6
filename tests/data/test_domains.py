"""Streams of domains: several datasets in one run, split by leave-one-out, each with users and items of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedcl_bench.cli.main import main
from fedcl_bench.data import prepared
from fedcl_bench.data.convert import convert
from fedcl_bench.data.datasets import build_stream, load_stream, statistics
from fedcl_bench.data.source import Published, load_config
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs.config import make_config

# Histories of users, in order; both domains have a user u1 and an item i1.
BOOKS = {"u1": ["i1", "i2", "i3", "i4", "i2"], "u2": ["i3", "i1", "i5"], "u3": ["i4", "i6"]}
GAMES = {"u1": ["i9", "i1", "i7", "i9"], "u5": ["i8", "i7", "i1"]}


def lay(name, histories, times=None, header="user_id:token\titem_id:token\ttimestamp:float"):
    rows = [f"{user}\t{item}\t{position if times is None else times}\n" for user, items in histories.items()
            for position, item in enumerate(items)]
    Path("data", name).mkdir(parents=True, exist_ok=True)
    Path("data", name, f"{name}.inter").write_text(header + "\n" + "".join(rows))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shops():
    lay("books", BOOKS)
    lay("games", GAMES)


def stream_of(registry, dataset="books+games", **settings):
    config = make_config(registry, "ft", "sasrec", dataset, overrides=[("test", settings)])
    return config, load_stream(config.source, config.stream)


def histories(stream, number, split):
    """User to items of its history of a split, by the publisher's ids with the domain's name."""
    step, sessions = stream.steps[0], stream.steps[0].sessions[split]
    users = np.repeat(stream.user_tokens[:step.n_users], sessions.count.numpy())
    bounds, name = sessions.start.tolist(), f"{stream.domains[number].name}:"
    return {user: stream.item_tokens[sessions.items[a:b].numpy()].tolist()
            for user, a, b in zip(users, bounds, bounds[1:]) if user.startswith(name)}


def named(name, items):
    return [f"{name}:{item}" for item in items]


def test_each_domain_is_split_by_leave_one_out(shops, registry):
    _, stream = stream_of(registry)
    assert [domain.name for domain in stream.domains] == ["books", "games"]
    for number, (name, data) in enumerate({"books": BOOKS, "games": GAMES}.items()):
        for split, held_out in (("train", 2), ("valid", 1), ("test", 0)):
            expected = {f"{name}:{user}": named(name, items[:len(items) - held_out])
                        for user, items in data.items() if len(items) >= 3}
            if split == "train":  # who has too few trains alone
                expected |= {f"{name}:{user}": named(name, items) for user, items in data.items() if len(items) < 3}
            assert histories(stream, number, split) == expected
        step, = stream.steps
        for split, last in (("valid", -2), ("test", -1)):
            found = {stream.user_tokens[user]: stream.item_tokens[step.split(split).of(user).numpy()].tolist()
                     for user in stream.domains[number].users if step.split(split).lengths[user]}
            assert found == {f"{name}:{user}": named(name, [items[last]]) for user, items in data.items()
                             if len(items) >= 3}


def test_ids_are_of_a_domain_alone(shops, registry):
    _, stream = stream_of(registry)
    books, games = stream.domains
    assert (books.users, books.items, games.users, games.items) == (range(3), range(6), range(3, 5), range(6, 10))
    assert stream.user_tokens.tolist() == [*named("books", BOOKS), *named("games", GAMES)]
    assert stream.item_tokens[6:].tolist() == named("games", ["i9", "i1", "i7", "i8"])
    step, = stream.steps
    assert (step.n_users, step.n_items, step.interactions) == (5, 10, sum((*books.interactions, *games.interactions)))
    for part in (books, games):
        own = part.of(step)
        assert own.n_users == len(part.users) and own.n_items == len(part.items)
        assert torch.equal(own.test.values + part.items.start, step.test.part(torch.tensor(part.users)).values)
        for sessions in own.sessions.values():
            assert 0 <= int(sessions.items.min()) and int(sessions.items.max()) < own.n_items


def test_histories_are_in_time_order(registry):
    lay("books", BOOKS)
    path = Path("data/books/books.inter")
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows[::-1]]) + "\n")
    lay("games", GAMES)
    _, stream = stream_of(registry)
    assert histories(stream, 0, "test")["books:u1"] == named("books", BOOKS["u1"])


def random_shop(seed, users=60, items=12):
    generator = np.random.default_rng(seed)
    return {f"u{u}": [f"i{i}" for i in generator.integers(items, size=generator.integers(3, 9))] for u in range(users)}


def test_a_pilot_draws_users_and_keeps_the_core(registry):
    lay("books", random_shop(1))
    lay("games", random_shop(2))
    lay("tools", random_shop(3))
    pilot = {"pilot_users": 20, "pilot_core": 4}
    _, stream = stream_of(registry, **pilot)
    for number, domain in enumerate(stream.domains):
        rows = [(user, item) for user, items in histories(stream, number, "test").items() for item in items]
        users, items = (pd.Series(column).value_counts() for column in zip(*rows))
        assert 5 <= len(users) <= 20 and users.min() >= 4 and items.min() >= 4
        assert len(domain.items) == len(items)
        everything = {f"{domain.name}:{user}": named(domain.name, history)
                      for user, history in random_shop(number + 1).items()}
        for user, history in histories(stream, number, "test").items():
            assert history == [item for item in everything[user] if item in items.index]
    _, beside_another = stream_of(registry, "tools+games", **pilot)
    assert histories(beside_another, 1, "test") == histories(stream, 1, "test")
    _, again = stream_of(registry, split_seed=1, **pilot)
    assert histories(again, 0, "test").keys() != histories(stream, 0, "test").keys()
    _, whole = stream_of(registry)
    assert len(whole.domains[0].users) == 60


def test_a_dataset_keeps_its_own_columns_and_filters(registry):
    lay("books", BOOKS, header="who:token\titem_id:token\tplace:float")
    Path("data/books/books.yaml").write_text("USER_ID_FIELD: who\nTIME_FIELD: place\nval_interval: {place: '[1,inf)'}\n"
                                             "settings: {k_core: 3}\n")
    lay("games", GAMES)
    config, stream = stream_of(registry, "books+games", k_core=0)
    assert histories(stream, 0, "test") == {"books:u1": named("books", BOOKS["u1"][1:])}
    Path("data/books/books.yaml").write_text("USER_ID_FIELD: who\nTIME_FIELD: place\n")
    other, stream = stream_of(registry)
    assert histories(stream, 0, "test")["books:u1"] == named("books", BOOKS["u1"]) and other.hash != config.hash


def test_a_prepared_stream_is_the_same(shops, registry):
    config, stream = stream_of(registry)
    assert main(["data", "prepare", "books+games"]) == 0
    folder = prepared.folder_of(config.source, config.stream)
    kept = prepared.load(folder)
    assert kept.domains == stream.domains and statistics(kept) == statistics(stream)
    assert histories(kept, 1, "valid") == histories(stream, 1, "valid")
    central, _ = stream_of(registry, topology="central")
    assert prepared.folder_of(central.source, central.stream) == folder  # the same data, however it is trained on
    for dataset, settings in (("games+books", {}), ("books+games", {"pilot_users": 5, "pilot_core": 0})):
        other = make_config(registry, "ft", "sasrec", dataset, overrides=[("test", settings)])
        assert prepared.folder_of(other.source, other.stream) != folder
    lay("games", {**GAMES, "u9": ["i1", "i7", "i8"]})
    changed, stream = stream_of(registry)
    assert changed.source.fingerprint != config.source.fingerprint and stream.steps[0].n_users == 6


@pytest.mark.parametrize("dataset, settings, message", [
    ("books", {"stream": "domains"}, "found one domain, accepted with stream=domains: several datasets"),
    ("books+gmes", {}, "unknown dataset 'gmes'.*\n?Did you mean 'games'"),
    ("books+", {}, "found the name ''"), ("books+books", {}, "found books 2 times"),
    ("books+../games", {}, "the folder|is not there"),
    ("books+games", {"stream": "static"}, "found static with the 2 datasets books, games"),
    ("books+games", {"split_file": "some.tsv"}, "setting 'split_file': found some.tsv with the 2 datasets"),
    ("books+games", {"k_core": 50}, "no interaction is left of 10 after the 50-core filter"),
    ("books+games", {"pilot_users": 2}, "domain 'books': no item is left of a pilot of 2 users"),
    ("books+games", {"pilot_core": 2}, "'pilot_core'.* has no effect without pilot_users"),
    ("books+games", {"min_interactions": 2}, "stream=domains"), ("books+games", {"blocks": 3}, "stream=domains"),
    ("+".join(["a" * 60, "b" * 60]), {}, "have 121 characters, accepted: at most 100")])
def test_what_is_no_stream_of_domains_is_refused(shops, registry, dataset, settings, message):
    with pytest.raises(UserError, match=message):
        stream_of(registry, dataset, **settings)


def test_a_domain_without_users_is_refused(registry):
    lay("books", {"u1": ["i1", "i2"], "u2": ["i1"]})
    lay("games", GAMES)
    with pytest.raises(UserError, match="domain 'books': no user has 3 interactions.* found at most 2"):
        stream_of(registry)
    lay("books", {"u1": ["i1", "i2", "i3"]})
    with pytest.raises(UserError, match="domain 'books': nobody has 2 interactions to train on"):
        stream_of(registry)


def test_statistics_are_shown_by_domain(shops, capsys):
    assert main(["data", "books+games"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip().split("\n")[0].split() == ["books+games", "books", "games"]
    assert "training samples" in shown and "books.inter" in shown and "games.inter" in shown


def tables(folder="raw", **changed):
    """Small Parquet tables in the layout of the shipped domains."""
    Path(folder).mkdir()
    frames = {"inter": pd.DataFrame({"user_id": [0, 0, 1], "item_id": [2, 1, 2], "order": [0, 1, 0]}, dtype="int32"),
              "item": pd.DataFrame({"item_id": [1, 2], "asin": ["B1", "B2"], "title": ["A\tcup &amp; more", "Tea"],
                                    "brand": ["Brand", None]})}
    for name, frame in {**frames, **changed}.items():
        frame.to_parquet(Path(folder, f"{name}.parquet"))


def test_parquet_tables_become_atomic_files():
    tables()
    done = convert("amazon-pantry", Path("raw"), Path("data"), published=Published())
    assert done.counts == {"rows": 3, "users": 2, "items": 2, "titles": 2}
    assert Path("data/amazon-pantry/amazon-pantry.inter").read_text() == (
        "user_id:token\titem_id:token\ttimestamp:float\n0\t2\t0\n0\t1\t1\n1\t2\t0\n")
    assert Path("data/amazon-pantry/amazon-pantry.item").read_text() == (
        "item_id:token\ttitle:token_seq\tbrand:token_seq\n1\tA cup & more\tBrand\n2\tTea\t\n")


@pytest.mark.parametrize("frame, message", [
    (pd.DataFrame({"user_id": [1], "item_id": [1]}), "has no column 'order'; found user_id, item_id"),
    (pd.DataFrame({"user_id": ["a\tb"], "item_id": ["1"], "order": [1]}), r"row 1: field 'user_id' is 'a\\tb'"),
    (pd.DataFrame({"user_id": ["a", None], "item_id": ["1", "2"], "order": [1, 2]}), "row 2: field 'user_id' is ''"),
    (pd.DataFrame({"user_id": ["a"], "item_id": ["1"], "order": [0.5]}), "field 'order' is '0.5', expected a whole"),
    (pd.DataFrame({"user_id": [], "item_id": [], "order": []}), "has no rows")])
def test_other_tables_are_refused(frame, message):
    tables(inter=frame)
    with pytest.raises(UserError, match=message):
        convert("amazon-pantry", Path("raw"), Path("data"), published=Published())
    assert not Path("data").exists()


def test_what_is_no_table_is_refused():
    tables()
    Path("raw/inter.parquet").write_text("no table")
    with pytest.raises(UserError, match="cannot be read as a Parquet table"):
        convert("online-retail-ffmsr", Path("raw"), Path("data"), published=Published())


@pytest.mark.parametrize("name, samples", [
    ("amazon-pantry", 85_653), pytest.param("online-retail-ffmsr", 470_346, marks=pytest.mark.long),
    pytest.param("amazon-arts", 255_143, marks=pytest.mark.long)])
def test_the_domains_of_ffmsr_have_its_counts(shared, registry, name, samples, capsys):
    """Users and items are those of its Table 2; so are the interactions of Online Retail."""
    assert main(["data", "convert", name, "--raw", str(shared / "data" / "domains" / name)]) == 0
    assert "as many rows, users, items, titles as the publisher counts" in capsys.readouterr().out
    assert main(["data", name]) == 0
    assert "All counts are those expected" in capsys.readouterr().out
    lay("games", GAMES)
    config = make_config(registry, "ft", "sasrec", f"games+{name}")
    counts, expected = statistics(build_stream(config.source, config.stream)), load_config(name).expected
    assert [counts[what][1] for what in ("users", "items", "interactions", "samples")] == [
        expected["accumulated_users"][0], expected["accumulated_items"][0], expected["interactions"][0], samples]
