"""Tables rebuilt from records: right numbers in the right cells, marks by their rules, nothing filled in."""

import csv
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricate import USERS, fabricate, fabricate_failed, level
from helpers import output_of, refused
from scipy import stats
from test_any_table import headings

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments.papers import Key, f3crec
from fedcl_bench.records.published import write as write_packs
from fedcl_bench.records.store import load_runs
from fedcl_bench.reports import any_table, render, tables
from fedcl_bench.reports.render import csv_text, latex, markdown
from fedcl_bench.reports.selection import Source
from fedcl_bench.reports.tables import build
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import RunSpec, Tuned
from fedcl_bench.stats.significance import interval_of_mean

MINE = {"datasets": ["ml-100k"], "backbones": ["fedmf"]}  # the part of a table that a test has records of
BASELINES = {"ft": 0.080, "reg": 0.085, "kd": 0.090, "rlp2": 0.081, "spp": 0.084}


def source(runs, registry, tuned=None, assignments=(), statistics=None) -> Source:
    return Source(runs, registry, Tuned.of(tuned, Path()), assignments, statistics)


def table(number, folder, registry, only=MINE, **options):
    return build("f3crec", f3crec.TABLES[number], source(load_runs(folder), registry, **options), **only)


def cell(built, row, column="avg", metric="ndcg@20", dataset="ml-100k", backbone="fedmf"):
    (found,) = [c for c in built.cells() if c.key == Key(dataset, backbone, row, metric, column)]
    return found


def rows_of(built):
    """The lines of its CSV, by row and column."""
    return {(line["row"], line["column"]): line for line in csv.DictReader(io.StringIO(csv_text(built)))
            if line["metric"] == "ndcg@20" and line["dataset"] == "ml-100k" and line["backbone"] == "fedmf"}


def record(folder, registry, method, scores, *settings, seeds=(0,), **options):
    """Records of a method on ML-100K, FedMF, whose N@20 is ``scores``, or about that number."""
    for seed in seeds:
        fabricate(folder, registry, RunSpec(method, "fedmf", "ml-100k", settings), seed,
                  level(scores) if isinstance(scores, float) else scores, **options)


@pytest.fixture(scope="module")
def main_runs(registry, tmp_path_factory):
    """Table 2 on ML-100K, FedMF: all methods, seeds 0-2, F3CRec best at .1 in D0 coordinates."""
    results = tmp_path_factory.mktemp("main")
    for i, (method, mean) in enumerate({**BASELINES, "f3crec": 0.1}.items()):
        record(results, registry, method, level(mean, noise=i), seeds=range(3))
    return results


@pytest.fixture(scope="module")
def main_table(main_runs, registry):
    return table(2, main_runs, registry, only={})


def test_means_deviations_improvements_ranks_and_stars(main_table):
    """The star is the paper's rule: p is that of a paired t-test over users of F3CRec and the best baseline, each
    averaged over blocks and seeds."""
    found = cell(main_table, "kd", "D2")
    assert found.mean == pytest.approx(0.090 + 0.02 + 0.002)  # level + block + mean of the seeds' gaps
    assert found.std == pytest.approx(np.std([0, 0.002, 0.004], ddof=1)) and found.seeds == (0, 1, 2)
    assert cell(main_table, "kd").mean == pytest.approx(0.112)
    assert cell(main_table, "kd", metric="recall@20").mean == pytest.approx(0.224)
    change = cell(main_table, "f3crec", "change")
    assert change.mean == pytest.approx(100 * (0.122 / 0.102 - 1))  # follows from the two Avg cells
    assert change.std == pytest.approx(np.std([100 * (0.12 + g) / (0.10 + g) for g in (0, 0.002, 0.004)], ddof=1))
    assert not [c for c in main_table.cells() if c.key.row == "ft" and c.key.column == "change"]
    assert cell(main_table, "kd").printed.text == "0.0938" and "3 seeds (0-2)." in main_table.notes
    assert {row: cell(main_table, row).rank for row in f3crec.METHODS} == {
        "ft": 0, "reg": 0, "kd": 2, "rlp2": 0, "spp": 0, "f3crec": 1}
    assert all(c.rank == 0 for c in main_table.cells() if c.key.column == "change")
    mine, best = (np.mean([level(mean, noise=i)(t, t, seed) for t in (1, 2, 3) for seed in range(3)], axis=0)
                  for i, mean in ((5, 0.1), (2, 0.09)))
    found = cell(main_table, "f3crec")
    assert found.p == pytest.approx(stats.ttest_rel(mine, best).pvalue, rel=1e-6) and found.star
    assert [c.key for c in main_table.cells() if c.star] == [Key("ml-100k", "fedmf", "f3crec", m, "avg")
                                                             for m in ("ndcg@20", "recall@20")]


