"""Domains whose users are known: their conversion, and who of one domain is who of another."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from helpers import lay_log, stream_of

from fedcl_bench.cli.main import main
from fedcl_bench.data.files.convert import convert
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.streams.overlap import read_persons
from fedcl_bench.data.source import PublishedDataset
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.config import make_config

HEADER = "user_id:token\tperson:token\n"
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
    assert (folder / "amazon-sport.overlap").read_text() == f"{HEADER}7\tsport-cloth:7\n9\tsport-cloth:9\n"
    assert [path.suffix for path in done.files] == [".overlap", ".inter"]
    assert not converted().changed


@pytest.mark.parametrize("change, message", [
    ({"domain": "phone"}, "has no domain 'sport'; found phone"),
    ({"split": "dev"}, "column 'split' has 'dev', expected train, valid, test"),
    ({"split": None}, "has no column 'split'; found domain, user_id, item_id"),
    ({"user_id": ["7", None] * 5}, "row .: field 'user_id' is ''"),
    ({"item_id": "a\tb"}, r"row 1: field 'item_id' is 'a\\tb'")])
def test_other_tables_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        converted(**change)
    assert not Path("data").exists()


@pytest.mark.parametrize("text, message", [
    ("", "is empty"), ("user_id:token\tname:token\n1\ta\n", "column 'person' is missing; found columns user_id, name"),
    (f"{HEADER}a\tp\nb\n", "line 3: found 1 field "),
    (f"{HEADER}a\t\n", "line 2: field 'person' is '', expected an id"),
    (f"{HEADER}a\tp\na\tq\n", "line 3: found user 'a' again"),
    (f"{HEADER}a\tp\nb\tp\n", "line 3: found person 'p' again")])
def test_other_files_of_persons_are_refused(text, message):
    Path("books.overlap").write_text(text)
    with pytest.raises(UserError, match=f"books.overlap[:,] {message}"):
        read_persons(Path("books.inter"))


def shop(name, users, persons):
    """A domain in which each user has 4 items, and a file of persons if there are any."""
    path = lay_log(name, [(user, item, item) for user in users for item in range(4)])
    if persons:
        path.with_suffix(".overlap").write_text(HEADER + "".join(f"{u}\t{p}\n" for u, p in persons.items()))


@pytest.fixture
def shops():
    """Three domains; users 1 and 4 of books are 4 and 9 of games, whose file names a user that is not there, and
    nothing is known of tea's."""
    shop("books", [1, 2, 3, 4], {4: "d", 1: "a", 2: "b"})
    shop("games", [4, 9, 1], {4: "a", 9: "d", 1: "z", 77: "b"})
    shop("tea", [1, 2], {})
    return "books+games+tea"


def test_a_run_does_not_know_who_its_users_are(shops, registry):
    """Its stream and its hash are the same without the files."""
    def known():
        config, stream = stream_of(registry, shops)
        return config.hash, [step.train.values.tolist() for step in stream.steps]

    before = known()
    for path in Path("data").glob("*/*.overlap"):
        path.write_text("no file of persons")
    assert known() == before


def central(registry, names, backbone="recguru", **settings):
    return make_config(registry, "ft", backbone, names, 0, [
        ("test", {"topology": "central", "known_users": True, "topk": [2], "valid_metric": "mrr@2", **settings})])


def test_a_run_that_asks_is_told_who_its_users_are(shops, registry):
    """Each two domains by number, users numbered from 0 in either; the file is then in the hash."""
    config = central(registry, shops)
    known = load_stream(config.source, config.stream).known
    assert {pair: users.tolist() for pair, users in known.items()} == {(0, 1): [[0, 0], [3, 1]], (0, 2): [], (1, 2): []}
    domains = CrossSilo(config.federation(load_stream(config.source, config.stream))).domains
    for domain, expected in zip(domains, ({1: [0, -1, -1, 1], 2: [-1] * 4}, {0: [0, 3, -1], 2: [-1] * 3},
                                          {0: [-1] * 2, 1: [-1] * 2})):
        for other, twins in expected.items():
            assert getattr(domain.module, f"twin{other}").tolist() == twins
    written = Path("data/tea/tea.overlap")
    written.write_text(f"{HEADER}1\tb\n")
    assert central(registry, shops).hash not in (config.hash, central(registry, shops, known_users=False).hash)
    written.unlink()
    assert central(registry, shops).hash == config.hash
    assert config.source.fingerprint == central(registry, shops, known_users=False).source.fingerprint  # comparable


@pytest.mark.parametrize("names, backbone, settings, said", [
    ("books+games", "recguru", {"topology": "federated"}, "accepted: false with topology=federated"),
    ("books+games", "recguru", {"topology": "local"}, "accepted: false with topology=local"),
    ("books+games", "sasrec", {}, "accepted: false with 'sasrec', which makes nothing of who the users are"),
    ("books+tea", "recguru", {}, "no user of books and tea is known to be the same")])
def test_to_be_told_is_refused_where_it_has_no_sense(shops, registry, names, backbone, settings, said):
    with pytest.raises(UserError, match=said):
        config = central(registry, names, backbone, **settings)
        config.check(config.federation(load_stream(config.source, config.stream)))


def test_statistics_say_how_many_users_are_known(shops, capsys):
    assert main(["data", shops]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "known to be the same" in line]
    assert notes == ["note: 2 users of books and games are known to be the same; runs use that with "
                     "known_users=true alone"]
