"""Flower's part: a SuperLink in this process that carries messages, and a node that answers them.

Everything of Flower that the suite touches is here. The SuperLink and the connection of a node are Flower's own; an
unmodified SuperLink or SuperNode speaks to either (see ``docs/real-clients.md``).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable, Iterator

import msgspec
import numpy as np

from ..core.errors import UserError

VERSION = "1.42"  # the extra [flower]; Flower's interfaces change with its minor versions
POLL, RARELY = 0.02, 0.5  # seconds between two looks for a message: a fifth of the wait so far, within these
NODE_MODULES = ("flwr.app.message", "flwr.supercore.inflatable.inflatable_utils",
                "flwr.supernode.fleet_http_connection")  # what a node imports of Flower


class Letter(msgspec.Struct, array_like=True):
    """What a message says."""

    kind: str  # see ``docs/real-clients.md``
    tables: dict[str, np.ndarray] = {}
    text: str = ""  # JSON, empty if there is none
    blob: bytes = b""
    # Random bytes: Flower names objects by their content, and two nodes that send the same one at the same time get
    # into each other's way.
    nonce: bytes = b""


def pause(since: float) -> None:
    """Sleep between two looks for a message that is waited for since then (``time.monotonic``)."""
    time.sleep(min(max(0.2 * (time.monotonic() - since), POLL), RARELY))


def host_and_port(address: str, wrong: str) -> tuple[str, int]:
    """HOST and PORT of an address; raises UserError, which says what is wrong with it, if it has none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(wrong)
    return host, int(port)


def require() -> None:
    """Raise UserError unless Flower is installed in the version that is known; must run before it is imported."""
    for name, value in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_LOG_LEVEL", "CRITICAL")):
        os.environ.setdefault(name, value)
    try:
        found = version("flwr")
    except PackageNotFoundError:
        found = ""
    if not found.startswith(f"{VERSION}."):
        raise UserError(f"real clients need Flower {VERSION}, found {found or 'none'}; install it with: python -m pip "
                        f"install -c constraints.txt -e \".[flower]\" (Python 3.11 or later).")


def as_bytes(letter: Letter) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(letter, nonce=os.urandom(8)), enc_hook=lambda table: (
        table.dtype.str, table.shape, table.tobytes()))


def from_bytes(content: bytes) -> Letter:
    """The inverse of ``as_bytes``; its tables can only be read."""
    def table(_: type, parts: tuple[str, list[int], bytes]) -> np.ndarray:
        dtype, shape, data = parts
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    return msgspec.msgpack.decode(content, type=Letter, dec_hook=table)


def record_of(letter: Letter) -> Any:
    """A letter as the content of Flower's messages: one record, as each object of a message is sent by itself."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({"letter": ConfigRecord({"content": as_bytes(letter)})})


def letter_of(record: Any) -> Letter:
    return from_bytes(record["letter"]["content"])


def _identify(run: int, node: int) -> None:
    """Tell Flower whose messages this process makes."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 1


