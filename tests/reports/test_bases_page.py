"""docs/bases.md says what results/bases has."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results/bases"


@pytest.fixture(scope="module")
def page():
    return " ".join((ROOT / "docs/bases.md").read_text().split())


@pytest.fixture(scope="module")
def runs():
    """Runs with ``average``, N@20 over blocks 1-3."""
    table = pd.read_csv(FOLDER / "runs.csv")
    assert not table.duplicated(["base", "program", "method", "seed"]).any()
    return table.assign(average=table[["block1", "block2", "block3"]].mean(axis=1))


@pytest.fixture(scope="module")
def pairs(runs):
    """FT, F3CRec and the lead of each base, program and seed that has both."""
    table = runs.pivot(index=["base", "program", "seed"], columns="method", values="average").dropna()
    return table.assign(lead=table.f3crec - table.ft)


def short(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}".replace("0.", ".", 1)


def test_the_programs_agree(page):
    rounds, tables = pd.read_csv(FOLDER / "rounds.csv"), pd.read_csv(FOLDER / "tables.csv")
    assert (rounds.script == rounds.suite).all()
    assert f"All {len(rounds)} rounds agree" in page
    assert rounds.groupby(["base", "method"]).size().eq(36).all() and rounds.base.nunique() >= 3
    tests = pd.read_csv(FOLDER / "tests.csv")
    assert (tests.script == tests.suite).all() and f"all {len(tests)} tests" in page
    assert tests.groupby(["base", "method"]).size().eq(8).all() and set(tests.base) == set(rounds.base)
    first = rounds[(rounds.block == 1) & (rounds["round"] == 1)].set_index(["base", "method"])
    for base in rounds.base.unique():
        assert f"| {base} | {first.script[base, 'ft']:.5f} | {first.suite[base, 'ft']:.5f} | " \
               f"{first.script[base, 'f3crec']:.5f} | {first.suite[base, 'f3crec']:.5f} |" in page
    other = first.loc["script-42"].suite_without_start
    assert f"{other.ft:.5f} (FT) and {other.f3crec:.5f} (F3CRec)" in page
    first = tables[(tables.block == 1) & (tables["round"] == 1)]
    worst = first.loc[first.largest_difference.idxmax()]
    assert f"{worst.largest_difference:.7f}".rstrip("0") in page and worst.table.startswith("public")
    assert tables.largest_difference.max() < 1e-3 and f"{tables.largest_difference.max():.5f}" in page


def test_every_base_stands_on_the_page(page, runs, pairs):
    base_of = runs.groupby("base").block0
    assert (base_of.max() - base_of.min() < 1e-5).all(), "one base has one block 0, in both programs"
    for (base, program), of in pairs.groupby(["base", "program"]):
        lead = short(of.lead.mean(), "+") + (f" ± {short(of.lead.std())}" if len(of) > 1 else "")
        assert f"| {base} | {program} | {len(of)} | {short(base_of.first()[base])} | {short(of.ft.mean())} | " \
               f"{short(of.f3crec.mean())} | {lead} |" in page
    assert page.count("| suite |") + page.count("| script |") == len(pairs.groupby(["base", "program"]))


def test_the_spread_stands_on_the_page(page, pairs):
    pairs = pairs.drop(index="script-42 without start")
    suite = pairs.xs("suite", level="program")
    of_base = suite.lead.groupby("base").mean()
    script, from_42 = pairs.loc["script-42", "script", 42], suite.loc["script-42"].f3crec
    assert f"{short(script.f3crec)} for F3CRec and {short(script.ft)} for FT" in page
    assert f"F3CRec between {short(from_42.min())} and {short(from_42.max())}" in page and len(from_42) == 5
    assert f".0133, is larger than all of the {len(pairs)} here" in page and pairs.lead.max() < 0.0133
    within = suite.lead.groupby("base").var().mean() ** 0.5
    assert f"from {short(of_base.min(), '+')} to {short(of_base.max(), '+')}" in page
    error = of_base.std() / len(of_base) ** 0.5
    assert f"{short(of_base.mean(), '+')} over {len(of_base)} bases, each counted once, with a standard error of " \
           f"{short(error)}" in page
    assert f"leads by {short(of_base.mean(), '+')} on average" in page
    assert f"From seed to seed of one base the lead has a deviation of {short(within)}" in page
