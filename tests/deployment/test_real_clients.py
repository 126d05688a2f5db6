"""Federations of real clients. Most have their clients in this process, behind a link that carries letters as Flower
does; the last ones are processes of their own, over Flower."""

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import SMALL, Threads, frame_of, same_numbers

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import RunFailed, UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.deployment import flower, flower_app, starting
from fedcl_bench.deployment.client import Client, Kept, take_part
from fedcl_bench.deployment.client_files import Published, deal
from fedcl_bench.deployment.engine import Federates, FlowerEngine
from fedcl_bench.deployment.flower import Letter
from fedcl_bench.experiments.partition import divide
from fedcl_bench.experiments.shards import Conductor
from fedcl_bench.federation.remote import MESSAGES, Node, Undeclared, check_declared
from fedcl_bench.runs.config import make_config
from fedcl_bench.records.record import Record
from fedcl_bench.records.schema import read_run
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.runs.runner import RunOptions, execute

needs_flower = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower 1.42 needs Python 3.11")


class Link:
    """A link to clients of this process, which may be gone, or slow.

    Attributes:
        letters: (kind, tables) of every letter that was sent or answered.
        before: called with a node and a letter before it is delivered. silent: nodes that no letter reaches.
    """

    def __init__(self):
        self.clients, self.arrived, self.letters, self.silent, self.idle = {}, [], [], set(), 0
        self.before = lambda node, letter: None

    def connect(self, client):
        self.clients[node := 1 + max(self.clients, default=0)] = client
        return node

    def nodes(self):
        self.idle += 1
        assert self.idle < 60, "it waits without end"
        return set(self.clients)

    def send(self, node, letter):
        self.idle = 0
        self.letters.append((letter.kind, letter.tables))
        self.before(node, letter)
        if node in self.clients and node not in self.silent:
            reply = self.clients[node].answer(letter)
            self.letters.append((reply.kind, reply.tables))
            self.arrived.append((node, reply))

    def replies(self):
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self):
        self.clients = {}


class Gone(Exception):
    """A test's process has been killed."""


@pytest.fixture(scope="module")
def simulations(tmp_path_factory):
    """The results folder of what is simulated: once for all tests of the same run."""
    return tmp_path_factory.mktemp("simulations")


@pytest.fixture
def federation(registry, tmp_path, simulations):
    """A link with three clients, their tables, and the server's run over them."""
    class Made:
        def __init__(self, method="f3crec", least=3, timeout=60.0, dataset="ml-100k", cut=lambda stream: divide(
                stream, 3), backbone="fedmf", wanted=0, **settings):
            cut_in = {} if "stream" in settings else {"blocks": 2}
            self.config = make_config(registry, method, backbone, dataset, overrides=[
                ("test", {"precision": "float64", **SMALL, **cut_in, **settings})])
            self.data = load_stream(self.config.source, self.config.stream, self.config.features)
            self.published = Published.of(self.config.source, self.config.stream, self.data)
            self.names = cut(self.data)
            self.tables = deal(self.published, self.data, self.names, tmp_path / f"dealt to {len(self.names)}")
            self.link, self.notes, self.least, self.timeout = Link(), [], least, timeout
            self.wanted = wanted or len(self.names)
            for number in range(self.wanted):
                self.join(number)

        def listen(self, text):
            self.notes.append(text)
            assert len(self.notes) < 60, "it begins again without end"

        def client(self, number):
            return Client(self.tables[number], self.tables[number].parent / "state")

        def join(self, number):
            return self.link.connect(self.client(number))

        def run(self, results=tmp_path / "results"):
            self.federates = Federates(self.link, self.published, self.wanted, self.least, self.timeout,
                                       lambda text: self.listen(text))
            return execute(self.config, lambda: self.federates.stream(self.config), results,
                           options=RunOptions(engine=FlowerEngine(self.config, lambda: self.federates)))

        def simulated(self):
            return execute(self.config, lambda: self.data, simulations)
    return Made


def once(link, after, do):
    """Let ``do(node)`` happen before the answer to the ``after``-th answer that a node is sent in training."""
    seen = []

    def before(node, letter):
        if letter.kind == "answer":
            seen.append(node)
            if len(seen) == after:
                link.before = lambda node, letter: None
                do(node)
    link.before = before


