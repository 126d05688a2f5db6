"""What every attack must do: leave a run without malicious clients as it is, and change one with them.

A property is a function of a ``Pair`` whose settings name the attack; it returns its evidence, or raises ``Violated``.
"""

from __future__ import annotations

from dataclasses import replace

from .report import Violated
from .trials import Pair, all_tables, finished, runs_differ, tables_differ


def nobody_malicious(pair: Pair) -> str:
    """With malicious=0, every number is that of a run without the attack."""
    honest = finished(replace(pair, settings={}).federation())
    if mismatch := runs_differ(honest, finished(pair.federation(parts=pair.parts(malicious=0.0))), tolerance=0.0):
        raise Violated(f"with malicious=0 and without an attack: {mismatch}")
    return "bit-identical with malicious=0 and without it"


def has_an_effect(pair: Pair) -> str:
    """Malicious clients change the model, and in the blocks after attack_blocks they are gone."""
    attacked = all_tables(pair.points[-1])
    effect = tables_differ(all_tables(finished(replace(pair, settings={}).federation())), attacked)
    if not effect:
        raise Violated("a run with malicious clients is the same as without")
    if not tables_differ(all_tables(finished(pair.federation(parts=pair.parts(attack_blocks=1)))), attacked):
        raise Violated("attack_blocks=1 changes nothing in later blocks")
    return f"{effect}; attack_blocks has an effect"


OF_ATTACKS = [("no malicious client, no change", nobody_malicious),
              ("malicious clients change the model", has_an_effect)]
