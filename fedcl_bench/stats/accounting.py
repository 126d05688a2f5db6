"""What clipped and noisy uploads guarantee: local differential privacy of every client towards all who see them.

A client's mechanism in a round is its upload: the parameters that the server sent, which are no secret, plus its change
of them, scaled down to a norm of at most C, plus noise. If all of the client's data is replaced by other data, the
change moves by at most 2C: that is the sensitivity, whatever clients train, keep or replay. All rounds that a client
takes part in compose; nothing is gained from the others, as the server sees every upload alone.

- Laplace noise of scale b, with C a bound on the L1 norm: a round is (2C/b)-DP. Of all ways to split 2C over the
  entries that in one entry is the worst, so the privacy loss distribution (PLD) of Laplace noise on one number
  describes a round, and its self-composition the run. dp-accounting computes it, as an upper bound; Rényi divergences
  give a looser one.
- Gaussian noise of standard deviation s, with C a bound on the L2 norm: T rounds are together one Gaussian mechanism of
  noise s / (2C sqrt(T)) per sensitivity (Dong, Roth & Su, JRSS B 2022), whose epsilon is exact (Balle & Wang, ICML
  2018); dp-accounting solves for it.

Without dp-accounting closed forms are used, which are never below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

from .clip_noise import LAPLACE, Protection

ACCOUNTANT = "dp-accounting>=0.6"  # the extra [privacy]

DELTA = 1e-5  # unless said otherwise
INSTALL = f"python -m pip install '{ACCOUNTANT}'"
# Beyond this epsilon of a round, Laplace noise composes almost as badly as the sum of the rounds, which is taken.
_STRONGEST_ROUND = 50.0
_CELLS = 1e6  # of a run's privacy loss distribution; fewer make the bound looser


def closed_form(protection: Protection, rounds: int, delta: float) -> float:
    """An upper bound of epsilon over so many rounds by zero-concentrated DP (Bun & Steinke, TCC 2016); of Laplace noise
    at most the sum of the rounds' epsilons, which holds with delta 0."""
    ratio = 2.0 * protection.clip / protection.noise
    rho = rounds * ratio ** 2 / 2.0
    epsilon = rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))
    return min(epsilon, rounds * ratio) if protection.mechanism == LAPLACE else epsilon


def epsilon(protection: Protection, rounds: int, delta: float = DELTA) -> float:
    """Epsilon of one client that took part in so many rounds under clipping and noise; raises ModuleNotFoundError
    without the package dp-accounting."""
    from dp_accounting import get_epsilon_gaussian
    from dp_accounting.pld.privacy_loss_distribution import from_laplace_mechanism

    ratio = 2.0 * protection.clip / protection.noise
    if protection.mechanism != LAPLACE:
        return float(get_epsilon_gaussian(1.0 / (ratio * math.sqrt(rounds)), delta))
    if ratio > _STRONGEST_ROUND:
        return rounds * ratio
    cell = min(2.0 * rounds * ratio / _CELLS, ratio / 10.0)
    loss = from_laplace_mechanism(1.0, sensitivity=ratio, value_discretization_interval=cell).self_compose(rounds)
    return min(float(loss.get_epsilon_for_delta(delta)), rounds * ratio)


@dataclass(frozen=True)
class Guarantee:
    """Every client's uploads are (epsilon, delta)-differentially private; ``exact``: from dp-accounting; else the
    closed form, for want of that package."""

    epsilon: float
    delta: float
    exact: bool

    def __str__(self) -> str:
        return f"epsilon = {self.epsilon:.4g}, delta = {self.delta:g}"


def guarantee(protection: Protection, rounds: int, delta: float = DELTA) -> Guarantee | None:
    """What the uploads of so many rounds guarantee a client; None without clipping or without noise."""
    if not (protection.clip and protection.noise):
        return None
    try:
        return Guarantee(epsilon(protection, rounds, delta), delta, True)
    except ModuleNotFoundError:
        return Guarantee(closed_form(protection, rounds, delta), delta, False)


def sentences(protection: Protection, rounds: int, uploads: Sequence[str], learns: Sequence[str] = ()) -> list[str]:
    """What clipping and noise guarantee, and what they do not, for people. A client took part in at most so many
    ``rounds``, and sends ``uploads`` besides public parameters (see ``Method.uploads``); without clipping the server
    ``learns`` more, as clauses say."""
    name = "Laplace" if protection.mechanism == LAPLACE else "Gaussian"
    noise = f"upload_noise={protection.noise:g}: {name} noise on every uploaded number."
    clip = f"upload_clip={protection.clip:g}: changes of public parameters are clipped"
    if not protection.clip:
        beside = "".join(f" {clause[0].upper()}{clause[1:]}." for clause in learns)
        return [f"{noise} Uploads are not clipped, so it bears no formal guarantee and no epsilon.{beside}"] \
            if protection.noise else []
    if not protection.noise:
        return [f"{clip}; without noise that bears no formal guarantee and no epsilon."]
    if uploads:
        return [f"{noise} {clip}, but {', '.join(uploads)} {'are' if len(uploads) > 1 else 'is'} not: no formal "
                f"guarantee and no epsilon."]
    guaranteed = guarantee(protection, rounds)
    assert guaranteed is not None  # there are clipping and noise
    tighter = "" if guaranteed.exact else f" An upper bound; for a tighter one: {INSTALL}."
    return [f"Privacy of each client's uploads, should all its data be replaced: {guaranteed} over {rounds} "
            f"round{'s' if rounds > 1 else ''} (upload_clip={protection.clip:g}, {name} upload_noise="
            f"{protection.noise:g}).{tighter}"]
