"""Malicious clients: uploads against plain loops, their place in a round, exposure, and what does not go together."""

import math

import numpy as np
import pytest
import torch
from helpers import ITEM, USER, build, executed, federation, federation_of
from torch.nn import functional

from fedcl_bench import Attack, LocalSettings, Seen, Snapshot, rng, score_users
from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.evaluation.beyond_accuracy import exposure
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.experiments.partition import check_divisible
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.malicious import known_to, targets_of
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.rng import DrawKey
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing import assert_passed, check_attack
from fedcl_bench.testing.worlds import growing_stream

SEED, RATE = 3, 0.7
LOCAL = LocalSettings(batch_size=8)


@pytest.fixture(scope="module")
def stream():
    return growing_stream()


def table(rows, width=4, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(stream, attack, items, round_, clients, changes=None):
    step = stream.steps[0]
    return Seen(torch.tensor(clients), {ITEM: items}, {}, {ITEM: RATE}, targets_of(attack, step, SEED),
                known_to(attack, step, SEED), {ITEM: changes} if changes is not None else {}, DrawKey(SEED, 0, round_))


def one(keys, index):
    """A uniform number of a stream."""
    return float(rng.uniform(rng.bits(keys, torch.tensor(index))))


# FedRecAttack, as loops over users, clients and rows.

class PlainFedRecAttack:
    def __init__(self, settings, users, items, width):
        self.s, self.n_items, self.chosen = settings, items, {}
        self.users = torch.nn.Parameter(rng.normal_rows(SEED, "users of the attacker", 0, users, width) * 0.01)
        self.adam = torch.optim.Adam([self.users], lr=settings.attack_lr)

    def fit(self, seen, items):
        lists = [seen.known.of(u).tolist() for u in range(len(self.users))]
        order = sorted(range(len(lists)), key=lambda u: int(rng.sort_keys(rng.bits(
            seen.draw.clients("attack order", torch.tensor(u)), torch.tensor(0)))))
        for first in range(0, len(order), self.s.attack_batch):
            loss = 0.0
            for u in order[first:first + self.s.attack_batch]:
                unknown = [i for i in range(self.n_items) if i not in lists[u]]
                for k, item in enumerate(lists[u]):
                    luck = one(seen.draw.clients("attack negatives", torch.tensor(u)), k)
                    other = unknown[int(luck * len(unknown))]
                    loss = loss - functional.logsigmoid(self.users[u] @ (items[item] - items[other]))
            self.adam.zero_grad()
            if torch.is_tensor(loss):
                loss.backward()
            else:
                self.users.grad = torch.zeros_like(self.users)
            self.adam.step()
        return lists

    def upload(self, seen, items):
        lists, targets = self.fit(seen, items), seen.targets.tolist()
        rows, loss = items.clone().requires_grad_(), 0.0
        for u, known in enumerate(lists):
            others = [i for i in range(self.n_items) if i not in known and i not in targets]
            p = self.users[u].detach()
            last = sorted(others, key=lambda i: -float(p @ items[i]))[:10]
            for target in [t for t in targets if t not in known] if known else []:
                x = p @ (rows[last.pop()] - rows[target])
                loss = loss + (x if x >= 0 else torch.exp(x) - 1)
        loss.backward()
        left, sent = rows.grad.clone(), []
        for m in seen.clients.tolist():
            if m not in self.chosen:
                self.chosen[m] = self.choose(m, left, targets)
            part = torch.zeros_like(items)
            for i in self.chosen[m]:
                norm = float(left[i].norm())
                part[i] = left[i] * min(1.0, self.s.gradient_limit / norm) if norm else 0.0
                left[i] = left[i] - part[i]
            sent.append(-RATE / self.s.item_limit * part)
        return torch.stack(sent)

    def choose(self, m, gradient, targets):
        norms = [float(row.norm()) for row in gradient]
        keys = rng.row_keys(rng.key(SEED, "items of the attack"), torch.tensor(m))
        race = {i: -math.log(one(keys, i)) / max(norm, 1e-9 * max(norms)) for i, norm in enumerate(norms)
                if i not in targets}
        return [*targets, *sorted(race, key=race.get)[:self.s.item_limit - len(targets)]]


def test_fedrecattack_equals_loops(registry, stream):
    attack = build(registry, "attack", "fedrecattack", target_items=2, known_interactions=0.3, item_limit=8,
                   gradient_limit=0.4, attack_lr=0.3, attack_batch=7)
    step = stream.steps[0]
    plain = PlainFedRecAttack(attack.settings, step.n_users, step.n_items, 4)
    for round_, clients in enumerate(([0, 1, 3], [1, 2, 3])):
        items = 2.0 * table(step.n_items, seed=round_)
        here = seen(stream, attack, items, round_, clients)
        rows, chosen = attack.upload(here)[ITEM]
        dense = torch.zeros(len(clients), step.n_items, 4, dtype=torch.float64)
        dense.scatter_add_(1, chosen[:, :, None].expand_as(rows), rows)
        expected = plain.upload(here, items)
        torch.testing.assert_close(dense, expected, rtol=0.0, atol=1e-9)
        assert rows.shape == (3, 8, 4) and all(len(set(each)) == 8 for each in chosen.tolist())
        whole = expected.norm(dim=2) * 8 / RATE
        assert float(whole.max()) == pytest.approx(0.4) and bool((whole[0][here.targets] > 0.0).all())


def test_what_an_attacker_knows_is_a_share_of_each_users_training_data(registry, stream):
    step = stream.steps[1]
    for share in (0.01, 0.5, 1.0):
        known = known_to(build(registry, "attack", "fedrecattack", known_interactions=share), step, SEED)
        for user in range(step.n_users):
            train = step.train.of(user).tolist()
            assert set(known.of(user).tolist()) <= set(train)
            assert len(known.of(user)) == math.ceil(len(train) * share)


# ClusterAttack.

def plain_clusters(rows, first):
    """Lloyd's iterations in loops."""
    centroids = first.copy()
    while True:
        nearest = [min(range(len(centroids)), key=lambda k: ((row - centroids[k]) ** 2).sum()) for row in rows]
        means = [np.mean([row for row, k in zip(rows, nearest) if k == each], 0) if each in nearest else centroids[each]
                 for each in range(len(centroids))]
        moved = sum(np.linalg.norm(a - b) for a, b in zip(means, centroids))
        centroids = np.array(means)
        if moved <= 1e-4:
            return nearest, centroids


def test_clusterattack_equals_loops(registry, stream):
    attack = build(registry, "attack", "clusterattack", clusters=3, most_clusters=12, cluster_window=1.0,
                   cluster_window_growth=1.0, cluster_smoothing=0.5, norm_scale=2.0)
    count, window, average, last, rounds, balance, counts = 3, 1.0, 0.0, None, 0, 0, []
    users, n_items = torch.tensor([2, 5, 11]), 30
    for round_ in range(6):
        items, changes = table(n_items, seed=round_), torch.stack([table(n_items, seed=9 + k) for k in range(3)])
        changes[:, ::3] = 0.0
        here = seen(stream, attack, items, round_, users.tolist(), changes)
        rows, where = attack.upload(here)[ITEM]
        assert where is None
        key = rng.key(SEED, "attack clusters", 0, round_)
        luck = rng.sort_keys(rng.bits(rng.row_keys(key, torch.zeros(1, dtype=torch.int64)), torch.arange(n_items)))
        nearest, centroids = plain_clusters(items.numpy(), items[luck.argsort()[:count]].numpy())
        norms = np.array([np.linalg.norm(row) for client in changes.numpy() for row in client])
        keys, loss = here.draw.clients("attack lengths", users), 0.0
        for i in range(n_items):
            apart = items[i].numpy() - centroids[nearest[i]]
            slope, loss = 2.0 * apart / count, loss + (apart ** 2).sum() / count
            for m in range(3):
                length = norms.mean() + one(keys[m], i) * norms.std(ddof=1) * 2.0
                expected = -slope * length / (np.linalg.norm(slope) + 1e-8)
                np.testing.assert_allclose(rows[m, i].numpy(), expected, rtol=0.0, atol=1e-9)
        average, rounds = 0.5 * average + 0.5 * loss, rounds + 1
        smoothed = average / (1.0 - 0.5 ** rounds)
        balance, last = balance + (0 if last is None else 1 if smoothed > last else -1), smoothed
        if abs(balance) >= window:
            count = min(round(count + math.sqrt(12 - count)), 12) if balance > 0 else \
                max(round(count - math.sqrt(count - 1)), 1)
            window, average, last, rounds, balance = 2.0 * window, 0.0, None, 0, 0
        counts.append(count)
        assert int(attack.state["clusters"]) == count
    assert len(set(counts)) > 1


# Their place in a round.

class Pushing(Attack):
    """Adds 1 to every number of the item table."""

    name, title = "pushing", "adds 1 to all"
    targets = 2

    def upload(self, seen):
        items = seen.public[ITEM]
        self.state = {"rounds": self.state.get("rounds", torch.zeros(())) + 1}
        self.last = seen
        return {ITEM: (torch.ones(len(seen.clients), *items.shape, dtype=items.dtype), None)}


class Among(Pushing):
    name, among_users = "among", True


def parts(registry, stream, attack, rounds=1, **server):
    backbone = build(registry, "backbone", "fedmf", lr=0.05, dim=4)
    f = federation(registry, stream, build(registry, "method", "ft"), backbone, 0, rounds, LOCAL,
                   EvaluationSettings(topk=(5,), valid_metric="ndcg@5"), precision="float64",
                   attack="x" if attack else "none", **server)
    return Federation(**{**vars(f), "attack": attack})


@pytest.mark.parametrize("kind, aggregator", [(Pushing, "mean"), (Among, "mean"), (Pushing, "norm_bound"),
                                              (Among, "norm_bound")])
def test_malicious_uploads_are_in_the_mean(registry, stream, kind, aggregator):
    robust = {"aggregator": aggregator, "norm_bound": 1e9}
    changes, begun = {}, []

    def observe(key, model, trained):
        begun.append(model.public[ITEM])
        changes.update(zip(trained.users.tolist(), trained.changes(model)[ITEM]))
    honest = next(run(parts(registry, stream, None, **robust), observe=observe))
    attack = kind(None)
    f = parts(registry, stream, attack, malicious=0.3, **robust)
    attacked = next(run(f))
    bad = attack.last.clients.tolist()
    assert len(bad) == int(0.3 * len(changes)) > 2
    others = [change for user, change in changes.items() if kind is Pushing or user not in bad]
    expected = begun[0] + (sum(others) + len(bad)) / (len(others) + len(bad))
    torch.testing.assert_close(attacked.model.public[ITEM], expected, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(attacked.model.private[USER], honest.model.private[USER], rtol=0.0, atol=1e-12)
    assert attacked.curve[0]["participants"] == len(others) + len(bad)
    assert attacked.curve[0]["loss"] == pytest.approx(honest.curve[0]["loss"], abs=1e-12)
    if kind is Among:
        torch.testing.assert_close(attack.last.changes[ITEM], torch.stack([changes[user] for user in bad]), rtol=0.0,
                                   atol=1e-12)


def test_attacks_end_after_their_blocks_and_ask_a_share(registry, stream):
    attack = Pushing(None)
    for progress in run(parts(registry, stream, attack, 2, malicious=0.5, attack_blocks=2, client_ratio=0.5)):
        if progress.step == 1 and progress.round == 1:
            active = int((stream.steps[1].train.lengths > 0).sum())
            assert len(attack.last.clients) == round(0.5 * int(0.5 * active)) > 1
    assert attack.last.draw.step == 1 and int(attack.state["rounds"]) == 4 == int(progress.attack_state["rounds"])
    honest = [row["participants"] for row in progress.curve if row["step"] == 2]
    assert honest == [round(0.5 * int((stream.steps[2].train.lengths > 0).sum()))] * 2


def test_exposure_counts_users_without_the_target(registry, stream):
    backbone, ft = build(registry, "backbone", "fedmf", dim=4), build(registry, "method", "ft")
    steps, last = stream.steps[:2], stream.steps[1]
    model = Snapshot({ITEM: table(last.n_items)}, {USER: table(last.n_users, seed=1)})
    targets = torch.tensor([3, 7])
    scores, result = score_users(backbone, model, torch.arange(last.n_users)), {5: {}, 10: {}}
    for user in range(last.n_users):
        had = {i for step in steps for name in ("train", "valid", "test") if user < len(step.split(name).lengths)
               for i in step.split(name).of(user).tolist()}
        order = sorted(set(range(last.n_items)) - had, key=lambda i: -float(scores[user, i]))
        if wanted := {3, 7} - had:
            for k, of_k in result.items():
                of_k[user] = len(wanted & set(order[:k])) / len(wanted)
    rows = exposure(backbone, model, steps, targets, ft)
    assert [(step, kind) for step, kind, _, _ in rows] == [(1, "er@5"), (1, "er@10")]
    for (_, _, users, values), expected in zip(rows, result.values()):
        assert dict(zip(users.tolist(), values.tolist())) == expected
    assert 0 < len(result[5]) < last.n_users and 0.0 < sum(result[10].values()) < len(result[10])


def test_records_have_the_exposure_of_every_block(registry, tmp_path):
    small = {"k_core": 70, "rounds": 2, "dim": 8, "attack": "fedrecattack", "attack_blocks": 1}
    ends = [executed(make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {**small, **more})]), tmp_path)
            for more in ({}, {"malicious": 0.0})]
    for end in ends:
        assert [len(end["lists"][f"er@{k}"]) for k in (5, 10)] == [4, 4]
    assert ends[0]["metrics"] != ends[1]["metrics"] and ends[0]["settings"]["malicious"] == 0.05
    plain = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"k_core": 70, "dim": 8, "rounds": 2})])
    assert not {"attack", "malicious", "attack_blocks", "item_limit"} & plain.settings.keys()
    end = executed(plain, tmp_path)
    assert end["metrics"] == ends[1]["metrics"] and "er@5" not in end["lists"]