def same_record(found, expected, folder=Path()):
    """But for rounding, and for the users' rows of the model, which are theirs."""
    for key in ("rounds", "best_round", "bytes", "settings", "hash", "base_hash", "tested", "privacy"):
        assert found[key] == expected[key], key
    for metric, rows in expected["matrix"].items():
        for row, wanted in zip(found["matrix"][metric], rows):
            assert row == pytest.approx(wanted, rel=0.0, abs=1e-12)
    here, there = (Record(folder / each["record"]) for each in (found, expected))
    for part in ("users", "analysis", "rounds"):
        frames = [frame_of(each.folder, part) for each in (here, there)]
        pd.testing.assert_frame_equal(*frames, rtol=0.0, atol=1e-12)
    for name, table in read_model(there.folder).tables.public.items():
        torch.testing.assert_close(read_model(here.folder).tables.public[name], table, rtol=0.0, atol=1e-12)
    assert not read_model(here.folder).tables.private
    assert {path.name for path in here.folder.iterdir()} == {path.name for path in there.folder.iterdir()}


# Numbers.

@pytest.mark.parametrize("method, backbone, settings", [
    ("f3crec", "fedmf", {}), ("alone", "fedmf", {"extra_metrics": "novelty,distance"}), ("ifedrec", "fedmf", {}),
    ("ft", "biasmf", {"loss": "squared_error", "valid_metric": "rmse", "local_epochs": 1}),
    pytest.param("ft", "feddae", {}, marks=pytest.mark.long)])
def test_the_record_is_that_of_a_simulation(federation, method, backbone, settings):
    """And its model has no rows of users, who have them: the users' lists are those of the simulation's model."""
    made = federation(method, backbone=backbone, **settings)
    found, simulated = made.run(), made.simulated()
    same_record(found, simulated)
    assert found["bytes"] == simulated["bytes"]
    assert found["environment"]["engine"].startswith("flower") and found["environment"]["clients"] == 3
    for table, users in zip(made.tables, made.names):
        kept = Kept.latest(table.parent / "state", table, ())
        assert len(kept.recommend(made.published.users[int(users[0])], 5)) == 5
        assert (kept.data.stream.item_features is not None) is (method == "ifedrec")  # with which some rank


def test_single_precision_is_that_of_shards_to_the_bit(federation, tmp_path):
    """Bytes of a round in the record are those of the tables in a message, and back; and every message is declared."""
    made = federation(precision="float32")
    found = made.run()
    same_numbers(found, execute(made.config, lambda: made.data, tmp_path / "shards",
                                options=RunOptions(engine=Conductor(made.config, 3, (), Threads))),
                 ("public", "dense"))
    up = {sum(table.nbytes for name, table in tables.items() if name.startswith("change/"))
          for kind, tables in made.link.letters if kind == "update"}
    down = {sum(table.nbytes for name, table in tables.items() if name.startswith("public/"))
            for kind, tables in made.link.letters if "loss" in tables}
    assert sorted(up) == sorted(set(found["bytes"]["up_per_client_round"]))
    assert sorted(down) == sorted(set(found["bytes"]["down_per_client_round"]))
    for kind, tables in made.link.letters:
        if kind in MESSAGES:
            check_declared(kind, tables, sent=True)


@pytest.mark.parametrize("method, cold_items", [("ft", "fold_in"), ("ft", "similar"), ("ifedrec", "method")])
def test_items_that_arrive_later(federation, growing, method, cold_items):
    growing.with_suffix(".item").write_text("item_id:token\tname:token_seq\n" + "".join(
        f"i{item}\tcolour{item % 5} shape{item % 3}\n" for item in range(60)))
    made = federation(method, dataset=str(growing), k_core=0, topk=(5,), valid_metric="ndcg@5", rounds=2,
                      cold_items=cold_items, **({"fold_in_rounds": 2} if cold_items == "fold_in" else {}))
    same_record(made.run(), made.simulated())


