"""Domains whose users are known: their conversion, and who of one domain is who of another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.data.convert import convert
from fedcl_bench.data.datasets import build_stream, load_stream
from fedcl_bench.data.overlap import read_persons, shared_users
from fedcl_bench.data.source import Published
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.config import make_config

HEADER = "user_id:token\tperson:token\n"
# Of user 7 the validation repeats what it trains on, and the test both; user 9 has a sequence in each split.
ROWS = [("sport", "test", 7, 5), ("sport", "test", 7, 4), ("sport", "test", 7, 8),
        ("sport", "train", 7, 5), ("sport", "valid", 7, 5), ("sport", "valid", 7, 4), ("sport", "valid", 9, 2),
        ("sport", "train", 9, 1), ("sport", "test", 9, 3), ("cloth", "train", 9, 1)]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(rows=ROWS, **changed):
    Path("raw").mkdir(exist_ok=True)
    frame = pd.DataFrame(rows, columns=["domain", "split", "user_id", "item_id"]).astype({"domain": "category"})
    frame.assign(**changed).to_parquet("raw/inter.parquet")


def converted(name="amazon-sport"):
    return convert(name, Path("raw"), Path("data"), published=Published())


def written(suffix, text):
    path = Path("data/books").with_suffix(suffix)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_domain_of_a_table_has_each_interaction_once_in_order_of_the_splits():
    table()
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
    ({"user_id": None}, "row 1: field 'user_id' is ''"),
    ({"item_id": "a\tb"}, r"row 1: field 'item_id' is 'a\\tb'")])
def test_other_tables_are_refused(change, message):
    table(**change)
    with pytest.raises(UserError, match=message):
        converted()
    assert not Path("data").exists()


def test_a_table_without_a_column_is_refused():
    table()
    pd.read_parquet("raw/inter.parquet").drop(columns="split").to_parquet("raw/inter.parquet")
    with pytest.raises(UserError, match="has no column 'split'; found domain, user_id, item_id"):
        converted()


@pytest.mark.parametrize("text, message", [
    ("", "is empty"), ("user_id:token\tname:token\n1\ta\n", "column 'person' is missing; found columns user_id, name"),
    (f"{HEADER}a\tp\nb\n", "line 3: found 1 field "),
    (f"{HEADER}a\t\n", "line 2: field 'person' is '', expected an id"),
    (f"{HEADER}a\tp\na\tq\n", "line 3: found user 'a' again"),
    (f"{HEADER}a\tp\nb\tp\n", "line 3: found person 'p' again")])
def test_other_files_of_persons_are_refused(text, message):
    with pytest.raises(UserError, match=f"books.overlap[:,] {message}"):
        read_persons(written(".overlap", text))


def shop(name, users, persons):
    """A domain in which each user has 4 items, and a file of persons if there are any."""
    folder = Path("data", name)
    folder.mkdir(parents=True)
    rows = "".join(f"{user}\t{item}\t{item}\n" for user in users for item in range(4))
    (folder / f"{name}.inter").write_text(f"user_id:token\titem_id:token\ttimestamp:float\n{rows}")
    if persons:
        (folder / f"{name}.overlap").write_text(HEADER + "".join(f"{u}\t{p}\n" for u, p in persons.items()))


@pytest.fixture
def shops():
    """Three domains; users 1 and 4 of books are 4 and 9 of games, and nothing is known of tea's."""
    shop("books", [1, 2, 3, 4], {4: "d", 1: "a", 2: "b"})
    shop("games", [4, 9, 1], {4: "a", 9: "d", 1: "z", 77: "b"})
    shop("tea", [1, 2], {})
    return "books+games+tea"


def test_users_of_two_domains_with_one_person_are_the_same(shops, registry):
    """Users are numbered 0..3, 4..6 and 7..8; a user that is only in the file of persons counts for nothing."""
    config = make_config(registry, "ft", "sasrec", shops)
    found = shared_users(config.source, build_stream(config.source, config.stream))
    assert list(found) == [("books", "games"), ("books", "tea"), ("games", "tea")]
    np.testing.assert_array_equal(found["books", "games"], [[0, 4], [3, 5]])
    assert found["books", "tea"].shape == found["games", "tea"].shape == (0, 2)


def test_a_run_does_not_know_who_its_users_are(shops, registry):
    """Its stream and its hash are the same without the files."""
    def known():
        config = make_config(registry, "ft", "sasrec", shops)
        stream = build_stream(config.source, config.stream)
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


@pytest.mark.parametrize("folder, names, shared_by", [
    ("amazon-pairs-half-overlap", ("sport", "cloth"), [2363]),
    pytest.param("amazon-pairs-half-overlap", ("phone", "electronic"), [3100], marks=pytest.mark.long),
    pytest.param("feddcsr-fkcb", ("food", "kitchen", "clothing", "beauty"), [2891, 2541, 2786, 4486, 3133, 2717],
                 marks=pytest.mark.long)])
def test_the_real_domains_have_their_counts(shared, registry, folder, names, shared_by, capsys):
    names = [f"amazon-{name}" for name in names]
    for name in names:
        assert main(["data", "convert", name, "--raw", str(shared / "data" / "domains" / folder)]) == 0
        assert "as many rows, users, items as the publisher counts" in capsys.readouterr().out
        assert main(["data", name]) == 0
        assert "All counts are those expected" in capsys.readouterr().out
    config = make_config(registry, "ft", "sasrec", "+".join(names))
    found = shared_users(config.source, build_stream(config.source, config.stream))
    assert [len(users) for users in found.values()] == shared_by