@pytest.mark.parametrize("shifts, held", [((0.003, 0.001, 0.002), 2), ((0.03, -0.03, 0.01), 0)])
def test_p_over_seeds_is_of_each_seeds_average(registry, tmp_path, shifts, held):
    """Both are ahead on every user; one is so on two seeds of three alone, and keeps its star."""
    def mine(t, s, seed):
        return level(0.085, noise=1)(t, s, seed) + shifts[seed]
    record(tmp_path, registry, "ft", 0.08, seeds=range(3))
    record(tmp_path, registry, "f3crec", mine, seeds=range(3))
    averages = [[np.mean([scores(t, t, seed) for t in (1, 2, 3)]) for seed in range(3)]
                for scores in (mine, level(0.08))]
    found = cell(built := table(2, tmp_path, registry), "f3crec")
    assert found.p_seeds == pytest.approx(stats.ttest_rel(*averages).pvalue) and found.star
    assert found.p < 1e-6 and float(rows_of(built)["f3crec", "avg"]["p_seeds"]) == found.p_seeds
    assert (f"Numbers with *: 2; significant over seeds as well: {held} (the same test of each seed's average over "
            f"users).") in built.notes and not any("One seed" in note for note in built.notes)


def test_missing_cells_are_named_and_others_written_down(main_table):
    (found,) = [text for text in main_table.missing if "on fedncf, pfedrec, ml-100k" in text]
    assert found == ("missing: ft, reg, kd, rlp2, spp, f3crec on fedncf, pfedrec, ml-100k: no record; run: "
                     "run_bench.py grid --paper f3crec --table 2 --datasets ml-100k --backbones fedncf,pfedrec "
                     "--methods ft,reg,kd,rlp2,spp,f3crec --seeds 3")
    empty = [c for c in main_table.cells() if c.mean is None]
    assert len(empty) == len(main_table.cells()) - 6 * 8 - 5 * 2 and all(c.missing for c in empty)
    text = markdown(main_table)
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {10}
    assert "**0.1220**\\* ± 0.0020 (0.1034\\*)" in text and "<u>0.1120</u> ± 0.0020 (0.0938)" in text
    assert "(OOM)" in text and "+19.61 ± " in text and "RLP2†" in text
    assert "0.0440<sup>" in text and "the mean of its D1-D3 is 0.0457" in text
    assert len(csv_text(main_table).splitlines()) == 1 + len(main_table.cells()) == 1 + 552 + 24 + 114 + 6
    found = rows_of(main_table)["kd", "avg"]
    assert float(found["mean"]) == cell(main_table, "kd").mean and found["seeds"] == "0 1 2"
    assert len(found["records"].split()) == 3 and found["paper"] == "0.0938"


def test_equal_numbers_share_a_rank(registry, tmp_path):
    for method, mean in (("ft", 0.08), ("reg", 0.080001), ("kd", 0.07)):
        record(tmp_path, registry, method, mean)
    built = table(2, tmp_path, registry)
    assert [cell(built, row, "D1").rank for row in ("ft", "reg", "kd")] == [1, 1, 2]
    assert cell(built, "ft", "D1").std is None and "1 seed, so no deviation (0)." in built.notes