@pytest.mark.parametrize("method", ["f3crec", "ader", "rlp2"])
def test_clients_of_one_user(federation, tmp_path, method):
    """Some come in later blocks, and are waited for then, or have nothing to train, to validate or to test in one."""
    def rows(user, times):
        return [(f"u{user}", f"i{7 * time % 31 if user % 2 else 5 * time % 31}", time) for time in times]
    times = {0: range(0, 160, 3), 1: range(1, 200, 3), 2: range(2, 120, 3), 3: range(140, 200, 2), 4: [5, 150]}
    log = tmp_path / "few.inter"
    log.write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(
        "\t".join(map(str, row)) + "\n" for user in times for row in rows(user, times[user])))
    made = federation(method, dataset=str(log), k_core=0, blocks=4, topk=(5,), valid_metric="ndcg@5", least=5,
                      cut=lambda stream: [torch.tensor([user]) for user in range(5)])
    lengths = [step.train.lengths for step in made.data.steps]
    assert any(len(each) < 5 for each in lengths) and any((each == 0).any() for each in lengths)
    same_record(made.run(), made.simulated())


def test_what_is_not_declared_cannot_be_sent():
    node = Node(lambda kind, tables: pytest.fail("it was sent"), torch.arange(4))
    with pytest.raises(Undeclared, match="message 'update' cannot have 'private/user_embedding.weight'"):
        node.ask("update", {"numbers": torch.zeros(3), "private/user_embedding.weight": torch.zeros(4, 8)})


# Faults.

def test_a_client_that_is_killed_goes_on_from_its_last_round(federation, tmp_path):
    """Its round is lost; where all must be there the others wait, and the numbers are those of no kill. So it is as the
    run begins anew, and its clients have states of the one that ended."""
    made = federation(rounds=5, patience=0)

    def killed(node):
        del made.link.clients[node]
        made.join(node - 1)
    for results in ("results", "again"):
        once(made.link, 20, killed)
        same_record(made.run(tmp_path / results), made.simulated())
        assert any("has left" in note or "has come again" in note for note in made.notes)
        made.notes.clear()
        made.link = Link()
        for number in range(3):
            made.join(number)


def test_a_client_that_is_out_of_reach_when_it_is_asked_to_join_is_asked_again(federation):
    """A busy machine's clients may miss Flower's heartbeats: the message is lost, or the node is away for a while."""
    made = federation(method="ft", rounds=1)
    nodes, looks = made.link.nodes, []

    def unreachable(node, letter):
        made.link.before = lambda node, letter: None
        made.link.silent.add(node)
        made.link.arrived.append((node, Letter("lost")))

    def there():
        looks.append(1)
        if len(looks) == 2:
            made.link.silent.clear()
            return nodes() - {2}
        return nodes()
    made.link.before, made.link.nodes = unreachable, there
    same_record(made.run(), made.simulated())
    assert any("has left" in note for note in made.notes)


def test_a_round_goes_on_with_those_who_answer(federation):
    """One that does not answer in time is lost, counted as dropped, and in again when its answer comes at last."""
    made = federation(method="ft", least=2, timeout=0.5, rounds=7)

    def silent(node):
        made.link.silent.add(node)

    def back(text):
        if "has not answered" in text:
            node, = made.link.silent
            made.link.silent.clear()
            made.link.arrived.append((node, Letter("update")))  # of the round that has gone on
    once(made.link, 10, silent)
    made.listen = back
    found = made.run()
    assert found["environment"]["clients_lost"] == 1
    rounds = pd.read_parquet(f"{found['record']}/rounds.parquet")
    of_block = rounds[rounds["step"] == 0]
    assert of_block["dropped"].max() > 0
    assert of_block["participants"].iloc[-1] == of_block["participants"].iloc[0] > of_block["participants"].min()
    made = federation(method="ft", least=2, rounds=4, dim=4)  # one that does not come again
    once(made.link, 10, lambda node: made.link.clients.pop(node))
    rounds = pd.read_parquet(f"{made.run()['record']}/rounds.parquet").fillna(0)
    asked = (rounds["participants"] + rounds["dropped"]).tolist()
    assert rounds["dropped"][0] == 0 < rounds["dropped"][2:].min() and len(set(asked[:4])) == len(set(asked[4:])) == 1


