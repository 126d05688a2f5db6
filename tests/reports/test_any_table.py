"""Tables that no paper has: the layout that was asked for, marks against a baseline, how they are written down,
and pages that pdflatex or tectonic make of them."""

import csv
import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
from fabricate import USERS, alter, fabricate, fabricate_methods, fabricate_sessions, level
from helpers import ROOT, output_of, refused
from scipy import stats

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.reports.any_table import Layout, build_any
from fedcl_bench.reports import render
from fedcl_bench.reports.render import csv_text, latex, markdown, tex
from fedcl_bench.reports.selection import Source, matching
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.stats.significance import holm

MEANS = {"ft": 0.080, "reg": 0.085, "kd": 0.0801, "f3crec": 0.07}


@pytest.fixture(scope="module")
def folder(registry, tmp_path_factory):
    """Four methods and an ablation on FedMF, two datasets, seeds 0-2; FedNCF has FT alone."""
    results = tmp_path_factory.mktemp("any")
    fabricate_methods(results, registry, MEANS)
    for dataset in ("ml-100k", "lastfm-2k"):
        fabricate(results, registry, RunSpec("f3crec", "fedmf", dataset, (("eps", 0.01),)), 0, level(0.2))
    fabricate(results, registry, RunSpec("ft", "fedncf", "ml-100k"), 0, level(0.09))
    return results


@pytest.fixture(scope="module")
def source(folder, registry):
    return Source(load_runs(folder), registry)


@pytest.fixture(scope="module")
def built(source):
    """Builds a table of N@20 on FedMF and ML-100K unless other things are asked for."""
    def build(**layout):
        usual = {"metrics": ("ndcg@20",), "backbones": ("fedmf",), "datasets": ("ml-100k",)}
        return build_any(Layout(**{**usual, **layout}), source)
    return build


def cell(built, row, dataset="ml-100k", backbone="fedmf", metric="ndcg@20", column="mean"):
    (match,) = [c for c in built.cells() if tuple(c.key) == (dataset, backbone, row, metric, column)]
    return match


def test_means_are_those_of_the_records_with_settings_of_each_row(built):
    metrics = ("ndcg@20", "recall@20")
    table = built(methods=("ft", "f3crec", "f3crec:eps=0.01"), metrics=metrics, datasets=())
    assert table.heads == tuple(f"fedmf {dataset} {metric}" for dataset in ("lastfm-2k", "ml-100k")
                                for metric in metrics)
    for row, seeds, mean in (("ft", (0, 1, 2), 0.102), ("f3crec", (0, 1, 2), 0.092), ("f3crec:eps=0.01", (0,), 0.22)):
        assert cell(table, row).mean == pytest.approx(mean) and cell(table, row).seeds == seeds
        assert cell(table, row, metric="recall@20").mean == pytest.approx(2 * mean)
    assert cell(table, "ft").std == pytest.approx(0.002)
    assert cell(table, "f3crec:eps=0.01").rank == 1 and cell(table, "ft").rank == 2
    assert any("f3crec (eps=0.01)" in line.labels[0] for line in table.panels[0].lines)
    assert "Test users of lastfm-2k: 40, 40, 40." in table.tested and cell(table, "ft").users == (USERS,) * 3


def test_what_needs_no_backbone_stands_beside_every_backbone(registry, tmp_path):
    for method, backbone in (("ft", "fedmf"), ("ft", "fedncf"), ("popularity", "none")):
        fabricate(tmp_path, registry, RunSpec(method, backbone, "ml-100k"), 0, level(0.1))
    source = Source(load_runs(tmp_path), registry)
    for backbones in ((), ("fedmf", "fedncf")):
        table = build_any(Layout(backbones=backbones), source)
        assert table.heads == ("fedmf ml-100k", "fedncf ml-100k") and not table.missing
    assert build_any(Layout(methods=("popularity",)), source).heads == ("none ml-100k",)


def test_rows_columns_and_blocks_are_those_of_the_datasets_asked_for(registry, tmp_path):
    for spec in (RunSpec("ft", "fedmf", "ml-100k"), RunSpec("kd", "fedncf", "ml-100k"),
                 RunSpec("ft", "fedmf", "lastfm-2k", (("rounds", 5),))):
        fabricate(tmp_path, registry, spec, 0, level(0.1))
    table = build_any(Layout(datasets=("lastfm-2k",)), Source(load_runs(tmp_path), registry))
    assert table.heads == ("fedmf lastfm-2k",) and [line.labels for line in table.panels[0].lines] == [
        ("ft (rounds=5)",)] and not table.missing
    fabricate_sessions(tmp_path, registry, RunSpec("ft", "sasrec", "xing"), 0, 0.2)
    layout = Layout(datasets=("xing",), backbones=("sasrec",), columns=("block",))
    assert build_any(layout, Source(load_runs(tmp_path), registry)).heads == ("block 0", "mean")


