"""The page to look at: its numbers are the records', it loads nothing, and names in it stay text."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fabricate import USERS, fabricate, fabricate_methods, fabricate_sessions, level
from scipy import stats
from synthetic import run_of

from fedcl_bench.cli.main import main
from fedcl_bench.reports import gathered
from fedcl_bench.reports.html import LIMIT, report
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.runs.store import load_runs, user_scores
from fedcl_bench.stats.significance import holm

VOID = {"meta", "link", "img", "br", "input", "hr"}
EVIL = "</script><script>alert(1)</script><b>&amp;"
MEANS = {"ft": 0.08, "kd": 0.085, "f3crec": 0.1}


class Tree(HTMLParser):
    """A page as [tag, attributes, children] and texts; fails if an element is not closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.root: list = ["root", {}, []]
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], [element[0] for element in self.open]

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), []]
        self.open[-1][2].append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.open[-1][2].append(data)

    def all(self, tag, element=None):
        for child in (element or self.root)[2]:
            if isinstance(child, list):
                yield from [child] * (child[0] == tag)
                yield from self.all(tag, child)

    def named(self, name, tag):
        (element,) = [e for e in self.all(tag) if e[1].get("id") == name]
        return element


def text_of(element) -> str:
    return "".join(child if isinstance(child, str) else text_of(child) for child in element[2])


def rows_of(tree, name):
    """Cells of a table's rows as (text, full number or None)."""
    (body,) = tree.all("tbody", tree.named(name, "table"))
    return [[(text_of(cell), cell[1].get("data-value")) for cell in tree.all("td", row)]
            for row in tree.all("tr", body)]


def heads_of(tree, name):
    return [text_of(head) for head in tree.all("th", tree.named(name, "table"))]


def data_of(tree):
    return json.loads(text_of(tree.named("data", "script")))


