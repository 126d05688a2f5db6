"""Clients' whole round in one call of compiled kernels against the same local batch by local batch, to the bit."""

import ctypes
import os
import platform
import subprocess
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import ROOT, build, grown, same_tables, threads, train_round

from fedcl_bench import ITEM, SIZES, USER, LocalSettings, Pull, Snapshot, SoftTargets
from fedcl_bench.core import parallel
from fedcl_bench.data.streams.synth import SyntheticLog, step_of
from fedcl_bench.core.errors import PluginError
from fedcl_bench.federation import round as rounds
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.kernels import ops, library
from fedcl_bench.training.sampling import Needs, make_chunks
from fedcl_bench.stats.clip_noise import Protection

pytestmark = pytest.mark.skipif(ops.why_not() is not None, reason=f"no compiled kernels: {ops.why_not()}")
FT = Method(NoSettings())


@pytest.fixture(scope="module")
def step():
    return step_of(SyntheticLog(100, 80, per_user=12.0, activity=1.0))


def start(backbone, step, dtype=torch.float32):
    """Parameters that differ between clients, and are large enough for losses to differ."""
    model = grown(backbone, step)
    generator = torch.Generator().manual_seed(1)

    def noisy(tables):
        return {name: (table + 0.3 * torch.randn(table.shape, generator=generator, dtype=torch.float64)).to(dtype)
                for name, table in tables.items()}

    return Snapshot(noisy(model.public), noisy(model.private))


class Pulled(Method):
    """Keeps parameters of users and items but the last ones near half of their start, or rows near what was sent."""

    name = "pulled"

    def __init__(self, model, sent):
        super().__init__(NoSettings())
        self.model, self.sent = model, sent

    def pull(self, name, private):
        to = getattr(self.model, "private" if private else "public")[name] / 2
        return Pull(1e-2 if private else 1e-4, None if self.sent and not private else to[:-20])


class Distils(Method):
    """Of all users but the last ten, whose lists differ in which items take part and what they count."""

    name = "distils"

    def __init__(self, step, dtype, **soft):
        super().__init__(NoSettings())
        generator = torch.Generator().manual_seed(2)
        shape = step.n_users - 10, 12
        items = torch.rand(shape[0], step.n_items, generator=generator).argsort(1)[:, :shape[1]]
        self.soft = SoftTargets(items, torch.rand(shape, generator=generator).to(dtype), **soft)
        if "chosen" in soft:
            self.soft = replace(self.soft, chosen=(torch.rand(shape[::-1], generator=generator) < soft["chosen"]).T,
                                weights=torch.rand(shape[0], generator=generator).to(dtype))

    def soft_targets(self):
        return self.soft


def both_ways(step, backbone, local, model, method=FT, **options):
    """A round in one call per chunk, and local batch by local batch."""
    chunks = make_chunks(step, torch.arange(step.n_users), local, 32, Needs(
        inner=True, samples_only=True, even=method.penalises_rows, chunk_elements=1 << 13))
    assert all(chunk.inner and not chunk.dense for chunk in chunks)
    calls, results = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "inner_round", lambda *arguments, call=ops.inner_round:
                      calls.append(len(calls)) or call(*arguments))
        results.append(train_round(chunks, model, backbone, method, local, 3, 1, 2, **options))
        assert len(calls) == len(chunks)
        patch.setattr(rounds, "plan_of", lambda *_: None)
        results.append(train_round(chunks, model, backbone, method, local, 3, 1, 2, **options))
        assert len(calls) == len(chunks)
    return results


def same(results):
    (found, loss, _), *others = results
    for expected, same_loss, _ in others:
        assert loss == same_loss
        same_tables(found, expected)
    return found


@pytest.mark.parametrize("backbone, dim, dtype", [("fedmf", 5, torch.float32), ("fedmf", 32, torch.float64),
                                                  ("pfedrec", 32, torch.float32), ("pfedrec", 5, torch.float64)])
@pytest.mark.parametrize("local", [{}, {"batch_size": 15, "local_epochs": 2},
                                   {"batch_size": 1000, "local_epochs": 3, "negatives": 1},
                                   {"batch_size": 33, "negative_pool": "untouched", "negative_draw": "distinct"}])
