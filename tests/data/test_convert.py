"""Publishers' files to atomic files: conversion, its checks, and download from a server of the test's own."""

import dataclasses
import hashlib
import io
import os
import socket
import sys
import threading
import zipfile
from pathlib import Path

import helpers
import pytest
from helpers import output_of

from fedcl_bench.cli.commands.data import ACTIONS
from fedcl_bench.cli.main import main
from fedcl_bench.data.files.archives import fetch
from fedcl_bench.data.files.convert import FORMATS, clean, convert
from fedcl_bench.data.files.recbole_files import bundled
from fedcl_bench.data.source import PublishedDataset, configured, load_config
from fedcl_bench.core.errors import UserError

UNCHECKED = PublishedDataset()
ITEM_100K = "{}|{}|01-Jan-1995||http://us.imdb.com/M/title-exact?x|" + "|".join("0000010010000000000")  # Comedy, Drama

HETREC = ("id", "title", "imdbID", "spanishTitle", *(f"column {number}" for number in range(5, 22)))
# Small files in the publishers' formats, by dataset.
SMALL = {
    "ml-100k": {
        "u.data": b"196\t242\t3\t881250949\n186\t302\t3\t891717742\n196\t302\t4.5\t881250949\n",
        "u.item": ("\n".join([ITEM_100K.format(242, "Kol\u00eda (1996)"), ITEM_100K.format(302, "L.A.\tStory & \x85Co"),
                              ITEM_100K.format(303, "\"Hot\" Rod &amp; Reel")]) + "\n").encode("latin-1")},
    "ml-latest-small": {
        "ratings.csv": b"userId,movieId,rating,timestamp\r\n1,1,4.0,964982703\r\n1,3,0.5,964981247\r\n",
        "movies.csv": ("movieId,title,genres\r\n1,Toy Story (1995),Adventure|Sci-Fi\r\n"
                       "3,\"Mis\u00e9rables, Les\",Drama\r\n").encode()},
    "lastfm-2k": {
        "user_taggedartists-timestamps.dat": b"userID\tartistID\ttagID\ttimestamp\r\n2\t52\t13\t1238536800000\r\n"
                                             b"2\t52\t15\t1238536800000\r\n3\t52\t15\t-428720400000\r\n"
                                             b"2\t52\t15\t1238536800001\r\n2\t52\t16\t1238536800000\r\n"},
    "hetrec2011-ml": {
        "user_ratedmovies-timestamps.dat": b"userID\tmovieID\trating\ttimestamp\r\n75\t3\t1\t1162160236000\r\n"
                                           b"75\t32\t4.5\t1162160624000\r\n",
        "movies.dat": ("\t".join(HETREC) + "\r\n"
                       + "\t".join(["3", "L\u00e9on", "0110413", "El profesional", *["x"] * 17]) + "\r\n"
                       + "\t".join(["32", "Twelve Monkeys", "0114746", "Doce monos", *["x"] * 17]) + "\r\n"
                       ).encode("latin-1"),
        "movie_genres.dat": b"movieID\tgenre\r\n3\tCrime\r\n32\tMystery\r\n3\tDrama\r\n"},
    "xing": {"interactions.csv": b"user_id\titem_id\tinteraction_type\tcreated_at\n7\t40\t1\t1443439587\n"
                                 b"7\t40\t4\t1443439602\n"},
    "retailrocket": {
        "events.csv": b"timestamp,visitorid,event,itemid,transactionid\n1433221332117,257597,view,355908,\n"
                      b"1433222276276,599528,transaction,356475,4000\n1433221332117,257597,view,355908,\n"},
    "lastfm-1k": {
        "userid-timestamp-artid-artname-traid-traname.tsv": (
            "user_000001\t2009-05-04T23:08:57Z\tf1b1cf71\tDeep Dish\t\tFlashdance\n"
            "user_000001\t2009-05-04T13:54:10Z\t\tBj\u00f6rk & \"Co\"\u0085\r\u2028x\ta5\tTr\u00e4ck\r\n"
            "user_000002\t1970-01-02T00:00:01Z\t\t \ta6\tnameless\n").encode()},
    "tmall": {
        "user_log_format1.csv": b"user_id,item_id,cat_id,seller_id,brand_id,time_stamp,action_type\n"
                                b"328862,323294,833,2882,2661.0,0829,0\n328862,844400,1271,2882,,0829,3\n"
                                b"5,844400,1271,2882,,1111,2\n"},
}
ATOMIC = {
    "ml-100k": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n"
                "186\t302\t3\t891717742\n196\t302\t4.5\t881250949\n",
                "item_id:token\ttitle:token_seq\tgenres:token_seq\n242\tKol\u00eda (1996)\tComedy Drama\n"
                "302\tL.A. Story &  Co\tComedy Drama\n303\t\"\"\"Hot\"\" Rod & Reel\"\tComedy Drama\n"),
    "ml-latest-small": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t1\t4.0\t964982703\n"
                        "1\t3\t0.5\t964981247\n",
                        "item_id:token\ttitle:token_seq\tgenres:token_seq\n1\tToy Story (1995)\tAdventure Sci-Fi\n"
                        "3\tMis\u00e9rables, Les\tDrama\n"),
    "lastfm-2k": ("user_id:token\titem_id:token\ttimestamp:float\n2\t52\t1238536800.000\n3\t52\t-428720400.000\n"
                  "2\t52\t1238536800.001\n", None),
    "hetrec2011-ml": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n75\t3\t1\t1162160236.000\n"
                      "75\t32\t4.5\t1162160624.000\n",
                      "item_id:token\ttitle:token_seq\tgenres:token_seq\n3\tL\u00e9on\tCrime Drama\n"
                      "32\tTwelve Monkeys\tMystery\n"),
    "xing": ("user_id:token\titem_id:token\tinteraction_type:token\ttimestamp:float\n7\t40\t1\t1443439587\n"
             "7\t40\t4\t1443439602\n", None),
    "retailrocket": ("user_id:token\titem_id:token\tevent:token\ttimestamp:float\n"
                     "257597\t355908\tview\t1433221332.117\n599528\t356475\ttransaction\t1433222276.276\n"
                     "257597\t355908\tview\t1433221332.117\n", None),
    "lastfm-1k": ("user_id:token\titem_id:token\ttimestamp:float\nuser_000001\tf1b1cf71\t1241478537\n"
                  "user_000001\tBj\u00f6rk & \"Co\" x\t1241445250\n", None),
    "tmall": ("user_id:token\titem_id:token\taction_type:token\ttimestamp:float\n328862\t323294\t0\t1409270400\n"
              "328862\t844400\t3\t1409270400\n5\t844400\t2\t1415664000\n", None),
}
RAW_ROWS = {"lastfm-2k": 5, "lastfm-1k": 3}  # where some are left out


