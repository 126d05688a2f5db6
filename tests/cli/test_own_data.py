"""Data that lies anywhere: by path, with its own YAML file, unfiltered; names in any case; RecBole's names."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.data.datasets import load_stream, thin_note
from fedcl_bench.data.files.recbole_files import bundled
from fedcl_bench.data.source import (DatasetConfig, config_file, configured, dataset_name, find_file, load_config,
                                     locate, spelled)
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments.grid import make_tasks
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.specs import RunSpec, spelled_spec, tuned_file
from fedcl_bench.records.store import load_runs
from fedcl_bench.reports.selection import matching

QUICK = ["--set", "rounds=1", "--set", "blocks=2", "--set", "dim=4"]


@pytest.fixture
def mine():
    """An atomic file far from ``./data``: 20 users, 45 items, 6 rows per user in the second of two blocks."""
    path = Path("far/away/mine.inter")
    path.parent.mkdir(parents=True)
    rows = "".join(f"u{i % 20}\ti{i * 7 % 45}\t{i}\n" for i in range(300))
    path.write_text("user_id:token\titem_id:token\ttimestamp:float\n" + rows)
    return path


@pytest.mark.parametrize("given", ["far/away/mine.inter", "./far/away", "far/away/", "../{here}/far/away/mine.inter"])
def test_paths_of_files_and_folders(output, run_json, registry, mine, given):
    """Records are found by the path and by the name."""
    given = given.format(here=Path.cwd().name)
    result = run_json("--method", "ft", "--backbone", "fedmf", "--dataset", given, *QUICK)[0]
    assert result["dataset"] == "mine" and result["settings"]["k_core"] == 0
    record = Path(result["record"])
    assert record.parent == Path("results/runs") and record.name.startswith("ft-fedmf-mine-s0-")
    assert "away/mine.inter" in output("data", given)
    settings = tuple(pair.split("=") for pair in QUICK[1::2])
    for dataset in ("mine", given):
        assert len(matching(load_runs(Path("results")), registry, RunSpec("ft", "fedmf", dataset, settings))) == 1


def test_grids_tunings_and_audits_take_paths(same_process, output, run_json, mine):
    cells = ["--backbones", "fedmf", "--datasets", str(mine), *QUICK, "--jobs", "1", "--quiet"]
    runs = run_json("grid", "--methods", "FT", *cells)[0]["runs"]
    assert [(r["method"], r["dataset"]) for r in runs] == [("ft", "mine")]
    output("tune", "--methods", "ft", *cells, "--budget", "1", "--out", "tuned")
    assert Path("tuned/mine-fedmf-ft.json").is_file()
    output("audit", "--method", "FT", "--backbone", "fedmf", "--dataset", str(mine), "--noise", "0", "--rounds", "1",
           *QUICK[2:], "--quiet")
    assert Path("results/audits/ft-fedmf-mine/audit.json").is_file()
    assert {path.name for path in Path("results/audits").iterdir()} == {"ft-fedmf-mine"}


def test_names_of_records_are_safe(mine):
    for name in ("..", "a\nb", "-x", "a/b"):
        with pytest.raises(UserError):
            locate(name, Path("far/away"), StreamSettings())
    assert dataset_name(str(mine)) == "mine" and tuned_file(Path("t"), "ft", "recbole:BPR", str(mine)) == Path(
        "t/mine-recbole-BPR-ft.json")
    Path("shop").mkdir()
    with pytest.raises(UserError, match="use ./shop"):
        find_file("shop", None)


def test_what_recbole_bundles_is_found_whatever_data_dir_holds(registry, mine, output):
    """By run, grid and tune, which ask `make_tasks` and `make_config`, and by `data`; one's own copy comes first."""
    folder = Path("far/away")
    config = make_config(registry, "ft", "fedmf", "ml-100k", data_dir=folder)
    assert config.source.path == bundled("ml-100k") / "ml-100k.inter"
    tasks = make_tasks(registry, [RunSpec("ft", "fedmf", "ml-100k")], [0], folder)
    assert [task.config.hash for task in tasks] == [config.hash]
    assert "All counts are those expected" in output("data", "ml-100k", "--data-dir", str(folder))
    (folder / "ml-100k.inter").write_bytes(mine.read_bytes())
    assert find_file("ml-100k", folder) == folder / "ml-100k.inter"
    with pytest.raises(UserError, match="not a folder"):
        find_file("ml-100k", Path("absent"))