def test_one_call_equals_local_batches(registry, step, monkeypatch, backbone, local, dtype, dim):
    monkeypatch.setattr(SIZES, "most_updates", 1 << 30)
    backbone, local = build(registry, "backbone", backbone, dim=dim), LocalSettings(**local)
    model = start(backbone, step, dtype)
    found = same(both_ways(step, backbone, local, model))
    assert float((found.public[ITEM] - model.public[ITEM]).abs().max()) > 1e-3
    for sent in (False, True):
        pulled = same(both_ways(step, backbone, local, model, Pulled(model, sent)))
        pairs = zip((found.public | found.private).values(), (pulled.public | pulled.private).values())
        assert sent or all(not torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("backbone, local", [("fedmf", {}), ("pfedrec", {"batch_size": 15, "local_epochs": 2})])
@pytest.mark.parametrize("soft", [{"weights": 0.5}, {"weights": 0.5, "reduction": "sum"},
                                  {"weights": 0.5, "chosen": 0.3}, {"weights": 0.5, "eps": 0.001},
                                  {"weights": 0.5, "eps": 0.002, "reduction": "sum", "chosen": 0.7}], ids=str)
def test_lists_are_distilled_in_one_call_as_batch_by_batch(registry, step, monkeypatch, backbone, local, soft):
    monkeypatch.setattr(SIZES, "most_updates", 1 << 30)
    backbone, local = build(registry, "backbone", backbone, dim=5), LocalSettings(**local)
    model, seen = start(backbone, step, torch.float64), []
    method = Distils(step, torch.float64, **soft)
    (found, loss, *_), (expected, same_loss, *_) = both_ways(step, backbone, local, model, method,
                                                             observe=seen.append)
    plain = train_round(make_chunks(step, torch.arange(step.n_users), local, 5, Needs(inner=True, samples_only=True)),
                        model, backbone, FT, local, 3, 1, 2)[0]
    assert loss == pytest.approx(same_loss, rel=1e-12)
    for kind in ("public", "private"):
        for name, table in getattr(found, kind).items():
            torch.testing.assert_close(table, getattr(expected, kind)[name], rtol=1e-8, atol=1e-10)
            changed = table != getattr(plain, kind)[name]
            if kind == "private":  # whoever has no list trains as without the others
                assert changed[:-10].any() and not changed[-10:].any()
    for trained in seen:  # whoever attacks uploads is told of the lists
        known = trained.users < len(method.soft.items)
        listed = trained.slots.items.gather(1, trained.slots.replay)[known]
        assert torch.equal(listed, method.soft.items[trained.users[known]])


@pytest.mark.parametrize("backbone", ["fedmf", "fedncf"])
def test_targets_and_anchors_of_another_precision(registry, step, monkeypatch, backbone):
    """They are taken in the run's, with kernels and without."""
    backbone, found = build(registry, "backbone", backbone, dim=5), []
    model, method, local = start(backbone, step), Distils(step, torch.float64, weights=0.5), LocalSettings()
    monkeypatch.setattr(Distils, "pull", lambda self, name, private: Pull(
        1e-2, model.private[name].double() / 2) if private else None, raising=False)
    for why_not in (None, "switched off"):
        monkeypatch.setattr(ops, "why_not", lambda why_not=why_not: why_not)
        chunks = make_chunks(step, torch.arange(step.n_users), local, 5, Needs(inner=True, samples_only=True))
        found.append(train_round(chunks, model, backbone, method, local, 3, 1, 2)[0])
    for kind in ("public", "private"):
        for name, table in getattr(found[0], kind).items():
            assert table.dtype == torch.float32
            torch.testing.assert_close(table, getattr(found[1], kind)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_clients_with_fewer_batches_sit_out_in_every_epoch(registry, step, monkeypatch, in_one_call):
    """They then come together with others, and all train as among clients with as many batches."""
    backbone, local = build(registry, "backbone", "fedmf"), LocalSettings(batch_size=50, local_epochs=3)
    model, users = start(backbone, step, torch.float64), torch.arange(step.n_users)
    monkeypatch.setattr(SIZES, "most_updates", 1 << 30)
    if not in_one_call:
        monkeypatch.setattr(rounds, "plan_of", lambda *_: None)
    apart, together = (make_chunks(step, users, local, 32, Needs(inner=True, samples_only=True, unnumbered=unnumbered))
                       for unnumbered in (False, True))
    assert len(together) < len(apart)
    (found, loss, *_), (expected, same_loss, *_) = (
        train_round(chunks, model, backbone, FT, local, 3, 1, 2) for chunks in (together, apart))
    assert loss == pytest.approx(same_loss, rel=1e-12)
    same_tables(found, expected, 1e-12)


def test_the_more_updates_the_fewer_clients_come_together(step):
    """A chunk keeps a number per sample and update."""
    local, most = LocalSettings(batch_size=8, local_epochs=2), 1 << 14
    chunks = make_chunks(step, torch.arange(step.n_users), local, 32,
                         Needs(inner=True, samples_only=True, chunk_elements=most))
    kept = [5 * chunk.positives.numel() * 2 * chunk.batches for chunk in chunks
            if chunk.inner and 2 * chunk.batches > 32 and len(chunk.users) > 1]
    assert kept and max(kept) <= 10 * most


def test_numbers_do_not_depend_on_how_clients_are_cut_into_chunks(registry, step, monkeypatch):
    """Losses too; every chunk has an even share of the samples, but for the last."""
    backbone, local = build(registry, "backbone", "fedmf"), LocalSettings(batch_size=50)
    model, users = start(backbone, step), torch.arange(step.n_users)
    results = []
    for least in (1 << 20, 1):
        monkeypatch.setattr(SIZES, "least_of_calls", least)
        chunks = make_chunks(step, users, local, 32, Needs(inner=True, samples_only=True, fused=True))
        results.append(train_round(chunks, model, backbone, FT, local, 3, 1, 2))
    samples = [5 * int(chunk.count.sum()) for chunk in chunks]
    assert len(chunks) >= SIZES.chunks_of_calls > 1 and max(samples) < 1.5 * sum(samples) / SIZES.chunks_of_calls
    same(results)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("backbone", ["fedmf", "pfedrec"])
def test_any_number_of_threads_and_some_of_the_users(registry, step, backbone, count):
    """Those who are not there keep their parameters."""
    backbone, local = build(registry, "backbone", backbone, dim=5), LocalSettings(batch_size=50)
    wide = replace(step, n_items=30_000)
    model, users = start(backbone, wide), torch.arange(0, step.n_users, 2)
    chunks = make_chunks(wide, users, local, 5, Needs(inner=True, samples_only=True))
    alone = train_round(chunks, model, backbone, FT, local, 3, 1, 2)
    with threads(count), parallel.workers():
        for _ in range(20):
            same([alone, train_round(chunks, model, backbone, FT, local, 3, 1, 2)])
    for name, table in alone[0].private.items():
        assert torch.equal(table[1::2], model.private[name][1::2])
        assert not (table[users] == model.private[name][users]).flatten(1).all(1).any()


def test_one_call_without_memory(registry, step, monkeypatch):
    backbone, local = build(registry, "backbone", "fedmf"), LocalSettings(batch_size=50)
    model = start(backbone, step)
    chunks = make_chunks(step, torch.arange(step.n_users), local, 32, Needs(inner=True, samples_only=True))
    full = {name: function._replace(call=lambda *_: -1) if name == "inner_round_float" else function
            for name, function in library._loaded().items()}
    monkeypatch.setattr(library, "_loaded", lambda: full)
    with pytest.raises(MemoryError, match="^no memory for inner_round_float with .*'P': "):
        train_round(chunks, model, backbone, FT, local, 3, 1, 2)


def test_clipped_and_weighted(registry, step):
    """What comes after training sees the same changes, in another order of slots."""
    backbone, local = build(registry, "backbone", "pfedrec"), LocalSettings(batch_size=50)
    model, weights = start(backbone, step, torch.float64), step.train.lengths.double()
    (found, *_), (expected, *_) = both_ways(step, backbone, local, model, weights=weights,
                                            protection=Protection(clip=0.5))
    same_tables(found, expected, 1e-12)
    free = same(both_ways(step, backbone, local, model, weights=weights))
    assert float((free.public[ITEM] - found.public[ITEM]).abs().max()) > 1e-3


def test_dead_clients_are_told(registry, step):
    backbone = build(registry, "backbone", "fedmf")
    model = start(backbone, step)
    model.public[ITEM].zero_()
    model.private[USER][7] = 0.0
    model.private[USER][:7] = 0.0
    backbone.learning_rates = lambda n_items, round_=0, batch=0: {USER: 0.0, ITEM: 0.0}
    chunks = make_chunks(step, torch.arange(8), LocalSettings(), 32, Needs(inner=True, samples_only=True))
    model.private[USER][7] = 1.0
    with pytest.raises(PluginError, match=r"leaves 1 of . clients \(user 7 first\) without gradient"):
        train_round(chunks, model, backbone, FT, LocalSettings(), 0, 0, 0)


@pytest.mark.parametrize("factors,message", [
    (lambda user: (torch.cat([user, user], 1), None), r"factors returned .*\s*expected .* of shape \(8, 32\)"),
    (lambda user: (user, user.sum(1)), r"factors returned .*\s*expected .* of shape \(8, 1\)"),
    (lambda user: (user.detach(), None), "cut off from all parameters")])
def test_wrong_factors_are_told(registry, step, factors, message):
    """Before kernels read them as if they were right."""
    fedmf = build(registry, "backbone", "fedmf")

    class Wrong(type(fedmf)):
        def factors(self, clients):
            return factors(clients[USER])

    backbone, settings, users = Wrong(fedmf.settings), LocalSettings(), torch.arange(8)
    chunks = make_chunks(step, users, settings, 32, Needs(inner=True, samples_only=True))
    with pytest.raises(PluginError, match=message):
        train_round(chunks, start(backbone, step), backbone, FT, settings, 0, 0, 0)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names processors of this kind")
@pytest.mark.parametrize("processor", [  # registers of 16, 32 and 64 bytes
    "x86-64", *(pytest.param(name, marks=pytest.mark.long) for name in ("x86-64-v3", "x86-64-v4"))])
def test_numbers_do_not_depend_on_the_width_of_registers(registry, step, monkeypatch, tmp_path, processor):
    kinds = library.BUILDS.get(f"kernels_{processor.removeprefix('x86-64-')}.so")
    if kinds and torch.backends.cpu.get_cpu_capability() not in kinds:
        pytest.skip("this processor has no such registers")
    items = torch.randint(step.n_items, (step.n_users, 50), generator=torch.Generator().manual_seed(1))
    local = LocalSettings(batch_size=70)
    chunks = make_chunks(step, torch.arange(step.n_users), local, 32, Needs(inner=True, samples_only=True))

    def numbers():
        for dim, dtype in product((20, 32), (torch.float32, torch.float64)):
            backbone = build(registry, "backbone", "fedmf", dim=dim)
            model = start(backbone, step, dtype)
            trained, *_ = train_round(chunks, model, backbone, FT, local, 3, 1, 2)
            yield from trained.tables()
            table = model.public[ITEM]
            scores = ops.row_products(table, items, model.private[USER], None)
            yield from (scores, ops.row_sums(table, items, scores))
            if dtype == torch.float32:
                yield from ops.weighted_bce(scores, scores.sigmoid(), scores.square())

    expected = list(numbers())
    built = tmp_path / "kernels.so"
    subprocess.run([*os.environ.get("CC", "cc").split(), "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-psabi",
                    '-DSOURCES=""', f"-march={processor}", str(ROOT / "fedcl_bench/kernels/kernels.c"), "-o",
                    str(built), "-lm"], check=True)
    loaded = dict(library.functions(ctypes.CDLL(str(built))))
    monkeypatch.setattr(library, "_loaded", lambda: loaded)
    for found, number in zip(numbers(), expected, strict=True):
        assert torch.equal(found, number)