@pytest.fixture(scope="module")
def folder(registry, tmp_path_factory):
    """Three methods on FedMF and two datasets, seeds 0-2; a variant of F3CRec; sessions of FCUCR."""
    results = tmp_path_factory.mktemp("report")
    fabricate_methods(results, registry, MEANS)
    fabricate(results, registry, RunSpec("f3crec", "fedmf", "ml-100k", (("eps", 0.01),)), 0, level(0.2, noise=9))
    for method, hit in (("ft", 0.2), ("fcucr", 0.3)):
        fabricate_sessions(results, registry, RunSpec(method, "sasrec", "xing"), 0, hit, noise=1)
    return results


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    """(file, its tree), written by the command."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(folder), "--out", str(path)]) == 0
    return path, Tree(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def evil(folder, registry):
    """Records whose names and settings are markup."""
    runs = []
    for run in load_runs(folder):
        meta = {**run.meta, "settings": {**run.meta["settings"], "note": EVIL}}
        meta["method"] = {"kd": EVIL}.get(meta["method"], meta["method"])
        meta["dataset"] = {"lastfm-2k": EVIL}.get(meta["dataset"], meta["dataset"])
        meta["environment"] = {**meta["environment"], EVIL: EVIL}
        runs.append(run_of(meta, run.path, run.load))
    return report(runs, registry, EVIL)


def test_the_leaderboard_is_the_records(page, folder):
    _, tree = page
    heads = heads_of(tree, "leaderboard")
    rows = [dict(zip(heads, row)) for row in rows_of(tree, "leaderboard")]
    assert len(rows) == 2 * 3 + 1 + 2
    runs = load_runs(folder)
    for row in rows:
        name, _, variant = row["method"][0].partition(" (")
        of_row = [run for run in runs if (run.meta["method"], run.meta["dataset"], run.meta["backbone"])
                  == (name, row["dataset"][0], row["backbone"][0])
                  and ("eps=0.01" in variant) == (run.meta["settings"].get("eps") == 0.01)]
        assert row["seeds"][0] == ("0" if len(of_row) == 1 else "0-2")
        for metric in of_row[0].meta["metrics"]:
            blocks = [np.mean(run.meta["metrics"][metric]["per_block"][1:] or run.meta["metrics"][metric]["per_block"])
                      for run in of_row]
            assert float(row[metric][1]) == pytest.approx(np.mean(blocks), rel=1e-12)
            assert row[metric][0].startswith(f"{np.mean(blocks):.4f}")
        assert float(row["users"][1]) == USERS
        sent = np.mean([run.meta["bytes"]["total_up"] + run.meta["bytes"]["total_down"] for run in of_row])
        assert float(row["MB sent"][1]) == sent
        assert float(row["seconds"][1]) == of_row[0].meta["seconds"]["total"]
        forgetting = [run.meta["continual"][run.meta["settings"]["valid_metric"]]["forgetting"] for run in of_row]
        assert row["forgetting"][1] == ("" if None in forgetting else repr(float(np.mean(forgetting))))


def test_tests_are_those_of_users_with_holm(page, folder):
    _, tree = page
    heads = heads_of(tree, "tests")
    rows = [dict(zip(heads, row)) for row in rows_of(tree, "tests") if row[2][0] == "ml-100k"]
    runs = {}
    for run in load_runs(folder):
        if run.meta["dataset"] == "ml-100k":
            runs.setdefault((run.meta["method"], run.meta["settings"].get("eps") == 0.01), []).append(run)
    names = {"f3crec": ("f3crec", False), "f3crec (eps=0.01)": ("f3crec", True), "kd": ("kd", False)}
    assert [row["method"][0] for row in rows] == list(names) and {row["against"][0] for row in rows} == {"ft"}
    raw = []
    for row in rows:
        mine = runs[names[row["method"][0]]]
        base = [run for run in runs["ft", False] if run.seed in {run.seed for run in mine}]
        test = stats.ttest_rel(user_scores(mine, "ndcg@20"), user_scores(base, "ndcg@20"))
        assert float(row["t"][1]) == pytest.approx(test.statistic) and float(row["p"][1]) == pytest.approx(test.pvalue)
        raw.append(test.pvalue)
    assert [float(row["p Holm"][1]) for row in rows] == pytest.approx(holm(raw))


def test_figures_have_the_records_numbers(page, folder):
    _, tree = page
    cells = data_of(tree)["cells"]
    assert [cell["title"].split(",")[0] for cell in cells] == ["lastfm-2k", "ml-100k", "xing"]
    run = next(run for run in load_runs(folder) if (run.meta["method"], run.meta["dataset"]) == ("kd", "ml-100k"))
    (kd,) = [variant for variant in cells[1]["variants"] if variant["title"] == "kd"]
    valid = run.rounds[run.rounds["step"] == 0].sort_values("round")["valid"]
    assert kd["curves"][0] == pytest.approx(list(valid), rel=1e-3) and len(kd["curves"]) == 4
    assert [len(row) for row in kd["matrix"]] == [1, 2, 3, 4]
    assert kd["matrix"][3][1] == pytest.approx(0.085 + 0.01 + 0.002, rel=1e-4)
    assert sum(kd["counts"]) == USERS and cells[1]["reference"] == "ft"
    (variant,) = [v for v in cells[1]["variants"] if v["title"] == "f3crec (eps=0.01)"]
    assert sum(variant["counts"][:20]) == 0  # all users are better than under FT
    assert cells[2]["variants"][0]["forgetting"] is None


def test_settings_environment_and_commands(page):
    _, tree = page
    text = text_of(tree.named("commands", "table"))
    assert "run_bench.py run --method f3crec --backbone fedmf --dataset ml-100k --set eps=0.01 --seed 0" in text
    assert "--method ft --backbone fedmf --dataset ml-100k --seed 0   # and seeds 1, 2" in text
    assert "eps" in heads_of(tree, "settings-1") and "0.01" in text_of(tree.named("settings-1", "table"))
    assert "torch" in heads_of(tree, "environments")


def test_the_page_loads_nothing_and_is_small(page):
    path, tree = page
    assert path.stat().st_size <= LIMIT
    for tag, attributes in (("script", ("src",)), ("img", ("src",)), ("link", ("href",)), ("a", ("href",)),
                            ("iframe", ("src",)), ("style", ("src",))):
        assert not [e for e in tree.all(tag) if set(attributes) & set(e[1])], tag
    policy = next(e[1]["content"] for e in tree.all("meta") if e[1].get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy and "connect-src" not in policy
    script = text_of(list(tree.all("script"))[-1])
    css = text_of(next(tree.all("style")))
    assert "http" not in script and "http" not in css and "url(" not in css and "@import" not in css
    library = gzip.decompress(base64.b64decode(text_of(tree.named("library", "script")))).decode()
    assert "newPlot" in library


def test_names_are_escaped(evil, page):
    tree = Tree(evil)
    assert len(list(tree.all("script"))) == 4 - 1 and not list(tree.all("b"))
    assert "alert(1)</script>" not in evil and evil.count("</script>") == 3
    assert EVIL in {row[0][0] for row in rows_of(tree, "leaderboard")}
    assert text_of(next(tree.all("h1"))) == EVIL and EVIL in heads_of(tree, "environments")
    assert EVIL in {cell["dataset"] for cell in data_of(tree)["cells"]}
    assert EVIL in {variant["title"] for cell in data_of(tree)["cells"] for variant in cell["variants"]}


def test_titles_name_every_setting_that_is_no_default(folder, registry):
    """Values that several variants share equally are not taken for the usual one."""
    runs = [run for run in load_runs(folder) if run.meta["dataset"] == "lastfm-2k" and run.meta["method"] == "ft"]

    def changed(value, hash):
        return [run_of({**run.meta, "hash": hash * 32, "settings": {**run.meta["settings"], "lr": value}}, run.path,
                       run.load)
                for run in runs]
    default = runs[0].meta["settings"]["lr"]
    (cell,) = gathered.gather([*runs, *changed(7.0, "a"), *changed(8.0, "b")], registry)
    assert [variant.title for variant in cell.variants] == ["ft", "ft (lr=7.0)", "ft (lr=8.0)"]
    (cell,) = gathered.gather([*changed(7.0, "a"), *changed(8.0, "b")], registry)
    assert [variant.title for variant in cell.variants] == ["ft (lr=7.0)", "ft (lr=8.0)"]
    (cell,) = gathered.gather(changed(7.0, "a"), registry)
    assert [variant.title for variant in cell.variants] == ["ft"] and default not in (7.0, 8.0)
    assert "--set lr=7.0" in gathered.rerun_command(registry, cell.variants[0])


def test_a_second_record_of_a_seed_is_a_variant_of_its_own(folder, registry):
    runs = [run for run in load_runs(folder) if run.meta["dataset"] == "ml-100k" and run.meta["method"] == "kd"]
    copy = run_of({**runs[0].meta, "hash": "f" * 32}, runs[0].path, runs[0].load)
    (cell,) = gathered.gather([*runs, copy], registry)
    assert sorted(len(variant.runs) for variant in cell.variants) == [1, 3]
    assert len({variant.title for variant in cell.variants}) == 2
    other = run_of({**runs[0].meta, "hash": "e" * 32, "data_fingerprint": "other"}, runs[0].path, runs[0].load)
    assert len(gathered.gather([*runs, other], registry)) == 2  # other data: not compared


def test_errors_are_one_line(folder, tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder), "--out", str(tmp_path / "file/x.html")]) == 2
    assert "--out FILE" in capsys.readouterr().err


def played(text: str, tmp_path: Path, **steps) -> dict:
    """What the page's script does, run by Node in a stand-in for a browser."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    tree = Tree(text)
    script = text_of(list(tree.all("script"))[-1])
    files = [tmp_path / name for name in ("tree.json", "script.js", "steps.json")]
    for file, content in zip(files, (json.dumps(tree.root), script, json.dumps(steps))):
        file.write_text(content, encoding="utf-8")
    done = subprocess.run(["node", str(Path(__file__).with_name("page_dom.js")), *map(str, files)], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["errors"] == "" and result["drawn"] == "yes" and result["loaded"][0] > 1_000_000
    return result


def test_filters_and_sorting(page, tmp_path):
    text = page[0].read_text(encoding="utf-8")
    every = played(text, tmp_path)
    assert len(every["leaderboard"]) == 9
    assert set(every["figures"]) == {"learning", "bytes", "seconds", "curves", "maps", "differences"}
    some = played(text, tmp_path, choose={"filter-dataset": "ml-100k"}, click=["ndcg@20"])
    assert [row[0] for row in some["leaderboard"]] == ["f3crec (eps=0.01)", "f3crec", "kd", "ft"]
    assert {row[2] for row in some["tests"]} == {"ml-100k"}
    twice = played(text, tmp_path, hash="#dataset=ml-100k", click=["ndcg@20", "ndcg@20"])
    assert [row[0] for row in twice["leaderboard"]] == ["ft", "kd", "f3crec", "f3crec (eps=0.01)"]


def test_more_variants_than_colours_can_be_told_apart(registry, tmp_path):
    """In figures over all records too, where a symbol stands for what they were tested on."""
    for i in range(14):
        fabricate(tmp_path / "r", registry, RunSpec("ft", "fedmf", "ml-100k", (("lr", 0.1 + i / 100),)), 0,
                  level(0.1 + i / 100))
    assert main(["report", str(tmp_path / "r"), "--out", str(tmp_path / "report.html")]) == 0
    figures = played((tmp_path / "report.html").read_text(encoding="utf-8"), tmp_path)["figures"]
    looks = [(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in figures["learning"]["data"]]
    assert len(set(looks)) == len(looks) == 14 and {symbol for _, symbol in looks} == {0, 100}
    assert figures["learning"]["layout"]["height"] > 14 * 29 + 100  # the legend is seen whole


def test_the_cell_with_most_variants_is_shown_first(page, tmp_path):
    """Not the first of the list, where there may be nothing to compare; a filter leaves it only if it must."""
    text = page[0].read_text(encoding="utf-8")
    assert {row[2] for row in played(text, tmp_path)["tests"]} == {"ml-100k"}  # which has four; lastfm-2k, first, three
    some = played(text, tmp_path, choose={"filter-dataset": "lastfm-2k"})
    assert {row[2] for row in some["tests"]} == {"lastfm-2k"}


def test_axes_show_what_there_is(page, tmp_path):
    """Shares of users end at 100 %, and a few rounds are counted in whole numbers."""
    figures = played(page[0].read_text(encoding="utf-8"), tmp_path)["figures"]
    shares = [axis["range"] for name, axis in figures["differences"]["layout"].items() if name.startswith("yaxis")]
    assert shares and all(0.0 <= high < 0.3 and low < np.log10(1 / USERS) for low, high in shares)
    rounds = max(len(trace["x"]) for trace in figures["curves"]["data"])
    assert figures["curves"]["layout"]["xaxis"].get("dtick") == (1 if rounds <= 10 else None)


def test_environments_begin_with_what_tells_them_apart(folder, registry):
    runs = [run_of({**run.meta, "environment": {**run.meta["environment"], "zeta": run.seed}}, run.path, run.load)
            for run in load_runs(folder)]
    assert heads_of(Tree(report(runs, registry, "title")), "environments")[:2] == ["runs", "zeta"]


def test_plotly_accepts_every_figure(page, evil, tmp_path):
    from plotly.graph_objects import Figure

    for text in (page[0].read_text(encoding="utf-8"), evil):
        for name, figure in played(text, tmp_path)["figures"].items():
            Figure(data=figure["data"], layout=figure["layout"])  # raises ValueError for an unknown attribute
            assert "<script" not in json.dumps(figure["data"]).replace('"legendgroup": "' + EVIL, ""), name


def browser() -> str | None:
    """A Chromium on this machine."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.long
def test_in_chromium(page, tmp_path):
    """No script error, the filter of the address works, and the page is not blank."""
    if browser() is None:
        pytest.skip("no Chromium on this machine")
    from matplotlib import image

    common = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
              f"--user-data-dir={tmp_path / 'profile'}"]
    address = f"file://{page[0]}#dataset=ml-100k"
    done = subprocess.run([*common, "--dump-dom", address], capture_output=True, text=True, timeout=300)
    dom = done.stdout
    assert 'data-drawn="yes"' in dom and '<p id="errors"></p>' in dom
    assert "main-svg" in dom and dom.count('hidden=""') > 0
    shot = tmp_path / "shot.png"
    subprocess.run([*common, f"--screenshot={shot}", "--window-size=1300,4000", address], check=True, timeout=300)
    assert image.imread(shot)[..., :3].std() > 0.02
