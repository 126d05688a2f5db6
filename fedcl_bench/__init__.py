"""fedcl_bench: a benchmark suite for federated continual recommendation on RecBole.

What a plugin is written from can be imported from here. It is loaded when asked for, as it needs PyTorch, which the
command line's help does not wait for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .backbone import Backbone, BackboneSettings
    from .method import Method
    from .sequential import SequentialBackbone, SequentialSettings
    from .settings import setting

__all__ = ["Backbone", "BackboneSettings", "Method", "SequentialBackbone", "SequentialSettings", "setting"]

_MODULES = {"Backbone": "backbone", "BackboneSettings": "backbone", "Method": "method",
            "SequentialBackbone": "sequential", "SequentialSettings": "sequential", "setting": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
