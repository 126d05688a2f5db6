"""Training of domains: each is a client that trains epochs of mini-batches, and a round is an epoch at every one.

- ``federated``: after a round every domain sends what its method uploads, and gets what the server makes of it. By
  FedAvg that is the mean of the dense parameters. Item tables stay where the items are.
- ``local``: nothing is sent; each domain trains until its own validation ends it.
- ``central``: one model is trained on the samples of all domains; each has its own item rows in it.

A method may have stages (see ``domain_module.Stage``), and a stage begins when all domains have ended the one before.
Every domain chooses its own best round of the last stage in its own validation, and is tested with that round's model.
What the domains of a run share is trained until the last of them would end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from .. import contract
from ..client import modules
from ..client.central import Epoch
from ..client.mini_batches import MiniBatches
from ..client.modules import ModuleEpoch
from ..client.silo import Domain, Silo, as_one_client, joined, joined_states
from ..domain_module import DomainMethod, DomainModule, ModuleBackbone, Stage
from ..draws import DrawKey, Tables
from ..evaluation.beyond import catalogue_of
from ..evaluation.central import Ranking, rank_by_module, rank_samples, scores_by_module
from ..evaluation.ranking import UserScores
from ..method import NoSettings
from ..model import Snapshot
from .central import TOLD_EVERY
from .divergence import naming, require_finite
from .growth import grow
from .parts import STAGE, Best, Federation, Progress
from .validation import is_due, judge, judged_again


@dataclass(frozen=True)
class Silos:
    """A run's domains, which of them train together, and the stages of their training."""

    federation: Federation
    domains: tuple[Domain, ...]
    method: DomainMethod
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, f: Federation) -> "Silos":
        method = f.method if isinstance(f.method, DomainMethod) else DomainMethod(NoSettings())
        domains = tuple(Domain.of(step.to(f.device), f.backbone) for step in f.stream.steps)
        if isinstance(f.backbone, ModuleBackbone):
            features = f.stream.features or (None,) * len(domains)
            known = [domain.data(of_items) for domain, of_items in zip(domains, features)]
            groups = [[each] for each in known] if f.topology == "local" else [known]
            prepared = [data for group in groups for data in f.backbone.prepared(group)]
            domains = tuple(domain.with_module(f.backbone, method, data, f.seed)
                            for domain, data in zip(domains, prepared, strict=True))
            for domain in domains:
                domain.module.to(getattr(torch, f.server.precision))
        return cls(f, domains, method, stages_of(f))

    @property
    def pooled(self) -> bool:
        """Whether one model is trained on the samples of all domains."""
        return self.federation.topology == "central"

    @cached_property
    def models(self) -> tuple[Silo, ...]:
        """What trains a model each."""
        if self.pooled:
            return (Silo(self.domains, self.federation.seed),)
        return tuple(Silo.alone(domain, self.federation.seed) for domain in self.domains)

    def start(self) -> Snapshot:
        """Untrained parameters: the same dense ones everywhere, whatever the topology, and each item's own row."""
        f, models = self.federation, []
        for domain in self.domains:
            if domain.module is not None:
                model = modules.exported(domain.module)
            else:
                model = grow(Snapshot({}, {}), f.backbone, Silo.alone(domain, f.seed).seed, as_one_client(domain.step),
                             getattr(torch, f.server.precision), f.device)
            models.append(replace(model, dense=models[0].dense) if models else model)
        return joined([Silo((domain,), 0) for domain in self.domains], models)

    def weights(self) -> Tensor:
        """Of the domains in the server's mean, (domains,)."""
        f = self.federation
        sizes = [1 if f.server.weighting == "uniform" else len(domain.step.train.values) for domain in self.domains]
        return torch.tensor(sizes, dtype=torch.float64, device=f.device) / sum(sizes)


def stages_of(f: Federation) -> tuple[Stage, ...]:
    """The stages of a run: the method's, or else the backbone's."""
    stages = f.method.stages() if isinstance(f.method, DomainMethod) else ()
    if not stages and isinstance(f.backbone, ModuleBackbone):
        stages = f.backbone.stages()
    return tuple(stages) or (Stage("train"),)


def ends_together(f: Federation, stage: Stage) -> bool:
    """Whether domains have parameters in common in a stage, and so end it together."""
    return f.topology == "central" or f.topology == "federated" and stage.exchanges


