"""Clipping and noise of uploads, what they guarantee, and what records say of it."""

import builtins
import math
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import build, executed, federation, train_round, trainer_of
from scipy import optimize, stats
from synthetic import small_stream

from fedcl_bench import rng
from fedcl_bench.rng import DrawKey
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.client_sampling import Attendance
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress
from fedcl_bench.federation.settings import FederationSettings
from fedcl_bench.federation.cross_device import CrossDevice, begin_step, most_rounds
from fedcl_bench.runs.config import make_config
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.stats import accounting
from fedcl_bench.stats.accounting import closed_form, epsilon, sentences
from fedcl_bench.stats.clip_noise import OPEN, Protection
from fedcl_bench.testing.worlds import growing_stream, ragged, session_log, session_stream

# Every kind of upload: touched rows of one and of several tables, dense parameters, whole tables, personal tables, the
# client's own copy, penalties on rows that a client does not touch (with several numbers of local batches), sessions.
CASES = {"fedmf": ("ft", {}, {}), "biasmf": ("ft", {}, {}), "ncf": ("ft", {}, {}), "fedrap": ("ft", {"l2": 0.1}, {}),
         "pfedrec": ("f3crec", {}, {}), "reg": ("reg", {}, {"batch_size": 8}), "sasrec": ("ft", {"dim": 8}, {})}


def part(registry, case, block=1, **server):
    """A federation at the beginning of a block: (federation, acting method, model, chunks)."""
    method, settings, local = CASES[case]
    name = "fedmf" if case == "reg" else case
    sessions = case == "sasrec"
    stream = session_stream(session_log(30), 30) if sessions else small_stream()
    own = {"top_n": 5} if method == "f3crec" else {"lambda_reg": 0.01} if method == "reg" else {}
    f = federation(registry, stream, build(registry, "method", method, **own),
                   build(registry, "backbone", name, **settings), local=LocalSettings(**({"negatives": 1} if sessions
                                                                                        else local)),
                   rounds=2, precision="float64", **server)
    progress = Progress()
    if not sessions:
        for progress in run(f):
            if progress.step == block:
                break
    step = stream.steps[progress.step]
    acting = f.acting_in(step)
    model = begin_step(f, step, progress).model
    model = replace(model, public={name: table + 0.01 for name, table in model.public.items()})  # off Reg's anchor
    chunks = CrossDevice(f, step, model).protocol.chunks(Attendance().of(step, f.seed, 0).users, 0, model)
    return f, acting, model, chunks


def each_change(registry, case, protection):
    """Every client's change of the public parameters in a round, (N, numbers), and the round's mean change."""
    f, acting, model, chunks = part(registry, case)
    step = f.stream.steps[0 if case == "sasrec" else 1].index
    train = trainer_of(chunks, model, f.backbone, acting, f.local, DrawKey(0, step, 0), protection=protection)
    trained = [train(chunk) for chunk in chunks]
    rows = torch.cat([torch.cat([value.flatten(1) for value in one.changes(model).values()], 1)
                      for one in trained])
    f, acting, model, chunks = part(registry, case)
    after, _, _ = train_round(chunks, model, f.backbone, acting, f.local, 0, step, 0, protection=protection)
    names = list(trained[0].changes(model))
    mean = torch.cat([({**after.public, **after.dense}[name] - {**model.public, **model.dense}[name]).flatten()
                      for name in names])
    return rows, mean, trained


@pytest.mark.parametrize("case", CASES)
def test_clipped_changes_have_at_most_the_norm_and_average_to_the_round(registry, case):
    free, mean, _ = each_change(registry, case, OPEN)
    torch.testing.assert_close(free.mean(0), mean, atol=1e-12, rtol=1e-9)
    for mechanism, order in (("laplace", 1), ("gaussian", 2)):
        norms = free.norm(order, dim=1)
        clip = float(norms.median())
        clipped, mean, trained = each_change(registry, case, Protection(clip, 0.0, mechanism))
        assert (clipped.norm(order, dim=1) <= clip * (1.0 + 1e-12)).all()
        expected = free * torch.clamp(clip / norms, max=1.0)[:, None]
        torch.testing.assert_close(clipped, expected, atol=1e-12, rtol=3e-6)
        assert (norms > clip).any() and torch.equal(clipped[norms < clip], free[norms < clip])
        torch.testing.assert_close(clipped.mean(0), mean, atol=1e-12, rtol=1e-9)
        assert all((change.scale <= 1.0).all() for one in trained for change in one.public.values())


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
                  st.floats(1e-3, 1e3), st.sampled_from([("laplace", 1), ("gaussian", 2)]))
