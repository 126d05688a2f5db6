"""No file that is read runs code: pickled objects are refused, with the file's name and what to do."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from fedcl_bench.cli.main import main
from fedcl_bench.data import archives, hdf, prepared
from fedcl_bench.data.datasets import build_stream
from fedcl_bench.core.errors import Corrupt, UserError
from fedcl_bench.runs import checkpoints
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.model_file import read_model


class Planted:
    """Pickled, it is a call that leaves a folder where it is read."""

    def __init__(self, witness):
        self.witness = str(witness)

    def __reduce__(self):
        return os.mkdir, (self.witness,)


@pytest.fixture
def planted(tmp_path):
    """An object that must not be brought to life, which is asked at the end."""
    yield Planted(tmp_path / "witness")
    assert not (tmp_path / "witness").exists()


def test_a_pickle_is_no_model(tmp_path, planted):
    path = tmp_path / "model.pt"
    torch.save({"public": planted}, path)
    digest = hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()
    path.with_name("model.pt.b2sum").write_text(f"{digest}  model.pt\n")
    with pytest.raises(Corrupt, match=r"(?s)model.pt: holds more than tensors.*Delete the file"):
        read_model(tmp_path)


def test_a_pickle_is_no_checkpoint(tmp_path, planted):
    path = tmp_path / "checkpoint.pt"
    checkpoints.write_packed(path, {"progress": planted})
    with pytest.raises(Corrupt, match=r"(?s)checkpoint.pt: holds more than tensors.*Delete the file"):
        checkpoints.load_progress(path, "cpu")
    content = b"no zip at all"
    path.write_bytes(hashlib.blake2b(content, digest_size=32).digest() + content)
    with pytest.raises(Corrupt, match=r"checkpoint.pt: (is no file of tensors|holds more than)"):
        checkpoints.load_progress(path, "cpu")


def test_arrays_of_objects_are_refused(registry, tmp_path, planted):
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("a test", {"k_core": 80})])
    prepared.save(build_stream(config.source, config.stream), tmp_path / "kept")
    np.save(tmp_path / "kept" / "users.npy", np.array([planted], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="(?s)kept: is damaged.*[Dd]elete"):
        prepared.load(tmp_path / "kept")
    np.savez(tmp_path / "x.npz", ids=np.array([planted], dtype=object))
    with pytest.raises(Corrupt, match="x.npz: is no .npz file of tables without pickled objects"):
        archives.arrays_of((tmp_path / "x.npz").read_bytes(), "x.npz", "")


COLUMNS = {"user_id": [1, 1], "item_id": [5, 5], "interaction_type": [1, 3], "created_at": [1443439587, 1443439602],
           "session_id": [842, 842]}


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
@pytest.mark.parametrize("place", ["item_id", "text", "an attribute"])
def test_objects_in_an_hdf_file_are_not_read(place, raw, planted, tmp_path, capsys):
    import tables

    raw(**{} if place == "an attribute" else {place: [planted, "b"]})
    if place == "an attribute":
        with tables.open_file("raw/session.hdf", "a") as file:
            file.root.valid._v_attrs["pandas_type"] = planted
    assert main(["data", "convert", "xing", "--raw", "raw", "--any-checksum"]) == 2
    error = capsys.readouterr().err
    assert "raw/session.hdf: table '" in error and "holds pickled objects (" in error and len(error.splitlines()) <= 4
    assert not (tmp_path / "data").exists()


def test_plain_hdf_files_are_read(raw):
    raw()
    assert hdf.read(Path("raw/session.hdf"), "train").equals(pandas.DataFrame(COLUMNS))
    assert main(["data", "convert", "xing", "--raw", "raw", "--any-checksum"]) == 0
