"""Training of domains: each is a client that trains epochs of mini-batches, and a round is an epoch at every one.

- ``federated``: after a round the server averages the dense parameters. Item tables stay where the items are.
- ``local``: nothing is averaged; each domain trains until its own validation ends it.
- ``central``: one model is trained on the samples of all domains; each has its own item rows in it.

Every domain chooses its own best round in its own validation, and is tested with that round's model. What the domains
of a run share is trained until the last of them would end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Iterator

import torch
from torch import Tensor

from ..client.central import Epoch
from ..client.silo import Domain, Silo, as_one_client, averaged, joined, joined_states
from ..draws import DrawKey, Tables
from ..evaluation.beyond import catalogue_of
from ..evaluation.central import rank_samples
from ..evaluation.ranking import UserScores
from ..model import Snapshot
from .central import TOLD_EVERY
from .divergence import naming, require_finite
from .growth import grow
from .parts import Best, Federation, Progress
from .validation import is_due, judge, judged_again


@dataclass(frozen=True)
class Silos:
    """A run's domains, and which of them train together."""

    federation: Federation
    domains: tuple[Domain, ...]

    @classmethod
    def of(cls, f: Federation) -> "Silos":
        return cls(f, tuple(Domain.of(step.to(f.device), f.backbone) for step in f.stream.steps))

    @property
    def shared(self) -> bool:
        """Whether the domains have parameters in common."""
        return self.federation.topology != "local"

    @cached_property
    def models(self) -> tuple[Silo, ...]:
        """What trains a model each."""
        if self.federation.topology == "central":
            return (Silo(self.domains, self.federation.seed),)
        return tuple(Silo.alone(domain, self.federation.seed) for domain in self.domains)

    def start(self) -> Snapshot:
        """Untrained parameters: the same dense ones everywhere, whatever the topology, and each item's own row."""
        f, models = self.federation, []
        for domain in self.domains:
            seed = Silo.alone(domain, f.seed).seed
            model = grow(Snapshot({}, {}), f.backbone, seed, as_one_client(domain.step),
                         getattr(torch, f.server.precision), f.device)
            models.append(replace(model, dense=models[0].dense) if models else model)
        return joined([Silo((domain,), 0) for domain in self.domains], models)

    def weights(self) -> Tensor:
        """Of the domains in the server's mean, (domains,)."""
        f = self.federation
        sizes = [1 if f.server.weighting == "uniform" else len(domain.step.train.values) for domain in self.domains]
        return torch.tensor(sizes, dtype=torch.float64, device=f.device) / sum(sizes)


def run(f: Federation, progress: Progress) -> Iterator[Progress]:
    """As ``loop.run``, for a stream of domains.

    Within a round it yields the progress before it, with ``under_way`` set: it can be saved at any time, and a round
    that is interrupted is trained anew. ``Progress.step`` is 0 until all domains have ended.
    """
    if progress.step:
        return
    silos = Silos.of(f)
    progress = replace(progress, under_way=0.0)
    if not progress.model.public:
        model = silos.start()
        progress = replace(progress, model=model, best=Best(model), ways=("domains",) * len(silos.domains))
    while not progress.trained:
        epochs: dict[int, tuple[Epoch, float]] = {}
        training = [silo for silo in silos.models if silos.shared or not _so_far(f, progress, silo.domains[0]).trained]
        for number, silo in enumerate(training):
            began = told = time.perf_counter()
            epoch = Epoch(f.backbone, f.local, silo.model(progress.model), silo.state(
                progress.server_state, progress.model), DrawKey(silo.seed, 0, progress.round))
            for share in epoch.batches(silo.parts):
                if time.perf_counter() - told > TOLD_EVERY:
                    yield replace(progress, under_way=(number + share) / len(training))
                    told = time.perf_counter()
            epochs[silo.domains[0].number] = epoch, time.perf_counter() - began
        progress = _after(silos, epochs, progress)
        yield progress
    yield replace(progress, step=len(silos.domains), round=0, trained=False)


def _so_far(f: Federation, progress: Progress, domain: Domain) -> Progress:
    """What ``judge`` asks for, of one domain: its rounds, the best validation and the rounds since, and if it ended."""
    rows = (row for row in progress.curve if row["step"] == domain.number)
    standing = Progress()
    for _, standing in judged_again(f, rows):
        pass
    return standing


