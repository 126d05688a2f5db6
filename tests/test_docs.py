"""The documentation: every command in it is run, or checked as far as a machine without its data can; its links
lead somewhere.

A command that needs no more than RecBole's bundled data and the published records is run as it stands, in a folder that
has both, with rounds, seeds and users cut; commands that read records read the published ones unless they name others.
Of `grid`, `tune` and `pack`, which take hours, the plan is made. Where a dataset is not on the machine, the command
line is parsed and its settings are resolved. A command line that fits none of this fails the test.
"""

from __future__ import annotations

import argparse
import configparser
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Sequence

import pytest
import torch
from helpers import ITEM, ROOT, USER
from matplotlib import image

from fedcl_bench.cli import commands, main
from fedcl_bench.cli.commands.grid import _given
from fedcl_bench.cli.commands.tune import effort_of
from fedcl_bench.data.convert import FORMATS
from fedcl_bench.data.recbole_files import bundled
from fedcl_bench.data.source import load_config
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments import grid, papers, search, sensitivity
from fedcl_bench.runs import config
from fedcl_bench.runs.records import Record
from fedcl_bench.runs.registry import Registry, discover
from fedcl_bench.runs.runner import execute
from fedcl_bench.runs.specs import RunSpec, Tuned
from fedcl_bench.core.settings import assemble, parse_assignments
from fedcl_bench.testing.trials import is_of_domains