def test_factors_keep_float32_changes_within_the_norm(changes, clip, kind):
    changes = torch.tensor(changes)
    protection = Protection(clip, 0.0, kind[0])
    factors = protection.factors(protection.sizes(changes)).to(changes)
    norms = (changes * factors[:, None]).double().norm(kind[1], dim=1)
    assert (norms <= clip).all()
    small = changes.double().norm(kind[1], dim=1) < clip * (1.0 - 1e-6)
    assert (factors[small] == 1.0).all()


def test_a_change_that_is_not_finite_stays_so():
    protection = Protection(1.0)
    changes = torch.tensor([[math.nan, 1.0], [math.inf, 1.0]])
    factors = protection.factors(protection.sizes(changes)).to(changes)
    assert not torch.isfinite((changes * factors[:, None]).sum(1)).any()


def test_gaussian_noise_has_its_law():
    scale, shape = 0.3, (400, 50)
    mean, again = (rng.mean_gaussian(5, 0, round_, "item", shape, scale, 3).numpy().ravel() for round_ in (0, 1))
    assert abs(np.corrcoef(mean, again)[0, 1]) < 0.03
    each = Protection(0.0, scale, "gaussian").noisy(7, torch.arange(3), torch.zeros(3, *shape, dtype=torch.float64))
    assert all(stats.ks_1samp(row, stats.norm(0.0, scale).cdf).pvalue > 1e-3 for row in each.reshape(3, -1).numpy())
    assert abs(np.corrcoef(each.reshape(3, -1).numpy())[0, 1]) < 0.03
    alone = Protection(0.0, scale, "gaussian").noisy(7, torch.tensor([2]), torch.zeros(1, *shape, dtype=torch.float64))
    assert torch.equal(alone[0], each[2])  # a client's noise depends on no other client


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_noise_of_a_weighted_mean_has_the_law_of_each_client_s_own(mechanism):
    """The mean of the clients' own draws and the one that is drawn at once, by a two-sample test."""
    weights, scale, shape = torch.tensor([1.0, 4.0, 4.0, 2.0], dtype=torch.float64), 0.3, (200, 40)
    protection = Protection(0.0, scale, mechanism)
    at_once = protection.mean_noise(DrawKey(5, 0, 0), "item", shape, {1.0: 1, 2.0: 1, 4.0: 2})
    each = protection.noisy(9, torch.arange(4), torch.zeros(4, *shape, dtype=torch.float64))
    mean = torch.einsum("c,cij->ij", weights / weights.sum(), each)
    assert stats.ks_2samp(at_once.numpy().ravel(), mean.numpy().ravel()).pvalue > 1e-3
    kind = 2.0 if mechanism == "laplace" else 1.0  # variances of one draw, in squares of the scale
    expected = kind * scale ** 2 * float(weights.square().sum() / weights.sum() ** 2)
    assert float(at_once.square().mean()) == pytest.approx(expected, rel=0.06)
    assert float((at_once - protection.mean_noise(DrawKey(5, 0, 0), "item", shape, {1.0: 4})).abs().mean()) > 0.01


def test_noise_of_a_round(registry):
    """It goes with weights by interactions, and the record says what it does not promise; Gaussian noise is on every
    entry of the mean, touched or not."""
    f = federation(registry, small_stream(), build(registry, "method", "ft"), rounds=1, precision="float64",
                   weighting="interactions", upload_noise=0.1)
    f.check()
    clean, noisy = (next(iter(run(g))).model.public for g in (
        replace(f, server=replace(f.server, upload_noise=0.0)), f))
    spread = torch.cat([(noisy[name] - clean[name]).flatten() for name in clean])
    lengths = f.stream.steps[0].train.lengths.double()
    std = math.sqrt(2.0) * 0.1 * float(lengths.square().sum().sqrt() / lengths.sum())
    assert float(spread.square().mean().sqrt()) == pytest.approx(std, rel=0.15)
    told, = sentences(Protection(0.0, 0.1), 10, [], learns=[each.learns for each in f.server.disclosures])
    assert told.endswith("no formal guarantee and no epsilon. Weights tell the server how many interactions a client "
                         "has.")
    clean, noisy = (next(iter(run(federation(registry, small_stream(), build(registry, "method", "ft"), rounds=1,
                                             precision="float64", **noise))))
                    for noise in ({}, {"upload_noise": 0.5, "upload_mechanism": "gaussian"}))
    uploads = clean.curve[0]["participants"]
    for name, table in clean.model.public.items():
        noise = rng.mean_gaussian(0, 0, 0, name, tuple(table.shape), 0.5, uploads)
        torch.testing.assert_close(noisy.model.public[name], table + noise, rtol=1e-12, atol=1e-12)