def in_stage(f: Federation, stage: Stage) -> Federation:
    """A run's parts with a stage's number of rounds."""
    if stage.rounds is None:
        return f
    return replace(f, server=replace(f.server, rounds=stage.rounds, patience=0))


@dataclass(frozen=True)
class Phase:
    """Where a run is: the stage of its next round.

    Attributes:
        number: of the stage; of the last one when all is done.
        round: rounds of the stage that are done.
        shared: the domains have parameters in common in it, and end it together.
    """

    silos: Silos
    number: int
    round: int
    shared: bool
    rows: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, silos: Silos, curve: Sequence[dict[str, Any]]) -> "Phase":
        """Given all rounds so far."""
        number = max((row.get(STAGE, 0) for row in curve), default=0)
        phase = cls._of(silos, number, curve)
        last = number + 1 == len(silos.stages)
        return phase if last or not phase.ended else cls._of(silos, number + 1, curve)

    @classmethod
    def _of(cls, silos: Silos, number: int, curve: Sequence[dict[str, Any]]) -> "Phase":
        rows = tuple(row for row in curve if row.get(STAGE, 0) == number)
        count = max(sum(row["step"] == domain.number for row in rows) for domain in silos.domains)
        return cls(silos, number, count, ends_together(silos.federation, silos.stages[number]), rows)

    @property
    def stage(self) -> Stage:
        return self.silos.stages[self.number]

    @property
    def last(self) -> bool:
        """Whether it is the stage that is tested."""
        return self.number + 1 == len(self.silos.stages)

    @cached_property
    def federation(self) -> Federation:
        """The run's parts with the stage's number of rounds."""
        return in_stage(self.silos.federation, self.stage)

    def standing(self, domain: Domain) -> Progress:
        """What ``judge`` asks for, of one domain: its rounds in the stage, the best validation and the rounds since,
        and whether it has ended."""
        standing, rows = Progress(), (row for row in self.rows if row["step"] == domain.number)
        for _, standing in judged_again(self.federation, rows):
            pass
        return standing

    @property
    def ended(self) -> bool:
        """Whether all domains have ended the stage."""
        return self._all([self.standing(domain).trained for domain in self.silos.domains])

    def _all(self, ended: list[bool]) -> bool:
        return bool(self.rows) and all(ended)

    def training(self) -> list[Silo]:
        """What trains in the next round."""
        return [silo for silo in self.silos.models if self.shared or not self.standing(silo.domains[0]).trained]

    def row(self) -> dict[str, int]:
        """What a round says of its stage."""
        return {STAGE: self.number} if len(self.silos.stages) > 1 else {}


def run(f: Federation, progress: Progress) -> Iterator[Progress]:
    """As ``loop.run``, for a stream of domains.

    Within a round it yields the progress before it, with ``under_way`` set: it can be saved at any time, and a round
    that is interrupted is trained anew. ``Progress.step`` is 0 until all domains have ended.
    """
    if progress.step:
        return
    silos = Silos.of(f)
    progress = replace(progress, under_way=0.0)
    if not progress.ways:
        model = silos.start()
        progress = replace(progress, model=model, best=Best(model), ways=("domains",) * len(silos.domains))
    while not progress.trained:
        phase = Phase.of(silos, progress.curve)
        if not phase.round:
            progress = _entered(phase, progress)
        epochs: dict[int, tuple[MiniBatches, float]] = {}
        training = phase.training()
        for number, silo in enumerate(training):
            began = told = time.perf_counter()
            epoch, samples = _epoch(phase, silo, progress)
            for share in epoch.batches(samples):
                if time.perf_counter() - told > TOLD_EVERY:
                    yield replace(progress, under_way=(number + share) / len(training))
                    told = time.perf_counter()
            epochs[silo.domains[0].number] = epoch, time.perf_counter() - began
        progress = _after(phase, epochs, progress)
        yield progress
    yield replace(progress, step=len(silos.domains), round=0, trained=False)


def _entered(phase: Phase, progress: Progress) -> Progress:
    """The progress with what a stage begins from."""
    model = progress.best.model if phase.stage.from_best and phase.number else progress.model
    if phase.silos.domains[0].module is not None:
        for silo in phase.silos.models:
            _enter(phase, silo, model)
        model = joined(phase.silos.models, [silo.exported() for silo in phase.silos.models])
    return replace(progress, model=model, server_state={} if phase.stage.new_optimiser else progress.server_state)


