"""The Python interface: runs and records in, frames, tests, figures and recommendations out."""

import inspect
import json
import shutil
import signal
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fabricate import fabricate, level
from helpers import ROOT, same_numbers

import fedcl_bench as fb
from fedcl_bench.api import seeds
from fedcl_bench.cli.main import main
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.files.recbole_files import bundled
from fedcl_bench.runs.config import CORE_SETTINGS, make_config
from fedcl_bench.records.record import Record
from fedcl_bench.runs.summary import failed
from fedcl_bench.runs.specs import RunSpec

TINY = {"rounds": 1, "k_core": 80}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A results folder with two seeds of F3CRec and FT."""
    folder = tmp_path_factory.mktemp("api") / "results"
    for method in ("f3crec", "ft"):
        fb.run(method, "fedmf", seeds=2, results=folder, progress=False, **TINY)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return fb.load(folder, "f3crec")


# Running

def test_run_gives_what_the_command_gives_and_reuses_its_record(folder, results, capsys, monkeypatch):
    command = ["--method", "f3crec", "--backbone", "fedmf", "--seeds", "2", "--results", str(folder),
               *(word for name, value in TINY.items() for word in ("--set", f"{name}={value}"))]
    monkeypatch.setattr(seeds, "load_stream", lambda *_: pytest.fail("a finished run needs no data"))
    assert main(command) == 0
    assert f"{results.table().loc['ndcg@20', 'avg 1-3']}" in capsys.readouterr().out
    again = fb.run("f3crec", "fedmf", seeds=2, results=folder, progress=False, **TINY)
    pd.testing.assert_frame_equal(again.metrics, results.metrics)
    assert again.seeds == [0, 1] and len(list((folder / "runs").iterdir())) == 4
    assert fb.run("f3crec", "fedmf", results=str(folder), first_seed=1, progress=False, **TINY).seeds == [1]
    assert capsys.readouterr().err == ""


@pytest.fixture
def in_a_terminal():
    """Ctrl-C interrupts; what a shell starts in the background ignores it, and so would its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_loses_nothing(tmp_path, registry, monkeypatch, in_a_terminal):
    """The round ends, its checkpoint is written, and the same call ends at the same numbers."""
    settings = {"rounds": 2, "k_core": 80, "blocks": 2}
    update = seeds.Display.update

    def press(self, stream, progress):
        update(self, stream, progress)
        if (progress.step, progress.round) == (1, 1):
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(seeds.Display, "update", press)
    with pytest.raises(KeyboardInterrupt, match="after round 1 of block 1"):
        fb.run("ft", "fedmf", results=tmp_path / "a", progress=False, **settings)
    assert len(list(tmp_path.glob("a/runs/*/checkpoint.pt"))) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(seeds.Display, "update", update)
    found = fb.run("ft", "fedmf", results=tmp_path / "a", progress=False, **settings)
    whole = fb.run("ft", "fedmf", results=tmp_path / "b", progress=False, **settings)
    same_numbers(*({**each.runs[0].meta, "record": str(each.folders[0])} for each in (found, whole)))


def test_it_runs_in_a_thread_that_receives_no_signals_and_shows_progress(tmp_path, capsys):
    found = []
    thread = threading.Thread(target=lambda: found.append(fb.run("pfedrec", results=tmp_path, **TINY)))
    thread.start()
    thread.join()
    assert (found[0].method, found[0].backbone, found[0].seeds) == ("ft", "pfedrec", [0])  # a recommender alone
    assert "block 0: 1 rounds" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, settings, words", [
    (("pfedrec", "fedmf"), {}, "leave one of the two out"), (("f3crec",), {}, "backbone is missing"),
    (("f3crek", "fedmf"), {}, "f3crec"),
    (("ft", "fedmf"), {"seeds": 0}, "seeds=0"), (("ft", "fedmf"), {"first_seed": -1}, "first_seed=-1"),
    (("ft", "fedmf"), {"rounds": 0}, r"'rounds' \(fb.run\)"), (("ft", "fedmf"), {"plugins": "nowhere"}, "not a folder"),
    (("ft", "fedmf", "nowhere"), {}, "nowhere"), (("ft", "fedmf"), {"epz": 1}, "unknown setting"),
    (("ft", "fedmf"), {"seeds": 3, "lr": -1}, "'lr'"), (("ft", "fedmf"), {"device": "gpu"}, "unknown device 'gpu'"),
    ((3,), {}, "run: found method=3, accepted: a text"), (("ft", 3), {}, "run: found backbone=3"),
    (("ft", "fedmf", None), {}, "run: found dataset=None, accepted: a name"),
    (("ft", "fedmf"), {"plugins": 3}, "run: found plugins=3, accepted: the path of a folder"),
    (("ft", "fedmf"), {"data_dir": 3}, "run: found data_dir=3"), (("ft", "fedmf"), {"results": 3}, "found results=3"),
    (("ft", "fedmf"), {"data_dir": "nowhere"}, "^data_dir: 'nowhere' is not"),  # in words of Python
    (("ft", "fedmf"), {"device": "cuda"}, "^device=cuda: .* use device=cpu or auto"),
    (("ft", "fedmf"), {"seed": 3}, "is the option first_seed here"),
    (("fcucr", "fedmf"), TINY, r"stream of sessions \(stream=sessions, or dataset xing\)")])
