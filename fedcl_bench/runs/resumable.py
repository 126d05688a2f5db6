"""What a progress must be so that its run can go on from it: for every field what its value is, and what a run makes of
it.

Whoever can write a fitting checksum can write any progress into a file. So whatever follows from the run's data, its
settings or the curve is made anew and compared, and the rest has bounds. What passes is a progress that the run could
have come to: it ends with numbers, and compiled code is never asked for a row that is not there.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..backbone import Backbone
from ..client.ways import MEANING
from ..data.stream import Step
from ..domain_module import ModuleBackbone
from ..draws import Tables
from ..evaluation import beyond, drift
from ..evaluation.metrics import is_share
from ..evaluation.ranking import UserScores
from ..evaluation.sessions import FULL
from ..federation.cold_start import shown
from ..federation.parts import STAGE, Best, Federation, Progress, Within
from ..federation.silos import Phase, Silos, ends_together, in_stage, stages_of
from ..federation.validation import Validation, is_due, judged_again
from ..model import Snapshot
from ..schema import Check, Wrong, fields_of, finite, flag, lists, mapping, number, or_none, text, whole
from .frames import COLUMNS

_MOST = 2 ** 53  # whole numbers up to here are floating-point numbers too
_LONGEST, _LARGEST = 1e12, 2 ** 40  # seconds, and bytes that a client sends or receives in a round
_ROUNDING = 1e-9  # by which sums of shares may be above 1
_Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of tables, by name
_BY_NOBODY, _CENTRAL, _DOMAINS = "given", "central", "domains"  # ways that a stream or a setting implies


# What a field's value is by itself.

def tensor(value: Any, field: str) -> None:
    """A plain tensor whose elements are all in it."""
    if type(value) is not Tensor or value.layout != torch.strided or value.is_nested or value.is_meta:
        raise Wrong(field, getattr(value, "layout", type(value).__name__), "a dense tensor")
    if value.requires_grad or value.is_quantized or value.is_complex():
        raise Wrong(field, "a tensor with a gradient, quantized or complex", "plain numbers")


_COUNT, _TENSORS = whole(), mapping(tensor)
snapshot = fields_of({"public": _TENSORS, "private": _TENSORS}, {
    f.name: _TENSORS for f in fields(Snapshot) if f.name not in ("public", "private")})


def _measured(value: Any, field: str) -> None:
    """A finite number, or nan where nothing was measured."""
    number(value, field)
    if math.isinf(value):
        raise Wrong(field, value, "a finite number or nan")


def _logged(value: Any, field: str) -> None:
    """Any number that a column of a table can have."""
    number(value, field)
    if isinstance(value, int):
        whole(-_MOST, _MOST)(value, field)


_SECONDS, _BYTES = finite(0.0, _LONGEST), whole(0, _LARGEST)
_COLUMNS: dict[str, Check] = {
    "step": _COUNT, "round": _COUNT, "participants": _COUNT, "loss": finite(), "valid": _measured, "bytes_up": _BYTES,
    "bytes_down": _BYTES, "train_seconds": _SECONDS, "evaluate_seconds": _SECONDS}
_IN_SOME_RUNS = {"dropped": _COUNT, "bytes_down_new": _BYTES, STAGE: _COUNT}
_ROW = fields_of({name: _COLUMNS[name] for name in COLUMNS["rounds"]})


def _row(value: Any, field: str) -> None:
    """A round: what every run logs of it, what some do, and whatever else a backbone logs."""
    _ROW(value, field)
    mapping(_logged)(value, field)
    for name in value:
        text(name, field)
        _IN_SOME_RUNS.get(name, _logged)(value[name], f"{field}.{name}")


def _tuple_of(*checks: Check) -> Check:
    """A tuple of parts that each fit."""
    def check(value: Any, field: str) -> None:
        lists(lambda part, name: None, len(checks))(value, field)
        for i, (known, part) in enumerate(zip(checks, value)):
            known(part, f"{field}[{i}]")
    return check


_BEST = fields_of({"model": snapshot, "round": _COUNT, "client_state": _TENSORS, "server_state": _TENSORS}, {})
_WITHIN = fields_of({"model": snapshot, "server_state": _TENSORS,
                     "epochs": lists(_tuple_of(_COUNT, _COUNT, finite(), _SECONDS))}, {})
_TESTS, _ANALYSIS = _tuple_of(_COUNT, _COUNT, tensor, _TENSORS), _tuple_of(_COUNT, text, tensor, tensor)


# What a run makes of it.

@dataclass(frozen=True)
class _Run:
    """A run, and the progress that it is said to have made."""

    f: Federation
    p: Progress

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.f.stream.steps

    @property
    def in_domains(self) -> bool:
        return bool(self.f.stream.domains)

    @property
    def in_epochs(self) -> bool:
        """Whether clients hold many users; such a run is saved within its first round too."""
        return self.f.central or self.in_domains

    @property
    def begun(self) -> int:
        """How many steps have been begun; domains all are together."""
        return len(self.steps) if self.in_epochs else self.p.step + (self.p.round > 0)

    @property
    def before_method(self) -> bool:
        """Whether none of the method's hooks has been called yet."""
        return self.p.step == 0 and self.f.method.first_step > 0

    @cached_property
    def stages(self) -> list[tuple[Federation, bool]]:
        """Of each stage of training, the parts with its rounds, and whether all domains end it together."""
        if not self.in_domains:
            return [(self.f, False)]
        return [(in_stage(self.f, stage), ends_together(self.f, stage)) for stage in stages_of(self.f)]

    @cached_property
    def positions(self) -> list[tuple[int, int, int]]:
        """(Stage, number of the round in it, step) of each row of the curve."""
        counts: Counter = Counter()
        positions = []
        for row in self.p.curve:
            key = row.get(STAGE, 0), row["step"]
            positions.append((key[0], counts[key], key[1]))
            counts[key] += 1
        return positions

    @cached_property
    def rows(self) -> list[dict[int, list[dict[str, Any]]]]:
        """The rows of the curve by stage and step."""
        rows: list[dict[int, list]] = [{t: [] for t in range(len(self.steps))} for _ in self.stages]
        for row, (stage, _, step) in zip(self.p.curve, self.positions):
            rows[stage][step].append(row)
        return rows

    def given(self, step: int) -> bool:
        """Whether a step's model was imported; it has one round, in which nobody trained."""
        return step == 0 and bool(self.f.server.base_model)

    @cached_property
    def judged(self) -> list[dict[int, list[tuple[Validation, Progress]]]]:
        """What validation said of each round, by stage and step."""
        return [{t: list(judged_again(f, rows)) for t, rows in of_stage.items()}
                for (f, _), of_stage in zip(self.stages, self.rows)]

    @cached_property
    def over(self) -> list[dict[int, list[bool]]]:
        """Of each round, whether it was to be the last of its stage, by stage and step."""
        result = []
        for (_, together), judged in zip(self.stages, self.judged):
            over = {t: [valid.last or self.given(t) for valid, _ in rounds] for t, rounds in judged.items()}
            result.append(dict.fromkeys(over, [all(each) for each in zip(*over.values())]) if together else over)
        return result

    def ended_in(self, stage: int) -> list[int]:
        """Which steps have had the last round of a stage."""
        return [t for t, rounds in self.over[stage].items() if any(rounds)]

    @cached_property
    def ended(self) -> list[int]:
        """Which steps have had their last round."""
        return self.ended_in(-1)

    @cached_property
    def best_round(self) -> int:
        """The round whose model would be tested. A step begins with that of the step before."""
        best = 0
        for t in range(self.begun):
            for number_, (valid, _) in enumerate(self.judged[0][t]):
                latest = self.f.server.tested_round == "last" and (valid.done or not self.in_epochs)
                best = number_ if valid.better or valid.equal or latest else best
        return best

    @property
    def standing(self) -> Progress:
        """The best validation so far, of the step that was begun last, and the rounds since. Domains have their own."""
        judged = [] if self.in_domains else self.judged[0][self.begun - 1]
        return judged[-1][1] if judged else Progress()

    def users_of_test(self, step: Step) -> Tensor:
        """Whom a step's test has values of, in their order; of one client that holds all sessions, the sessions."""
        if not step.sessions:
            return (step.test.lengths > 0).nonzero().flatten()
        sessions = step.sessions["test"]
        if self.f.central:
            return torch.arange(len(sessions.lengths))
        users = torch.arange(step.n_users, device=sessions.count.device)
        return users.repeat_interleave(sessions.count)

    def metrics_of_test(self) -> list[str]:
        """The names of a test's metrics."""
        f = self.f
        names = [f"{metric.name}@{k}" for k in f.topk for metric in f.metrics]
        if self.in_epochs or not self.steps[0].sessions or f.evaluation.candidates == "all":
            return names
        of_hits = [f"{metric.name}@{k}" for k in f.topk for metric in f.metrics if not metric.of_items]
        return [*of_hits, *(FULL + name for name in names)]

    def tests(self) -> list[tuple[int, int]]:
        """Trained and tested step of every test so far, in their order."""
        return [(t, s) for t in self.ended for s in ([t] if self.in_domains else range(t + 1))]

    def analysis(self) -> Iterator[tuple[int, str, Tensor]]:
        """(Step, kind, ids) of all that is known so far, in its order; of kinds that not every user has, the users that
        may have it."""
        for step in () if self.in_epochs else self.steps[:self.begun]:
            t, ended, users = step.index, step.index in self.ended, self.users_of_test(step)
            for kind, ids in drift.kinds_of(step, self.steps[t - 1] if t else None, ended).items():
                yield t, kind, ids
            if not ended:
                continue
            if step.sessions:
                yield t, drift.TARGET, users
            for kind in beyond.kinds_of(step, self.metrics_of_test(), max(self.f.evaluation.topk)):
                yield t, kind, torch.arange(step.n_items) if kind == beyond.RECOMMENDED else users

    def tables(self, t: int) -> dict[str, _Expected]:
        """Shape and type of every parameter after a step, by kind and name."""
        backbone, step = self.f.backbone, self.steps[t]
        if isinstance(backbone, ModuleBackbone):
            return self._of_modules
        dtype, copies = getattr(torch, self.f.server.precision), (len(self.steps),) if self.in_domains else ()
        more = {} if self.in_domains else self._private_of_method(step)
        return {kind: {name: ((*copies, *shape) if kind == "dense" else shape, dtype) for name, shape in shapes.items()}
                for kind, shapes in shapes_of(backbone, step.n_users, step.n_items, more).items()}

    @cached_property
    def _of_modules(self) -> dict[str, _Expected]:
        """The same of domains with modules, which say it themselves."""
        start = Silos.of(self.f).start()
        return {kind: {name: (tuple(table.shape), table.dtype) for name, table in getattr(start, kind).items()}
                for kind in ("public", "private", "dense", "local", "served")}

    def _private_of_method(self, step: Step) -> Tables:
        """The private parameters that the method adds, of one client; its state stays as it is."""
        method = self.f.method
        state = dict(method.client_state), dict(method.server_state)
        try:
            return self.f.acting_in(step).new_private(self.f.seed, range(1), self.f.backbone)
        finally:
            method.client_state, method.server_state = state

    def batches(self) -> dict[int, int]:
        """How many a next round has of each model that trains, by the number of its first domain."""
        if self.in_domains:
            return Phase.of(Silos.of(self.f), self.p.curve).batches()
        samples = self.steps[0].sessions["train"].prefixes()
        return {0: math.ceil(len(samples.end) / self.f.local.batch_size)}

    @cached_property
    def memory(self) -> list[Tables]:
        """What clients remember in each step that was begun."""
        memory: list[Tables] = []
        for step in () if self.in_domains else self.steps[:self.begun]:
            known = shown(step.to(self.f.device), self.f.server.fold_in)
            memory.append(self.f.backbone.remember(known, memory[-1] if memory else {}))
        return memory


