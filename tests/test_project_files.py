"""Files that people look for: the site's map, contributing, changes, citation, Dockerfile; and how they agree."""

from __future__ import annotations

import configparser
import re
import runpy
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from test_docs import LINK, prose

from fedcl_bench.cli import main
from fedcl_bench.core.version import __version__
from fedcl_bench.runs.metadata import plugin_files, shipped_folders

MADE = "results/leaderboard/board.html"  # by `make docs`
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]


def site() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(nav) -> list[str]:
    """Files that a map names, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def test_the_site_names_every_page_once_and_no_other():
    named = pages(site()["nav"])
    assert len(set(named)) == len(named) and [name for name in named if not (ROOT / name).is_file()
                                                                     and name != MADE] == []
    expected = [*(ROOT / "docs").glob("*.md"), *(ROOT / "results/pages").glob("*.md"), ROOT / "README.md", *PAGES]
    assert {path.relative_to(ROOT).as_posix() for path in expected} <= set(named)


def copied() -> list[str]:
    """What `make docs` copies to the folder of pages."""
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    words = [shlex.split(line) for line in recipe.splitlines() if line.startswith("\tcp ")]
    return [f"{name}" for line in words for name in line[1:-1] if not name.startswith("-")]


def test_what_pages_link_to_is_copied_with_them():
    """So that the site's links lead where those of the repository do; links to folders are not followed there."""
    roots = [ROOT / name for name in copied()]
    assert site()["docs_dir"] == "build/pages" and all(root.exists() for root in roots)
    for name in set(pages(site()["nav"])) - {MADE}:
        page = ROOT / name
        assert any(page.is_relative_to(root) for root in roots), f"{name} is not copied"
        for target in LINK.findall(prose(page)):
            file = (page.parent / target.partition("#")[0]).resolve()
            if not re.match(r"https?://", target) and file.is_file():
                assert any(file.is_relative_to(root) for root in roots), f"{name}: {target} is not copied"


def test_versions_agree(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"fedcl_bench {__version__}\n"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == __version__ and citation["license"] == "MIT"
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert __version__ in headings


def test_every_package_is_installed_and_every_plugin_found():
    """The folders of plugins too."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    packages = {"fedcl_bench.dataset_configs"}
    for file in [*(ROOT / "fedcl_bench").rglob("__init__.py"), *(ROOT / "plugins").rglob("__init__.py")]:
        name = file.parent.relative_to(ROOT).as_posix().replace("/", ".")
        packages.add(f"fedcl_bench.{name}" if name.startswith("plugins") else name)
    assert set(setup["options"]["packages"].split()) == packages
    found = {path for folder in shipped_folders() for path in plugin_files(folder)}
    assert found == {path for path in (ROOT / "plugins").rglob("*.py") if path.name != "__init__.py"}


def test_the_archive_is_what_is_committed(tmp_path):
    """With the file that says how to cite it; never with results of somebody's own."""
    if not (ROOT / ".git").exists() or subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        pytest.skip("no checkout of git without changes")
    words = ["make", "archive", f"ARCHIVE={tmp_path}/archive.zip"]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    assert (f"no tag v{__version__}" in made.stdout) == (f"v{__version__}" not in tags.split())
    with zipfile.ZipFile(tmp_path / "archive.zip") as archive:
        names = {name.removeprefix(f"fedcl_bench-{__version__}/") for name in archive.namelist()}
    assert {"CITATION.cff", "LICENSE", "README.md", "plugins/methods/f3crec.py"} <= names
    assert not any(name.startswith(("results/runs", "build", ".venv")) for name in names)


def test_the_dockerfile_copies_what_exists_and_installs_what_was_tested():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sources = [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert {"constraints.txt", "setup.cfg", "setup.py", "pyproject.toml"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []
    assert "-c constraints.txt" in text
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert not set(left_out) & {Path(name).parts[0] for name in sources}
    (version,) = re.findall(r"^FROM python:3\.(\d+)-slim$", text, re.MULTILINE)
    assert 10 <= int(version) <= 12


@pytest.mark.parametrize("script", sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")]),
                         ids=lambda script: script.name)
def test_scripts_import_what_is_there(script, monkeypatch):
    """What they measure takes minutes and is not run; a name that moved is found here."""
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="imported")