def test_what_is_wrong_is_said(tmp_path, monkeypatch, arguments, settings, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(fb.UserError, match=words):
        fb.run(*arguments, **{"results": tmp_path, "progress": False, **settings})
    assert not list(tmp_path.iterdir())


def test_no_setting_has_the_name_of_an_argument(registry):
    arguments = {*inspect.signature(fb.run).parameters, *inspect.signature(fb.load).parameters} - {"settings"}
    classes = [*CORE_SETTINGS, *(plugin.cls.Settings for plugin in registry.plugins.values()
                                 if plugin.kind != "metric")]
    assert not arguments & {f.name for cls in classes for f in fields(cls)}


# Reading

def test_load_reads_a_record_or_narrows_a_folder(folder, results):
    single = fb.load(results.folders[1])
    assert single.seeds == [1] and single.method == "f3crec"
    assert single.compare("ft")["seeds"].tolist() == ["1"]  # the records beside it
    assert fb.load(folder, "FT", "FedMF", "ML-100K", k_core=80, topk=20).seeds == [0, 1]
    for arguments, settings, words in (
            ((), {}, "several methods.*f3crec, ft"), (("reg",), {}, "unknown method"),
            (("ft",), {"k_core": 9}, "found 9, accepted.*80"), (("ft",), {"k_cor": 9}, "Did you mean 'k_core'")):
        with pytest.raises(fb.UserError, match="(?s)" + words):
            fb.load(folder, *arguments, **settings)
    for wrong, words in (({"folder": folder / "nowhere"}, "no folder"), ({"folder": 3}, "load: found folder=3"),
                         ({"method": 3}, "load: found method=3"), ({"dataset": 3}, "load: found dataset=3")):
        with pytest.raises(fb.UserError, match=words):
            fb.load(**{"folder": folder, **wrong})


def test_seeds_need_not_have_the_same_extra_metrics(results):
    first, second = ({**json.loads((path / "run.json").read_text()), "record": "", "reused": True}
                     for path in results.folders)
    for part in ("metrics", "continual"):
        first[part] = {"novelty@20": first[part]["ndcg@20"], **first[part]}
        assert list(seeds.combined([first, second])[part]) == list(second[part])


@pytest.mark.parametrize("method, name, others, wrong", [
    ("f3crec", "eps", (0.001, 0.009), 0.5), ("ft", "evaluate_every", (1, 2), 3)])  # records leave the default 1 out
def test_load_names_the_settings_that_differ(registry, tmp_path, method, name, others, wrong):
    for value in others:
        fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", ((name, value),)), 0, level(0.1))
    with pytest.raises(fb.UserError, match=rf"{name} \({others[0]}, {others[1]}\)"):
        fb.load(tmp_path)
    with pytest.raises(fb.UserError, match=f"found {wrong}, accepted.*{others[0]}, {others[1]}"):
        fb.load(tmp_path, **{name: wrong})
    for value in others:
        assert fb.load(tmp_path, **{name: value}).settings.get(name, 1) == value
        assert fb.load(tmp_path, **{name: str(value)}).settings.get(name, 1) == value
    fabricate(tmp_path, registry, RunSpec(method, "fedmf", "ml-100k", (("stream", "static"),)), 0, level(0.1))
    with pytest.raises(fb.UserError, match=r"in settings: stream \(blocks, static\); (.*\n)*.* with stream=VALUE"):
        fb.load(tmp_path)


def test_load_refuses_what_has_not_finished(tmp_path, registry):
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", TINY)])
    record = Record.of(config.name, tmp_path)
    record.folder.mkdir(parents=True)
    record.fail(failed(config, "diverged"))
    with pytest.raises(fb.UserError, match="has no finished run"):
        fb.load(record.folder)


def test_compact_records(results):
    """They have no model, so ids come from the data."""
    published = fb.load(ROOT / "results/published/f3crec", "f3crec", "fedmf", "ml-100k", without="none",
                        reset_private=False)
    assert published.seeds == list(range(20))
    assert set(results.users["user"]) < set(published.users["user"])
    with pytest.raises(fb.UserError, match="Compact records have none"):
        published.model()
    # They are older than the count of test interactions in a record.
    ft = fb.load(ROOT / "results/published/f3crec", "ft", "fedmf", "ml-100k")
    assert ft.table().loc["ndcg@20", "avg 1-3"] in repr(ft) and "test users per block" in ft._repr_html_()
    row = published.compare("ft", tuned=ROOT / "results/tuned").iloc[0]  # as the README has it
    assert round(row["difference"], 4) == 0.0025 and round(row["p"], 4) == 0.2482 and row["users"] == 482


# Frames

def test_frames_hold_what_records_hold(results, ml100k):
    run = results.runs[1]
    metrics, users = results.metrics, results.users
    assert list(metrics) == ["seed", "trained_block", "tested_block", "metric", "mean", "users"]
    assert list(users) == ["seed", "trained_block", "tested_block", "user", "metric", "value"]
    recorded = pd.read_parquet(run.path / "metrics.parquet").rename(columns={"mean": "recorded", "users": "n"})
    both = metrics[metrics["seed"] == 1].merge(recorded)
    assert len(both) == len(recorded) and (both["users"] == both["n"]).all()
    assert np.allclose(both["mean"], both["recorded"])
    means = users.groupby(["seed", "trained_block", "tested_block", "metric"])["value"].mean()
    assert np.allclose(metrics.set_index(["seed", "trained_block", "tested_block", "metric"])["mean"].sort_index(),
                       means.sort_index())
    assert set(users["user"]) <= set(ml100k.user_tokens.tolist()) and users["user"].map(type).eq(str).all()
    assert len(results.rounds) == 8 and list(results.rounds)[:3] == ["seed", "step", "round"]
    matrix = results.matrix
    assert list(matrix) == ["seed", "metric", "trained_block", 0, 1, 2, 3]
    r = matrix.query("seed == 0 and metric == 'ndcg@20'").set_index("trained_block")[[0, 1, 2, 3]].to_numpy()
    assert np.isnan(r[np.triu_indices(4, 1)]).all()
    assert np.diag(r).tolist() == results.runs[0].meta["metrics"]["ndcg@20"]["per_block"]


def test_users_have_their_original_ids(results, folder, tmp_path):
    """With the model, without it, and as the data has them: its user with most test items in block 0."""
    config = results.model().config
    stream = load_stream(config.source, config.stream)
    users = results.users
    first = users[(users["seed"] == 0) & (users["tested_block"] == 0) & (users["trained_block"] == 0)]
    assert set(first["user"]) == set(stream.user_tokens[:stream.steps[0].n_users][
        (stream.steps[0].test.lengths > 0).numpy()].tolist())
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for model in copy.glob("runs/*/model.pt"):
        model.unlink()
    without = fb.load(copy, "f3crec")
    pd.testing.assert_frame_equal(without.users, users)
    with pytest.raises(fb.UserError, match="no model.*is missing"):
        without.model()


def test_frames_are_copies(results):
    results.rounds["loss"] = 0.0
    results.metrics["mean"] = 0.0
    results.settings["rounds"] = 0
    assert results.rounds["loss"].any() and results.metrics["mean"].any() and results.settings["rounds"] == 1


# Comparing and looking

def test_compare_is_the_commands(results, folder, capsys):
    assert main(["compare", "f3crec", "ft", "--backbone", "fedmf", "--records", str(folder), "--json",
                 *(word for name, value in TINY.items() for word in ("--set", f"{name}={value}"))]) == 0
    (expected,) = json.loads(capsys.readouterr().out)["comparisons"]
    row = results.compare("ft").iloc[0]
    for name, key in (("difference", "difference"), ("low", "low"), ("high", "high"), ("t", "t"), ("p", "p"),
                      ("p_holm", "p_holm"), ("p_sign_flip", "p_permutation"), ("d_z", "effect"), ("users", "n")):
        assert row[name] == expected["per_user"][key], name
    assert row["seeds"] == "0, 1" and row["seed_difference"] == expected["per_seed"]["difference"]
    pd.testing.assert_frame_equal(results.compare(fb.load(folder, "ft")), results.compare(["ft"]))
    with pytest.raises(fb.UserError, match="ft and ft \\(2\\) are the same runs; leave one"):
        results.compare([fb.load(folder, "ft"), fb.load(folder, "ft")])
    with pytest.raises(fb.UserError, match="ft \\(2\\) and ft are the same runs"):
        results.compare([fb.load(folder, "ft"), "ft"])
    last = results.compare("ft", metric="recall@20", blocks=[3])
    assert last["difference"].iloc[0] != row["difference"]
    pd.testing.assert_frame_equal(results.compare("ft", metric="recall@20", blocks=3), last)


def test_attacked_runs_beside_others(tmp_path, monkeypatch):
    """Loaded apart, each compared with a run under the same attack; read from another folder than they were made in."""
    monkeypatch.chdir(tmp_path)
    attack = {"attack": "clusterattack", "malicious": 0.2, "clusters": 3}
    plain, attacked, _ = (fb.run(method, "fedmf", progress=False, **TINY, **more) for method, more in (
        ("ft", {}), ("ft", attack), ("kd", attack)))
    assert fb.load("results", "ft", attack="none").folders == plain.folders
    assert fb.load("results", "ft", clusters=3).folders == attacked.folders
    monkeypatch.chdir("/")
    assert len(attacked.users)
    monkeypatch.chdir(tmp_path)
    assert attacked.compare("kd")["seeds"].tolist() == ["0"]


def test_of_runs_that_predict_ratings_the_one_with_the_most_metrics_is_compared(tmp_path):
    """They are known by their column of ratings, too."""
    same = {**TINY, "dim": np.int64(8), "loss": "squared_error", "valid_metric": "rmse", "results": tmp_path,
            "progress": False}
    reg, _, fuller = (fb.run(method, "biasmf", **same, **more) for method, more in (
        ("reg", {}), ("ft", {}), ("ft", {"extra_metrics": "novelty"})))
    row = reg.compare("ft", metric="rmse").iloc[0]
    assert row["difference"] == reg.compare(fuller, metric="rmse").iloc[0]["difference"]


def test_compare_says_how_to_make_what_is_missing(results, folder):
    call = rf"fb\.run\('kd', 'fedmf', 'ml-100k', seeds=2, results='{folder}', k_core=80, rounds=1\)"
    for others, words in (("KD", f"(?s)no record.*{call}"), ("ftt", "unknown method 'ftt'"), ("f3crec", "same runs"),
                          ([], "no other method"), (3, "compare: found 3, accepted: methods, as 'ft'"),
                          (["ft", 3], "compare: found 3")):
        with pytest.raises(fb.UserError, match=words):
            results.compare(others)
    for arguments, words in (({"blocks": "1-3"}, "compare: found blocks='1-3', accepted: a whole number from 0 to 3"),
                             ({"blocks": [1, 4]}, "found blocks=4"), ({"blocks": []}, "found no blocks"),
                             ({"metric": 3}, "compare: found metric=3"), ({"tuned": 3}, "compare: found tuned=3"),
                             ({"metric": "recall@7"}, "lengths come from runs with topk=20,50")):
        with pytest.raises(fb.UserError, match=words):
            results.compare("ft", **arguments)


def test_compare_with_what_needs_no_backbone_or_trains_no_clients(tmp_path, registry):
    """Of the settings that the results change, another method has those that have an effect with it."""
    shared = ("rounds", 3),
    fabricate(tmp_path, registry, RunSpec("ft", "fedmf", "ml-100k", (*shared, ("dim", 8), ("negatives", 2))), 0,
              level(0.1))
    results = fb.load(tmp_path)
    with pytest.raises(fb.UserError, match=r"fb\.run\('popularity', 'none', 'ml-100k', seeds=1, .*, rounds=3\)"):
        results.compare("popularity")
    for method, backbone, own in (("popularity", "none", ()), ("central", "fedmf", (("dim", 8),))):
        fabricate(tmp_path, registry, RunSpec(method, backbone, "ml-100k", (*shared, *own)), 0, level(0.05))
        other = fb.load(tmp_path, method)
        assert results.compare([method])["difference"].tolist() == pytest.approx([0.05])
        pd.testing.assert_frame_equal(results.compare(other), results.compare(method))


@pytest.fixture(scope="module")
def own_data(tmp_path_factory):
    """A results folder with a run on a file anywhere, given as a path: ML-100K's rows, with a YAML file beside them."""
    folder = tmp_path_factory.mktemp("own-data")
    (folder / "data").mkdir()
    shutil.copy(bundled("ml-100k") / "ml-100k.inter", folder / "data" / "mine.inter")
    (folder / "data" / "mine.yaml").write_text("settings: {k_core: 70, rounds: 1, dim: 8}\n")
    return folder, fb.run("ft", "fedmf", str(folder / "data" / "mine.inter"), results=folder / "r", progress=False)


def test_a_dataset_given_as_a_path(own_data):
    """The results know its folder; what is loaded later must be told."""
    folder, made = own_data
    assert made.dataset == "mine" and made.settings["k_core"] == 70
    user = made.model().user_ids[0]
    best = made.recommend(user)
    for place in ({"data_dir": folder / "data"}, {"dataset": str(folder / "data")},
                  {"dataset": str(folder / "data" / "mine.inter")}):
        pd.testing.assert_frame_equal(fb.load(folder / "r", **place).recommend(user), best)
    for place in ({}, {"data_dir": folder}):
        with pytest.raises(fb.UserError, match=r"(?s)found no data of it.*folder with mine.inter: data_dir=DIR"):
            fb.load(folder / "r", **place).recommend(user)
    with pytest.raises(fb.UserError, match="no such file"):
        fb.load(folder / "r", dataset=str(folder / "other.inter"))


def test_the_suggested_call_makes_what_is_missing(own_data, tmp_path):
    """On data of one's own, where the YAML file beside it sets what all methods have, and with plugins of one's own."""
    folder, made = own_data
    (tmp_path / "mine.py").write_text('from fedcl_bench import Method\n\n\nclass Mine(Method):\n'
                                      '    name = "mine-call"\n    title = "nothing"\n')
    made = fb.load(folder / "r", "ft", data_dir=folder / "data", plugins=tmp_path)
    with pytest.raises(fb.UserError) as error:
        made.compare("Mine-Call:lr=0.5")
    call = str(error.value).rpartition("Make it with: ")[2]
    assert call == (f"fb.run('mine-call', 'fedmf', 'mine', seeds=1, results={str(folder / 'r')!r}, "
                    f"data_dir={str(folder / 'data')!r}, plugins={str(tmp_path)!r}, lr='0.5')")
    other = eval(call.replace("seeds=1", "progress=False"), {"fb": fb})
    assert other.method == "mine-call" and len(other.recommend(other.model().user_ids[0])) == 10
    assert made.compare("Mine-Call:lr=0.5")["users"].iloc[0] > 100
    spec = RunSpec("ft", "fedmf", "mine")
    assert ", 'mine', seeds=2, results=" in made._origin.call(spec, {}, {0, 1})
    assert ", 'mine', seeds=3, first_seed=4, " in made._origin.call(spec, {}, {4, 6})


def test_other_methods_get_the_streams_settings(tmp_path):
    """A static stream has defaults of its own, of which one is changed back to the plain default."""
    settings = {"stream": "static", "rounds": 1, "k_core": 80, "dim": 8, "candidates": "all", "patience": 30}
    for method, lr in (("ft", 0.5), ("reg", 0.5)):
        fb.run(method, "fedmf", results=tmp_path, progress=False, lr=lr, **settings)
    assert fb.load(tmp_path, "ft").compare("reg")["against"].tolist() == ["reg"]


def test_plots(results):
    from matplotlib.figure import Figure

    for figure in (results.plot(), results.plot("matrix"), results.plot("matrix", "recall@20")):
        assert isinstance(figure, Figure) and figure._repr_png_().startswith(b"\x89PNG")
    for arguments, words in ((("heat",), "kind of plot"), (("matrix", "recall@7"), "recall@7"),
                             (("rounds", "recall@20"), "with kind='rounds': ndcg@20")):
        with pytest.raises(fb.UserError, match=words):
            results.plot(*arguments)


def test_what_a_notebook_shows_is_escaped(results, monkeypatch):
    html = results._repr_html_()
    assert results.table().iloc[0, 0] in html and "f3crec on fedmf" in html and str(results.folders[0]) in html
    assert "test users per block" in html and repr(results).startswith("f3crec on fedmf, ml-100k; seeds 0, 1")
    evil = "<script>alert(1)</script>"
    for run in results.runs:
        monkeypatch.setitem(run.meta, "dataset", evil)
    other = fb.Results(results.runs, results._origin)
    other.folders = [Path(evil)]
    monkeypatch.setattr(other, "table", lambda: pd.DataFrame({evil: [evil]}, index=[evil]))
    assert "<script" not in other._repr_html_()


# Recommending

@pytest.mark.parametrize("method, settings", [
    ("ft", {"k_core": 80}), ("rlp2", {"k_core": 80, "blocks": 2, "base_share": 0.8}),
    ("central", {"k_core": 80})])  # which ignores settings of clients
def test_recommendations_are_the_lists_that_were_tested(tmp_path, method, settings):
    """With nothing but the last block's train and valid items masked, a user's hits are those of the record."""
    found = fb.run(method, "fedmf", results=tmp_path, progress=False, rounds=2, topk=10, valid_metric="ndcg@10",
                   **settings)
    model = found.model()
    step = model.stream.steps[-1]
    users = found.users[found.users["metric"] == "hit@10"]
    users = users[(users["trained_block"] == step.index) & (users["tested_block"] == step.index)].head(25)
    for user, hit in zip(users["user"], users["value"]):
        row = model.row(user)
        scores = model.scores(user)
        scores[np.concatenate([step.train.of(row).numpy(), step.valid.of(row).numpy()])] = -np.inf
        listed = np.argsort(-scores, kind="stable")[:10]
        assert bool(set(listed) & set(step.test.of(row).tolist())) == bool(hit)


def test_what_follows_a_session_is_what_was_tested(tmp_path):
    """FCUCR ranks by prototypes, which are its state; nothing is masked there."""
    found = fb.run("fcucr", "sasrec", results=tmp_path, progress=False, stream="sessions", rounds=1, dim=8,
                   max_length=5, min_session_length=10, topk=90, valid_metric="hit@90")
    model, users = found.model(), found.users[found.users["metric"] == "all:hit@90"].head(30)
    for user, hit in zip(users["user"], users["value"]):
        target = model.item_ids[model.stream.steps[0].test.of(model.row(user))[0]]
        assert (target in set(model.recommend(user, 90, mask_seen=False)["item"])) == bool(hit)
    assert users["value"].sum() > 0
    step = model.stream.steps[0]
    nobody = replace(step.sessions["test"], of_user=torch.zeros_like(step.sessions["test"].of_user))
    model.__dict__["stream"] = replace(model.stream, steps=(replace(step, sessions={**step.sessions, "test": nobody}),))
    with pytest.raises(fb.UserError, match="no test session"):
        model.recommend(model.user_ids[0])


def test_recommendations_have_original_ids_and_leave_out_what_was_seen(results):
    model = results.model(1)
    stream, user = model.stream, model.user_ids[3]
    seen = {item for step in stream.steps for split in ("train", "valid", "test") if 3 < step.n_users
            and (split, step.index) != ("test", 3) for item in step.split(split).of(3).tolist()}
    best = results.recommend(user, k=5, seed=1)
    assert list(best) == ["rank", "item", "score"] and best["rank"].tolist() == [1, 2, 3, 4, 5]
    assert best["score"].is_monotonic_decreasing and set(best["item"]) <= set(stream.item_tokens.tolist())
    assert not set(best["item"]) & set(stream.item_tokens[sorted(seen)].tolist())
    everything = results.recommend(user, k=10_000, seed=1)
    assert len(everything) == len(stream.item_tokens) - len(seen)
    assert len(results.recommend(int(user), 10_000, 1, mask_seen=False)) == len(stream.item_tokens)
    for call, words in ((lambda: results.recommend("nobody"), "unknown user 'nobody'"),
                        (lambda: results.recommend(user, 0), "k=0"),
                        (lambda: results.model("0"), "model: found seed='0'"), (lambda: results.model(7), "seed 7")):
        with pytest.raises(fb.UserError, match=words):
            call()


def test_data_that_has_changed_is_refused(results, folder, tmp_path):
    """Original ids and seen items would be those of other data."""
    config = results.model().config
    (tmp_path / "ml-100k").mkdir()
    text = config.source.path.read_text()
    (tmp_path / "ml-100k" / "ml-100k.inter").write_text(text[:text.rindex("\n", 0, -1) + 1])
    other = fb.load(folder, "f3crec", data_dir=tmp_path)
    with pytest.raises(fb.UserError, match="other data"):
        other.recommend(other.model().user_ids[0])
