"""Grids and shards on a real Ray cluster of two nodes, one of which is killed; and what is wrong with the command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import ROOT, records, same_numbers

from fedcl_bench.cli.grid_view import GridView
from fedcl_bench.cli.main import main
from fedcl_bench.api.progress_bars import Display
from fedcl_bench.records.record import Record
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.experiments import cluster as joining
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments.ray_crew import Runner, ShardStarter, lost
from fedcl_bench.experiments.worker import Job

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
pytestmark = [  # found, and not imported, as every worker collects this file
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks nodes' processes up in /proc")]
CELLS = ["--methods", "ft,kd", "--backbones", "fedmf", "--seeds", "2", "--set", "rounds=6"]
RUN = ["--method", "f3crec", "--backbone", "fedmf", *(word for value in (
    "rounds=2", "precision=float64", "k_core=80", "blocks=3", "dim=8") for word in ("--set", value))]


@pytest.fixture(scope="module")
def nodes():
    """A cluster whose second node tests kill; they get it anew."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    yield cluster, lambda: cluster.add_node(**small)
    cluster.shutdown()


@pytest.fixture
def second(nodes):
    """(address of a cluster of two nodes, a function that kills the second and its workers as a power cut would)."""
    cluster, add = nodes
    node = add()
    alive = [True]

    def kill():
        if alive[0]:
            alive[0] = False
            raylet = node.all_processes["raylet"][0].process.pid
            children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
            for pid in (raylet, *map(int, children)):
                os.kill(pid, signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
    yield cluster.address, kill
    kill()


@pytest.mark.long
def test_a_grid_loses_a_node(second, tmp_path, capsys, monkeypatch):
    """Both nodes are in a run when one dies: all runs end with the numbers of processes, and none is done twice."""
    address, kill = second
    killed = []

    def show(self, board):
        if not killed and board.count("finished") and len([r for r in board.running if r.at]) == 2:
            killed.append(True)
            kill()
    monkeypatch.setattr(GridView, "show", show)
    assert main(["grid", *CELLS, "--ray", address, "--results", str(tmp_path / "ray"), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert killed and re.search("of the cluster (was lost|died); another goes on", captured.err)
    assert found["counts"]["finished"] == 4
    assert captured.err.count(" finished: ") == 4
    monkeypatch.undo()
    for method in ("ft", "kd"):
        assert main(["--method", method, "--backbone", "fedmf", "--seeds", "2", "--set", "rounds=6", "--quiet",
                     "--results", str(tmp_path / "alone")]) == 0
    expected = records(tmp_path / "alone")
    for name, record in records(tmp_path / "ray").items():
        same_numbers(record, expected.pop(name))
    assert not expected and not list((tmp_path / "ray").glob(".ray-*"))


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_sharded_run_may_lose_a_node(second, tmp_path, capsys, monkeypatch, dies):
    """Numbers are those of one process; if a node dies in block 1, the run goes back to block 0's end first."""
    address, kill = second
    places, update = [], Display.update

    def watched(self, stream, progress):
        places.append((progress.step, progress.round))
        if dies and places[-1] == (1, 2):
            kill()
        update(self, stream, progress)
    monkeypatch.setattr(Display, "update", watched)
    assert main([*RUN, "--ray", address, "--shards", "2", "--results", str(tmp_path / "ray"), "--json"]) == 0
    captured = capsys.readouterr()
    assert bool(re.search("cluster (was lost|died); starting the shards again", captured.err)) == dies
    assert places == [place for t in range(3) for place in (*((t, r) for r in range(1, 3)), (t + 1, 0))]
    found = json.loads(captured.out)
    monkeypatch.undo()
    assert main([*RUN, "--results", str(tmp_path / "alone"), "--json", "--quiet"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for key in ("rounds", "best_round", "bytes", "settings", "hash", "privacy"):
        assert found[key] == alone[key], key
    one, other = Record(Path(found["record"])), Record(Path(alone["record"]))
    assert {path.name for path in one.folder.iterdir()} == {path.name for path in other.folder.iterdir()}
    for part in ("public", "private"):
        for name, table in getattr(read_model(other.folder).tables, part).items():
            torch.testing.assert_close(getattr(read_model(one.folder).tables, part)[name], table, rtol=0.0, atol=1e-9)
    users = one.frame("users")
    assert users.drop(columns="value").equals(other.frame("users").drop(columns="value"))
    assert (users["value"] - other.frame("users")["value"]).abs().max() <= 1e-9


# What is wrong with the command

@pytest.fixture
def listener():
    """HOST:PORT where something answers that is no cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refused(capsys, tmp_path, *arguments):
    """The message of a command that leaves nothing behind."""
    said = helpers.refused(capsys, *arguments, "--results", tmp_path / "results", "--quiet")
    assert not [path for path in tmp_path.rglob("results/**/*") if path.is_file()]
    return said


GRID = ["grid", "--methods", "ft", "--backbones", "fedmf"]


@pytest.mark.parametrize("command", [GRID, RUN])
@pytest.mark.parametrize("address, message", [
    ("127.0.0.1:1", r"--ray 127.0.0.1:1: nothing answers there \(Connection refused\). Start a cluster with"),
    ("nowhere", "--ray: found 'nowhere', accepted: local, or HOST:PORT"),
    ("host:99999", "--ray: found 'host:99999', accepted"),
    ("ray://127.0.0.1:10001", "--ray: found 'ray://127.0.0.1:10001', accepted")])
def test_bad_addresses(capsys, tmp_path, command, address, message):
    assert re.search(message, refused(capsys, tmp_path, *command, "--ray", address))


def test_an_address_of_something_else(capsys, tmp_path, listener, monkeypatch):
    monkeypatch.setattr(joining, "JOIN", 4.0)
    assert "what answers there is no Ray cluster" in refused(capsys, tmp_path, *GRID, "--ray", listener)


@pytest.mark.parametrize("command", [GRID, RUN])
def test_ray_is_not_installed(capsys, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--ray: Ray is not installed; python -m pip install 'ray>=2.60'" in refused(
        capsys, tmp_path, *command, "--ray", "local")


def test_what_only_the_cluster_shows(nodes, capsys, tmp_path, monkeypatch):
    """More shards than clients, or threads than cores. That a cluster answers there is known by now."""
    monkeypatch.setattr(joining, "_check_address", lambda address: None)

    def message(*arguments):
        return refused(capsys, tmp_path, *arguments, "--ray", nodes[0].address)
    assert "--shards: found 600, accepted: at most the number of users, 186" in message(*RUN, "--shards", "600")
    assert "--threads: found 2, accepted: at most 1, the cores" in message(*RUN, "--threads", "2")
    assert "--threads: found 2, accepted: at most 1, the cores" in message(*GRID, "--threads", "2")


def test_workers_that_lack_something(tmp_path):
    """A worker refuses a run if it does not see the command's results folder, or has other code."""
    job = Job("ft", "fedmf", "ml-100k", 0, [], None, tmp_path / "results", (), "")
    (tmp_path / "proof").touch()
    (kind, text), = Runner(1, Path.cwd(), tmp_path / "none", joining.versions()).run(job)
    assert kind == "error" and re.search(f"does not have the results folder {job.results} of this command; share", text)
    (kind, text), = Runner(1, Path.cwd(), tmp_path / "proof", "fedcl_bench 0").run(job)
    assert kind == "error" and re.search(r"a worker has fedcl_bench .*, and this command fedcl_bench 0;\ninstall", text)
    (kind, text), = Runner(1, Path.cwd(), tmp_path / "proof", joining.versions()).run(job)
    assert (kind, text) == ("error", "its data, plugin or configuration file was changed since the grid began; "
                                     "start it again.")


def test_a_cluster_without_machines():
    ray = SimpleNamespace(nodes=lambda: [{"NodeID": "a", "Alive": False, "Resources": {"CPU": 2.0}}])
    with pytest.raises(UserError, match="--ray: the cluster has lost all its machines"):
        ShardStarter(joining.Cluster(ray), 1)([])


def test_a_cluster_that_does_not_start_is_said(monkeypatch):
    """Ray raises a plain exception then."""
    import ray

    def init(**_):
        raise Exception("The current node timed out\nduring startup")
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match=r"--ray local: Ray did not start here \(The current node timed out\)"):
        with joining.joined(joining.LOCAL, 1):
            pass


@pytest.mark.parametrize("end, lines", [("pass", 0), ("os._exit(1)", 2), ("os.kill(os.getpid(), 9)", 2)])
def test_a_last_word(end, lines):
    done = subprocess.run([sys.executable, "-c", "import os\nfrom fedcl_bench.experiments.cluster import last_word\n"
                           f"with last_word():\n    {end}"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert len(done.stderr.splitlines()) == lines == done.stderr.count("Ray on this machine ended") * 2


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(further for child in children for further in descendants(child))]


@pytest.mark.long
def test_a_raylet_is_killed(tmp_path):
    command = [sys.executable, str(ROOT / "run_bench.py"), *RUN[:4], "--set", "rounds=40", "--ray", "local", "--shards",
               "2", "--results", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "block 0" not in process.stderr.readline():
            assert process.poll() is None
        for pid in descendants(process.pid):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and not out and err.count("run_bench.py: ") == 1 and "Traceback" not in err


@pytest.mark.parametrize("text, words", [
    ("The actor died ... ModuleNotFoundError: No module named 'fedcl_bench'", "could not import fedcl_bench; install"),
    ("The actor died because its node has died.", "a machine of the cluster was lost"),
    ("1 worker(s) were killed due to the node running low on memory.", "ran out of memory; spread the run over more"),
    ("The actor is dead because its process was killed", "a worker of the cluster died")])
def test_why_a_worker_is_lost(text, words):
    assert words in lost(RuntimeError(text))
