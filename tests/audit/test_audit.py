"""The leakage audit: the attacks on made-up uploads, on real ones, and the command."""

import functools
import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fabricate import config_of
from helpers import ITEM, build, federation
from synthetic import small_stream

from fedcl_bench import rng
from fedcl_bench.audit import attack, audit
from fedcl_bench.audit.attack import METRICS, OF_UPLOAD, Roles, Sums, Uploads, along_direction, auc, precision
from fedcl_bench.audit.audit import Level, Stopped, attacked, content, level_clients, markdown, summarise
from fedcl_bench.cli.main import main
from fedcl_bench.federation.loop import run
from fedcl_bench.reports.draw import audit_curves
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.stats import accounting
from fedcl_bench.stats.accounting import epsilon
from fedcl_bench.stats.clip_noise import OPEN, Protection, upload_key


def yes(*rows):
    return np.array(rows, dtype=bool)


def test_auc_counts_pairs_and_ties_half():
    scores = np.array([[3.0, 1.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 5.0, 1.0, 1.0, 9.0]])
    positive = yes([1, 0, 1, 0, 0], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0])
    everything = np.ones_like(positive)
    assert auc(scores, positive, everything).tolist() == [1.0, 0.5, (1 + 0.5) / 4]
    among = yes([1, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0, 0, 1, 1, 1])
    assert auc(scores, positive, among).tolist() == [1.0, 0.5, 0.5 / 2]
    assert math.isnan(auc(scores[:1], positive[:1], yes([1, 0, 1, 0, 0]))[0])


