"""CanonFedRec: rounds are those of one client and one row at a time; what goes together."""

import oracle
import pytest
import torch
from helpers import ITEM, build, federation, same_clients

from fedcl_bench import LocalSettings, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.testing.worlds import growing_stream

BACKBONES = {"fedmf": {"lr": 0.05, "dim": 4, "init_std": 0.3, "item_lr": "plain"},
             "pfedrec": {"lr": 0.02, "lr_eta": 1.0, "dim": 4}}


def parts(registry, backbone, local, settings, **server):
    return federation(registry, growing_stream(), build(registry, "method", "canonfedrec", **settings),
                      build(registry, "backbone", backbone, **BACKBONES.get(backbone, {})), 3, 2, local,
                      precision="float64", **server)


@pytest.mark.parametrize("backbone, optimiser, batch, settings", [
    ("fedmf", "adam", 8, {"spread_floor": 0.1, "uniformity_weight": 0.5}),
    ("fedmf", "adam", 3, {"spread_floor": 1.0}),  # with local batches without a positive
    ("pfedrec", "sgd", 100, {"spread_floor": 1.0, "anchor_share": 0.7, "sphere_step": 1.5}),
    ("fedmf", "sgd", 8, {"client_loss": "backbone"})])
def test_rounds_equal_the_oracle(registry, backbone, optimiser, batch, settings):
    f = parts(registry, backbone, LocalSettings(optimiser, batch_size=batch), settings, weighting="interactions")
    f.check()
    seen, spread, s = [], None, f.method.settings
    for progress in run(f, observe=lambda key, model, trained: seen.append((key, model))):
        if not seen:
            continue
        key, sent = seen[0]
        train = f.stream.steps[key.step].train
        lists = {user: train.of(user).tolist() for user in (train.lengths > 0).nonzero().flatten().tolist()}
        kind = oracle.OnTheSphere if s.client_loss == "alignment" else oracle.Round
        plain = kind(seed=3, step=key.step, round=key.round, backbone=backbone, settings=f.backbone.settings,
                     optimiser=optimiser, batch_size=batch, epochs=1, negatives=4)
        plain.spread, plain.method = spread, s
        _, uploads, private = plain.run(lists, sent, oracle.nothing)
        drawn = {}
        for user in lists:
            number = oracle.stream(3, "canonfedrec anchors", key.step, key.round, user)
            drawn[user] = sorted(range(sent.n_items), key=lambda item: number(item) >> 1)
        table, spread = oracle.on_the_sphere(sent.public[ITEM], {user: each[ITEM] for user, each in uploads.items()},
                                             {user: len(items) for user, items in lists.items()}, drawn, s)
        torch.testing.assert_close(progress.model.public[ITEM], table, atol=1e-9, rtol=1e-9)
        same_clients(progress.model.private, private)
        if s.client_loss == "alignment":
            torch.testing.assert_close(f.method.server_state[f"spread of {ITEM}"], spread, atol=1e-9, rtol=1e-9)
            row = progress.curve[-1]
            assert row["bytes_down"] - row["bytes_up"] == 8 * sent.n_items
        seen.clear()
        if (key.step, key.round) == (1, 0):
            return


def test_backbones_without_inner_products_are_refused(registry):
    with pytest.raises(UserError, match="'canonfedrec' turns item vectors that scores are inner products with, of whi"):
        build(registry, "method", "canonfedrec").trained_backbone(build(registry, "backbone", "fedncf"), 3)