def shapes_of(backbone: Backbone, users: int, items: int, more: Tables | None = None
              ) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every parameter of a backbone, by kind and name; ``more``: private ones of one client besides."""
    public, private = backbone.new_rows(0, range(1), range(1))
    personal, dense = backbone.new_personal(0, range(1)), backbone.new_dense(0)
    of_items = {name: (items, *rows.shape[1:]) for name, rows in public.items()}
    of_each = {name: (users, *shape) for name, shape in of_items.items()}
    return {"public": of_items,
            "private": {**{name: (users, *rows.shape[1:]) for name, rows in {**private, **(more or {})}.items()},
                        **{name: (users, items, *rows.shape[1:]) for name, rows in personal.items()}},
            "dense": {name: tuple(values.shape) for name, values in dense.items()},
            "local": of_each if backbone.keeps_local_tables else {},
            "served": of_each if backbone.serves_tables else {}}


def _is_step(step: int, field: str, run: _Run) -> None:
    last = len(run.steps)
    if step not in ((0, last) if run.in_domains else range(last + 1)):
        raise Wrong(field, step, f"0, or {last} once all domains have ended" if run.in_domains else
                    f"at most {last}, the number of blocks")


def _is_round(round_: int, field: str, run: _Run) -> None:
    step, count = run.p.step, len(run.steps)
    if step == count and round_:
        raise Wrong(field, round_, "0 once all is trained")
    if step == 0 and not round_ and not run.in_epochs:
        raise Wrong(field, round_, "at least 1 in block 0, of which nothing is saved before")


def _is_curve(curve: tuple[dict[str, Any], ...], field: str, run: _Run) -> None:
    """The rounds of the steps so far; each is validated when it is due, and no step goes on after its last one."""
    p, count = run.p, len(run.steps)
    for i, row in enumerate(curve):
        for name, high in (("step", count), (STAGE, len(run.stages))):
            if row.get(name, 0) >= high:
                raise Wrong(f"{field}[{i}].{name}", row[name], f"a number below {high}")
    for i, (row, (stage, number_, _)) in enumerate(zip(curve, run.positions)):
        _is_row(row, f"{field}[{i}]", run, is_due(run.stages[stage][0], number_))
    order = run.positions if run.in_domains else [(t, number_) for _, number_, t in run.positions]
    seen: Counter = Counter()
    for row in curve:
        order = order if row["round"] == seen[row["step"]] else []
        seen[row["step"]] += 1
    if len(order) != len(curve) or order != sorted(order):
        raise Wrong(field, curve, "rounds that follow one another")
    if not (_are_rounds_of_domains(run) if run.in_domains else all(
            (seen[t] > 0) if t < p.step else seen[t] == (p.round if t == p.step else 0) for t in range(count))):
        raise Wrong(field, curve, f"{p.round} rounds of {run.f.stream.name_of(min(p.step, count - 1))}, and at least 1 "
                                  f"of each that has ended")
    if any(any(rounds[:-1]) for of_stage in run.over for rounds in of_stage.values()):
        raise Wrong(field, curve, "no round after one with which training ends")


def _are_rounds_of_domains(run: _Run) -> bool:
    """Whether all domains have trained in each stage, the next one after all have ended it, and as often as is said."""
    done = 0
    for number_, ((_, together), of_stage) in enumerate(zip(run.stages, run.rows)):
        rounds = [len(rows) for rows in of_stage.values()]
        if not any(rounds):
            return not any(map(any, (rows.values() for rows in run.rows[number_:]))) and done == run.p.round
        before = number_ == 0 or len(run.ended_in(number_ - 1)) == len(run.steps)
        if not (before and all(rounds) and (not together or len(set(rounds)) == 1)):
            return False
        done += max(rounds)
    return bool(run.p.step) or done == run.p.round


def _is_row(row: Mapping[str, Any], field: str, run: _Run, due: bool) -> None:
    f, step = run.f, run.steps[row["step"]]
    given = run.given(step.index)
    if math.isnan(row["valid"]) == (given or due):
        raise Wrong(f"{field}.valid", row["valid"], "a validation in every round in which it is due, and no other")
    if is_share(f.evaluation.valid_metric) and not (math.isnan(row["valid"]) or 0.0 <= row["valid"] <= 1.0):
        raise Wrong(f"{field}.valid", row["valid"], "a share from 0 to 1")
    logs = {"dropped": f.server.attendance.dropout > 0.0, "bytes_down_new": f.server.fold_in > 0}
    for name, logged in logs.items():
        if (name in row) != (logged and not given and not run.in_epochs):
            raise Wrong(f"{field}.{name}", row.get(name), "it in runs that log it, and no other")
    if (STAGE in row) != (len(run.stages) > 1):
        raise Wrong(f"{field}.{STAGE}", row.get(STAGE), "it in runs of several stages, and no other")
    for name in {"participants", "dropped"}.intersection(row):
        whole(0, 1 if run.in_epochs else step.n_users)(row[name], f"{field}.{name}")


def _is_trained(trained: bool, field: str, run: _Run) -> None:
    """Whether the step's rounds are over, as the curve has it; so are those of every step before."""
    count, step, ended = len(run.steps), run.p.step, run.ended
    if run.in_domains:
        fits = (len(ended) == count) == (trained or step == count) and not (trained and step)
        for number_, of_stage in enumerate(run.rows):  # who has not ended a stage has not sat out a round of it
            most = max(map(len, of_stage.values()))
            fits &= all(len(rows) == most for t, rows in of_stage.items() if t not in run.ended_in(number_))
    else:
        fits = ended == list(range(step + trained))
    if not fits:
        raise Wrong(field, trained, f"what the curve has, in which {len(ended)} of {count} steps have ended")


