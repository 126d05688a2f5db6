"""The page to look at: its numbers are the records', it loads nothing, and names in it stay text; groups of users and
items on it, in tables and in Python."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from fabricate import USERS, fabricate, fabricate_methods, fabricate_sessions, level
from helpers import output_of, refused
from plotly.graph_objects import Figure
from scipy import stats
from synthetic import run_of

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.evaluation.beyond_accuracy import GROUPS
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.reports import dashboard
from fedcl_bench.reports.any_table import Layout, build_any
from fedcl_bench.reports.html import LIMIT, report
from fedcl_bench.reports.selection import Source, matching
from fedcl_bench.runs.specs import RunSpec, Tuned
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
        assert float(row["MB"][1]) == pytest.approx(sent / 1e6)
        assert float(row["seconds"][1]) == of_row[0].meta["seconds"]["total"]
        forgetting = [run.meta["continual"][run.meta["settings"]["valid_metric"]]["forgetting"] for run in of_row]
        assert row["forgetting"][1] == ("" if None in forgetting else repr(float(np.mean(forgetting))))


def test_tests_are_those_of_users_with_holm(page, folder, registry):
    rows = rows_of(page[1], "tests-1")
    specs = {"f3crec": ("f3crec", ()), "f3crec (eps=0.01)": ("f3crec", (("eps", 0.01),)), "kd": ("kd", ()),
             "ft": ("ft", ())}
    runs = {name: matching(load_runs(folder), registry, RunSpec(method, "fedmf", "ml-100k", settings))
            for name, (method, settings) in specs.items()}
    assert [(row["method"][0], row["against"][0]) for row in rows] == [(name, "ft") for name in [*specs][:3]]
    raw = []
    for row in rows:
        mine = runs[row["method"][0]]
        base = [run for run in runs["ft"] if run.seed in {run.seed for run in mine}]
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
        assert (trace.name, trace.x[0], trace.y[0]) == (row["method"][0], float(row["MB"][1]),
                                                        float(row[metric][1]))
    assert len(figures["bytes"].data) == len(rows) and len(figures["learning"].data) == len(rows) - 2


def test_settings_environment_and_commands(page):
    _, tree = page
    text = text_of(tree.named("commands-1", "table"))
    assert "run_bench.py run --method f3crec --backbone fedmf --dataset ml-100k --set eps=0.01 --seed 0" in text
    assert "--method ft --backbone fedmf --dataset ml-100k --seed 0" in text
    assert rows_of(tree, "settings-1")[1]["eps"][0] == "0.01" and "torch" in rows_of(tree, "environments")[0]


def test_the_page_loads_nothing_is_small_and_fits_a_telephone(page):
    """What is wider than the page is in a box that scrolls, with or without scripts."""
    path, tree = page
    assert path.stat().st_size <= LIMIT
    for tag, attribute in (("script", "src"), ("img", "src"), ("link", "href"), ("a", "href"), ("iframe", "src")):
        assert not [e for e in tree.all(tag) if attribute in e[1]], tag
    policy = next(e[1]["content"] for e in tree.all("meta") if e[1].get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy and "connect-src" not in policy
    css = text_of(next(tree.all("style")))
    assert "http" not in text_of(list(tree.all("script"))[-1]) and "http" not in css and "url(" not in css
    assert "newPlot" in unpacked(tree, "plotly") and "DataTables" in unpacked(tree, "tables-js")
    text = page[0].read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert ".box { max-width: 100%; overflow-x: auto; }" in text and "@media (max-width: 640px)" in text
    for wide in ("<table", '<div class="figure"'):
        assert text.count(f'<div class="box">{wide}') == text.count(wide) > 2


def test_names_are_escaped_and_failures_shown(folder, registry):
    head = {"method": "kd", "backbone": "fedmf", "dataset": "ml-100k", "seed": 3, "error": "no memory\nof 2 GB"}
    runs = []
    for run in load_runs(folder):
        if run.meta["dataset"] == "lastfm-2k":
            meta = {**run.meta, "settings": {**run.meta["settings"], "note": EVIL}, "dataset": EVIL}
            meta["method"] = {"kd": EVIL}.get(meta["method"], meta["method"])
            meta["environment"] = {**meta["environment"], EVIL: EVIL, "zeta": run.seed}
            meta["groups"] = {EVIL: {"users": [5] * 4, "ndcg@20": [0.25] * 4}}
            runs.append(run_of(meta, run.path, run.load))
    text = report(runs, registry, EVIL, failed=[head])
    tree = Tree(text)
    assert len(list(tree.all("script"))) == 5 == text.count("</script>") and not list(tree.all("b"))
    assert EVIL in {row["method"][0] for row in rows_of(tree, "leaderboard")}
    assert rows_of(tree, "groups-0")[0][f"{EVIL}: ndcg@20 (15 users)"] == ("0.2500 ± 0.0000", "0.25")
    assert text_of(next(tree.all("h1"))) == EVIL and EVIL in rows_of(tree, "environments")[0]
    assert list(rows_of(tree, "environments")[0])[:2] == ["runs", "zeta"]  # what tells them apart comes first
    failures = {name: cell[0] for name, cell in rows_of(tree, "failures")[0].items()}
    assert failures == {**head, "seed": "3", "error": "no memory"}
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
    split = {**runs[0].meta, "device": "cuda", "settings": {**runs[0].meta["settings"], "split_file": "own.tsv"}}
    (cell,) = dashboard.gather([run_of(split, runs[0].path, runs[0].load)], registry)
    command = dashboard.rerun_command(registry, cell.variants[0])  # without these it would make another run
    assert "--set split_file=own.tsv" in command and command.endswith("--device cuda --seed 0")
    # A second record of a seed is a variant of its own; one of other data is not compared.
    copy = run_of({**runs[0].meta, "hash": "f" * 32}, runs[0].path, runs[0].load)
    (cell,) = dashboard.gather([*runs, copy], registry)
    assert sorted(len(variant.runs) for variant in cell.variants) == [1, 3]
    assert len({variant.title for variant in cell.variants}) == 2
    other = run_of({**runs[0].meta, "hash": "e" * 32, "data_fingerprint": "other"}, runs[0].path, runs[0].load)
    assert len(dashboard.gather([*runs, other], registry)) == 2


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


SMALL = (("rounds", 2), ("k_core", 60))
TINY = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4, "rounds": 1, "progress": False}


@pytest.fixture(scope="module")
def runs(records_of_two_rounds):
    return load_runs(records_of_two_rounds / "results")


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """A results folder with FT on FedMF over sessions of ML-100K, two seeds."""
    folder = tmp_path_factory.mktemp("sessions")
    fb.run("ft", "fedmf", seeds=2, results=folder, **TINY)
    return folder


def source_of(runs, registry, settings=SMALL):
    return Source(runs, registry, None, settings)


def means(runs, group, metric):
    """By hand: each seed's mean over blocks 1-3 that have somebody."""
    blocks = [run.meta["groups"][group][metric][1:] for run in runs]
    return [np.mean([value for value in of_run if value is not None]) for of_run in blocks]


