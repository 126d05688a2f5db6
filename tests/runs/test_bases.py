"""Block 0 as a file: what is exported and imported gives the same run, and what does not fit is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcl_bench.cli.main import main
from fedcl_bench.errors import UserError
from fedcl_bench.federation import loop
from fedcl_bench.federation.growth import grow
from fedcl_bench.federation.steps import begin_step
from fedcl_bench.method import Method, NoSettings
from fedcl_bench.model import Snapshot
from fedcl_bench.runs import bases
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.store import load_record

SMALL = ["--set", "rounds=2", "--set", "k_core=70", "--set", "init_from=best", "--set", "dim=4"]
ITEM, USER = "public/item_embedding.weight", "private/user_embedding.weight"


def run_json(capsys, results, *words, status=0):
    found = main(["--method", "kd", "--backbone", "fedmf", *SMALL, "--results", str(results), "--json", *words])
    captured = capsys.readouterr()
    assert found == status, captured.err
    return json.loads(captured.out) if status == 0 else captured.err


def imported(capsys, path, results):
    assert main(["base", "import", str(path), "--results", str(results)]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def base(tmp_path, capsys):
    """A run, and its block 0 as a file."""
    path = tmp_path / "base.npz"
    export = ["base", "export", "--backbone", "fedmf", *SMALL, "--results", str(tmp_path), "--out", str(path)]
    assert main(export) == 2
    assert "Make it with: run_bench.py --method ft --backbone fedmf" in capsys.readouterr().err
    first = run_json(capsys, tmp_path)
    assert main(export) == 0 and path.is_file()
    assert f"{ITEM}, {USER}" in capsys.readouterr().out
    return first, path


def test_a_run_from_its_own_base_is_the_same_run(base, tmp_path, capsys):
    """Whatever the order of the rows, and with rows that block 0 does not know."""
    first, path = base
    with np.load(path) as file:
        arrays = dict(file)
    order = {"user_ids": np.random.default_rng(0).permutation(len(arrays["user_ids"])),
             "item_ids": np.random.default_rng(1).permutation(len(arrays["item_ids"]))}
    other = {"user_ids": np.append(arrays["user_ids"][order["user_ids"]], "a stranger"),
             "item_ids": arrays["item_ids"][order["item_ids"]], ITEM: arrays[ITEM][order["item_ids"]],
             USER: np.vstack([arrays[USER][order["user_ids"]], np.ones((1, 4))]).astype(np.float64)}
    np.savez_compressed(tmp_path / "other.npz", **other)
    for file in (path, tmp_path / "other.npz"):
        name = imported(capsys, file, tmp_path)
        found = run_json(capsys, tmp_path, "--set", f"base_model={name}")
        assert all(found[part] == first[part] for part in ("metrics", "matrix", "lists", "groups"))
        assert load_record(Path(found["record"])).seed == 0  # it fits its schema
        assert found["rounds"] == [1, *first["rounds"][1:]] and found["best_round"][0] == 1
        assert found["settings"]["base_model"] == name and found["hash"] != first["hash"]
    np.savez(tmp_path / "again.npz", **arrays)  # other bytes, as they hold the time, and the same arrays
    assert imported(capsys, tmp_path / "again.npz", tmp_path) == imported(capsys, path, tmp_path) != name


def test_clients_begin_with_the_start_of_the_file(registry, ml100k, tmp_path):
    """New ones, and with reset_private all of a block, whatever the run's own seed draws."""
    def parts(seed):
        overrides = [("test", {"dim": 4, "base_model": name})]
        return make_config(registry, "ft", "fedncf", "ml-100k", seed, overrides).federation(ml100k)
    name = ""
    first, step = parts(0), ml100k.steps[0]
    model = grow(Snapshot({}, {}), first.backbone, 0, step, torch.float32, first.device)
    model = replace(model, start=bases.common_start(first.backbone, 0, model))
    assert set(model.start) == set(model.private)
    model = replace(model, private={table: rows + 1 for table, rows in model.private.items()})
    bases.export(tmp_path / "base.npz", model, ml100k.user_tokens, ml100k.item_tokens)
    name = bases.keep(tmp_path / "base.npz", tmp_path)
    other = parts(1)
    progress = loop.from_base(other, bases.load(other, tmp_path))
    progress, saved = replace(progress, step=1, round=0, trained=False), tmp_path / "checkpoint.pt"
    begun = begin_step(other, ml100k.steps[1], progress).model
    save_progress(saved, progress, 0.0)
    read = load_progress(saved, "cpu", other)[0].model.start
    assert read.keys() == model.start.keys() and all(torch.equal(read[table], model.start[table]) for table in read)
    trains = ml100k.steps[1].train.lengths > 0
    assert bool(trains[:step.n_users].any()) and not bool(trains[:step.n_users].all())
    for table, rows in begun.private.items():
        assert torch.equal(rows[trains], model.start[table].expand_as(rows[trains]))
        assert torch.equal(rows[:step.n_users][~trains[:step.n_users]], model.private[table][~trains[:step.n_users]])
    fedmf = registry.get("backbone", "fedmf").cls
    assert not bases.common_start(fedmf(fedmf.Settings()), 0, replace(model, start={}))  # its users begin differently


