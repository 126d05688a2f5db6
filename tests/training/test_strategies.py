"""How clients are trained: the decision for every shipped pair that matters, and that a user sees it."""

import json

import pytest
import torch
from helpers import build, grown, one_step, ragged, strategy_of, train_round

from fedcl_bench import ITEM, USER, Backbone, UserError
from fedcl_bench.cli.main import main
from fedcl_bench.federation.compatibility import StreamKind, check
from fedcl_bench.federation.settings import FederationSettings
from fedcl_bench.training.strategies import Strategy, Training, choose_strategy, meaning_of
from fedcl_bench.kernels import ops
from fedcl_bench.kernels.functional import dot
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.training.sampling import make_chunks

FT = Method(NoSettings())
STEP = one_step(ragged([0, 1], [2], [1, 3]), 6)


def model_of(backbone):
    return grown(backbone, STEP, dtype=torch.float32)


@pytest.mark.parametrize("method, backbone, settings, strategy", [
    ("ft", "fedmf", {}, "FUSED"), ("ft", "pfedrec", {}, "FUSED"), ("rlp2", "fedmf", {}, "FUSED"),
    ("f3crec", "fedmf", {}, "FUSED"), ("ft", "fedncf", {}, "FACTORED"), ("kd", "pfedrec", {}, "FUSED"),
    ("f3crec", "fedncf", {}, "FACTORED"),
    ("ft", "fedmf", {"tolerance": 0.1}, "FACTORED"), ("ft", "fedmf", {"negative_draw": "distinct"}, "FUSED"),
    ("reg", "fedmf", {}, "FUSED"), ("reg", "fedncf", {}, "FACTORED"), ("reg", "fedmf", {"tolerance": 0.1}, "ROWS"),
    ("colr", "fedmf", {}, "FACTORED"),
    ("ft", "fedmf", {"optimiser": "adam"}, "ROWS"), ("ft", "biasmf", {}, "ROWS"),
    ("ft", "fedrap", {}, "LAZY_DECAY"), ("ft", "gpfedrec", {}, "LAZY_DECAY"), ("f3crec", "fedrap", {}, "LAZY_DECAY"),
    ("spp", "fedrap", {}, "WHOLE"),
    ("ft", "fedrap", {"optimiser": "adam"}, "WHOLE")])
def test_the_strategy_of_a_pair(registry, monkeypatch, method, backbone, settings, strategy):
    monkeypatch.setattr(ops, "why_not", lambda: None)
    backbone, method = build(registry, "backbone", backbone), build(registry, "method", method)
    assert strategy_of(backbone, method, model_of(backbone), LocalSettings(**settings)) is Strategy[strategy]


@pytest.mark.parametrize("method, backbone, expected", [("ft", "fedmf", True), ("colr", "fedncf", True),
                                                        ("f3crec", "fedmf", False), ("ft", "falling", False)])
def test_whether_a_local_batch_depends_on_its_number(registry, method, backbone, expected):
    """By what a method draws, or by a learning rate that falls."""
    falling = backbone == "falling"
    backbone = build(registry, "backbone", "fedmf" if falling else backbone)
    if falling:
        backbone = changed(backbone, learning_rates=lambda self, n_items, round_=0, batch=0: {
            USER: 1.0 if batch < 20 else 0.5, ITEM: 1.0})
    training = Training(backbone, build(registry, "method", method), LocalSettings(), Strategy.FACTORED)
    assert training.unnumbered(model_of(backbone)) is expected


def changed(backbone, **attributes):
    """A backbone of a class derived from this one's."""
    return type("Changed", (type(backbone),), attributes)(backbone.settings)