@pytest.mark.parametrize("mean,noise", [(0.0801, 1), (0.070, 2)])
def test_no_star_without_significance_or_for_the_worse(registry, tmp_path, mean, noise):
    def noisy(t, s, seed):
        return level(mean)(t, s, seed) + np.random.default_rng(noise).normal(0, 0.02, USERS)
    record(tmp_path, registry, "ft", 0.08)
    record(tmp_path, registry, "f3crec", noisy if mean > 0.08 else level(mean, noise=noise))
    found = cell(built := table(2, tmp_path, registry), "f3crec")
    assert not found.star and (found.p > 0.05) == (mean > 0.08)
    assert found.p_seeds is None and "One seed: no test over seeds (2 of 2 tests)." in built.notes
    assert any("without Reg, KD, RLP2†, SPP†" in note for note in built.notes)


def test_only_common_seeds_are_paired(registry, tmp_path):
    for method, seeds in (("ft", (0, 1)), ("f3crec", (1, 2))):
        record(tmp_path, registry, method, level(0.08, gap=0.01), seeds=seeds)
    built = table(2, tmp_path, registry)
    found = cell(built, "f3crec", "change")
    assert found.mean == pytest.approx(0.0) and found.seeds == (1,) and found.std is None
    assert any(note.startswith("Other seeds") and "F3CRec on FedMF, ML-100K" in note for note in built.notes)
    record(tmp_path / "apart", registry, "ft", 0.08)
    record(tmp_path / "apart", registry, "f3crec", 0.08, seeds=(1,))
    built = table(2, tmp_path / "apart", registry)
    assert cell(built, "f3crec", "change").mean is None and cell(built, "f3crec").p is None
    assert any(note.startswith("FedMF, ML-100K: not tested; ") for note in built.notes)
    assert any("(change): FT has no record with a seed in common" in text for text in built.missing)


def test_a_row_that_is_ft_in_effect_is_marked(registry, tmp_path):
    """If no metric of any seed and block differs by .0001; in its average, with a note, in every form."""
    for seed in range(2):
        for method, more in (("ft", 0.0), ("kd", 4e-5), ("reg", 6e-5), ("f3crec", 2e-4 * seed)):  # R@20 is twice N@20
            record(tmp_path, registry, method, lambda *place, more=more: level(0.1)(*place) + more, seeds=[seed])
    built = table(2, tmp_path, registry)
    assert {(c.key.row, c.key.metric, c.key.column) for c in built.cells() if c.is_reference} == {
        ("kd", metric, "avg") for metric in ("ndcg@20", "recall@20")}
    assert any("less than 0.0001 away from FT's" in note for note in built.notes)
    text = render.ours(cell(built, "kd"))
    assert text.endswith(" = FT") and text in re.sub(r"\*\*|</?u>", "", markdown(built))
    assert "= FT" in latex(built) and "= FT" in render.terminal(built)
    assert {place for place, line in rows_of(built).items() if line["equals"]} == {("kd", "avg")}
    # A table without FT looks for its records too.
    assert not any(c.is_reference for c in table(3, tmp_path, registry).cells())
    layout = any_table.Layout(methods=("kd", "f3crec"), backbones=("fedmf",), datasets=("ml-100k",))
    built = any_table.build_any(layout, source(load_runs(tmp_path), registry))
    assert [c.key.row for c in built.cells() if c.is_reference] == ["kd"]
    # So does one with settings of all rows; and FT with others is not FT.
    for method, mean, setting in (("ft", 0.1, ("rounds", 2)), ("kd", 0.1, ("rounds", 2)), ("ft", 0.2, ("lr", 0.01))):
        record(tmp_path, registry, method, mean, setting)
    set_of_all = replace(source(load_runs(tmp_path), registry), assignments=(("rounds", 2),))
    built = any_table.build_any(replace(layout, methods=("kd",)), set_of_all)
    assert [c.key.row for c in built.cells() if c.is_reference] == ["kd"]
    layout = replace(layout, methods=("ft:lr=0.01", "ft", "kd"))
    built = any_table.build_any(layout, replace(set_of_all, assignments=()))
    assert {c.key.row for c in built.cells() if c.is_reference} == {"kd"}