PAGES = [ROOT / "README.md", *(ROOT / "results" / part / "README.md" for part in ("published", "domains")),
         *sorted((ROOT / "results/pages").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# Their commands take seconds each, and tests of the commands run them too: on pages they run with `pytest -m long`.
SLOW = ("docs/findings.md", "docs/grid.md", "docs/plugins.md", "docs/privacy.md", "docs/tables.md",
        "results/published/README.md")
# Runs have a round a block, on the densest part of ML-100K.
SMALL = ("--set", "rounds=1", "--set", "k_core=50")
LANGUAGES = ("bash", "text", "python", "yaml", "toml")  # text is not to be typed


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line, and its text."""

    language: str
    line: int
    text: str

    @property
    def file(self) -> str:
        """The file that the block is, named in its first line as ``# FILE``; else empty."""
        named = re.match(r"# (\S+\.(?:py|yaml|toml))\n", self.text)
        return named[1] if named else ""

    def commands(self) -> Iterator[tuple[int, list[str]]]:
        """(line number, words) of every command line, without comments."""
        begun, text = self.line, ""
        for number, line in enumerate(self.text.splitlines(), start=self.line):
            begun = begun if text else number
            text += line.removesuffix("\\")
            if line.endswith("\\"):
                continue
            if words := shlex.split(text, comments=True):
                yield begun, words
            text = ""
        assert not text, f"line {begun} goes on, and nothing follows"


def blocks(text: str) -> list[Block]:
    """Every fenced block; fences that are indented or of another kind are not accepted, so that none is overlooked."""
    found = [Block(block[1], text[:block.start()].count("\n") + 2, block[2])
             for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(found), "a fence is not as ```bash"
    return found


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Command lines


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make the folder of a page: published records and tuned settings, and the runs that earlier pages made."""
    common = tmp_path_factory.mktemp("common")
    for part in ("published", "tuned", "domains"):
        shutil.copytree(ROOT / "results" / part, common / part)
    for part in ("runs", "shared"):
        (common / part).mkdir()

    def make(page: Path) -> Path:
        folder = tmp_path_factory.mktemp("page")
        (folder / "results").mkdir()
        for part in common.iterdir():
            (folder / "results" / part.name).symlink_to(part)
        for part in ("constraints.txt", "splits"):
            if (ROOT / part).exists():
                (folder / part).symlink_to(ROOT / part)
        return folder
    return make


@pytest.fixture(scope="module")
def done():
    """Commands that were run or checked."""
    return set()


def on_this_machine(dataset: str) -> bool:
    return bundled(dataset) is not None


def has_own_plugin(args: argparse.Namespace) -> bool:
    """Whether a command is about a plugin that the page itself writes."""
    return args.command == "new-plugin" or bool(getattr(args, "plugins", None))


def small(words: Sequence[str]) -> list[str]:
    """A command with ``SMALL`` in place of what it says of those settings."""
    said = [i for i, word in enumerate(words) if word == "--set" and words[i + 1].startswith(("rounds=", "k_core="))]
    return [*(word for i, word in enumerate(words) if i not in said and i - 1 not in said), *SMALL]


def succeeds(words: Iterable[str]) -> None:
    status = main.main(list(words))
    assert status == 0, f"exit status {status}"


def resolve_all(registry: Registry, specs: Iterable[RunSpec], tuned: Tuned | None = None) -> None:
    """Every run's settings exist and fit each other; their data is not needed."""
    specs = list(specs)
    assert specs, "it names no run"
    for spec in specs:
        config.resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned))


def without(words: list[str], *options: str) -> list[str]:
    """A command without some options and their values."""
    left_out = {place for option in options if option in words
                for place in (words.index(option), words.index(option) + 1)}
    return [word for place, word in enumerate(words) if place not in left_out]


def run_command(words, args, capsys):
    if args.ray:  # tests/experiments/test_ray.py has a cluster
        words = without(words, "--ray", "--shards")
    changes = parse_assignments(args.assignments, "--set")
    if args.config is None and on_this_machine(args.dataset or "ml-100k"):
        # Seeds, rounds and users are cut: the last of repeated options counts.
        seeds = ["--seeds", "2"] if args.seeds else []
        succeeds([*small(words), *seeds, "--quiet"])
        assert re.search(r"(ndcg|hit)@\d+ ", capsys.readouterr().out)
    else:
        method, backbone = (args.method, args.backbone) if args.backbone else ("ft", args.method)
        resolve_all(discover(args.plugins), [RunSpec(method, backbone, args.dataset, tuple(changes.items()))])


def grid_command(words, args, capsys):
    if has_own_plugin(args):
        succeeds([*small(words), "--seeds", "1", "--jobs", "1", "--quiet"])
        return
    parts = grid.read_parts(args.file, _given(args))
    specs = [spec for part in parts for spec in part.specs()]
    tuned = Tuned.of(args.tuned, args.results)
    if all(on_this_machine(spec.dataset) for spec in specs) \
            and all(Path(dict(spec.settings).get("split_file", ".")).exists() for spec in specs):
        succeeds([*words, "--dry-run"])
        assert re.search(r"^\d+ runs: ", capsys.readouterr().out, re.MULTILINE)
    else:
        resolve_all(discover(args.plugins), specs, tuned)


def tune_command(words, args, capsys):
    part = grid.Part(args.methods, args.backbones, args.datasets, paper=args.paper,
                     tables=tuple(args.table or [2]) if args.paper else ())
    specs = part.specs()
    if all(on_this_machine(spec.dataset) for spec in specs):
        succeeds([*words, "--dry-run"])
        assert "Searches: " in capsys.readouterr().out
    else:
        registry = discover(args.plugins)
        for spec in specs:
            search.make_search(registry, search.Combination(spec.method, spec.backbone, spec.dataset),
                               effort_of(args), {})


def sensitivity_command(words, args, capsys):
    """Its plan, or that of the same readings on data that is on this machine."""
    if on_this_machine(args.dataset):
        succeeds([*words, "--dry-run"])
        assert re.search(r"^\d+ runs: ", capsys.readouterr().out, re.MULTILINE)
    else:
        specs = [RunSpec(name, args.backbone, args.dataset) for name in (args.method, args.against)]
        assert len(sensitivity.cases(discover(args.plugins), *specs)[0]) > 1


def records_command(words, args, capsys):
    """tables, compare and figures: from the published records unless the page made its own."""
    if has_own_plugin(args) or getattr(args, "by", None):  # published records are from before there were groups
        words = small(words)
    elif args.records == Path("results"):
        fcucr = getattr(args, "paper", None) == "fcucr"
        words = [*words, "--records", f"results/published/{'fcucr' if fcucr else 'f3crec'}"]
        if fcucr:  # the published runs of FCUCR do not end early
            words += ["--set", "patience=0"]
        elif args.tuned is None:
            words.append("--tuned")
    succeeds(words)
    out = capsys.readouterr().out
    files = [Path(line) for line in out.splitlines() if re.fullmatch(r"\S+\.(md|tex|csv|pdf|png|svg)", line)]
    assert all(file.is_file() for file in files)
    shown = out + "".join(file.read_text() for file in files if file.suffix in (".md", ".tex"))
    drawn = any(file.suffix in (".pdf", ".png", ".svg") for file in files)
    ours = r"(?<!\()\b0\.\d{4}" if args.command != "compare" else r"[+-]0\.\d{4}"  # the paper's are in parentheses
    assert drawn or re.search(ours, shown), "it shows no number of ours"


def pack_command(words, args, capsys):
    if args.paper:
        found = [*papers.specs(args.paper, args.table or papers.get(args.paper).TABLES, args.datasets, args.backbones),
                 *papers.figure_specs(args.paper, args.figure, args.datasets, args.backbones)]
        changes = parse_assignments(args.assignments, "--set")
        registry = discover(args.plugins)
        resolve_all(registry, [RunSpec(spec.method, spec.backbone, spec.dataset,
                                       (*spec.settings, *changes.items())) for spec in found])


def data_command(words, args, capsys):
    if args.action == "synth":  # of the same name, smaller
        succeeds([*words, "--users", "50", "--items", "100", "--interactions-per-user", "10"])
    elif args.action == "convert" and args.csv:
        args.csv.write_text(f"{args.user},{args.item},{args.time}\n" + "".join(
            f"u{i % 20},i{i * 7 % 60},{1262304000 + i}\n" for i in range(600)))
        succeeds(words)
    elif args.action in ("convert", "download"):
        assert args.name in FORMATS
        assert args.action != "download" or load_config(args.name).raw.url, "it cannot be downloaded"
    elif on_this_machine(args.name):
        plain_command(words, args, capsys)
    else:
        changes = parse_assignments(args.assignments, "--set")
        assemble(config.CORE_SETTINGS, config.layers(args.name, [("--set", changes)]), "data")


def plain_command(words, args, capsys):
    succeeds(words)
    assert capsys.readouterr().out.strip()


def check_command(words, args, capsys):
    """With one partner (a method of domains goes with few), and not `--full`, which takes minutes."""
    registry = discover(args.plugins)
    if args.all or args.full:
        assert args.all or args.name in registry.names("method") + registry.names("backbone")
        return
    kind = next((kind for kind in ("metric", "method") if args.name in registry.names(kind)), "backbone")
    partners = {"metric": (), "method": ("--with", "fedmf"), "backbone": ("--with", "ft")}[kind]
    of_domains = kind == "method" and is_of_domains(registry.get(kind, args.name).cls)
    succeeds([*words, *(() if of_domains else partners)])
    assert "all properties hold" in capsys.readouterr().out


def audit_command(words, args, capsys):
    """With the first two levels of noise and the first round."""
    if on_this_machine(args.dataset):
        levels = ",".join(f"{level:g}" for level in args.noise[:2])
        words = without(words, "--noise", "--rounds")
        succeeds([*words, "--noise", levels, "--rounds", "1", "--clients", "20", "--quiet"])
        assert "Mean over 20 clients" in capsys.readouterr().out
    else:
        changes = parse_assignments(args.assignments, "--set")
        resolve_all(discover(args.plugins), [RunSpec(args.method, args.backbone, args.dataset, tuple(changes.items()))])


BENCH = {"run": run_command, "audit": audit_command, "grid": grid_command, "tune": tune_command,
         "sensitivity": sensitivity_command,
         "tables": records_command, "compare": records_command, "figures": records_command,
         "pack": pack_command, "check": check_command, "data": data_command,
         "report": plain_command, "list": plain_command, "doctor": plain_command, "new-plugin": plain_command}


def bench(words: list[str], capsys, done: set[tuple[str, ...]]) -> None:
    """Run or check a command of the suite, unless an earlier page had the same one."""
    args = main.parse(words)
    if (key := tuple(words)) not in done:
        BENCH[args.command](words, args, capsys)
        done.update([key] if not has_own_plugin(args) else [])


def pip(words: list[str]) -> None:
    """``pip install -c constraints.txt -e ".[test]"``: the file and the extras exist."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("action", choices=["install"])
    parser.add_argument("-c", dest="constraints")
    parser.add_argument("-e", dest="project")
    args = parser.parse_args(words)
    project = re.fullmatch(r"\.(?:\[([\w,]+)\])?", args.project)
    assert project and (ROOT / args.constraints).is_file(), f"no {args.constraints} or no {args.project}"
    for extra in (project[1] or "").split(","):
        assert not extra or extra in setup["options.extras_require"], f"setup.cfg has no extra '{extra}'"


def ray(words: list[str]) -> None:
    """``ray start --head``: Ray has the command and its options; nothing is started."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs Ray: pip install '.[ray]'")
    scripts.cli.commands[words[0]].make_context(words[0], words[1:])


