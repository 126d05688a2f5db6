"""Submissions: what submit makes, verify holds to be so; what was altered, or cannot be repeated, is refused."""

import functools
import json
import re
import shutil
import subprocess

import msgspec
import numpy as np
import pytest
from fabricate import fabricate, level
from helpers import ROOT
from scipy import stats
from synthetic import run_of

from fedcl_bench import testing
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.leaderboard import board, submission, verify
from fedcl_bench.records import published
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.reports.selection import Source
from fedcl_bench.runs.config import make_config, resolve_device
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import execute
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.stats.significance import holm, power_of_paired_t


# Half of what the clients learned: a server that one can tell from FT's.
MINE = '''
from fedcl_bench import Method
from ._half import half


class Halved(Method):
    name = "halved"
    title = "half of a round's change"
    reference = "a test"

    def aggregate(self, public):
        return {name: half(mean) for name, mean in public.items()}
'''
HALF = "def half(mean):\n    return mean / 2\n"
SMALL = {"k_core": 80, "rounds": 1, "dim": 8, "blocks": 3}
SETS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]


def make_runs(results, plugins, methods, **settings):
    """Short runs on FedMF and the densest part of ML-100K."""
    registry = discover([plugins])
    for method in methods:
        for seed in range(3):
            config = make_config(registry, method, "fedmf", "ml-100k", seed, [("a test", {**SMALL, **settings})])
            execute(config, lambda: load_stream(config.source, config.stream), results)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with ``mine/halved.py`` and its helper, ``results`` of it, FT and joint, and ``board/halved``; not to be
    written to."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "mine").mkdir()
    (folder / "mine/halved.py").write_text(MINE)
    (folder / "mine/_half.py").write_text(HALF)
    make_runs(folder / "results", folder / "mine", ("halved", "ft", "joint"))
    assert main(submit(folder)) == 0
    return folder


def submit(folder, **options):
    """The words that submit what is in a folder."""
    given = {"method": "halved", "records": folder / "results", "plugins": folder / "mine", "author": "Jane Roe",
             "out": folder / "board/halved", **options}
    return ["submit", *(word for name, value in given.items() for word in (f"--{name}", str(value))), *SETS]


@pytest.fixture
def own(kept, tmp_path):
    """A copy of ``kept`` that may be written to."""
    return shutil.copytree(kept, tmp_path / "own")


@pytest.fixture(autouse=True)
def few_partners(monkeypatch):
    """The check of plugins in full takes minutes and has tests of its own."""
    monkeypatch.setattr(testing, "check_plugin", functools.partial(testing.check_plugin, process=False,
                                                                   partners=("fedmf",), only=("finite losses",)))


@pytest.fixture
def again(kept, monkeypatch):
    """What is run again comes out as it was, without training."""
    monkeypatch.setattr("fedcl_bench.api.seeds.run_seeds", lambda configs, *rest: [
        {"record": kept / "results/runs" / configs[0].name}])


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; its message."""
    def run(*words, status=2):
        capsys.readouterr()
        assert main([str(word) for word in words]) == status
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return err
    return run


def resealed(folder, alter):
    """Alter the records of a submission, with checksums and digests that fit: ``alter`` takes the content of a
    ``run.json`` and the users' scores."""
    runs = [altered(*alter(json.loads(json.dumps(run.meta)), run.users.copy()), run) for run in load_runs(folder)]
    for path in folder.glob("*.parquet"):
        path.unlink()
    (folder / "index.json").unlink()
    published.write(folder, runs, "a test", lambda run: False)
    seal(folder)


def with_new_rows(folder, alter):
    """Alter the records of a submission, and all that follows from them."""
    resealed(folder, alter)
    rows = verify.rows_of(folder, verify.cells_of(folder, "halved"), "halved", submission.registry_of(folder))
    seal(folder, rows=msgspec.to_builtins(rows))


def altered(meta, users, run):
    return run_of(meta, run.path, lambda name: users if name == "users" else run.load(name))


def seal(folder, **changes):
    said = json.loads((folder / "submission.json").read_text())
    said |= {"records": submission.digest_of_records(folder), "files": submission.digests(folder), **changes}
    (folder / "submission.json").write_text(json.dumps(said))


