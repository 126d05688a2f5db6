"""Streams of domains: several datasets in one run, split by leave-one-out, each with users and items of its own; over
time, where what a block trains on, validates and tests is what a plain loop over users would take; and who of one
domain is who of another."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import lay_log, output_of, stream_of
from hypothesis import given, settings, strategies as st

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream, statistics
from fedcl_bench.data.files.convert import convert
from fedcl_bench.data.files.recbole_files import Interactions
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.source import PublishedDataset, load_config
from fedcl_bench.data.streams.domain_streams import build_domains
from fedcl_bench.data.streams.overlap import read_persons, shared_users
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.config import make_config

# Histories of users, in order; both domains have a user u1 and an item i1.
BOOKS = {"u1": ["i1", "i2", "i3", "i4", "i2"], "u2": ["i3", "i1", "i5"], "u3": ["i4", "i6"]}
GAMES = {"u1": ["i9", "i1", "i7", "i9"], "u5": ["i8", "i7", "i1"]}


def rows_of(histories):
    return [(user, item, place) for user, items in histories.items() for place, item in enumerate(items)]


@pytest.fixture
def shops():
    lay_log("books", rows_of(BOOKS))
    lay_log("games", rows_of(GAMES))
    return "books+games"


def histories(stream, number, split):
    """User to items of its history of a split, by the publisher's ids with the domain's name."""
    step, sessions = stream.steps[0], stream.steps[0].sessions[split]
    users = np.repeat(stream.user_tokens[:step.n_users], sessions.count.numpy())
    bounds, name = sessions.start.tolist(), f"{stream.domains[number].name}:"
    return {user: stream.item_tokens[sessions.items[a:b].numpy()].tolist()
            for user, a, b in zip(users, bounds, bounds[1:]) if user.startswith(name)}


def named(name, items):
    return [f"{name}:{item}" for item in items]


def test_each_domain_is_split_by_leave_one_out_and_ids_are_its_own(shops, registry):
    """Blocks and splits of any domains: see below."""
    _, stream = stream_of(registry, shops)
    for number, (name, data) in enumerate({"books": BOOKS, "games": GAMES}.items()):
        for split, held_out in (("train", 2), ("valid", 1), ("test", 0)):
            expected = {user: items[:len(items) - held_out] for user, items in data.items() if len(items) >= 3}
            if split == "train":  # who has too few trains alone
                expected |= {user: items for user, items in data.items() if len(items) < 3}
            assert histories(stream, number, split) == {f"{name}:{user}": named(name, items)
                                                        for user, items in expected.items()}
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


def random_shop(seed, users=60, items=12):
    generator = np.random.default_rng(seed)
    return {f"u{u}": [f"i{i}" for i in generator.integers(items, size=generator.integers(3, 9))] for u in range(users)}


def test_a_pilot_draws_users_and_keeps_the_core(registry):
    for seed, name in enumerate(("books", "games", "tools"), start=1):
        lay_log(name, rows_of(random_shop(seed)))
    pilot = {"pilot_users": 20, "pilot_core": 4}
    _, stream = stream_of(registry, "books+games", **pilot)
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
    _, again = stream_of(registry, "books+games", split_seed=1, **pilot)
    assert histories(again, 0, "test").keys() != histories(stream, 0, "test").keys()
    _, whole = stream_of(registry, "books+games")
    assert len(whole.domains[0].users) == 60


def test_a_dataset_keeps_its_own_columns_and_filters(registry):
    rows = rows_of(BOOKS)[::-1]  # histories are in time order, whatever the file's
    yaml = lay_log("books", rows, "who:token\titem_id:token\tplace:float").with_suffix(".yaml")
    yaml.write_text("USER_ID_FIELD: who\nTIME_FIELD: place\nval_interval: {place: '[1,inf)'}\nsettings: {k_core: 3}\n")
    lay_log("games", rows_of(GAMES))
    config, stream = stream_of(registry, "books+games", k_core=0)
    assert histories(stream, 0, "test") == {"books:u1": named("books", BOOKS["u1"][1:])}
    yaml.write_text("USER_ID_FIELD: who\nTIME_FIELD: place\n")
    other, stream = stream_of(registry, "books+games")
    assert histories(stream, 0, "test")["books:u1"] == named("books", BOOKS["u1"]) and other.hash != config.hash
    yaml.write_text("USER_ID_FIELD: who\nTIME_FIELD: place\nval_interval: {place: '[99,inf)'}\n")
    with pytest.raises(UserError, match=r"after val_interval \{'place': '\[99,inf\)'\}; correct val_interval in the"):
        stream_of(registry, "books+games", k_core=0)


@pytest.mark.parametrize("dataset, values, message", [
    ("books", {"stream": "domains"}, "found one domain, accepted with stream=domains: several datasets"),
    ("books+gmes", {}, "unknown dataset 'gmes'.*\n?Did you mean 'games'"),
    ("books+", {}, "found the name ''"), ("books+books", {}, "found books 2 times"),
    ("books+../games", {}, "the folder|is not there"),
    ("books+games", {"stream": "static"}, "found static with the 2 datasets books, games"),
    ("books+games", {"split_file": "some.tsv"}, "setting 'split_file': found some.tsv with the 2 datasets"),
    ("books+games", {"k_core": 50}, "no interaction is left of 10 after the 50-core filter"),
    ("books+games", {"pilot_users": 2}, "domain 'books': no item is left of a pilot of 2 users"),
    ("books+games", {"pilot_core": 2}, "'pilot_core'.* has no effect without pilot_users"),
    ("books+games", {"blocks": 3}, "stream=domains"),
    ("books+games", {"base_share": 0.4}, "'base_share'.* has no effect with stream=domains and domain_blocks=1"),
    ("books+games", {"domain_blocks": 0}, "'domain_blocks' .*: found 0"),
    ("books+games", {"domain_blocks": 60}, r"domain 'books', block \d+: no user has 3 interactions"),
    ("books+few", {}, "domain 'few': no user has 3 interactions.* found at most 2"),
    ("books+one", {}, "domain 'one': nobody has 2 interactions to train on"),
    ("+".join(["a" * 60, "b" * 60]), {}, "have 121 characters, accepted: at most 100")])
def test_what_is_no_stream_of_domains_is_refused(shops, registry, dataset, values, message):
    lay_log("few", rows_of({"u1": ["i1", "i2"], "u2": ["i1"]}))
    lay_log("one", rows_of({"u1": ["i1", "i2", "i3"]}))
    with pytest.raises(UserError, match=message):
        stream_of(registry, dataset, **values)


def test_statistics_are_shown_by_domain(shops, capsys):
    shown = output_of(capsys, "data", shops)
    assert shown.strip().split("\n")[0].split() == ["books+games", "books", "games"]
    assert "training samples" in shown and "books.inter" in shown and "games.inter" in shown


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
    first, rest = int(share * len(order)), int((1 - share) * len(order) / max(1, blocks - 1))
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


@settings(max_examples=15)
@given(seed=st.integers(0, 10 ** 6), blocks=st.integers(1, 4), share=st.sampled_from([0.3, 0.5, 0.6]))
def test_every_block_is_what_a_loop_over_users_takes(seed, blocks, share):
    shops = [("books", shop(seed)), ("games", shop(seed + 1, users=5, items=9, rows=60))]
    expected = [[by_hand(data, blocks, share, now) for _, data in shops] for now in range(blocks)]
    try:
        stream = build_domains(shops, StreamSettings(stream="domains", domain_blocks=blocks, base_share=share))
    except UserError as error:
        assert any((f"block {now}: " in str(error) or blocks == 1)
                   and any(not samples or not held for samples, held in both)
                   for now, both in enumerate(expected))
        return
    assert [(step.n_users, step.n_items) for step in stream.steps] == [(14, 16)] * blocks
    assert [sum(domain.interactions) for domain in stream.domains] == [80, 60]
    for step, (samples, held) in zip(stream.units(), itertools.chain(*expected), strict=True):
        trained, tested = found_in(step)
        assert sorted(trained) == sorted(samples) and tested == held


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
    done = convert("amazon-pantry", Path("raw"), Path("data"), published=PublishedDataset())
    assert done.counts == {"rows": 3, "users": 2, "items": 2, "titles": 2}
    assert Path("data/amazon-pantry/amazon-pantry.inter").read_text() == (
        "user_id:token\titem_id:token\ttimestamp:float\n0\t2\t0\n0\t1\t1\n1\t2\t0\n")
    assert Path("data/amazon-pantry/amazon-pantry.item").read_text() == (
        "item_id:token\ttitle:token_seq\tbrand:token_seq\n1\tA cup & more\tBrand\n2\tTea\t\n")


@pytest.mark.parametrize("frame, message", [
    (pd.DataFrame({"user_id": [1], "item_id": [1]}), "has no column 'order'; found user_id, item_id"),
    (pd.DataFrame({"user_id": ["a\tb"], "item_id": ["1"], "order": [1]}), r"row 1: field 'user_id' is 'a\\tb'"),
    (pd.DataFrame({"user_id": ["a", None], "item_id": ["1", "2"], "order": [1, 2]}), "row 2: field 'user_id' is ''"),
    (pd.DataFrame({"user_id": ["a"], "item_id": ["1"], "order": [0.5]}), "field 'order' is '0.5', expected a whole")])
def test_other_tables_are_refused(frame, message):
    tables(inter=frame)
    with pytest.raises(UserError, match=message):
        convert("amazon-pantry", Path("raw"), Path("data"), published=PublishedDataset())
    assert not Path("data").exists()
    Path("raw/inter.parquet").write_text("no table")
    with pytest.raises(UserError, match="cannot be read as a Parquet table"):
        convert("online-retail-ffmsr", Path("raw"), Path("data"), published=PublishedDataset())


@pytest.mark.parametrize("folder, names, samples, same_users", [
    ("amazon-pantry", ["pantry"], [85_653], []), ("amazon-pairs-half-overlap", ["sport", "cloth"], None, [2363]),
    pytest.param("amazon-arts", ["arts"], [255_143], [], marks=pytest.mark.long),
    pytest.param("online-retail-ffmsr", ["online-retail-ffmsr"], [470_346], [], marks=pytest.mark.long),
    pytest.param("amazon-pairs-half-overlap", ["phone", "electronic"], None, [3100], marks=pytest.mark.long),
    pytest.param("feddcsr-fkcb", ["food", "kitchen", "clothing", "beauty"], None,
                 [2891, 2541, 2786, 4486, 3133, 2717], marks=pytest.mark.long)])
def test_the_real_domains_have_their_counts(shared, registry, folder, names, samples, same_users, capsys):
    """Users and items are those of FFMSR's Table 2; so are the interactions of Online Retail."""
    names = [name if name == folder else f"amazon-{name}" for name in names]
    for name in names:
        assert main(["data", "convert", name, "--raw", str(shared / "data" / "domains" / folder)]) == 0
        assert "as many rows, users, items" in capsys.readouterr().out
        assert "All counts are those expected" in output_of(capsys, "data", name)
    lay_log("games", rows_of(GAMES))
    config, stream = stream_of(registry, "+".join([*names, "games"][:max(2, len(names))]))
    assert [len(users) for users in shared_users(config.source, stream).values() if len(users)] == same_users
    if samples:
        counts, expected = statistics(stream), load_config(names[0]).expected
        assert [counts[what][0] for what in ("users", "items", "interactions", "samples")] == [
            expected["accumulated_users"][0], expected["accumulated_items"][0], expected["interactions"][0], *samples]


