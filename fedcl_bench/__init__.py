"""fedcl_bench: a benchmark suite for federated continual recommendation on RecBole."""

from .version import __version__
