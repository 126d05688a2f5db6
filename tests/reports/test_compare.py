"""Comparing methods: which numbers are tested, what is refused, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricate import alter, fabricate, fabricate_sessions, level
from helpers import output_of, refused
from scipy import stats
from synthetic import flat_runs, make_run

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.settings import split_methods
from fedcl_bench.reports.any_table import Layout, build_any
from fedcl_bench.reports.comparison import against_each, changed_settings, over_grid, unequal
from fedcl_bench.reports.dashboard import gather, leaderboard
from fedcl_bench.reports.frame import parse_blocks, seed_averages
from fedcl_bench.reports.selection import Source, command_for, find
from fedcl_bench.records import published
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import RunSpec, Tuned, parse_method
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.stats import significance
from fedcl_bench.stats.significance import TooFew

QUICK = ["--set", "rounds=2", "--set", "k_core=60"]
PAIR = ["compare", "f3crec", "ft", "--backbone", "fedmf", *QUICK]


def test_a_user_counts_once():
    runs = [make_run("ft", 0, {0: {7: 0.9}, 1: {7: 0.2, 8: 0.4}, 2: {7: 0.6}}),
            make_run("ft", 1, {0: {7: 0.9}, 1: {7: 0.4, 8: 0.0}, 2: {7: 0.8}})]
    assert user_scores(runs, "ndcg@20").to_dict() == pytest.approx({7: 0.5, 8: 0.2})
    assert user_scores(runs, "ndcg@20", [2]).to_dict() == pytest.approx({7: 0.7})
    assert seed_averages(runs, "ndcg@20").to_dict() == pytest.approx({0: (0.3 + 0.6) / 2, 1: (0.2 + 0.8) / 2})
    assert seed_averages(runs, "ndcg@20", [0, 2])[1] == pytest.approx((0.9 + 0.8) / 2)
    static = [make_run("ft", 0, {0: {7: 0.9, 8: 0.1}})]
    assert user_scores(static, "ndcg@20").to_dict() == {7: 0.9, 8: 0.1}  # there is no later block
    assert seed_averages(static, "ndcg@20")[0] == 0.5


def random_runs(method, seeds, shift, users=range(60), **options):
    base = np.random.default_rng(5).uniform(0, 0.2, 100)
    rng = np.random.default_rng(len(method))
    return [make_run(method, seed, {t: {u: base[u] + shift + rng.normal(0, 0.05) for u in users} for t in range(3)},
                     **options) for seed in seeds]


def test_tests_are_those_of_scipy():
    """Over users and over seeds, with Holm's correction; positive where the first is better."""
    runs = {"a": random_runs("f3crec", range(4), 0.05), "b": random_runs("ft", range(4), 0.0),
            "c": random_runs("kd", range(4), 0.1)}
    found = against_each(runs, "a", "ndcg@20")
    for comparison, other, sign in zip(found, "bc", (1, -1)):
        for test, score in ((comparison.users, user_scores), (comparison.seeds, seed_averages)):
            expected = stats.ttest_rel(score(runs["a"], "ndcg@20"), score(runs[other], "ndcg@20"))
            assert (test.t, test.p) == pytest.approx((expected.statistic, expected.pvalue)) and test.p < 0.05
            assert sign * test.difference > 0.03
    assert [comparison.p_holm for comparison in found] == significance.holm([c.users.p for c in found])


def test_only_common_seeds_and_users():
    a, b = random_runs("f3crec", (0, 1, 2), 0.05), random_runs("ft", (4, 2, 1), 0.0, users=range(10, 70))
    found, = against_each({"a": a, "b": b}, "a", "ndcg@20")
    assert found.common == (1, 2) and found.left_out == (0, 4)
    assert found.users.n == 50 and found.users_left_out == 20 and found.seeds.n == 2
    same, = against_each({"a": a[1:], "b": [b[2], b[1]]}, "a", "ndcg@20")
    assert same.users == found.users and same.seeds == found.seeds
    one, = against_each({"a": a[:2], "b": b[1:]}, "a", "ndcg@20")
    assert one.users.n == 50 and one.seeds is None
    for other, message in ((b[:1], "no seed in common: a has 0, 1, 2, b 4"),
                           (random_runs("ft", [0], 0, users=range(59, 90)), "at least 2 users .*found 1")):
        with pytest.raises(TooFew, match=message):
            against_each({"a": a, "b": other}, "a", "ndcg@20")


