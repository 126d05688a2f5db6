"""The page to look at: its numbers are the records', it loads nothing, and names in it stay text."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from fabricate import USERS, fabricate, fabricate_methods, fabricate_sessions, level
from plotly.graph_objects import Figure
from scipy import stats
from synthetic import run_of

from fedcl_bench.cli.main import main
from fedcl_bench.reports import dashboard
from fedcl_bench.reports.html import LIMIT, report
from fedcl_bench.runs.specs import RunSpec, Tuned
from fedcl_bench.records.store import load_runs, user_scores
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
    """A table's rows: column to (text, full number or None)."""
    table = tree.named(name, "table")
    heads = [text_of(head) for head in tree.all("th", table)]
    (body,) = tree.all("tbody", table)
    return [{head: (text_of(cell), cell[1].get("data-order")) for head, cell in zip(heads, tree.all("td", row))}
            for row in tree.all("tr", body)]


def unpacked(tree, name):
    return gzip.decompress(base64.b64decode(text_of(tree.named(name, "script")))).decode()


def figures_of(tree):
    """Name to figure; raises ValueError for an attribute that plotly does not know."""
    def array(value):
        if "bdata" not in value:
            return value
        flat = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
        return flat.reshape([int(size) for size in str(value.get("shape", len(flat))).split(",")])
    return {name: Figure(figure) for name, figure in
            json.loads(unpacked(tree, "figures"), object_hook=array).items()}


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
    assert main(["report", "--records", str(folder), "--out", str(path)]) == 0
    return path, Tree(path.read_text(encoding="utf-8"))


def test_the_leaderboard_is_the_records(page, folder):
    _, tree = page
    rows = rows_of(tree, "leaderboard")
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
        blocks = sum(len(run.meta["rounds"]) for run in of_row)  # fabricated ones end in their best round
        assert row["still improving"] == (f"{blocks} of {blocks}", "1.0")
        assert float(row["users"][1]) == USERS
        sent = np.mean([run.meta["bytes"]["total_up"] + run.meta["bytes"]["total_down"] for run in of_row])
        assert float(row["MB sent"][1]) == pytest.approx(sent / 1e6)
        assert float(row["seconds"][1]) == of_row[0].meta["seconds"]["total"]
        forgetting = [run.meta["continual"][run.meta["settings"]["valid_metric"]]["forgetting"] for run in of_row]
        assert row["forgetting"][1] == ("" if None in forgetting else repr(float(np.mean(forgetting))))


def test_tests_are_those_of_users_with_holm(page, folder):
    rows = rows_of(page[1], "tests-1")
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
        assert row["p over seeds"][0] == ("–" if len(mine) == 1 else "< 0.0001")  # all seeds differ alike
    assert [float(row["p Holm"][1]) for row in rows] == pytest.approx(holm(raw))


def test_methods_with_unequal_settings_are_not_tested(registry, tmp_path, capsys):
    """Each is tested against the reference with its settings; without one the settings that differ are named, as by
    `compare` and `tables`, where the user may ask for such a test. Those tuned each for itself are equal."""
    def rows():
        (cell,) = dashboard.gather(load_runs(tmp_path), registry)
        return [(row["method"], row["against"], row["seeds in common"])
                for row in dashboard.tests(cell, dashboard.compared(cell, registry, Tuned.of(True, tmp_path)))]
    for method, settings in (("ft", ()), ("kd", ()), ("kd", (("rounds", 6),))):
        fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", settings), 0, level(0.1, noise=1))
    short = "kd (rounds=6)"
    assert rows() == [("kd", "ft", "0"), (short, "ft", "not tested: rounds=6 beside 100")]
    for words in (["compare", "--backbone", "fedmf"], ["tables", "--against", "ft"]):
        assert main([*words, "--methods", "ft,kd,kd:rounds=6", "--records", str(tmp_path)]) == 0
        (said,) = re.findall(r"kd.*: other settings than .*", capsys.readouterr().out)
        assert re.fullmatch(r"kd.*rounds=6.*: other settings than ft: rounds=6 beside 100\.", said)
    fabricate(tmp_path, registry, RunSpec("ft", "fedmf", "ml-100k", (("rounds", 6),)), 0, level(0.1, noise=2))
    assert rows() == [("ft (rounds=6)", "ft", "0"), ("kd", "ft", "0"), (short, "ft (rounds=6)", "0")]
    (tmp_path / "my-tuned").mkdir()
    for method, lr in (("ft", 0.3), ("reg", 0.2)):
        (tmp_path / f"my-tuned/ml-100k-fedmf-{method}.json").write_text(json.dumps({"settings": {"lr": lr}}))
        fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", (("lr", lr),)), 0, level(0.1, noise=3))
    (tmp_path / "my-tuned/ml-100k-fedmf-reg.json").rename(tmp_path / "away")
    assert ("reg", "ft", "not tested: lr=0.2 beside 1.0") in rows()
    (tmp_path / "away").rename(tmp_path / "my-tuned/ml-100k-fedmf-reg.json")
    assert ("reg", "ft (lr=0.3)", "0") in rows()


