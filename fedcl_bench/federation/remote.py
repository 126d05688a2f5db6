"""A federation in parts: clients elsewhere (nodes), each with the data and private parameters of some users, and a
server without any. Both run the loop of ``loop.py`` in step with each other, the server with ``ServerClients``, a node
with ``NodeClients``; what passes between them is in ``MESSAGES``, and nothing else can.

A node asks, the server answers: ``Node.ask`` and ``Server.collect`` are the two ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Callable, ClassVar, Mapping, Protocol, Sequence

import torch
from torch import Tensor

from ..core.errors import UserError
from ..data.stream import Ragged, Sessions, Step, Stream
from ..evaluation import beyond_accuracy, drift
from ..evaluation.ranking import UserScores
from ..plugin.method import Method
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..training.trained import Change, Trained
from . import server
from .client_sampling import Attendance, Participants
from .cross_device import CrossDevice, Observer
from .parts import Best, Federation, Progress, Update

PER_USER_ANALYSIS = (*drift.PER_USER, *beyond_accuracy.PER_USER)


# The tables that a node may send in a request of a kind, and the server in its answer, by what their names are or, with
# a / at the end, begin with; "" is any name. What they are says docs/real-clients.md.
MESSAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "participants": ((), ("users", "count", "dropped")),
    "uploads": (("users", "upload/"), ("answer/",)),
    "update": (("change/", "numbers", "users", "held/", "table/", "upload/",
                "squares", "square"),  # of weights, by item and of all (init=per_client)
               ("public/", "dense/", "loss", "answer/", "served/",
                "broadcast/",  # what else the method's server sends all
                "sum/", "count")),  # over all users, and of those who took part (receive)
    "sum": (("",), ("",)),
    "cold": (("counts", "change/", "weight"), ("new/",)),
    "query": (("users", "queries"), ("answers",)),
    "mean": (("sum", "count"), ("mean",)),
    "test": (("test/", "analysis/"), ()),
    "analysis": (("analysis/",), ()),
    "done": ((), ()),
    # Of domains (see ``remote_silos.py``), by their numbers.
    "texts": (("features/",), ("codes/", "place/")),  # a domain's number and count, as ``prepared`` says
    "start": (("dense/", "rows/"), ("dense/",)),  # no number: what tables with item rows are called
    "epochs": (("loss/", "seconds/", "upload/"), ("download/",)),
    "valid": (("value",), ()),
    "ended": ((), ("ended",)),
}


class Undeclared(Exception):
    """A message with a table that ``MESSAGES`` does not declare."""


def check_declared(kind: str, tables: Tables, sent: bool) -> None:
    """Raise Undeclared unless every table of a request (``sent``) or an answer is one that its kind may have."""
    declared = MESSAGES[kind][0 if sent else 1]
    for name in tables:
        if not any(name == each or (each == "" or each.endswith("/")) and name.startswith(each) for each in declared):
            raise Undeclared(f"message '{kind}' cannot have '{name}'; declared: {', '.join(declared) or 'nothing'}")


def named(kind: str, tables: Mapping[str, Tensor]) -> Tables:
    """Tables of a message, by their names after ``kind/``."""
    return {f"{kind}/{name}": table for name, table in tables.items()}


def tables_of(kind: str, tables: Tables) -> Tables:
    """The inverse of ``named``, of a message that may have others too."""
    start = f"{kind}/"
    return {name.removeprefix(start): table for name, table in tables.items() if name.startswith(start)}


class Node(server.Population):
    """What the users of a node are told of all others.

    Args:
        ask: sends (kind, tables) to the server and returns its answer.
        names: ids of its users, or the numbers of its domains, ascending.
        clients: how many the run has; None: these alone.
    """

    def __init__(self, ask: Callable[[str, Tables], Tables], names: Tensor, clients: int | None = None):
        self._ask, self.names, self._clients = ask, names, len(names) if clients is None else clients

    def clients(self, stream: Stream) -> int:
        return self._clients

    def ask(self, kind: str, tables: Tables) -> Tables:
        check_declared(kind, tables, sent=True)
        return self._ask(kind, tables)

    def participants(self, step: Step, attendance: Attendance, seed: int, round_: int) -> Participants:
        answer = self.ask("participants", {})
        return Participants(answer["users"], int(answer["count"]), int(answer["dropped"]))

    def all_reduce(self, here: Tables) -> Tables:
        return self.ask("sum", here)

    def mean(self, here: UserScores, metric: str) -> float:
        values = here.values[metric].double()
        return float(self.ask("mean", {"sum": values.sum(), "count": torch.tensor(len(values))})["mean"])

    def answer_queries(self, method: Method, queries: Tensor, users: Tensor) -> Tensor:
        return self.ask("query", {"users": users, "queries": queries})["answers"]

    def new_rows(self, make: Callable[[Tables], Tables], here: Tables) -> Tables:
        return tables_of("new", self.ask("cold", here))


class NodeClients(CrossDevice):
    """A step's clients at a node: the server is elsewhere."""

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Observer | None = None
             ) -> tuple[CrossDevice, Progress]:
        def rows(state: Tables) -> Tables:  # of a node that comes late, which the server has answered nothing
            return {**state, **{name: server.with_new_users(state[name], step.n_users)
                                for name in progress.answered if name in state}}
        best = replace(progress.best, client_state=rows(progress.best.client_state))
        return super().open(f, step, replace(progress, client_state=rows(progress.client_state), best=best), observe)

    def _answer(self, round_: int, uploads: Tables) -> Tables:
        """What the server answers the participants here, before they train."""
        sent = {"users": self.group.users, **named("upload", uploads)} if uploads else {}
        answer = self.federation.population.ask("uploads", sent)
        return self._delivered(tables_of("answer", answer))

    def aggregate(self, progress: Progress, update: Update) -> Update:
        if update.sums is None:
            return update
        f, sums, model = self.federation, update.sums, progress.model
        answer = f.population.ask("update", self._sent(update))
        served = {name: model.personalised[name].index_copy(0, self.group.users, rows)
                  for name, rows in tables_of("served", answer).items()}
        model = Snapshot(tables_of("public", answer), {**model.private, **sums.private}, tables_of("dense", answer),
                         sums.local, {**model.personalised, **served}, model.client_context)
        if "count" in answer:
            key = self.key(self.step.index, progress.round)
            model = self._receive(model, tables_of("sum", answer), int(answer["count"]), key)
        self.method.server_state = {**self.method.server_state, **tables_of("broadcast", answer)}
        answers = update.answers if self.method.uploads_first else self._delivered(tables_of("answer", answer))
        unit = self.step.index
        return Update({unit: float(answer["loss"])}, {unit: time.perf_counter() - update.began}, model,
                      answers=answers, uploads=update.uploads)

    def _sent(self, update: Update) -> Tables:
        """What leaves the node after local training."""
        sums, tables = update.sums, update.sums.tables()
        rows = {} if self.method.uploads_first else named("upload", update.uploads)
        if self.federation.backbone.overrides("serve"):
            rows |= named("table", {name: table[self.group.users] for name, table in sums.local.items()})
        if sums.held is not None:
            tables, rows = {"numbers": tables["numbers"]}, rows | named("held", self._changes(sums))
        return {**tables, **rows, "users": self.group.users} if rows else tables

    def _changes(self, sums: server.RoundSums) -> Tables:
        """Each participant's change of every public parameter, (users, ...), in the order of the users."""
        sent = sums.model.sent
        result = {name: table.new_empty(len(self.group.users), *table.shape) for name, table in sent.items()}
        for trained in sums.held:
            at = torch.searchsorted(self.group.users, trained.users)
            for name, table in sent.items():
                result[name][at] = trained.public[name].against(table)
        return result

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        if len(self.step.valid.values):
            return super().validate(unit, model, round_)
        name = self.federation.evaluation.valid_metric
        empty = torch.zeros(0, dtype=torch.float64)
        return self.federation.population.mean(UserScores(empty.long(), {name: empty}), name)

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        tests, analysis = super().test(unit, best)
        self.federation.population.ask("test", {**rows_of_tests(tests), **named("analysis", _rows_of(analysis))})
        return tests, analysis

    def analyse(self, progress: Progress, model: Snapshot, best: Best, ended: bool) -> list:
        if found := super().analyse(progress, model, best, ended):
            self.federation.population.ask("analysis", named("analysis", _rows_of(found)))
        return found


