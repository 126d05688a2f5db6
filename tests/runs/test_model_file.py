"""``model.pt``: opened by PyTorch alone, with the ids of its rows, its checksum beside it; older ones stay readable."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.records.record import Record
from fedcl_bench.runs.config import make_config
from fedcl_bench.core.errors import Corrupt
from fedcl_bench.runs.model_file import read_model
from fedcl_bench.runs.runner import execute


@pytest.fixture(scope="module")
def finished(registry, tmp_path_factory):
    """A record of RLP2, whose state says how it ranks, and its stream."""
    config = make_config(registry, "rlp2", "fedmf", "ml-100k", overrides=[("test", {"rounds": 1, "k_core": 80})])
    stream = load_stream(config.source, config.stream)
    return Path(execute(config, lambda: stream, tmp_path_factory.mktemp("results"))["record"]), stream


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "record"))


def test_pytorch_opens_it_and_it_carries_the_ids(finished):
    folder, stream = finished
    content = torch.load(folder / "model.pt", weights_only=True)
    assert content["user_ids"] == stream.user_tokens.tolist() and content["item_ids"] == stream.item_tokens.tolist()
    table = next(iter(content["public"].values()))
    assert len(table) == len(content["item_ids"]) and {f.name for f in fields(Snapshot)} < content.keys()
    saved = read_model(folder)
    assert saved.user_ids == content["user_ids"] and set(saved.client_state) == set(content["client_state"])
    assert "keys" in saved.client_state and torch.equal(next(iter(saved.tables.public.values())), table)


def test_state_that_no_ranking_needs_is_left_out(registry, tmp_path):
    """Reg keeps the tables of the step before, which may be gigabytes."""
    config = make_config(registry, "reg", "fedmf", "ml-100k", overrides=[("test", {"rounds": 1, "k_core": 80})])
    done = execute(config, lambda: load_stream(config.source, config.stream), tmp_path)
    saved = read_model(Path(done["record"]))
    assert saved.client_state == saved.server_state == {} and saved.user_ids


def test_its_checksum_is_that_of_b2sum(folder):
    digest, name = (folder / "model.pt.b2sum").read_text().split()
    content = (folder / "model.pt").read_bytes()
    assert name == "model.pt" and digest == hashlib.blake2b(content, digest_size=32).hexdigest()


@pytest.mark.parametrize("spoil, says", [
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "does not match"), (Path.unlink, "model.pt: is missing"),
    (lambda path: path.with_name("model.pt.b2sum").unlink(), "b2sum: is missing")])
def test_one_that_cannot_be_trusted_is_refused_and_the_record_stays(folder, spoil, says):
    spoil(folder / "model.pt")
    with pytest.raises(Corrupt, match=says):
        read_model(folder)
    assert Record(folder).read()["status"] == "finished"