@pytest.fixture
def publish(monkeypatch):
    """Make the commands see other facts about a dataset's raw files."""
    def change(name, **facts):
        def load(asked):
            config = load_config(asked)
            return dataclasses.replace(config, raw=PublishedDataset(**facts)) if asked == name else config
        monkeypatch.setattr("fedcl_bench.data.files.convert.load_config", load)
        monkeypatch.setattr("fedcl_bench.cli.commands.data.load_config", load)
    return change


def lay(name, folder="raw", **replaced):
    """Write the small files of a dataset, some of them (by what follows the last dot) with another content."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file, content in SMALL[name].items():
        content = replaced.get(file.rpartition(".")[2], content)
        if content is not None:
            Path(folder, file).write_bytes(content)
    return Path(folder)


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def refused(capsys, *words):
    """What a bad command says; it leaves no dataset."""
    message = helpers.refused(capsys, *words)
    assert not list(Path(".").glob("data/*/*"))
    return message


@pytest.mark.parametrize("name,place", [*((name, "raw") for name in SMALL), ("ml-100k", "raw/of this dataset"),
                                        ("ml-100k", "zip"), ("xing", "zip")])
def test_small_files_in_the_publishers_format(name, place):
    if place == "zip":
        raw = Path("some.zip")
        raw.write_bytes(zipped({f"top/{file}": content for file, content in SMALL[name].items()}))
    else:
        lay(name, place.replace("of this dataset", name))
        raw = Path("raw")
    done = convert(name, raw, Path("out"), published=UNCHECKED)
    inter, item = ATOMIC[name]
    assert Path(f"out/{name}/{name}.inter").read_text(encoding="utf-8") == inter
    assert done.interactions == inter.count("\n") - 1 and done.changed and done.files[-1].suffix == ".inter"
    assert done.counts["rows"] == RAW_ROWS.get(name, done.interactions)
    if item is None:
        assert [path.name for path in done.files] == [f"{name}.inter"]
    else:
        assert Path(f"out/{name}/{name}.item").read_text(encoding="utf-8") == item
        assert done.counts["titles"] == item.count("\n") - 1
    assert all("no checksum is published" in check for check in done.checks) and not done.warnings
    assert not list(Path("out", name).glob(".*"))  # no temporary files


def test_clean_titles():
    for raw, expected in (("a\tb\r\nc\u2028d", "a b c d"), ("Law &amp; Order &#39;s", "Law & Order 's"),
                          ("AT&T; R&D &notin &", "AT&T; R&D &notin &"), ("a &#9; b", "a   b")):
        assert clean(raw) == expected


@pytest.mark.parametrize("name", ["ml-latest-small", "lastfm-2k", "xing"])
def test_real_files_give_the_atomic_files_in_use(shared, capsys, name):
    if name == "xing":
        pytest.importorskip("tables", reason="needs the extra [hdf]")
    raw = shared / "data" / "raw"
    if name == "lastfm-2k":  # a reconstruction
        raw, file = Path("raw"), raw / name / "user_taggedartists-timestamps.RECONSTRUCTED.dat"
        raw.mkdir()
        (raw / file.name.replace(".RECONSTRUCTED", "")).symlink_to(file)
    out = output_of(capsys, "data", "convert", name, "--raw", raw, "--out", "out")
    assert f"next: run_bench.py data {name} --data-dir out" in out and "as many rows, users, items" in out
    assert ("sha256 agrees" in out) == (name != "lastfm-2k")
    for path in Path("out", name).iterdir():
        assert path.read_bytes() == (shared / "data" / "atomic" / name / path.name).read_bytes()
    assert "All counts are those expected" in output_of(capsys, "data", name, "--data-dir", "out")


def test_ml100k_gives_what_recbole_bundles(capsys):
    """RecBole's rows are those of u.data, so its checksum, counts and the result are known."""
    inter = (bundled("ml-100k") / "ml-100k.inter").read_bytes().replace(b"\r\n", b"\n")
    lay("ml-100k", data=inter.partition(b"\n")[2],
        item="".join(ITEM_100K.format(i, f"Film {i}") + "\n" for i in range(1, 1683)).encode())
    out = output_of(capsys, "data", "convert", "ml-100k", "--raw", "raw")
    assert "100,000 rows of 943 users and 1,682 items" in out and "u.data: sha256 agrees" in out
    assert "u.item: no checksum is published" in out and out.endswith("next: run_bench.py data ml-100k\n")
    assert Path("data/ml-100k/ml-100k.inter").read_bytes() == inter
    out = output_of(capsys, "data", "ml-100k")
    assert "All counts are those expected" in out and "data/ml-100k/ml-100k.inter" in out