def _after(silos: Silos, epochs: dict[int, tuple[Epoch, float]], progress: Progress) -> Progress:
    """The progress after a round: averaged, validated and, of domains that end with it, tested.

    Args:
        epochs: of each silo that trained, by its first domain's number, with the seconds it took.
    """
    f = silos.federation
    model, state = _trained(silos, epochs, progress)
    if f.topology == "federated":
        model = replace(model, dense=averaged(model.dense, silos.weights()))
    best, curve, ends = progress.best.model, list(progress.curve), {}
    for silo in silos.models:
        if silo.domains[0].number not in epochs:
            continue
        epoch, seconds = epochs[silo.domains[0].number]
        for domain in silo.domains:
            began, standing = time.perf_counter(), _so_far(f, progress, domain)
            require_finite(epoch.loss, domain.model(model), f, domain.step.n_items, _key(f, domain, progress))
            valid = judge(f, standing, _validate(f, domain, model, progress) if is_due(f, progress.round) else None)
            if valid.better or valid.equal or (valid.done and f.server.tested_round == "last"):
                best = _replaced(silos, best, model, domain)
            sent = _bytes(model) if f.topology == "federated" else 0
            curve.append({"step": domain.number, "round": progress.round, "participants": 1, "loss": epoch.loss,
                          "valid": valid.value, "bytes_up": sent, "bytes_down": sent,
                          "train_seconds": seconds / len(silo.domains),
                          "evaluate_seconds": time.perf_counter() - began})
            ends[domain.number] = valid.last
    if silos.shared and not all(ends.values()):
        ends = dict.fromkeys(ends, False)
    tests = [(number, number, _test(f, silos.domains[number], best)) for number, last in ends.items() if last]
    tests = tuple(sorted((*progress.tests, *tests), key=lambda test: test[0]))
    return replace(progress, round=progress.round + 1, trained=len(tests) == len(silos.domains), model=model,
                   server_state=state, best=Best(best), curve=tuple(curve), tests=tests)


def _trained(silos: Silos, epochs: dict[int, tuple[Epoch, float]], progress: Progress) -> tuple[Snapshot, Tables]:
    """All parameters and what the optimisers remember after a round; those of a silo that has ended stay."""
    models, states = [], []
    for silo in silos.models:
        epoch, _ = epochs.get(silo.domains[0].number, (None, 0.0))
        models.append(silo.model(progress.model) if epoch is None else epoch.trained())
        states.append(silo.state(progress.server_state, progress.model) if epoch is None else epoch.state())
    model = joined(silos.models, models)
    return model, joined_states(silos.models, states, model)


def _replaced(silos: Silos, whole: Snapshot, by: Snapshot, domain: Domain) -> Snapshot:
    """All parameters with one domain's part taken from others."""
    parts = [each.model(by if each is domain else whole) for each in silos.domains]
    return joined([Silo((each,), 0) for each in silos.domains], parts)


def _key(f: Federation, domain: Domain, progress: Progress) -> DrawKey:
    return DrawKey(f.seed, domain.number, progress.round)


def _validate(f: Federation, domain: Domain, model: Snapshot, progress: Progress) -> float:
    metric, k = f.validation
    with naming(f, _key(f, domain, progress)):
        scores = rank_samples(f.backbone, domain.model(model), domain.step.sessions["valid"], [k], [metric],
                              mask_history=f.evaluation.mask_history)
    return scores.mean(f.evaluation.valid_metric)


def _test(f: Federation, domain: Domain, model: Snapshot) -> UserScores:
    """The scores of a domain's users, by their ids among those of all domains."""
    sessions, part = domain.step.sessions["test"], domain.model(model)
    of_items = any(metric.of_items for metric in f.metrics)
    with naming(f, DrawKey(f.seed, domain.number)):
        scores = rank_samples(f.backbone, part, sessions, f.topk, f.metrics,
                              catalogue_of([domain.step], part) if of_items else None, f.evaluation.mask_history)
    users = torch.arange(domain.users.start, domain.users.stop, device=f.device)
    return replace(scores, users=users.repeat_interleave(sessions.count)[scores.users])


def _bytes(model: Snapshot) -> int:
    """Of the dense parameters that a domain sends."""
    return sum(copies[0].numel() * copies.element_size() for copies in model.dense.values())
