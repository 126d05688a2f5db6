"""What can be imported from the package itself, and the module that each of it is in."""

from __future__ import annotations

_NAMES = {
    "api.loading": ("load",),
    "api.model": ("Model",),
    "api.results": ("Results",),
    "api.running": ("run",),
    "core.errors": ("RunFailed", "UserError"),
    "core.parallel": ("in_order",),
    "core.settings": ("inherited", "setting"),
    "core.tuning": ("SIZES",),
    "plugin.backbone": ("Backbone", "BackboneSettings", "ITEM", "USER"),
    "plugin.local_settings": ("LocalSettings",),
    "plugin.method": ("Method",),
    "plugin.metric": ("Catalogue", "Metric", "RankedLists"),
    "plugin.sequential": ("linear_start", "norm_start", "Sequence", "SequentialBackbone", "SequentialSettings",
                          "SessionBackbone", "SessionSettings", "SessionVectors", "Start", "xavier", "zeros"),
    "plugin.silo": ("DomainData", "DomainMethod", "DomainModule", "Histories", "ModuleBackbone", "ModuleSettings",
                    "once_in_ranking", "Stage", "TEXT_MODEL", "TextSettings"),
    "plugin.state": ("all_keys", "in_pieces", "pair_keys", "score_users", "Snapshot"),
    "training.sampling": ("Chunk", "draw_negatives", "make_chunks", "padded"),
}
MODULES = {name: module for module, names in _NAMES.items() for name in names}
