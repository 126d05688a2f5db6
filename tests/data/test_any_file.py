"""Tables of every form give the same dataset: what is detected and left out; bad ones say what they hold and what to
do."""

import bz2
import gzip
import json
import lzma
import platform
import subprocess
import threading
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from helpers import output_of, refused

from fedcl_bench.cli import located
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.files import from_csv, table_files, table_reader
from fedcl_bench.data.files.from_csv import Columns, Tables, condition, import_table
from fedcl_bench.data.items.item_texts import read_texts
from fedcl_bench.data.source import load_config

ROWS = [{"user": f"ü{i % 4}", "item": 7 + i % 5, "time": 1262304000 + i, "more": i / 2} for i in range(20)]
EXPECTED = ["user_id:token\titem_id:token\ttimestamp:float",
            *(f"{row['user']}\t{row['item']}\t{row['time']}" for row in ROWS)]
NAMED = ["--user", "user", "--item", "item", "--time", "time"]
CSV = pd.DataFrame(ROWS).to_csv(index=False)
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def zipped(content: bytes, files: int = 1) -> bytes:
    with zipfile.ZipFile("made", "w") as archive:
        for i in range(files):
            archive.writestr(f"folder/{i}.csv", content)
    return Path("made").read_bytes()


def locked(archive: bytes) -> bytes:
    """The zip with the flag that says that its file needs a password."""
    content = bytearray(archive)
    for entry, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.find(entry) + flags] |= 1
    return bytes(content)


def parquet(frame: pd.DataFrame) -> bytes:
    frame.to_parquet("made", index=False)
    return Path("made").read_bytes()


FORMS = {
    "t.csv": lambda: CSV.encode(), "t.tsv": lambda: CSV.replace(",", "\t").encode(),
    "t.jsonl": lambda: LINES.encode(), "t.json": lambda: LINES.replace("\n", "\r\n\r\n").encode(),
    "t.jsonl.gz": lambda: gzip.compress(LINES.encode()), "T.CSV.GZ": lambda: gzip.compress(CSV.encode()),
    "blank.csv": lambda: b"\r\n \n" + CSV.encode(), "t.csv.bz2": lambda: bz2.compress(CSV.encode()),
    "t.csv.xz": lambda: lzma.compress(CSV.encode()), "t.csv.zip": lambda: zipped(CSV.encode()),
    "t.jsonl.zip": lambda: zipped(LINES.encode()), "t.parquet": lambda: parquet(pd.DataFrame(ROWS)),
    "t": lambda: parquet(pd.DataFrame(ROWS).astype({"user": "category"})),
    "marked.csv": lambda: CSV.encode("utf-8-sig"), "marked.jsonl": lambda: LINES.encode("utf-8-sig"),
    "t.inter": lambda: CSV.replace("user,item,time,more", "user:token,item:token,time:float,more:float", 1).encode()}


def converted(capsys, *words: str) -> tuple[int, str]:
    """Exit status and what was said of ``data convert mine``."""
    try:
        status = main(["data", "convert", "mine", *words])
    except SystemExit as stopped:
        status = stopped.code
    said = capsys.readouterr()
    return status, said.out + said.err


def lines_of(suffix: str = ".inter") -> list[str]:
    return Path(f"data/mine/mine{suffix}").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_rows(capsys, monkeypatch, name):
    monkeypatch.setattr(table_files, "_AT_ONCE", 7)
    Path(name).write_bytes(FORMS[name]())
    status, said = converted(capsys, "--table", name, *NAMED)
    assert status == 0 and lines_of() == EXPECTED, said
    kind = "Parquet" if Path(name).suffix in ("", ".parquet") else "JSON Lines" if "json" in name else "separated by"
    assert said.startswith(f"{name}: {kind}") and "20 interactions of 4 users and 5 items" in said


@pytest.mark.parametrize("encoding, words", [
    ("cp1252", "perhaps cp1252, in which it reads 'ü0,7,1262304000,0.0'"), ("utf-16", "perhaps utf-16"),
    ("latin-1", "perhaps latin-1")])
def test_other_encodings_are_guessed_and_read(capsys, encoding, words):
    text = CSV.replace("ü", "ü\x81") if encoding == "latin-1" else CSV  # which cp1252 has not
    Path("t.csv").write_bytes(text.encode(encoding))
    status, said = converted(capsys, "--table", "t.csv", *NAMED)
    assert status == 2 and "is not UTF-8 text" in said and "--encoding" in said and words in said
    status, said = converted(capsys, "--table", "t.csv", *NAMED, "--encoding", encoding)
    assert status == 0 and lines_of() == [line.replace("ü", "ü\x81") if text != CSV else line for line in EXPECTED]
    Path("t.jsonl").write_bytes(LINES.encode(encoding))
    status, said = converted(capsys, "--table", "t.jsonl", *NAMED, "--encoding", encoding, "--force")
    assert status == 0 and lines_of() == EXPECTED, said


def test_names_of_encodings(capsys):
    Path("t.csv").write_bytes(CSV.encode("utf-8-sig"))
    assert converted(capsys, "--table", "t.csv", *NAMED, "--encoding", "UTF8")[0] == 0 and lines_of() == EXPECTED
    for wrong in ("utf-88", "base64", "undefined"):
        status, said = converted(capsys, "--table", "t.csv", *NAMED, "--encoding", wrong)
        assert status == 2 and f"--encoding: found '{wrong}', accepted: one of Python's" in said


