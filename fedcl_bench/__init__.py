"""fedcl_bench: a benchmark suite for federated continual recommendation on RecBole.

What a plugin is written from can be imported from here, and what runs and reads results: ``run``, ``load`` and
``Results`` (docs/api.md). It is loaded when asked for, as it needs PyTorch, which the command line's help does not wait
for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .exports import MODULES
from .version import __version__

if TYPE_CHECKING:
    from .api.loading import load
    from .api.model import Model
    from .api.results import Results
    from .api.running import run
    from .backbone import Backbone, BackboneSettings
    from .domain_module import DomainMethod, DomainModule, ModuleBackbone, ModuleSettings, Stage, TextSettings
    from .errors import RunFailed, UserError
    from .method import Method
    from .metric import Catalogue, Metric, RankedLists
    from .sequential import SequentialBackbone, SequentialSettings, SessionBackbone, SessionSettings
    from .settings import setting

__all__ = ["Backbone", "BackboneSettings", "Catalogue", "DomainMethod", "DomainModule", "Method", "Metric", "Model",
           "ModuleBackbone", "ModuleSettings", "RankedLists", "Results", "RunFailed", "SequentialBackbone",
           "SequentialSettings", "SessionBackbone", "SessionSettings", "Stage", "TextSettings", "UserError", "load",
           "run", "setting"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