# No filter

def test_datasets_that_are_not_shipped_are_not_filtered(registry, mine):
    def k_core(dataset, **options):
        return make_config(registry, "ft", "fedmf", dataset, **options).stream.k_core
    assert k_core(str(mine)) == 0 and k_core("ml-100k") == 10
    assert k_core(str(mine), overrides=[("--set", {"k_core": "3"})]) == 3
    mine.with_suffix(".yaml").write_text("settings: {k_core: 4}\n")
    assert k_core(str(mine)) == 4


def test_thin_blocks_get_a_note(capsys, output):
    rows = "".join(f"u{i // 2}\ti{i % 40}\t{i}\n" for i in range(400)) + "".join(
        f"u0\ti{i}\t{i * 10}\n" for i in range(40))
    Path("thin.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + rows)
    stream = load_stream(locate("./thin.inter", None, StreamSettings(k_core=0)), StreamSettings(k_core=0))
    note = thin_note(stream, StreamSettings(k_core=0))
    assert "blocks are thin" in note and "--set k_core=5" in note
    assert not thin_note(stream, StreamSettings(k_core=5)) and not thin_note(stream, StreamSettings(stream="static"))
    assert note in output("data", "./thin.inter")
    main(["--method", "ft", "--backbone", "fedmf", "--dataset", "./thin.inter", *QUICK])
    assert "blocks are thin" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["blocks", "static"])
def test_items_to_test_that_are_not_ranked_get_a_note(output, stream):
    """By hand: u1 has a again in its test, u2 has x again, which is to be found once however often it is there."""
    rows = [("u1", "abcdea"), ("u2", "xyzwxx"), ("u3", "abcdef"), ("u4", "abbbbc")]
    Path("again.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(
        f"{user}\t{item}\t{time}\n" for user, items in rows for time, item in enumerate(items)))
    settings = ["--set", "stream=static"] if stream == "static" else [
        "--set", "blocks=1", "--set", "base_split=chronological"]
    assert "note: 2 of 4 items to test cannot be found: their user also trains" in output(
        "data", "./again.inter", *settings)


def test_what_a_yaml_file_says_in_vain_is_said(output, capsys):
    """Names of counts that nothing has, and events to drop on a stream of blocks or that no row has."""
    Path("some.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\tkind:token\n" + "".join(
        f"u{i % 9}\ti{i % 13}\t{i // 27 * 9000 + i % 27}\tview\n" for i in range(300)))
    Path("some.yaml").write_text("EVENT_FIELD: kind\ndrop_events: [view]\n")
    assert "note: drop_events is for streams of sessions alone: rows of view are kept here" in output(
        "data", "./some.inter")
    Path("other.inter").write_bytes(Path("some.inter").read_bytes())
    assert "rows of view are kept here" in output("data", "./some.inter+./other.inter")
    Path("some.yaml").write_text("EVENT_FIELD: kind\ndrop_events: [veiw]\nsettings: {stream: sessions}\n")
    assert "note: drop_events names 'veiw', which no row has in the column kind; it has view." in output(
        "data", "./some.inter")
    Path("some.yaml").write_text("expected: {users: [9, 9, 9, 9], interactions: [180, 40, 40, 40]}\n")
    assert main(["data", "./some.inter"]) == 1
    said = capsys.readouterr().out
    assert "NOT COMPARED are the expected counts users; names of counts here: accumulated_users" in said
    assert "DIFFERS" not in said and "All counts" not in said


# A data set's YAML file

