"""A client that a command starts beside its server: forked from a process that has imported what all clients need."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ..core.errors import UserError
from .client import Client, locked, take_part

PATIENCE = 600.0  # seconds; the server is the parent, with which this process ends


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
