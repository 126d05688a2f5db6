"""Domains in parts: nodes, each with one domain's data and module or several, and a server without any.

Both run the loop of ``loop.py`` in step with each other, the server with ``ServerSilos``, a node with ``NodeSilos``;
see ``remote.py``. The server gets what methods upload and answers with what their ``aggregate`` makes of it. It learns
sizes, what parameters are called, and of each round a domain's loss, seconds, validation metric and bytes; of tests the
metrics of each user.

A node has the stream's numbering of all domains, so that it draws what an undivided run draws.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import UserError
from ..data.stream import Step
from ..evaluation.ranking import UserScores
from ..plugin.silo import DomainData, ModuleBackbone
from ..plugin.state import Snapshot
from ..rng import Tables
from ..training.silo_modules import Domain
from .cross_silo import CrossSilo
from .early_stopping import EarlyStopping
from .parts import Best, Federation, Progress, Update
from .remote import Node, Server, named, rows_of_tests, tables_of, tests_in


def prepares_together(f: Federation) -> bool:
    """Whether the backbone makes something of all domains' item texts, so that they are sent."""
    return f.topology == "federated" and isinstance(f.backbone, ModuleBackbone) and f.backbone.prepares_together


class NodeSilos(CrossSilo):
    """A step's domains at a node: the server and the others are elsewhere."""

    @staticmethod
    def numbers(f: Federation) -> Iterable[int]:
        population: Node = f.population
        return population.names.tolist()

    def _ask(self, kind: str, tables: Tables) -> Tables:
        population: Node = self.federation.population
        return population.ask(kind, tables)

    def _prepared(self, known: Sequence[DomainData]) -> Sequence[DomainData]:
        f = self.federation
        if not prepares_together(f):
            return super()._prepared(known)
        here = [*self.numbers(f)]
        answer = self._ask("texts", {f"features/{number}": data.features for number, data in zip(here, known)
                                     if data.features is not None})
        places = [answer[f"place/{number}"].tolist() for number in here]
        return [replace(data, codes=answer.get(f"codes/{number}"), number=place, count=count)
                for number, data, (place, count) in zip(here, known, places)]

    def _first_dense(self) -> Tables:
        said, first = {}, self.domains[0]
        if first.number == 0:
            said = {**named("dense", super()._first_dense()),
                    **named("rows", {name: torch.zeros(0) for name in first.module.rows})}
        return tables_of("dense", self._ask("start", said))

    def ended(self, stops: Mapping[int, EarlyStopping]) -> bool:
        return bool(self._ask("ended", {})["ended"])

    def train(self, progress: Progress, stops: Mapping[int, EarlyStopping]) -> Iterator[Progress]:
        yield from ()  # what is within a round is not shown, so that all are at the same point
        epochs = super().train(progress, stops)
        while True:
            try:
                next(epochs)
            except StopIteration as end:
                return end.value

    def aggregate(self, progress: Progress, update: Update) -> Update:
        uploads = self._uploads(progress.round, update.model) if self.exchanging else []
        said = {name: table for domain, of_domain in zip(self.domains, uploads)
                for name, table in named(f"upload/{domain.number}", of_domain).items()}
        for unit, loss in update.loss.items():
            number = self.units[unit].number
            said |= {f"loss/{number}": _float64(loss), f"seconds/{number}": _float64(update.seconds[unit])}
        answer = self._ask("epochs", said)
        if not self.exchanging:
            return update
        downloads = [tables_of(f"download/{domain.number}", answer) for domain in self.domains]
        return self._received(update, uploads, downloads)

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        value = super().validate(unit, model, round_)
        self._ask("valid", {"value": _float64(value)})
        return value

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        tests, analysis = super().test(unit, best)
        self._ask("test", rows_of_tests(tests))
        return tests, analysis


def _float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class _Elsewhere(tuple):
    """The training items of a domain, which are elsewhere: whoever looks at them is refused."""

    def __getitem__(self, place: Any) -> Any:
        raise UserError("the backbone makes codes of which items domains train on, with these settings, and those are "
                        "at their clients; accepted: what is made of items' texts alone.")

    def __iter__(self) -> Iterator[Any]:
        return self[0]