def test_a_submission_is_verified(kept, capsys):
    before = {path: path.read_bytes() for path in (kept / "board").rglob("*") if path.is_file()}
    assert main(["verify", str(kept / "board/halved"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = {step["step"]: step["evidence"] for step in found["steps"]}
    assert found["verified"] and steps["again: halved"] == (
        "every mean is that of the record, to 0e+00, and so is every user's score")
    assert {"files", "means", "rows", "again: ft", "again: joint", "check: halved"} <= steps.keys()
    seed = verify.drawn(submission.read(kept / "board/halved"), verify.cells_of(kept / "board/halved", "halved"))[1]
    assert f"seed {seed}, by the digest" in steps["drawn"]
    assert before == {path: path.read_bytes() for path in (kept / "board").rglob("*") if path.is_file()}


def test_a_row_is_what_its_runs_say(kept):
    (row,) = submission.read(kept / "board/halved").rows
    runs = {name: [run for run in load_runs(kept / "results") if run.head["method"] == name]
            for name in ("halved", "ft", "joint")}
    averages = [np.mean(run.meta["metrics"]["ndcg@20"]["per_block"][1:]) for run in runs["halved"]]
    assert (row.mean, row.deviation) == pytest.approx((np.mean(averages), np.std(averages, ddof=1)))
    mine, theirs = (user_scores(runs[name], "ndcg@20") for name in ("halved", "ft"))
    assert row.p == pytest.approx(stats.ttest_rel(mine, theirs).pvalue, rel=1e-4) and row.users == len(mine)
    effect = row.detectable / np.std(mine - theirs, ddof=1)
    assert power_of_paired_t(effect, len(mine)) == pytest.approx(0.8, abs=1e-3)
    assert row.settings == SMALL and row.seeds == [0, 1, 2] and row.bounded
    assert row.leaks == "none known" and row.privacy == "Sends item_embedding.weight. No formal guarantee."
    sent = runs["halved"][0].meta["bytes"]
    assert row.megabytes == pytest.approx((sent["total_up"] + sent["total_down"]) / 1e6, rel=0.1)


@pytest.mark.parametrize("name, how", [
    ("plugins/halved.py", "has changed since it was submitted"), ("plugins/_half.py", "has changed since"),
    ("index.json", "has changed"), ("plugins/other.py", "was not submitted")])
def test_changed_files_are_refused(own, refused, name, how):
    path = own / "board/halved" / name
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b"\n")
    assert how in refused("verify", path.parents[name.count("/")], status=1)


def test_another_plugin_under_fitting_digests_is_refused(own, refused):
    folder = own / "board/halved"
    path = folder / "plugins/_half.py"
    path.write_text(path.read_text().replace("/ 2", "/ 3"))
    seal(folder)
    assert "has the hash" in refused("verify", folder, status=1)


def test_a_mean_that_is_none_of_the_users_is_refused(own, refused):
    def alter(meta, users):
        if (meta["method"], meta["seed"]) == ("halved", 1):
            meta["metrics"]["ndcg@20"]["per_block"][2] += 0.01
            meta["matrix"]["ndcg@20"][2][2] += 0.01
        return meta, users
    resealed(own / "board/halved", alter)
    assert "halved on fedmf, ml-100k, seed 1: ndcg@20 on block 2 after block 2" in refused(
        "verify", own / "board/halved", status=1)


@pytest.mark.parametrize("changed, words", [
    ("users", "run again, users' scores are not those"), ("privacy", "Nobody learns anything.")])
def test_what_no_mean_shows_is_compared_too(own, again, refused, changed, words):
    """Scores that change places among users, which decide p; and what is said of privacy."""
    def alter(meta, users):
        if meta["method"] == "halved" and changed == "users":
            rows = (users["metric"] == "ndcg@20") & (users["trained_block"] == 1) & (users["tested_block"] == 1)
            users.loc[rows, "value"] = np.sort(users.loc[rows, "value"])
        elif meta["method"] == "halved":
            meta["privacy"]["notes"] = ["Nobody learns anything."]
        return meta, users
    with_new_rows(own / "board/halved", alter)
    assert words in refused("verify", own / "board/halved", status=1)


@pytest.mark.parametrize("processor, words", [(None, "run again, ndcg@20 after block 1"),
                                              ("Other", "lies")])
def test_runs_that_do_not_come_out_again_are_refused(own, again, refused, processor, words):
    """All scores of the method are raised alike, and all that follows from them."""
    def alter(meta, users):
        if processor:
            meta["environment"]["processor"] = processor
        if meta["method"] == "halved":
            rows = (users["metric"] == "ndcg@20") & (users["trained_block"] > 0)
            users.loc[rows, "value"] += 0.25
            for t in range(1, 3):
                meta["matrix"]["ndcg@20"][t] = [value + 0.25 for value in meta["matrix"]["ndcg@20"][t]]
                meta["metrics"]["ndcg@20"]["per_block"][t] += 0.25
            meta["metrics"]["ndcg@20"]["avg_incremental"] += 0.25
        return meta, users
    with_new_rows(own / "board/halved", alter)
    message = refused("verify", own / "board/halved", status=1)
    assert "halved on fedmf" in message and words in message


def test_another_processor_acts_like_another_seed(own, again, capsys):
    """It may train more rounds or fewer, of which notes on privacy tell."""
    def alter(meta, users):
        meta["environment"]["processor"] = "Other"
        meta["privacy"]["notes"] = ["epsilon = 17.39 over 60 rounds"]
        return meta, users
    with_new_rows(own / "board/halved", alter)
    assert main(["verify", str(own / "board/halved")]) == 0
    assert "instead of Other, which rounds differently and acts like another seed: within" in capsys.readouterr().out


def test_a_row_that_does_not_follow_is_refused(own, refused):
    folder = own / "board/halved"
    (row,) = json.loads((folder / "submission.json").read_text())["rows"]
    seal(folder, rows=[{**row, "p": row["p"] / 100}])
    assert "field 'rows[0].p'" in refused("verify", folder, status=1)


def test_wrong_folders_are_named(kept, tmp_path, refused):
    assert "has no submission.json" in refused("verify", kept / "results")
    assert "has no submission.json" in refused("verify", tmp_path / "none")
    shutil.copytree(kept / "board/halved", tmp_path / "half")
    (tmp_path / "half/submission.json").write_text('{"format": 2}')
    assert "submission.json" in refused("verify", tmp_path / "half")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("")
    assert "is there and no submission" in refused(*submit(kept, out=tmp_path / "mine"))
    assert (tmp_path / "mine/thesis.tex").is_file()
    (tmp_path / "README.md").write_text("# Thesis\n\n## Leaderboard\n")  # in whose place the board's would be
    assert "README.md, which is none" in refused(*submit(kept, out=tmp_path / "new"))
    assert (tmp_path / "README.md").read_text().startswith("# Thesis") and not (tmp_path / "new").exists()


def test_what_cannot_be_submitted(own, refused):
    """Each of them says what helps."""
    results = own / "results/runs"
    assert "accepted: one that is tested against ft" in refused(*submit(own, method="ft"))
    assert "no run of kd" in refused(*submit(own, method="kd"))
    assert "unknown dataset of runs of halved 'ml-1m'" in refused(*submit(own, dataset="ml-1m"), "--dataset", "ml-100k")
    assert "--author: found" in refused(*submit(own, author="\x1b[2J"))
    unfinished = results / "halved-fedmf-ml-100k-s7-0123456789ab"
    unfinished.mkdir()
    assert "has not ended" in refused(*submit(own))
    unfinished.rmdir()
    (own / "mine/halved.py").write_text((own / "mine/halved.py").read_text() + "# edited\n")
    assert "is of other plugin code" in refused(*submit(own))
    (own / "mine/halved.py").write_bytes((own / "board/halved/plugins/halved.py").read_bytes())
    (seed,) = results.glob("ft-fedmf-ml-100k-s1-*")
    shutil.rmtree(seed)
    assert "ft has seeds 0, 2, and halved 0-2" in refused(*submit(own))
    (seed,) = results.glob("halved-fedmf-ml-100k-s1-*")
    run = json.loads((seed / "run.json").read_text())
    head = {name: run[name] for name in ("schema", "method", "backbone", "dataset", "seed", "settings", "hash",
                                         "environment")}
    (seed / "run.json").write_text(json.dumps({**head, "status": "failed", "error": "diverged"}))
    assert "failed with seed 1 (diverged)" in refused(*submit(own))
    shutil.rmtree(seed)
    assert "found 2 seeds (0, 2), accepted: 3 or more" in refused(*submit(own))


def test_runs_of_several_settings_are_refused(registry, tmp_path):
    """Unless they are named; only defaults can be meant by nothing."""
    for method, settings in (("f3crec", ()), ("ft", ()), ("f3crec", (("eps", 0.001),))):
        for seed in range(3):
            fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", settings), seed, level(0.1))
    source = Source(load_runs(tmp_path), registry)
    places = {"backbone": None, "dataset": None}
    with pytest.raises(UserError, match="(?s)several settings .eps=0.001 beside .*--method f3crec:NAME=VALUE"):
        submission.select(source, "f3crec", places, {}, tmp_path)
    cells = submission.select(source, "f3crec:eps=0.001", places, {}, tmp_path)
    assert {run.head["settings"]["eps"] for run in cells["fedmf", "ml-100k"]["f3crec"]} == {0.001}
    more = tmp_path / "more"
    for method, patience in (("f3crec", 10), ("f3crec", 20), ("ft", 20)):
        for seed in range(3):
            fabricate(more, registry, RunSpec(method, "fedmf", "ml-100k", (("patience", patience),)), seed, level(0.1))
    source = Source(load_runs(more), registry, assignments=(("patience", 20),))
    cells = submission.select(source, "f3crec:patience=10", places, {"patience": 20}, more)["fedmf", "ml-100k"]
    assert {name: {run.head["settings"]["patience"] for run in runs} for name, runs in cells.items()} == {
        "f3crec": {10}, "ft": {20}}


# The page


@pytest.fixture
def two(own):
    """The board with a second submission of the same runs under another name."""
    shutil.copytree(own / "board/halved", own / "board/later")
    seal(own / "board/later", title="a <b>|later</b> one")
    board.write_pages(own / "board")
    return own / "board"


def test_the_page_has_every_row(two):
    rows = board.lines(board.entries(two))
    (row,) = submission.read(two / "halved").rows
    assert len(rows) == 2 and rows[0]["p (Holm)"].value == holm([row.p, row.p])[0] == min(1.0, 2 * row.p)
    page, text = (two / "board.html").read_text(), (two / "README.md").read_text()
    assert page.count("<tr") == 1 + 2 and f'data-order="{row.mean!r}"' in page and f"{row.mean:.4f} ±" in text
    assert "<b>" not in page and "a &lt;b&gt;|later&lt;/b&gt; one" in page and "a &lt;b>\\|later&lt;/b> one" in text
    assert not re.findall(r"(?:src|href)=|https?://|fetch\(", page) and "default-src 'none'" in page
    for name, mean in (("halved", 0.9), ("later", 0.8)):
        seal(two / name, rows=[{**msgspec.to_builtins(row), "metric": "rmse", "mean": mean}])
    assert [folder for folder, *_ in board.entries(two)] == ["later", "halved"]  # of an error less is better


DRIVE = """
started.then((table) => {
  const shown = (i, of) => table.rows({ order: "applied", search: "applied" }).nodes().toArray().map(
    (row) => of(row.cells[i]));
  const means = (order) => table.order([5, order]) && table.draw() && shown(5, (cell) => cell.dataset.order);
  const found = [means("desc"), means("asc")];
  table.search("LATER").draw();
  document.body.dataset.found = JSON.stringify([...found, shown(21, (cell) => cell.textContent)]);
});
"""


@pytest.mark.long
def test_the_page_sorts_and_filters_in_a_browser(two, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    seal(two / "later", rows=[{**msgspec.to_builtins(submission.read(two / "later").rows[0]), "mean": 0.9}])
    page = tmp_path / "driven.html"
    page.write_text(board.page(two).replace("drawn(started);", f"drawn(started);{DRIVE}"))
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
                           "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}", f"file://{page}"],
                          capture_output=True, text=True, timeout=300)
    first, second, left = json.loads(re.search(r'data-found="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    assert first == ["0.9", repr(submission.read(two / "halved").rows[0].mean)] == second[::-1] and left == ["later"]


# What is on the board of this repository


def test_the_pages_are_those_of_the_submissions():
    folder = ROOT / "results/leaderboard"
    page = (folder / board.MARKDOWN).read_text(encoding="utf-8")
    assert page == board.markdown(folder), "run python results/make_pages.py"


every_submission = pytest.mark.parametrize(
    "folder", sorted(path.parent for path in (ROOT / "results/leaderboard").glob(f"*/{submission.FILE}")),
    ids=lambda path: path.name)


@every_submission
def test_every_submission_is_of_the_plugins_of_now(folder):
    """Else it cannot be verified: submit it again, of runs made anew."""
    cells = submission.cells_of(folder, submission.read(folder).method)
    configs = list(submission.configs_of(submission.registry_of(folder), cells, None))
    assert configs and [run.hash for run, _ in configs] == [config.hash for _, config in configs]


@pytest.mark.long
@every_submission
def test_every_submission_is_verified(folder):
    assert main(["verify", str(folder)]) == 0


def test_runs_of_a_gpu_are_made_again_where_there_is_none(registry, tmp_path, monkeypatch):
    config, made = make_config(registry, "ft", "fedmf", "ml-100k", device="cuda"), []
    monkeypatch.setattr("fedcl_bench.leaderboard.verify.verify",
                        lambda folder, data_dir, rerun: [("again", rerun(config))])
    monkeypatch.setattr("fedcl_bench.api.seeds.run_seeds", lambda configs, *others: made.append(configs[0].device) or [
        {"record": "a record"}])
    monkeypatch.setattr("fedcl_bench.records.store.load_record", str)
    monkeypatch.setattr("fedcl_bench.cli.commands.verify._check", lambda args, found: True)
    assert main(["verify", str(tmp_path)]) == 0 and made == [resolve_device("auto")]
