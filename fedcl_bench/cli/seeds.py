"""What the seeds of one ``run`` share: the stream, which is loaded once, and the cluster that their clients are on."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Callable

from ..data.datasets import load_stream, thin_note
from ..data.stream import Stream
from ..federation.parts import Federation
from ..runs.config import RunConfig
from ..runs.runner import Engine
from .commands.common import cores


class Sharding:
    """The cluster of ``--ray``, which is left when the stack is closed."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack):
        from ..workers import cluster

        self.joined, self.threads = stack.enter_context(cluster.joined(args.ray, cores())), args.threads or 1
        self.joined.check_threads(self.threads)
        self.shards = args.shards or self.joined.cores
        self.plugins = tuple(folder.absolute() for folder in args.plugins)

    def check(self, federation: Federation) -> None:
        """Raise UserError if the run cannot be cut into these shards."""
        from ..workers import partition

        partition.check(federation, self.shards)

    def engine(self, config: RunConfig, warn: Callable[[str], None]) -> Engine:
        """What does a run on the cluster."""
        from ..workers.ray_crew import ShardStarter
        from ..workers.shards import Conductor

        return Conductor(config, self.shards, self.plugins, ShardStarter(self.joined, self.threads), warn)


class SharedStream:
    """The stream of all seeds, loaded and checked for the first of them that is not finished yet."""

    def __init__(self, config: RunConfig, sharding: Sharding | None):
        self.config, self.sharding = config, sharding
        self.stream: Stream | None = None

    def load(self, note: Callable[[str], None]) -> Stream:
        """The stream; ``note`` is told, the first time, what all seeds have in common.

        Raises:
            UserError: if the dataset cannot be read, or does not fit the method, the backbone or the shards.
        """
        if self.stream is None:
            self.stream = load_stream(self.config.source, self.config.stream)
            federation = self.config.federation(self.stream)
            self.config.check(federation)
            if self.sharding is not None:
                self.sharding.check(federation)
            users = federation.server.attendance.of(self.stream.steps[0], federation.seed, 0).users
            for text in (*federation.backbone.notes(), *federation.method.notes(len(users)),
                         thin_note(self.stream, self.config.stream)):
                if text:
                    note(text)
        return self.stream