@pytest.mark.parametrize("options,message", [
    (dict(candidates="sampled"), "different protocols"), (dict(stream="static"), "different protocols"),
    (dict(fingerprint="other"), "different data files"),
    (dict(split_seed=1), "split_seed=1: what they are tested on differs"),
    (dict(sampled_candidates=50), "sampled_candidates=50")])
def test_runs_that_tested_something_else_are_refused(options, message):
    a, b = random_runs("f3crec", (0, 1), 0.05), random_runs("ft", (0, 1), 0.0, **options)
    with pytest.raises(UserError, match=message):
        against_each({"a": a, "b": b}, "a", "ndcg@20")
    with pytest.raises(UserError, match=message):
        over_grid({("fedmf", "ml-100k"): {"a": a, "b": b}}, "ndcg@20")
    if message == "different protocols":
        with pytest.raises(UserError, match=message):
            over_grid({("fedmf", "ml-100k"): {"a": a}, ("fedmf", "other"): {"a": b}}, "ndcg@20")


def test_grid_of_average_scores():
    table = {("fedmf", "x"): (0.1, 0.3, 0.2), ("fedmf", "y"): (0.2, 0.3, 0.1), ("fedncf", "x"): (0.1, 0.3, 0.2)}
    cells = {key: {m: flat_runs(m, {0: v, 1: v + 0.2, **({2: 9.0} if m == "b" else {})}, backbone=key[0],
                                   dataset=key[1]) for m, v in zip("abc", values)} for key, values in table.items()}
    rows, test = over_grid(cells, "ndcg@20")
    assert [row.seeds for row in rows] == [(0, 1)] * 3  # seed 2 is of b alone
    assert np.array([row.scores for row in rows]) == pytest.approx(np.array(list(table.values())) + 0.1)
    assert test.chi2 == pytest.approx(stats.friedmanchisquare(*np.array(list(table.values())).T).statistic)
    assert test.ranks == pytest.approx((8 / 3, 1.0, 7 / 3))


def test_methods_with_settings_blocks_and_commands_for_missing_runs():
    assert split_methods("ft:dim=2,encoder=given:DIR,recbole:BPR:lr=1") == (
        "ft:dim=2,encoder=given:DIR", "recbole:BPR:lr=1")
    assert split_methods("ft,f3crec:without=arm,eps=.01,kd,ft:topk=5,20") == (
        "ft", "f3crec:without=arm,eps=.01", "kd", "ft:topk=5,20")
    with pytest.raises(UserError, match="--methods"):
        split_methods("ft,,kd")
    for text, settings in (("ft", ()), ("ft:without=arm", (("without", "arm"),)),
                           ("ft:topk=5,20,lr=1", (("topk", "5,20"), ("lr", "1")))):
        assert parse_method(text) == ("ft", settings)
    for text, blocks in (("1-3", (1, 2, 3)), ("0,2", (0, 2)), ("2", (2,)), ("3,1-2", (1, 2, 3))):
        assert parse_blocks(text) == blocks
    assert parse_method("RecBole:EASE:reg_weight=1") == ("RecBole:EASE", (("reg_weight", "1"),))
    for text in ("f3crec:", "f3crec:arm", "f3crec:=1"):
        with pytest.raises(UserError, match="NAME=VALUE"):
            parse_method(text)
    for text in ("", "a", "3-1", "1-", "-1", "1,,2"):
        with pytest.raises(UserError, match="--blocks"):
            parse_blocks(text)
    specs = [RunSpec(m, b, "ml-100k", (("rounds", "2"),)) for b in ("fedmf", "fedncf") for m in ("ft", "kd")]
    assert command_for(specs, Tuned.of(Path("T"), Path("results"))) == (
        "run_bench.py grid --methods ft,kd --backbones fedmf,fedncf --datasets ml-100k --seeds 5 --set rounds=2 "
        "--tuned T")
    assert command_for([RunSpec("ft", "fedmf", "x"), replace(specs[0], dataset="x")]).count(" && ") == 1