def test_without_records_of_default_settings_rows_are_the_settings_that_there_are(registry, tmp_path):
    """Also those that follow from the stream, and not more than a few; a setting of ``--set`` is named by nobody."""
    few, source = {"rounds": 5, "eps": 0.02}, Source([], registry)
    for method, settings in (("f3crec", few), ("ft", {"rounds": 5}), ("ft", {"rounds": 5, "lr": 0.3}), ("kd", {})):
        fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", tuple(settings.items())), 0, level(0.1))
    for values in range(5):
        fabricate(tmp_path, registry, RunSpec("reg", "fedmf", "ml-100k", (("rounds", 5 + values),)), 0, level(0.1))
    source = replace(source, runs=load_runs(tmp_path))

    def rows(**of):
        return [line.labels[0] for line in build_any(Layout(), replace(source, **of)).panels[0].lines]
    assert rows() == ["f3crec (eps=0.02, rounds=5)", "ft (lr=0.3, rounds=5)", "ft (rounds=5)", "kd", "reg"]
    assert rows(assignments=(("rounds", 5),)) == ["f3crec (eps=0.02)", "ft", "kd", "reg"]


def test_rows_need_not_go_with_all_backbones(registry, tmp_path):
    """A setting that a backbone lacks leaves its cell empty, in a row that nobody named; a method that does not go with
    it is named. What is misspelt in ``--set`` is said before anything that hangs on it."""
    for spec in (RunSpec("ft", "fedmf", "ml-100k", (("rounds", 5),)), RunSpec("feddcsr", "feddcsr", "ml-100k"),
                 RunSpec("ft", "fedncf", "ml-100k", (("rounds", 5), ("hidden", "4"), ("valid_metric", "recall@20")))):
        fabricate(tmp_path, registry, spec, 0, level(0.1))
    source = Source(load_runs(tmp_path), registry)
    table = build_any(Layout(backbones=("fedmf", "fedncf", "feddcsr"), metrics=("ndcg@20",)), source)
    there = {line.labels[0]: [cell and cell.mean is not None for cell in line.cells]
             for line in table.panels[0].lines}
    assert there == {"feddcsr": [False, False, True], "ft (rounds=5)": [True, False, False],
                     "ft (hidden=4, rounds=5, valid_metric=recall@20)": [None, True, None]}
    assert table.missing[0] == ("missing: feddcsr on fedmf, ml-100k: method 'feddcsr' exchanges shared "
                                "representations, which 'fedmf' has none of.")
    for asked, words in (((("epz", 1),), "unknown setting .*'epz'"), ((), "--metrics is missing"),
                         ((("valid_metric", "ndgc@20"),), "unknown metric 'ndgc'")):
        with pytest.raises(UserError, match=words):
            build_any(Layout(), replace(source, assignments=asked))


def test_marks_against_a_baseline_are_holms(built, source):
    table = built(methods=tuple(MEANS), against="ft")
    scores = {name: user_scores(matching(source.runs, source.registry, RunSpec(name, "fedmf", "ml-100k")), "ndcg@20")
              for name in MEANS}
    expected = holm([stats.ttest_rel(scores[name], scores["ft"]).pvalue for name in ("reg", "kd", "f3crec")])
    assert [cell(table, name).p for name in ("reg", "kd", "f3crec")] == pytest.approx(expected)
    assert cell(table, "reg").star and cell(table, "f3crec").worse and cell(table, "ft").p is None
    assert cell(table, "kd").star == (expected[1] <= 0.05)
    assert "°" in markdown(table) and r"$^{\circ}$" in latex(table)
    line = next(line for line in csv.DictReader(io.StringIO(csv_text(table))) if line["row"] == "f3crec")
    assert (line["star"], line["users"]) == ("°", " ".join([str(USERS)] * 3))
    assert float(line["p"]) == cell(table, "f3crec").p