PERSONS = "user_id:token\tperson:token\n"
# Of user 7 the validation repeats what it trains on, and the test both; user 9 has a sequence in each split.
ROWS = [("sport", "test", 7, 5), ("sport", "test", 7, 4), ("sport", "test", 7, 8),
        ("sport", "train", 7, 5), ("sport", "valid", 7, 5), ("sport", "valid", 7, 4), ("sport", "valid", 9, 2),
        ("sport", "train", 9, 1), ("sport", "test", 9, 3), ("cloth", "train", 9, 1)]


def converted(**changed):
    """What becomes of the table, some columns of which have other values or are not there."""
    Path("raw").mkdir(exist_ok=True)
    frame = pd.DataFrame(ROWS, columns=["domain", "split", "user_id", "item_id"]).astype({"domain": "category"})
    frame.assign(**changed).dropna(axis=1, how="all").to_parquet("raw/inter.parquet")
    return convert("amazon-sport", Path("raw"), Path("data"), published=PublishedDataset())


def test_a_domain_of_a_table_has_each_interaction_once_in_order_of_the_splits():
    done = converted()
    assert done.counts == {"rows": 6, "users": 2, "items": 6}
    folder = Path("data/amazon-sport")
    assert (folder / "amazon-sport.inter").read_text() == (
        "user_id:token\titem_id:token\ttimestamp:float\n"
        "7\t5\t0\n9\t1\t0\n7\t4\t1\n9\t2\t1\n7\t8\t2\n9\t3\t2\n")
    assert (folder / "amazon-sport.overlap").read_text() == f"{PERSONS}7\tsport-cloth:7\n9\tsport-cloth:9\n"
    assert [path.suffix for path in done.files] == [".overlap", ".inter"]
    assert not converted().changed