def test_table_and_direction(at_records, capsys):
    """As text and as JSON, of two methods with either in front, and of a grid."""
    out = output_of(capsys, *PAIR, "--proposed", "ft", "--blocks", "2")
    assert "ft on fedmf, ml-100k: ndcg@20" in out and "block 2" in out and "Positive: ft is better" in out
    row = next(line for line in out.splitlines() if line.strip().startswith("f3crec"))
    back = json.loads(output_of(capsys, *PAIR, "--blocks", "2", "--json"))["comparisons"][0]["per_user"]
    assert back["difference"] == pytest.approx(-float(row.split()[1]), abs=6e-5) and back["n"] == int(row.split()[-5])
    grid = ["compare", "--friedman", "f3crec", "ft", "kd", "--backbones", "fedmf,fedncf", *QUICK]
    out = output_of(capsys, *grid)
    assert "average rank" in out and "chi2(2)" in out and "Critical difference" in out
    result = json.loads(output_of(capsys, *grid, "--json"))
    assert len(result["rows"]) == result["n"] == 2 and sum(result["ranks"]) == pytest.approx(6)
    assert result["critical_difference"] == pytest.approx(2.343 * np.sqrt(12 / 12), abs=2e-3)


def test_few_users_are_noted_with_intervals_of_both_means(registry, tmp_path, capsys):
    for users in (29, 30):
        for method, value in (("kd", 0.3), ("ft", 0.2)):
            fabricate(tmp_path / str(users), registry, RunSpec(method, "fedmf", "ml-100k"), 0,
                      lambda *_: np.array([value]), users=users)
    command = ["compare", "kd", "ft", "--backbone", "fedmf", "--records"]
    assert main([*command, str(tmp_path / "29")]) == 0
    kd, ft = (significance.interval_of_mean(mean, 29) for mean in (0.3, 0.2))
    note = (f"ft: only 29 test users; 95 % intervals of the means: kd {kd[0]:.4f} to {kd[1]:.4f}, "
            f"ft {ft[0]:.4f} to {ft[1]:.4f}")
    assert note in capsys.readouterr().out.splitlines()
    result = json.loads(output_of(capsys, *command, tmp_path / "29", "--json"))
    assert result["notes"] == [note] and result["comparisons"][0]["per_user"]["means"] == pytest.approx([0.3, 0.2])
    assert "test users" not in output_of(capsys, *command, tmp_path / "30")


def test_what_compact_records_lack_is_said(at_records, capsys, tmp_path):
    published.write(tmp_path / "packed", load_runs(Path("results")), "test", lambda run: False)
    message = refused(capsys, *PAIR, "--records", tmp_path / "packed", "--metric", "hit@20")
    assert "no hit@20 per user" in message and "It has: ndcg@20, recall@20. It is a compact record" in message


def test_reimplementations_are_marked(capsys, tmp_path):
    (tmp_path / "again.py").write_text(
        "from fedcl_bench.plugin.method import Method\n\n\nclass Again(Method):\n    name = title = 'again'\n"
        "    reimplementation = True\n")
    for noise, method in enumerate(("again", "ft")):
        fabricate(tmp_path / "r", discover([tmp_path]), RunSpec(method, "fedmf", "ml-100k"), 0, level(0.1, noise=noise))
    out = output_of(capsys, "compare", "again", "ft", "--backbone", "fedmf", "--plugins", tmp_path, "--records",
                    tmp_path / "r")
    assert "again† on fedmf" in out and "† re-implementation" in out and "ft: one seed: no test over seeds." in out


