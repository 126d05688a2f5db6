"""A federation as a Flower app, for a deployment of SuperLink and SuperNodes that is there already.

Flower starts a process for each message to a node, and a client of ours goes on between messages. So a client listens
at a socket beside its SuperNode (``client --listen``), and the app's part there passes the messages on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from multiprocessing.connection import Client as Connection, Listener
from pathlib import Path
from typing import Any, Callable, Sequence

from ..core.errors import UserError
from ..core.files import write_atomically
from .flower import Letter, as_bytes, from_bytes, letter_of, record_of

AT_GRID = "grid"  # in the place of an address: the messages are those of the app's run
SOCKET = "socket"
_grid: Any = None
_FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedcl-bench-app"
version = "1.0.0"
description = "{title}"
license = "MIT"
dependencies = ["flwr>=1.42,<1.43"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedcl-bench"

[tool.flwr.app.components]
serverapp = "fedcl_app.server:app"
clientapp = "fedcl_app.client:app"

[tool.flwr.app.config]
words = {words}
folder = {folder}
""",
    "fedcl_app/__init__.py": '"""A run of fedcl_bench as a Flower app."""\n',
    "fedcl_app/server.py": '''\
from flwr.serverapp import ServerApp

from fedcl_bench.cli.commands.export import serve

app = ServerApp()


@app.main()
def main(grid, context):
    serve(grid, context.run_config["words"], context.run_config["folder"])
''',
    "fedcl_app/client.py": '''\
from flwr.clientapp import ClientApp

from fedcl_bench.deployment.flower_app import forward

app = ClientApp()


@app.train()
def train(message, context):
    return forward(message, context.node_config["socket"])
'''}


def export(folder: Path, words: Sequence[str], title: str) -> None:
    """Write the app of a run; raises UserError. ``words``: of the run's command line."""
    values = {"title": title, "words": json.dumps(json.dumps(list(words))), "folder": json.dumps(str(Path.cwd()))}
    try:
        for name, text in _FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (text.format(**values) if name == "pyproject.toml" else text).encode())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}).") from None


class GridLink:
    """The messages of an app's run as ``flower.SuperLink`` has them."""

    address = "the app's SuperLink"

    def __init__(self, grid: Any):
        self._grid = grid
        self._open: dict[str, int] = {}

    def nodes(self) -> set[int]:
        return set(self._grid.get_node_ids())

    def send(self, node: int, letter: Letter) -> None:
        from flwr.app import Message

        message = Message(record_of(letter), dst_node_id=node, message_type="train")
        self._open |= {name: node for name in self._grid.push_messages([message]) if name}

    def replies(self) -> list[tuple[int, Letter]]:
        found = []
        for reply in self._grid.pull_messages(list(self._open)) if self._open else ():
            if (node := self._open.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            found.append((node, Letter("lost") if reply.has_error() else letter_of(reply.content)))
        return found

    def close(self) -> None:
        """The SuperLink is others'."""


def link_of_app() -> GridLink:
    """The link of the app whose server this process is; raises UserError if it is none."""
    if _grid is None:
        raise UserError(f"--engine flower:{AT_GRID}: is for the server of a Flower app, as `export flower` makes it; "
                        f"accepted: flower, or flower:HOST:PORT.")
    return GridLink(_grid)


def use_grid(grid: Any) -> None:
    """Take an app's ``Grid`` as the link of this process's federation (see ``link_of_app``)."""
    global _grid
    _grid = grid


def forward(message: Any, path: str) -> Any:
    """The reply to a message of Flower by the client that listens at ``path``."""
    from flwr.app import Message

    return Message(record_of(passed_on(letter_of(message.content), path)), reply_to=message)


def passed_on(letter: Letter, path: str) -> Letter:
    with Connection(path, family="AF_UNIX") as connection:
        connection.send_bytes(as_bytes(letter))
        return from_bytes(connection.recv_bytes())


def listen(folder: Path, answer: Callable[[Letter], Letter], over: Callable[[], bool]) -> None:
    """Answer messages at the socket of a client's folder until the federation is over."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    try:
        listener = Listener(str(path), family="AF_UNIX")
    except OSError as error:  # the path may be too long for a socket
        raise UserError(f"--folder {folder}: cannot listen at {path} ({error}).") from None
    with listener:
        while not over():
            with listener.accept() as connection:  # whose other end may be gone at any time
                try:
                    letter = from_bytes(connection.recv_bytes())
                except (EOFError, OSError):
                    continue
                reply = as_bytes(answer(letter))
                with suppress(OSError):
                    connection.send_bytes(reply)

