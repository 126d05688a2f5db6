"""The notebooks under examples/: their cells run in order, a round long."""

import ast
import functools
import json
import re
import subprocess
from contextlib import redirect_stdout
from io import StringIO

import pandas as pd
import pytest
from helpers import ROOT
from matplotlib.figure import Figure

import fedcl_bench as fb
from fedcl_bench.cli.main import main

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path) -> list[str]:
    """The code of a notebook, which holds no output."""
    content = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert content["nbformat"] == 4 and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    return ["".join(cell["source"]) for cell in code]


def shown(code: str, names: dict) -> object:
    """Run a cell; the value of its last line if that is an expression, as a notebook shows it."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


def shortened(code: str) -> str:
    """A cell with a round in place of ten, less data and a quarter of the people."""
    code = code.replace("rounds=10", "rounds=1").replace("k_core=5)", "k_core=70)")
    return re.sub(r"people\[(\d*):(\d+)\]",
                  lambda found: f"people[{int(found[1] or 0) // 4}:{int(found[2]) // 4}]", code)


def in_this_process(words, **options):
    """``subprocess.run`` of a command line of the suite."""
    with redirect_stdout(StringIO()) as said:
        status = main(words[3:])
    return subprocess.CompletedProcess(words, status, said.getvalue(), "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fb, "run", functools.partial(fb.run, rounds=1, k_core=70, progress=False))
    monkeypatch.setattr(subprocess, "run", in_this_process)
    names: dict = {}
    values = [shown(shortened(code), names) for code in cells(path)]
    kinds = {type(value) for value in values}
    assert {fb.Results, pd.DataFrame, Figure} <= kinds and all(v._repr_png_() for v in values if isinstance(v, Figure))