def test_a_row_without_a_common_seed_is_named(registry, tmp_path):
    for method, seeds in (("ft", (0, 1)), ("reg", (0, 1)), ("kd", (2,))):
        for seed in seeds:
            fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k"), seed, level(MEANS[method], noise=seed))
    table = build_any(Layout(methods=("ft", "reg", "kd"), against="ft"), Source(load_runs(tmp_path), registry))
    said = [note for note in table.notes if note.startswith("Not tested")]
    assert len(said) == 1 and "kd on fedmf, ml-100k; no seed is common" in said[0] and "reg" not in said[0]
    blocks = build_any(Layout(methods=("ft", "reg"), columns=("block",), against="ft"),
                       Source(load_runs(tmp_path), registry))
    assert not any(note.startswith("Not tested") for note in blocks.notes)  # of single blocks nothing is


def test_methods_that_are_not_loaded_are_named(registry, tmp_path):
    for method in ("ft", "reg"):
        fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k"), 0, level(0.1))
    alter(next((tmp_path / "runs").glob("reg*")), method="my-reg")
    table = build_any(Layout(), Source(load_runs(tmp_path), registry))
    assert [line.labels for line in table.panels[0].lines] == [("ft",)]
    assert any("my-reg" in note for note in table.notes)
    runs = [run for run in load_runs(tmp_path) if run.head["method"] != "ft"]
    with pytest.raises(UserError, match="no method of these records is loaded; .*--plugins"):
        build_any(Layout(), Source(runs, registry))


def test_p_over_seeds_is_holms_too(registry, tmp_path):
    shifts = dict(zip(("ft", "reg", "kd"), np.random.default_rng(3).normal(0.0, 0.003, (3, 4))))
    for i, (method, shift) in enumerate(shifts.items()):
        for seed in range(4):
            fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k"), seed,
                      level(MEANS["ft"] + 0.01 * i + shift[seed], noise=i))
    table = build_any(Layout(methods=tuple(shifts), against="ft"), Source(load_runs(tmp_path), registry))
    means = {method: 0.01 * i + shift for i, (method, shift) in enumerate(shifts.items())}
    raw = [stats.ttest_rel(means[name], means["ft"]).pvalue for name in ("reg", "kd")]
    assert [cell(table, name).p_seeds for name in ("reg", "kd")] == pytest.approx(holm(raw))
    assert min(raw) < 0.05 < min(holm(raw)) and cell(table, "reg").star and cell(table, "kd").star
    assert ("Numbers with * or °: 2; significant over seeds as well: 0 (the same test of each seed's average over "
            "users, corrected alike).") in table.notes


def test_what_is_missing_is_named_and_a_papers_numbers_stand_beside_ours(built):
    table = built(methods=("ft", "f3crec:without=arm"), backbones=("fedmf", "fedncf"))
    text = latex(table)
    assert cell(table, "f3crec:without=arm").mean is None and " & --" in text and "--: no number of ours." in text
    commands = [line for line in text.splitlines() if "grid --methods" in line]
    assert "run_bench.py grid --methods f3crec --backbones fedmf" in commands[0] and "--set without=arm" in commands[0]
    assert all(line.startswith("% missing: ") and "--seeds 3" in line for line in commands)
    without, beside = (built(methods=("ft", "kd"), paper=paper) for paper in (None, "f3crec"))
    assert cell(without, "kd").printed is None and cell(beside, "kd").printed.text == "0.0938"
    assert cell(beside, "kd").mean == cell(without, "kd").mean and "(0.0938)" in markdown(beside)


def test_any_dimension_runs_down_or_across(built):
    table = built(rows=("dataset", "method"), columns=("block",), methods=("ft", "kd"), datasets=())
    assert table.stub == ("dataset", "") and table.heads == ("block 0", "block 1", "block 2", "block 3", "mean")
    assert cell(table, "ft", column="block3").mean == pytest.approx(0.112)
    turned = built(rows=("dataset",), columns=("method",), methods=("ft", "kd"), datasets=())
    assert [line.labels for line in turned.panels[0].lines] == [("lastfm-2k",), ("ml-100k",)]
    assert turned.heads == ("ft", "kd") and (turned.heading, turned.panels[0].title) == ("ndcg@20", "fedmf")


@pytest.mark.parametrize("options, words", [
    (["--rows", "methd"], "method"), (["--rows", "method", "--columns", "method"], "each once"),
    (["--methods", "ftt"], "'ft'"), (["--metrics", "ndcg@2000"], "no ndcg@2000"), (["--against", "kdd"], "kd"),
    (["--methods", "ft", "--table", "2"], "--table"), (["--methods", "ft", "--datasets", "ml-100"], "ml-100k")])
def test_errors_name_what_is_accepted(folder, capsys, options, words):
    assert words in refused(capsys, "tables", "--records", folder, *options)