def test_figures_have_the_records_numbers(page, folder):
    _, tree = page
    figures = figures_of(tree)
    assert set(figures) == {"learning", "bytes", "seconds", *(f"{kind}-{i}" for kind in ("curves", "differences")
                                                              for i in range(3)), "matrices-0", "matrices-1"}
    run = next(run for run in load_runs(folder) if (run.meta["method"], run.meta["dataset"]) == ("kd", "ml-100k"))
    kd = [trace for trace in figures["curves-1"].data if trace.name == "kd"]
    valid = run.rounds[run.rounds["step"] == 0].sort_values("round")["valid"]
    assert len(kd) == 4 and list(kd[0].y) == pytest.approx(list(valid), rel=1e-6)
    shown = figures["matrices-1"]
    titles = sorted(((a.y, a.x, a.text) for a in shown.layout.annotations), key=lambda item: (-item[0], item[1]))
    assert [title for *_, title in titles] == ["f3crec", "f3crec (eps=0.01)", "ft", "kd"]
    assert shown.data[3].z[3][1] == pytest.approx(0.085 + 0.01 + 0.002) and np.isnan(shown.data[3].z[0][1])
    better = next(trace for trace in figures["differences-1"].data if trace.name == "f3crec (eps=0.01)")
    assert sum(better.y) == pytest.approx(1.0) and min(better.x) > 0  # for all users
    rows = rows_of(tree, "leaderboard")
    for trace in figures["bytes"].data:  # a row each, which filters of the table hide
        row = rows[trace.meta]
        metric = "hit@10" if row["dataset"][0] == "xing" else "ndcg@20"
        assert (trace.name, trace.x[0], trace.y[0]) == (row["method"][0], float(row["MB sent"][1]),
                                                        float(row[metric][1]))
    assert len(figures["bytes"].data) == len(rows) and len(figures["learning"].data) == len(rows) - 2


def test_settings_environment_commands_and_failures(page, folder, registry):
    _, tree = page
    text = text_of(tree.named("commands-1", "table"))
    assert "run_bench.py run --method f3crec --backbone fedmf --dataset ml-100k --set eps=0.01 --seed 0" in text
    assert "--method ft --backbone fedmf --dataset ml-100k --seed 0" in text
    assert rows_of(tree, "settings-1")[1]["eps"][0] == "0.01" and "torch" in rows_of(tree, "environments")[0]
    head = {"method": "kd", "backbone": "fedmf", "dataset": "ml-100k", "seed": 3, "error": "no memory\nof 2 GB"}
    runs = [run_of({**run.meta, "environment": {**run.meta["environment"], "zeta": run.seed}}, run.path, run.load)
            for run in load_runs(folder)]
    more = Tree(report(runs, registry, "title", failed=[head]))
    assert {name: cell[0] for name, cell in rows_of(more, "failures")[0].items()} == {
        **head, "seed": "3", "error": "no memory"}
    assert list(rows_of(more, "environments")[0])[:2] == ["runs", "zeta"]  # what tells them apart comes first


