"""No file of others runs code when it is read: pickled objects are refused, with the file's name and what to do."""

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch

import fedcl_bench as fb
from fedcl_bench.data import prepared
from fedcl_bench.data.datasets import build_stream
from fedcl_bench.errors import Corrupt, UserError
from fedcl_bench.runs import checkpoints
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import load_progress
from fedcl_bench.runs.records import Record
from fedcl_bench.runs.runner import Watch, execute


class Planted:
    """Pickled, it is a call that leaves a file where it is read."""

    def __init__(self, witness):
        self.witness = str(witness)

    def __reduce__(self):
        return os.mkdir, (self.witness,)


def planted(path, witness):
    """A file of ``torch.save`` with the right checksum and an object that runs code."""
    torch.save({"public": Planted(witness)}, path)
    digest = hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()
    path.with_name(path.name + ".b2sum").write_text(f"{digest}  {path.name}\n")


def test_a_pickle_is_no_model(tmp_path):
    planted(tmp_path / "model.pt", tmp_path / "witness")
    with pytest.raises(Corrupt, match=r"(?s)model.pt: holds more than tensors.*Delete the file"):
        Record(tmp_path).saved_model()
    assert not (tmp_path / "witness").exists()


def test_a_pickle_is_no_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoints.write_packed(path, {"progress": Planted(tmp_path / "witness")})
    with pytest.raises(Corrupt, match=r"(?s)checkpoint.pt: holds more than tensors.*Delete the file"):
        load_progress(path, "cpu")
    content = b"no zip at all"
    path.write_bytes(hashlib.blake2b(content, digest_size=32).digest() + content)
    with pytest.raises(Corrupt, match=r"checkpoint.pt: (is no file of tensors|holds more than)"):
        load_progress(path, "cpu")
    assert not (tmp_path / "witness").exists()


def test_shared_blocks_and_models_that_are_pickles_do_not_end_a_run(registry, tmp_path):
    config = make_config(registry, "reg", "fedmf", "ml-100k", overrides=[("a test", {"rounds": 1, "k_core": 80})])
    stream, warnings = build_stream(config.source, config.stream), []
    base = tmp_path / "shared" / f"{config.base_hash}.pt"
    base.parent.mkdir()
    checkpoints.write_packed(base, {"progress": Planted(tmp_path / "witness")})
    done = execute(config, lambda: stream, tmp_path, Watch(warn=warnings.append))
    assert done["status"] == "finished" and "holds more than tensors" in warnings[0] and str(base) in warnings[0]
    folder = shutil.copytree(done["record"], tmp_path / "copy")
    planted(folder / "model.pt", tmp_path / "witness")
    with pytest.raises(UserError, match="model.pt: holds more than tensors"):
        fb.load(folder).model()
    assert not (tmp_path / "witness").exists()


def test_prepared_arrays_of_objects_are_refused(registry, tmp_path):
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("a test", {"k_core": 80})])
    prepared.save(build_stream(config.source, config.stream), tmp_path / "kept")
    np.save(tmp_path / "kept" / "users.npy", np.array([Planted(tmp_path / "witness")], dtype=object),
            allow_pickle=True)
    with pytest.raises(UserError, match="(?s)kept: is damaged.*[Dd]elete"):
        prepared.load(tmp_path / "kept")
    assert not (tmp_path / "witness").exists()