def test_a_client_that_missed_the_start_of_a_block_begins_it(federation):
    made = federation(method="scaffold", least=2, rounds=4, optimiser="sgd")

    def lost(node):
        made.link.clients.pop(node)
        once(made.link, 30, lambda other: made.join(node - 1))
    once(made.link, 10, lost)
    rounds = pd.read_parquet(f"{made.run()['record']}/rounds.parquet").fillna(0)
    dropped = rounds["dropped"].to_numpy()
    assert rounds["step"].tolist() == [0] * 4 + [1] * 4 and dropped[4] > 0 == dropped[-1]


def test_runs_of_one_federation_count_their_own_losses_and_leave_no_threads(federation, tmp_path):
    made, lost, threads = federation("ft", rounds=2), [], []
    federates = Federates(made.link, made.published, 3, 2, 60.0, made.listen)

    def killed(node):
        del made.link.clients[node]
        made.join(node - 1)
    once(made.link, 8, killed)
    for seed in (0, 1, 2):
        config = replace(made.config, seed=seed)
        options = RunOptions(engine=FlowerEngine(config, lambda: federates))
        lost.append(execute(config, lambda: federates.stream(config), tmp_path, options=options)["environment"])
        threads.append(threading.active_count())
        assert not federates.announced  # the next one waits for all clients
    assert [each["clients_lost"] for each in lost] == [1, 0, 0] and threads[1] == threads[2]


def test_a_round_whose_participants_have_all_left_changes_nothing(federation):
    made = federation(method="ft", least=2, rounds=3, client_ratio=0.001)  # one user in a round

    def chosen(node, letter):
        if "dropped" in letter.tables and letter.tables["users"].size:
            made.link.before = lambda node, letter: None
            del made.link.clients[node]
    made.link.before = chosen
    rounds = pd.read_parquet(f"{made.run()['record']}/rounds.parquet").fillna(0)
    assert rounds[["participants", "dropped", "loss"]].iloc[0].tolist() == [0, 1, 0]
    assert rounds["participants"].max() == 1 and (rounds["loss"] > 0).eq(rounds["participants"] == 1).all()


@pytest.mark.parametrize("stays", [False, True])
def test_a_run_begins_without_a_client_that_is_lost_when_it_is_announced(federation, stays):
    """It leaves, or does not answer in time."""
    made = federation(method="ft", least=2, timeout=0.5, rounds=1)

    def announced(node, letter):
        if letter.kind == "announce":
            made.link.before = lambda node, letter: None
            made.link.silent.add(node) if stays else made.link.clients.pop(node)
    made.link.before = announced
    rounds = pd.read_parquet(f"{made.run()['record']}/rounds.parquet")
    assert (rounds["dropped"] > 0).all() and made.notes[-1].endswith("has not answered for 0.5 s" if stays else "left")


def test_a_client_that_comes_late_trains_too(federation, monkeypatch):
    """The run began with as many as it waited for. One that comes before the first round misses nothing; one that never
    was in a round has no model in the end."""
    made = federation(method="ft", cut=lambda stream: divide(stream, 4), wanted=3, rounds=3)
    announce = Federates.announce

    def announced(self, *run):
        announce(self, *run)
        made.join(3)
        self.wait(4)
    with monkeypatch.context() as patch:
        patch.setattr(Federates, "announce", announced)
        found = made.run()
    same_record(found, made.simulated())
    made = federation(method="ft", cut=lambda stream: divide(stream, 4), wanted=3, rounds=3, dim=4)
    once(made.link, 8, lambda node: made.join(3))
    late = made.run()
    rounds, before = (pd.read_parquet(f"{each['record']}/rounds.parquet")["participants"] for each in (late, found))
    assert late["tested"] == found["tested"] and rounds[0] < before[0] and rounds[2:].tolist() == before[2:].tolist()
    made = federation(method="ft", rounds=1, blocks=1, wanted=2, least=2)
    once(made.link, 2, lambda node: made.join(2))
    made.run()
    models = [table.parent / "state" / "runs" / made.config.name for table in made.tables]
    assert [model.exists() for model in models] == [True, True, False]


