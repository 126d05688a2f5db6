"""docs/records.md: its Python runs, and it has every name, file, field and column."""

import functools
import re
import warnings

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
