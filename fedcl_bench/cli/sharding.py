"""The cluster that the clients of one ``run`` are on."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Callable

from ..federation.parts import Federation
from ..runs.config import RunConfig
from ..runs.runner import Engine
from .commands.common import cores


class Sharding:
    """The cluster of ``--ray``, which is left when the stack is closed."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack):
        from ..experiments import cluster

        self.joined, self.threads = stack.enter_context(cluster.joined(args.ray, cores())), args.threads or 1
        self.joined.check_threads(self.threads)
        self.shards = args.shards or self.joined.cores
        self.plugins = tuple(folder.absolute() for folder in args.plugins)

    def check(self, federation: Federation) -> None:
        """Raise UserError if the run cannot be cut into these shards."""
        from ..experiments import partition

        partition.check(federation, self.shards)

    def engine(self, config: RunConfig, warn: Callable[[str], None]) -> Engine:
        """What does a run on the cluster."""
        from ..experiments.ray_crew import ShardStarter
        from ..experiments.shards import Conductor

        return Conductor(config, self.shards, self.plugins, ShardStarter(self.joined, self.threads), warn)
