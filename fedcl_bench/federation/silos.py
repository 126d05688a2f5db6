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
from functools import cached_property, partial
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from ..plugin import checks
from ..training import silo_modules
from ..training.silo_samples import Epoch
from ..training.mini_batches import Point
from ..training.silo_modules import ModuleEpoch
from ..training.silo_parts import Domain, Silo, as_one_client, joined, joined_states
from ..plugin.silo import DomainMethod, DomainModule, ModuleBackbone, Stage
from ..rng import DrawKey, Tables
from ..evaluation.beyond_accuracy import catalogue_of
from ..evaluation.sample_ranking import Ranking, rank_by_module, rank_samples, scores_by_module
from ..evaluation.ranking import UserScores
from ..plugin.method import NoSettings
from ..plugin.state import Snapshot
from ..core.tuning import SIZES
from .divergence import naming, require_finite
from .early_stopping import EarlyStopping
from .parameter_growth import grow
from .parts import STAGE, Best, Federation, Progress, Within


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
            known = [domain.data(of_items, f.stream.known) for domain, of_items in zip(domains, features)]
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
                model = silo_modules.exported(domain.module)
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
    return replace(f, server=replace(f.server, rounds=stage.rounds or f.server.rounds, patience=0))


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

    def stopping(self, domain: Domain) -> EarlyStopping:
        """A domain's, after its rounds in the stage."""
        return EarlyStopping.replay(self.federation, (row for row in self.rows if row["step"] == domain.number))

    @property
    def ended(self) -> bool:
        """Whether all domains have ended the stage."""
        return self._all([self.stopping(domain).ended for domain in self.silos.domains])

    def _all(self, ended: list[bool]) -> bool:
        return bool(self.rows) and all(ended)

    def training(self) -> list[Silo]:
        """What trains in the next round."""
        return [silo for silo in self.silos.models if self.shared or not self.stopping(silo.domains[0]).ended]

    def row(self) -> dict[str, int]:
        """What a round says of its stage."""
        return {STAGE: self.number} if len(self.silos.stages) > 1 else {}


def beginning(f: Federation, model: Snapshot) -> Progress:
    """The progress before the first round, from a model of all domains."""
    return Progress(model=model, best=Best(model), ways=("domains",) * len(f.stream.steps))


def run(f: Federation, progress: Progress) -> Iterator[Progress]:
    """As ``loop.run``, for a stream of domains.

    Within a round it yields the progress before it, with ``under_way`` and ``within`` set. ``Progress.step`` is 0 until
    all domains have ended.
    """
    if progress.step:
        return
    silos = Silos.of(f)
    if not progress.ways:
        progress = beginning(f, silos.start())
    while not progress.trained:
        phase = Phase.of(silos, progress.curve)
        if not (phase.round or progress.within):
            progress = _entered(phase, progress)
        epochs = _epochs(phase, progress)
        progress, told = replace(progress, under_way=0.0, within=None), time.perf_counter()
        for number, silo in enumerate(phase.training()):
            for share in _batches(phase, silo, epochs[silo.domains[0].number], progress.model):
                if time.perf_counter() - told > SIZES.told_every:
                    yield replace(progress, under_way=(number + share) / len(epochs),
                                  within=partial(_within, phase, epochs, progress))
                    told = time.perf_counter()
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
        with torch.no_grad(), silo_modules.seeded(silo.seed, "stage", phase.number, device=f.device):
            module.enter_stage(phase.stage.name)
            first = torch.zeros(1, dtype=torch.int64, device=f.device)
            scores_by_module(f.backbone, module, domain.step.n_items, domain.step.sessions["valid"], first)


def _loaded(phase: Phase, silo: Silo, whole: Snapshot) -> list[DomainModule]:
    """A silo's modules with their parts of all parameters, in the stage."""
    loaded = silo.load(whole)
    for module in loaded:
        module.stage = phase.stage.name
    return loaded


def _epochs(phase: Phase, progress: Progress) -> dict[int, Epoch | ModuleEpoch]:
    """The next epoch of each silo that trains, or the one that the run was stopped in, by its first domain's number."""
    f, epochs = phase.silos.federation, {}
    within = progress.within() if progress.within else Within(progress.model, progress.server_state)
    reached = {number: point for number, *point in within.epochs}
    for silo in phase.training():
        number, draw = silo.domains[0].number, DrawKey(silo.seed, 0, progress.round)
        point = Point(silo.state(within.server_state, within.model), *reached.get(number, ()))
        if silo.domains[0].module is None:
            epochs[number] = Epoch(f.backbone, f.local, silo.model(within.model), point, draw)
        else:
            loaded = _loaded(phase, silo, within.model)
            epochs[number] = ModuleEpoch(f.backbone, f.local, loaded, phase.stage.trained, point, draw)
    return epochs


def _batches(phase: Phase, silo: Silo, epoch: Epoch | ModuleEpoch, before: Snapshot) -> Iterator[float]:
    """Train a silo's epoch, if the stage has any; yields after each batch the share of it that is done.

    Args:
        before: all parameters before the round.
    """
    if not phase.stage.trains:
        return iter(())
    if isinstance(epoch, ModuleEpoch):
        return epoch.batches([domain.samples for domain in silo.domains])
    return epoch.batches(silo.parts, silo.model(before))