@pytest.fixture
def with_mine(main_runs, registry, tmp_path):
    """Table 2 with a method of one's own, above all others; the folder of its runs and the registry that knows it."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/mine.py").write_text("from fedcl_bench.plugin.method import Method\n\n\nclass Mine(Method):\n"
                                              "    name = title = 'mine'\n")
    shutil.copytree(main_runs, tmp_path / "results")
    known = discover([tmp_path / "plugins"])
    record(tmp_path / "results", known, "mine", level(0.12, noise=9), seeds=range(3))
    return tmp_path, known


def test_a_method_that_the_paper_does_not_have(main_table, with_mine):
    """It is shown and ranked, and takes no part in the paper's own test."""
    folder, known = with_mine
    built = table(2, folder / "results", known, only={"add": ["mine"], "datasets": ["ml-100k"]})
    found = cell(built, "mine")
    assert found.mean == pytest.approx(0.142) and found.seeds == (0, 1, 2) and found.printed is None
    assert cell(built, "mine", "change").mean == pytest.approx(100 * (0.142 / 0.102 - 1))
    assert {row: cell(built, row).rank for row in ("kd", "f3crec", "mine")} == {"kd": 0, "f3crec": 2, "mine": 1}
    assert (cell(built, "f3crec").p, cell(built, "f3crec").star) == (cell(main_table, "f3crec").p, True)
    assert built.heads == (*main_table.heads, "mine")
    assert "Not in the paper: mine. `compare` tests them." in built.notes
    assert ("missing: mine on fedncf, pfedrec, ml-100k: no record; run: run_bench.py grid --datasets ml-100k "
            "--backbones fedncf,pfedrec --methods mine --seeds 3") in built.missing
    alone = table(3, folder / "results", known, only={"add": ["mine"]})  # no comparison of methods
    assert not [c for c in alone.cells() if c.key.row == "mine"]


def test_own_methods_on_the_command_line(with_mine, capsys):
    folder, _ = with_mine
    command = ["tables", "--records", str(folder / "results"), "--plugins", str(folder / "plugins"), "--datasets",
               "ml-100k"]
    out = output_of(capsys, *command, "--table", "2", "--backbones", "fedmf,fedncf", "--add", "mine")
    assert "| **0.1420** ± 0.0020 |" in out and (
        f"--methods mine --seeds 3 --results {folder / 'results'} --plugins {folder / 'plugins'}") in out
    for number, method, message in (("2", "mien", "unknown method (--add) 'mien'. Did you mean 'mine'?"),
                                    ("2", "mine,kd", "--add: found 'kd', which the tables of f3crec have already"),
                                    ("3", "mine", "--add has no effect without a table that compares methods")):
        assert message in refused(capsys, *command, "--table", number, "--add", method)


def test_the_nearest_record_is_named(registry, tmp_path):
    near = (("eps", 0.001), ("lr", 0.5))
    for settings in (near, (*near, ("rounds", 7))):
        record(tmp_path, registry, "f3crec", 0.08, *settings)
    assert any("f3crec on fedmf, ml-100k: no record with these settings; the nearest, " in text
               and "has eps 0.001 instead of 0.006, lr 0.5 instead of 1.0; run: " in text
               for text in table(2, tmp_path, registry).missing)


def test_settings_for_all_rows(registry, tmp_path):
    """--set lies over the settings of every row, an ablation's own too."""
    record(tmp_path, registry, "f3crec", 0.08, ("without", "cc"), ("rounds", 7))
    built = table(3, tmp_path, registry, assignments=(("rounds", "7"),))
    assert cell(built, "without=cc").mean == pytest.approx(0.1)  # of .09, .1 and .11
    assert cell(table(3, tmp_path, registry), "without=cc").mean is None


def tuned_to(folder, **settings):
    """A folder of tuned settings: method to its settings on ML-100K, FedMF."""
    folder.mkdir()
    for method, of_method in settings.items():
        (folder / f"ml-100k-fedmf-{method}.json").write_text(json.dumps({"settings": of_method}))
    return folder