class Parsed(Exception):
    """The parser of a script accepted its options."""


def script(path: Path, words: list[str], monkeypatch) -> None:
    """A script of the checkout takes these options; what it measures takes minutes and is not run."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self, *arguments, **options):
        parse(self, *arguments, **options)
        raise Parsed
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [str(path), *words])
        patch.syspath_prepend(str(path.parent))
        with pytest.raises(Parsed):
            runpy.run_path(str(path), run_name="__main__")


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check(words: list[str], capsys, monkeypatch, done: set[tuple[str, ...]]) -> None:
    """Run or check one command line; AssertionError if it is of no known kind.

    Args:
        done: commands of the suite that need not be checked again.
    """
    first = words[0].removeprefix(".venv/bin/")
    if first == "make":
        names = [word for word in words[1:] if "=" not in word]
        assert names and set(names) <= targets(), f"the Makefile has {sorted(targets())}"
    elif re.fullmatch(r"python[\d.]*", first):
        if words[1:3] == ["-m", "venv"]:
            assert words[3:] == [".venv"]
        elif words[1:3] == ["-m", "pip"]:
            pip(words[3:])
        elif words[1:3] == ["-m", "pytest"]:
            assert all(Path(word).exists() or (ROOT / word).exists() for word in words[3:] if not word.startswith("-"))
        elif words[1] == "run_bench.py":
            bench(words[2:], capsys, done)
        else:
            assert words[1].startswith(("benchmarks/", "tools/", "results/make_pages.py")), "no known command"
            script(ROOT / words[1], words[2:], monkeypatch)
    elif first == "ray":
        ray(words[1:])
    elif first == "export":
        assert words[1:] == ["RAY_AUTH_MODE=token"]
    elif first == "cp":
        *sources, target = words[1:]
        missing = [name for name in sources if not (ROOT / name).is_file()]
        assert sources and not missing and (ROOT / target).is_dir(), f"no file {missing} or folder {target}"
    elif first == "fedcl-bench":
        bench(words[1:], capsys, done)
    else:
        raise AssertionError("no known command")


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[pytest.mark.long] * (name_of(page) in SLOW), id=name_of(page)) for page in PAGES])
def test_every_command(page, place, done, capsys, monkeypatch):
    """In the order of the page, in one folder; a block whose first line names a file is that file from there on."""
    found = blocks(page.read_text(encoding="utf-8"))
    monkeypatch.chdir(place(page))
    for block in found:
        assert block.language in LANGUAGES, f"{name_of(page)}:{block.line}: found ```{block.language}, " \
                                            f"accepted: {', '.join(LANGUAGES)}"
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language != "bash":
            continue
        for line, words in block.commands():
            try:
                check(words, capsys, monkeypatch, done)
            except (Exception, SystemExit) as error:
                captured = capsys.readouterr()
                raise AssertionError(f"{name_of(page)}:{line}: {shlex.join(words)}\n{type(error).__name__}: {error}\n"
                                     f"{captured.out[-500:]}{captured.err[-500:]}") from error


@pytest.mark.parametrize("page", SLOW)
def test_every_command_of_the_slow_pages_is_understood(page):
    lines = [words for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.language == "bash"
             for _, words in block.commands()]
    of_suite = [words[words.index("run_bench.py") + 1:] for words in lines if "run_bench.py" in words]
    assert of_suite
    for words in of_suite:
        main.parse(words)


INLINE = re.compile(r"`(?:python )?(?:run_bench\.py|fedcl-bench) ([^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_within_sentences_are_understood(page):
    """Those with options have known ones; brackets mark options that may be left out."""
    for command in INLINE.findall(without_blocks(page)):
        words = [word.strip("[]") for word in shlex.split(command)]
        if len(words) > 1:
            main.parse(words)
        else:
            assert words[0] in (*commands.NAMES, "--help")


def test_unknown_commands_are_found(capsys, monkeypatch, tmp_path):
    """The test above can fail."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("# Title\n\n```bash\nmake bench   # a comment\n\n"
                      "python run_bench.py grid --methods ft \\\n    --backbones fedmf\nmake test\n```\n")
    assert list(block.commands()) == [
        (4, ["make", "bench"]), (6, ["python", "run_bench.py", "grid", "--methods", "ft", "--backbones", "fedmf"]),
        (8, ["make", "test"])]
    with pytest.raises(AssertionError, match="a fence"):
        blocks("- a list\n\n  ```bash\n  make bnech\n  ```\n")
    for line, expected in (("make bnech", "the Makefile has"), ("rm -rf results", "no known command"),
                           ("cp none results", "no file"),
                           ("python other.py", "no known command"),
                           ("python -m pip install -c none.txt -e .", "no none.txt")):
        with pytest.raises(AssertionError, match=expected):
            check(shlex.split(line), capsys, monkeypatch, set())
    for line, expected in (("python run_bench.py gird --methods ft", "Did you mean 'grid'"),
                           ("python run_bench.py grid --method ft --backbone fedmf --seed 5", "--seed 5"),
                           ("python run_bench.py tune --paper f3crec --datasets ml-1m", "unknown dataset"),
                           ("python run_bench.py --method ft --backbone sasrec --dataset xing --set windo=2",
                            "unknown setting")):
        with pytest.raises(UserError, match=expected):
            check(shlex.split(line), capsys, monkeypatch, set())