@pytest.mark.parametrize("change, message", [
    ({"domain": "phone"}, "has no domain 'sport'; found phone"),
    ({"split": "dev"}, "column 'split' has 'dev', expected train, valid, test"),
    ({"split": None}, "has no column 'split'; found domain, user_id, item_id"),
    ({"user_id": ["7", None] * 5}, "row .: field 'user_id' is ''")])
def test_other_tables_of_pairs_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        converted(**change)
    assert not Path("data").exists()


@pytest.mark.parametrize("text, message", [
    ("", "is empty"), ("user_id:token\tname:token\n1\ta\n", "column 'person' is missing; found columns user_id, name"),
    (f"{PERSONS}a\tp\nb\n", "line 3: found 1 field "),
    (f"{PERSONS}a\t\n", "line 2: field 'person' is '', expected an id"),
    (f"{PERSONS}a\tp\na\tq\n", "line 3: found user 'a' again"),
    (f"{PERSONS}a\tp\nb\tp\n", "line 3: found person 'p' again")])
def test_other_files_of_persons_are_refused(text, message):
    Path("books.overlap").write_text(text)
    with pytest.raises(UserError, match=f"books.overlap[:,] {message}"):
        read_persons(Path("books.inter"))


def known_shop(name, users, persons):
    """A domain in which each user has 4 items, and a file of persons if there are any."""
    path = lay_log(name, [(user, item, item) for user in users for item in range(4)])
    if persons:
        path.with_suffix(".overlap").write_text(PERSONS + "".join(f"{u}\t{p}\n" for u, p in persons.items()))