class ServerSilos(CrossSilo):
    """A step's domains as the server sees them: they are elsewhere. Its progress has parameters' names alone, those of
    the first domain, and no number of them."""

    @property
    def _population(self) -> Server:
        return self.federation.population

    @property
    def _node_of(self) -> dict[int, int]:
        names = self._population.names
        nodes = names.items() if isinstance(names, Mapping) else enumerate(names)
        return {number: node for node, numbers in nodes for number in numbers.tolist()}

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Any = None) -> tuple[CrossSilo, Progress]:
        f.population.admit(progress, f.stream)
        return super().open(f, step, progress, observe)

    def _with_modules(self, domains: Sequence[Domain]) -> tuple[Domain, ...]:
        if prepares_together(self.federation):
            self._make_codes(domains)
        return tuple(domains)

    def _make_codes(self, domains: Sequence[Domain]) -> None:
        """Tell each domain what is made of the item texts of all."""
        replies, answers = self._population.collect("texts"), []
        known = [DomainData(domain.step.n_users, domain.step.n_items,
                            replies[self._node_of[domain.number]].get(f"features/{domain.number}"), _Elsewhere())
                 for domain in domains]
        for domain, data in zip(domains, self._prepared(known), strict=True):
            codes = {} if data.codes is None else {f"codes/{domain.number}": data.codes}
            answers.append({f"place/{domain.number}": torch.tensor([data.number, data.count]), **codes})
        self._answer(domains, answers)

    def _answer(self, domains: Sequence[Domain], of_domains: Sequence[Tables]) -> None:
        answers: dict[int, Tables] = {node: {} for node in self._population.arrived}
        for domain, tables in zip(domains, of_domains):
            answers[self._node_of[domain.number]] |= tables
        self._population.nodes.answer(answers)

    def start(self) -> Snapshot:
        said, first = self._population.collect("start")[self._node_of[0]], self.domains[0].prefix
        dense = self._begun = tables_of("dense", said)
        self._population.everybody(named("dense", dense))
        names = ({first + name: torch.zeros(0) for name in kind} for kind in (tables_of("rows", said), dense))
        return Snapshot(next(names), {}, next(names))

    def _sent(self, model: Snapshot) -> Tables:
        return {} if self.federation.server.optimiser is None else named("sent", self._begun)

    def _after(self, hook: Any, model: Snapshot) -> Snapshot:
        return model  # domains have it

    def enter(self, stage: int, progress: Progress) -> Progress:
        self.stage = stage
        return progress

    def ended(self, stops: Mapping[int, EarlyStopping]) -> bool:
        ended = super().ended(stops)
        self._population.collect("ended")
        self._population.everybody({"ended": torch.tensor(ended)})
        return ended

    def train(self, progress: Progress, stops: Mapping[int, EarlyStopping]) -> Iterator[Progress]:
        yield from ()
        return Update(model=progress.model)

    def aggregate(self, progress: Progress, update: Update) -> Update:
        said, uploads, downloads = self._population.collect("epochs"), [], []
        for domain in self.domains:
            of_node, number = said[self._node_of[domain.number]], domain.number
            uploads.append(tables_of(f"upload/{number}", of_node))
            if f"loss/{number}" in of_node:  # it has trained
                update.loss[domain.unit] = float(of_node[f"loss/{number}"])
                update.seconds[domain.unit] = float(of_node[f"seconds/{number}"])
        if self.exchanging:
            made, moments = self._downloads(progress, uploads)
            downloads = [{name: value.detach() for name, value in download.items()} for download in made]
            update = replace(update, moments=moments, sent=self._bytes(uploads, downloads))
        self._answer(self.domains, [named(f"download/{domain.number}", download)
                                    for domain, download in zip(self.domains, downloads)])
        return update

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        value = self._population.collect_from(self._node_of[self.units[unit].number], "valid")["value"]
        self._population.everybody({})
        return float(value)

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        said = self._population.collect_from(self._node_of[self.units[unit].number], "test")
        self._population.everybody({})
        return [(unit, tested, UserScores(columns["users"], tables_of("score", columns)))
                for tested, columns in tests_in(said).items()], []