def test_a_client_that_comes_late_has_had_no_answers(federation):
    made = federation("fcucr", backbone="sasrec", wanted=2, least=2, rounds=3, stream="sessions", min_session_length=5,
                      min_sessions=4, max_length=10, local_epochs=1)
    once(made.link, 5, lambda node: made.join(2))
    rounds = pd.read_parquet(f"{made.run()['record']}/rounds.parquet")
    assert rounds["participants"].iloc[0] < rounds["participants"].iloc[-1]


def test_a_server_that_is_killed_goes_on_at_the_round(federation):
    """And one that is killed again."""
    made = federation(blocks=3)

    def kill(node):
        raise Gone
    for after in (25, 33):  # at the start of block 1; when two clients have ended that and it has not
        once(made.link, after, kill)
        with pytest.raises(Gone):
            made.run()
        for number in range(3):
            made.link.clients[number + 1] = made.client(number)
        made.link.arrived, made.link.before = [], lambda node, letter: None
    same_record(made.run(), made.simulated())


def test_clients_that_do_not_fit(federation, monkeypatch):
    """Another client with the same user, other versions, and a file that is none."""
    made = federation(method="ft")
    other = Client(made.tables[0], made.tables[0].parent / "other")
    made.link.connect(other)
    made.run()
    assert other.over and "user '" in other.failed and "is at another client that has joined" in other.failed
    made.config = make_config(made.config.registry, "reg", "fedmf", "ml-100k", overrides=[("test", SMALL)])
    made.link, made.notes = Link(), []
    for number in range(3):
        made.join(number)
    from fedcl_bench.deployment import engine
    monkeypatch.setattr(engine, "versions", lambda: "fedcl_bench 0, torch 1.0")
    with pytest.raises(UserError, match="(?s)the client with user '.*': a worker has fedcl_bench .*fedcl_bench 0"):
        made.run()


@pytest.mark.parametrize("wrong, error, said", [
    (lambda change: change[:-1], UserError, "'299' has sent .275, 8. as 'change/item_embedding.weight', .* .276, 8."),
    (lambda change: change * np.nan, RunFailed, "training diverged in block 0, round 1")])
def test_an_update_that_is_none(federation, wrong, error, said):
    """It is said whose it is."""
    made = federation(method="ft")
    client = made.link.clients[2]
    answer = client.answer

    def wrongly(letter):
        reply = answer(letter)
        for name in reply.tables if reply.kind == "update" else ():
            reply.tables[name] = wrong(reply.tables[name]) if name.startswith("change/") else reply.tables[name]
        return reply
    client.answer = wrongly
    with pytest.raises(error, match=said):
        made.run()
    if error is RunFailed:
        assert made.notes[-1] == "the client with user '299' has sent numbers that are not finite"


def test_a_folder_that_was_another_clients(federation):
    """Its states are of the users with whom they were made, and so are the model and what the server knows it by."""
    made = federation(method="ft", rounds=3)
    [mine, others] = [table.parent / "state" for table in made.tables[:2]]
    others.mkdir()
    (others / "identity").write_text("copied")
    (mine / "identity").parent.mkdir()
    (mine / "identity").write_text("copied")

    def changed(node):
        del made.link.clients[node]
        frame = pd.read_csv(made.tables[node - 1], dtype=str)
        frame[frame["user"] != frame["user"][0]].to_csv(made.tables[node - 1], index=False)
        made.join(node - 1)
        whose.extend(made.tables[node - 1].parent.glob("state/*.state"))
    whose = []
    once(made.link, 20, changed)
    made.run()
    assert whose and all(path.exists() for path in whose)
    with pytest.raises(UserError, match="--data: found other users than those of the model in"):
        Kept.latest(mine, made.tables[1], ()).recommend(made.published.users[int(made.names[1][-1])], 5)
    [kept] = mine.glob("runs/*/run.json")
    kept.write_bytes(kept.read_bytes()[:40])
    with pytest.raises(UserError, match="run.json: is no JSON text"):
        Kept.latest(mine, made.tables[0], ())