@pytest.fixture
def known_shops():
    """Three domains; users 1 and 4 of books are 4 and 9 of games, whose file names a user that is not there, and
    nothing is known of tea's."""
    known_shop("books", [1, 2, 3, 4], {4: "d", 1: "a", 2: "b"})
    known_shop("games", [4, 9, 1], {4: "a", 9: "d", 1: "z", 77: "b"})
    known_shop("tea", [1, 2], {})
    return "books+games+tea"


def test_a_run_does_not_know_who_its_users_are(known_shops, registry):
    """Its stream and its hash are the same without the files."""
    def known():
        config, stream = stream_of(registry, known_shops)
        return config.hash, [step.train.values.tolist() for step in stream.steps]

    before = known()
    for path in Path("data").glob("*/*.overlap"):
        path.write_text("no file of persons")
    assert known() == before


def central(registry, names, backbone="recguru", **settings):
    return make_config(registry, "ft", backbone, names, 0, [
        ("test", {"topology": "central", "known_users": True, "topk": [2], "valid_metric": "mrr@2", **settings})])


def test_a_run_that_asks_is_told_who_its_users_are(known_shops, registry):
    """Each two domains by number, users numbered from 0 in either; the file is then in the hash."""
    config = central(registry, known_shops)
    known = load_stream(config.source, config.stream).known
    assert {pair: users.tolist() for pair, users in known.items()} == {(0, 1): [[0, 0], [3, 1]], (0, 2): [], (1, 2): []}
    domains = CrossSilo(config.federation(load_stream(config.source, config.stream))).domains
    for domain, expected in zip(domains, ({1: [0, -1, -1, 1], 2: [-1] * 4}, {0: [0, 3, -1], 2: [-1] * 3},
                                          {0: [-1] * 2, 1: [-1] * 2})):
        for other, twins in expected.items():
            assert getattr(domain.module, f"twin{other}").tolist() == twins
    written = Path("data/tea/tea.overlap")
    written.write_text(f"{PERSONS}1\tb\n")
    untold = central(registry, known_shops, known_users=False)
    assert central(registry, known_shops).hash not in (config.hash, untold.hash)
    written.unlink()
    assert central(registry, known_shops).hash == config.hash
    assert config.source.fingerprint == untold.source.fingerprint  # comparable


@pytest.mark.parametrize("names, backbone, settings, said", [
    ("books+games", "recguru", {"topology": "federated"}, "accepted: false with topology=federated"),
    ("books+games", "recguru", {"topology": "local"}, "accepted: false with topology=local"),
    ("books+games", "sasrec", {}, "accepted: false with 'sasrec', which makes nothing of who the users are"),
    ("books+tea", "recguru", {}, "no user of books and tea is known to be the same")])
def test_to_be_told_is_refused_where_it_has_no_sense(known_shops, registry, names, backbone, settings, said):
    with pytest.raises(UserError, match=said):
        config = central(registry, names, backbone, **settings)
        config.check(config.federation(load_stream(config.source, config.stream)))


def test_statistics_say_how_many_users_are_known(known_shops, capsys):
    notes = [line for line in output_of(capsys, "data", known_shops).splitlines() if "known to be the same" in line]
    assert notes == ["note: 2 users of books and games are known to be the same; runs use that with "
                     "known_users=true alone"]
