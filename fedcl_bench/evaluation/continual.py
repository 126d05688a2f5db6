"""Continual-learning summaries of the matrix R[t, s]: the metric on block s with the model trained up to block t.

All formulas use the lower triangle (s <= t); block 0 is included unless said otherwise.
"""

from __future__ import annotations

import numpy as np


def learning_average(r: np.ndarray) -> float:
    """LA_T = mean over i <= T of R[i, i] (F3CRec's code, after CCD)."""
    return float(np.mean(np.diag(r)))


def retained_average(r: np.ndarray) -> float:
    """RA_T = mean over i <= T of R[T, i] (F3CRec's code, after CCD)."""
    return float(np.mean(r[-1]))


def harmonic_mean(r: np.ndarray) -> float:
    """HM = 2 LA RA / (LA + RA); 0 if both are 0."""
    la, ra = learning_average(r), retained_average(r)
    return 2.0 * la * ra / (la + ra) if la + ra > 0 else 0.0


def backward_transfer(r: np.ndarray, per_step: int = 1) -> float:
    """BWT = mean over s < T of R[T, s] - R[s, s] (Lopez-Paz & Ranzato, 2017); nan with a single block.

    Args:
        per_step: blocks that are trained at once, as domains are; none of the last ones is an earlier s.
    """
    earlier = len(r) - per_step
    return float(np.mean(r[-1, :earlier] - np.diag(r)[:earlier])) if earlier else float("nan")


def forgetting(r: np.ndarray, per_step: int = 1, error: bool = False) -> float:
    """Mean over s < T of max over s <= t < T of R[t, s], minus R[T, s] (Chaudhry et al., 2018); nan with one block.
    ``per_step`` as for ``backward_transfer``. Of an ``error``, R[T, s] minus the least."""
    r, earlier = -r if error else r, len(r) - per_step
    drops = [max(r[t, s] for t in range(s, earlier)) - r[-1, s] for s in range(earlier)]
    return float(np.mean(drops)) if drops else float("nan")


SUMMARIES = ("LA", "RA", "HM", "BWT", "forgetting")


def summaries(r: np.ndarray, per_step: int = 1, error: bool = False) -> dict[str, float | None]:
    """All summaries of one matrix; None where a summary is undefined. Arguments as for ``forgetting``."""
    values = dict(zip(SUMMARIES, (learning_average(r), retained_average(r), harmonic_mean(r),
                                  backward_transfer(r, per_step), forgetting(r, per_step, error))))
    return {name: None if np.isnan(value) else value for name, value in values.items()}
