"""The pages: commands of the README, the first run and the page on plugins are run, those of other pages are parsed and
their settings resolved; links, anchors, settings and hooks that pages name exist.

Commands run in the order of their page, in a folder of its own that has the published records, with rounds, seeds and
users cut. A block whose first line is ``# FILE`` is that file from there on.
"""

from __future__ import annotations

import configparser
import functools
import inspect
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import pytest
import torch
from helpers import ITEM, ROOT, USER, script
from matplotlib import image

import fedcl_bench
from fedcl_bench import UserError, testing, toolbox
from fedcl_bench.api import results
from fedcl_bench.cli import commands, main
from fedcl_bench.cli.commands import new_plugin
from fedcl_bench.cli.commands.grid import _grid_fields
from fedcl_bench.core.settings import describe, parse_assignments
from fedcl_bench.data.files.convert import FORMATS
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.experiments import grid
from fedcl_bench.plugin import metric, sequential, silo, views
from fedcl_bench.runs import config
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import execute
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.testing.trials import is_of_domains

GUIDE = [ROOT / name for name in ("README.md", "docs/first-run.md", "docs/plugins.md")]  # their commands are run
WRITTEN = [*GUIDE, *(ROOT / f"results/{part}/README.md" for part in ("published", "domains")),
           *sorted({*(ROOT / "docs").glob("*.md")} - {*GUIDE})]
PAGES = [*WRITTEN, *sorted((ROOT / "results/pages").glob("*.md")), ROOT / "results/domains/tables.md",
         ROOT / "results/fcucr.md", ROOT / "results/tutorial.md", ROOT / "results/attacks.md"]
SLOW = (["check", "mean-of-items"], ["check", "halfway"])
SMALL = ("--set", "rounds=1", "--set", "k_core=80")  # a round a block, on the densest part of ML-100K


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line, and its text."""

    language: str
    line: int
    text: str

    @property
    def file(self) -> str:
        named = re.match(r"# (\S+\.(?:py|yaml|toml))\n", self.text)
        return named[1] if named else ""

    def commands(self) -> Iterator[list[str]]:
        """The words of every command line, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "bash" else ()
        yield from filter(None, (shlex.split(line, comments=True) for line in lines))