@pytest.mark.parametrize("name, separator", [("ml-100k", "\t"), ("ml-latest-small", ","), ("retailrocket", ","),
                                             ("tmall", ",")])
def test_a_sample_may_have_additional_columns(name, separator):
    """Behind the publisher's, with a header or without; what is read of it is the same."""
    (file, content), *_ = SMALL[name].items()
    lines = content.decode().splitlines()
    more = "\n".join(f"{line}{separator}{'x' if i else 'split'}{separator}{i}" for i, line in enumerate(lines)) + "\n"
    lay(name)
    Path("raw", file).write_bytes(more.encode())
    convert(name, Path("raw"), Path("out"), any_checksum=True)
    assert Path("out", name, f"{name}.inter").read_text() == ATOMIC[name][0]


HDF = {"user_id": [1, 1], "item_id": [5, 5], "interaction_type": [1, 3], "created_at": [1443439587, 1443439602],
       "session_id": [842, 842]}


def lay_hdf(path="raw/session.hdf", keys=("train", "valid", "test"), **columns):
    """Write a file like that of FCUCR's authors, the tables in another order than they are read in."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("tables", reason="needs the extra [hdf]")
    Path(path).parent.mkdir(exist_ok=True)
    frame = pandas.DataFrame({name: values for name, values in {**HDF, **columns}.items() if values is not None})
    for key in reversed(keys):
        frame.to_hdf(path, key=key)


def test_the_authors_file_of_xing_comes_first():
    lay("xing")
    lay_hdf()
    convert("xing", Path("raw"), Path("out"), published=UNCHECKED)
    rows = "1\t5\t842\t1\t1443439587\t{0}\n1\t5\t842\t3\t1443439602\t{0}\n"
    assert Path("out/xing/xing.inter").read_text() == (
        "user_id:token\titem_id:token\tsession_id:token\tinteraction_type:float\ttimestamp:float\tsplit:token\n"
        + "".join(rows.format(split) for split in ("train", "valid", "test")))


@pytest.mark.parametrize("prefix", ["", "recsyschallenge_v2017_interactions_final_anonym_training_export."])
def test_interactions_of_the_challenge_are_not_those_of_the_authors(capsys, prefix):
    """So the config's counts are not asked of them, and sessions are to be cut; the later challenge's header has longer
    names."""
    header, _, rows = SMALL["xing"]["interactions.csv"].decode().partition("\n")
    header = "\t".join(prefix + name for name in header.split("\t"))
    lay("xing", csv=f"{header}\n{rows}".encode())
    out = output_of(capsys, "data", "convert", "xing", "--raw", "raw")
    assert "2 rows of 1 users and 1 items" in out and "publisher counts" not in out
    assert out.endswith("next: run_bench.py data xing --set session_from=gap --set session_split=last\n")
    assert Path("data/xing/xing.inter").read_text() == ATOMIC["xing"][0]


@pytest.mark.parametrize("change,words", [
    ({"keys": ("train", "test")}, ["session.hdf: has no table 'valid'", "train, valid, test"]),
    ({"session_id": None}, ["table 'train' has no column 'session_id'"]),
    ({name: [] for name in HDF}, ["session.hdf: has no rows"]),
    ({"item_id": [5, -1]}, ["session.hdf, row 2: field 'item_id' is '-1'", "an id"]),
    (None, ["session.hdf: cannot be read as an HDF file"]),
])
def test_malformed_hdf_files(capsys, publish, monkeypatch, change, words):
    publish("xing")
    lay_hdf(**change or {})
    if change is None:
        Path("raw/session.hdf").write_text("<html>")
    message = refused(capsys, "data", "convert", "xing", "--raw", "raw")
    assert all(word in message for word in words), message
    monkeypatch.setitem(sys.modules, "tables", None)
    message = refused(capsys, "data", "convert", "xing", "--raw", "raw")
    assert "raw/session.hdf: reading HDF files needs PyTables" in message and "pip install 'tables>=3.8'" in message


@pytest.mark.parametrize("name,replaced,words", [
    ("ml-100k", {"data": b""}, ["u.data", "is empty", "4 fields separated by tabs"]),
    ("ml-100k", {"data": b"1\t2\t3\t4\n1\t2\t3\n"}, ["u.data, line 2", "found 3 fields ('1\\t2\\t3')", "expected 4"]),
    ("ml-100k", {"data": b"1\t2\tgood\t4\n"}, ["u.data, line 1", "'rating' is 'good'", "expected a number"]),
    ("ml-100k", {"data": b"1\t\t3\t4\n"}, ["'item id' is ''", "an id"]),
    ("ml-100k", {"data": b"1\t2\t3\t4\n\xe9\t2\t3\t4\n"}, ["u.data, line 2", "'user id' is not UTF-8", "Save"]),
    ("ml-100k", {"item": (ITEM_100K.format(1, "A").replace("|1|", "|2|", 1) + "\n").encode()},
     ["u.item, line 1", "'Comedy' is '2'", "0 or 1"]),
    ("ml-100k", {"item": None}, ["raw", "has no u.item", "https://files.grouplens.org/datasets/movielens/ml-100k.zip"]),
    ("ml-latest-small", {"csv": b"userId,movieId,tag,timestamp\n1,1,x,1\n"},
     ["ratings.csv, line 1", "no column 'rating'", "'userId,movieId,tag,timestamp'", "rating, timestamp"]),
    ("ml-latest-small", {"csv": b"userId,movieId,rating,timestamp\r\n"}, ["ratings.csv", "no rows below its header"]),
    ("xing", {"csv": None}, ["raw: has no session.hdf and no interactions.csv"]),
    ("xing", {"csv": SMALL["xing"]["interactions.csv"] + b"7\t40\t1\t1443439587.5\n"},
     ["interactions.csv, line 4", "'created_at' is '1443439587.5'", "a whole number"]),
    ("retailrocket", {"csv": b"timestamp,visitorid,event,itemid,transactionid\n1433221332117,2,buy,3,\n"},
     ["events.csv, line 2", "'event' is 'buy'", "view, addtocart or transaction"]),
    ("lastfm-1k", {"tsv": b"user_000001\t2009-02-29T23:08:57Z\ta\tb\tc\td\n"},
     ["line 1", "'timestamp' is '2009-02-29T23:08:57Z'", "a time as 2009-04-08T01:57:47Z"]),
    ("tmall", {"csv": SMALL["tmall"]["user_log_format1.csv"] + b"5,4,3,2,1,0230,0\n"},
     ["user_log_format1.csv, line 5", "'time_stamp' is '0230'", "a day as 0829"]),
])
def test_malformed_files(capsys, publish, name, replaced, words):
    publish(name, url=load_config(name).raw.url)
    lay(name, **replaced)
    message = refused(capsys, "data", "convert", name, "--raw", "raw")
    assert all(word in message for word in words), message


def test_text_that_was_made_utf8_is_read_as_such(publish):
    lay("hetrec2011-ml")
    path = Path("raw/movies.dat")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().decode("latin-1").encode())
    convert("hetrec2011-ml", Path("raw"), Path("out"), published=UNCHECKED)
    assert Path("out/hetrec2011-ml/hetrec2011-ml.item").read_text(encoding="utf-8") == ATOMIC["hetrec2011-ml"][1]


def test_other_counts_than_the_publishers(capsys, publish):
    counts = {"rows": 100000, "users": 2, "items": 2, "titles": 4}
    publish("ml-100k", url="https://somewhere/ml-100k.zip", counts=counts)
    lay("ml-100k")
    for arguments in ([], ["--force"]):
        message = refused(capsys, "data", "convert", "ml-100k", "--raw", "raw", *arguments)
        assert all(word in message for word in ("raw/u.data", "3 rows instead of 100,000", "3 titles instead of 4",
                                                "https://somewhere", "--any-checksum")) \
            and "users instead" not in message
    assert main(["data", "convert", "ml-100k", "--raw", "raw", "--any-checksum"]) == 0
    assert "taken as a sample, with 3 rows instead of 100,000" in capsys.readouterr().err


def test_other_checksum_than_the_publishers(capsys, publish):
    right = hashlib.sha256(SMALL["ml-100k"]["u.item"]).hexdigest()
    publish("ml-100k", url="https://somewhere/ml-100k.zip", sha256={"u.data": "ab" * 32, "u.item": right})
    lay("ml-100k")
    found = hashlib.sha256(SMALL["ml-100k"]["u.data"]).hexdigest()
    Path("raw.zip").write_bytes(zipped(SMALL["ml-100k"]))
    message = refused(capsys, "data", "convert", "ml-100k", "--raw", "raw.zip")
    assert all(word in message for word in ("u.data", found, "ab" * 32, "https://somewhere", "--any-checksum"))
    assert main(["data", "convert", "ml-100k", "--raw", "raw.zip", "--any-checksum", "--out", "zip"]) == 0
    assert f"u.data: sha256 is {found}" in capsys.readouterr().err
    assert main(["data", "convert", "ml-100k", "--raw", "raw"]) == 0
    captured = capsys.readouterr()
    assert f"warning: raw/u.data: sha256 is {found}" in captured.err and "raw/u.item: sha256 agrees" in captured.out


@pytest.mark.parametrize("arguments,words", [
    (["data", "convert", "ml-100", "--raw", "raw"], ["unknown dataset 'ml-100'", "'ml-100k'"]),
    *((["data", *words], ["'amazon-office': nothing here reads its publisher's files", "amazon-office.inter yourself"])
      for words in (["convert", "amazon-office", "--raw", "raw"], ["download", "amazon-office"])),
    (["data", "conver", "ml-100k", "--raw", "raw"], ["unknown data command 'conver'", "'convert'"]),
    (["data", "convert", "ml-100k"], ["--raw"]),
    (["data", "convert", "ml-100k", "--raw", "absent"], ["--raw: 'absent'", "neither a folder nor a zip"]),
    (["data", "convert", "ml-100k", "--raw", "a.txt"], ["a.txt: is not a whole zip file", "b'hello'"]),
    (["data", "convert", "ml-100k", "--raw", "raw", "--out", "a.txt"], ["a.txt", "cannot be written", "--out"]),
    (["data"], ["name", "data show --help"]),
])
def test_bad_commands(capsys, publish, arguments, words):
    publish("ml-100k")
    lay("ml-100k")
    Path("a.txt").write_text("hello")
    message = refused(capsys, *arguments)
    assert all(word in message for word in words), message


def test_existing_files(capsys, publish):
    publish("ml-100k")
    lay("ml-100k")
    command = ["data", "convert", "ml-100k", "--raw", "raw", "--out", "out"]
    inter, item = Path("out/ml-100k/ml-100k.inter"), Path("out/ml-100k/ml-100k.item")
    assert main(command) == 0 and "wrote: out/ml-100k/ml-100k.inter" in capsys.readouterr().out
    written = inter.stat().st_mtime_ns
    assert main(command) == 0 and "already there: out/ml-100k/ml-100k.inter" in capsys.readouterr().out
    assert inter.stat().st_mtime_ns == written
    inter.write_text("mine")
    item.unlink()
    assert "ml-100k.inter: exists with another content" in refused(capsys, *command)
    assert inter.read_text() == "mine" and not item.exists()
    assert main([*command, "--force"]) == 0
    assert (inter.read_text(), item.read_text(encoding="utf-8")) == ATOMIC["ml-100k"]


def test_a_conversion_that_dies_leaves_no_dataset(monkeypatch):
    """Dying at any file write leaves whole files only, and no .inter before everything else is there."""
    replace, calls = os.replace, []

    def dies(*paths):
        calls.append(paths)
        if len(calls) == death:
            raise KeyboardInterrupt
        replace(*paths)
    monkeypatch.setattr("os.replace", dies)
    for death, left in ((1, []), (2, ["ml-100k", "ml-100k.item"])):
        calls.clear()
        out = Path(f"out{death}")
        with pytest.raises(KeyboardInterrupt):
            convert("ml-100k", lay("ml-100k"), out, published=UNCHECKED)
        assert [path.name for path in out.rglob("*")] == left
    death = 0
    assert convert("ml-100k", Path("raw"), out, published=UNCHECKED).changed


def served(body, declared=None, status="200 OK"):
    """Address at which this machine sends one answer, which declares a length, perhaps another than it has."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as connection:
            connection.recv(1 << 16)
            length = len(body) if declared is None else declared
            connection.sendall(f"HTTP/1.0 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body)
    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/ml-100k.zip"


GOOD = zipped({"ml-100k/README": "read me",
               **{f"ml-100k/{file}": content for file, content in SMALL["ml-100k"].items()}})


def test_download(capsys, publish):
    url = served(GOOD)
    publish("ml-100k", url=url, md5=hashlib.md5(GOOD).hexdigest(), counts={"rows": 3, "users": 2, "items": 2})
    assert main(["data", "download", "ml-100k"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and f"{url}: md5 agrees" in captured.out
    assert "u.data: no checksum" not in captured.out  # the zip's covers it
    assert Path("data/ml-100k/ml-100k.inter").read_text() == ATOMIC["ml-100k"][0]
    assert {path.name for path in Path(".").rglob("*") if path.is_file()} == {"ml-100k.inter", "ml-100k.item"}
    assert main(["data", "ml-100k", "--set", "k_core=0", "--set", "blocks=1"]) == 0


BY_HAND = "run_bench.py data convert ml-100k --raw ml-100k.zip --out out"


@pytest.mark.parametrize("answer,facts,words", [
    ([GOOD[:-40]], {}, ["is not a whole zip file"]),
    ([GOOD[:-40], len(GOOD)], {}, ["cannot be fetched", f"{len(GOOD) - 40:,} of {len(GOOD):,} bytes", BY_HAND]),
    ([b"<!DOCTYPE html><title>Log in</title>"], {}, ["is not a whole zip file", "<!DOCTYPE html>"]),
    ([GOOD], {"md5": "ab" * 16}, ["md5 is", hashlib.md5(GOOD).hexdigest(), "ab" * 16, "--any-checksum"]),
    ([zipped({"ml-100k/u.base": b"1"})], {}, ["has no u.data and no u.item"]),
    ([zipped({**SMALL["ml-100k"], "u.data": b"1\t2\n"})], {}, ["ml-100k.zip: u.data, line 1", "found 2 fields"]),
    ([b"", 0, "404 Not Found"], {}, ["cannot be fetched (the server answers 404 Not Found)", BY_HAND]),
])
def test_bad_downloads(capsys, publish, answer, facts, words):
    url = served(*answer)
    publish("ml-100k", url=url, **facts)
    message = refused(capsys, "data", "download", "ml-100k", "--out", "out")
    assert all(word in message for word in [url, *words]), message
    assert not Path("out").exists()


def test_no_answer(capsys, publish):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/ml-100k.zip"
        publish("ml-100k", url=url)
        message = refused(capsys, "data", "download", "ml-100k", "--out", "out")
        assert f"{url}: cannot be fetched (no connection: Connection refused)" in message and BY_HAND in message
        silent.listen()
        with pytest.raises(UserError, match="timed out"):
            fetch(url, Path("x.zip"), "by hand", timeout=0.05)


def test_what_cannot_be_downloaded_and_what_is_missing_say_how_to_get_it(capsys, publish):
    publish("ml-100k")
    message = refused(capsys, "data", "download", "ml-100k")
    assert "cannot be downloaded freely" in message and "get it from https://files.grouplens.org" in message
    assert "run_bench.py data convert ml-100k --raw DIR" in message
    assert "`data download hetrec2011-ml` fetches" in refused(capsys, "data", "hetrec2011-ml")
    out = output_of(capsys, "list", "hetrec2011-ml")
    assert "`data download hetrec2011-ml` gets it" in out and "not been checked" in out


def test_every_format_has_its_facts():
    for name, format in FORMATS.items():
        config = load_config(name)
        assert config.raw.url in config.source and (not config.raw.url or config.raw.url.startswith("https://"))
        assert {"rows", "users", *(["items"] if name != "lastfm-1k" else [])} <= set(config.raw.counts)
        assert ("titles" in config.raw.counts) == bool(format.items)
        assert set(config.raw.sha256) <= {table.file for table in format.tables}
        for way in filter(None, (format, format.otherwise)):
            assert {name for column in way.columns.values() for name in
                    ([column] if isinstance(column, str) else column)} <= set(way.interactions[0].columns)
            fields = list(way.columns)
            assert fields[:2] == ["user_id:token", "item_id:token"] and "timestamp:float" in fields
        read = [config.SESSION_FIELD, config.SPLIT_FIELD, config.EVENT_FIELD]
        assert {name for name in read if name} <= {field.split(":")[0] for field in format.columns}
    assert not set(configured()) & set(ACTIONS)