@pytest.mark.parametrize("attack, more, error", [
    ("fedrecattack", {"malicious": 1.01}, "'malicious': found 1.01, accepted: at most 1, as many as the honest ones"),
    ("clusterattack", {"malicious": 0.6}, "'malicious': found 0.6, accepted: at most 0.5 .* more malicious clients"),
    ("fedrecattack", {"backbone": "ncf"}, "attack 'fedrecattack' needs scores that are inner products"),
    ("fedrecattack", {"item_limit": 5000}, "'item_limit': found 5000, accepted: from target_items, 1, to"),
    ("clusterattack", {"backbone": "gpfedrec"}, "attack 'clusterattack' needs a server .* of 'gpfedrec'"),
    ("clusterattack", {"upload_clip": 1.0}, "'upload_clip': found 1.0, accepted: 0.0 with attack 'clusterattack'"),
    ("fedrecattack", {"weighting": "interactions"}, "'weighting': found interactions, accepted: uniform with"),
    ("clusterattack", {"method": "alone"}, "'attack': found clusterattack, accepted: none with method 'alone', whose"),
    ("clusterattack", {"method": "colr"}, "found method 'colr', accepted: methods whose clients send changes"),
    ("fedrecattack", {"aggregator": "krum", "krum_malicious": 400}, "'krum_malicious': found 400, accepted: less than"),
    ("fedrecatack", {}, "unknown attack 'fedrecatack'"),
    ("fedrecattack", {"attack_blocks": -1}, "'attack_blocks' .test.: found -1"),
])
def test_what_does_not_go_together_is_refused(registry, attack, more, error):
    more = dict(more)
    method, backbone = more.pop("method", "ft"), more.pop("backbone", "fedmf")
    with pytest.raises(UserError, match=error):
        config = make_config(registry, method, backbone, "ml-100k", overrides=[
            ("test", {"k_core": 70, "attack": attack, **more})])
        federation_of(config)


