"""SCAFFOLD: rounds are Algorithm 1 on whole tables, one client at a time; bytes, settings, limits."""

import oracle
import pytest
import torch
from helpers import build, federation, same_clients

from fedcl_bench import LocalSettings, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.testing.worlds import growing_stream

LOCAL = LocalSettings(batch_size=8, local_epochs=2)
BACKBONES = {"fedmf": {"lr": 0.05, "dim": 4, "init_std": 0.3}, "fedncf": {"lr": 0.01, "lr_eta": 1.0, "dim": 4},
             "pfedrec": {"lr": 0.02, "lr_eta": 1.0, "dim": 4}, "ncf": {"lr": 0.05, "dim": 4, "hidden": (6,)}}


def parts(registry, backbone, method="scaffold", local=LOCAL, **server):
    return federation(registry, growing_stream(14, 30), build(registry, "method", method),
                      build(registry, "backbone", backbone, **BACKBONES[backbone]), 3, 2, local, precision="float64",
                      **server)


@pytest.mark.parametrize("backbone, ratio", [("fedmf", 0.5), ("fedncf", 1.0), ("pfedrec", 0.7), ("ncf", 0.7)])
def test_rounds_equal_the_oracle(registry, backbone, ratio):
    f, seen, controls = parts(registry, backbone, client_ratio=ratio), [], None
    for progress in run(f, observe=lambda key, model, trained: seen.append((key, model, trained.users))):
        if not seen:
            continue
        key, sent, _ = seen[0]
        train = f.stream.steps[key.step].train
        users = sorted(torch.cat([users for *_, users in seen]).tolist())
        controls = oracle.Controls() if key.round == 0 else controls  # anew in every block
        plain = oracle.Round(seed=3, step=key.step, round=key.round, backbone=backbone, settings=f.backbone.settings,
                             optimiser="sgd", batch_size=8, epochs=2, negatives=4)
        public, private = controls.run(plain, {user: train.of(user).tolist() for user in users}, sent)
        for name, expected in public.items():
            found = {**progress.model.public, **progress.model.dense}[name]
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
            torch.testing.assert_close(f.method.server_state[f"control of {name}"], controls.server[name], atol=1e-9,
                                       rtol=1e-9)
        same_clients(progress.model.private, private)
        seen.clear()
        if (key.step, key.round) == (1, 0):
            break
    assert max(float(table.abs().max()) for table in controls.server.values()) > 1e-4


def test_bytes_of_controls_go_up_and_down(registry):
    ft, row = (next(run(parts(registry, "fedmf", method))).curve[0] for method in ("ft", "scaffold"))
    assert row["bytes_up"] == 2 * ft["bytes_up"] + 16 and row["bytes_down"] == 2 * ft["bytes_down"]


def test_what_does_not_go_together(registry):
    with pytest.raises(UserError, match="'optimiser': found adam, accepted: sgd with method 'scaffold'"):
        parts(registry, "fedmf", local=LocalSettings("adam")).check()