# The twenty lines


def test_twenty_lines_are_f3crecs_server(registry, ml100k, tmp_path):
    """The method of docs/plugins.md and f3crec without its client's part: the same model and scores, bit for bit."""
    (block,) = [b for b in blocks((ROOT / "docs/plugins.md").read_text(encoding="utf-8"))
                if b.language == "python" and b.file.endswith("temporal_mean.py")]
    assert sum(1 for line in block.text.splitlines()[1:] if line.strip()) == 20
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/temporal_mean.py").write_text(block.text)
    mine = discover([tmp_path / "mine"])
    scores, tables = [], []
    for found, method, settings in ((mine, "temporal-mean", {}), (registry, "f3crec", {"lambda_kd": 0.0})):
        run = config.make_config(found, method, "fedmf", "ml-100k", overrides=[("a test", {"rounds": 4, **settings})])
        result = execute(run, lambda: ml100k, tmp_path / method)
        scores.append((result["metrics"], result["matrix"], result["bytes"]))
        model = Record(Path(result["record"])).model()
        tables.append({**model.public, **model.private})
    assert scores[0] == scores[1] and tables[0].keys() == tables[1].keys() == {ITEM, USER}
    assert all(torch.equal(tables[0][name], tables[1][name]) for name in (ITEM, USER))
    untouched = execute(config.make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("a test", {"rounds": 4})]),
                        lambda: ml100k, tmp_path / "ft")
    assert untouched["metrics"] != scores[0][0]


# Links

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(page))


def anchors(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), f"{name_of(page)}: no {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target} has no such heading"


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
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


def test_the_picture_of_results_is_that_of_the_records(tmp_path, monkeypatch, capsys):
    """The README's command draws it; versions of matplotlib differ in single dots."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (words,) = [words for block in blocks(page) for _, words in block.commands() if "figures" in words]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    succeeds(words[2:])
    drawn, kept = (image.imread(folder / "docs/figures/figure3-ndcg20.png") for folder in (tmp_path, ROOT))
    assert drawn.shape == kept.shape and abs(drawn - kept).mean() < 0.004 < abs(1.0 - kept).mean()


# Words

@pytest.mark.parametrize("page,most", [("README.md", 1000), ("docs/architecture.md", 1200)])
def test_pages_that_are_read_first_are_short(page, most):
    """All words count, those of code and tables too."""
    assert 500 < len((ROOT / page).read_text(encoding="utf-8").split()) <= most
