"""The command line as a user meets it: results, JSON, bad input."""

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedcl_bench.cli import Extend, main as entry
from fedcl_bench.cli.commands.grid import _grid_fields
from fedcl_bench.cli.main import main
from fedcl_bench.cli.show import print_table
from fedcl_bench.data.files.recbole_files import bundled
from fedcl_bench.data.source import load_config

RUN = ["--method", "f3crec", "--backbone", "fedmf"]
QUICK = ["--set", "rounds=2"]
SMALL = [*QUICK, "--set", "k_core=80"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A results folder with F3CRec on FedMF, and what the command printed of it as JSON and beside it."""
    results, out, err = tmp_path_factory.mktemp("first") / "results", io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main([*RUN, *QUICK, "--set", "topk=5,20", "--results", str(results), "--json"]) == 0
    return results, json.loads(out.getvalue()), err.getvalue()


def test_json_has_the_promised_fields_and_the_released_settings(first):
    _, result, err = first
    assert {"method", "backbone", "dataset", "seed", "settings", "metrics", "rounds", "seconds", "peak_memory_mib",
            "record"} <= set(result)
    assert (result["method"], result["backbone"], result["dataset"], result["seed"]) == (
        "f3crec", "fedmf", "ml-100k", 0)
    for name in ("ndcg@20", "recall@20"):
        values = result["metrics"][name]
        assert len(values["per_block"]) == 4
        assert values["avg_incremental"] == pytest.approx(np.mean(values["per_block"][1:]))
    assert result["rounds"] == [2, 2, 2, 2]
    assert set(result["seconds"]) == {"total", "train", "evaluate"} and result["seconds"]["total"] > 0
    assert Path(result["record"]).is_dir() and 100 < result["peak_memory_mib"] < 4096
    assert "block 3" in err  # progress went to standard error
    expected = dict(lr=1.0, dim=32, lambda_kd=0.1, eps=0.006, top_n=30, beta=0.9, patience=30, batch_size=512,
                    negatives=4, local_epochs=1, client_ratio=1.0, inc_split="chronological", init_from="last")
    assert {name: result["settings"][name] for name in expected} == expected
    assert load_config("ml-100k").settings["rounds"] == 100


def test_bytes_and_matrix_of_a_record(first):
    _, result, _ = first
    tables = [4 * 32 * n for n in (1136, 1146, 1148, 1152)]
    assert result["bytes"]["up_per_client_round"] == tables == result["bytes"]["down_per_client_round"]
    rounds = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
    down = rounds[rounds["round"] == 0].bytes_down.tolist()
    assert down == [tables[0], *(new + old for new, old in zip(tables[1:], tables))]  # + the teacher's table, once
    assert result["bytes"]["total_up"] == int((rounds.bytes_up * rounds.participants).sum())
    assert rounds.groupby("step").participants.first().tolist() == [587, 217, 238, 207]
    users = pd.read_parquet(Path(result["record"]) / "users.parquet")
    assert set(users.metric) == {f"{m}@{k}" for m in ("ndcg", "recall", "hit", "precision", "mrr") for k in (5, 20)}
    for t in range(4):
        assert len(result["matrix"]["ndcg@20"][t]) == t + 1
        for s in range(t + 1):
            mine = users[(users.trained_block == t) & (users.tested_block == s) & (users.metric == "ndcg@20")]
            assert len(mine) == (586, 199, 222, 190)[s]
            assert mine.value.mean() == pytest.approx(result["matrix"]["ndcg@20"][t][s])
    assert result["privacy"]["uploaded"] == ["item_embedding.weight"]
    assert result["privacy"]["kept_at_client"] == ["user_embedding.weight", "lists", "teacher"]


def test_table_and_record_on_standard_output(first, capsys, output):
    """With the numbers of test users beside the metrics, which are those of the stream."""
    results, result, err = first
    assert main(["run", *RUN, *QUICK, "--set", "topk=5,20", "--results", str(results), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert all(words in captured.out for words in ("avg 1-3", "ndcg@20", "test users", "test interactions"))
    assert f"record: {result['record']}" in " ".join(captured.out.split()) and "block 0: 2 rounds" in err
    assert captured.err == ""
    (note,) = result["notes"]
    assert note.startswith("still improving in the last round: validation of 2 of 4 blocks") and note in captured.out
    stream = " ".join(output("data", "ml-100k").split())
    for name, row in (("users", "users with test items"), ("interactions", "test")):
        assert f"{row} {' '.join(f'{number:,}' for number in result['tested'][name])} same" in stream


def test_several_seeds(output, run_json):
    result, _ = run_json(*RUN, *SMALL, "--seed", "3", "--seeds", "2")
    assert result["seeds"] == [3, 4] and len(result["runs"]) == 2
    single = [r["metrics"]["ndcg@20"]["avg_incremental"] for r in result["runs"]]
    assert single[0] != single[1]
    assert result["metrics"]["ndcg@20"]["avg_incremental"] == pytest.approx(np.mean(single))
    assert result["metrics"]["ndcg@20"]["avg_incremental_std"] == pytest.approx(np.std(single, ddof=1))
    assert "±" in output(*RUN, *SMALL, "--seed", "3", "--seeds", "2")


def test_config_file_and_precedence(run_json):
    Path("job.yaml").write_text("method: kd\nbackbone: fedmf\nseed: 5\nrounds: 1\nk_core: 70\n"
                               "lambda_kd: 0.3\ntop_n: 20\nreading: code\n")
    result, _ = run_json("--config", "job.yaml", "--set", "top_n=10", "--method", "f3crec", "--reading", "paper")
    assert result["readings"] == ["paper"]
    assert result["method"] == "f3crec" and result["seed"] == 5
    assert result["settings"]["lambda_kd"] == 0.3 and result["settings"]["top_n"] == 10


def test_split_file(run_json, shared):
    path = shared / "data" / "splits" / "ml-100k.f3crec_authors.tsv"
    result, _ = run_json(*RUN, *QUICK, "--set", f"split_file={path}")
    shutil.copy(path, "elsewhere.tsv")
    again, _ = run_json(*RUN, *QUICK, "--set", "split_file=elsewhere.tsv")
    assert "k_core" not in result["settings"] and result["settings"]["split_file"] == str(path)
    assert again["reused"] and again["hash"] == result["hash"]  # the file's bytes count, not its place


def test_no_number_of_a_wide_table_is_cut(capsys):
    print_table(["metric", *map(str, range(99))], [["ndcg@20", *["0.1234 ± 0.0123"] * 99]])
    assert capsys.readouterr().out.count("0.1234 ± 0.0123") == 99


def test_list_data_doctor(output):
    out = output("list")
    assert all(name in out for name in ("f3crec", "ft", "reg", "kd", "fedmf", "ml-100k", "lastfm-2k"))
    out = output("list", "f3crec")
    assert "eps = 0.006" in out and "searched: 0.001" in out and "CIKM" in out and "upload_noise" not in out
    assert "upload_noise = 0.0\n" in output("list", "f3crec", "--all")
    out = output("list", "f3crec", "--with", "fedncf", "--dataset", "lastfm-2k")
    assert "Values are those of f3crec on fedncf, lastfm-2k" in out
    assert "kd_reduction = sum   (--set reading; else mean)" in output("list", "f3crec", "--set", "reading=paper")
    out = output("list", "ffmsr")  # a backbone and a method, of domains
    assert "federated_rounds = 5\n" in out and "optimiser = adam   (backbone ffmsr; else sgd)" in out
    assert "topk = 10,50   (stream=domains; else 20)" in out
    assert "session_gap = 60.0   (dataset_configs/xing.yaml; else 30.0)" in output("list", "fcucr")
    assert "54,724" in output("list", "lastfm-2k")
    out = output("data", "ml-100k")
    assert "587" in out and "46,552" in out and "91.19" in out and "All counts are those expected" in out
    assert "expected" not in output("data", "ml-100k", "--set", "k_core=5")
    assert "Everything is in order." in output("doctor", "--results", "not/there/yet")


def test_data_reports_a_difference(capsys, tmp_path):
    source = (bundled("ml-100k") / "ml-100k.inter").read_text().splitlines()
    (tmp_path / "ml-100k.inter").write_text("\n".join(source[:-5000]) + "\n")
    assert main(["data", "ml-100k", "--data-dir", str(tmp_path)]) == 1
    assert "DIFFERS from the expected counts" in capsys.readouterr().out


def test_help_teaches(capsys):
    for arguments in (["--help"], ["run", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert "run_bench.py --method f3crec --backbone fedmf" in out and "  run_bench.py doctor" in out
    assert main([]) == 0


def test_no_device_and_results_that_cannot_be_written(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in refused(*RUN, "--device", "cuda")
    Path("file").write_text("")
    assert "cannot be written" in refused(*RUN, *QUICK, "--results", "file/results")


def test_divergence_stops_the_run_and_marks_the_record(refused):
    message = refused(*RUN, "--set", "lr=1e12", "--set", "init_std=1e10", status=1)
    assert all(word in message for word in ("diverged", "block 0", "round 1", "lr=1e+12", "Marked as failed"))
    record = json.loads(next(Path("results/runs").glob("*/run.json")).read_text())
    assert record["status"] == "failed" and "diverged" in record["error"]
    refused(*RUN, "--set", "lr=1e12", "--set", "init_std=1e10", status=1)  # a failed record is no result


def test_a_failed_record_counts_what_its_clients_did(capsys, run_json):
    job = ["--set", "rounds=3", "--set", "patience=0", "--set", "k_core=80"]
    assert main(["--method", "reg", "--backbone", "fedmf", *job, "--set", "lambda_reg=1e3"]) == 1
    capsys.readouterr()
    done, _ = run_json("--method", "ft", "--backbone", "fedmf", *job)
    rounds = pd.read_parquet(Path(done["record"]) / "rounds.parquet")
    failed = json.loads(next(Path("results/runs").glob("reg*/run.json")).read_text())
    full, part, *none = failed["client_updates"]  # block 0 is FT's, and in block 1 it diverges
    assert full == rounds[rounds.step == 0].participants.sum() and none == [0, 0]
    assert part < rounds[rounds.step == 1].participants.sum()


def test_a_federated_recommender_as_method_is_ft_on_it(run_json, refused):
    alone, _ = run_json("--method", "pfedrec", *SMALL)
    assert (alone["method"], alone["backbone"]) == ("ft", "pfedrec")
    again, _ = run_json("--method", "ft", "--backbone", "pfedrec", *SMALL)
    assert again["reused"] and again["hash"] == alone["hash"]
    message = refused("--method", "pfedrec", "--backbone", "fedmf", *QUICK)
    assert "method 'pfedrec' is a backbone" in message and "leave one of the two out" in message


def test_reimplementations_say_so(output):
    shown = output("--method", "rlp2", "--backbone", "fedmf", *SMALL)
    assert "rlp2 (re-implemented from its description) on fedmf" in shown
    out = output("list")
    assert [line.split()[0] for line in out.splitlines() if "[re-implementation]" in line] == ["ader", "rlp2", "spp"]


def test_a_list_that_is_given_twice_is_one_list():
    """`--add a --add b` keeps both, and so does every other option of a list; the default is not kept."""
    (subparsers,) = [action for action in entry.build_parser()._actions if action.dest == "command"]
    found = [(name, action) for name, parser in subparsers.choices.items() for action in parser._actions
             if isinstance(action, Extend)]
    assert {(name, action.dest) for name, action in found} >= {
        ("tables", "add"), ("grid", "methods"), ("compare", "datasets"), ("figures", "format"), ("check", "partners"),
        ("audit", "noise"), ("pack", "figure")}
    before = {"run": [], "compare": ["ft", "kd"], "headroom": ["kd"], "check": ["ft"], "pack": ["--out", "x"],
              "submit": ["--method", "x", "--author", "x", "--out", "x"],
              "sensitivity": ["ft", "--backbone", "fedmf"]}
    for name, action in found:
        option = action.option_strings[0]
        args = entry.parse([name, *before.get(name, []), option, "1,2", option, "3"])
        assert [str(value) for value in getattr(args, action.dest)] in (["1", "2", "3"], ["1.0", "2.0", "3.0"]), option
    args = entry.parse(["grid", "--vary", "eps=1,2", "--vary", "eps=3", "--vary", "beta=1"])
    assert _grid_fields(args)["vary"] == {"eps": ("1", "2", "3"), "beta": ("1",)}
