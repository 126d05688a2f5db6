"""A federation that a command starts: the SuperLink, and on this machine its clients, which end with the command. They
are forked from a process that has imported what all of them need."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

from ..core.errors import UserError
from ..data.stream import Stream
from ..experiments.partition import divide
from ..experiments.processes import ForkedProcess
from ..records.record import Record
from ..runs.config import RunConfig
from . import flower
from .client import Client, locked, take_part
from .client_files import Published
from .domain_files import deal_all
from .engine import Federates
from .flower_app import AT_GRID, link_of_app

HERE = "127.0.0.1"
PATIENCE = 600.0  # seconds for which a client that was started here waits for its server, with which it ends


@dataclass(frozen=True)
class RealClients:
    """How real clients take part."""

    address: str  # HOST:PORT to listen at; empty: this machine alone, where the clients are started too
    published: Published | None  # what the server publishes of the data, where the clients are others'
    clients: int  # that must join before a run begins; 0: on this machine 4, or one per domain
    least: int  # with how many a round goes on; 0: all
    timeout: float  # seconds within which a client must answer
    # Of clients that are started here: folders of plugins, where they keep their states, threads of PyTorch.
    plugins: Sequence[Path] = ()
    results: Path = Path("results")
    threads: int = 1


@contextmanager
def federates(how: RealClients, config: RunConfig, load: Callable[[], Stream], note: Callable[[str], None],
              stop: Callable[[], None]) -> Iterator[Federates]:
    """The clients of a run and of others on the same data; ``load``: the data, where the clients are started here.
    Raises UserError if Flower is not there, the address is taken, or too many clients that were started here have
    ended."""
    flower.require()
    at_grid = how.address == AT_GRID
    host, port = flower.host_and_port(
        how.address, f"--engine flower:{how.address}: accepted: flower, or flower:HOST:PORT, as flower:0.0.0.0:9092."
    ) if how.address and not at_grid else (HERE, 0)
    with ExitStack() as stack:
        started: dict[Path, ForkedProcess] = {}
        clients, published, tables = how.clients, how.published, []
        if not how.address:
            stream = load()
            clients = clients or len(stream.domains) or 4
            published = Published.of(config.source, config.stream, stream)
            folder = how.results / f"clients-{config.source.name}-{clients}"
            try:
                stack.enter_context(locked(folder))
            except UserError:
                raise UserError(f"{folder}: another command's clients are at work there, or it cannot be written; wait "
                                f"for it, or choose other --results.") from None
            tables = deal_all(published, config.source, stream, divide(stream, clients, "--clients"), folder)
        if how.least > clients:
            raise UserError(f"--min-clients: found {how.least}, accepted: at most {clients}, of --clients.")
        link = link_of_app() if at_grid else flower.SuperLink(host, port)

        def check() -> None:
            stop()
            ended = [log for log, client in started.items() if client.process.exitcode is not None]
            if ended and clients - len(ended) < (found.least if found.announced else clients):
                said = ended[-1].read_text(errors="replace").strip().splitlines() if ended[-1].exists() else []
                raise UserError(f"a client that was started here has ended: "
                                f"{said[-1].rstrip('.') if said else 'it was killed'}.\n"
                                f"The same command goes on from the last round.")
        found = Federates(link, published, clients, how.least or clients, how.timeout, note, check)
        found.others = bool(how.address)
        stack.callback(_end, found, started.values())
        for table in tables:
            task = LocalClient(table.absolute(), link.address, tuple(how.plugins), how.threads)
            started[task.log] = ForkedProcess(serve, task, preloads=flower.NODE_MODULES)
        if how.address:
            note(f"waiting at {link.address} for {clients} clients")
        yield found
    if tables and not _others_states(folder, how.results):  # nothing was interrupted
        shutil.rmtree(folder, ignore_errors=True)


def _others_states(folder: Path, results: Path) -> bool:
    """Whether clients have states of a run that has not ended: it goes on from them."""
    runs = {path.name.rsplit(".", 2)[0] for path in folder.glob("*/state/*.state")}
    return any(not (Record.of(run, results).folder / "run.json").is_file() for run in runs)


def _end(found: Federates, processes: Iterable[ForkedProcess]) -> None:
    found.stop = lambda: None
    found.close()
    for process in processes:
        process.end()


@dataclass(frozen=True)
class LocalClient:
    """What a client of this machine is started with; ``table``: of its interactions; in that folder are its states too,
    and what it says (``log``)."""

    table: Path
    server: str
    plugins: tuple[Path, ...]
    threads: int

    @property
    def log(self) -> Path:
        return self.table.parent / "client.log"


def serve(parent: Connection, task: LocalClient) -> None:
    """Take part until the federation has ended, or the parent has."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(task.log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    folder = task.table.parent / "state"
    try:
        with locked(folder):
            client = Client(task.table, folder, task.plugins, task.threads, lambda text: print(text, flush=True))
            take_part(client, task.server, PATIENCE)
    except UserError as error:
        sys.exit(str(error))


def _end_with(parent: Connection) -> None:
    try:
        parent.recv()
    finally:
        os._exit(1)
