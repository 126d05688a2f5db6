"""CCD's student: equal to a plain loop of torch.optim's Adam on tables, block after block."""

import math
from types import SimpleNamespace

import oracle
import pytest
import torch
from helpers import ITEM, USER, build, federation
from torch import nn

from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.rng import DrawKey
from fedcl_bench.testing.worlds import growing_stream

SEED, BATCH, LR, PROXIES = 3, 40, 0.01, ("stability", "plasticity")
bce = nn.functional.binary_cross_entropy_with_logits


class Plain:
    """The party and its proxies, which are tables by name of the parameter."""

    def __init__(self, f):
        self.f, self.s, self.proxies, self.seen = f, f.method.settings, {}, []

    def begin(self, step, model):
        """A block that starts from a model, which has rows for all its users and items."""
        self.step = step
        self.tables = {name: nn.Parameter(table.clone()) for name, table in {**model.public, **model.private}.items()}
        self.adam = torch.optim.Adam(self.tables.values(), lr=LR)
        self.seen.append([set(step.train.of(user).tolist()) for user in range(step.n_users)])
        if step.index == 0:
            return
        old = {ITEM: model.public[ITEM][:step.old_items], USER: model.private[USER][:step.old_users]}
        for proxy, weight in zip(PROXIES, (self.s.stability, self.s.plasticity)):
            before = self.proxies.get(proxy, old)
            self.proxies[proxy] = {name: torch.cat([weight * before[name] + (1 - weight) * table[:len(before[name])],
                                                    table[len(before[name]):]]) for name, table in old.items()}
        teachers = {proxy: self.snapshot(self.proxies[proxy]) for proxy in PROXIES[:step.index]}  # both from block 2 on
        seen = [self.seen[-1][user] | self.seen[-2][user] for user in range(step.old_users)]
        self.drawn = oracle.from_proxies(self.snapshot(old), teachers, {"stability": self.s.stable_items, "plasticity":
                                         self.s.plastic_items}, seen, self.s.proxy_top, self.s.rank_eps)

    @staticmethod
    def snapshot(tables):
        return Snapshot({ITEM: tables[ITEM]}, {USER: tables[USER]})

    def move(self, loss):
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return loss.item()

    def scores(self, users, items):
        return (self.tables[USER][users] * self.tables[ITEM][items]).sum(-1)

    def epoch(self, number):
        """All interactions with their negatives, then what users replay; the mean loss."""
        losses, t = [], self.step.index
        for users, items in zip(*(part.split(BATCH) for part in self.f.method.samples(
                self.step.training, DrawKey(SEED, t, number)))):
            labels = torch.zeros(items.shape, dtype=torch.float64)
            labels[:, 0] = 1.0
            losses.append((self.move(bce(self.scores(users[:, None], items), labels)), len(users)))
        replayed = self.replayed(number) if t > 0 else []
        key = oracle.stream(SEED, "replay order", t, number)
        order = sorted(range(len(replayed)), key=lambda i: key(i) >> 1)
        for at in range(0, len(order), BATCH):
            users, items, labels = zip(*(replayed[i] for i in order[at:at + BATCH]))
            weight = self.s.lambda_replay * math.exp(-number / self.s.anneal)
            loss = weight * bce(self.scores([*users], [*items]), torch.tensor(labels, dtype=torch.float64))
            losses.append((self.move(loss), len(users)))
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)

    def replayed(self, number):
        """(user, item, label) of all, drawn anew after every so many epochs, the first of which does not count."""
        drawing = max(0, number - 1) // self.s.replay_redraw
        round_ = SimpleNamespace(seed=SEED, step=self.step.index, round=drawing, backbone="fedmf",
                                 settings=self.f.backbone.settings)
        return [(user, item, label) for user in range(self.step.old_users)
                for item, label in self.drawn(round_, user).items()]


@pytest.mark.parametrize("settings", [{}, {"plastic_items": 0, "stability": 1.0}], ids=str)
def test_ccd_equals_a_plain_loop(registry, settings):
    method = build(registry, "method", "ccd", central_batch=BATCH, central_lr=LR, central_negatives=2, proxy_top=8,
                   rank_eps=0.1, replay_redraw=1, **settings)
    f = federation(registry, growing_stream(), method, build(registry, "backbone", "fedmf", dim=4), SEED, rounds=4,
                   precision="float64", tested_round="last")
    plain, start, replayed = Plain(f), Snapshot({}, {}), set()
    for progress in run(f):
        if not progress.round:
            continue
        if progress.round == 1:
            step = f.stream.steps[progress.step]
            plain.begin(step, grow(start, f.backbone, SEED, step, torch.float64, f.device))
        assert progress.curve[-1]["loss"] == pytest.approx(plain.epoch(progress.round - 1), rel=1e-9)
        if progress.step > 0:
            replayed.add((progress.step, tuple(plain.replayed(progress.round - 1))))
        start = progress.model
        for name, table in {**start.public, **start.private}.items():
            torch.testing.assert_close(table, plain.tables[name].detach(), rtol=1e-9, atol=1e-9)
    assert len(replayed) == 2 * 3 and all(len(triples) > 40 for _, triples in replayed)