def _is_best_value(value: float, field: str, run: _Run) -> None:
    if value != run.standing.best_value:
        raise Wrong(field, value, f"{run.standing.best_value}, as the curve has")


def _is_stale(stale: int, field: str, run: _Run) -> None:
    if stale != run.standing.stale:
        raise Wrong(field, stale, f"{run.standing.stale}, as the curve has")


def _is_model(model: Snapshot, field: str, run: _Run) -> None:
    _is_snapshot(model, field, run, run.begun - 1)


def _is_previous(model: Snapshot, field: str, run: _Run) -> None:
    _is_snapshot(model, field, run, -1 if run.in_epochs else run.begun - 2)


def _is_best(best: Best, field: str, run: _Run) -> None:
    _is_snapshot(best.model, f"{field}.model", run, run.begun - 1)
    expected = 0 if run.in_domains else run.best_round
    if best.round != expected:
        raise Wrong(f"{field}.round", best.round, f"{expected}, as the curve has")
    _is_client_state(best.client_state, f"{field}.client_state", run)
    if run.in_epochs or run.before_method:
        _is_named(best.server_state, f"{field}.server_state", ())


def _is_snapshot(model: Snapshot, field: str, run: _Run, t: int) -> None:
    """Every table has the rows of a step's users and items, the widths and names of backbone and method, and the run's
    precision; before the first step there is none."""
    if t < 0:
        for kind in fields(Snapshot):
            _is_named(getattr(model, kind.name), f"{field}.{kind.name}", ())
        return
    tables = run.tables(t)
    for kind, of_kind in tables.items():
        _are_tables(getattr(model, kind), f"{field}.{kind}", of_kind)
    memory = run.memory[t] if run.memory else {}
    _are_tables(model.memory, f"{field}.memory", {
        name: (tuple(table.shape), table.dtype) for name, table in memory.items()})
    for name, table in memory.items():
        if not torch.equal(model.memory[name], table):
            raise Wrong(f"{field}.memory.{name}", "other numbers", "what clients remember of their data")
    starts = {name: (shape[1:], dtype) for name, (shape, dtype) in tables["private"].items() if name in model.start}
    _are_tables(model.start, f"{field}.start", starts if run.f.server.base_model else {})


