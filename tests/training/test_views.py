"""What a method sees of a local batch on lists: scores, labels, weights, mask and the clients' own loss; and of
sessions that are replayed."""

from __future__ import annotations

import pytest
import torch
from helpers import ITEM, USER, build, federation, grown, one_step, ragged, same_tables, train_round

import fedcl_bench as fb
from fedcl_bench import SIZES, LocalSettings
from fedcl_bench.core.errors import PluginError
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels.functional import weighted_bce
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.testing.worlds import growing_stream, session_log, session_stream
from fedcl_bench.training.sampling import Needs, make_chunks

STEP = one_step(ragged([0, 1, 2, 3, 4, 4], [5], [1, 3, 6], [7, 8]), 12)
INNER = ("fedmf", "fedncf", "pfedrec")  # whose item rows are not copied
SMALL = {"ncf": {"hidden": [8]}, "gpfedrec": {"hidden": [8]}}


class Seen(Method):
    """Keeps what it sees of every local batch."""

    def __init__(self):
        super().__init__(NoSettings())
        self.batches = []

    def replayed_items(self, users, draw):
        return (users[:, None] + torch.arange(2)) % STEP.n_items

    def local_loss(self, batch: fb.LocalBatch):
        assert batch.scores.requires_grad and batch.loss.requires_grad
        self.batches.append({name: getattr(batch, name).detach().clone() for name in (
            "users", "scores", "labels", "weights", "mask", "loss")})


class Weighs(Method):
    """Weighs each client's loss anew."""

    def __init__(self, factor):
        super().__init__(NoSettings())
        self.factor = factor

    def local_loss(self, batch):
        return (self.factor - 1.0) * batch.loss


def train(registry, name, method, settings, **options):
    """The model after a round of all clients."""
    backbone = build(registry, "backbone", name, **{**SMALL.get(name, {}), **options})
    model = grown(backbone, STEP)
    needs = Needs(backbone.pairwise, backbone.whole_tables, inner=name in INNER and not method.sees_rows)
    chunks = make_chunks(STEP, torch.arange(4), settings, 8, needs)
    assert max(len(chunk.users) for chunk in chunks) > 1  # so that there is padding
    return train_round(chunks, model, backbone, method, settings, 0, 0, 0)[0]


def views_of(registry, name, batch_size, **options):
    """What a method saw of one epoch, and how many samples each client has in each of its batches."""
    seen = Seen()
    train(registry, name, seen, LocalSettings(batch_size=batch_size, negatives=2, local_epochs=1), **options)
    for view in seen.batches:
        weights, mask = view["weights"], view["mask"]
        assert view["scores"].shape == view["labels"].shape == weights.shape == mask.shape
        assert torch.equal(mask, weights > 0.0) and not view["labels"][~mask].any()
    assert any((~view["mask"]).any() for view in seen.batches)
    return seen.batches


@pytest.mark.parametrize("name", ["fedmf", "fedncf", "pfedrec", "fedrap", "gpfedrec"])
@pytest.mark.parametrize("batch_size", [64, 5])
def test_columns_of_a_pointwise_batch(registry, name, batch_size):
    """Weights sum to 1, a third of it positives if the batch is all there is; the loss is what columns say."""
    positives = torch.zeros(4, dtype=torch.float64)
    for view in views_of(registry, name, batch_size):
        users, sums = view["users"], view["weights"].sum(1)
        torch.testing.assert_close(sums, (sums > 0.0).to(sums))  # a client that sits the batch out has none
        of_columns = weighted_bce(view["scores"], view["labels"], view["weights"])
        if name != "fedrap":  # which adds a term of its own
            torch.testing.assert_close(view["loss"], of_columns)
        positives[users] += (view["weights"] * view["labels"]).sum(1)
    if batch_size == 64:
        turns = 2 if name == "pfedrec" else 1  # its parameters take turns
        torch.testing.assert_close(positives, torch.full_like(positives, turns / 3.0))


@pytest.mark.parametrize("name", ["ncf", "biasmf"])
@pytest.mark.parametrize("batch_size", [64, 5])
def test_columns_of_a_pairwise_batch(registry, name, batch_size):
    for view in views_of(registry, name, batch_size):
        weights, positive = view["weights"], view["labels"] == 1.0
        one = (weights.sum(1) > 0.0).to(weights)
        torch.testing.assert_close((weights * positive).sum(1), one)
        torch.testing.assert_close((weights * ~positive).sum(1), one)