BAD = {  # rows and what is said of each
    "csv": (("u,1", "line 22: found 2 fields ('u,1'), expected 4 fields"),
            ("u,1,never,2", "row 22 below the header: column 'time' is 'never'"),
            ("u,1,5,2,9,9", "line 24: found 6 fields"), ("u,2,inf,2", "row 24 below the header")),
    "jsonl": (("{", "line 21: is no JSON object ('{')"),
              ('{"user": "u", "item": 1, "time": "never"}', "row 22: column 'time' is 'never'"),
              ("[1, 2]", "line 23: is no JSON object ('[1, 2]')"), ('{"user": 1, "item": 2, "time": {}}', "row 24"))}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_end_it_or_are_left_out_and_counted(capsys, kind):
    rows = (CSV if kind == "csv" else LINES) + "".join(row + "\n" for row, _ in BAD[kind])
    Path(f"t.{kind}").write_text(rows, encoding="utf-8")
    status, said = converted(capsys, "--table", f"t.{kind}", *NAMED)
    first = said.splitlines()
    assert status == 2 and first[0].endswith("4 rows cannot be read; the first:") and len(first) == 5
    assert first[4] == "Leave such rows out with --skip-bad." and not Path("data").exists()
    assert sum(any(words in line for line in first) for _, words in BAD[kind]) == 3
    status, said = converted(capsys, "--table", f"t.{kind}", *NAMED, "--skip-bad")
    assert status == 0 and lines_of() == EXPECTED
    assert "left out: 4 rows that cannot be read" in said and said.count("note: left out: ") == 3


def test_bad_rows_keep_their_numbers_and_end_another_table_early(capsys):
    """At the thousandth bad row, not at the end."""
    Path("t.csv").write_text("user,item,time\n" + "u,1,never\n" * 5000)
    status, said = converted(capsys, "--table", "t.csv", *NAMED)
    assert status == 2 and "at least 1,000 rows cannot be read; the first:" in said
    Path("t.csv").write_text("user,item,time\n" + "u,1\n" * 5000)
    status, said = converted(capsys, "--table", "t.csv", *NAMED)
    assert status == 2 and "at least 1,000 rows cannot be read; the first:" in said and "found 2 fields" in said
    Path("t.csv").write_text("user,item,time\nu,1\nu,1,2\nu,1,2,3\nu,1,never\n")
    status, said = converted(capsys, "--table", "t.csv", *NAMED, "--skip-bad")
    assert status == 0 and "line 2: found 2 fields" in said and "line 4: found 4 fields" in said
    assert "row 4 below the header: column 'time' is 'never'" in said
    Path("t.csv").write_text("user,item,time\nu,1,\nu,1,2\n")
    assert "since 1970 (as 2)" in converted(capsys, "--table", "t.csv", *NAMED, "--skip-bad", "--force")[1]


@pytest.mark.parametrize("name, content, words", [
    ("t.csv", b"who,what,when\n1,2,3\n", "its columns are who, what, when (separated by commas).\nName the column that "
     "is meant with --user COLUMN."),
    ("t.jsonl", b'{"who": 1, "what": 2}\n', "has no column 'user'; its columns are who, what (JSON Lines, first line)"),
    ("t.jsonl", b'{"who": 1}\n{"what": 2}\n', "has no column 'user'; its columns are who, what (JSON Lines"),
    ("t.jsonl", b"{'user': 1}\n", "its first lines are no JSON objects"),
    ("t.csv", gzip.compress(b"user,item,time\n" * 99), "It is a workbook, a zip or a gzip"),
    ("t.parquet", lambda: parquet(pd.DataFrame({"who": [1], "item": [1], "time": [2]})),
     "has no column 'user'; its columns are who, item, time (Parquet)."),
    ("t.parquet", lambda: parquet(pd.DataFrame(ROWS))[:-9], "cannot be read as a Parquet table"),
    ("t.parquet", lambda: parquet(pd.DataFrame({"user": [{"a": 1}], "item": [1], "time": [2]})),
     "column 'user': found values of type struct"),
    ("t.parquet", lambda: parquet(pd.DataFrame(ROWS)[:0]), "no row is left of 0"),
    ("t.json", json.dumps(ROWS).encode(), "is a JSON array, accepted: JSON Lines, which have an object in each line.\n"
     "Make them with: jq -c '.[]' t.json"),
    ("t.jsonl", b"", "t.jsonl: is empty"), ("t.csv.gz", b"", "is empty"),
    ("t.csv.zip", lambda: zipped(b"", 2), "the zip holds 2 files, accepted: one"),
    ("t.csv.zip", b"no zip", "cannot be read"), ("t.csv.xz", b"no xz", "cannot be read"),
    ("t.csv.zip", lambda: zipped(CSV.encode())[:-30], "cannot be read"),
    ("t.csv.zip", lambda: locked(zipped(CSV.encode())), "is encrypted, password required"),
    ("t.csv", b"user,item,time\n1,1,1e300\n", "row 1 below the header: column 'time' is '1e300', expected a time"),
    ("t.csv", b"user,user,item,time\n1,1,2,3\n", "has several columns 'user'"),
    ("t.csv", ",".join(f"c{i}" for i in range(99)).encode(), "c28, c29 and 69 more (separated by commas)."),
    ("t.csv", b"user,item,time\n1,1,2\n\n\n1,\xff,3\n", "t.csv, line 5: column 'item' is not UTF-8 text"),
    ("t.csv", b"user,user:token,item,time\n1,1,2,3\n", "has several columns 'user'")])