@pytest.mark.parametrize("change,message", [
    ({"user_ids": lambda ids: ids[1:]}, "1 users of block 0 are not in it, as"),
    ({"item_ids": lambda ids: np.append(ids, ids[:1])}, "it has the same item twice"),
    ({ITEM: lambda table: table[:, :3]}, r"'public/item_embedding.weight' is \(\d+, 3\), accepted: finite numbers"),
    ({ITEM: lambda table: table[:5]}, "'public/item_embedding.weight' is"),
    ({USER: lambda table: table * np.nan}, "finite numbers"),
    ({USER: lambda table: table.astype(int)}, "is missing or holds no numbers"),
    ({USER: None}, "'private/user_embedding.weight' is missing"),
    ({"start/user_embedding.weight": lambda _: np.zeros(3)}, r"is \(3,\), accepted: finite numbers, .* \(4,\)"),
    ({"start/bias": lambda _: np.zeros(3)}, "'start/bias' is none of this backbone's; accepted: start/user_embedding")])
def test_what_does_not_fit_is_refused(base, tmp_path, capsys, change, message):
    with np.load(base[1]) as file:
        arrays = {**dict.fromkeys(change), **file}
    arrays = {name: change[name](array) if change.get(name) else array for name, array in arrays.items()
              if change.get(name, 1) is not None}
    np.savez(tmp_path / "changed.npz", **arrays)
    name = imported(capsys, tmp_path / "changed.npz", tmp_path)
    assert re.search(message, run_json(capsys, tmp_path, "--set", f"base_model={name}", status=2))


def test_what_is_no_base_is_not_imported(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "pickled.npz", user_ids=np.array([{}], dtype=object), item_ids=np.array(["1"]))
    np.savez(tmp_path / "nameless.npz", table=np.zeros((2, 2)))
    np.savez_compressed(tmp_path / "swollen.npz", table=np.zeros(10 ** 6))
    for file, message in (("text.npz", "is no .npz file"), ("pickled.npz", "is no .npz file of tables without pickled"),
                          ("nameless.npz", "'user_ids' is missing"), ("absent.npz", "is not there"),
                          ("swollen.npz", "would unpack from")):
        assert main(["base", "import", str(tmp_path / file), "--results", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "shared").exists()


def test_a_changed_file_is_noticed(base, tmp_path, capsys):
    name = imported(capsys, base[1], tmp_path)
    with np.load(base[1]) as file:
        np.savez(bases.file_of(tmp_path, name), **{**file, ITEM: file[ITEM] + 1})
    assert "is not what was imported" in run_json(capsys, tmp_path, "--set", f"base_model={name}", status=2)
    for wrong in ("../base", "0" * 16):
        assert "accepted: what `base import FILE` prints" in run_json(
            capsys, tmp_path, "--set", f"base_model={wrong}", status=2)


def test_the_default_changes_no_name_and_others_are_refused(registry, ml100k):
    def config(method="ft", **settings):
        return make_config(registry, method, "fedmf", "ml-100k", overrides=[("test", settings)])
    assert config().hash == config(base_model="").hash != config(base_model="0" * 16).hash
    assert config().base_hash != config(base_model="0" * 16).base_hash
    with pytest.raises(UserError, match="'base_model'.*no effect with stream=static"):
        config(base_model="0" * 16, stream="static")

    class Early(Method):
        name, first_step = "early", 0
    with pytest.raises(UserError, match="'base_model'.*'early', which acts in block 0"):
        replace(config(base_model="0" * 16).federation(ml100k), method=Early(NoSettings())).check()