def test_an_item_drawn_twice_counts_twice_in_one_column(registry):
    """User 0 has item 4 twice: with two negatives for each of 6 positives it is 2 of 18 samples."""
    (view,) = [view for view in views_of(registry, "gpfedrec", 64) if 0 in view["users"]]
    row = int((view["users"] == 0).nonzero())
    weights = view["weights"][row][view["labels"][row] == 1.0]
    assert sorted((weights * 18).round().int().tolist()) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("name, batch_size", [("fedmf", 64), ("fedmf", 5), ("fedncf", 64), ("ncf", 5), ("biasmf", 64)])
def test_a_loss_of_double_weight_is_double_the_learning_rate(registry, name, batch_size):
    """Under SGD, padding, replay and all."""
    settings = LocalSettings(batch_size=batch_size, negatives=2, local_epochs=2)
    doubled = train(registry, name, Weighs(2.0), settings, lr=0.1)
    expected = train(registry, name, Weighs(1.0), settings, lr=0.2)
    same_tables(doubled, expected, 1e-7)
    same_tables(train(registry, name, Method(NoSettings()), settings, lr=0.2), expected, 1e-7)
    single = train(registry, name, Weighs(1.0), settings, lr=0.1)
    assert not any(map(torch.allclose, doubled.public.values(), single.public.values()))


class Drifts(Method):
    """Corrects every gradient of a client by a number of its own, once as a term of its loss."""

    name, sees_rows = "drifts", True

    def local_loss(self, batch):
        return sum(moved.flatten(1).sum(1) for moved in batch.moved.values()) * (batch.users + 1.0) / 8


class Corrects(Drifts):

    local_loss = Method.local_loss

    def gradient_correction(self, local, items):
        widths = {name: (*items.shape, *table.shape[1:]) for name, table in self.public.items()}
        shapes = widths | {name: value.shape for name, value in local.dense.items()}
        return {name: ((local.users + 1.0) / 8).view(-1, *[1] * (len(shape) - 1)).expand(shape)
                for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["fedmf", "ncf"])
def test_a_corrected_gradient_is_that_of_a_term_of_the_loss(registry, name):
    """In every local batch, of rows that are looked up in another one or twice too."""
    settings = LocalSettings(batch_size=5, negatives=2, local_epochs=2)
    method = Corrects(NoSettings())
    method.public = build(registry, "backbone", name, **SMALL.get(name, {})).new_rows(0, range(0), range(0))[0]
    found, expected = (train(registry, name, each, settings, lr=0.1) for each in (method, Drifts(NoSettings())))
    same_tables(found, expected, 1e-6)


class Miscorrects(Corrects):

    name, first_step, needs_sequential, result = "miscorrects", 0, None, {}

    def gradient_correction(self, local, items):
        return self.result


def test_corrections_are_of_public_parameters_and_of_lists(registry):
    method = Miscorrects(NoSettings())
    f = federation(registry, growing_stream(), method, build(registry, "backbone", "fedmf", dim=4))
    for result, message in ((3, "returned 3"), ({USER: torch.zeros(1)}, f"{USER},\nexpected a dictionary of some"),
                            ({ITEM: torch.zeros(1)}, "expected a floating tensor")):
        method.result = result
        with pytest.raises(PluginError, match=f"(?s)gradient_correction.*{message}"):
            next(run(f))
    method.sees_rows = False
    with pytest.raises(fb.UserError, match="has gradient_correction.*expected sees_rows = True"):
        f.check()
    sequential = build(registry, "backbone", "gru4rec", dim=4, max_length=5)
    with pytest.raises(fb.UserError, match="has gradient_correction.*sequential backbones such as 'gru4rec' do not"):
        federation(registry, session_stream(session_log(40), 40), method, sequential,
                   local=LocalSettings(negatives=1)).check()


class Unannounced(Method):
    """Reads item rows of clients that hold none."""

    name, first_step = "unannounced", 0

    def local_loss(self, batch):
        return sum(moved.flatten(1).sum(1) for moved in batch.moved.values())


def test_who_reads_rows_says_so(registry):
    f = federation(registry, growing_stream(), Unannounced(NoSettings()), build(registry, "backbone", "fedmf", dim=4))
    with pytest.raises(PluginError, match="'unannounced': local_loss reads batch.moved.*expected sees_rows = True"):
        next(run(f))