def _within(phase: Phase, epochs: dict[int, Epoch | ModuleEpoch], progress: Progress) -> Within:
    """How far a round is.

    Raises:
        RunFailed: if training has diverged.
    """
    models, states = _trained(phase, epochs, progress)
    model, points = joined(phase.silos.models, models), [(number, epoch.point()) for number, epoch in epochs.items()]
    for silo, (_, point) in zip(phase.training(), points):
        for domain in silo.domains:
            _require_finite(phase, point.loss, model, domain, progress)
    return Within(model, joined_states(phase.silos.models, states, model),
                  tuple((number, point.batches, point.loss, point.seconds) for number, point in points))


def _after(phase: Phase, epochs: dict[int, Epoch | ModuleEpoch], progress: Progress) -> Progress:
    """The progress after a round: what is exchanged, the validation and, of domains that end with it, the test.

    Args:
        epochs: of each silo that trained, by its first domain's number.
    """
    silos, sent, (models, states) = phase.silos, {}, _trained(phase, epochs, progress)
    f = silos.federation
    if f.topology == "federated" and phase.stage.exchanges:
        models, sent = _exchanged(phase, models, progress)
    model = joined(silos.models, models)
    state = joined_states(silos.models, states, model)
    best, curve, ends = progress.best.model, list(progress.curve), {}
    for silo in silos.models:
        if silo.domains[0].number not in epochs:
            continue
        epoch = epochs[silo.domains[0].number]
        for domain in silo.domains:
            began, stop = time.perf_counter(), phase.stopping(domain)
            _require_finite(phase, epoch.loss, model, domain, progress)
            if stop.observe(_validate(phase, domain, model, progress) if stop.due else None):
                best = _replaced(silos, best, model, domain)
            up, down = sent.get(domain.number, (0, 0))
            done = sum(row["step"] == domain.number for row in curve)
            curve.append({"step": domain.number, "round": done, "participants": 1, "loss": epoch.loss,
                          "valid": stop.value, "bytes_up": up, "bytes_down": down,
                          "train_seconds": epoch.seconds / len(silo.domains),
                          "evaluate_seconds": time.perf_counter() - began, **phase.row()})
            ends[domain.number] = stop.ended
    if phase.shared and not all(ends.values()):
        ends = dict.fromkeys(ends, False)
    tests = [(number, number, _test(phase, silos.domains[number], best)) for number, last in ends.items()
             if last and phase.last]
    tests = tuple(sorted((*progress.tests, *tests), key=lambda test: test[0]))
    return replace(progress, round=progress.round + 1, trained=len(tests) == len(silos.domains), model=model,
                   server_state=state, best=Best(best), curve=tuple(curve), tests=tests)


def _trained(phase: Phase, epochs: dict[int, Epoch | ModuleEpoch], progress: Progress
             ) -> tuple[list[Snapshot], list[Tables]]:
    """Each silo's parameters and what its optimiser remembers, trained so far. Those of one that has ended stay."""
    models, states = [], []
    for silo in phase.silos.models:
        epoch = epochs.get(silo.domains[0].number)
        if epoch is None:
            models.append(silo.model(progress.model))
            states.append(silo.state(progress.server_state, progress.model))
        else:
            models.append(silo.exported() if isinstance(epoch, ModuleEpoch) else epoch.trained())
            states.append(epoch.state())
    return models, states


def _exchanged(phase: Phase, models: Sequence[Snapshot], progress: Progress
               ) -> tuple[list[Snapshot], dict[int, tuple[int, int]]]:
    """The domains' parameters after the server answered what they sent, and the bytes of either."""
    silos, uploads, changed, sent = phase.silos, [], [], {}
    for silo, model in zip(silos.models, models):
        module, draw = silo.domains[0].module, DrawKey(silo.seed, 0, progress.round)
        if module is None:
            uploads.append(model.dense)
            continue
        with torch.no_grad(), silo_modules.seeded(draw.seed, "upload", draw.round, device=silos.federation.device):
            upload = silos.method.upload(module, draw)
        checks.check_domain_upload(silos.method, upload, silos.method.sent or [*model.dense])
        uploads.append({name: value.detach().clone() for name, value in upload.items()})
    downloads = silos.method.aggregate(uploads, silos.weights(), DrawKey(silos.federation.seed, 0, progress.round))
    for silo, model, upload, download in zip(silos.models, models, uploads, downloads, strict=True):
        checks.check_download(silos.method, model, download)
        changed.append(replace(model, **{kind: {name: download.get(name, value) for name, value in
                                                getattr(model, kind).items()} for kind in ("public", "dense")}))
        sent[silo.domains[0].number] = _bytes(upload), _bytes(download)
    return changed, sent


def _replaced(silos: Silos, whole: Snapshot, by: Snapshot, domain: Domain) -> Snapshot:
    """All parameters with one domain's part taken from others."""
    parts = [each.model(by if each is domain else whole) for each in silos.domains]
    return joined([Silo((each,), 0) for each in silos.domains], parts)


def _require_finite(phase: Phase, loss: float, model: Snapshot, domain: Domain, progress: Progress) -> None:
    f = phase.silos.federation
    require_finite(loss, domain.model(model), f, domain.step.n_items, _key(f, domain, progress))


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