def _enter(phase: Phase, silo: Silo, model: Snapshot) -> None:
    """Let a silo's modules begin a stage, and look at the shape of their scores before anybody trains."""
    f = phase.silos.federation
    for domain, module in zip(silo.domains, _loaded(phase, silo, model)):
        with torch.no_grad(), modules.seeded(silo.seed, "stage", phase.number, device=f.device):
            module.enter_stage(phase.stage.name)
            first = torch.zeros(1, dtype=torch.int64, device=f.device)
            scores_by_module(f.backbone, module, domain.step.n_items, domain.step.sessions["valid"], first)


def _loaded(phase: Phase, silo: Silo, whole: Snapshot) -> list[DomainModule]:
    """A silo's modules with their parts of all parameters, in the stage."""
    loaded = silo.load(whole)
    for module in loaded:
        module.stage = phase.stage.name
    return loaded


def _epoch(phase: Phase, silo: Silo, progress: Progress) -> tuple[MiniBatches, Sequence[Any]]:
    """A silo's next epoch, and the samples that it is to train on."""
    f, draw = phase.silos.federation, DrawKey(silo.seed, 0, progress.round)
    state = silo.state(progress.server_state, progress.model)
    if silo.domains[0].module is None:
        return Epoch(f.backbone, f.local, silo.model(progress.model), state, draw), silo.parts
    loaded = _loaded(phase, silo, progress.model)
    epoch = ModuleEpoch(f.backbone, f.local, loaded, phase.stage.trained, state, draw)
    return epoch, [domain.samples for domain in silo.domains]


def _after(phase: Phase, epochs: dict[int, tuple[MiniBatches, float]], progress: Progress) -> Progress:
    """The progress after a round: what is exchanged, the validation and, of domains that end with it, the test.

    Args:
        epochs: of each silo that trained, by its first domain's number, with the seconds it took.
    """
    silos = phase.silos
    f, model, state, sent = silos.federation, *_trained(phase, epochs, progress)
    best, curve, ends = progress.best.model, list(progress.curve), {}
    for silo in silos.models:
        if silo.domains[0].number not in epochs:
            continue
        epoch, seconds = epochs[silo.domains[0].number]
        for domain in silo.domains:
            began, standing = time.perf_counter(), phase.standing(domain)
            require_finite(epoch.loss, domain.model(model), f, domain.step.n_items, _key(f, domain, progress))
            value = _validate(phase, domain, model, progress) if is_due(phase.federation, standing.round) else None
            valid = judge(phase.federation, standing, value)
            if valid.better or valid.equal or (valid.done and f.server.tested_round == "last"):
                best = _replaced(silos, best, model, domain)
            up, down = sent.get(domain.number, (0, 0))
            done = sum(row["step"] == domain.number for row in curve)
            curve.append({"step": domain.number, "round": done, "participants": 1, "loss": epoch.loss,
                          "valid": valid.value, "bytes_up": up, "bytes_down": down,
                          "train_seconds": seconds / len(silo.domains),
                          "evaluate_seconds": time.perf_counter() - began, **phase.row()})
            ends[domain.number] = valid.last
    if phase.shared and not all(ends.values()):
        ends = dict.fromkeys(ends, False)
    tests = [(number, number, _test(phase, silos.domains[number], best)) for number, last in ends.items()
             if last and phase.last]
    tests = tuple(sorted((*progress.tests, *tests), key=lambda test: test[0]))
    return replace(progress, round=progress.round + 1, trained=len(tests) == len(silos.domains), model=model,
                   server_state=state, best=Best(best), curve=tuple(curve), tests=tests)