def test_other_files_are_named(capsys, name, content, words):
    Path(name).write_bytes(content() if callable(content) else content)
    status, said = converted(capsys, "--table", name, *NAMED)
    assert status == 2 and words in said, said
    assert not Path("data").exists()


def test_repeated_rows_are_counted_and_kept(capsys, monkeypatch):
    Path("t.csv").write_text("user,item,time,more\nu,1,5,a\nu,1,5,b\nu,2,5,a\nv,1,5,a\nu,1,5,a\n")
    status, said = converted(capsys, "--table", "t.csv", *NAMED)
    assert status == 0 and "2 rows repeat another in all columns that are read, and are kept" in said
    assert len(lines_of()) == 6
    monkeypatch.setattr(from_csv, "_OF_REPEATS", 3)
    monkeypatch.setattr(table_reader, "PIECE", 24)  # bytes: three rows at a time
    said = converted(capsys, "--table", "t.csv", *NAMED, "--force")[1]
    assert "1 row repeats another of the first 3 in all columns that are read, and is kept" in said
    Path("t.csv").write_text(CSV, encoding="utf-8")
    assert "repeat" not in converted(capsys, "--table", "t.csv", *NAMED, "--force")[1]


def test_numbers_and_missing_values_of_parquet(capsys):
    """Ids that are whole numbers stay so beside missing ones; days and times are times."""
    times = pd.Series(["2010-01-01", "2010-01-02", "2010-01-03 00:00:00.5"], dtype="datetime64[ns]")
    frame = pd.DataFrame({"user": pd.array([1, None, 3], "Int64"), "item": [1.0, 2.0, 2.5], "time": times})
    Path("t.parquet").write_bytes(parquet(frame))
    status, said = converted(capsys, "--table", "t.parquet", *NAMED)
    assert status == 0 and "left out: 1 row without user, item or session" in said
    assert [line.split("\t")[0] for line in lines_of()[1:]] == ["1", "3"]
    assert [float(line.split("\t")[2]) for line in lines_of()[1:]] == [1262304000.0, 1262476800.5]
    frame["time"] = frame["time"].dt.tz_localize("Europe/Berlin")
    Path("t.parquet").write_bytes(parquet(frame))
    assert converted(capsys, "--table", "t.parquet", *NAMED, "--force")[0] == 0
    assert float(lines_of()[1].split("\t")[2]) == 1262304000.0 - 3600


def test_whole_numbers_are_the_same_id_in_every_form(capsys):
    """As pandas' floats beside a missing one are, and what Python's json writes of them."""
    frame = pd.DataFrame({"user": [1.0, None, 3.0], "item": [5.0, 2.0 ** 40, 7.0], "time": [1.0, 2.0, 3.5]})
    Path("t.parquet").write_bytes(parquet(frame.astype({"item": "float64"})))
    Path("t.jsonl").write_text('{"user": 1.0, "item": 5, "time": 1}\n{"user": NaN, "item": 9, "time": 2}\n'
                               '{"user": 3, "item": 7.0, "time": 3.5}\n')
    for name in ("t.parquet", "t.jsonl"):
        status, said = converted(capsys, "--table", name, *NAMED, "--force")
        assert status == 0 and "left out: 1 row without user, item or session" in said
        assert lines_of()[1:] == ["1\t5\t1.0", "3\t7\t3.5"] or lines_of()[1:] == ["1\t5\t1", "3\t7\t3.5"]
    Path("t.parquet").write_bytes(parquet(frame.fillna(2.0 ** 41)))
    assert converted(capsys, "--table", "t.parquet", *NAMED, "--force")[0] == 0
    assert [line.split("\t")[:2] for line in lines_of()[1:]] == [["1", "5"], [str(2 ** 41), str(2 ** 40)], ["3", "7"]]
    Path("t.parquet").write_bytes(parquet(frame.assign(time=pd.to_timedelta([1, 2, 3], "D"))))
    status, said = converted(capsys, "--table", "t.parquet", *NAMED, "--force")
    assert status == 2 and "column 'time': found values of type duration" in said


