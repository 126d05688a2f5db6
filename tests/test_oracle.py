"""Engine == oracle: after a round, batched clients equal clients trained one by one on full tables."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from fedcl_bench.federation import grow
from fedcl_bench.local import train_round
from fedcl_bench.method import DrawKey
from fedcl_bench.model import Snapshot
from fedcl_bench.parallel import workers
from fedcl_bench.sampling import LocalSettings, make_chunks

USER, ITEM = "user_embedding.weight", "item_embedding.weight"
SEED = 3


def some_clients(step, count=24):
    """Old, new, light and heavy clients of a block."""
    lengths = step.train.lengths
    users = (lengths > 0).nonzero().flatten()
    by_size = users[lengths[users].argsort(stable=True)]
    picked = by_size[torch.linspace(0, len(by_size) - 1, count).long()]
    assert (picked < step.old_users).any() and (picked >= step.old_users).any()
    return picked.sort().values


def tables(step, backbone, dtype, scale=0.3):
    """A previous model and the grown model that block 1 starts from."""
    generator = torch.Generator().manual_seed(11)
    def normal(rows):
        return torch.randn(rows, backbone.settings.dim, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
    previous = Snapshot({ITEM: normal(step.old_items)}, {USER: normal(step.old_users)})
    # The block's own start differs from the teacher, as with init_from=last.
    start = Snapshot({ITEM: previous.public[ITEM] + 0.1 * normal(step.old_items)},
                     {USER: previous.private[USER] + 0.1 * normal(step.old_users)})
    return previous, grow(start, backbone, SEED, step, dtype, torch.device("cpu"))


def method_and_oracle(registry, name, previous, step, backbone, **settings):
    cls = registry.get("method", name).cls
    method = cls(cls.Settings(**settings))
    class Before:
        n_users, n_items = step.old_users, step.old_items
    method.end_step(Before, previous, backbone, torch.arange(step.old_users), DrawKey(SEED, 0))
    old_p, old_q = previous.private[USER], previous.public[ITEM]
    s = method.settings
    added = {"ft": lambda: oracle.nothing,
             "reg": lambda: oracle.reg(old_p, old_q, s.lambda_reg, s.reg_reduction),
             "kd": lambda: oracle.distillation(old_p, old_q, s.lambda_kd, s.top_n),
             "f3crec": lambda: oracle.distillation(old_p, old_q, s.lambda_kd, s.top_n, s.eps)}[name]()
    return method, added


METHODS = [("ft", {}), ("reg", {"lambda_reg": 1e-4}), ("reg", {"lambda_reg": 0.1, "reg_reduction": "mean"}),
           ("kd", {"lambda_kd": 0.5}), ("f3crec", {"lambda_kd": 0.5, "eps": 0.0005})]
LOCAL = [dict(batch_size=512, local_epochs=1), dict(batch_size=512, local_epochs=3),
         dict(batch_size=48, local_epochs=1), dict(batch_size=20, local_epochs=2)]


def compare(registry, stream, name, settings, local, optimiser, dtype, tolerance):
    step = stream.steps[1]
    item_lr = "times_items" if optimiser == "sgd" else "plain"
    backbone_cls = registry.get("backbone", "fedmf").cls
    backbone = backbone_cls(backbone_cls.Settings(lr=0.5 if optimiser == "sgd" else 0.01, item_lr=item_lr, dim=16))
    previous, model = tables(step, backbone, dtype)
    method, added = method_and_oracle(registry, name, previous, step, backbone, **settings)
    users = some_clients(step)
    train = LocalSettings(optimiser=optimiser, **local)
    chunks = make_chunks(step, users, train, 16)
    after, _ = train_round(chunks, model, backbone, method, train, SEED, 1, 4)
    public, private = method.aggregate(after.public), after.private

    lr = backbone.settings.lr
    plain = oracle.Round(seed=SEED, step=1, round=4, lr=lr, optimiser=optimiser, negatives=4, epochs=train.local_epochs,
                         item_lr=lr * (step.n_items if item_lr == "times_items" else 1), batch_size=train.batch_size)
    lists = {int(u): step.train.of(int(u)).tolist() for u in users}
    expected_public, expected_private = plain.run(lists, model.private[USER], model.public[ITEM], added)
    if name == "f3crec":
        expected_public = oracle.temporal_mean(expected_public, previous.public[ITEM], method.settings.beta)

    assert (public[ITEM] - model.public[ITEM]).abs().max() > 1e-3  # the round did something
    torch.testing.assert_close(public[ITEM], expected_public, atol=tolerance, rtol=0)
    torch.testing.assert_close(private[USER], expected_private, atol=tolerance, rtol=0)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("local", LOCAL, ids=lambda x: f"batch{x['batch_size']}x{x['local_epochs']}")
@pytest.mark.parametrize("name,settings", METHODS, ids=lambda x: x if isinstance(x, str) else "")
def test_round_equals_oracle(registry, ml100k, name, settings, local, optimiser):
    compare(registry, ml100k, name, settings, local, optimiser, torch.float64, 1e-9)


@pytest.mark.parametrize("name,settings", METHODS, ids=lambda x: x if isinstance(x, str) else "")
def test_round_equals_oracle_in_single_precision(registry, ml100k, name, settings):
    compare(registry, ml100k, name, settings, LOCAL[0], "sgd", torch.float32, 1e-5)


def test_every_path_of_the_engine_is_compared(ml100k):
    """The clients above include one batch, several weighted batches and several gathered ones."""
    from fedcl_bench.local import _WEIGHTED_BATCHES
    step = ml100k.steps[1]
    chunks = make_chunks(step, some_clients(step), LocalSettings(batch_size=48), 16)
    batches = {chunk.batches for chunk in chunks}
    assert min(batches) == 1 and max(batches) > _WEIGHTED_BATCHES
    assert any(1 < b <= _WEIGHTED_BATCHES for b in batches)
    assert any(len(chunk.users) > 1 for chunk in chunks)


@pytest.mark.parametrize("name", ["ft", "reg", "kd", "f3crec"])
def test_result_does_not_depend_on_chunks_or_threads(registry, ml100k, name):
    step = ml100k.steps[1]
    backbone_cls = registry.get("backbone", "fedmf").cls
    backbone = backbone_cls(backbone_cls.Settings())
    previous, model = tables(step, backbone, torch.float64, scale=0.1)
    method, _ = method_and_oracle(registry, name, previous, step, backbone)
    users = (step.train.lengths > 0).nonzero().flatten()
    train = LocalSettings(batch_size=64)
    results = []
    threads = torch.get_num_threads()
    try:
        for elements, number in ((1, 1), (1 << 14, 1), (1 << 19, 2), (1 << 30, 2), (1 << 14, 3)):
            torch.set_num_threads(number)
            chunks = make_chunks(step, users, train, 32, chunk_elements=elements)
            with workers():
                results.append((len(chunks), train_round(chunks, model, backbone, method, train, SEED, 1, 0)))
    finally:
        torch.set_num_threads(threads)
    assert results[0][0] == len(users) > results[1][0] > results[3][0]
    one, three = results[1][1][0], results[4][1][0]  # the same chunks on one thread and on three: bit-identical
    assert all(torch.equal(a, b) for a, b in zip(one.tables(), three.tables(), strict=True))
    for _, (after, loss) in results[1:]:
        for table, expected in zip(after.tables(), results[0][1][0].tables(), strict=True):
            torch.testing.assert_close(table, expected, atol=1e-12, rtol=0)
        assert loss == pytest.approx(results[0][1][1], abs=1e-12)


def test_upload_noise_has_the_law_of_a_mean_of_laplace_tables():
    """The two Gamma draws against N independent Laplace uploads: moments and Kolmogorov-Smirnov distance."""
    from scipy import stats

    from fedcl_bench import draws
    scale, uploads, shape = 0.3, 3, (400, 50)
    ours = draws.mean_laplace(SEED, 0, 0, ITEM, shape, scale, uploads).numpy().ravel()
    naive = np.random.default_rng(0).laplace(0.0, scale, size=(uploads, *shape)).mean(0).ravel()
    assert ours.std() == pytest.approx(np.sqrt(2 * scale ** 2 / uploads), rel=0.03)
    assert abs(ours.mean()) < 4 * ours.std() / np.sqrt(ours.size)
    assert stats.kurtosis(ours) == pytest.approx(3 / uploads, abs=0.25)  # of a mean of Laplace variables
    assert stats.ks_2samp(ours, naive).pvalue > 1e-3
    assert stats.ks_2samp(ours, np.random.default_rng(1).normal(0, ours.std(), ours.size)).pvalue < 1e-3
    again = draws.mean_laplace(SEED, 0, 1, ITEM, shape, scale, uploads).numpy().ravel()
    assert abs(np.corrcoef(ours, again)[0, 1]) < 0.03