def _trained(phase: Phase, epochs: dict[int, tuple[MiniBatches, float]], progress: Progress
             ) -> tuple[Snapshot, Tables, dict[int, tuple[int, int]]]:
    """After a round: all parameters, what the optimisers remember, and the bytes that each domain sent and got. Those
    of a silo that has ended stay."""
    silos, models, states = phase.silos, [], []
    for silo in silos.models:
        epoch, _ = epochs.get(silo.domains[0].number, (None, 0.0))
        if epoch is None:
            models.append(silo.model(progress.model))
            states.append(silo.state(progress.server_state, progress.model))
        else:
            models.append(silo.exported() if isinstance(epoch, ModuleEpoch) else epoch.trained())
            states.append(epoch.state())
    sent = {}
    if silos.federation.topology == "federated" and phase.stage.exchanges:
        models, sent = _exchanged(phase, models, progress)
    model = joined(silos.models, models)
    return model, joined_states(silos.models, states, model), sent


def _exchanged(phase: Phase, models: Sequence[Snapshot], progress: Progress
               ) -> tuple[list[Snapshot], dict[int, tuple[int, int]]]:
    """The domains' parameters after the server answered what they sent, and the bytes of either."""
    silos, uploads, changed, sent = phase.silos, [], [], {}
    for silo, model in zip(silos.models, models):
        module, draw = silo.domains[0].module, DrawKey(silo.seed, 0, progress.round)
        if module is None:
            uploads.append(model.dense)
            continue
        with torch.no_grad(), modules.seeded(draw.seed, "upload", draw.round, device=silos.federation.device):
            upload = silos.method.upload(module, draw)
        contract.check_domain_upload(silos.method, upload, silos.method.sent or [*model.dense])
        uploads.append({name: value.detach().clone() for name, value in upload.items()})
    downloads = silos.method.aggregate(uploads, silos.weights(), DrawKey(silos.federation.seed, 0, progress.round))
    for silo, model, upload, download in zip(silos.models, models, uploads, downloads, strict=True):
        contract.check_download(silos.method, model, download)
        changed.append(replace(model, **{kind: {name: download.get(name, value) for name, value in
                                                getattr(model, kind).items()} for kind in ("public", "dense")}))
        sent[silo.domains[0].number] = _bytes(upload), _bytes(download)
    return changed, sent


def _replaced(silos: Silos, whole: Snapshot, by: Snapshot, domain: Domain) -> Snapshot:
    """All parameters with one domain's part taken from others."""
    parts = [each.model(by if each is domain else whole) for each in silos.domains]
    return joined([Silo((each,), 0) for each in silos.domains], parts)


def _key(f: Federation, domain: Domain, progress: Progress) -> DrawKey:
    return DrawKey(f.seed, domain.number, progress.round)


def _validate(phase: Phase, domain: Domain, model: Snapshot, progress: Progress) -> float:
    f = phase.silos.federation
    metric, k = f.validation
    with naming(f, _key(f, domain, progress)):
        scores = _rank(phase, domain, model, "valid", Ranking([k], [metric], None, f.evaluation.mask_history))
    return scores.mean(f.evaluation.valid_metric)


def _test(phase: Phase, domain: Domain, model: Snapshot) -> UserScores:
    """The scores of a domain's users, by their ids among those of all domains."""
    f, catalogue = phase.silos.federation, None
    if any(metric.of_items for metric in f.metrics):
        catalogue = catalogue_of([domain.step], _item_vectors(phase, domain, model))
    with naming(f, DrawKey(f.seed, domain.number)):
        scores = _rank(phase, domain, model, "test", Ranking(f.topk, f.metrics, catalogue, f.evaluation.mask_history))
    users = torch.arange(domain.users.start, domain.users.stop, device=f.device)
    return replace(scores, users=users.repeat_interleave(domain.step.sessions["test"].count)[scores.users])


def _rank(phase: Phase, domain: Domain, model: Snapshot, split: str, ranking: Ranking) -> UserScores:
    """Metrics of a domain's sessions of a split, by their number."""
    backbone, sessions = phase.silos.federation.backbone, domain.step.sessions[split]
    if domain.module is None:
        return rank_samples(backbone, domain.model(model), sessions, ranking)
    module, = _loaded(phase, Silo((domain,), 0), model)
    return rank_by_module(backbone, module, domain.step.n_items, sessions, ranking)


@torch.no_grad()
def _item_vectors(phase: Phase, domain: Domain, model: Snapshot) -> Tensor:
    if domain.module is None:
        return domain.model(model).item_vectors
    module, = _loaded(phase, Silo((domain,), 0), model)
    return module.eval().item_vectors()


def _bytes(tables: Tables) -> int:
    return sum(value.numel() * value.element_size() for value in tables.values())