def test_missing_plugins_and_tuned_settings_are_named(registry, tmp_path):
    small = replace(registry, loaded={k: v for k, v in registry.plugins.items() if k != ("method", "spp")})
    tuned = tuned_to(tmp_path / "tuned", f3crec={"eps": 0.003})
    record(tmp_path, small, "f3crec", 0.08, tuned=tuned)
    record(tmp_path, small, "ft", 0.07)
    built = table(2, tmp_path, small, {"datasets": ["ml-100k"]}, tuned=tuned)
    assert cell(built, "f3crec", "D1").mean == pytest.approx(0.09) and cell(built, "ft", "D1").mean is None
    assert "missing: spp on fedmf, fedncf, pfedrec, ml-100k: method 'spp' is not installed." in built.missing
    assert any("ft on fedmf, ml-100k: not tuned (no " in text for text in built.missing), built.missing
    assert cell(table(2, tmp_path, small), "ft", "D1").mean == pytest.approx(0.08)


def test_records_that_lack_a_number(registry, tmp_path):
    record(tmp_path, registry, "ft", 0.08)
    (run,) = load_runs(tmp_path)
    for take, missing in ((lambda metrics: metrics["recall@20"]["per_block"].pop(), "3 blocks, the table is of D0-D3"),
                          (lambda metrics: metrics.pop("recall@20"), "no recall@20")):
        take(run.meta["metrics"])
        built = build("f3crec", f3crec.TABLES[2], source([run], registry), **MINE)
        assert cell(built, "ft").mean == pytest.approx(0.1)
        assert cell(built, "ft", metric="recall@20").missing == f"its record has {missing}"
        assert any(missing in text for text in built.missing)


def test_mixed_protocols_and_data_are_refused(registry, tmp_path):
    """Sampled candidates for one of the methods, by its tuned settings; another data file."""
    tuned = tuned_to(tmp_path / "tuned", ft={}, kd={"candidates": "sampled"})
    for method in ("ft", "kd"):
        record(tmp_path, registry, method, 0.08, tuned=tuned)
    with pytest.raises(UserError, match="Table 2 of f3crec: records of different protocols.*kd on fedmf.*=sampled"):
        table(2, tmp_path, registry, tuned=tuned)
    built = table(2, tmp_path, registry)  # without the tuned settings FT's record alone is of the table
    assert cell(built, "ft").mean == pytest.approx(0.1) and cell(built, "kd").mean is None
    assert any("candidates sampled instead of all" in text for text in built.missing)
    record(tmp_path, registry, "reg", 0.08, data="e" * 32)
    with pytest.raises(UserError, match="records of ml-100k come from different data files"):
        table(2, tmp_path, registry)


