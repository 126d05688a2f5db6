"""No file that is read runs code: pickled objects are refused, with the file's name and what to do."""

import hashlib
import os
import pickle
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

from fedcl_bench.data.items import precomputed_vectors
from fedcl_bench.data.streams import prepared
from fedcl_bench.data.files.convert import convert
from fedcl_bench.data.datasets import build_stream
from fedcl_bench.data.source import PublishedDataset
from fedcl_bench.core.errors import Corrupt, UserError
from fedcl_bench.runs import checkpoints
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import read_model


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
    torch.save(replace(build_stream(config.source, config.stream), unfiltered={"planted": planted}), tmp_path / "kept")
    with pytest.raises(UserError, match="(?s)kept: is damaged.*[Dd]elete"):
        prepared.load(tmp_path / "kept")
    np.savez(tmp_path / "x.npz", ids=np.array([planted], dtype=object))
    with pytest.raises(Corrupt, match="x.npz: is no .npz file of tables without pickled objects"):
        precomputed_vectors.read(tmp_path / "x.npz", ["i1"], [], "item_id")


@pytest.mark.parametrize("protocol", [0, 4])
def test_objects_in_pickled_sessions_are_not_read(protocol, planted, tmp_path):
    for file in ("all_train_seq.txt", "test.txt"):
        (tmp_path / file).write_bytes(pickle.dumps([[1, 2], planted], protocol=protocol))
    with pytest.raises(UserError, match="pickle of more than lists of numbers"):
        convert("session-diginetica", tmp_path, tmp_path / "data", published=PublishedDataset())
    assert not (tmp_path / "data").exists()


@pytest.mark.filterwarnings("ignore")  # of pandas and PyTables, on objects and names
@pytest.mark.parametrize("place", ["item_id", "text", "an attribute"])
def test_objects_in_an_hdf_file_are_not_read(place, planted, tmp_path):
    tables = pytest.importorskip("tables", reason="needs the extra [hdf]")
    columns = dict.fromkeys(("user_id", "item_id", "interaction_type", "created_at", "session_id"), [1, 5])
    if place != "an attribute":
        columns[place] = [planted, "b"]
    path = tmp_path / "session.hdf"
    for key in ("train", "valid", "test"):
        pandas.DataFrame(columns).to_hdf(path, key=key)
    if place == "an attribute":
        with tables.open_file(path, "a") as file:
            file.root.valid._v_attrs["pandas_type"] = planted
    with pytest.raises(UserError, match=r"session.hdf: table '.*' holds pickled objects \("):
        convert("xing", tmp_path, tmp_path / "data", published=PublishedDataset())
    assert not (tmp_path / "data").exists()
