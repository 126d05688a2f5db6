"""Continual-learning summaries of the matrix R[t, s]: the metric on block s with the model trained up to block t."""

from __future__ import annotations

import numpy as np


def summaries(r: np.ndarray, per_step: int = 1, error: bool = False) -> dict[str, float | None]:
    """All summaries of one matrix; they use the lower triangle (s <= t), block 0 included. With T the last block:

    - LA = mean over i <= T of R[i, i], RA = mean over i <= T of R[T, i] (F3CRec's code, after CCD);
    - HM = 2 LA RA / (LA + RA); 0 if both are 0;
    - BWT = mean over s < T of R[T, s] - R[s, s] (Lopez-Paz & Ranzato, 2017); None with a single block;
    - forgetting = mean over s < T of max over s <= t < T of R[t, s], minus R[T, s] (Chaudhry et al., 2018), of an
      ``error`` R[T, s] minus the least; None with a single block.

    Args:
        per_step: blocks that are trained at once, as domains are; none of the last ones is an earlier s.
    """
    own, last, earlier = np.diag(r), r[-1], range(len(r) - per_step)
    la, ra = float(np.mean(own)), float(np.mean(last))
    values = {"LA": la, "RA": ra, "HM": 2.0 * la * ra / (la + ra) if la + ra > 0 else 0.0}
    high = -r if error else r
    drops = [max(high[t, s] for t in earlier[s:]) - high[-1, s] for s in earlier]
    values["BWT"] = float(np.mean(last[:len(earlier)] - own[:len(earlier)])) if drops else np.nan
    values["forgetting"] = float(np.mean(drops)) if drops else np.nan
    return {name: None if np.isnan(value) else value for name, value in values.items()}
