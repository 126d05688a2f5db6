"""Workers on a Ray cluster: actors that do the runs of a grid, and shards of one run.

Ray places them, carries messages and notices when one dies, be it with its machine. They take up with an actor where
``processes.py`` and ``shards.py`` would with a process.
"""

from __future__ import annotations

import os
import queue
import threading
import uuid
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from ..core.errors import UserError
from .cluster import Cluster, other_versions, versions
from .shards import Died, Request, Shard, ShardTask
from .worker import STOP, Job, run_job

_ENDS = ("finished", "failed", "error", "busy", "stopped")  # the last message about a run


class Runner:
    """An actor that does runs. ``folder``: the working folder of the command, where its machine is this one or has it
    too; ``proof``: a file in the results folder that every machine must see; ``versions``: those at the command."""

    def __init__(self, threads: int, folder: Path, proof: Path, versions: str):
        self._threads, self._proof, self._versions = threads, proof, versions
        self._streams: OrderedDict[Any, Any] = OrderedDict()
        self._asked = threading.Event()
        if folder.is_dir():
            os.chdir(folder)

    def run(self, job: Job) -> Iterator[tuple]:
        """Do a run; yields the messages of ``worker.serve``."""
        if wrong := other_versions(self._versions):
            yield "error", wrong
            return
        if not self._proof.exists():
            yield "error", (f"machine {os.uname().nodename} does not have the results folder {job.results} of this "
                            f"command; share it under this path with every machine of the cluster.")
            return
        sent: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        threading.Thread(target=lambda: sent.put(run_job(job, sent.put, self._asked.is_set, self._threads,
                                                         self._streams)), daemon=True).start()
        while True:
            message = sent.get()
            yield message
            if message[0] in _ENDS:
                return

    def stop(self) -> None:
        """Ask the run to stop after its round; one that begins later, too, as this may overtake it."""
        self._asked.set()


class Actors:
    """The crew of a pool on a cluster (see ``processes.Processes``)."""

    tries = 4
    keeps_idle = False  # after the loss of a machine, a new worker may wait for the cores that one of them holds

    def __init__(self, cluster: Cluster, threads: int, proof: Path):
        cluster.check_threads(threads)
        self._ray = cluster.ray
        # Two calls at a time: a run, and the question to stop it.
        runner = cluster.ray.remote(Runner).options(num_cpus=threads, max_concurrency=2, scheduling_strategy="SPREAD")
        self._new = lambda: runner.remote(threads, Path.cwd(), proof, versions())

    def hire(self) -> "_Actor":
        return _Actor(self._ray, self._new())

    def listen(self, workers: "Sequence[_Actor]", seconds: float) -> "list[_Actor]":
        ready, _ = self._ray.wait([worker.messages for worker in workers], num_returns=len(workers), timeout=0)
        if not ready:
            ready, _ = self._ray.wait([worker.messages for worker in workers], timeout=seconds)
        return [worker for worker in workers if any(worker.messages is messages for messages in ready)]


class _Actor:
    """An actor that does runs, and the messages about the one it is at."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor
        self._why = "the worker ended"
        self.messages: Any = None
        self.running: Any = None

    def send(self, message: Job | str) -> None:
        if message == STOP:
            self._actor.stop.remote()
        else:
            self.messages = self._actor.run.options(num_returns="streaming").remote(message)

    def receive(self) -> tuple:
        try:
            return self._ray.get(next(self.messages))
        except (StopIteration, self._ray.exceptions.RayError) as error:
            self._why = lost(error)
            raise EOFError from None

    def end(self, kill: bool = False) -> str:
        self._ray.kill(self._actor)
        return self._why


def lost(error: Exception) -> str:
    """In a few words what became of an actor."""
    text = str(error)
    if "ModuleNotFoundError" in text or "failed to be imported" in text:
        return "a worker could not import fedcl_bench; install it on every machine of the cluster"
    if "low on memory" in text:
        return "a machine of the cluster ran out of memory; spread the run over more machines"
    return "a machine of the cluster was lost" if "node has died" in text else "a worker of the cluster died"


@contextmanager
def crew(cluster: Cluster, threads: int, results: Path) -> Iterator[Actors]:
    """Workers for the runs of a results folder. Raises UserError if the folder cannot be written, or no machine has so
    many cores."""
    proof = results.absolute() / f".ray-{uuid.uuid4().hex}"
    try:
        proof.parent.mkdir(parents=True, exist_ok=True)
        proof.touch()
    except OSError as error:
        raise UserError(f"results folder {results}: cannot be written ({error.strerror}); choose another with "
                        f"--results DIR.") from None
    try:
        yield Actors(cluster, threads, proof)
    finally:
        proof.unlink(missing_ok=True)


class ShardStarter:
    """Puts shards to work on a cluster, each in an actor with so many threads: the ``start`` of a ``Conductor``.
    Machines get shards by their cores. For some seconds after a machine is lost, Ray takes it for alive: the next start
    leaves out where an actor was when it died."""

    def __init__(self, cluster: Cluster, threads: int):
        self._cluster, self._threads = cluster, threads
        self._suspects: set[str] = set()

    def __call__(self, tasks: Sequence[ShardTask]) -> "ShardActors":
        machines = self._cluster.machines()
        if not machines:
            raise UserError("--ray: the cluster has lost all its machines.\nThe same command goes on from the last "
                            "checkpoint.")
        trusted = {name: cores for name, cores in machines.items() if name not in self._suspects} or machines
        self._suspects.clear()
        # One per core of each machine in turn, over and over.
        turns = [name for turn in range(max(trusted.values())) for name, cores in trusted.items() if turn < cores]
        return ShardActors(self._cluster.ray, self._threads, tasks, [turns[i % len(turns)] for i in range(len(tasks))],
                           self._suspects)


class ShardActors:
    """The shards of a run, which have begun, as actors; its methods raise Died if one of them does. ``machines``: where
    each is started; ``suspects``: gets the machine of an actor that dies."""

    def __init__(self, ray: Any, threads: int, tasks: Sequence[ShardTask], machines: Sequence[str],
                 suspects: set[str]):
        self._ray, self._machines, self._suspects = ray, machines, suspects
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        shard = ray.remote(Shard)
        # They hold next to nothing of a core, so that those of a lost machine can be started beside the others. An
        # actor that holds nothing at all is placed by way of any machine, perhaps the lost one.
        self._actors = [shard.options(num_cpus=0.001, scheduling_strategy=affinity(machine, soft=True))
                        .remote(threads) for machine in machines]
        self._pending = {number: actor.begin.remote(task)
                         for number, (actor, task) in enumerate(zip(self._actors, tasks))}

    def receive(self) -> dict[int, Request]:
        """The requests of those that have begun or were answered since the last call, once all have one."""
        requests = {}
        for number, reply in self._pending.items():
            try:
                requests[number] = self._ray.get(reply)
            except self._ray.exceptions.RayError as error:
                self._suspects.add(self._machines[number])
                raise Died(lost(error)) from None
        self._pending = {}
        return requests

    def answer(self, answers: Mapping[int, Any]) -> None:
        put: dict[int, Any] = {}  # what is the same for all is sent to each machine once
        for number, answer in answers.items():
            if id(answer) not in put:
                put[id(answer)] = self._ray.put(answer)
            self._pending[number] = self._actors[number].exchange.remote(put[id(answer)])

    def close(self) -> None:
        """End all shards, in whatever state they are."""
        for actor in self._actors:
            self._ray.kill(actor)