def test_a_terminal_gets_a_drawn_table(folder, capsys, monkeypatch):
    arguments = ["tables", "--records", str(folder), "--metrics", "ndcg@20,recall@20"]
    assert main([*arguments, "--rows", "method"]) == 0  # and columns of all that there is
    out = capsys.readouterr().out
    assert "|---|" in out and all(f"| {method}" in out for method in MEANS) and "fedncf ml-100k" in out
    rising = next(line for line in out.splitlines() if "still improving in the last round of blocks" in line)
    assert "kd on fedmf, ml-100k (12 of 12)" in rising  # the second and last round of fabricated blocks is the better
    arguments += ["--methods", "ft,kd"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = output_of(capsys, *arguments)
    assert "───" in out and "|" not in out and "\x1b[1m" in out
    table = re.sub(r"\x1b\[\d*m", "", out).split("\n\nMean ±")[0]
    assert max(map(len, table.splitlines())) <= 70
    for head in ("fedmf ml-100k recall@20", "fedncf ml-100k ndcg@20"):
        assert head in table


TABULAR = r"\\begin\{tabular\}\{(\w+)\}\n\\toprule\n(.*?)\\midrule\n(.*?)\\bottomrule"
GROUP = r"\\multicolumn\{(\d+)\}\{c\}\{(.*)\}"


def headings(text):
    """The labels of every column of all tabulars, outermost first, as their \\multicolumn say; checks that every line
    has all columns, and every group a rule of its width."""
    found = []
    for kinds, head, body in re.findall(TABULAR, text, re.S):
        levels, stub = [], kinds.count("l")
        for line in re.findall(r"^(.*) \\\\$", head + body, re.M):
            spans = [(int(group[1]), group[2]) if (group := re.fullmatch(GROUP, cell.strip())) else (1, cell.strip())
                     for cell in line.split("&")]
            assert sum(count for count, _ in spans) == len(kinds), line
            levels.append([label for count, label in spans for _ in range(count)])
            ends = list(accumulate(count for count, _ in spans))
            rules = [rf"\cmidrule(lr){{{end - count + 1}-{end}}}" for (count, _), end in zip(spans, ends)]
            assert "multicolumn" not in line or " ".join(rules[stub:]) in head
        found += list(zip(*levels[:len(re.findall(r"\\\\$", head, re.M))]))[stub:]
    return found


def test_latex_sets_outer_headings_and_rotates_what_is_wide_and_long(built):
    text = latex(built(methods=("ft", "kd"), metrics=("ndcg@20", "recall@20"), backbones=("fedmf",),
                       datasets=("ml-100k", "lastfm-2k"), columns=("dataset", "metric")))
    assert headings(text) == [*product(("ml-100k", "lastfm-2k"), ("ndcg@20", "recall@20"))]
    assert (" & \\multicolumn{2}{c}{ml-100k} & \\multicolumn{2}{c}{lastfm-2k} \\\\\n"
            "\\cmidrule(lr){2-3} \\cmidrule(lr){4-5}\n") in text
    one = latex(built(methods=("ft", "kd"), columns=("dataset",)))
    assert "multicolumn" not in one and "cmidrule" not in one
    table = built(methods=tuple(MEANS), metrics=("ndcg@20", "recall@20"), datasets=("ml-100k", "lastfm-2k"),
                  rows=("dataset", "metric", "method"), columns=("block",))
    assert r"\begin{table*}" in latex(table)
    (panel,) = table.panels
    text = latex(replace(table, columns=table.columns * 2, panels=(replace(panel, lines=tuple(
        replace(line, cells=line.cells * 2) for line in panel.lines * 2)),)))
    assert text.count(r"\begin{tabular}") == 1 and r"\usepackage{booktabs,adjustbox,rotating}" in text
    assert r"\begin{sidewaystable*}" in text and r"\end{sidewaystable*}" in text


def test_latex_has_a_label_and_fits_a_page(built, monkeypatch):
    wide = built(methods=tuple(MEANS), metrics=("ndcg@20", "recall@20"), backbones=("fedmf", "fedncf"), datasets=(),
                 columns=("backbone", "dataset", "block"))
    monkeypatch.setattr(render, "MOST_LINES", 30)
    text = latex(wide)
    assert r"\label{tab:results}" in text and text.count(r"\begin{tabular}") > 1
    assert headings(text) == [tuple(label.replace("_", r"\_") for label in column) for column in wide.columns]
    assert latex(built(methods=("ft",), datasets=())).count(r"\begin{tabular}") == 1
    labels = re.findall(r"\\label\{(.+)\}", text)
    continued = text.count(" (continued).}")  # what is too high for a page goes on under the same number
    assert len(labels) == len(set(labels)) == text.count(r"\begin{table*}") - continued
    assert text.count(r"\addtocounter{table}{-1}") == continued == 1


PUBLISHED = ROOT / "results/published"
ENGINES = {"pdflatex": ["pdflatex", "-interaction=nonstopmode", "-halt-on-error"],
           "tectonic": ["tectonic", "--keep-logs"]}
CLASSES = {"article": r"\documentclass[twocolumn]{article}",
           "wide": r"\documentclass[10pt,twocolumn]{article}\usepackage[margin=2cm]{geometry}"}
MOST = 3.0  # points that a box may be too wide
EVERY = ["--backbones", "fedmf,fedncf,pfedrec", "--metrics", "ndcg@20,recall@20", "--tuned",
         "--methods", "ft,reg,kd,rlp2,spp,f3crec", "--records", str(PUBLISHED / "f3crec")]
TABLES = {
    "f3crec": ["--records", str(PUBLISHED / "f3crec"), "--tuned"],
    "fcucr": ["--paper", "fcucr", "--records", str(PUBLISHED / "fcucr")],  # nearly all cells are missing
    "wide": [*EVERY, "--against", "ft"],
    "high": [*EVERY, "--rows", "dataset,backbone,method", "--columns", "block,metric", "--paper", "f3crec"],
}


def compiled(folder, document, files):
    """The log of a document with these tables; skips without a LaTeX."""
    engine = next((command for name, command in ENGINES.items() if shutil.which(name)), None)
    if engine is None:
        pytest.skip("needs pdflatex (texlive-latex-extra) or tectonic")
    body = "\n".join(rf"\input{{{file.relative_to(folder)}}}" + "\n\\clearpage" for file in files)
    (folder / "paper.tex").write_text(f"{document}\n\\usepackage{{booktabs,adjustbox,rotating}}\n\\begin{{document}}\n"
                                      f"Text.\n{body}\n\\end{{document}}\n")
    done = subprocess.run([*engine, "paper.tex"], cwd=folder, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-3000:]
    return (folder / "paper.log").read_text(errors="replace")


def check_pages(log):
    """Nothing is too wide for its column or too high for its page."""
    too_wide = [line for line, points in re.findall(r"(Overfull \\hbox \(([0-9.]+)pt.*)", log) if float(points) > MOST]
    assert not too_wide and "Float too large" not in log and "Missing character" not in log, too_wide or log[-2000:]


def test_what_means_something_to_latex_is_escaped():
    assert tex("a_b 5% #1 & {x} ~^\\ $") == (r"a\_b 5\% \#1 \& \{x\} \textasciitilde{}\textasciicircum{}"
                                             r"\textbackslash{} \$")
    assert tex("--seeds 5") == "-{}-seeds 5" and tex("a---b") == "a-{}-{}-b" and tex("–") == "--"
    assert tex("λ ≥ 0, Übung, 数") == r"$\lambda$ $\ge$ 0, Übung, ?"


@pytest.mark.long
@pytest.mark.parametrize("document", CLASSES)
@pytest.mark.parametrize("name", TABLES)
def test_published_tables_fit_their_pages(name, document, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["tables", *TABLES[name], "--format", "latex", "--out", str(tmp_path / "t")]) == 0
    check_pages(compiled(tmp_path, CLASSES[document], sorted((tmp_path / "t").glob("*.tex"))))


@pytest.mark.long
def test_own_names_with_special_characters_fit_their_page(registry, tmp_path):
    records = tmp_path / "results"
    for seed in range(2):
        fabricate(records, registry, RunSpec("ft", "fedmf", "ml-100k"), seed, level(0.1))
    source = Source(load_runs(records), registry)
    built = build_any(Layout(methods=("ft", "kd"), metrics=("ndcg@20",)), source)
    (panel,) = built.panels
    labels = ("my_method 50% #1 & {best} ~ ^ \\ $x$ <b> | λ=0.1 ± ≤ ≥ é", "a very long name of a method " * 6)
    lines = tuple(replace(line, labels=(label, *line.labels[1:])) for line, label in zip(panel.lines, labels))
    built = replace(built, panels=(replace(panel, lines=lines),), heading="50% of _all_ & more",
                    notes=(*built.notes, "C:\\path_to\\file # 100% -- done ^_^"))
    (tmp_path / "t.tex").write_text(latex(built))
    check_pages(compiled(tmp_path, CLASSES["wide"], [tmp_path / "t.tex"]))