class Replays(Method):
    """Of every client the first session, or one that it does not have."""

    name, first_step, needs_sequential, number = "replays", 0, True, 0

    def replayed_sessions(self, users, draw):
        return torch.full((len(users), 2), -1).index_fill_(1, torch.tensor([0]), self.number)

    def local_loss(self, local):
        vectors, replayed = local.replay(), local.replayed
        assert replayed.sessions.shape[1] == 1 and vectors.requires_grad  # in as few columns as hold them
        torch.testing.assert_close(local.replay(dropout=False)[:, 0], local.encode())  # the session of the first round
        assert torch.equal(replayed.items[:, 0], local.items) and torch.equal(replayed.real[:, 0], local.sequence.real)
        scores = local.replay_scores(vectors[:, 0])
        assert scores.shape == (*vectors[:, 0].shape[:2], replayed.items.shape[2])
        return scores.sum((1, 2))


def test_replayed_sessions_are_those_of_the_client(registry):
    stream = session_stream(session_log(40), 40)
    method = Replays(NoSettings())
    f = federation(registry, stream, method, build(registry, "backbone", "gru4rec", dim=4, max_length=5))
    next(run(f))
    method.number = 9
    with pytest.raises(PluginError, match="'replays': replayed_sessions returned numbers from -1 to 9,"):
        next(run(f))


class Encodes(Method):
    """Keeps what the clients' present models make of their sessions."""

    first_step, vectors = 0, None

    def local_loss(self, local):
        self.vectors = local.encode()


@pytest.mark.parametrize("name", ["sasrec", "dmi-gnn", "hearint"])
def test_sessions_are_encoded_with_what_clients_remember(registry, name):
    method = Encodes(NoSettings())
    backbone = build(registry, "backbone", name, dim=4, max_length=5)
    next(run(federation(registry, session_stream(session_log(40), 40), method, backbone)))
    assert method.vectors.shape[2] == 4 and method.vectors.isfinite().all()


@pytest.mark.parametrize("hook", ["score", "factors"])
def test_what_clients_remember_is_among_their_parameters_in_training_too(registry, hook):
    base, asked = type(build(registry, "backbone", "fedmf")), []

    def remember(self, step, memory):
        return {"half": torch.full((step.n_users, 1), 0.5)}

    def halved(self, clients, *others):
        asked.append(clients["half"])
        return super(cls, self).score(clients, *others) * clients["half"] if hook == "score" else \
            (clients[USER] * clients["half"], None)

    cls = type("Remembers", (base,), {"remember": remember, hook: halved})
    *_, last = run(federation(registry, growing_stream(), Method(NoSettings()), cls(base.Settings()), rounds=2))
    assert last.curve and len(asked) >= len(last.curve)


class Looks(Method):
    """Scores are made of the rows that it sees, which are of the items that it sees, as are those that have moved."""

    name, sees_rows, looked = "looks", True, 0

    def local_loss(self, batch):
        (rows,), (moved,), real = batch.rows.values(), batch.moved.values(), batch.mask[:, :, None]
        products = (rows @ batch.private[USER][:, :, None]).squeeze(2)
        torch.testing.assert_close(products[batch.mask], batch.scores[batch.mask])
        table = self.sent.expand(len(rows), -1, -1).scatter_add(
            1, batch.moved_items[:, :, None].expand_as(moved), moved)  # each client's, whole
        found = table.gather(1, batch.items[:, :, None].expand_as(rows))
        torch.testing.assert_close(rows * real, found * real)
        self.looked += int(moved.any())


@pytest.mark.parametrize("batch_size, weighted", [(64, 8), (5, 8), (5, 0)])
def test_rows_are_of_the_items(registry, monkeypatch, batch_size, weighted):
    monkeypatch.setattr(SIZES, "weighted_batches", weighted)  # 0: each batch scores rows of its own
    method, backbone = Looks(NoSettings()), build(registry, "backbone", "fedmf", dim=4, lr=0.1)
    settings = LocalSettings(batch_size=batch_size, negatives=2, local_epochs=2)
    model = grown(backbone, STEP)
    method.sent = model.public[ITEM]
    train_round(make_chunks(STEP, torch.arange(4), settings, 8, Needs(False, False)), model, backbone, method, settings,
                0, 0, 0)
    assert method.looked