def test_the_page_loads_nothing_and_is_small(page):
    path, tree = page
    assert path.stat().st_size <= LIMIT
    for tag, attribute in (("script", "src"), ("img", "src"), ("link", "href"), ("a", "href"), ("iframe", "src")):
        assert not [e for e in tree.all(tag) if attribute in e[1]], tag
    policy = next(e[1]["content"] for e in tree.all("meta") if e[1].get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy and "connect-src" not in policy
    css = text_of(next(tree.all("style")))
    assert "http" not in text_of(list(tree.all("script"))[-1]) and "http" not in css and "url(" not in css
    assert "newPlot" in unpacked(tree, "plotly") and "DataTables" in unpacked(tree, "tables-js")


def test_names_are_escaped(folder, registry):
    runs = []
    for run in load_runs(folder):
        meta = {**run.meta, "settings": {**run.meta["settings"], "note": EVIL}}
        meta["method"] = {"kd": EVIL}.get(meta["method"], meta["method"])
        meta["dataset"] = {"lastfm-2k": EVIL}.get(meta["dataset"], meta["dataset"])
        meta["environment"] = {**meta["environment"], EVIL: EVIL}
        runs.append(run_of(meta, run.path, run.load))
    text = report(runs, registry, EVIL)
    tree = Tree(text)
    assert len(list(tree.all("script"))) == 5 == text.count("</script>") and not list(tree.all("b"))
    assert EVIL in {row["method"][0] for row in rows_of(tree, "leaderboard")}
    assert text_of(next(tree.all("h1"))) == EVIL and EVIL in rows_of(tree, "environments")[0]
    for figure in figures_of(tree).values():
        assert "<script" not in "".join(str(trace.name) + str(trace.hovertemplate) for trace in figure.data)


def test_titles_name_every_setting_that_is_no_default(folder, registry):
    """Values that several variants share equally are not taken for the usual one."""
    runs = [run for run in load_runs(folder) if run.meta["dataset"] == "lastfm-2k" and run.meta["method"] == "ft"]

    def changed(value, hash):
        return [run_of({**run.meta, "hash": hash * 32, "settings": {**run.meta["settings"], "lr": value}}, run.path,
                       run.load)
                for run in runs]
    (cell,) = dashboard.gather([*runs, *changed(7.0, "a"), *changed(8.0, "b")], registry)
    assert [variant.title for variant in cell.variants] == ["ft", "ft (lr=7.0)", "ft (lr=8.0)"]
    (cell,) = dashboard.gather([*changed(7.0, "a"), *changed(8.0, "b")], registry)
    assert [variant.title for variant in cell.variants] == ["ft (lr=7.0)", "ft (lr=8.0)"]
    (cell,) = dashboard.gather(changed(7.0, "a"), registry)
    assert [variant.title for variant in cell.variants] == ["ft"]
    assert "--set lr=7.0" in dashboard.rerun_command(registry, cell.variants[0])


def test_a_second_record_of_a_seed_is_a_variant_of_its_own(folder, registry):
    runs = [run for run in load_runs(folder) if run.meta["dataset"] == "ml-100k" and run.meta["method"] == "kd"]
    copy = run_of({**runs[0].meta, "hash": "f" * 32}, runs[0].path, runs[0].load)
    (cell,) = dashboard.gather([*runs, copy], registry)
    assert sorted(len(variant.runs) for variant in cell.variants) == [1, 3]
    assert len({variant.title for variant in cell.variants}) == 2
    other = run_of({**runs[0].meta, "hash": "e" * 32, "data_fingerprint": "other"}, runs[0].path, runs[0].load)
    assert len(dashboard.gather([*runs, other], registry)) == 2  # other data: not compared


def test_errors_are_one_line(folder, tmp_path, capsys):
    assert main(["report", "--records", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", "--records", str(folder), "--out", str(tmp_path / "file/x.html")]) == 2
    assert "--out FILE" in capsys.readouterr().err


def test_a_telephone_shows_the_page_at_its_own_width(page):
    """What is wider than the page is in a box that scrolls, with or without scripts."""
    text = page[0].read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert ".box { max-width: 100%; overflow-x: auto; }" in text and "@media (max-width: 640px)" in text
    for wide in ("<table", '<div class="figure"'):
        assert text.count(f'<div class="box">{wide}') == text.count(wide) > 2


def in_chromium(address, profile):
    """The page as Chromium has it after all scripts."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    return subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom",
         "--allow-file-access-from-files", f"--user-data-dir={profile}", f"file://{address}"],
        capture_output=True, text=True, timeout=300).stdout


@pytest.mark.long
@pytest.mark.parametrize("width", [420, 1400])
def test_no_page_is_wider_than_its_window(page, tmp_path, width):
    frame = tmp_path / "frame.html"
    frame.write_text(f'''<iframe src="file://{page[0]}" style="width:{width}px; height:900px; border:0"></iframe><p></p>
        <script>setTimeout(() => {{
          const inner = document.querySelector("iframe").contentDocument, root = inner.scrollingElement;
          document.querySelector("p").textContent =
            [inner.body.dataset.drawn, root.clientWidth, root.scrollWidth].join(" ");
        }}, 12000)</script>''')
    drawn, window, content = re.search("<p>(.*)</p>", in_chromium(frame, tmp_path / "profile"))[1].split(" ")
    assert drawn == "yes" and width - 30 < int(window) <= width and int(content) <= int(window)


@pytest.mark.long
def test_in_chromium(page, tmp_path):
    """Figures are drawn, tables have their filters, and the filter of the address leaves one dataset."""
    dom = in_chromium(f"{page[0]}#dataset=ml-100k", tmp_path / "profile")
    assert 'data-drawn="yes"' in dom and '<p id="errors"></p>' in dom and "main-svg" in dom and "dtcc" in dom
    board = dom[dom.index('id="leaderboard"'):].partition("</tbody>")[0]
    assert board.count("ml-100k") == 4 and "xing" not in board and "lastfm-2k" not in board
    # What is chosen first is what has most variants.
    assert re.search(r'<section data-cell="1">', dom) and re.search(r'<section data-cell="0" hidden="">', dom)