def test_precision_shares_ties():
    positive = yes([1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1])
    scores = np.array([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert precision(scores, positive).tolist() == [1.0, 0.0, (1 + 1 / 3) / 2, 0.25]


def test_direction_of_a_factorisation():
    """Rows of positives moved along the private vector, more rows of negatives against it, by less."""
    vector = torch.tensor([0.6, -0.8], dtype=torch.float64)
    steps = torch.tensor([[0.9, -0.5, 0.0, -0.4, -0.5, -0.3], [-0.1, 0.0, -0.3, 0.2, 0.0, -0.1]], dtype=torch.float64)
    for sign in (1.0, -1.0):
        found = along_direction(sign * steps[:, :, None] * vector)
        torch.testing.assert_close(found, steps, atol=1e-12, rtol=0.0)
    # Neither rows that hardly moved outvote those that did, nor a few that moved far the many that moved less.
    for steps in (torch.cat([torch.full((1, 3), 9.0), torch.full((1, 12), -9.0), torch.full((1, 85), 0.1)], 1),
                  torch.cat([torch.full((1, 3), 9.0), torch.full((1, 12), -1.0)], 1)):
        torch.testing.assert_close(along_direction(steps[:, :, None].double() * vector), steps.double())


# The uploads attacked are the run's.

def observed(f, block=0):
    """Everything an attacker sees in a block's first round, and the next model."""
    seen = []

    def observe(place, model, trained):
        if place.step == block and place.round == 0:
            seen.append((place, model, trained))
    for progress in run(f, observe=observe):
        if progress.step == block and progress.round == 1:
            return seen, progress.model


CASES = {"fedmf": ({}, {}), "reg": ({}, {"upload_clip": 0.5}), "biasmf": ({}, {"upload_clip": 0.1}),
         "fedrap": ({"l2": 0.1}, {}), "pfedrec": ({}, {"upload_clip": 0.5, "upload_mechanism": "gaussian"})}


@pytest.mark.parametrize("case", CASES)
def test_uploads_average_to_the_next_model(registry, case):
    settings, server = CASES[case]
    block = 1 if case == "reg" else 0
    f = federation(registry, small_stream(), build(registry, "method", case if case == "reg" else "ft"),
                   build(registry, "backbone", "fedmf" if case == "reg" else case, **settings), precision="float64",
                   rounds=2, **server)
    seen, after = observed(f, block)
    total, clients = {}, 0
    for place, model, trained in seen:
        for some, changes in Uploads(place, model, trained, f.backbone, f.server.protection).item_changes():
            for name, change in changes.items():
                total[name] = total.get(name, 0.0) + change.sum(0)
        clients += len(trained.users)
    for name, table in after.public.items():
        torch.testing.assert_close(model.public[name] + total[name] / clients, table, atol=1e-12, rtol=1e-9)


def test_roles_and_noise_do_not_depend_on_how_many_are_attacked_at_once(registry, monkeypatch):
    f = federation(registry, small_stream(), build(registry, "method", "ft"), rounds=1, upload_noise=0.1)
    (place, model, trained), = observed(f)[0]
    roles, step = Roles.of(trained, model.n_items), f.stream.steps[0]
    for row, user in enumerate(trained.users.tolist()):
        assert roles.positive[row].nonzero().flatten().tolist() == sorted(set(step.train.of(user).tolist()))
    assert not (roles.positive & ~roles.touched).any() and (roles.touched & ~roles.positive).any(1).all()
    uploads = Uploads(place, model, trained, f.backbone, f.server.protection)
    whole = attack.attack(uploads, Sums(trained.users.sort().values))
    monkeypatch.setattr(attack, "_NUMBERS_AT_ONCE", 1)
    single = attack.attack(uploads, Sums(trained.users.sort().values))
    for name, values in whole.items():
        assert values == pytest.approx(single[name], abs=1e-12), name
    key = upload_key(0, ITEM, 0, 0)
    first = next(iter(uploads.item_changes()))[1][ITEM][0]
    clean = next(iter(replace(uploads, protection=OPEN).item_changes()))[1][ITEM][0]
    noise = rng.laplace(key, trained.users[:1], tuple(clean.shape), 0.1)[0].float()
    assert torch.equal(first, clean + noise)


# What leaks.

def few_clients():
    return small_stream(users=60, items=80, each=(8, 25))


@functools.cache
def audited(noise, block=0, **settings):
    """A level of FT on FedMF, attacked in its rounds 1 and 3, and what was found."""
    config = make_config(discover(), "ft", "fedmf", "ml-100k", overrides=[
        ("test", {"rounds": 3, "patience": 0, "upload_noise": noise, "topk": "5", "valid_metric": "ndcg@5",
                  **settings})])
    level = Level(config, block, (1, 3))
    return level, attacked(level, few_clients())


def test_the_uploads_of_a_factorisation_leak_and_noise_hides_them():
    found = {noise: audited(noise)[1].groupby("round").mean() for noise in (0.0, 0.02, 0.1, 5.0)}
    # Without noise the direction tells every item: the claim that negatives hide positives does not hold.
    assert (found[0.0]["direction_auc"] == 1.0).all() and (found[0.0]["direction_precision"] == 1.0).all()
    for number in (1, 3):
        for metric in ("size_auc", "direction_auc", "direction_precision"):
            values = [found[noise].loc[number, metric] for noise in (0.0, 0.02, 0.1)]
            assert values == sorted(values, reverse=True) and values[0] > values[2] + 0.1, (number, metric, values)
        assert found[0.0].loc[number, "size_auc"] > 0.75
        assert abs(found[5.0].loc[number, "size_auc"] - 0.5) < 0.03


def test_summing_uploads_averages_noise_out():
    frame = audited(0.02)[1]
    first, last = (part for _, part in frame.groupby("round"))
    for name in OF_UPLOAD:  # in the first round there is nothing to add
        assert first[f"sum_{name}"].to_numpy() == pytest.approx(first[name].to_numpy(), abs=1e-3), name
    for name in ("size_auc", "size_precision", "direction_auc", "direction_precision"):
        assert last[f"sum_{name}"].mean() > last[name].mean() + 0.03, name


def test_sums_are_of_each_client():
    """In any order and in pieces, of those who took part."""
    uploads = torch.randn(3, 4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positive, touched = uploads[..., 0] > 1.2, uploads[..., 0] > 0.6
    sums, users = Sums(torch.tensor([2, 3, 5, 9])), torch.tensor([9, 2, 5, 3])
    for number, taking_part in enumerate(([0, 1, 2, 3], [1, 2], [2, 0])):
        some = torch.tensor(taking_part)
        roles = Roles(positive[number, some], touched[number, some])
        summed, ever = sums.add(users[some], uploads[number, some], roles)
    expected = torch.stack([uploads[:, 2].sum(0), uploads[0, 0] + uploads[2, 0]])
    torch.testing.assert_close(summed, expected, atol=1e-6, rtol=1e-6)
    for found, each in ((ever.positive, positive), (ever.touched, touched)):
        assert torch.equal(found, torch.stack([each[:, 2].any(0), each[0, 0] | each[2, 0]]))


def test_clipping_bounds_what_a_level_of_noise_lets_through():
    free = audited(0.02)[1]["direction_auc"].mean()
    clipped = audited(0.02, upload_clip=0.1, upload_mechanism="gaussian")[1]["direction_auc"].mean()
    assert clipped < free - 0.1 and abs(clipped - 0.5) < 0.05


def test_summary_counts_a_client_once_and_states_epsilon():
    level, frame = audited(2.0, block=1, upload_clip=1.0, upload_mechanism="gaussian")
    other = frame.assign(**{name: frame[name] + 0.1 for name in METRICS})
    first, last = summarise([level, level], [frame, other], 1e-6)
    assert (first["round"], last["round"]) == (1, 3) and first["clients"] == frame["user"].nunique()
    assert (first["rounds_so_far"], last["rounds_so_far"]) == (4, 6)
    protection = Protection(1.0, 2.0, "gaussian")
    assert last["epsilon"] == epsilon(protection, 1, 1e-6) and last["epsilon_so_far"] == epsilon(protection, 6, 1e-6)
    mean = frame[frame["round"] == 3]["size_auc"].mean() + 0.05
    assert last["size_auc"]["mean"] == pytest.approx(mean)
    assert last["size_auc"]["low"] < mean < last["size_auc"]["high"]


def test_no_epsilon_beside_uploads_that_are_not_clipped(registry):
    spec = RunSpec("fcucr", "sasrec", "xing", (("init", "server"), ("upload_clip", 1.0), ("upload_noise", 1.0)))
    config = config_of(registry, spec, 0)
    frame = pd.DataFrame({"round": 1, "user": [0, 1], "items": 9, "positives": 2, "touched": 4,
                          **dict.fromkeys(METRICS, 0.5)})
    found = content([Level(config, 0, (1,))], [frame], 1e-5)
    assert found["levels"][0]["epsilon"] is None and found["not_attacked"] == ["prototype", "session", "query"]
    assert "prototype, session, query, also uploaded, are not: no formal guarantee." in markdown(found)


def test_the_figure_shows_the_numbers():
    def row(noise, number, shift):
        return {"noise": noise, "round": number,
                **{name: {"mean": 0.5 + shift, "low": 0.4 + shift, "high": 0.7 + shift} for name in METRICS}}
    rows = [row(noise, number, 0.1 * number - 0.001 * noise) for number in (1, 2) for noise in (0.0, 0.1, 50.0)]
    figure = audit_curves({"levels": rows, "rounds": [1, 2], "by_chance": {"auc": 0.5, "precision": 0.1,
                                                                          "precision_touched": 0.2}}, "a title")
    lines = {line.get_gid(): line for axes in figure.axes for line in axes.lines
             if line.get_gid() and line.get_linestyle() != "None"}  # whiskers have caps
    assert sorted(lines) == [f"{attack}_{metric}:{number}"
                             for attack in ("direction", "size", "sum_direction", "sum_size")
                             for metric in ("auc", "precision") for number in (1, 2)]
    assert lines["size_auc:2"].get_xdata().tolist() == [0.0, 0.1, 50.0]
    assert lines["size_auc:2"].get_ydata() == pytest.approx([0.7, 0.6999, 0.65])
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["0", "0.1", "50"]


def test_finished_levels_are_kept_and_others_made_anew(tmp_path):
    level, frame = audited(0.1)
    for kept in (False, True):  # what is kept and damaged: tests/hostile/test_readers.py
        found, again = level_clients(level, tmp_path, few_clients)
        pd.testing.assert_frame_equal(found, frame)
        assert again == kept
    others = [Level(level.config, *plan) for plan in ((0, (1, 2)), (0, (1, 3), 9), (1, (1, 3)))]
    assert len({level.file, *(other.file for other in others)}) == 4
    with pytest.raises(Stopped):
        attacked(level, few_clients(), stop=lambda: True)


def test_a_sample_of_clients():
    """Drawn at random, the same in every round and at every level, with the numbers they have among all."""
    level, everyone = audited(0.1)
    several = [attacked(Level(level.config, 0, (1, 3), clients), few_clients()) for clients in (7, 9, 1000)]
    users = [set(frame["user"]) for frame in several]
    assert [len(some) for some in users] == [7, 9, everyone["user"].nunique()] and users[0] < users[1]
    for frame, some in zip(several, users):
        assert frame["user"].value_counts().eq(2).all()
        expected = everyone[everyone["user"].isin(some)].reset_index(drop=True)
        pd.testing.assert_frame_equal(frame, expected)


def test_clients_of_joint_are_those_that_train():
    """On all data so far, also where they have none in the block."""
    config = make_config(discover(), "joint", "fedmf", "ml-100k", overrides=[
        ("test", {"rounds": 1, "patience": 0, "topk": "5", "valid_metric": "ndcg@5"})])
    stream = few_clients()
    found = attacked(Level(config, 1, (1,)), stream)["user"].nunique()
    lengths = [step.train.lengths for step in stream.steps[:2]]
    everyone = lengths[1] + torch.nn.functional.pad(lengths[0], (0, len(lengths[1]) - len(lengths[0])))
    assert found == int((everyone > 0).sum()) > int((lengths[1] > 0).sum())


# The command.

AUDIT = ["audit", "--method", "ft", "--backbone", "fedmf", "--rounds", "1,2", "--block", "0"]
FEW = ["--set", "k_core=80"]  # interactions


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_command_writes_table_figure_and_json(capsys):
    assert main([*AUDIT, *FEW, "--noise", "0,1", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "noise 1, seed 0" in captured.err
    assert (found["method"], found["block"], found["rounds"], found["seeds"]) == ("ft", 0, [1, 2], [0])
    assert [(row["noise"], row["round"], row["clients"]) for row in found["levels"]] == [
        (0.0, 1, 186), (0.0, 2, 186), (1.0, 1, 186), (1.0, 2, 186)]
    clean, noisy = found["levels"][0], found["levels"][2]
    assert clean["direction_auc"]["mean"] == 1.0 and clean["epsilon"] is None
    assert clean["size_auc"]["mean"] == pytest.approx(0.308, abs=0.002)  # block 0 of the 80-core, round 1
    assert noisy["size_auc"]["mean"] == pytest.approx(0.5, abs=0.01)
    folder = Path(found["folder"])
    assert folder == Path("results/audits/ft-fedmf-ml-100k")
    assert sorted(path.name for path in folder.iterdir()) == [
        "audit.csv", "audit.json", "audit.md", "audit.png", "audit.svg", "levels"]
    rows = pd.read_csv(folder / "audit.csv")
    assert len(rows) == 4 * len(METRICS)
    assert json.loads((folder / "audit.json").read_text()) == {name: found[name] for name in found if name != "folder"}
    assert main([*AUDIT, *FEW, "--noise", "0,1"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("from an earlier audit") == 2
    text = " ".join(captured.out.split())
    for words in ("ft on fedmf, ml-100k, block 0, seed 0", "Mean over 186 clients", "By chance: AUC .5",
                  "no level of noise bears a formal guarantee", "F3CRec's noise", "FCUCR's epsilon", "audit.svg"):
        assert words in text


@pytest.fixture
def not_drawn(monkeypatch):
    monkeypatch.setattr("fedcl_bench.reports.draw.save", lambda figure, path: None)


def test_clipped_levels_carry_their_epsilon(capsys, monkeypatch, not_drawn):
    def absent(*args):
        raise ModuleNotFoundError
    clip = [*FEW, "--set", "upload_clip=1", "--set", "upload_mechanism=gaussian"]
    assert main([*AUDIT[:-2], "--block", "1", "--noise", "0,4", *clip, "--delta", "1e-6", "--quiet"]) == 0
    captured = capsys.readouterr()
    protection = Protection(1.0, 4.0, "gaussian")
    once, fourth = (f"{epsilon(protection, rounds, 1e-6):.4g}" for rounds in (1, 4))
    lines = captured.out.splitlines()
    assert lines[2].split()[-2:] == ["direction", "ε"]
    # The sum of two uploads has the epsilon of all four rounds so far.
    assert [(*line.split()[:3], line.split()[-1]) for line in lines[4:10]] == [
        ("1", "0", "one", "none"), ("1", "4", "one", once), ("2", "0", "one", "none"), ("2", "0", "sum", "none"),
        ("2", "4", "one", once), ("2", "4", "sum", fourth)]
    assert captured.err == "" and "an L2 norm of 1. ε for delta 1e-06" in captured.out
    assert "upper bounds" not in captured.out
    monkeypatch.setattr(accounting, "epsilon", absent)
    assert main([*AUDIT[:-2], "--block", "1", "--noise", "0,4", *clip, "--quiet"]) == 0
    bound = f"{accounting.closed_form(protection, 1, 1e-5):.4g}"
    out = capsys.readouterr().out
    assert out.splitlines()[5].split()[-1] == bound and f"upper bounds; for tighter ones: {accounting.INSTALL}" in out


def test_ctrl_c_keeps_finished_levels(capsys, monkeypatch, not_drawn):
    real = audit.attacked

    def then_stop(*args, **options):
        frame = real(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return frame
    monkeypatch.setattr(audit, "attacked", then_stop)
    command = ["audit", "--method", "ft", "--backbone", "fedmf", "--rounds", "1", "--noise", "0,1", *FEW]
    assert main(command) == 130
    assert "1 of 2 runs are kept in results/audits/ft-fedmf-ml-100k" in capsys.readouterr().err
    monkeypatch.setattr(audit, "attacked", real)
    assert main(command) == 0
    assert capsys.readouterr().err.count("from an earlier audit") == 1


@pytest.mark.parametrize("arguments,words", [
    ([*AUDIT, "--noise", "0,loud"], ["--noise", "found '0,loud'", "numbers from 0 with commas"]),
    ([*AUDIT, "--noise", "0,-1"], ["--noise", "found '0,-1'"]),
    ([*AUDIT, "--rounds", "0"], ["--rounds", "a whole number from 1"]),
    ([*AUDIT, "--delta", "1"], ["--delta", "found '1'", "between 0 and 1"]),
    ([*AUDIT, "--block", "4"], ["--block", "found 4", "0 to 3"]),
    ([*AUDIT, "--set", "upload_noise=1"], ["--set upload_noise", "use --noise"]),
    ([*AUDIT, "--set", "rounds=1"], ["--set rounds", "use --rounds"]),
    ([*AUDIT, "--noise", "0", "--set", "weighting=interactions", "--set", "upload_clip=1"],
     ["'upload_clip'", "weighting=uniform"]),
    ([*AUDIT, "--set", "upload_clip=1", "--set", "availability=activity"], ["'upload_clip'", "availability=always"]),
    (["audit", "--method", "frozen", "--backbone", "fedmf"], ["--block", "found 1", "'frozen'"]),
    (["audit", "--method", "gpfedrec", "--set", "upload_clip=1"], ["'upload_clip'", "'gpfedrec'"]),
    (["audit", "--backbone", "fedmf"], ["--method is missing", "f3crec, fcucr"]),
    (["audit", "--method", "fcucr", "--backbone", "fedmf"], ["'fcucr'", "sequential"]),
    (["audit", "--method", "ft", "--backbone", "sasrec", "--set", "stream=sessions", "--set", "topology=central"],
     ["found clients that hold many users' interactions"]),
])
def test_bad_commands(capsys, arguments, words):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    message = " ".join(captured.err.split())
    assert captured.out == "" and len(captured.err.strip().splitlines()) <= 2 and "Traceback" not in message
    assert all(word in message for word in words), message
    assert not Path("results").exists()
