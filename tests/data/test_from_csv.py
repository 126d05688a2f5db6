"""Any table to an atomic file: what is detected, what is left out, what is refused, and how much memory it takes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

from fedcl_bench.cli import located
from fedcl_bench.cli.main import main
from fedcl_bench.data.files import table_reader
from fedcl_bench.data.files.from_csv import Columns, Tables, condition, import_table
from fedcl_bench.core.errors import UserError

COLUMNS = Columns("user", "item", "time")


def table(text: str, name: str = "t.csv") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def imported(text: str, columns: Columns = COLUMNS, **options):
    """What became of a table, and the lines of the atomic file."""
    done = import_table(Tables(table(text), columns), "mine", Path("out"), **options)
    return done, Path("out/mine/mine.inter").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("separator,name", table_reader.SEPARATORS.items())
def test_separators_are_detected(separator, name):
    text = "item,user,other,time\na b,u1,x,7\nc,u2,,8\n".replace(",", separator)
    done, lines = imported(text)
    assert lines == ["user_id:token\titem_id:token\ttimestamp:float", "u1\ta b\t7", "u2\tc\t8"]
    assert done.notes[0] == f"separated by {name}, with a header"
    assert (done.rows, done.written, done.users, done.items, done.left_out) == (2, 2, 2, 2, {})


def test_quotes_byte_order_mark_and_control_characters():
    _, lines = imported('\ufeffuser,item,time\nu1,"Alien, ""the"" first",1\nu2, caf\u00e9\x0b ,2\n')
    assert lines[1:] == ['u1\tAlien, "the" first\t1', "u2\tcaf\u00e9\t2"]


@pytest.mark.parametrize("times,seconds,words", [
    (("1262304000", "1262304001"), ("1262304000", "1262304001"), "times are seconds since 1970 (as 1262304000)"),
    (("1262304000.5", "1262304001"), (1262304000.5, 1262304001.0), "times are seconds"),
    (("1262304000250", "1262304001000"), (1262304000.25, 1262304001.0), "times are milliseconds"),
    (("1262304000000000",) * 2, ("1262304000",) * 2, "times are microseconds"),
    (("1262304000000000000",) * 2, ("1262304000",) * 2, "times are nanoseconds"),
    (("20100131", "20100201"), ("1264896000", "1264982400"), "times are ISO 8601 (as 20100131)"),
    (("20100131", "20101301"), ("20100131", "20101301"), "times are seconds"),
    (("2010-01-01", "2010-01-01T00:00:01Z"), ("1262304000", "1262304001"), "times are ISO 8601 (as 2010-01-01)"),
    (("2010-01-01 02:00:00+02:00", "2010-01-01T00:00:00.5"), (1262304000.0, 1262304000.5), "times are ISO 8601"),
])
def test_times_are_detected_and_written_in_seconds(times, seconds, words):
    done, lines = imported("user,item,time\n" + "".join(f"u,i,{time}\n" for time in times))
    written = [line.split("\t")[2] for line in lines[1:]]
    assert tuple(type(expected)(text) for text, expected in zip(written, seconds)) == seconds
    assert words in done.notes[1]


def test_ids_that_differ_in_control_characters_are_counted():
    text = "user,item,time\nu 1,a,1\nu\x011,a,2\nu\x021,a,3\nu\x022,b\x0b,4\n"
    done, lines = imported(text)
    assert [line.split("\t")[0] for line in lines[1:]] == ["u 1", "u 1", "u 1", "u 2"] and done.users == 2
    assert done.notes[3:] == ("control characters became spaces in the user ids of 3 rows, which made 2 different ids "
                              "of 4",)


def test_tables_without_header_name_columns_by_number():
    done, lines = imported("u1\ti1\t4\t7\nu2\ti2\t5\t8\n", Columns("1", "2", "4"))
    assert lines[1:] == ["u1\ti1\t7", "u2\ti2\t8"] and "without header" in done.notes[0]
    done, lines = imported("who\twhat\tn\twhen\nu2\ti2\t5\t8\n", Columns("1", "2", "4"), force=True)
    assert lines[1:] == ["u2\ti2\t8"] and "with a header" in done.notes[0]


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


@pytest.mark.parametrize("text,kept", [(">=4", [4, 5]), ("> 4", [5]), ("<4.5", [3, 4]), ("<=3", [3]), ("==5", [5]),
                                       ("!=5", [3, 4])])
def test_conditions(text, kept):
    numbers = pd.Series([3, 4, 5]).to_numpy(float)
    assert numbers[condition(text)(numbers)].tolist() == kept


@pytest.mark.parametrize("text,columns,words", [
    ("uid,item,time\n1,2,3\n", COLUMNS, ["no column 'user'", "uid, item, time", "commas"]),
    ("1,2,3\n1,2,3\n", COLUMNS, ["no column 'user'", "--user 1 --item 2 --time 3"]),
    ("user,user,item,time\n1,1,2,3\n", COLUMNS, ["several columns 'user'"]),
    ("user,item,time\n", COLUMNS, ["no row is left"]),
    ("\n\n", COLUMNS, ["is empty"]),
    ("user,item,time\n1,2,3\n1,2,yesterday\n", COLUMNS, ["row 2 below the header", "'yesterday'", "a time as"]),
    ("user,item,time\n1,2,31/01/2020\n", COLUMNS, ["row 1 below", "'31/01/2020'", "read as ISO 8601)."]),
    ("user,item,time\n1,2,20100131\n1,3,20100231\n", COLUMNS, ["row 2 below", "'20100231'", "ISO 8601"]),
    ("user,item,time\n1,2,1262304000\n1,3,1262304000000\n1,3,1262304000000000\n", COLUMNS,
     ["t.csv, column 'time': found 1 time in seconds (as 1262304000) and 1 time in milliseconds", "microseconds by"]),
    ("user,item,time\n1,2,3\n", Columns("user", "user", "time"), ["--item: found 'user', the column of --user"]),
    ("user,item,time\n1,2,3\n", Columns("user", "item", "item"), ["--time: found 'item', the column of --item"]),
    ("user,item,time\n1,2,3\n1,2\n", COLUMNS, ["t.csv, line 3", "found 2 fields ('1,2')", "expected 3 fields"]),
    ("user,item,time,r\n1,2,3,good\n", Columns("user", "item", "time", "r"), ["column 'r' is 'good'", "a number"]),
    ("user,item,time,r\n1,2,3,4\n", Columns("user", "item", "time", "r", keep="=>4"), ["--keep", "'>=4'"]),
    ("user,item,time,r\n1,2,3,3\n", Columns("user", "item", "time", "r", keep=">=4"), ["no row is left of 1"]),
])
def test_bad_tables(text, columns, words):
    with pytest.raises(UserError) as caught:
        imported(text, columns)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2 and not list(Path("out").rglob("*.inter"))


def test_existing_files_are_kept_unless_forced():
    imported("user,item,time\n1,2,3\n")
    with pytest.raises(UserError, match="--force"):
        imported("user,item,time\n1,2,4\n")
    assert imported("user,item,time\n1,2,4\n", force=True)[1][1] == "1\t2\t4"


def test_neither_pieces_nor_compression_show(monkeypatch):
    text = "user,item,time\n" + "".join(f"u{i % 97},i{i % 31},{1262304000000 + 500 * i}\n" for i in range(4000))
    whole = imported(text)
    monkeypatch.setattr(table_reader, "PIECE", 1000)
    assert imported(text, force=True) == whole
    Path("t.csv").write_bytes(gzip.compress(Path("t.csv").read_bytes()))
    Path("t.csv").rename("t.csv.gz")
    done = import_table(Tables(Path("t.csv.gz"), COLUMNS), "mine", Path("out"), force=True)
    assert done == whole[0] and Path("out/mine/mine.inter").read_text().splitlines() == whole[1]
    assert (whole[0].users, whole[0].items) == (97, 31) and len(whole[1]) == 4001


def test_the_command_says_what_was_done_and_what_comes_next(capsys):
    rows = "".join(f"u{i % 20},i{i * 7 % 60},{i % 5 + 1},2020-01-{1 + i // 40:02}\n" for i in range(1200))
    table("who,what,stars,when\n" + rows, "log.csv")
    words = "data convert --csv log.csv --user who --item what --time when --rating stars --keep >=3 shop".split()
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "log.csv: separated by commas, with a header; times are ISO 8601 (as 2020-01-01), UTC unless they say "
        "otherwise; written in seconds",
        "shop: 720 interactions of 12 users and 36 items, from 2020-01-01 to 2020-01-30",
        "left out: 480 rows with a rating that is not >=3",
        "wrote: data/shop/shop.inter", "next: run_bench.py data shop",
        "then: run_bench.py --method f3crec --backbone fedmf --dataset shop"]
    assert main(lines[4].split()[2:]) == 0
    assert main([*lines[5].split()[2:], "--set", "rounds=1", "--quiet"]) == 0
    assert "f3crec on fedmf, shop" in capsys.readouterr().out


@pytest.mark.parametrize("options,words", [
    ([], ["one of the arguments --raw --table/--csv is required"]),
    (["--csv", "t.csv", "--user", "user", "--item", "item"],
     ["no column 'timestamp'", "its columns are user, item, time", "with --time COLUMN"]),
    (["--raw", "t.csv", "--user", "user"], ["--user has no effect with --raw"]),
    (["--csv", "t.csv", "--user", "user", "--item", "item", "--time", "time", "--keep", ">=4"], ["needs --rating"]),
    (["--csv", "none.csv", "--user", "user", "--item", "item", "--time", "time"], ["no file none.csv"]),
])
def test_bad_options(capsys, options, words):
    table("user,item,time\n1,2,3\n")
    assert main(["data", "convert", "mine", *options]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name, words", [("ML-100K", "is a dataset that exists"), ("a/b", "found the name"),
                                         ("..", "found the name"), ("a b", "found the name")])
def test_names_that_are_refused(capsys, name, words):
    table("user,item,time\n1,2,3\n")
    assert main([*"data convert --csv t.csv --user user --item item --time time".split(), name]) == 2
    assert words in capsys.readouterr().err