def test_a_yaml_file_beside_the_data_or_in_dataset_configs(registry, mine):
    text = mine.read_text().replace("user_id", "who").replace("item_id", "what")
    mine.write_text(text)
    fields = "USER_ID_FIELD: who\nITEM_ID_FIELD: what\nsettings: {blocks: 2, rounds: 3}\n"
    places = [(mine.with_suffix(".yaml"), str(mine), None), (mine.with_suffix(".yaml"), "mine", Path("far/away")),
              (Path("dataset_configs/mine.yaml"), str(mine), None),
              (Path("dataset_configs/mine.yaml"), "mine", Path("far/away"))]
    hashes = set()
    for path, dataset, data_dir in places:
        path.parent.mkdir(exist_ok=True)
        path.write_text(fields)
        config = make_config(registry, "ft", "fedmf", dataset, data_dir=data_dir)
        assert (config.stream.blocks, config.server.rounds) == (2, 3), path
        assert len(load_stream(config.source, config.stream).user_tokens) == 20
        hashes.add(config.hash)
        path.unlink()
    assert len(hashes) == 1


def test_a_yaml_file_of_other_data_of_that_name_is_not_read(registry, mine):
    Path("data").mkdir()
    Path("data/mine.yaml").write_text("settings: {blocks: 2}\n")
    assert make_config(registry, "ft", "fedmf", "mine", data_dir=Path("far/away")).stream.blocks == 4
    Path("data/mine.inter").write_bytes(mine.read_bytes())
    assert make_config(registry, "ft", "fedmf", "mine").stream.blocks == 2


def test_other_columns_are_another_run(registry, mine):
    before = make_config(registry, "ft", "fedmf", str(mine)).hash
    mine.with_suffix(".yaml").write_text("USER_ID_FIELD: item_id\nITEM_ID_FIELD: user_id\n")
    swapped = make_config(registry, "ft", "fedmf", str(mine))
    assert swapped.hash != before
    plain = replace(swapped, source=replace(swapped.source, config=DatasetConfig()))
    assert plain.hash == before


# Names

def test_names_ignore_case(output, run_json, registry, mine):
    config = make_config(registry, "F3CRec", "FedMF", "ML-100K")
    assert config.name == make_config(registry, "f3crec", "fedmf", "ml-100k").name
    spec = spelled_spec(registry, RunSpec("F3CREC", "FedMF", "Ml-100k"))
    assert (spec.method, spec.backbone, spec.dataset) == ("f3crec", "fedmf", "ml-100k")
    assert spelled("MINE", Path("far/away")) == "mine" and spelled("nothing") == "nothing"
    assert load_config(spelled("XING")) == load_config("xing") and config_file("xing") == configured()["xing"]
    result = run_json("--method", "FedMF", "--dataset", "MINE", "--data-dir", "far/away", *QUICK)[0]
    assert (result["method"], result["backbone"], result["dataset"]) == ("ft", "fedmf", "mine")
    for name in ("F3CRec", "FedMF", "ML-100K"):
        assert name.lower() in output("list", name)
    small, capitals = (make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"valid_metric": text})])
                       for text in ("ndcg@10", "NDCG@10"))
    assert small.hash == capitals.hash and capitals.evaluation.valid_metric == "ndcg@10"


@pytest.mark.parametrize("name,words", [
    ("learning_rate", "RecBole's 'learning_rate' is 'lr' here"), ("LEARNING-RATE", "'learning_rate' is 'lr' here"),
    ("epochs", "is 'rounds' and 'local_epochs' here"), ("eval_batch_size", "no counterpart here"),
    ("train_neg_sample_args", "is 'negatives' and"), ("metrics", "always computed"), ("gpu_id", "the option --device"),
    ("max_item_list_length", "unknown setting"),  # of sequences, which FedMF has not
    ("lrr", "Did you mean 'lr'")])
def test_settings_of_recbole_are_understood(refused, name, words):
    assert words in refused("--method", "ft", "--backbone", "fedmf", "--set", f"{name}=1")