ITEMS = [{"item": 7, "title": "A \"first\"\ttitle &amp; more", "tags": ["x", None, "y"]},
         {"item": 8, "title": "", "tags": []}, {"item": 7, "title": "again", "tags": []},
         {"item": 99, "title": "unknown", "tags": ["z"]}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_texts_of_items(capsys, kind):
    Path("t.csv").write_text(CSV, encoding="utf-8")
    frame = pd.DataFrame(ITEMS)
    if kind == "csv":
        frame.assign(tags=frame["tags"].map(lambda tags: " ".join(filter(None, tags)))).to_csv("items.csv", index=False)
    else:
        Path(f"items.{kind}").write_bytes(parquet(frame) if kind == "parquet" else
                                          "".join(json.dumps(item) + "\n" for item in ITEMS).encode())
    status, said = converted(capsys, "--table", "t.csv", *NAMED, "--items", f"items.{kind}", "--texts", "title,tags")
    assert status == 0 and "texts of 2 of the 5 items; rows without an id or of an item that stands above" in said, said
    assert "above, which are left out: 1" in said
    assert read_texts(Path("data/mine/mine.item"), "item_id") == {
        "7": 'A "first" title & more x y', "8": "", "99": "unknown z"}
    assert "wrote: data/mine/mine.item" in said


@pytest.mark.parametrize("content, options, words", [
    ("item,title\n700,a\n", ["--texts", "title"], "none of its 1 ids in the column 'item' (as '700') is an item of "
     "t.csv.\nName the column of ids with --items-id COLUMN."),
    ("id,title\n7,a\n", ["--texts", "title"], "has no column 'item'; its columns are id, title (separated by commas).\n"
     "Name the column that is meant with --items-id COLUMN."),
    ("item,title\n7,a\n", ["--texts", "name"], "meant with --texts COLUMN"),
    ("item,title\n7,a\n7,a,b\n", ["--texts", "title"], "items.csv, line 3: found 3 fields"),
    ("item,title\n7,a\n", ["--texts", "title,title"], "--texts: found 'title', accepted: columns of other names than"),
    ("item,item_id\n7,a\n", ["--texts", "item_id"], "--texts: found 'item_id', accepted: columns of other names than"),
    ("item,title\n7,a\n", [], "--items: needs --texts"), ("", ["--texts", "title"], "items.csv: is empty")])
def test_bad_tables_of_items(capsys, content, options, words):
    Path("t.csv").write_text(CSV, encoding="utf-8")
    Path("items.csv").write_text(content)
    status, said = converted(capsys, "--table", "t.csv", *NAMED, "--items", "items.csv", *options)
    assert status == 2 and words in said, said
    assert not Path("data").exists()


def sessions(count: int, start: int) -> str:
    rows = [f"{s},{(s + k) % 5},{start + 1000 * s + k}\n" for s in range(count) for k in range(3)]
    return "".join(["SessionId,ItemId,Time\n", *rows])


TRAIN, TEST = sessions(9, 0), sessions(3, 9000)


def test_sessions_that_are_split_by_files(capsys):
    """Ids of sessions begin anew in each; what is tested is what the file has. Also where sessions are users'."""
    Path("train.csv").write_text(TRAIN)
    Path("test.csv").write_text(TEST)
    named = ["--item", "ItemId", "--time", "Time"]
    words = ["--table", "train.csv", "--test", "test.csv", "--session", "SessionId", *named]
    status, said = converted(capsys, *words)
    assert status == 0, said
    assert lines_of()[0] == "user_id:token\titem_id:token\tsession_id:token\tsplit:token\ttimestamp:float"
    assert lines_of()[1] == "train-0\t0\ttrain-0\ttrain\t0" and lines_of()[-1] == "test-2\t4\ttest-2\ttest\t11002"
    config = load_config("mine")
    assert (config.SESSION_FIELD, config.SPLIT_FIELD) == ("session_id", "split")
    assert config.settings == {"stream": "sessions", "session_from": "column", "session_split": "column",
                               "topology": "central"}
    out = " ".join(output_of(capsys, "data", "mine", "--set", "valid_share=0.3").split())
    assert "train sessions 6 " in out and "test sessions 3 " in out
    Path("test.csv").write_text(TEST.replace("0\n", "never\n", 1))
    status, said = converted(capsys, *words, "--force")
    assert status == 2 and "test.csv, row 1 below the header: column 'Time'" in said
    Path("test.csv").write_text(TEST.replace("ItemId", "Item"))
    status, said = converted(capsys, *words, "--force")
    assert status == 2 and "test.csv: has no column 'ItemId'" in said
    status, said = converted(capsys, "--table", "train.csv", "--test", "test.csv", *named)
    assert status == 2 and "--test: needs --session" in said
    status, said = converted(capsys, "--table", "train.csv", "--session", "SessionId", *named)
    assert status == 2 and "--session: users are the sessions ('SessionId')" in said
    head = "user,session,item,time\n"
    for name, at in (("train", 0), ("valid", 100), ("test", 200)):
        Path(f"{name}.csv").write_text(head + "".join(f"u{u},1,{i},{at + i}\n" for u in range(2) for i in range(4)))
    status, said = converted(capsys, "--table", "train.csv", "--valid", "valid.csv", "--test", "test.csv", *NAMED,
                             "--session", "session", "--force")
    assert status == 0 and lines_of()[9] == "u0\t0\tvalid-1\tvalid\t100", said
    assert "topology" not in load_config("mine").settings and main(["data", "mine"]) == 0
    status, said = converted(capsys, "--table", "train.csv", "--test", "test.csv", *NAMED, "--session", "session",
                             "--force")
    assert status == 0 and load_config("mine").settings["topology"] == "central", said  # whose training is held out of
    Path("usual.csv").write_text("user_id,visit,item_id,timestamp\nu0,1,0,0\nu1,1,0,0\n")
    assert converted(capsys, "--table", "usual.csv", "--session", "visit", "--force")[0] == 0
    assert lines_of()[1:] == ["u0\t0\t1\t0", "u1\t0\t1\t0"]


def test_options_of_tables_have_no_effect_with_raw(capsys):
    for option in (["--skip-bad"], ["--encoding", "cp1252"], ["--items-id", "x"], ["--test", "x"], ["--user", "u"]):
        status, said = converted(capsys, "--raw", ".", *option)
        assert status == 2 and f"{option[0]} has no effect with --raw" in said


def test_a_comma_separated_atomic_file_says_how_to_make_it_one(capsys):
    Path("mine.inter").write_text("user_id:token,item_id:token,timestamp:float\n" + "a,b,1\n" * 3)
    assert main(["data", "./mine.inter"]) == 2
    assert "Make it so with: run_bench.py data convert --table mine.inter NAME" in capsys.readouterr().err
    assert converted(capsys, "--table", "mine.inter")[0] == 0 and lines_of()[1] == "a\tb\t1"


COLUMNS = Columns("user", "item", "time")


def table(text, name="t.csv"):
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def imported(text, columns=COLUMNS, **options):
    """What became of a table, and the lines of the atomic file."""
    done = import_table(Tables(table(text), columns), "mine", Path("out"), **options)
    return done, Path("out/mine/mine.inter").read_text(encoding="utf-8").splitlines()


def test_what_a_killed_conversion_left_goes():
    """Its file is as large as the dataset."""
    Path("out/mine").mkdir(parents=True)
    process = subprocess.Popen(["true"])
    process.wait()
    Path(f"out/mine/.mine.inter.{platform.node()}-{process.pid}-abc.part").touch()
    imported("user,item,time\nu1,a,1\n")
    assert [path.name for path in Path("out/mine").iterdir()] == ["mine.inter"]


@pytest.mark.parametrize("separator,name", table_reader.SEPARATORS.items())
def test_separators_are_detected(separator, name):
    text = "item,user,other,time\na b,u1,x,7\nc,u2,,8\n".replace(" ", "\u00a0").replace(",", separator)
    done, lines = imported(text)
    assert lines == ["user_id:token\titem_id:token\ttimestamp:float", "u1\ta\u00a0b\t7", "u2\tc\t8"]
    assert done.notes[0] == f"separated by {name}, with a header"
    assert (done.rows, done.written, done.users, done.items, done.left_out) == (2, 2, 2, 2, {})


@pytest.mark.parametrize("times,seconds,words", [
    (("1262304000", "1262304001"), ("1262304000", "1262304001"), "times are seconds since 1970 (as 1262304000)"),
    (("1262304000.5", "1262304001"), (1262304000.5, 1262304001.0), "times are seconds"),
    (("1262304000250", "1262304001000"), (1262304000.25, 1262304001.0), "times are milliseconds"),
    (("1262304000000000",) * 2, ("1262304000",) * 2, "times are microseconds"),
    (("1262304000000000000",) * 2, ("1262304000",) * 2, "times are nanoseconds"),
    (("20100131", "20100201"), ("1264896000", "1264982400"), "times are ISO 8601 (as 20100131)"),
    (("20100131", "20101301"), ("20100131", "20101301"), "times are seconds"),
    (("2010-01-01", "2010-01-01T00:00:01Z"), ("1262304000", "1262304001"), "times are ISO 8601 (as 2010-01-01)"),
    (("2010-01-01 02:00:00+02:00", "2019-12-31T13:05:00.25"), (1262304000.0, 1577797500.25), "times are ISO 8601"),
    (("20100131010203", "20100201000000"), ("1264899723", "1264982400"), "times are %Y%m%d%H%M%S (as"),
    (("201001310102", "201002010000"), ("1264899720", "1264982400"), "times are %Y%m%d%H%M (as"),
    (("2010013101", "2010020100"), ("1264899600", "1264982400"), "times are %Y%m%d%H (as"),
    (("1/2/2010 1:02", "31/01/2010 01:02"), ("1264986120", "1264899720"), "times are %d/%m/%Y %H:%M (as 1/2/2010 "),
    (("1/2/2010", "01/31/2010"), ("1262390400", "1264896000"), "times are %m/%d/%Y (as"),
    (("01.02.2010", "02.01.2010"), ("1264982400", "1262390400"), "times are %d.%m.%Y (as"),
    (("May 31, 2010", "Sept 1, 2010"), ("1275264000", "1283299200"), "times are %b %d, %Y (as"),
    (("Sun Jan 31 01:02:03 +0200 2010",) * 2, ("1264892523",) * 2, "times are %a %b %d %H:%M:%S %z %Y (as"),
    (("2010-01-31 01:02:03 UTC",) * 2, ("1264899723",) * 2, "times are %Y-%m-%d %H:%M:%S UTC (as"),
    (("1/31/2010 12:02:03 AM", "1/31/2010 1:02:03 pm"), ("1264896123", "1264942923"), "%m/%d/%Y %I:%M:%S %p (as"),
    (("31/Jan/2010:01:02:03 +0000",) * 2, ("1264899723",) * 2, "times are %d/%b/%Y:%H:%M:%S %z (as"),
])
def test_times_are_detected_and_written_in_seconds(times, seconds, words):
    done, lines = imported("user,item,time\n" + "".join(f'u,i,"{time}"\n' for time in times))
    written = [line.split("\t")[2] for line in lines[1:]]
    assert tuple(type(expected)(text) for text, expected in zip(written, seconds)) == seconds
    assert words in done.notes[1]


@pytest.mark.parametrize("missing", ["", "NaN"])
def test_rows_without_a_time_do_not_say_how_times_are_written(capsys, monkeypatch, missing):
    monkeypatch.setattr(table_reader, "PIECE", 40)
    table("user,item,time\n" + f"u,i,{missing}\n" * 9 + "u,i,1262304000\nu,j,1262304001\n")
    words = ["--table", "t.csv", *NAMED]
    status, said = converted(capsys, *words)
    assert status == 2 and "9 rows cannot be read; the first:" in said and f"is '{missing}', expected a time" in said
    status, said = converted(capsys, *words, "--skip-bad")
    assert status == 0 and lines_of()[1:] == ["u\ti\t1262304000", "u\tj\t1262304001"]
    assert "times are seconds since 1970 (as 1262304000)" in said
    table("user,item,time\n" + f"u,i,{missing or 0}\nu,i,20100131\nu,j,20100201\n")
    said = converted(capsys, *words, "--skip-bad", "--force")[1]
    assert lines_of()[1:] == ["u\ti\t1264896000", "u\tj\t1264982400"] and "1 row" in said
    table("user,item,time\n" + f"u,i,{missing}\n" * 9)
    assert "no row is left of 9" in converted(capsys, *words, "--skip-bad", "--force")[1]


def test_formats_of_times_are_named(capsys):
    """Also of a table without header, whose first row is none."""
    table("u,i,31/01/10\nu,i,01/02/10\n")
    words = ["--table", "t.csv", "--user", "1", "--item", "2", "--time", "3", "--time-format"]
    status, said = converted(capsys, *words, "%d/%m/%y")
    assert status == 0 and "without header" in said and "times are %d/%m/%y (as 31/01/10), UTC" in said, said
    assert lines_of()[1:] == ["u\ti\t1264896000", "u\ti\t1264982400"]
    table("u,i,31 of 1 of 2010 01:02+0100\n")
    assert converted(capsys, *words, "%d of %m of %Y %H:%M%z", "--force")[0] == 0
    assert lines_of()[1:] == ["u\ti\t1264896120"]
    for wrong in ("%Q", "%", "%d%d", "%H:%M", "day", "%d/%m", "%z"):
        status, said = converted(capsys, *words, wrong, "--force")
        assert status == 2 and f"--time-format: found '{wrong}', accepted: a format of Python's strptime" in said


def test_quotes_byte_order_mark_and_control_characters():
    text = "user,item,time\nu 1,a,1\nu\x011,a,2\nu\x021,a,3\nu\x022,b\x0b,4\n"
    done, lines = imported(text)
    assert [line.split("\t")[0] for line in lines[1:]] == ["u 1", "u 1", "u 1", "u 2"] and done.users == 2
    assert done.notes[3:] == ("control characters became spaces in the user ids of 3 rows",)
    done, _ = imported("user,item,time\nNULL,7.0,1\nNA,7,2\nnana,7.05,3\n", force=True)
    assert done.notes[3:] == ("user ids of 2 rows are as 'NULL'; is that a missing one, or a whole number?",
                              "item ids of 1 rows are as '7.0'; is that a missing one, or a whole number?")
    _, lines = imported('\ufeffuser, item,time \nu1,"Alien, ""the"" first",1\nu2, caf\u00e9\x0b ,2\n', force=True)
    assert lines[1:] == ['u1\tAlien, "the" first\t1', "u2\tcaf\u00e9\t2"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_inside_quotes_are_counted(end):
    """A quote that is not closed takes the rows up to the next one into its field, also of a column that is not read;
    empty lines, and rows that cannot be read, are none of them."""
    rows = [f"u{i}\t{i}\t{i}\t{title}" for i, title in enumerate(('"Heroes', "a", "b", '"Low', "c", "d\te"))]
    text = end.join(["user\titem\ttime\ttitle", "", *rows])

    def done(text):
        return import_table(Tables(table(text), COLUMNS, skip_bad=True), "mine", Path("out"), force=True)
    assert (done(text).rows, done(text).written) == (3, 2)
    assert done(text).notes[3] == ("lines inside quoted fields, which are no rows: 3; where no field has several "
                                   "lines, a quote is not closed")
    whole = done(text.replace('"', ""))
    assert (whole.rows, whole.written) == (6, 5) and not any("quote" in note for note in whole.notes)


def test_fields_of_several_lines_may_be_anywhere_in_a_file(capsys, monkeypatch):
    monkeypatch.setattr(table_reader, "PIECE", 64)
    table("user,item,time,title\n" + "".join(f'u,{i},{i},"a\n{i}\nb"\n' for i in range(50)))
    status, said = converted(capsys, "--table", "t.csv", *NAMED)
    assert status == 0 and lines_of()[1:] == [f"u\t{i}\t{i}" for i in range(50)], said
    table("user,item,time\nu,1,1\n" + 'u,"2,2\n' + "u,3,3\n" * 40)
    status, said = converted(capsys, "--table", "t.csv", *NAMED, "--force")
    assert status == 2 and "a quote is not closed, or a row is longer" in said


def test_tables_without_header_name_columns_by_number():
    done, lines = imported("u1\ti1\t4\t7\nu2\ti2\t5\t8\n", Columns("1", "2", "4"))
    assert lines[1:] == ["u1\ti1\t7", "u2\ti2\t8"] and "without header" in done.notes[0]
    done, lines = imported("who\twhat\tn\twhen\nu2\ti2\t5\t8\n", Columns("1", "2", "4"), force=True)
    assert lines[1:] == ["u2\ti2\t8"] and "with a header" in done.notes[0]
    done, lines = imported("u1 i1 2020-01-01\nu2 i2 2020-01-02\n", Columns("1", "2", "3"), force=True)
    assert lines[1:] == ["u1\ti1\t1577836800", "u2\ti2\t1577923200"] and "by spaces, without" in done.notes[0]
    for more in ("", ",4.5", ",good"):  # not columns of these names
        done, lines = imported(f"2,1,3{more}\n5,6,7{more}\n", Columns("1", "2", "3"), force=True)
        assert lines[1:] == ["2\t1\t3", "5\t6\t7"] and "without header" in done.notes[0]
    done, lines = imported("0,1,2,3\n5,6,7,8\n", Columns("1", "2", "3"), force=True)  # the header that pandas writes
    assert lines[1:] == ["6\t7\t8"] and "with a header" in done.notes[0]
    done, lines = imported("11,12,13\n5,6,7\n", Columns("11", "12", "13"), force=True)
    assert lines[1:] == ["5\t6\t7"] and "with a header" in done.notes[0]


@pytest.mark.parametrize("piece", [40, 1 << 20])
def test_files_of_movielens_1m(capsys, monkeypatch, piece):
    """Double colons, of which the second may be in another piece; quotes are text, and a bar separates nothing."""
    monkeypatch.setattr(table_reader, "PIECE", piece)
    rows = [f"{1 + i % 3}::{60 + i % 7}::{1 + i % 5}::{978300760 + i}" for i in range(40)]
    table("\n".join(rows), "ratings.dat")
    Path("movies.dat").write_bytes('61::"One" Flew: 5:3::A|B|C|D\r\n62::Am\u00e9lie::A\r\n'.encode("latin-1"))
    status, said = converted(capsys, *"--table ratings.dat --user 1 --item 2 --rating 3 --time 4 --items movies.dat "
                             "--items-id 1 --texts 2,3 --encoding latin-1".split())
    assert status == 0 and "separated by double colons, without header" in said, said
    assert lines_of()[1:] == [row.replace("::", "\t") for row in rows]
    assert read_texts(Path("data/mine/mine.item"), "item_id") == {"61": '"One" Flew: 5:3 A|B|C|D', "62": "Amélie A"}
    table("\n".join([*rows, "1::2"]), "ratings.dat")
    status, said = converted(capsys, *"--table ratings.dat --user 1 --item 2 --time 4 --force".split())
    assert status == 2 and "line 41: found 2 fields ('1::2'), expected 4 fields separated by double colons" in said


def test_ratings_sessions_and_rows_without_ids():
    text = "user,item,time,stars,visit\nu1,a,1,4,s1\nu1,b,2,3.5,s1\n,c,3,5,s1\nu2,a,4,5,\nu2,a,5,5,s2\n"
    done, lines = imported(text, Columns("user", "item", "time", "stars", "visit", ">=4"))
    assert lines == ["user_id:token\titem_id:token\trating:float\tsession_id:token\ttimestamp:float",
                     "u1\ta\t4\ts1\t1", "u2\ta\t5\ts2\t5"]
    assert done.left_out == {"without user, item or session": 2, "with a rating that is not >=4": 1}
    assert Path("out/mine/mine.yaml").read_text() == (
        "SESSION_FIELD: session_id\nsettings: {stream: sessions, session_from: column}\n") and len(done.files) == 2
    stream = located("mine", Path("out"), {})[1]  # as any command sees it
    assert (stream.stream, stream.session_from) == ("sessions", "column")
    done, _ = imported(text, Columns("user", "item", "time"), force=True)  # without sessions, which its YAML still has
    assert done.notes[-1] == "out/mine/mine.yaml: was there before, and is read with these interactions"


@pytest.mark.parametrize("text,kept", [(">=4", [4, 5]), ("> 4", [5]), ("<4.5", [3, 4]), ("<=3", [3]), ("==5", [5]),
                                       ("!=5", [3, 4])])
def test_conditions(text, kept):
    numbers = pd.Series([3, 4, 5]).to_numpy(float)
    assert numbers[condition(text)(numbers)].tolist() == kept


@pytest.mark.parametrize("text,columns,words", [
    ("1,2,3\n1,2,3\n", COLUMNS, ["no column 'user'", "--user 1 --item 2 --time 3"]),
    ("\n\n", COLUMNS, ["is empty"]),
    ("user,item,time\n1,2,3\n1,2,yesterday\n", COLUMNS, ["row 2 below the header", "'yesterday'", "a time as"]),
    ("user,item,time\n1,2,31/01/20\n", COLUMNS, ["row 1 below", "'31/01/20'", "read as ISO 8601;", "--time-format)."]),
    ("user,item,time\n1,2,31/12/2019 EST\n", COLUMNS, ["row 1 below", "EST"]),
    ("user,item,time\n1,2,01/02/2019\n1,2,03/03/2019\n", COLUMNS,
     ["--time: found times as '01/02/2019', which may be %d/%m/%Y or %m/%d/%Y", "--time-format"]),
    ("user,item,time\n1,2,20100131\n1,3,20100231\n", COLUMNS, ["row 2 below", "'20100231'", "ISO 8601"]),
    ("user,item,time\n1,2,1262304000\n1,3,1262304000000\n1,3,1262304000000000\n", COLUMNS,
     ["t.csv, column 'time': found 1 time in seconds (as 1262304000) and 1 time in milliseconds", "microseconds by"]),
    ("1,2,3\n", Columns("1", "2", "4"), ["t.csv: found --time 4, accepted: the numbers of its columns, 1 to 3"]),
    ("user,item,time\n1,2,3\n", Columns("user", "user", "time"), ["--item: found 'user', the column of --user"]),
    ("user,item,time\n1,2,3\n", Columns("user", "item", "item"), ["--time: found 'item', the column of --item"]),
    ("user,item,time,r\n1,2,3,good\n", Columns("user", "item", "time", "r"), ["column 'r' is 'good'", "a number"]),
    ("user,item,time,r\n1,2,3,4\n", Columns("user", "item", "time", "r", keep="=>4"), ["--keep", "'>=4'"]),
    ("user,item,time,r\n1,2,3,3\n", Columns("user", "item", "time", "r", keep=">=4"), ["no row is left of 1"]),
])
def test_bad_tables(text, columns, words):
    with pytest.raises(UserError) as caught:
        imported(text, columns)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2 and not Path("out").exists()


def test_existing_files_are_kept_unless_forced():
    imported("user,item,time\n1,2,3\n")
    with pytest.raises(UserError, match="--force"):
        imported("user,item,time\n1,2,4\n")
    assert imported("user,item,time\n1,2,4\n", force=True)[1][1] == "1\t2\t4"


def test_reading_ends_when_pyarrow_lets_go_of_the_stream(monkeypatch):
    """A process that ended before was aborted, with exit status 134."""
    held = []

    def open_csv(file, *options):
        held.append(file)
        threading.Timer(0.02, held.clear).start()
        return iter(())
    monkeypatch.setattr("pyarrow.csv.open_csv", open_csv)
    Path("t.csv").write_text("user\n")
    layout = table_reader.TableLayout(",", ("user",), True)
    assert not list(table_reader.text_batches(Path("t.csv"), "t.csv", layout, ["user"])) and not held


def test_pieces_do_not_show(monkeypatch):
    text = "user,item,time\n" + "".join(f"u{i % 97},i{i % 31},{1262304000000 + 500 * i}\n" for i in range(1000))
    whole = imported(text)
    monkeypatch.setattr(table_reader, "PIECE", 500)
    assert imported(text, force=True) == whole
    assert (whole[0].users, whole[0].items) == (97, 31) and len(whole[1]) == 1001


def test_the_command_says_what_was_done_and_what_comes_next(capsys):
    rows = "".join(f"u{i % 20},i{i * 7 % 60},{i % 5 + 1},2020-01-{1 + i // 40:02}\n" for i in range(1200))
    table("who,what,stars,when\n" + rows, "log.csv")
    words = "data convert --csv log.csv --user who --item what --time when --rating stars --keep >=3 shop".split()
    lines = output_of(capsys, *words).splitlines()
    assert lines == [
        "log.csv: separated by commas, with a header; times are ISO 8601 (as 2020-01-01), UTC unless they say "
        "otherwise; written in seconds",
        "shop: 720 interactions of 12 users and 36 items, from 2020-01-01 to 2020-01-30",
        "left out: 480 rows with a rating that is not >=3",
        "wrote: data/shop/shop.inter", "next: run_bench.py data shop",
        "then: run_bench.py --method f3crec --backbone fedmf --dataset shop"]
    assert main(lines[4].split()[2:]) == 0
    assert "f3crec on fedmf, shop" in output_of(capsys, *lines[5].split()[2:], "--set", "rounds=1", "--quiet")


@pytest.mark.parametrize("options,words", [
    ([], ["one of the arguments --raw --table/--csv is required"]),
    (["--csv", "t.csv", "--user", "user", "--item", "item"],
     ["no column 'timestamp'", "its columns are user, item, time", "with --time COLUMN"]),
    (["--csv", "t.csv", "--user", "user", "--item", "item", "--time", "time", "--keep", ">=4"], ["needs --rating"]),
    (["--csv", "none.csv", "--user", "user", "--item", "item", "--time", "time"], ["no file none.csv"]),
])
def test_bad_options(capsys, options, words):
    table("user,item,time\n1,2,3\n")
    assert main(["data", "convert", "mine", *options]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_names_that_are_refused(capsys):
    table("user,item,time\n1,2,3\n")
    for name, words in (("ML-100K", "is a dataset that exists"), ("a/b", "found the name"), ("..", "found the name"),
                        ("a b", "found the name")):
        assert words in refused(capsys, *"data convert --csv t.csv --user user --item item --time time".split(), name)