def test_a_table_has_the_means_of_the_groups(runs, registry):
    layout = Layout(columns=("dataset",), backbones=("fedmf",), methods=("ft", "f3crec"), metrics=("ndcg@20",),
                    by=("new-users", "worst-decile"))
    built = build_any(layout, source_of(runs, registry))
    assert built.heads == ("ml-100k ndcg@20 new-users", "ml-100k ndcg@20 worst-decile")
    for method in ("ft", "f3crec"):
        mine = matching(runs, registry, RunSpec(method, "fedmf", "ml-100k", SMALL))
        for group in layout.by:
            cell, = [c for c in built.cells() if c.key.row == method and c.key.metric == f"ndcg@20 {group}"]
            expected = means(mine, group, "ndcg@20")
            assert cell.mean == pytest.approx(np.mean(expected)) and cell.std == pytest.approx(np.std(expected, ddof=1))
            assert cell.users == tuple(n for n in mine[0].meta["groups"][group]["users"][1:] if n)
    new = mine[0].meta["groups"]["new-users"]["users"]
    assert f"Test users of ml-100k, new-users: {', '.join(map(str, new[1:]))}." in built.tested
    assert f"new-users: {GROUPS['new-users']}." in built.notes


def test_blocks_and_groups_of_items(runs, registry):
    """Items have recall alone, which is also what they have where nothing is asked for; nobody is old in block 0."""
    layout = Layout(columns=("block",), backbones=("fedmf",), methods=("ft",), by=("rare-items", "old-users"))
    built = build_any(layout, source_of(runs, registry))
    assert {cell.key.metric for cell in built.cells()} == {"recall@20 rare-items", "ndcg@20 old-users"}
    first, = [c for c in built.cells() if c.key.column == "block0" and c.key.metric.endswith("old-users")]
    assert first.mean is None and first.missing == "nobody is in old-users in block 0"
    with pytest.raises(UserError, match="--by rare-items: found metric 'ndcg@20', accepted: .* recall@20"):
        build_any(replace(layout, metrics=("ndcg@20",)), source_of(runs, registry))