def _is_named(tables: Mapping[str, Tensor], field: str, names: Any) -> None:
    for name in [*tables, *names]:
        if (name in tables) != (name in names):
            raise Wrong(f"{field}.{name}", "no table" if name in names else "a table",
                        "one of each of the run's" if name in names else "only those of the run")


def _are_tables(tables: Tables, field: str, expected: _Expected) -> None:
    """Raise Wrong unless there are tables of these names, shapes and types, and all their numbers are finite."""
    _is_named(tables, field, expected)
    for name, (shape, dtype) in expected.items():
        table = tables[name]
        if tuple(table.shape) != tuple(shape) or table.dtype != dtype:
            raise Wrong(f"{field}.{name}", f"{table.dtype} of shape {tuple(table.shape)}", f"{dtype} of shape "
                        f"{tuple(shape)}")
        if table.is_floating_point() and table.numel() and not bool(
                torch.isfinite(torch.stack(torch.aminmax(table))).all()):  # nan if one is nan
            raise Wrong(f"{field}.{name}", "nan or an infinity", "finite numbers")


def _is_client_state(state: Tables, field: str, run: _Run) -> None:
    """A row per user at most, and nothing before the method acts."""
    if run.in_epochs or run.before_method:
        _is_named(state, field, ())
        return
    users = run.steps[run.begun - 1].n_users
    for name, values in state.items():
        if not values.ndim or len(values) > users:
            raise Wrong(f"{field}.{name}", f"shape {tuple(values.shape)}", f"at most {users} rows")


