"""fedcl_bench: a benchmark suite for federated continual recommendation on RecBole.

What a plugin is written from can be imported from here, and what runs and reads results: ``run``, ``load`` and
``Results`` (docs/records.md). It is loaded when asked for, as it needs PyTorch, which the command line's help does not
wait for.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .api.model import Model
    from .api.results import Results
    from .api.running import load, run
    from .core.errors import Incompatible, RunFailed, UserError
    from .core.parallel import in_order
    from .core.settings import inherited, setting
    from .core.tuning import SIZES
    from .data.settings import ItemFeatureSettings
    from .data.stream import TrainingStep
    from .plugin.attack import Attack, Seen, inner_product_table
    from .plugin.backbone import ITEM, USER, Backbone, BackboneSettings
    from .plugin.history import History, HistoryBackbone
    from .plugin.local_settings import LocalSettings
    from .plugin.method import Encoding, Method, Pull, SoftTargets
    from .plugin.metric import Catalogue, Metric, RankedLists
    from .plugin.sequential import (Dropout, Sequence, SequentialBackbone, SequentialSettings, SessionBackbone,
                                    SessionSettings, SessionVectors, Start, linear_start, norm_start, xavier, zeros)
    from .plugin.silo import (TEXT_MODEL, DomainData, DomainMethod, DomainModule, Histories, ModuleBackbone,
                              ModuleSettings, Stage, TextSettings, once_in_ranking)
    from .plugin.state import Snapshot, all_keys, in_pieces, pair_keys, score_users
    from .plugin.views import ClientUpdates, Local, LocalBatch, LocalSessions
    from .training.sampling import Chunk, draw_negatives, make_chunks, padded
    from .training.session_trainer import session_losses

# OpenMP takes a number for each level of nested threads, as 4,2; numexpr, which pandas imports, fails at several.
_OMP = os.environ.get("OMP_NUM_THREADS", "")
if _OMP and not re.fullmatch(r"\s*[1-9][0-9]*\s*", _OMP):
    _first = re.match(r"\s*([1-9][0-9]*)", _OMP)
    os.environ.setdefault("NUMEXPR_NUM_THREADS", _first[1] if _first else "1")

# PyTorch's threads that wait for each other spin, by default 300,000 times: beside other processes mini-batches of
# domains then take two to three times as long with two threads as with one. After 5,000 times they sleep: an eighth
# longer than with one, and on an idle machine nearly as quick as spinning (`benchmarks/threads.py` has its results).
# PyTorch's OpenMP reads this when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_BY_MODULE = {
    "api.model": ("Model",),
    "api.results": ("Results",),
    "api.running": ("load", "run"),
    "core.errors": ("Incompatible", "RunFailed", "UserError"),
    "core.parallel": ("in_order",),
    "core.settings": ("inherited", "setting"),
    "core.tuning": ("SIZES",),
    "data.settings": ("ItemFeatureSettings",),
    "data.stream": ("TrainingStep",),
    "plugin.attack": ("Attack", "Seen", "inner_product_table"),
    "plugin.backbone": ("Backbone", "BackboneSettings", "ITEM", "USER"),
    "plugin.history": ("History", "HistoryBackbone"),
    "plugin.local_settings": ("LocalSettings",),
    "plugin.method": ("Encoding", "Method", "Pull", "SoftTargets"),
    "plugin.metric": ("Catalogue", "Metric", "RankedLists"),
    "plugin.sequential": ("Dropout", "linear_start", "norm_start", "Sequence", "SequentialBackbone",
                          "SequentialSettings", "SessionBackbone", "SessionSettings", "SessionVectors", "Start",
                          "xavier", "zeros"),
    "plugin.silo": ("DomainData", "DomainMethod", "DomainModule", "Histories", "ModuleBackbone", "ModuleSettings",
                    "once_in_ranking", "Stage", "TEXT_MODEL", "TextSettings"),
    "plugin.state": ("all_keys", "in_pieces", "pair_keys", "score_users", "Snapshot"),
    "plugin.views": ("ClientUpdates", "Local", "LocalBatch", "LocalSessions"),
    "training.sampling": ("Chunk", "draw_negatives", "make_chunks", "padded"),
    "training.session_trainer": ("session_losses",),
}
_MODULES = {name: module for module, names in _BY_MODULE.items() for name in names}
__all__ = ["Attack", "Backbone", "BackboneSettings", "Catalogue", "Chunk", "ClientUpdates", "DomainData",
           "DomainMethod", "DomainModule", "Dropout", "Encoding", "Histories", "History", "HistoryBackbone", "ITEM",
           "Incompatible", "ItemFeatureSettings", "Local", "LocalBatch", "LocalSessions", "LocalSettings", "Method",
           "Metric", "Model", "ModuleBackbone", "ModuleSettings", "Pull", "RankedLists", "Results", "RunFailed",
           "SIZES", "Seen", "Sequence", "SequentialBackbone", "SequentialSettings", "SessionBackbone",
           "SessionSettings", "SessionVectors", "Snapshot", "SoftTargets", "Stage", "Start", "TEXT_MODEL",
           "TextSettings", "TrainingStep", "USER", "UserError", "all_keys", "draw_negatives", "in_order", "in_pieces",
           "inherited", "inner_product_table", "linear_start", "load", "make_chunks", "norm_start", "once_in_ranking",
           "padded", "pair_keys", "run", "score_users", "session_losses", "setting", "xavier", "zeros"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
