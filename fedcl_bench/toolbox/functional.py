"""Differentiable building blocks for backbones, in the memory order that is fast for stacked clients."""

from __future__ import annotations

from ..kernels.functional import (Pooling, attention, cosine_pool, dot, layer_norm, linear, nearest_entries,
                                  plus_constant, shared, target_logits, weighted_bce)
from ..plugin.state import rows_of, with_trailing_dims

__all__ = ["Pooling", "attention", "cosine_pool", "dot", "layer_norm", "linear", "nearest_entries", "plus_constant",
           "rows_of", "shared", "target_logits", "weighted_bce", "with_trailing_dims"]