def _is_server_state(state: Tables, field: str, run: _Run) -> None:
    """The method's own; of clients that train in epochs, what the optimiser remembers of each parameter."""
    if run.in_epochs:
        return _is_optimiser(state, field, run, bool(run.p.curve))
    if run.before_method:
        _is_named(state, field, ())


def _is_optimiser(state: Tables, field: str, run: _Run, begun: bool) -> None:
    known, copies = {}, (len(run.steps),) if run.in_domains else ()
    parameters = {**run.p.model.public, **run.p.model.dense}
    for name in parameters if run.f.local.optimiser == "adam" and begun else ():
        if any(state_of.partition(" of ")[2] == name for state_of in state):  # not of one that no loss depends on
            known |= {f"step of {name}": (copies, torch.float32), **{
                f"{part} of {name}": (tuple(parameters[name].shape), parameters[name].dtype)
                for part in ("exp_avg", "exp_avg_sq")}}
    _are_tables(state, field, known)


def _are_tests(tests: tuple[tuple[int, int, UserScores], ...], field: str, run: _Run) -> None:
    """Those of the steps that have ended, each with a value per user of each of the run's metrics."""
    expected, metrics = run.tests(), run.metrics_of_test()
    if [(t, s) for t, s, _ in tests] != expected:
        raise Wrong(field, tests, f"the {len(expected)} tests of {len(run.ended)} steps that have ended")
    users = {s: run.users_of_test(run.steps[s]) for s in {s for _, s in expected}}
    for i, (_, s, scores) in enumerate(tests):
        _are_ids(scores.users, f"{field}[{i}].users", users[s])
        if wrong := set(metrics) ^ set(scores.values):
            raise Wrong(f"{field}[{i}]", ", ".join(sorted(scores.values)), f"the run's metrics, and so not without or "
                                                                          f"not with {', '.join(sorted(wrong))}")
        for name, values in scores.values.items():
            _are_values(values, f"{field}[{i}].{name}", len(users[s]), 1.0 if is_share(name) else None)