def test_epsilon_of_laplace_noise(monkeypatch):
    """One round is (2C/b)-DP; more are below the sum, and the closed form is never below the distribution's, which
    fewer cells only raise."""
    monkeypatch.setattr(accounting, "_CELLS", 1e4)
    for clip, noise, rounds in ((0.1, 10.0, 20), (1.0, 50.0, 40)):
        protection, pure = Protection(clip, noise), rounds * 2.0 * clip / noise
        assert epsilon(protection, rounds) <= min(pure, closed_form(protection, rounds, 1e-5))
    assert epsilon(Protection(40.0, 1.0), 7) == 560.0
    # One round: delta(epsilon) = 1 - exp((epsilon - 2C/b) / 2).
    assert epsilon(Protection(1.0, 1.0), 1, 0.1) == pytest.approx(2.0 + 2.0 * math.log(0.9), abs=1e-4)


def test_epsilon_of_gaussian_noise():
    """Balle & Wang's condition on a mechanism of sensitivity 2C; T rounds are one with noise s / sqrt(T). And the
    epsilons of an independent computation."""
    def analytic(ratio, delta):
        def excess(e):
            return (stats.norm.cdf(ratio / 2.0 - e / ratio)
                    - math.exp(e) * stats.norm.cdf(-ratio / 2.0 - e / ratio) - delta)
        return optimize.brentq(excess, 0.0, 100.0)
    for clip, noise, rounds, delta in ((1.0, 2.0, 1, 1e-5), (0.5, 1.0, 1, 1e-6), (0.1, 2.0, 100, 1e-5)):
        protection = Protection(clip, noise, "gaussian")
        found = epsilon(protection, rounds, delta)
        assert found == pytest.approx(analytic(2.0 * clip / noise * math.sqrt(rounds), delta), rel=1e-6)
        assert found < closed_form(protection, rounds, delta)
    for noise, rounds, expected in ((25.0, 80, 21.003), (25.0, 20, 8.721), (5.0, 80, 235.40), (0.5, 80, 16762.0)):
        assert epsilon(Protection(5.0, noise, "gaussian"), rounds) == pytest.approx(expected, rel=5e-5)


def without_the_package(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **options):
        if name.split(".")[0] == "dp_accounting":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *args, **options)
    monkeypatch.setattr(builtins, "__import__", absent)


def test_sentences_and_without_the_package_a_bound(monkeypatch):
    assert sentences(OPEN, 10, []) == []
    assert "bears no formal guarantee and no epsilon" in sentences(Protection(0.0, 0.1), 10, [])[0]
    assert "Gaussian noise on every uploaded number" in sentences(Protection(0.0, 0.1, "gaussian"), 10, [])[0]
    assert "without noise that bears no formal guarantee" in sentences(Protection(1.0), 10, [])[0]
    text, = sentences(Protection(1.0, 0.1), 10, ["prototype", "query"])
    assert "prototype, query are not: no formal guarantee and no epsilon" in text
    text, = sentences(Protection(1.0, 1.0, "gaussian"), 1, [])
    assert "epsilon = 9.997, delta = 1e-05 over 1 round (upload_clip=1, Gaussian upload_noise=1)." in text
    without_the_package(monkeypatch)
    text, = sentences(Protection(1.0, 1.0), 249, [])
    assert "epsilon = 498, delta = 1e-05 over 249 rounds" in text
    assert text.endswith(f"An upper bound; for a tighter one: {accounting.INSTALL}.")
    wanted = 200.0 * 0.01 + 2.0 * math.sqrt(2.0 * math.log(1e5))  # rho = T (2C)^2 / (2 s^2)
    assert closed_form(Protection(1.0, 10.0, "gaussian"), 100, 1e-5) == pytest.approx(wanted)


@pytest.mark.parametrize("method,server", [("ft", {}), ("ft", {"client_ratio": 0.5}), ("joint", {}), ("frozen", {}),
                                           ("ft", {"client_ratio": 0.5, "cold_items": "untrained"})])