@pytest.mark.parametrize("least, error, said", [
    (2, UserError("no space left"), "cannot go on: no space left"), (2, KeyError("x"), "cannot go on: KeyError: 'x'"),
    (3, OSError("no disk"), "")])
def test_an_error_of_a_client_alone(federation, least, error, said):
    """The others go on if they are enough; the client says it, and is gone before the server has read that."""
    made = federation(method="ft", rounds=2, least=least)
    client, kept = made.link.clients[1], []
    answer = client.answer

    def leaving(letter):
        reply = answer(letter)
        if reply.kind == "error":
            del made.link.clients[1]
        return reply
    client.answer = leaving

    def full(progress):
        kept.append(progress)
        if len(kept) == 2:
            raise error
    client._keep = full
    if least == 3:
        with pytest.raises(UserError, match="(?s)the client with user '.*no disk"):
            made.run()
    else:
        found = made.run()
        assert found["environment"]["clients_lost"] == 1 and made.notes[-1].endswith(said)
        assert read_run(Path(found["record"]))["hash"] == found["hash"]  # in which no number of bytes is a fraction
    assert client.over and str(error) in client.failed and made.federates.members.keys() == {
        int(names[0]) for names in made.names[1:]}


def test_a_folder_that_cannot_be_written(federation):
    made = federation(method="ft", rounds=1)
    (made.tables[0].parent / "state").mkdir()
    (made.tables[0].parent / "state" / "runs").touch()
    with pytest.raises(UserError, match="the client with user '.*': .*Not a directory"):
        made.run()


def test_noise_is_refused(federation):
    with pytest.raises(UserError, match="'upload_noise': found noise with --engine flower"):
        federation(upload_noise=0.1).run()
    with pytest.raises(UserError, match="method 'fedcia' draws the noise of all uploads at once"):
        federation("fedcia").run()


@pytest.mark.parametrize("ended", [False, True])
def test_states_of_another_run_that_goes_on_are_kept(registry, tmp_path, monkeypatch, ended):
    """Runs on the same data with as many clients have one folder; the last one to end removes it."""
    monkeypatch.setattr(starting.flower, "require", lambda: None)
    monkeypatch.setattr(starting.flower, "SuperLink", lambda host, port: Link())
    monkeypatch.setattr(starting, "ForkedProcess", lambda serve, task, preloads: SimpleNamespace(end=lambda: None))
    monkeypatch.setattr(Link, "address", "", raising=False)
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", SMALL)])
    other = tmp_path / "clients-ml-100k-2" / "client-1" / "state" / "ft-fedmf-ml-100k-s0-1.5.whose-000-00002.state"
    other.parent.mkdir(parents=True)
    other.touch()
    if ended:
        (tmp_path / "runs" / "ft-fedmf-ml-100k-s0-1.5").mkdir(parents=True)
        (tmp_path / "runs" / "ft-fedmf-ml-100k-s0-1.5" / "run.json").touch()
    how = starting.RealClients("", None, 2, 2, 60.0, results=tmp_path)
    with starting.federates(how, config, lambda: load_stream(config.source, config.stream), str, lambda: None):
        assert other.exists()
        with pytest.raises(UserError, match="clients-ml-100k-2: another command's clients are at work there"):
            with starting.federates(how, config, lambda: load_stream(config.source, config.stream), str, lambda: None):
                pass
    assert other.exists() is not ended


# Processes, over Flower.

@needs_flower
def test_processes_over_flower(tmp_path, capsys):
    """One command starts its clients; the record is the simulation's, and nothing is left."""
    words = ["--method", "f3crec", "--backbone", "fedmf", "--json", "--quiet", *[
        word for name, value in {**SMALL, "blocks": 2, "precision": "float64"}.items()
        for word in ("--set", f"{name}={value}")]]
    found = subprocess.run(  # Flower's server sets up logging for its whole process
        [sys.executable, "-m", "fedcl_bench", *words, "--engine", "flower", "--clients", "2", "--results",
         "flower"], cwd=tmp_path, check=True, stdout=subprocess.PIPE).stdout
    assert main(["run", *words, "--results", str(tmp_path / "simulated")]) == 0
    same_record(json.loads(found), json.loads(capsys.readouterr().out), tmp_path)
    assert [path.name for path in (tmp_path / "flower").iterdir()] == ["runs"]


