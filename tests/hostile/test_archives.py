"""Archives and HDF files of anybody: none leaves its folder or runs code."""

import os
import zipfile
from pathlib import Path

import pandas
import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.data import hdf
from fedcl_bench.data.archives import unpack

COLUMNS = {"user_id": [1, 1], "item_id": [5, 5], "interaction_type": [1, 3], "created_at": [1443439587, 1443439602],
           "session_id": [842, 842]}


class Planted:
    """Pickled, it is a call that leaves a folder where it is read."""

    def __init__(self, witness):
        self.witness = str(witness)

    def __reduce__(self):
        return os.mkdir, (self.witness,)


def write(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("name", ["../u.data", "/tmp/u.data", "..\\u.data", "a/../../u.data", "C:\\u.data"])
def test_members_stay_in_their_folder(name, tmp_path):
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    unpack(write(tmp_path / "x.zip", **{name: b"1"}), "x.zip", out, lambda name: name == "u.data")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] in (
        [Path("x.zip"), Path("a/out/u.data")], [Path("a/out/u.data"), Path("x.zip")])


@pytest.fixture
def raw(tmp_path, monkeypatch):
    pytest.importorskip("tables", reason="needs the extra [hdf]")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()

    def lay(**columns):
        for key in ("train", "valid", "test"):
            pandas.DataFrame({**COLUMNS, **columns}).to_hdf("raw/session.hdf", key=key)
    return lay


@pytest.mark.filterwarnings("ignore")  # of pandas and PyTables, on objects and names
@pytest.mark.parametrize("place", ["a column", "another column", "an attribute"])
def test_objects_in_an_hdf_file_are_not_read(place, raw, tmp_path, capsys):
    import tables

    witness = tmp_path / "witness"
    raw(**{"a column": {"item_id": [Planted(witness), 5]}, "another column": {"text": [Planted(witness), "b"]}}.get(
        place, {}))
    if place == "an attribute":
        with tables.open_file("raw/session.hdf", "a") as file:
            file.root.valid._v_attrs["pandas_type"] = Planted(witness)
    assert main(["data", "convert", "xing", "--raw", "raw", "--any-checksum"]) == 2
    error = capsys.readouterr().err
    assert "raw/session.hdf: table '" in error and "holds pickled objects (" in error and len(error.splitlines()) <= 4
    assert not witness.exists() and not (tmp_path / "data").exists()
    with pytest.raises(Exception), pandas.HDFStore("raw/session.hdf", mode="r") as store:
        store.select("valid")  # the file is what it is meant to be: pandas alone runs what is in it
        raise RuntimeError
    assert witness.exists()


def test_plain_hdf_files_are_read(raw, capsys):
    raw()
    assert hdf.read(Path("raw/session.hdf"), "train").equals(pandas.DataFrame(COLUMNS))
    pandas.DataFrame({**COLUMNS, "text": ["a", "b"]}).to_hdf("raw/table.hdf", key="train", format="table")
    assert hdf.read(Path("raw/table.hdf"), "train").equals(pandas.DataFrame({**COLUMNS, "text": ["a", "b"]}))
    assert main(["data", "convert", "xing", "--raw", "raw", "--any-checksum"]) == 0