def test_the_most_rounds_of_a_client(registry, method, server):
    """As a run counts its participants: with ``history`` also those without data in the block, with ``cold_items``
    nobody for new items, and of a frozen model those of block 0."""
    stream = growing_stream()
    f = federation(registry, stream, build(registry, "method", method), seed=7, rounds=3, **server)
    curve = [{"step": step.index, "round": r} for step in stream.steps for r in range(3)]
    taken, had = np.zeros(stream.steps[-1].n_users, dtype=int), set()
    for step in stream.steps:
        known = step.old_items if step.index and "cold_items" in server else step.n_items
        has = {user for user in range(step.n_users) if (step.train.of(user) < known).any()}
        had = has | had if method == "joint" else has
        able = Attendance(server.get("client_ratio", 1.0))
        few = replace(step, train=ragged(*[[0] * (user in had) for user in range(step.n_users)]))
        for round_ in range(3) if method != "frozen" or step.index == 0 else ():
            taken[able.of(few, 7, round_).users.numpy()] += 1
    assert most_rounds(f, curve) == taken.max()


def test_a_record_states_the_guarantee(registry, tmp_path):
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[
        ("test", {"rounds": 2, "k_core": 80, "upload_clip": 1.0, "upload_noise": 5.0, "upload_mechanism": "gaussian"})])
    steps = load_stream(config.source, config.stream).steps
    found = executed(config, tmp_path)
    lengths = [torch.nn.functional.pad(step.train.lengths, (0, steps[-1].n_users - step.n_users)) for step in steps]
    most = 2 * int(sum((some > 0).long() for some in lengths).max())
    wanted = epsilon(Protection(1.0, 5.0, "gaussian"), most)
    assert found["privacy"]["notes"] == [
        f"Privacy of each client's uploads, should all its data be replaced: epsilon = {wanted:.4g}, delta = 1e-05 "
        f"over {most} rounds (upload_clip=1, Gaussian upload_noise=5)."]
    assert (found["settings"]["upload_clip"], found["settings"]["upload_mechanism"]) == (1.0, "gaussian")


def test_the_mechanism_counts_where_there_is_noise(registry):
    plain, noisy = (make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", settings)])
                    for settings in ({}, {"upload_noise": 0.1}))
    assert "upload_mechanism" not in plain.settings and noisy.settings["upload_mechanism"] == "laplace"
    same = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[
        ("test", {"upload_noise": 0.1, "upload_mechanism": "laplace", "upload_clip": 0.0})])
    other = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[
        ("test", {"upload_noise": 0.1, "upload_mechanism": "gaussian"})])
    assert same.hash == noisy.hash != other.hash
    with pytest.raises(UserError, match="'upload_mechanism' .* has no effect without upload_noise or upload_clip"):
        make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", {"upload_mechanism": "gaussian"})])


@pytest.mark.parametrize("backbone,server,words", [
    ("fedmf", {"availability": "activity", "upload_noise": 1.0},
     ["setting 'upload_clip': found 1 with availability=activity", "accepted: availability=always or day"]),
    ("fedmf", {"fold_in": 3, "cold_start": "popularity", "upload_noise": 1.0},
     ["found 1 with cold_start=popularity", "exact counts of the items", "accepted: cold_start=fold_in or mean"]),
    ("fedmf", {"weighting": "interactions"}, ["upload_clip", "weighting=interactions", "accepted: weighting=uniform"]),
    ("gpfedrec", {}, ["upload_clip", "'gpfedrec'", "a backbone whose server averages"]),
    ("sasrec", {"init": "per_client"}, ["upload_clip", "init=per_client", "--set init=server"])])
def test_what_clipping_does_not_cover_is_refused(registry, backbone, server, words):
    stream = session_stream(session_log(30), 30) if backbone == "sasrec" else small_stream()
    f = federation(registry, stream, build(registry, "method", "ft"), build(registry, "backbone", backbone),
                   local=LocalSettings(negatives=1), upload_clip=1.0, **server)
    f = replace(f, evaluation=replace(f.evaluation, topk=(5,), valid_metric="ndcg@5"))
    with pytest.raises(UserError) as error:
        f.check()
    assert all(word in str(error.value) for word in words), error.value
    assert not FederationSettings(weighting="interactions", aggregator="median").disclosures  # which reads no weights