def _is_analysis(analysis: tuple[tuple[int, str, Tensor, Tensor], ...], field: str, run: _Run) -> None:
    """What is known of the steps so far, of all users or items that it is known of."""
    expected = list(run.analysis())
    if [(t, kind) for t, kind, *_ in analysis] != [(t, kind) for t, kind, _ in expected]:
        raise Wrong(field, analysis, f"the {len(expected)} kinds that are known of {run.begun} blocks, in their order")
    for i, ((_, kind, ids, values), (_, _, known)) in enumerate(zip(analysis, expected)):
        having = torch.isin(known, ids.to(known)) if beyond.is_recall(kind) else slice(None)
        _are_ids(ids, f"{field}[{i}].ids", known[having])
        if kind in (beyond.RECOMMENDED, *beyond.PER_USER):
            _are_values(values, f"{field}[{i}].values", len(ids), 1.0 if beyond.is_recall(kind) else None)
        else:  # nan where there is nobody to compare
            _are_tables({kind: values.nan_to_num()}, f"{field}[{i}]", {kind: (tuple(ids.shape), torch.float64)})


def _are_ids(ids: Tensor, field: str, expected: Tensor) -> None:
    if ids.dtype != torch.int64 or not torch.equal(ids, expected.to(ids.device)):
        raise Wrong(field, f"{ids.dtype} of shape {tuple(ids.shape)}", f"the {len(expected)} ids of the data")