def blocks(text: str) -> list[Block]:
    """Every fenced block; fences that are indented or of another kind are not accepted, so that none is overlooked."""
    found = [Block(block[1], text[:block.start()].count("\n") + 2, block[2])
             for block in re.finditer(r"^```(bash|text|python|yaml|toml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(found), "a fence is not as ```bash"
    return found


def blocks_of(page: Path) -> list[Block]:
    return blocks(page.read_text(encoding="utf-8"))


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Commands that are run

def shorter(words: list[str], registry) -> list[str]:
    """A command of the suite that takes seconds, for the same thing."""
    args = main.parse(words)
    if "--dry-run" in words or "--records" in words or args.command in ("list", "data", "doctor", "new-plugin"):
        return words
    if args.command == "check":
        kind = next((kind for kind in ("metric", "backbone") if args.name in registry.names(kind)), "method")
        found = args.name in registry.names(kind)
        alone = kind == "metric" or found and is_of_domains(registry.get(kind, args.name).cls)
        return words if alone else [*words, "--with", "ft" if kind == "backbone" else "fedmf"]
    cut = [i for i, word in enumerate(words) if word == "--set" and words[i + 1].startswith(("rounds=", "k_core="))]
    words = [*(word for i, word in enumerate(words) if i not in cut and i - 1 not in cut), *SMALL]
    if args.command in ("run", "grid"):  # the last of repeated options counts
        words += ["--quiet", "--seeds", "2" if args.command == "run" and args.seeds else "1"]
    return [*words, "--jobs", "1"] if args.command in ("grid", "tune") else words


@pytest.mark.parametrize("page, every", [
    *((page, False) for page in GUIDE), pytest.param(GUIDE[2], True, marks=pytest.mark.long)])
def test_commands_of_the_guide_run(page, every, registry, tmp_path, monkeypatch, capsys, same_process):
    """An example of output behind commands that read published records has the numbers of these.

    Args:
        every: also RecBole's models and checks of modules for domains, which take long.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(testing, "check_plugin", functools.partial(testing.check_plugin, process=False))
    (tmp_path / "results").mkdir()
    for part in ("published", "tuned"):
        (tmp_path / "results" / part).symlink_to(ROOT / "results" / part)
    out = ""
    for block in blocks_of(page):
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language == "text" and "--records" in out:
            assert [n for n in re.findall(r"\d\.\d{4}", block.text) if n not in out] == [], out
        found = [words[words.index("run_bench.py") + 1:] for words in block.commands() if "run_bench.py" in words]
        out = "" if block.language != "text" else out
        for words in found:
            if not every and ("recbole:" in shlex.join(words) or words[:2] in SLOW):
                continue
            if "--engine" in words:  # as tests/deployment does
                continue
            own = words[0] == "check" and "my_plugins" in words
            words = shorter(words, discover([Path("my_plugins")]) if own else registry)
            status = main.main(words)
            output = capsys.readouterr()
            assert status == 0, f"{name_of(page)}:{block.line}: {shlex.join(words)}\n{output.out}{output.err}"
            out += shlex.join(words) + output.out


# Commands that are parsed

def specs_of(args) -> list[RunSpec]:
    """The runs that a command needs, if it names them."""
    if args.command in ("run", "audit"):
        method, backbone = (args.method, args.backbone) if args.backbone else ("ft", args.method)
        changes = parse_assignments(args.assignments, "--set")
        return [RunSpec(method, backbone, args.dataset or "ml-100k", tuple(changes.items()))] if args.method else []
    if args.command == "grid" and not args.file:
        return [spec for part in grid.read_parts(None, _grid_fields(args)) for spec in part.specs()]
    if args.command == "tune":
        tables = tuple(args.table or [2]) if args.paper else ()
        return grid.GridPart(args.methods, args.backbones, args.datasets, paper=args.paper, tables=tables).specs()
    return []


@functools.cache
def understood(*words: str) -> None:
    """A command of the suite parses, and its runs' settings exist and fit each other; their data is not needed."""
    args = main.parse(words)
    if getattr(args, "plugins", None):
        return  # the page makes them
    if args.command == "data" and args.action in ("convert", "download") and not getattr(args, "table", None):
        assert args.name in FORMATS
    for spec in list(dict.fromkeys(spec for spec in specs_of(args) if "/" not in spec.dataset))[:4]:
        config.resolve(discover(), spec.method, spec.backbone, spec.dataset, spec.layers(None))


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def known(words: list[str]) -> None:
    """AssertionError or UserError if a command line is not understood."""
    first, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if first == "make":
        assert {word for word in rest if "=" not in word} <= targets(), f"the Makefile has {sorted(targets())}"
    elif first == "fedcl-bench" or rest[:1] == ["run_bench.py"]:
        understood(*rest[rest[:1] == ["run_bench.py"]:])
    elif rest[:2] == ["-m", "pip"]:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        (extras,) = re.findall(r"^\.(?:\[([\w,]+)\])?$", rest[-1])
        missing = {*filter(None, extras.split(","))} - {*setup["options.extras_require"]}
        assert not missing and all((ROOT / name).is_file() for name in rest if name.endswith(".txt")), "no such file"
    elif first.startswith("python") and rest[0].endswith(".py"):
        source = (ROOT / rest[0]).read_text(encoding="utf-8")
        assert all(word.partition("=")[0] in source for word in rest[1:] if word.startswith("--")), "no such option"
    else:
        others = ("ray", "export", "cp", "flwr", "flower-supernode")
        assert first in others or rest[:2] in (["-m", "venv"], ["-m", "pytest"]), "no known command"


INLINE = re.compile(r"`(?:python )?(?:run_bench\.py|fedcl-bench) ([^`]+)`")


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_are_understood(page):
    """Within sentences too; brackets there mark options that may be left out."""
    for block in blocks_of(page):
        for words in block.commands():
            try:
                known(words)
            except (AssertionError, UserError, OSError) as error:
                raise AssertionError(f"{name_of(page)}:{block.line}: {shlex.join(words)}: {error}") from error
    for command in INLINE.findall(without_blocks(page)):
        words = [word.strip("[]") for word in shlex.split(command)]
        if len(words) > 1:
            main.parse(words)
        else:
            assert words[0] in (*commands.COMMANDS, "--help")


# Settings and hooks

def settings_of(registry) -> set[str]:
    classes = [*config.CORE_SETTINGS, *(registry.get(kind, name).cls.Settings for kind in ("method", "backbone")
                                        for name in registry.names(kind))]
    return {row[0] for cls in classes for row in describe(cls)}


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_settings_exist(page, registry):
    """``NAME=VALUE`` in the text, where it is not of Python, a Makefile or an environment."""
    named = set(re.findall(r"`(?:--set )?([a-z]\w+)=[^\s`=(]", without_blocks(page)))
    assert named - settings_of(registry) - PYTHON == set()


# The last two are RecBole's models'.
PYTHON = {"seeds", "data_dir", "only_if", "reading", "weights_only", "model", "private"}


# What objects have from their constructors, or RecBole's classes and the file system.
OTHERS = {"backbone", "client_state", "server_state", "kept", "client_keys", "rng", "search", "calculate_loss",
          "toolbox", "py", "plugins"}


def test_hooks_exist(registry):
    """Every name in `code` on the page of plugins belongs to a class that plugins are made of, or to a setting."""
    classes = [cls for module in (fedcl_bench, metric, sequential, silo, views) for _, cls in
               inspect.getmembers(module, inspect.isclass)] + [getattr(fedcl_bench, n) for n in fedcl_bench.__all__]
    attributes = {name for cls in classes for name in (*dir(cls), *getattr(cls, "__dataclass_fields__", {}),
                                                       *getattr(cls, "__annotations__", {}))}
    modules = {path.stem for path in Path(toolbox.__file__).parent.glob("*.py")}
    plugins = [name for kind in ("method", "backbone") for name in registry.names(kind)]
    others = {*OTHERS, *plugins, *new_plugin.METHODS, *commands.COMMANDS, *settings_of(registry), *attributes, *modules,
              *fedcl_bench.__all__}
    named = re.findall(r"`(?:\w+\.)*([a-z]\w+)(?: = \S+)?`", without_blocks(ROOT / "docs/plugins.md"))
    assert len(named) > 100 and [name for name in named if name not in others] == []


@pytest.mark.parametrize("name, backbone", [("stays", "fedmf"), ("near", "fedncf"), ("fair", "fedmf")])
def test_methods_of_the_page_pass_check(name, backbone, tmp_path):
    """As they stand there."""
    (block,) = [block for block in blocks_of(GUIDE[2]) if block.file.endswith("at_clients.py")]
    (tmp_path / "at_clients.py").write_text(block.text)
    mine = discover([tmp_path])
    testing.assert_passed(testing.check_plugin(mine, mine.get("method", name), partners=[backbone], process=False))


def test_twenty_lines_are_f3crecs_server(registry, tmp_path):
    """The method of docs/plugins.md and f3crec without its client's part: the same model and scores, bit for bit."""
    (block,) = [block for block in blocks_of(GUIDE[2]) if block.file.endswith("temporal_mean.py")]
    assert sum(1 for line in block.text.splitlines()[1:] if line.strip()) == 20
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/temporal_mean.py").write_text(block.text)
    found = {}
    for of, method, settings in ((discover([tmp_path / "mine"]), "temporal-mean", {}), (registry, "ft", {}),
                                 (registry, "f3crec", {"lambda_kd": 0.0})):
        run = config.make_config(of, method, "fedmf", "ml-100k", overrides=[("a test", {"rounds": 3, "k_core": 80,
                                                                                        **settings})])
        result = execute(run, lambda: load_stream(run.source, run.stream), tmp_path / method)
        model = read_model(Path(result["record"])).tables
        found[method] = ((result["metrics"], result["matrix"], result["bytes"]), {**model.public, **model.private})
    (scores, tables), (others, expected) = found["temporal-mean"], found["f3crec"]
    assert scores == others and tables.keys() == expected.keys() == {ITEM, USER}
    assert all(torch.equal(tables[name], expected[name]) for name in tables)
    assert found["ft"][0][0] != scores[0]


# Links

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(page))


def anchors(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if not re.match(r"https?://", target):
            file = (page.parent / path).resolve() if path else page
            assert file.exists() and file.is_relative_to(ROOT), f"{name_of(page)}: no {target}"
            assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target} has no such heading"


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.exists():
            reached.add(page)
            waiting += [file for target in LINK.findall(prose(page))
                        if (file := (page.parent / target.partition("#")[0]).resolve()).suffix == ".md"]
    assert set(PAGES) <= reached, sorted(map(name_of, set(PAGES) - reached))


# Pictures

def test_the_map_of_rooms_is_that_of_the_imports(tmp_path):
    """The committed picture may come of another version of matplotlib, which numbers letters otherwise: its size, words
    and arrows are compared, and not its bytes."""
    runpy.run_path(str(ROOT / "docs/figures/rooms.py"))["draw"](tmp_path / "rooms.svg")
    box, parts = re.compile(r'<svg [^>]*viewBox="([^"]+)"'), re.compile(r'<!-- (.+?) -->|<g id="(.+-imports-.+)">')
    drawn, kept = (path.read_text() for path in (tmp_path / "rooms.svg", ROOT / "docs/figures/rooms.svg"))
    assert box.search(drawn)[1] == box.search(kept)[1]
    assert parts.findall(drawn) == parts.findall(kept), "run python docs/figures/rooms.py"
    assert ("runs", "") in parts.findall(kept) and ("", "runs-imports-federation") in parts.findall(kept)


def test_the_picture_of_results_is_drawn_by_its_command(tmp_path, monkeypatch, capsys, same_process):
    """Versions of matplotlib differ in single dots."""
    command, = (words for block in blocks_of(ROOT / "results/published/README.md") for words in block.commands()
                if "figures" in words and "docs/figures" in words)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    assert main.main(command[2:]) == 0, capsys.readouterr().err
    drawn, kept = (image.imread(folder / "docs/figures/figure3-ndcg20.png") for folder in (tmp_path, ROOT))
    assert drawn.shape == kept.shape and abs(drawn - kept).mean() < 0.004 < abs(1.0 - kept).mean()


# Generated tables

make_tables = script("tools/make_tables")


@pytest.mark.parametrize("page", make_tables.pages(), ids=name_of)
def test_tables_are_those_of_plugins_and_records(page, monkeypatch):
    """Of comparisons they have t-tests alone, which need no samples."""
    monkeypatch.setattr(results, "against_each", functools.partial(results.against_each, draws=1))
    text = page.read_text(encoding="utf-8")
    assert make_tables.written(text) == text, f"run python tools/make_tables.py {name_of(page)}"


# Words

def test_pages_are_short():
    """All words count, those of code and tables too; the lines between a table's cells are none."""
    words = {page: sum(any(map(str.isalnum, word)) for word in page.read_text(encoding="utf-8").split())
             for page in (GUIDE[0], *(ROOT / "docs").glob("*.md"))}
    assert words[GUIDE[0]] <= 900 and sum(words.values()) <= 18_000, words