@pytest.mark.parametrize("arguments,parts", [
    (["compare", "f3crec", "ft"], ["--backbone is missing", "fedmf"]),
    (["compare", "f3crec", "--backbone", "fedmf"], ["two methods or more"]),
    (["compare", "ft", *PAIR[1:]], ["'ft' 2 times"]),
    (["compare", "f3crec:without=none", *PAIR[1:]],
     ["f3crec (rounds=2, k_core=60, without=none) and f3crec (rounds=2, k_core=60) are the same runs"]),
    (["compare", "f3crec:rounds=2", *PAIR[1:]], ["f3crec (rounds=2, k_core=60) is named twice on fedmf, ml-100k"]),
    ([*PAIR, "--metric", "ndgc@20"], ["unknown metric 'ndgc@20'", "Did you mean 'ndcg@20'"]),
    ([*PAIR, "--metric", "ndcg@10"], ["has no ndcg@10", "topk"]),
    ([*PAIR, "--blocks", "2-7"], ["--blocks: found 4", "blocks 0-3"]),
    ([*PAIR, "--proposed", "kd"], ["unknown method", "Known: f3crec, ft"]),
    ([*PAIR, "--dataset", "ml-100j"], ["unknown dataset 'ml-100j'", "Did you mean 'ml-100k'"]),
    (["compare", "f3crec:wihtout=arm", "ft", "--backbone", "fedmf"], ["wihtout", "Did you mean 'without'"]),
    (["compare", "reg", *PAIR[1:]],
     ["no record in results of reg (rounds=2, k_core=60) on fedmf, ml-100k", "grid --methods reg",
      "--seeds 2 --set rounds=2"]),
    (["compare", "f3crec", "ft", "--backbone", "fedmf"],
     ["no record in results of f3crec, ft on fedmf, ml-100k", "rounds 2 instead of 100", "--set"]),
    ([*PAIR, "reg"], ["unrecognized arguments: reg", "--help"]),
    (["compare", "f3crec", "ft", "--backbone", "biasmf", "--tuned"], ["no tuned settings for f3crec", "tune"]),
    ([*PAIR, "--backbone", "fedmf,fedncf"], ["--friedman"]),
    ([*PAIR, "--friedman", "--backbone", "fedmf,fedncf"], ["found 2 and 2"]),
])
def test_bad_input(at_records, capsys, arguments, parts):
    message = refused(capsys, *arguments)
    assert all(part in message for part in parts), message


def test_the_metric_follows_the_stream(registry, tmp_path, capsys):
    """That by which sessions are validated, and N@20 on blocks."""
    for method, hit in (("fcucr", 0.3), ("ft", 0.2)):
        for seed in (0, 1):
            fabricate_sessions(tmp_path, registry, RunSpec(method, "sasrec", "xing"), seed, hit, noise=len(method))
            of_lists = RunSpec("kd" if method == "fcucr" else "ft", "fedmf", "ml-100k")
            fabricate(tmp_path, registry, of_lists, seed, level(hit))
    command = ["compare", "--records", str(tmp_path), "--json"]
    result = json.loads(output_of(capsys, *command, "fcucr", "ft", "--backbone", "sasrec", "--dataset", "xing"))
    assert result["metric"] == "hit@10" and result["comparisons"][0]["per_user"]["difference"] == pytest.approx(0.1)
    result = json.loads(output_of(capsys, *command, "kd", "ft", "--backbone", "fedmf"))
    assert (result["metric"], result["proposed"], result["blocks"]) == ("ndcg@20", "kd", [1, 2, 3])


