"""Clients of many users each: domains, or one client that holds all sessions. A round is an epoch of mini-batches.

- ``federated``: after a round every domain sends what its method uploads, and gets what the server makes of it. By
  FedAvg that is the mean of the dense parameters. Item tables stay where the items are.
- ``local``: nothing is sent; each domain trains until its own validation ends it.
- ``central``: there is one silo and no server. One model is trained on the samples of all domains, of which each has
  its own item rows in it; or, of a stream of sessions, on all sessions, as session recommenders are in their own
  papers. Those choose their epoch on the test sessions. Here it is chosen in validation, and the curve has both.

A method may have stages (see ``silo.Stage``), and a stage begins when all domains have ended the one before. Every
domain chooses its own best round of the last stage in its own validation, and is tested with that round's model. What
the domains of a run share is trained until the last of them would end.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ..core.errors import PluginError
from ..core.tuning import SIZES
from ..data.stream import Step, TrainingStep
from ..evaluation.beyond_accuracy import catalogue_of
from ..evaluation.session_ranking import Ranking, rank_by_module, scores_after
from ..plugin import checks
from ..plugin.backbone import Backbone
from ..plugin.method import Method, NoSettings
from ..plugin.silo import DomainData, DomainMethod, DomainModule, ModuleBackbone, Stage
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..training import silo_modules
from ..training.mini_batches import Epoch, Point
from ..training.silo_modules import Domain, Silo, as_one_client, merged
from ..training.silo_samples import SequentialModule
from .early_stopping import EarlyStopping, require_finite
from .parameter_growth import grow
from .parts import STAGE, Best, Federation, PartialRound, Progress, Update, bytes_of


class CrossSilo:
    """A run's silos, each of which trains a model, and the domains that they hold, in a step of time; None: the last.
    ``stage`` is the one of its ``stages`` that is trained, by its number."""

    threads = nullcontext  # batches are large enough for PyTorch's own threads

    def __init__(self, f: Federation, step: Step | None = None):
        self.federation, self.stage, self.stages = f, 0, stages_of(f.method, f.backbone)
        self.step = step = (step or f.stream.steps[-1]).to(f.device)
        self.method = f.method if isinstance(f.method, DomainMethod) else DomainMethod(NoSettings())
        domains = [Domain.of(f.stream, step, number, f.seed) for number in self.numbers(f)]
        self.domains = self._with_modules(domains)
        if isinstance(f.backbone, ModuleBackbone):
            silo_modules.check_alike(f.backbone, [domain.module for domain in self.domains
                                                    if domain.module is not None])
        self.units = {domain.unit: domain for domain in self.domains}  # by their numbers in records
        alone = [Silo((domain,), domain.seed) for domain in self.domains]
        self.silos = [Silo(self.domains, f.seed)] if f.topology == "central" else alone
        self.exchanges = f.topology == "federated"  # there is a server

    @staticmethod
    def numbers(f: Federation) -> Iterable[int]:
        return range(f.stream.per_step)

    def _with_modules(self, domains: Sequence[Domain]) -> tuple[Domain, ...]:
        dtype = getattr(torch, self.federation.server.precision)
        return tuple(replace(domain, module=module.to(self.federation.device).to(dtype))
                     for domain, module in zip(domains, self._modules(domains), strict=True))

    def _modules(self, domains: Sequence[Domain]) -> Iterator[Any]:
        f = self.federation
        if not isinstance(f.backbone, ModuleBackbone):
            for domain in domains:
                start = grow(Snapshot({}, {}), f.backbone, domain.seed, as_one_client(domain.step),
                             getattr(torch, f.server.precision), f.device)
                yield SequentialModule(f.backbone, start).to(f.device)
            return
        features = f.stream.features or (None,) * f.stream.per_step
        known = [domain.data(features[domain.number], f.stream.known) for domain in domains]
        for domain, data in zip(domains, self._prepared(known), strict=True):
            with silo_modules.seeded(domain.seed, "init", device=f.device):
                module = self.method.module(f.backbone, data)
            silo_modules.check(f.backbone, module, domain.step.n_items)
            yield module.to(f.device)

    def _prepared(self, known: Sequence[DomainData]) -> Sequence[DomainData]:
        """What each domain knows, with what is made of the item texts of all that train together."""
        f = self.federation
        groups = [[each] for each in known] if f.topology == "local" else [known]
        return [data for group in groups for data in f.backbone.prepared(group)]

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Any = None) -> tuple["CrossSilo", Progress]:
        """The clients of a step of time, and the progress with what they begin it from: each domain's best model of the
        step before."""
        clients = cls(f, step)
        if len(progress.strategies) > clients.domains[0].unit:  # it has begun
            return clients, progress
        model = clients._after(clients.method.begin_step, progress.best.model) if step.index else clients.start()
        now = ("domains",) * len(f.stream.domains) or ("central",)
        return clients, replace(progress, model=model, best=Best(model), server_state={},
                                strategies=progress.strategies + now, server_moments=clients._sent(model))

    def _sent(self, model: Snapshot) -> Tables:
        """What the server's optimiser, if there is one, has to know of what domains begin with."""
        if not self.exchanges or self.federation.server.optimiser is None:
            return {}
        return {f"sent/{name}": value for name, value in self.domains[0].part(model).dense.items()}

    @classmethod
    def untrained(cls, f: Federation, step: Step) -> Snapshot:
        """The tables of a step before the first round."""
        return cls(f, step).start()

    def start(self) -> Snapshot:
        """Untrained parameters: the same dense ones everywhere, whatever the topology, and each item's own row."""
        dense = self._first_dense()
        model = merged(replace(silo_modules.exported(domain.module, domain.prefix),
                               dense={domain.prefix + name: value for name, value in dense.items()})
                       for domain in self.domains)
        return model if self.federation.stream.domains else replace(
            model, client_context=self.domains[0].module.client_context)

    def _first_dense(self) -> Tables:
        """Untrained parameters of the first domain that have no item rows."""
        return silo_modules.exported(self.domains[0].module).dense

    @property
    def last_stage(self) -> bool:
        return self.stage + 1 == len(self.stages)

    @property
    def together(self) -> bool:
        """Whether domains have parameters in common in the stage, and so end it together."""
        return self.federation.topology == "central" or self.exchanging

    @property
    def exchanging(self) -> bool:
        """Whether a round of the stage ends with an exchange."""
        return self.exchanges and self.stages[self.stage].exchanges

    def ended(self, stops: Mapping[int, EarlyStopping]) -> bool:
        return all(stop.ended for stop in stops.values())

    def early_stopping(self, stage: int, progress: Progress) -> dict[int, EarlyStopping]:
        """Of each domain in a stage, after its rounds so far."""
        f, rounds = self.federation, self.stages[stage].rounds
        if rounds is not None:
            f = replace(f, server=replace(f.server, rounds=rounds or f.server.rounds, patience=0))
        return {unit: EarlyStopping.replay(f, (
            row for row in progress.curve if row["step"] == unit and row.get(STAGE, 0) == stage))
            for unit in self.units}

    def enter(self, stage: int, progress: Progress) -> Progress:
        """Begin a stage, or go on in it: the progress with what it begins from."""
        self.stage, now = stage, self.stages[stage]
        for domain in self.domains:
            domain.module.stage = now.name
        if progress.within or any(row["step"] in self.units and row.get(STAGE, 0) >= stage for row in progress.curve):
            return progress

        start = progress.best.model if now.from_best and stage else progress.model
        for silo in self.silos:
            seed = self.federation.seed if self.exchanging else silo.seed  # what is averaged is drawn alike
            for domain, module in zip(silo.domains, silo.load(start)):
                with torch.no_grad(), silo_modules.seeded(seed, "stage", stage, device=self.federation.device):
                    module.enter_stage(now.name)
                    first = torch.zeros(1, dtype=torch.int64, device=self.federation.device)  # are its scores right?
                    scores_after(self.federation.backbone, module, domain.step, "valid", first)
        model = replace(merged(silo.exported() for silo in self.silos), client_context=progress.model.client_context)
        return replace(progress, model=model, server_state={} if now.new_optimiser else progress.server_state)

    def _after(self, hook: Callable[[TrainingStep, DomainModule, Backbone], None], model: Snapshot) -> Snapshot:
        """All parameters after a hook of the method at each domain."""
        changed, f = [], self.federation
        for domain in self.domains:
            module = domain.load(model)
            with torch.no_grad(), silo_modules.seeded(domain.seed, hook.__name__, self.step.index, device=f.device):
                hook(domain.step.training, module, f.backbone)
            changed.append(silo_modules.exported(module, domain.prefix))
        return replace(merged(changed), client_context=model.client_context)

    def train(self, progress: Progress, stops: Mapping[int, EarlyStopping]) -> Iterator[Progress]:
        """An epoch at each silo that has not ended; yields now and then the progress with how far the round is."""
        stage, told = self.stages[self.stage], time.perf_counter()
        epochs = self._epochs(progress, stops)
        before = replace(progress, fraction_done=0.0, within=None)
        for number, epoch in enumerate(epochs):
            for share in epoch.batches(before.model) if stage.trains else ():
                if time.perf_counter() - told > SIZES.report_every:
                    yield replace(before, fraction_done=(number + share) / len(epochs),
                                  within=partial(self._within, epochs, before))
                    told = time.perf_counter()
        units = {domain.unit: epoch for epoch in epochs for domain in epoch.domains}
        return Update({unit: epoch.loss for unit, epoch in units.items()},
                      {unit: epoch.seconds / len(epoch.domains) for unit, epoch in units.items()},
                      *self._trained(epochs, before))

    def _epochs(self, progress: Progress, stops: Mapping[int, EarlyStopping]) -> list[Epoch]:
        """The next epoch of each silo that trains, or the one that the run was stopped in."""
        f = self.federation
        within = progress.within() if progress.within else PartialRound(progress.model, progress.server_state)
        reached = {number: point for number, *point in within.epochs}
        epochs = []
        for silo in self.silos:
            first = silo.domains[0]
            if self.together or not stops[first.unit].ended:
                silo.load(within.model)
                point = Point(within.server_state, *reached.get(first.number, ()))
                epochs.append(Epoch(f.backbone, f.local, silo.domains, self.stages[self.stage].trained, point,
                                    DrawKey(silo.seed, 0, progress.round)))
        return epochs

    def _trained(self, epochs: Sequence[Epoch], before: Progress) -> tuple[Snapshot, Tables]:
        """All parameters, and what all optimisers remember, trained so far. Those of who has ended stay."""
        trained = [silo_modules.exported(domain.module, domain.prefix) for epoch in epochs for domain in epoch.domains]
        model = replace(merged([before.model, *trained]), client_context=before.model.client_context)
        return model, dict(before.server_state, **{name: value for epoch in epochs
                                                   for name, value in epoch.state().items()})

    def _within(self, epochs: Sequence[Epoch], before: Progress) -> PartialRound:
        """How far a round is; the tables are copies. Raises RunFailed if training has diverged."""
        model, state = self._trained(epochs, before)
        points = [(epoch.domains[0].number, epoch.point()) for epoch in epochs]
        for epoch, (_, point) in zip(epochs, points):
            for domain in epoch.domains:
                self.require_finite(domain.unit, point.loss, model, before.round)
        return PartialRound(model, {name: value.clone() for name, value in state.items()},
                      tuple((number, point.batches, point.loss, point.seconds) for number, point in points))

    def aggregate(self, progress: Progress, update: Update) -> Update:
        """After a round the server makes of all domains' uploads what each of them receives."""
        if not self.exchanging:
            return update
        uploads = self._uploads(progress.round, update.model)
        downloads, moments = self._downloads(progress, uploads)
        return self._received(replace(update, moments=moments), uploads, downloads)

    def _uploads(self, round_: int, model: Snapshot) -> list[Tables]:
        f, uploads = self.federation, []
        for domain in self.domains:
            part = domain.part(model)
            if not isinstance(f.backbone, ModuleBackbone):
                uploads.append(part.dense)
                continue
            draw = DrawKey(domain.seed, self.step.index, round_)  # unlike training, uploads draw anew in every block
            with torch.no_grad(), silo_modules.seeded(draw.seed, "upload", draw.round, device=f.device):
                upload = self.method.upload(domain.module, draw)
            checks.check_domain_upload(self.method, upload, self.method.sent or [*part.dense])
            uploads.append({name: value.detach().clone() for name, value in upload.items()})
            after = silo_modules.exported(domain.module, domain.prefix)  # the method may change buffers
            model.public.update(after.public)
            model.dense.update(after.dense)
        return uploads

    def _downloads(self, progress: Progress, uploads: Sequence[Tables]) -> tuple[Sequence[Tables], Tables]:
        """At the server: what each domain receives, given what all have sent; and what its optimiser remembers."""
        f = self.federation
        sizes = [1 if f.server.weighting == "uniform" else domain.step.trained_rows for domain in self.domains]
        weights = torch.tensor(sizes, dtype=torch.float64, device=f.device) / sum(sizes)
        downloads = self.method.aggregate(uploads, weights, DrawKey(f.seed, 0, progress.round))
        checks.check_downloads(self.method, downloads, len(uploads))
        if f.server.optimiser is None:
            return downloads, {}
        sent = {name: progress.server_moments[f"sent/{name}"] for name in downloads[0]}
        after, moments = f.server.optimiser.step(sent, downloads[0], progress.server_moments)
        return [after] * len(uploads), {**moments, **{f"sent/{name}": value for name, value in after.items()}}

    def _received(self, update: Update, uploads: Sequence[Tables], downloads: Sequence[Tables]) -> Update:
        """After each domain has put what it received in the place of its own."""
        model = update.model
        for domain, download in zip(self.domains, downloads, strict=True):
            part = domain.part(model)
            checks.check_download(self.method, part, download)
            for name, value in download.items():
                kind = model.public if name in part.public else model.dense
                kind[domain.prefix + name] = value
        return replace(update, sent=self._bytes(uploads, downloads))

    def _bytes(self, uploads: Sequence[Tables], downloads: Sequence[Tables]) -> dict[int, dict[str, int]]:
        return {domain.unit: {"bytes_up": bytes_of(upload), "bytes_down": bytes_of(download)}
                for domain, upload, download in zip(self.domains, uploads, downloads)}

    def with_arrivals(self, model: Snapshot) -> Snapshot:
        """A model once new users have received it, of whom silos know none."""
        return model

    def require_finite(self, unit: int, loss: float, model: Snapshot, round_: int) -> None:
        domain = self.units[unit]
        require_finite(loss, domain.part(model), self.federation, domain.step.n_items, self.key(unit, round_))

    def key(self, unit: int, round_: int) -> DrawKey:
        return DrawKey(self.federation.seed, unit, round_)

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        f, domain = self.federation, self.units[unit]
        metric, k = f.validation
        ranking = Ranking([k], [metric], None, f.evaluation.mask_history)
        return rank_by_module(f.backbone, domain.load(model), domain.step, "valid", ranking).mean(
            f.evaluation.valid_metric)

    def best(self, unit: int, model: Snapshot, round_: int, best: Best) -> Best:
        """The best round so far with a domain's part from another model."""
        part, prefix = self.units[unit].part(model), self.units[unit].prefix
        public = best.model.public | {prefix + name: value for name, value in part.public.items()}
        dense = best.model.dense | {prefix + name: value for name, value in part.dense.items()}
        return Best(replace(best.model, public=public, dense=dense), round_)

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        """A domain's row R[t, .]: of this and every earlier step the scores of its users, by their ids among those of
        all domains; of one that holds all sessions, by the number of the session. Nothing is analysed."""
        f, domain, catalogue = self.federation, self.units[unit], None
        if f.on_test or any(metric.of_items for metric in f.metrics):
            with torch.no_grad():
                catalogue = catalogue_of([domain.step], domain.load(best.model).eval().item_vectors())
        ranking = Ranking(f.topk, f.metrics, catalogue, f.evaluation.mask_history)
        earlier = [Domain.of(f.stream, step.to(f.device), domain.number, f.seed)
                   for step in f.stream.steps[:self.step.index]]
        return [(unit, tested.unit, replace(scores, users=tested.tested[scores.users]))
                for tested in [*earlier, domain]
                for scores in [rank_by_module(f.backbone, domain.load(best.model), tested.step, "test", ranking)]], []

    def participation(self) -> dict[str, int]:
        return {"participants": 1}

    def sent(self, unit: int, update: Update, round_: int, last: bool) -> dict[str, int]:
        return update.sent.get(unit, {"bytes_up": 0, "bytes_down": 0})

    def more(self, unit: int, model: Snapshot, round_: int, validated: bool) -> dict[str, float]:
        """More numbers of a round for its curve: the stage, and without domains the test of a validated round."""
        if not self.federation.stream.domains and validated:
            [(_, _, tested)], _ = self.test(unit, Best(model))
            return {f"test_{name}": tested.mean(name) for name in tested.values}
        return {STAGE: self.stage} if len(self.stages) > 1 else {}

    def analyse(self, progress: Progress, model: Snapshot, best: Best, ended: bool) -> list:
        return []

    def state(self, update: Update) -> dict[str, Tables]:
        """What the run carries besides the model: what the optimisers remember, the domains' and the server's."""
        return {"server_state": update.state, "server_moments": update.moments}

    def end(self, progress: Progress) -> Progress:
        """The progress after the step, of whose best model each domain may keep something."""
        model = self._after(self.method.end_step, progress.best.model)
        return replace(progress, step=self.step.index + 1, round=0, trained=False,
                       best=replace(progress.best, model=model))


def stages_of(method: Method, backbone: Backbone | ModuleBackbone) -> tuple[Stage, ...]:
    """The stages of a run: the method's, or else the backbone's."""
    stages: Any = ()
    for plugin in (method, backbone):
        if not stages and isinstance(plugin, (DomainMethod, ModuleBackbone)):
            stages = plugin.stages()
            if not isinstance(stages, Sequence) or not all(isinstance(stage, Stage) for stage in stages):
                raise PluginError(f"{plugin.kind} '{plugin.name}': stages returned {str(stages)[:80]},\nexpected a "
                                  f"tuple of Stage, as (Stage('train'),).")
    return tuple(stages) or (Stage("train"),)