@pytest.mark.parametrize("hooks, strategy", [
    # whatever looks at parameters in training or adds to it, and factors that are made of parameters
    ({"loss": lambda self, s, y, w: (s * w).sum(1)}, "FACTORED"),
    ({"factors": lambda self, c: (2.0 * c[USER], None)}, "FACTORED"),
    ({"factors": lambda self, c: (c[USER].detach(), None)}, "FACTORED"),
    ({"pull": lambda self, n_items: 0.1}, "FACTORED"),
    # what reads item rows otherwise than by inner products
    ({"score": lambda self, clients, rows: 2.0 * dot(clients[USER], rows[ITEM])}, "ROWS"),
    ({"regulariser": lambda self, clients, rows, weights, served, round_: rows[ITEM].square().sum((1, 2))}, "ROWS")],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_what_a_backbone_changes_is_heeded(registry, monkeypatch, hooks, strategy):
    monkeypatch.setattr(ops, "why_not", lambda: None)
    backbone = changed(build(registry, "backbone", "fedmf"), **hooks)
    assert strategy_of(backbone, FT, model_of(backbone), LocalSettings()) is Strategy[strategy]


@pytest.mark.parametrize("name, hooks, message", [
    ("fedmf", {"weight_decay": 0.1}, "has weight_decay, which needs whole_tables"),
    ("feddae", {"regulariser": lambda *arguments: 0.0}, r"has regulariser\(\), which is not asked"),
    ("sasrec", {"regulariser": lambda *arguments: 0.0}, r"has regulariser\(\), which is not asked")])
def test_what_a_backbone_declares_and_nobody_asks_is_refused(registry, name, hooks, message):
    backbone = changed(build(registry, "backbone", name), **hooks)
    kind = StreamKind(domains=False, sessions=name == "sasrec", known=False, features=False)
    with pytest.raises(UserError, match=message):
        check(backbone, FT, kind, "federated", LocalSettings(negatives=1), FederationSettings())


@pytest.mark.parametrize("hooks", [{"end_local": lambda self, local: None},
                                   {"local_loss": lambda self, batch: batch.scores.sum(1)},
                                   {"replayed_items": lambda self, users, draw: None}], ids="-".join)
def test_what_a_method_sees_needs_local_batches(registry, monkeypatch, hooks):
    monkeypatch.setattr(ops, "why_not", lambda: None)
    fedmf = build(registry, "backbone", "fedmf")
    method = type("Sees", (Method,), hooks)(NoSettings())
    assert strategy_of(fedmf, method, model_of(fedmf), LocalSettings()) is Strategy.FACTORED


@pytest.mark.parametrize("hooks", [{"weight_decay": 0.1}, {"keeps_local_tables": True}, {"serves_tables": True},
                                   {"own_loss": lambda self, clients, rows, batch: rows[ITEM].sum((1, 2))}],
                         ids="-".join)
def test_what_whole_histories_cannot_heed(registry, monkeypatch, hooks):
    feddae = build(registry, "backbone", "feddae")
    assert strategy_of(feddae, FT, model_of(feddae), LocalSettings()) is Strategy.HISTORIES
    assert strategy_of(changed(feddae, **hooks), FT, model_of(feddae), LocalSettings()) is not Strategy.HISTORIES


def test_rows_that_train_along_a_basis_do_not_rest(registry):
    fedrap = build(registry, "backbone", "fedrap")
    method = type("Basis", (Method,), {"row_basis": lambda self, name, width, draw: torch.eye(width)[:2]})(NoSettings())
    assert strategy_of(fedrap, method, model_of(fedrap), LocalSettings()) is Strategy.WHOLE


def test_a_private_table_that_factors_do_not_have(registry, monkeypatch):
    monkeypatch.setattr(ops, "why_not", lambda: None)
    fedmf = build(registry, "backbone", "fedmf")
    model = model_of(fedmf)
    model.private["another"] = torch.zeros(3, 1)
    assert strategy_of(fedmf, FT, model, LocalSettings()) is not Strategy.FUSED


def test_without_kernels_and_on_sessions(registry, monkeypatch):
    fedmf, ft = build(registry, "backbone", "fedmf"), build(registry, "method", "ft")
    arguments = fedmf, ft, model_of(fedmf), LocalSettings()
    assert choose_strategy(*arguments, sessions=True) is Strategy.ROWS
    sasrec = build(registry, "backbone", "sasrec")
    assert choose_strategy(sasrec, ft, model_of(sasrec), LocalSettings(), True) is Strategy.SESSIONS
    monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    assert choose_strategy(*arguments, sessions=False) is Strategy.FACTORED


def test_a_step_by_hand_gives_way_to_what_a_subclass_means(registry, ml100k):
    """A FedRAP whose logits are twice as large is trained by autograd, and differs; one that only repeats ``score`` is
    too, and does not."""
    step, settings = ml100k.steps[0], LocalSettings(batch_size=128, local_epochs=2)
    backbone = build(registry, "backbone", "fedrap", lr=0.1, lr_items=5.0, dim=4, l2=1e-3, mu=0.05)
    cls = type(backbone)

    class Same(cls):
        def score(self, clients, rows):
            return super().score(clients, rows)

    class Twice(cls):
        def score(self, clients, rows):
            return 2.0 * super().score(clients, rows)

    model, users = grown(backbone, step), torch.arange(0, step.n_users, 60)
    chunks = make_chunks(step, users, settings, 8)
    by_hand, same, twice = (train_round(chunks, model, one, FT, settings, 0, 0, 1)[0].private["score.weight"]
                            for one in (backbone, Same(backbone.settings), Twice(backbone.settings)))
    torch.testing.assert_close(same, by_hand, atol=1e-13, rtol=1e-12)
    assert float((twice - by_hand)[users].abs().max()) > 1e-4


def test_a_user_sees_it(tmp_path, capsys):
    assert main(["--method", "kd", "--backbone", "fedmf", "-v", "--json", "--results", str(tmp_path), "--set",
                 "rounds=1", "--set", "blocks=2", "--set", "k_core=60"]) == 0
    out, err = capsys.readouterr()
    strategies = json.loads(out)["environment"]["strategies"]
    assert len(strategies) == 2 and strategies[1] == "fused"
    for block, name in enumerate(strategies):
        assert f"block {block}: clients are trained '{name}' ({meaning_of(name)})" in err


def test_backbone_without_score_is_told():
    class Neither(Backbone):
        name = "neither"

    with pytest.raises(NotImplementedError, match="backbone 'neither' has neither score"):
        Neither(None).score({}, {ITEM: torch.zeros(1, 1, 1)})