def rows_of_tests(tests: Sequence[tuple[int, int, UserScores]]) -> Tables:
    return {f"test/{tested}/{name}": values for _, tested, scores in tests
            for name, values in {"users": scores.users, **named("score", scores.values)}.items()}


def tests_in(tables: Tables) -> dict[int, Tables]:
    """Of each test in a message its ``users`` and ``score/METRIC``: the inverse of ``rows_of_tests``."""
    found: dict[int, Tables] = {}
    for name, values in tables_of("test", tables).items():
        tested, _, column = name.partition("/")
        found.setdefault(int(tested), {})[column] = values
    return found


def _rows_of(analysis: Sequence[tuple[int, str, Tensor, Tensor]]) -> Tables:
    return {f"{kind}/{part}": tensor for _, kind, ids, values in analysis
            for part, tensor in (("ids", ids), ("values", values))}


class Nodes(Protocol):
    """The nodes of a run as the server talks to them, by their numbers."""

    def receive(self) -> dict[int, tuple[str, Tables]]:
        """The open request of every node that takes part, once all have one."""

    def answer(self, answers: Mapping[int, Tables]) -> None:
        """Answer some of the open requests."""


@dataclass
class Server(server.Population):
    """All clients of a run, which are elsewhere."""

    clients_here = False
    # Whether a round goes on without nodes that have left, as real clients do and shards do not.
    clients_leave: ClassVar[bool] = False

    nodes: Nodes
    names: Sequence[Tensor] | Mapping[int, Tensor]  # ids of each node's users, or the numbers of its domains, ascending
    group: Participants | None = None  # who takes part in the round
    method: Method | None = None  # what answers queries
    arrived: list[int] = field(default_factory=list)  # the nodes that were collected from last
    sums: list[Tables] = field(default_factory=list)  # that nodes were answered since the step was opened
    late: dict[int, int] = field(default_factory=dict)  # how many of them a node has had that came after it was

    def admit(self, progress: Progress, stream: Stream, late: bool = False) -> Stream:
        """Nodes that have come may take part, from ``progress`` on; ``late``: the step is open already. Returns the
        stream with their users' sizes."""
        return stream

    def collect(self, kind: str) -> dict[int, Tables]:
        """What each node sends of a kind, once all have come to it; what they ask before is answered."""
        while True:
            requests = self.nodes.receive()
            kinds = {asked for asked, _ in requests.values()}
            if kinds == {kind}:
                self.arrived, self.late = sorted(requests), {}
                return {node: requests[node][1] for node in self.arrived}
            single = {node: self._answer(node, *request) for node, request in requests.items()
                      if request[0] in ("participants", "query") or node in self.late and request[0] == "sum"}
            if not single:
                if kinds != {"sum"}:
                    raise RuntimeError(f"nodes are out of step: {', '.join(sorted(kinds))}, expected {kind}")
                self.sums.append(self.added({node: requests[node][1] for node in sorted(requests)}))
                single = dict.fromkeys(requests, self.sums[-1])
            self.nodes.answer(single)

    def collect_from(self, node: int, kind: str) -> Tables:
        """What one node sends of a kind; what the others ask stays open."""
        asked, tables = self.nodes.receive()[node]
        if asked != kind:
            raise RuntimeError(f"node {node} is out of step: {asked}, expected {kind}")
        self.arrived = [node]
        return tables

    def everybody(self, answer: Tables) -> None:
        """Answer all of what was collected last alike."""
        self.nodes.answer(dict.fromkeys(self.arrived, answer))

    def new_rows(self, make: Callable[[Tables], Tables], here: Tables) -> Tables:
        rows = make(self.added(self.collect("cold")))
        self.everybody(named("new", rows))
        return rows

    def called(self, node: int) -> str:
        return f"node {node}"

    def added(self, parts: Mapping[int, Tables]) -> Tables:
        """The sums of nodes' tables; raises UserError unless all have the same form."""
        (first, start), *others = parts.items()
        total = {name: table.clone() for name, table in start.items()}
        for node, part in others:
            for name in {**total, **part}:
                here, there = (tuple(tables[name].shape) if name in tables else None for tables in (part, total))
                if here != there:
                    raise UserError(f"{self.called(node)} has sent {here or 'no table'} as '{name}', and "
                                    f"{self.called(first)} {there or 'no table'}; one of them is at fault.")
                total[name] += part[name]
        return total

    def here(self, node: int, users: Tensor) -> tuple[Tensor, Tensor]:
        """Those of some users, ascending, whom a node has: positions among ``users``, and their numbers at the node."""
        names = self.names[node]
        positions = torch.searchsorted(users, names)  # unlike `isin`, this sorts nothing
        numbers = (torch.cat([users, users.new_tensor([-1])])[positions] == names).nonzero().flatten()
        return positions[numbers], numbers

    def rows(self, kind: str, replies: Mapping[int, Tables]) -> tuple[Tensor, Tables]:
        """Who sends rows in some replies, ascending, and their rows of a kind."""
        parts = {node: part for node, part in replies.items() if "users" in part}
        users = torch.cat([torch.zeros(0, dtype=torch.int64),
                           *(self.names[node][part["users"]] for node, part in parts.items())])
        order, each = users.argsort(), [tables_of(kind, part) for part in parts.values()]
        return users[order], {name: torch.cat([part[name] for part in each])[order] for name in (each or [{}])[0]}

    def _answer(self, node: int, kind: str, tables: Tables) -> Tables:
        if kind == "participants":
            users, count, dropped = self.group
            return {"users": self.here(node, users)[1], "count": torch.tensor(count), "dropped": torch.tensor(dropped)}
        if kind == "sum":
            self.late[node] += 1
            return self.sums[self.late[node] - 1]
        users = self.names[node][tables["users"]]
        return {"answers": self.method.answer_queries(tables["queries"], users)}