def test_krum_counts_the_malicious_clients_and_shards_are_refused(registry, stream):
    honest = int((stream.steps[2].train.lengths > 0).sum())
    settings = {"aggregator": "krum", "krum_malicious": (honest - 1) // 2}
    with pytest.raises(UserError, match="accepted: less than"):
        parts(registry, stream, None, **settings).check()
    f = parts(registry, stream, Pushing(None), malicious=1.0, **settings)
    f.check()
    with pytest.raises(UserError, match="--shards: .*attack 'pushing' has malicious clients"):
        check_divisible(f)


@pytest.mark.parametrize("sent, message", [
    ({ITEM: (torch.ones(1, 2), None)}, "upload.. gave torch.float32 of shape .1, 2. as"),
    ({ITEM: torch.ones(1, 2)}, "upload.. returned dict .*\nexpected a dictionary of pairs"),
    (None, "upload.. returned NoneType None"),
    ({ITEM: (torch.ones(9, 1, 2), torch.zeros(9, 1))}, "upload's items of '.*' returned a torch.float32 tensor"),
    ({ITEM: (torch.ones(9, 1, 2), torch.full((9, 1), 41))}, "upload's items of '.*' returned ids from 41 to 41"),
    ({ITEM: (torch.ones(9, 2, 2), torch.zeros(9, 2).long())}, "upload.. lists an item of '.*' twice"),
])
def test_a_wrong_upload_is_an_error(registry, stream, sent, message):
    class Wrong(Pushing):
        def upload(self, seen):
            return sent
    with pytest.raises(PluginError, match=f"attack 'pushing': {message}"):
        next(run(parts(registry, stream, Wrong(None), malicious=0.5)))


def test_shipped_attacks_pass_their_check(registry):
    assert_passed(check_attack(registry.get("attack", "clusterattack").cls, only=["settings", "resumes"]))
    assert FederationSettings().attack == "none"
