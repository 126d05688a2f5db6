"""Methods that see single updates: what the view gives, what does not go together, and what a client tells."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_same, build, federation, finish

from fedcl_bench import SIZES, LocalSettings, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import growing_stream, session_log, session_stream

SMALL = {"fedmf": {"lr": 0.05, "dim": 4}, "gpfedrec": {"dim": 4},
         "fedrap": {"lr_items": 1.0, "dim": 4}, "ncf": {"dim": 4, "hidden": (6,)},
         "sasrec": {"dim": 6, "max_length": 5, "dropout": 0.0}}


class PlainMean(Method):
    """FedAvg by single updates."""

    name, first_step = "plain-mean", 0

    def aggregate_updates(self, updates):
        return updates.weighted_sum(updates.weights / updates.weights.sum())


class Watching(PlainMean):
    """Looks at all that there is to see: everything must fit what chunks show."""

    def uploads(self, backbone, round_):
        return {"loss": ()}

    def end_local(self, local):
        local.upload("loss", local.loss)

    def aggregate_updates(self, updates):
        shown = torch.cat([positions for positions, _ in updates.chunks()])
        assert sorted(shown.tolist()) == list(range(len(updates.users))) and updates.users.diff().min() > 0
        parts = [changes for _, changes in updates.chunks()]
        flat = torch.cat([torch.cat([part[name].flatten(1) for name in part], 1) for part in parts])[shown.argsort()]
        torch.testing.assert_close(updates.norms(), flat.norm(dim=1).double())
        torch.testing.assert_close(updates.products(), flat.double() @ flat.double().T)
        sums = updates.weighted_sum(torch.arange(len(flat)) / 7.0)
        expected = (torch.arange(len(flat), dtype=flat.dtype)[:, None] / 7.0 * flat).sum(0)
        torch.testing.assert_close(torch.cat([table.flatten() for table in sums.values()]), expected)
        sums = updates.coordinatewise(lambda changes, sent: (changes * sent).sum(0))
        torch.testing.assert_close(torch.cat([table.flatten() for table in sums.values()]), flat.sum(0))
        self.seen = updates, flat
        return super().aggregate_updates(updates)


def parts(registry, method, backbone, **server):
    stream = session_stream(session_log(40), 40) if backbone == "sasrec" else growing_stream()
    local = LocalSettings(batch_size=8, local_epochs=2, negatives=1 if backbone == "sasrec" else 4)
    return federation(registry, stream, method, build(registry, "backbone", backbone, **SMALL[backbone]), 0, 2, local,
                      precision="float64", **server)


@pytest.mark.parametrize("backbone, method, server", [
    ("fedmf", "ft", {"client_ratio": 0.5, "client_dropout": 0.2, "weighting": "interactions"}),
    ("fedmf", "reg", {"upload_clip": 0.05, "stragglers": 0.5, "upload_mechanism": "gaussian"}),
    ("fedrap", "f3crec", {"upload_clip": 0.05, "weighting": "uniform"}),
    ("ncf", "ft", {"fold_in": 3}), ("sasrec", "ft", {"weighting": "interactions"})])
def test_the_mean_of_single_updates_is_the_mean(registry, backbone, method, server):
    plain = build(registry, "method", method)
    single = type("Single", (type(plain),), {"aggregate_updates": PlainMean.aggregate_updates})(plain.settings)
    ends = [finish(parts(registry, each, backbone, **server)) for each in (plain, single)]
    assert_same(ends[1], ends[0], 1e-9)


def test_a_run_goes_on_with_what_the_server_answered_in_earlier_rounds_alone(registry):
    class AnsweredOnce(Method):
        name, first_step = "answered-once", 0

        def uploads(self, backbone, round_):
            return {} if round_ else {"loss": ()}

        def end_local(self, local):
            if local.draw.round == 0:
                local.upload("loss", local.loss)

        def end_round(self, round_, users, uploads):
            return {name: values[:, None] for name, values in uploads.items()}
    points = list(run(parts(registry, AnsweredOnce(NoSettings()), "fedmf")))
    for start in (0, 1):  # after each round of the first block
        again = list(run(parts(registry, AnsweredOnce(NoSettings()), "fedmf"), points[start]))
        assert [point.answered for point in again] == [("loss",)] * len(points[start + 1:])
        assert_same(again[-1], points[-1])


@pytest.mark.parametrize("backbone", ["fedrap", "ncf"])
def test_views_agree_and_losses_are_told(registry, monkeypatch, backbone):
    monkeypatch.setattr(SIZES, "compared", 200)
    method, told = Watching(NoSettings()), {}

    def observe(key, model, trained):
        told.update(zip(trained.users.tolist(), trained.loss.tolist()))
    for progress in run(parts(registry, method, backbone), observe=observe):
        if progress.round:
            updates, flat = method.seen
            assert updates.uploads["loss"].tolist() == [told[user] for user in updates.users.tolist()]
            assert float(flat.norm(dim=1).min()) > 0.0


def test_noise_is_on_every_number_of_each_update(registry):
    """Noise on uploads of clients that change nothing: with the law that the setting says, and the same when asked for
    again."""
    method = Watching(NoSettings())
    f = parts(registry, method, "fedmf", upload_noise=0.1)
    f = replace(f, backbone=build(registry, "backbone", "fedmf", lr=1e-12, dim=4))
    end = finish(f)
    updates, flat = method.seen
    assert (flat != 0.0).all() and float(flat.std()) == pytest.approx(0.1 * 2 ** 0.5, rel=0.1)
    assert float(flat.mean(0).std()) == pytest.approx(0.1 * (2 / len(flat)) ** 0.5, rel=0.2)
    assert len({round(row, 9) for row in flat[:, 0].tolist()}) == len(flat)
    assert all(torch.isfinite(table).all() for table in end.model.public.values())


@pytest.mark.parametrize("returned, said", [
    (lambda updates: {}, "aggregate_updates returned ,\nexpected the public parameters in their order: item_embed"),
    (lambda updates: updates.weighted_sum(torch.ones(3, 1)), r"weighted_sum returned .* \(N,\): a factor per part"),
    (lambda updates: updates.coordinatewise(lambda changes, sent: changes), r"coordinatewise returned .* \(n,\)"),
    (lambda updates: {name: table.half() for name, table in updates.weighted_sum(updates.weights).items()},
     "aggregate_updates.*expected torch.float64, as the parameter has")])
def test_what_it_must_return(registry, monkeypatch, returned, said):
    monkeypatch.setattr(PlainMean, "aggregate_updates", lambda self, updates: returned(updates))
    with pytest.raises(UserError, match=f"(?s)method 'plain-mean': {said}"):
        finish(parts(registry, PlainMean(NoSettings()), "fedmf"))


class Halves(Method):
    """Halves what the server has of dense parameters."""

    name, first_step = "halves", 0

    def aggregate_dense(self, dense):
        return {name: 0.5 * value for name, value in dense.items()}


def test_the_server_sees_dense_parameters(registry, monkeypatch):
    plain, halved = (next(run(parts(registry, method, "ncf"))).model
                     for method in (build(registry, "method", "ft"), Halves(NoSettings())))
    assert_same(halved.public, plain.public, 0.0)
    assert_same(halved.dense, {name: 0.5 * value for name, value in plain.dense.items()}, 0.0)
    monkeypatch.setattr(Halves, "aggregate_dense", lambda self, dense: {})
    with pytest.raises(UserError, match="method 'halves': aggregate_dense returned ,\nexpected the public parameters"):
        next(run(parts(registry, Halves(NoSettings()), "ncf")))


def test_what_does_not_go_together(registry):
    plain = PlainMean(NoSettings())
    for settings, said in [
        ({"aggregator": "krum", "krum_malicious": 10},
         "'krum_malicious': found 10, accepted: less than .N - 2. / 2 of"),
        ({"aggregator": "krum", "krum_selected": 30},
         "'krum_selected': found 30, accepted: at most 17, the 18 that take"),
        ({"aggregator": "median", "backbone": "gpfedrec"},
         "aggregator=median needs a server that adds up clients' changes, and that of 'gpfedrec' does more"),
        ({"aggregator": "median", "backbone": "sasrec", "init": "per_client"},
         "accepted: server with aggregator=median"),
        ({"aggregator": "median", "method": plain}, "accepted: mean with method 'plain-mean'"),
        ({"method": plain, "backbone": "sasrec", "init": "per_client"},
         "'init': found per_client, accepted: server with method 'plain-mean'"),
        ({"method": plain, "backbone": "gpfedrec"}, "and that of 'gpfedrec' does more"),
    ]:
        more = {"method": build(registry, "method", "ft"), "backbone": "fedmf", **settings}
        with pytest.raises(UserError, match=said):
            parts(registry, **more).check()
    f = parts(registry, build(registry, "method", "ft"), "fedmf", aggregator="krum", krum_malicious=4, krum_selected=3,
              client_dropout=0.3)
    f.check()
    with pytest.raises(UserError, match="'krum_malicious': found 4, .* which are 9 in one"):  # in a later round
        replace(f, server=replace(f.server, rounds=30)).check()
    with pytest.raises(UserError, match="is about many clients, and with topology=central one holds all"):
        replace(parts(registry, plain, "sasrec"), topology="central").check()


def test_aggregators_give_up_secure_aggregation(registry):
    config = make_config(registry, "kd", "fedmf", "ml-100k", overrides=[("test", {"aggregator": "median"})])
    assert config.gives_up == {"F7": "the server looks at each client's change, for aggregator=median"}
    assert registry.gives_up("kd", config.settings) == ("F7",) and registry.gives_up("kd", {}) == ()