class ReceivedSums(server.RoundSums):
    """Sums over a round's nodes."""

    def __init__(self, model: Snapshot, population: Server, replies: Mapping[int, Tables], weights: Tensor | None,
                 own_start: bool):
        self.model, self.weights, self.own_start, self.private = model, weights, own_start, {}
        self._totals = population.added({
            node: {name: table for name, table in part.items()
                   if name.startswith("change/") or name in ("numbers", "squares", "square")}
            for node, part in replies.items()})
        self.change = tables_of("change", self._totals)
        (users, held), (_, local), (sent, uploads) = (
            population.rows(kind, replies) for kind in ("held", "table", "upload"))
        self._order, self._uploads = [sent], {name: [values] for name, values in uploads.items()}
        self.local = {**model.local, **{name: model.local[name].index_copy(0, users, table)
                                        for name, table in local.items()}}
        self.held = [Trained(users, None, {name: Change(table) for name, table in held.items()}, {}, {}, users, {})] \
            if held else None

    def tables(self) -> Tables:
        return self._totals


class ServerClients(CrossDevice):
    """A step's clients as the server sees them: they are elsewhere."""

    @property
    def _population(self) -> Server:
        return self.federation.population

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Observer | None = None
             ) -> tuple[CrossDevice, Progress]:
        f.population.sums = []
        f = replace(f, stream=f.population.admit(progress, f.stream))
        opened, progress = super().open(f, f.stream.steps[step.index], progress, observe)
        f.population.method = opened.method
        return opened, progress

    def _choose_participants(self, progress: Progress) -> None:
        if progress.round:
            self._admit_late(progress)
        self.group = self._population.group = self.attendance.of(self.step, self.federation.seed, progress.round)

    def _sums(self, model: Snapshot, key: DrawKey) -> server.RoundSums:
        replies = self._population.collect("update")
        self._count(replies)
        own_start = self.training.own_start and key.round == 0
        return ReceivedSums(model, self._population, replies, self.weights(key.round), own_start)

    def _admit_late(self, progress: Progress) -> None:
        """Let clients take part that have come since the step was opened, and count their users among its own."""
        f = self.federation
        if (stream := f.population.admit(progress, f.stream, late=True)) is f.stream:
            return
        f = self.federation = replace(f, stream=stream)
        step = stream.steps[self.step.index]
        self.step = f.as_trained_on(step)
        self.protocol = self._protocol(step)

    def _count(self, replies: Mapping[int, Tables]) -> None:
        """Participants whose node has not replied are dropped."""
        population = self._population
        if not population.clients_leave:
            return
        users, _, dropped = self.group
        there = torch.zeros(len(users), dtype=torch.bool)
        for node in replies:
            there[population.here(node, users)[0]] = True
        arrived = users[there]
        self.group = population.group = Participants(arrived, len(arrived), dropped + len(users) - len(arrived))

    def _upload_first(self, model: Snapshot, key: DrawKey) -> tuple[Tables, Tables]:
        replies = self._population.collect("uploads")
        self._count(replies)
        _, uploads = self._population.rows("upload", replies)
        answers = self._answer(key.round, uploads) if self.group.count else {}
        self._population.nodes.answer({node: self._rows("answer", answers, node) for node in replies})
        return uploads, answers

    def _rows(self, kind: str, tables: Tables, node: int) -> Tables:
        """Those rows of tables with one per participant that are a node's."""
        if not tables:
            return {}
        positions, _ = self._population.here(node, self.group.users)
        return named(kind, {name: table[positions] for name, table in tables.items()})

    def _delivered(self, answers: Tables) -> Tables:
        """Clients keep them; the server notes that there are some, for the record."""
        self.answered = tuple(dict.fromkeys((*self.answered, *answers)))
        known = self.method.client_state
        self.method.client_state = {**known, **{name: rows[:0] for name, rows in answers.items() if name not in known}}
        return answers

    def aggregate(self, progress: Progress, update: Update) -> Update:
        if update.sums is None:
            return update
        if self.group.count:
            result = super().aggregate(progress, update)
        else:  # all whom the server asked have left: nothing changes
            unit, moments = self.step.index, progress.server_moments if progress.round else {}
            result = Update({unit: 0.0}, {unit: time.perf_counter() - update.began}, progress.model, moments=moments)
        model, users = result.model, self.group.users
        served = {name: table[users] for name, table in model.personalised.items()} \
            if self.federation.backbone.overrides("serve") else {}
        answers = {} if self.method.uploads_first else result.answers
        alike = {**named("public", model.public), **named("dense", model.dense),
                 **named("broadcast", self.method.broadcast),
                 "loss": torch.tensor(result.loss[self.step.index], dtype=torch.float64)}
        if self.group.count and self.sums and self.method.overrides("receive"):
            alike |= {**named("sum", update.sums.change), "count": torch.tensor(self.group.count)}
        more = {node: {**self._rows("answer", answers, node), **self._rows("served", served, node)}
                for node in self._population.arrived}
        # What is the same for all nodes stays one object, which is sent to each machine once.
        self._population.nodes.answer({node: {**alike, **own} if own else alike for node, own in more.items()})
        return result

    def _receive(self, model: Snapshot, sums: Tables, count: int, key: DrawKey) -> Snapshot:
        return model

    def with_arrivals(self, model: Snapshot) -> Snapshot:
        return model if self.cold_items is None else self.cold_items.with_arrivals(model)

    def participation(self) -> dict[str, int]:
        return {**super().participation(), **({"dropped": self.group.dropped} if self.group.dropped else {})}

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        return self._mean()

    def _mean(self) -> float:
        total = self._population.added(self._population.collect("mean"))
        mean = total["sum"] / total["count"]
        self._population.everybody({"mean": mean})
        return float(mean)

    def more(self, unit: int, model: Snapshot, round_: int, validated: bool) -> dict[str, float]:
        f, more = self.federation, dict(self.federation.backbone.diagnostics(model.public))
        if validated and f.evaluation.early_session:
            more |= {f"early_{metric}@{f.validation[1]}": self._mean() for metric in ("hit", "ndcg")}
        return more

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        population, method = self._population, self.federation.method
        now, method.server_state = method.server_state, dict(best.server_state)
        replies = population.collect("test")
        population.everybody({})
        method.server_state, tests = now, {node: tests_in(part) for node, part in replies.items()}
        return [(unit, tested, UserScores(*population.rows("score", {
            node: of_node[tested] for node, of_node in tests.items() if tested in of_node})))
                for tested in sorted(set().union(*tests.values()))], self._analysis(replies)

    def analyse(self, progress: Progress, model: Snapshot, best: Best, ended: bool) -> list:
        if self.earlier is None or not ended and (progress.round or not self.federation.evaluation.drift_users):
            return []
        replies = self._population.collect("analysis")
        self._population.everybody({})
        return self._analysis(replies)

    def _analysis(self, replies: Mapping[int, Tables]) -> list[tuple[int, str, Tensor, Tensor]]:
        """The nodes' numbers of users together, and those of items, which all have alike."""
        parts = {node: tables_of("analysis", part) for node, part in replies.items()}
        found = []
        for name in next(iter(parts.values())):
            kind, _, part = name.rpartition("/")
            if part == "values":
                continue
            ids, values = parts[min(parts)][f"{kind}/ids"], parts[min(parts)][f"{kind}/values"]
            if kind in PER_USER_ANALYSIS:
                ids, of_users = self._population.rows("value", {
                    node: {"users": tables[f"{kind}/ids"], "value/": tables[f"{kind}/values"]}
                    for node, tables in parts.items()})
                values = of_users[""]
            found.append((self.step.index, kind, ids, values))
        return found


def sizes_of(stream: Stream) -> Stream:
    """A stream as a server knows it: of each user how many interactions there are, and not which. In training data the
    first new item of a block stands for all of its new ones, and item 0 for the others."""
    def lists(each: Ragged, old_items: int = 0) -> Ragged:
        new = each.values >= old_items if old_items else torch.zeros_like(each.values)
        return Ragged(each.indptr, new * old_items)

    def sessions(each: Sessions) -> Sessions:
        return replace(each, items=torch.zeros_like(each.items), times=torch.zeros_like(each.times))
    steps = [replace(step, sessions={name: sessions(each) for name, each in step.sessions.items()},
                     train=lists(step.train, step.old_items), valid=lists(step.valid), test=lists(step.test))
             for step in stream.steps]
    return replace(stream, steps=tuple(steps), features=() if stream.domains else stream.features, known={})