@needs_flower
@pytest.mark.long
def test_a_federation_by_hand(tmp_path):
    """A server and three clients in three folders; a client and the server are killed; the numbers are a simulation's,
    and a client recommends."""
    suite = [sys.executable, "-m", "fedcl_bench"]
    settings = [word for name, value in {**SMALL, "precision": "float64", "rounds": 5}.items()
                for word in ("--set", f"{name}={value}")]
    run = ["--method", "f3crec", "--backbone", "fedmf", "--json", "--quiet"]
    subprocess.run([*suite, "data", "deal", "ml-100k", "--clients", "3", "--out", "d", "--set",
                    f"k_core={SMALL['k_core']}"], cwd=tmp_path, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []

    def start(words, folder):
        log = open(folder / "log", "a")
        process = subprocess.Popen([*suite, *words], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        processes.append(process)
        return process

    def client(number):
        return start(["client", "--data", "interactions.csv", "--server", address], tmp_path / "d" / f"client-{number}")

    def server():
        without = [word for pair in zip(settings[::2], settings[1::2]) if "k_core" not in pair[1] for word in pair]
        return start([*run, *without, "--engine", f"flower:{address}", "--federation", "d/server", "--clients", "3",
                      "--results", "flower"], tmp_path)

    def wait_for(pattern):
        end = time.monotonic() + 300
        while not list(tmp_path.glob(pattern)):
            assert time.monotonic() < end, pattern
            time.sleep(0.05)
    try:
        first, clients = server(), [client(number) for number in (1, 2, 3)]
        wait_for("d/client-2/client/*-000-00002.state")
        clients[1].kill()
        clients[1].wait()
        clients[1] = client(2)
        wait_for("d/client-1/client/*-001-00002.state")
        first.kill()
        first.wait()
        last = server()
        out, _ = last.communicate(timeout=600)
        assert last.returncode == 0, (tmp_path / "log").read_text()
        same_record(json.loads(out), json.loads(subprocess.run(
            [*suite, *run, *settings, "--results", "simulated"], cwd=tmp_path, check=True, capture_output=True,
            text=True).stdout), tmp_path)
        assert [process.wait(timeout=60) for process in clients] == [0, 0, 0]
        user = (tmp_path / "d/client-3/interactions.csv").read_text().splitlines()[1].split(",")[0]
        best = subprocess.run(
            [*suite, "client", "--data", "interactions.csv", "--recommend", user, "-k", "3", "--json"],
            cwd=tmp_path / "d/client-3", check=True, capture_output=True, text=True).stdout
        assert [row["rank"] for row in json.loads(best)] == [1, 2, 3]
    finally:
        for process in processes:
            process.kill()


# Bad input.

@pytest.mark.parametrize("words, said", [
    ("--engine ray", "--engine: found 'ray', accepted: flower, or flower:HOST:PORT"),
    ("--engine flower --ray local", "found --ray too, accepted: one of the two"),
    ("--engine flower:9092", "needs --federation DIR and --clients N"),
    ("--engine flower --federation .", "--federation: needs an address"),
    ("--engine flower:here --federation d/server --clients 1", "flower:here: accepted: flower, or flower:HOST:PORT"),
    ("--engine flower:127.0.0.1:0 --federation . --clients 1", "a folder with federation.json"),
    ("--engine flower:127.0.0.1:0 --federation d/server --clients 1 --dataset nowhere",
     "--dataset: found 'nowhere', accepted: ml-100k"),
    ("--engine flower:127.0.0.1:0 --federation d/server --clients 1 --set k_core=5",
     "setting 'k_core': found 5, accepted: 70, as the federation's data are cut"),
    ("--clients 3", "--clients: needs --engine flower, or --engine flower:HOST:PORT"),
    ("--round-timeout 9", "--round-timeout: needs --engine flower"),
    ("--engine flower --honest", "--honest: found --engine, accepted: runs in this process without"),
    ("--seeds 2 --honest", "--honest: found --seeds, accepted: runs in this process without"),
    ("--engine flower --clients 2 --min-clients 3 --set k_core=70", "--min-clients: found 3, accepted: at most 2"),
    ("--engine flower --clients 300 --set k_core=70", "--clients: found 300, accepted: at most the number of users"),
    ("--engine flower:grid --federation d/server --clients 1", "is for the server of a Flower app")])
def test_what_is_wrong_with_a_command(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    if "d/server" in words:
        assert main("data deal ml-100k --clients 1 --out d --set k_core=70".split()) == 0
    assert main([*"--method ft --backbone fedmf --set rounds=1 --quiet".split(), *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words, said", [
    ("--data none.csv --server 127.0.0.1:1", "none.csv: cannot be read"),
    ("--data mine.csv --server 127.0.0.1:1 --patience 1", "--server 127.0.0.1:1: no server answers there"),
    ("--data mine.csv --server nowhere", "--server nowhere: accepted: HOST:PORT"),  # without waiting
    ("--data mine.csv", "needs one of --server HOST:PORT, --listen and --recommend USER"),
    ("--data mine.csv --server 127.0.0.1:1 --recommend 7", "needs one of --server HOST:PORT, --listen and --recommend"),
    ("--data mine.csv --server 127.0.0.1:1 -k 3", "found -k, which goes with --recommend USER alone"),
    ("--data mine.csv --recommend 7", "no run has ended here")])
@needs_flower
def test_what_is_wrong_with_a_client(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("user,item,timestamp\n1,2,3\n")
    assert main(["client", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@needs_flower
def test_a_server_that_is_another(tmp_path):
    """Flower would end the process without a word."""
    (tmp_path / "mine.csv").write_text("user,item,timestamp\n1,2,3\n")
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="--server .*: is no server of a federation .*501"):
            take_part(Client(tmp_path / "mine.csv", tmp_path), f"127.0.0.1:{server.server_port}", 1.0)
        server.shutdown()


@pytest.mark.parametrize("found", ["", "1.29.0"])
def test_flower_must_be_there(monkeypatch, found):
    def version(name):
        if not found:
            raise flower.PackageNotFoundError
        return found
    monkeypatch.setattr(flower, "version", version)
    with pytest.raises(UserError, match=f"need Flower 1.42, found {found or 'none'}; install it with: .*flower"):
        flower.require()


@needs_flower
def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"flower:127.0.0.1:{port}: cannot listen there"):
            flower.SuperLink("127.0.0.1", port)


@needs_flower
def test_an_exported_app(tmp_path, monkeypatch, capsys):
    """It names the run; what the server's part passes on to a client that listens is what the client answers. That one
    goes on listening if who asks is gone before it has."""
    monkeypatch.chdir(tmp_path)
    assert main("data deal ml-100k --clients 1 --out d --set k_core=70".split()) == 0
    words = "--method ft --backbone fedmf --set rounds=1 --federation d/server --clients 1".split()
    assert main(["export", "flower", "app", *words]) == 0
    import tomllib
    said = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert json.loads(said["config"]["words"]) == words and said["config"]["folder"] == str(tmp_path)
    for name in ("server", "client"):
        compile((tmp_path / f"app/fedcl_app/{name}.py").read_text(), name, "exec")
    heard = []

    def answer(letter):
        heard.append(letter)
        return Letter("joined", {"sizes": np.arange(6.0).reshape(2, 3), "none": np.zeros((0, 4))}, "text", b"blob")
    thread = threading.Thread(target=flower_app.listen, args=(tmp_path, answer, lambda: len(heard) == 1))
    thread.start()
    while not (tmp_path / flower_app.SOCKET).exists():
        time.sleep(0.01)
    flower_app.Connection(str(tmp_path / flower_app.SOCKET), family="AF_UNIX").close()
    reply = flower_app.passed_on(Letter("join", text="published"), str(tmp_path / flower_app.SOCKET))
    thread.join()
    assert heard[0].text == "published" and (reply.kind, reply.text, reply.blob) == ("joined", "text", b"blob")
    np.testing.assert_array_equal(reply.tables["sizes"], np.arange(6.0).reshape(2, 3))
    assert reply.tables["none"].shape == (0, 4)
