"""Names and texts of others: none leads out of a folder, and none is more than text where it is shown."""

import csv
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from fabricate import alter
from helpers import ROOT
from synthetic import run_of

from fedcl_bench.cli.main import main
from fedcl_bench.data.files import archives
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.text import for_terminal, is_safe
from fedcl_bench.reports.render import csv_text, latex, markdown, terminal
from fedcl_bench.reports.cells import Cell, Key, Line, Panel, Table
from fedcl_bench.records import published
from fedcl_bench.runs.config import make_config
from fedcl_bench.records.record import Record
from fedcl_bench.records.store import load_runs

HOSTILE = ("../x", "", "a\\b", "=cmd|calc", "<script>", "a\x1b[2J", "x" * 5000, ".hidden", "-v", "\u202egnp", "a\0b")
PUBLISHED = ROOT / "results" / "published" / "f3crec-authors-split"  # a small one


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_are_not_safe_are_refused_before_they_are_paths(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert not is_safe(name)
    for words in (["--method", "ft", "--backbone", "fedmf", f"--dataset={name}"], ["data", "synth", "--", name]):
        assert main(words) == 2
        printed = capsys.readouterr()
        assert len(printed.err.splitlines()) <= 4 and "\x1b" not in printed.err and "\u202e" not in printed.err
    assert not list(tmp_path.iterdir())


def test_an_index_names_only_files_of_its_folder(tmp_path):
    packed, victim = shutil.copytree(PUBLISHED, tmp_path / "packed"), tmp_path / "victim.parquet"
    index = json.loads((packed / published.INDEX).read_text())
    name = next(iter(index["files"]))
    shutil.move(packed / name, victim)
    (packed / name).symlink_to(victim)
    with pytest.raises(UserError, match="is a symbolic link"):
        load_runs(packed)
    (packed / published.INDEX).write_text(json.dumps({**index, "files": {"../victim.parquet": index["files"][name]}}))
    with pytest.raises(UserError, match="index.json: found the name '../victim.parquet'"):
        published.write(packed, load_runs(PUBLISHED)[:1], "a test", lambda run: False)
    assert victim.is_file()


def test_a_record_cannot_make_pack_write_elsewhere(tmp_path):
    run = load_runs(PUBLISHED)[0]
    run = run_of({**run.meta, "dataset": "../../x"}, run.path, run.load)
    with pytest.raises(UserError, match="record .*found the name '.*../../x"):
        published.write(tmp_path / "a" / "b", [run], "a test", lambda run: False)
    assert not (tmp_path / "a").exists()


def test_a_record_and_its_lock_are_no_links(registry, tmp_path):
    config = make_config(registry, "ft", "fedmf", "ml-100k")
    record, victim = Record.of(config.name, tmp_path), tmp_path / "victim"
    victim.write_text("mine")
    record.folder.mkdir(parents=True)
    (record.folder / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match=".lock: is a symbolic link"), record.locked():
        pass
    assert victim.read_text() == "mine"
    shutil.rmtree(record.folder)
    record.folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{config.hash[:12]}: is a symbolic link"):
        Record.of(config.name, tmp_path)


@pytest.mark.parametrize("name", ["/tmp/u.data", "..\\u.data", "a/../../u.data"])
def test_members_of_an_archive_stay_in_their_folder(name, tmp_path):
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name, os.urandom(5000))
    archives.unpack(tmp_path / "x.zip", "x.zip", out, {"u.data"})
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == {
        Path("x.zip"), Path("a/out/u.data")}


def test_what_a_record_says_is_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = ["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--set", "k_core=80"]
    assert main(job) == 0
    (path,) = tmp_path.glob("results/runs/*/run.json")
    privacy = json.loads(path.read_text())["privacy"]
    alter(path.parent, privacy={**privacy, "notes": ["\x1b[2Jnothing [/b] is private"]})
    assert main(job) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2Jnothing [/b] is private" in out and "\x1b" not in out


def _table(name: str) -> Table:
    """A table of one cell in which everything is called by one name."""
    cell = Cell(Key("ml-100k", name, name, name, name), 0.5, None, 4, (0,))
    return Table("", 0, name, name, (name,), ((name, name),), (Panel(name, (Line((name,), (cell,)),)),), (name,),
                 (name,), (("a", name),), (name,))


@pytest.mark.parametrize("name", ["=1+1", "-1|2", "[x](javascript:y)", "<img src=x>", "\\input{x}", "a\nb", "\x1b[2J"])
def test_a_name_is_text_in_every_table(name):
    table = _table(name)
    md = markdown(table)
    assert "<img" not in md and "](java" not in md and "\x1b" not in md
    assert all(line.count("|") - line.count("\\|") == 3 for line in md.splitlines() if line.startswith("|"))
    rows = list(csv.reader(io.StringIO(csv_text(table))))
    assert len(rows) == 2 and not any(field.startswith(("=", "+", "@", "-1", "\x1b")) for field in rows[1])
    lines = [line for line in latex(table).splitlines() if not line.startswith("%")]
    assert not any("\\input{" in line for line in lines) and "\x1b" not in latex(table)
    assert "\x1b" not in terminal(table) and for_terminal(name).splitlines()[0] in terminal(table)