class SuperLink:
    """A SuperLink with one run, and the server's end of its messages: one open message per node; ``address``: HOST:PORT
    at which nodes reach it."""

    def __init__(self, host: str, port: int):
        try:
            self._socket = socket.create_server((host, port))  # before Flower is imported, which takes a second
        except OSError as error:
            raise UserError(f"--engine flower:{host}:{port}: cannot listen there ({error.strerror}); take another "
                            f"port, or 0 for a free one.") from None
        import uvicorn
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.constant import TaskType
        from flwr.superlink.federation.noop_federation_manager import NOOP_FEDERATION_ID
        from flwr.superlink.main import create_app

        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        app = create_app()
        self._state = app.state.linkstate_factory.state()
        self._run = self._state.create_run(None, None, "0" * 64, {}, NOOP_FEDERATION_ID, None, None,
                                           TaskType.SERVER_APP)
        self._task = self._state.get_tasks(run_ids=[self._run])[0].task_id
        self._state.claim_task(self._task)
        self._state.activate_task(self._task)
        _identify(self._run, SUPERLINK_NODE_ID)
        self._open: dict[str, int] = {}
        self._incomplete: list[Any] = []
        self._beat = 0.0
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5.0)
        self._socket.close()

    def nodes(self) -> set[int]:
        return set(self._state.get_nodes(self._run))

    def send(self, node: int, letter: Letter) -> None:
        from flwr.app import Message
        from flwr.app.message import remove_content_from_message
        from flwr.supercore.inflatable.inflatable_object import (get_all_nested_objects, get_object_tree,
                                                                 no_object_id_recompute)

        message = Message(record_of(letter), dst_node_id=node, message_type="train")
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            session = self._state.start_session(self._run)
            stored, missing = self._state.store_message_and_object_tree(
                remove_content_from_message(message), get_object_tree(message), session)
            if stored:
                objects = get_all_nested_objects(message)
                for name in missing:
                    self._state.store_object(self._run, session, name, objects[name].deflate())
                self._open[message.metadata.message_id] = node

    def replies(self) -> list[tuple[int, Letter]]:
        """The answers of nodes that have arrived since the last call; a letter of kind "lost" of one that has gone."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        if time.monotonic() - self._beat > 10.0:
            self._state.acknowledge_task_heartbeat(self._task)
            self._beat = time.monotonic()
        if self._open:
            self._incomplete += self._state.get_message_res(message_ids=set(self._open), run_id=self._run)
        found, rest = [], []
        for reply in self._incomplete:
            sent = reply.metadata.reply_to_message_id
            if reply.has_error():  # Flower's own, of a node that has gone, perhaps after its reply
                if sent in self._open:
                    found.append((self._open.pop(sent), Letter("lost")))
                continue
            store = self._state.object_store
            tree = store.get_object_tree(reply.metadata.message_id)
            contents = {each.object_id: store.get(each.object_id) for each in iterate_object_tree(tree)}
            if not all(contents.values()):
                rest.append(reply)  # on its way
                continue
            whole = inflate_object_from_contents(reply.metadata.message_id, contents)
            found.append((self._open.pop(sent), letter_of(whole.content)))
            store.delete(reply.metadata.message_id)
            self._state.delete_messages(message_ins_ids={sent})
        self._incomplete = rest
        return found


def answer_messages(address: str, answer: Callable[[Letter], Letter], over: Callable[[], bool], patience: float
                    ) -> None:
    """Be a node: answer the server's messages until it is over; ``patience``: seconds within which the server must be
    reached. Raises UserError if it cannot be reached. Raises ConnectionError if it has gone."""
    from httpx import HTTPError

    failed: Exception | None = None
    with _connection(address, patience) as (node, receive, send, _, _, pull, push, confirm):
        try:
            since = time.monotonic()
            while not over():
                if (received := receive()) is None:
                    pause(since)
                    continue
                content = _pulled(node, *received, pull, confirm)
                _push(received[0], answer(letter_of(content)), send, push)
                since = time.monotonic()
        except Exception as error:  # Flower would log it and go on
            failed = error
        except KeyboardInterrupt:  # of people, or of Flower where a server that was started again does not know us
            if not _forgotten(receive):
                raise
            failed = ConnectionError("the server was started again")
    if over():  # the server may be gone before the last reply is
        return
    if isinstance(failed, HTTPError):
        raise ConnectionError(str(failed)) from None
    if failed is not None:
        raise failed


def _forgotten(receive: Callable) -> bool:
    """Whether the server does not know this node."""
    from httpx import HTTPStatusError, codes

    try:
        receive()
        return False
    except HTTPStatusError as error:
        return error.response.status_code == codes.UNAUTHORIZED
    except Exception:
        return False


def _pulled(node: int, message: Any, tree: Any, pull: Callable, confirm: Callable) -> Any:
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    run, name = message.metadata.run_id, message.metadata.message_id
    _identify(run, node)
    contents = pull_objects([each.object_id for each in iterate_object_tree(tree)],
                            pull_object_fn=lambda each: pull(run, each))
    confirm(run, name)
    return inflate_object_from_contents(name, contents).content


def _push(message: Any, letter: Letter, send: Callable, push: Callable) -> None:
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (get_all_nested_objects, get_object_tree,
                                                             no_object_id_recompute)

    reply = Message(record_of(letter), reply_to=message)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        missing, session = send(reply, get_object_tree(reply), 0.0)
        for name in missing:
            push(message.metadata.run_id, session, name, objects[name].deflate())


@contextmanager
def _connection(address: str, patience: float) -> Iterator[tuple]:
    """Flower's connection of a SuperNode. Raises UserError if no server is there, or another one than Flower's; raises
    ConnectionError if it goes while it is connected to."""
    from flwr.supernode import fleet_http_connection
    from httpx import HTTPStatusError

    accepted = "accepted: HOST:PORT as the server shows it."
    place = host_and_port(address, f"--server {address}: {accepted}")
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(place, timeout=5.0).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"--server {address}: no server answers there ({error}); {accepted}") from None
            time.sleep(0.2)

    def failed(code: int, message: str) -> None:
        """In the place of Flower's, which ends the process."""
        error = sys.exc_info()[1]
        if isinstance(error, HTTPStatusError):
            said = str(error).partition("\n")[0]
            raise UserError(f"--server {address}: is no server of a federation ({said}); {accepted}") from None
        raise ConnectionError(message) from None
    fleet_http_connection.flwr_exit = failed
    with fleet_http_connection.http_request_response(address, True, max_retries=3, max_wait_time=patience) as opened:
        yield opened
