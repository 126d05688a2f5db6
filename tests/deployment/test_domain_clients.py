"""Real clients that are domains: tables, and the record of a run over them beside that of a simulation."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import frame_of, lay_two_shops, records
from test_client_files import same_stream
from test_real_clients import Link, needs_flower, once

from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.deployment.client import Client
from fedcl_bench.deployment.client_files import Published
from fedcl_bench.deployment.domain_files import deal_all, read_domains
from fedcl_bench.deployment.engine import Federates, FlowerEngine
from fedcl_bench.experiments.partition import divide, stream_part
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import RunOptions, execute

SMALL = {"precision": "float64", "rounds": 2, "dim": 4, "max_length": 4, "batch_size": 7, "topk": [3],
         "valid_metric": "recall@3"}
FFMSR = {"encoder": "given:vectors", "heads": 2, "inner_size": 8, "clusters": 3, "federated_rounds": 2}
BLOCKS = {"domain_blocks": 2, "base_share": 0.6}


@pytest.fixture(autouse=True)
def shops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_two_shops()


@pytest.fixture
def federation(registry):
    """A link with a client of each domain, and the server's run over them."""
    class Made:
        def __init__(self, method="ft", backbone="sasrec", least=2, **settings):
            self.config = c = make_config(registry, method, backbone, "books+games", overrides=[
                ("test", {**SMALL, **settings})])
            self.stream = load_stream(c.source, c.stream, c.features)
            self.published = Published.of(c.source, c.stream, self.stream)
            self.names = divide(self.stream, 2)
            self.tables = deal_all(self.published, c.source, self.stream, self.names, Path("dealt"))
            self.link, self.notes, self.least = Link(), [], least
            for number in (0, 1):
                self.join(number)

        def join(self, number):
            self.link.connect(Client(self.tables[number], self.tables[number].parent / "state"))

        def run(self):
            federates = Federates(self.link, self.published, 2, self.least, 60.0, self.notes.append)
            return execute(self.config, lambda: federates.stream(self.config), Path("real"),
                           options=RunOptions(engine=FlowerEngine(self.config, lambda: federates)))

        def simulated(self):
            return execute(self.config, lambda: self.stream, Path("simulated"))
    return Made


def same_record(found, expected):
    """But for what depends on the machine."""
    def plain(record):
        rest = {"record", "seconds", "peak_memory_mib", "environment", "files", "nearly_best"}
        best = {name: value for name, value in record["nearly_best"].items() if name != "seconds"}
        return {**{name: value for name, value in record.items() if name not in rest}, "nearly_best": best}
    assert plain(found) == plain(expected)
    for part in ("users", "rounds"):
        frames = [frame_of(each["record"], part) for each in (found, expected)]
        pd.testing.assert_frame_equal(*frames, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, BLOCKS])
def test_a_dealt_table_is_the_part_of_the_stream(federation, settings):
    made = federation("ffmsr", "ffmsr", **FFMSR, **settings)
    for table, numbers in zip(made.tables, made.names):
        found, expected = read_domains(table, made.published), stream_part(made.stream, numbers)
        assert torch.equal(found.names, numbers)
        same_stream(found.stream, expected)
        assert found.stream.domains == expected.domains
        assert all(torch.equal(*pair) for pair in zip(found.stream.features, expected.features, strict=True))
    assert "i1" not in made.published.text() and "u1" not in made.published.text()


@pytest.mark.parametrize("method, backbone, settings", [
    ("ffmsr", "ffmsr", FFMSR), ("ft", "sasrec", {"topology": "local", "patience": 1}),
    ("ft", "sasrec", {**BLOCKS, "weighting": "interactions"})])
def test_the_record_is_that_of_a_simulation(federation, method, backbone, settings):
    """And the server is sent no table with a row per user or item but what the method uploads."""
    made = federation(method, backbone, **settings)
    found = made.run()
    same_record(found, made.simulated())
    assert {kind for kind, _ in made.link.letters} <= {
        "join", "joined", "announce", "ready", "begin", "answer", "start", "epochs", "valid", "ended", "test", "done",
        "finish", "finished", "end"}


@pytest.mark.parametrize("unsaved", [False, True])
def test_a_client_that_is_killed_goes_on_from_its_last_round(federation, unsaved):
    """Or, if it was killed before that was on its disk, all go on from the one before."""
    made = federation(rounds=4)

    def killed(node):
        del made.link.clients[node]
        if unsaved:
            sorted((made.tables[node - 1].parent / "state").glob("*.state"))[-1].unlink()
        made.join(node - 1)
    once(made.link, 15, killed)
    found = made.run()
    same_record(found, made.simulated())
    assert found["environment"]["clients_lost"] == 1
    assert any("the client with domain" in note for note in made.notes)


def test_what_does_not_fit_is_said(federation):
    made = federation("ffmsr", "ffmsr", **FFMSR)
    frame = pd.read_csv(made.tables[0])
    for change, message in ((frame.iloc[:-40], "found .* users of domain 'books', accepted: 20|interactions of domain"),
                            (frame.assign(domain="films"), "unknown domain 'films'"),
                            (frame.assign(domain=""), "in each a value in domain, user, item"),
            (frame.drop(columns="timestamp"), "no column timestamp")):
        change.to_csv("other.csv", index=False)
        with pytest.raises(UserError, match=message):
            read_domains(Path("other.csv"), made.published)
    vectors = made.tables[0].parent / "features.npz"
    with np.load(vectors) as arrays:
        known = dict(arrays)
    for write, message in (
            (lambda: np.savez(vectors, films=known["books"]), "has no vectors of the domains in interactions.csv"),
            (lambda: np.savez(vectors, books=known["books"][1:]), r"shape \(14, 3, 4\) for domain 'books', .* \(15, "),
            (lambda: vectors.write_bytes(b"PK"), "has no vectors of the domains in interactions.csv")):
        write()
        with pytest.raises(UserError, match=message):
            read_domains(made.tables[0], made.published)
    federation()  # without texts
    assert not vectors.exists()
    with pytest.raises(UserError, match="--min-clients: found 1, accepted: 2, as every domain takes part"):
        federation(least=1).run()


@needs_flower
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_processes_over_flower(tmp_path):
    """One command that starts a client of each domain gives the simulation's record."""
    words = ["run", "--method", "ffmsr", "--backbone", "ffmsr", "--dataset", "books+games", "--quiet", "--json"]
    for name, value in {**SMALL, **FFMSR, "topk": 3}.items():
        words += ["--set", f"{name}={value}"]
    for more in (["--engine", "flower", "--clients", "2", "--results", "real"], ["--results", "simulated"]):
        subprocess.run([sys.executable, "-m", "fedcl_bench", *words, *more], check=True, stdout=subprocess.DEVNULL)
    [found], [expected] = (records(Path(folder)).values() for folder in ("real", "simulated"))
    same_record(found, expected)
    assert found["environment"]["clients"] == 2