def test_failed_runs_are_not_called_absent(registry, drawn, tmp_path, capsys):
    """Neither in tables nor by `compare` and `figures`, nor where nothing else is there."""
    record(tmp_path, registry, "f3crec", 0.08)
    for seed in (0, 1):
        fabricate_failed(tmp_path, registry, RunSpec("kd", "fedmf", "ml-100k"), seed,
                         "the loss is not finite in round 3.\nmore")
    why = "failed with seeds 0, 1 (the loss is not finite in round 3)"
    here = ["--records", str(tmp_path)]
    out = output_of(capsys, "tables", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf", *here)
    assert f"missing: kd on fedmf, ml-100k: {why}." in out and "missing: ft, reg, rlp2, spp on" in out
    assert main(["compare", "f3crec", "kd", "--backbone", "fedmf", *here]) == 2
    err = capsys.readouterr().err
    assert f"failed: kd on fedmf, ml-100k {why}." in err and len(err.splitlines()) == 2
    out = output_of(capsys, "figures", "--figure", "curves", "--methods", "f3crec,kd", "--format", "svg", "--out",
                    tmp_path / "out", *here)
    assert f"kd on fedmf, ml-100k {why}: left empty" in out and "make them with" not in out
    shutil.rmtree(next((tmp_path / "runs").glob("f3crec-*")))
    assert main(["compare", "f3crec", "kd", "--backbone", "fedmf", *here]) == 2
    assert "2 failed, as kd on fedmf, ml-100k, seed 0: the loss is not finite" in capsys.readouterr().err


def test_statistics_are_those_of_the_data(registry, ml100k):
    from fedcl_bench.data.stream import statistics

    def known(dataset):
        if dataset == "ml-100k":
            return statistics(ml100k)
        raise UserError(f"dataset '{dataset}': no file.\nSecond line.")
    built = build("f3crec", f3crec.TABLES[1], source([], registry, statistics=known))
    assert all(c.mean == (c.printed.value if c.key.dataset == "ml-100k" else None) for c in built.cells())
    assert "missing: statistics of lastfm-2k: dataset 'lastfm-2k': no file." in built.missing


def test_ablations_and_noise(registry, tmp_path):
    for settings, mean in (((), 0.1), ((("without", "cc"),), 0.09), ((("without", "sc"),), 0.05),
                           ((("upload_noise", 0.3),), 0.07)):
        record(tmp_path, registry, "f3crec", mean, *settings, seeds=range(2))
    built = table(3, tmp_path, registry)
    assert cell(built, "without=cc").mean == pytest.approx(0.111)
    assert cell(built, "without=cc", "change").mean == pytest.approx(100 * (0.111 / 0.121 - 1))
    assert cell(built, "f3crec").rank == 1 and cell(built, "without=cc").rank == 2
    assert cell(built, "ft", "change").missing == "no record"
    assert built.heads == ("N@20 Avg", "N@20 change (%)", "R@20 Avg", "R@20 change (%)")
    assert cell(table(6, tmp_path, registry), "without=sc").mean == pytest.approx(0.071)
    noise = table(8, tmp_path, registry, only={})
    assert cell(noise, "upload_noise=0.3").mean == pytest.approx(0.091)
    assert noise.heads[:2] == ("λ = 0", "λ = 0.1")
    assert [c.key.dataset for c in noise.cells() if c.contradiction] == ["hetrec2011-ml"] * 2


def test_static_and_dynamic_users(registry, tmp_path):
    """Shift is the user's number: the 8 lowest are static. They fall from .2 to .1, the 8 highest to .05."""
    def scores(t, s, seed):
        values = np.full(USERS, 0.2)
        if (t, s) == (1, 0):
            values[:] = 0.3
            values[:8], values[-8:] = 0.1, 0.05
        return values
    record(tmp_path, registry, "f3crec", scores, seeds=range(2))
    degradation, after = table(4, tmp_path, registry), table(5, tmp_path, registry)
    for column, fall, left in (("static", 0.5, 0.1), ("dynamic", 0.75, 0.05)):
        assert cell(degradation, "f3crec", column, "degradation").mean == pytest.approx(fall)
        assert cell(after, "f3crec", column).mean == pytest.approx(left)
    assert degradation.heads == ("F3CRec", "w/o a.r.m", "SPP†")


def test_users_without_a_test_item_are_in_no_group(registry, tmp_path):
    """Of 40 users with a shift only those tested on block 0 are ordered."""
    record(tmp_path, registry, "f3crec", 0.08)
    (run,) = load_runs(tmp_path)
    run.users.drop(run.users.index[(run.users["tested_block"] == 0) & (run.users["user"] < 10)], inplace=True)
    groups = tables.user_groups(run)
    assert groups["static"].tolist() == [10, 11, 12, 13, 14, 15]  # a fifth of 30
    assert groups["dynamic"].tolist() == [34, 35, 36, 37, 38, 39]
    run.users.drop(run.users.index[run.users["user"] < 36], inplace=True)
    with pytest.raises(tables.NotMeasured, match="4 users"):
        tables.user_groups(run)


def test_static_and_dynamic_items(registry, tmp_path):
    """Of ten items with phi i and change i / 100, the groups are {0, 1} and {8, 9}."""
    record(tmp_path, registry, "f3crec", 0.08)
    built = table(7, tmp_path, registry)
    found = [cell(built, "f3crec", column, "item_rank_change").mean for column in ("static", "dynamic", "diff")]
    assert found == pytest.approx([0.005, 0.085, 0.08])
    write_packs(tmp_path / "c", load_runs(tmp_path), "pack", lambda run: False)
    built = table(7, tmp_path / "c", registry)
    assert cell(built, "f3crec", "static", "item_rank_change").missing == "its record holds no item analysis of D1"


def test_the_number_of_test_users_is_said(registry, tmp_path):
    """With an interval where they are few."""
    record(tmp_path, registry, "ft", 0.08)
    built = table(2, tmp_path, registry)
    assert built.tested == ("Test users of ML-100K: 40 (D1), 40 (D2), 40 (D3).",)
    assert f"- {built.tested[0]}" in markdown(built) and built.tested[0] in latex(built)
    rows = rows_of(built)
    assert [rows["ft", column]["users"] for column in ("D1", "avg")] == ["40", "40 40 40"]
    assert rows["ft", "D1"]["interactions"] == ""
    record(tmp_path / "few", registry, "ft", 0.08, users=12)
    built = table(2, tmp_path / "few", registry)
    low, high = interval_of_mean(cell(built, "ft", "D1", "recall@20").mean, 12)
    assert any(note.startswith("Only 12 test users in D1: the 95 % interval of FT on FedMF, ML-100K")
               and note.endswith(f"is {low:.4f} to {high:.4f}.") for note in built.tested)


def test_latex_is_well_formed(main_runs, registry):
    for number in (2, 7):
        text = latex(table(number, main_runs, registry, only={"datasets": ["ml-100k", "hetrec2011-ml"]}))
        body = re.sub(r"(?m)^%.*", "", text)
        assert not re.search(r"(?<!\\)[%#_]", body) and body.isascii() and headings(body)
        assert body.count("{") == body.count("}") and body.replace(r"\$", "").count("$") % 2 == 0
        opened = []
        for kind, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", body):
            opened.append(name) if kind == "begin" else None
            assert kind == "begin" or opened.pop() == name
        assert not opened
        if number == 2:
            assert r"\textbf{0.1220}$^{*}${\tiny$\pm$0.0020} (0.1034$^{*}$)" in body
            assert r"\underline{0.1120}{\tiny$\pm$0.0020} (0.0938)" in body and r"SPP$^{\dagger}$" in body


def test_command(main_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["tables", "--records", str(main_runs), "--datasets", "ml-100k"]
    text = output_of(capsys, *command, "--table", "2", "--backbones", "fedmf")
    assert text.count("| ML-100K |") == 1 and "FedNCF" not in text and "**0.1220**" in text and "missing" not in text
    assert main([*command, "--table", "2", "3", "--format", "all", "--out", "t"]) == 0
    assert sorted(os.listdir("t")) == [f"table{n}.{end}" for n in (2, 3) for end in ("csv", "md", "tex")]
    assert main([*command, "--table", "2", "--set", "rounds=7"]) == 0
    assert "rounds 100 instead of 7" in (text := capsys.readouterr().out) and "±" not in text.split("- Ours")[0]


@pytest.mark.parametrize("arguments, expected", [
    (["--paper", "f3rec"], "Did you mean 'f3crec'"), (["--table", "12"], "unknown table"),
    (["--table", "two"], "accepted: the number of a table, or all"), (["--table", "2,x"], "found 'x'"),
    (["--table", "3", "--datasets", "ml-latest-small"], "unknown dataset of these tables"),
    (["--table", "2", "--backbones", "fedm"], "Did you mean 'fedmf'"),
    (["--table", "2", "--set", "roundz=2"], "Did you mean 'rounds'"),
    (["--paper", "fcucr", "--table", "2", "--set", "init=client"], "one of server, per_client"),
    (["--table", "2", "--records", "nowhere"], "no folder nowhere")])
def test_mistakes(arguments, expected, main_runs, capsys):
    assert expected in refused(capsys, "tables", "--records", main_runs, *arguments)