def _are_values(values: Tensor, field: str, count: int, most: float | None) -> None:
    """A finite number per id; of shares, from 0 to 1."""
    _are_tables({"values": values}, field, {"values": ((count,), torch.float64)})
    if most is not None and count and not (float(values.min()) >= 0.0 and float(values.max()) <= most + _ROUNDING):
        raise Wrong(field, f"{float(values.min()):g} to {float(values.max()):g}", f"0 to {most:g}")


def _are_ways(ways: tuple[str, ...], field: str, run: _Run) -> None:
    """One per step, of those that its stream and settings can have."""
    if len(ways) != run.begun:
        raise Wrong(field, ways, f"{run.begun}, one per step so far")
    implied = _BY_NOBODY, _CENTRAL, _DOMAINS
    for i, way in enumerate(ways):
        cases = run.given(i), run.f.central, run.in_domains
        known = {implied[cases.index(True)]} if any(cases) else set(MEANING).difference(implied)
        if way not in known:
            raise Wrong(f"{field}[{i}]", way, " or ".join(sorted(known)))


def _is_within(within: Callable[[], Within] | None, field: str, run: _Run) -> None:
    """Of clients that train in epochs, how far a next round is: one model after the other."""
    if within is None:
        return
    if not run.in_epochs or run.p.trained or run.p.step:
        raise Wrong(field, "a round under way", "none where no epoch follows")
    of_round = within()
    _is_snapshot(of_round.model, f"{field}.model", run, run.begun - 1)
    _is_optimiser(of_round.server_state, f"{field}.server_state", run, True)
    counts = run.batches()
    if [number_ for number_, *_ in of_round.epochs] != list(counts):
        raise Wrong(f"{field}.epochs", of_round.epochs, f"one of each of {', '.join(map(str, counts))}")
    left = False
    for i, (number_, batches, loss, seconds) in enumerate(of_round.epochs):
        if batches > (0 if left else counts[number_]) or not batches and (loss or seconds):
            raise Wrong(f"{field}.epochs[{i}]", of_round.epochs[i],
                        f"at most {counts[number_]} batches, and none after an epoch that has some left")
        left = batches < counts[number_]


# Of every field of ``Progress`` that is saved: what its value is, and then what it is in a run. Each check may believe
# the fields before.
FIELDS: dict[str, tuple[Check, Callable[[Any, str, _Run], None]]] = {
    "step": (_COUNT, _is_step),
    "round": (_COUNT, _is_round),
    "curve": (lists(_row), _is_curve),
    "trained": (flag, _is_trained),
    "best_value": (number, _is_best_value),
    "stale": (_COUNT, _is_stale),
    "model": (snapshot, _is_model),
    "best": (_BEST, _is_best),
    "previous": (snapshot, _is_previous),
    "client_state": (_TENSORS, _is_client_state),
    "server_state": (_TENSORS, _is_server_state),
    "tests": (lists(_TESTS), _are_tests),
    "analysis": (lists(_ANALYSIS), _is_analysis),
    "ways": (lists(text), _are_ways),
    "within": (or_none(_WITHIN), _is_within),
}
saved = fields_of({"progress": fields_of({name: check for name, (check, _) in FIELDS.items()}, {}),
                   "elapsed": _SECONDS}, {})


def check(progress: Progress, federation: Federation) -> None:
    """Raise Wrong unless a run of these parts could have come to this progress."""
    run = _Run(federation, progress)
    for name, (_, in_run) in FIELDS.items():
        in_run(getattr(progress, name), name, run)