def test_what_cannot_be_is_said(runs, registry, tmp_path):
    layout = Layout(backbones=("fedmf",), methods=("ft", "kd"), by=("new-users",))
    for wrong, message in ((replace(layout, by=("newusers",)), "Did you mean 'new-users'"),
                           (replace(layout, against="ft"), "tests are over all users")):
        with pytest.raises(UserError, match=message):
            build_any(wrong, source_of(runs, registry))
    old = [run_of({k: v for k, v in run.meta.items() if k != "groups"}, run.path, run.load) for run in runs]
    with pytest.raises(UserError, match="none of the .* records has groups, the first as it is of an older version"):
        build_any(layout, source_of(old, registry))
    mixed = [a if a.meta["method"] == "ft" else b for a, b in zip(runs, old)]
    built = build_any(layout, source_of(mixed, registry))
    assert [bool(cell.missing) for cell in built.cells()] == [False, True]
    assert any("its record has no groups, as it is of an older version" in text for text in built.missing)


def test_on_the_command_line(at_records, capsys):
    words = ["tables", "--rows", "method", "--columns", "dataset", "--backbones", "fedmf", "--set", "rounds=2", "--set",
             "k_core=60"]
    shown = output_of(capsys, *words, "--metrics", "ndcg@20", "--by", "new-users", "--by", "least-active")
    assert "ml-100k ndcg@20 new-users | ml-100k ndcg@20 least-active" in shown
    assert "**ndcg@20 new-users, ndcg@20 least-active on ml-100k, fedmf**" in shown  # the backbone once
    assert "Did you mean 'popular-items'" in refused(capsys, *words, "--by", "popular-item")


def test_on_the_page(runs, registry):
    for cell in dashboard.gather(runs, registry):
        for variant, row in zip(cell.variants, dashboard.groups(cell), strict=True):
            assert [head.partition(":")[0] for head in row] == ["method", *GROUPS]
            for number, group in zip(list(row.values())[1:], GROUPS):
                metric = "recall@20" if group.endswith("items") else "ndcg@20"
                assert number.value == pytest.approx(np.mean(means(variant.runs, group, metric)))
            users = variant.meta["groups"]["new-users"]["users"]
            assert f"new-users: ndcg@20 ({sum(users[1:])} users)" in row


def test_in_python(records_of_two_rounds, tmp_path, registry):
    results = fb.load(records_of_two_rounds / "results", "ft", "fedmf")
    frame = results.groups
    assert list(frame) == ["seed", "block", "group", "metric", "mean", "users"]
    row, = frame.query("seed == 1 and block == 2 and group == 'new-users' and metric == 'recall@20'").itertuples()
    recorded = results.runs[1].meta["groups"]["new-users"]
    assert (row.mean, row.users) == (recorded["recall@20"][2], recorded["users"][2])
    assert np.isnan(frame.query("block == 0 and group == 'old-users'")["mean"]).all()
    folder = fabricate(tmp_path, registry, RunSpec("ft", "fedmf", "ml-100k"), 0, level(0.1))
    with pytest.raises(UserError, match="groups: the record .* has none, as it is of an older version"):
        fb.load(folder).groups


def test_tables_and_page_of_sessions(sessions, registry):
    """In which nobody is new or old."""
    runs = load_runs(sessions)
    settings = tuple((name, value) for name, value in TINY.items() if name != "progress")
    built = build_any(Layout(metrics=("hit@10",), by=("most-active", "new-users")), source_of(runs, registry, settings))
    active, new = built.cells()
    recorded = [run.meta["groups"]["most-active"] for run in runs]
    assert active.mean == pytest.approx(np.mean([r["hit@10"][0] for r in recorded]))
    assert active.users == (recorded[0]["users"][0],)
    assert new.mean is None and new.missing == "nobody is in new-users, as the stream has a single step"
    (cell,) = dashboard.gather(runs, registry)
    assert [head.partition(":")[0] for head in dashboard.groups(cell)[0]] == [
        "method", "least-active", "most-active", "worst-decile", "popular-items", "rare-items"]  # others have nobody
