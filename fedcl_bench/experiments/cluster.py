"""A Ray cluster (extra ``[ray]``): joining one, or starting one on this machine, with errors that say what to do."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Iterator

from ..core.errors import UserError
from ..core.version import __version__

REQUIREMENT = "ray>=2.60"  # the extra [ray]
LOCAL = "local"
REACH, JOIN = 5.0, 30.0  # seconds within which something must answer, and show that it is a cluster
_ACCEPTED = f"accepted: {LOCAL}, or HOST:PORT of a cluster's head (`ray start --head` shows it)"


@functools.cache
def versions() -> str:
    """What must be the same wherever a run's parts are: the suite, to the byte, and PyTorch."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".c", ".h")):
        digest.update(path.read_bytes())
    return f"fedcl_bench {__version__} (code {digest.hexdigest()}), torch {version('torch').split('+')[0]}"


def other_versions(expected: str) -> str:
    """What is wrong with a worker that does not have the expected ``versions``; empty if nothing is."""
    return "" if versions() == expected else (f"a worker has {versions()}, and this command {expected};\n"
                                              f"install the same on every machine of the cluster.")


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process has joined; ``ray``: the package."""

    ray: ModuleType

    def machines(self) -> dict[str, int]:
        """Processor cores of every machine that has some, by the machine's id in the cluster."""
        cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]}
        return {name: number for name, number in cores.items() if number}

    @property
    def cores(self) -> int:
        return sum(self.machines().values())

    def check_threads(self, threads: int) -> None:
        """Raise UserError if no machine has so many cores."""
        if threads > (most := max(self.machines().values())):
            raise UserError(f"--threads: found {threads}, accepted: at most {most}, the cores of the "
                            f"cluster's largest machine.")


def _package() -> ModuleType:
    """Ray, told to be quiet."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning without a use
    try:
        import ray.util.scheduling_strategies

        import ray
    except ImportError:
        raise UserError(f"--ray: Ray is not installed; python -m pip install '{REQUIREMENT}'") from None
    return ray


def _check_address(address: str) -> None:
    """Raise UserError unless a Ray cluster answers there, within seconds."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--ray: found '{address}', {_ACCEPTED}.")
    try:
        socket.create_connection((host, int(port)), REACH).close()
    except OSError as error:
        raise UserError(f"--ray {address}: nothing answers there ({error.strerror or error}).\n"
                        f"Start a cluster with `ray start --head` and use the address it shows, or --ray "
                        f"{LOCAL}.") from None
    # Ray itself waits for minutes on what is no cluster, and cannot be told not to.
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        check = subprocess.run(command, capture_output=True, text=True, timeout=JOIN)
        healthy, said = check.returncode == 0, check.stderr
    except subprocess.TimeoutExpired:
        healthy, said = False, ""
    if "AuthenticationError" in said:
        raise UserError(f"--ray {address}: the cluster asks for its token.\nHave ~/.ray/auth_token of its head on this "
                        f"machine, and set RAY_AUTH_MODE=token in the environment.")
    if not healthy:
        raise UserError(f"--ray {address}: what answers there is no Ray cluster of this version.\n"
                        f"Use the address that `ray start --head` showed; every machine needs the same Ray and Python.")


_LAST_WORD = """import sys
if not sys.stdin.read():
    print("\\x1b[?25h" * sys.stderr.isatty() +  # the cursor, which progress hides
          "run_bench.py: --ray: Ray on this machine ended, or this command was killed.\\n"
          "The same command goes on from the last checkpoint.", file=sys.stderr)"""


@contextmanager
def last_word() -> Iterator[None]:
    """Have another process say so if this one ends within the block, as Ray ends it when its raylet is gone."""
    with subprocess.Popen([sys.executable, "-ISc", _LAST_WORD], stdin=subprocess.PIPE, start_new_session=True) as other:
        try:
            yield
        finally:
            other.communicate(b"left")


@contextmanager
def joined(address: str, cores: int) -> Iterator[Cluster]:
    """Join the cluster at an address, or start one of so many cores on this machine, and leave or end it afterwards.

    Meanwhile nothing may be said on standard output: Ray's remarks on lost machines go there and are thrown away.
    Raises UserError if Ray is not installed, or the cluster cannot be joined."""
    ray = _package()
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    if address != LOCAL:
        _check_address(address)
    try:
        own = {"num_cpus": cores, "include_dashboard": False} if address == LOCAL else {}
        ray.init(address=address, **own, **quiet)
    except Exception as error:  # Ray raises plain ones too, as where its processes do not start in time
        ray.shutdown()
        reason = (str(error).splitlines() or ["no reason given"])[0]
        if address == LOCAL:
            raise UserError(f"--ray {LOCAL}: Ray did not start here ({reason}).\nTry again when the machine has less "
                            f"to do, or leave --ray out.") from None
        raise UserError(f"--ray {address}: cannot be joined ({reason}).\n"
                        f"A command joins from a machine of the cluster: run `ray start --address HOST:PORT` on this "
                        f"one first.") from None
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), last_word():
        try:
            cluster = Cluster(ray)
            if not cluster.machines():
                raise UserError(f"--ray {address}: the cluster has no machine with processor cores; add one with "
                                f"`ray start --address HOST:PORT`.")
            yield cluster
        finally:
            ray.shutdown()