def test_commands_that_are_suggested_keep_the_folders(at_records, drawn, tmp_path, capsys):
    """Those of plugins, data and records, in every command that suggests one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs-of-mine").symlink_to(Path("results").resolve())
    folders = ["--plugins", str(tmp_path / "mine")]
    records = str(tmp_path / "runs-of-mine")
    assert main(["compare", "reg", *PAIR[1:], "--records", records, *folders]) == 2
    assert f"--results {records} {' '.join(folders)}" in capsys.readouterr().err
    assert main(["figures", "--figure", "curves", "--methods", "ft,reg", "--backbones", "fedmf", *QUICK, "--records",
                 records, *folders, "--format", "svg", "--out", str(tmp_path)]) == 0
    assert f"--results {records} {' '.join(folders)}" in capsys.readouterr().out
    table = ["tables", "--table", "2", "--datasets", "ml-100k", *QUICK, "--records", records, *folders]
    assert main([*table, "--data-dir", str(tmp_path)]) == 0
    assert f"--results {records} --data-dir {tmp_path} {' '.join(folders)}" in capsys.readouterr().out
    grid = ["grid", "--methods", "ft", "--backbones", "biasmf", "--tuned", "--results", records, *folders]
    assert f"tune --methods ft --backbones biasmf --datasets ml-100k --results {records} --data-dir {tmp_path} " \
           f"{' '.join(folders)}" in refused(capsys, *grid, "--data-dir", tmp_path)


def test_shares_of_headroom(tmp_path, registry, capsys):
    """By hand: FT .10, joint .14, F3CRec .12, users alike; a bound is said to be one, and popularity needs no
    backbone."""
    for method, mean in (("ft", 0.10), ("joint", 0.14), ("f3crec", 0.12), ("reg", 0.09)):
        for seed in range(3):
            fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k"), seed, level(mean))
        fabricate(tmp_path, registry, RunSpec(method, "fedncf", "ml-100k"), 0, level(mean))
    fabricate(tmp_path, registry, RunSpec("popularity", "none", "ml-100k"), 0, level(0.05))
    words = ["headroom", "f3crec", "reg", "popularity", "--backbone", "fedmf", "--records", str(tmp_path)]
    rows = {row["method"]: row for row in json.loads(output_of(capsys, *words, "--json"))["cells"][0]["rows"]}
    assert list(rows) == ["ft", "joint", "f3crec", "reg", "popularity"]
    assert rows["ft"]["against"] is None and rows["popularity"]["seeds"] == [0]
    shares = {name: row["against"]["share"][0] for name, row in rows.items() if row["against"]}
    assert shares == pytest.approx({"joint": 1.0, "f3crec": 0.5, "reg": -0.25, "popularity": -1.25})
    printed = output_of(capsys, *words, "--figure", "--format", "svg", "--out", tmp_path / "drawn")
    assert "0.50 (0.50 … 0.50)" in printed and "on purpose (docs/constraints.md): joint (C1), popularity (F4, C1)." in \
        " ".join(printed.split())
    cells = json.loads(output_of(capsys, *words, "--backbone", "fedncf", "--json"))["cells"]
    assert [row["method"] for cell in cells for row in cell["rows"]] == 2 * list(rows)
    assert 'id="gain:fedmf, ml-100k:f3crec"' in (tmp_path / "drawn" / "headroom.svg").read_text()


def test_no_headroom_is_said(tmp_path, registry, capsys):
    for method, mean in (("ft", 0.14), ("joint", 0.10), ("f3crec", 0.12)):
        path = fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k"), 0, level(mean)) / "run.json"
        content = json.loads(path.read_text())
        content["continual"]["ndcg@20"]["forgetting"] = None  # as of streams with one step
        path.write_text(json.dumps(content))
    out = output_of(capsys, "headroom", "f3crec", "--backbone", "fedmf", "--records", tmp_path)
    assert out.count("no headroom") == 2 and "nan" not in out and "joint: one seed in common" in out
    for method in ("ft", "joint"):
        fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", (("evaluate_users", 100),)), 0, level(0.1))
    assert "differ between seeds (evaluate_users)" in refused(
        capsys, "headroom", "joint", "--backbone", "fedmf", "--set", "evaluate_users=100", "--records", tmp_path)
    assert "is the reference too" in refused(capsys, "headroom", "kd", "--backbone", "fedmf", "--bound", "ft")
    assert "no record" in refused(capsys, "headroom", "kd", "--backbone", "fedmf", "--records", tmp_path)
    assert "of ft, central, fcucr on sasrec" in refused(  # joint is none of sessions
        capsys, "headroom", "fcucr", "--backbone", "sasrec", "--dataset", "xing", "--records", tmp_path)


def test_of_errors_less_is_better(tmp_path, registry, capsys):
    """By hand: FT .10, joint .14, KD .12, users alike; the same numbers as N@20 and as RMSE."""
    for method, mean in (("ft", 0.10), ("joint", 0.14), ("kd", 0.12)):
        for backbone in ("fedmf", "fedncf"):
            record = fabricate(tmp_path, registry, RunSpec(method, backbone, "ml-100k"), 0, level(mean), errors=True)
            alter(record, groups={"new-users": {"users": [9] * 4, "rmse": [mean] * 4}})
    names, records = ["ft", "joint", "kd"], ["--records", str(tmp_path), "--json"]
    for metric, sign in (("ndcg@20", -1.0), ("rmse", 1.0)):
        of = ["--metric", metric, *records]
        found = json.loads(output_of(capsys, "compare", *names, "--backbone", "fedmf", *of))["comparisons"]
        assert [each["per_user"]["difference"] for each in found] == pytest.approx([0.04 * sign, 0.02 * sign])
        test = json.loads(output_of(capsys, "compare", "--friedman", *names, "--backbones", "fedmf,fedncf", *of))
        assert test["ranks"] == ([1.0, 3.0, 2.0] if sign > 0 else [3.0, 1.0, 2.0])
        rows = json.loads(output_of(capsys, "headroom", "kd", "--backbone", "fedmf", *of))["cells"][0]["rows"]
        assert [row["against"]["gain"][0] for row in rows[1:]] == pytest.approx([-0.04 * sign, -0.02 * sign])
        cell, _ = gather(load_runs(tmp_path), registry)
        assert leaderboard(replace(cell, metric=metric))[0]["method"] == ("ft" if sign > 0 else "joint")
    for by in ((), ("new-users",)):
        table = build_any(Layout(backbones=("fedmf",), metrics=("rmse",), by=by), Source(load_runs(tmp_path), registry))
        assert {cell.key.row: cell.rank for cell in table.cells()} == {"ft": 1, "kd": 2, "joint": 0}


def test_settings_that_records_leave_out_at_their_default_count(tmp_path, registry):
    """One that is not at its default, and one that is at it against the backbone's own."""
    for method, backbone, name, value, usual in (("ft", "fedmf", "evaluate_every", 2, 1),
                                                 ("fedprox", "feddae", "server_optimiser", "none", "adam")):
        fabricate(tmp_path / name, registry, RunSpec(method, backbone, "ml-100k", ((name, value),)), 0, level(0.1))
        fabricate(tmp_path / name, registry, RunSpec("kd", backbone, "ml-100k"), 0, level(0.1))
        kd, run = sorted(load_runs(tmp_path / name), key=lambda run: run.head["method"] != "kd")
        assert changed_settings(registry, run.head, "ml-100k") == {name: value}
        assert not changed_settings(registry, kd.head, "ml-100k")
        assert unequal(run, kd, registry) == f"{name}={value} beside {usual}"
    _, reason = find(Source([run], registry), RunSpec("fedprox", "feddae", "ml-100k"))
    assert reason.endswith("has server_optimiser none instead of adam")
    fabricate(tmp_path / "evaluate_every", registry, RunSpec("ft", "fedmf", "ml-100k"), 0, level(0.1))
    cell, = gather(load_runs(tmp_path / "evaluate_every"), registry)
    assert [variant.title for variant in cell.variants] == ["ft", "ft (evaluate_every=2)", "kd"]
    results = fb.load(tmp_path / "evaluate_every", "ft", evaluate_every=2)
    with pytest.raises(UserError, match=r"no record .* of kd \(evaluate_every=2\)"):
        results.compare("kd")
