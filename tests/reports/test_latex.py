"""LaTeX that tables are written as: special characters, and pages that pdflatex or tectonic make of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fabricate import fabricate, level
from helpers import ROOT

from fedcl_bench.cli.main import main
from fedcl_bench.reports.any_table import Layout, build_any
from fedcl_bench.reports.render import latex, tex
from fedcl_bench.reports.selection import Source
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

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


def compiled(folder: Path, document: str, files: list[Path]) -> str:
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


def check_pages(log: str) -> None:
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
