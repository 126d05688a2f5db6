"""docs/records.md: its Python runs, and it has every name, file, field and column."""

import functools
import inspect
import json
import re
import warnings

import pandas as pd
import pytest
from helpers import ROOT

import fedcl_bench as fb

PAGE = (ROOT / "docs/records.md").read_text(encoding="utf-8")


def python_of(page: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the examples have run, each run a round long."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "results").mkdir()
    for part in ("published", "tuned"):
        (folder / "results" / part).symlink_to(ROOT / "results" / part)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.chdir(folder)
        patch.setattr(fb, "run", functools.partial(fb.run, rounds=1, k_core=80))
        files, interface = PAGE.split("\n## From Python\n")  # what reads a model needs a run
        exec(compile(python_of(interface) + python_of(files), "docs/records.md", "exec"), {})
    return folder


def test_the_examples_run(place, capsys):
    assert (place / "rounds.pdf").stat().st_size > 1000 and (place / "matrix.png").is_file()
    assert len(list(place.glob("results/runs/*"))) == 4 and len(list(place.glob("results/*/runs/*"))) == 2


def public(cls: type) -> set[str]:
    fields = set(getattr(cls, "__dataclass_fields__", ()))
    return {name for name in {*vars(cls), *fields} if not name.startswith("_")}


def test_every_public_name_is_on_the_page():
    words = set(re.findall(r"\w+", PAGE))
    names = {"run", "load", "Results", "Model", "UserError", "RunFailed", *public(fb.Results), *public(fb.Model)}
    for function in (fb.run, fb.load, fb.Results.compare):
        names |= inspect.signature(function).parameters.keys() - {"self"}
    assert not names - words - {"others", "kind"}, sorted(names - words)


def test_every_file_field_and_column_is_on_the_page(place):
    folder = next(place.glob("results/runs/f3crec-*"))
    content = json.loads((folder / "run.json").read_text())
    names = {path.name for path in folder.iterdir()} | content.keys() | content["seconds"].keys()
    names |= content["bytes"].keys() | content["privacy"].keys() | content["continual"]["ndcg@20"].keys()
    for table in folder.glob("*.parquet"):
        names |= set(pd.read_parquet(table))
        section = PAGE.split(f"\n## {table.name}\n")[1].split("\n## ")[0]
        assert all(f"`{column}`" in section for column in pd.read_parquet(table)), table.name
    names |= set(pd.read_parquet(folder / "analysis.parquet")["kind"])
    import torch

    names |= torch.load(folder / "model.pt", weights_only=True).keys()
    assert not {name for name in names if f"`{name}`" not in PAGE}
