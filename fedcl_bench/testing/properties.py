"""What every plugin must do: run, be exact, be resumable, declare its parameters and settings.

A property is a function of a ``Pair`` (or of a plugin alone) that returns its evidence, or raises ``Violated`` with it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import sys
import tempfile
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator
from unittest import mock

import torch
from torch import Tensor

from ..data.settings import ItemFeatureSettings
from ..plugin import checks
from ..training.session_trainer import input_rows, window
from ..plugin.silo import DomainMethod, TextSettings
from ..core.errors import RunFailed, UserError
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..federation.server import aggregate_updates
from ..plugin.backbone import ITEM, Backbone
from ..plugin.method import HOOKS, Method
from ..plugin.state import Snapshot, score_users
from ..rng import Tables
from ..recbole.models import seeded_generators
from ..recbole.parameters import PADDING
from ..runs.checkpoints import load_progress, save_progress
from ..runs.registry import Plugin
from ..plugin.sequential import Dropout, Sequence, SequentialBackbone, SessionVectors
from ..core.settings import checked, inactive
from ..core.tuning import SIZES
from ..stats.clip_noise import OPEN
from .report import Inapplicable, Violated
from .trials import (Pair, all_tables, client_round, difference, finished, is_sequential, open_round, require_numbers,
                     runs_differ, tables_differ, trained_round)

# Of a plugin alone.


def declared_parameters(plugin: Plugin) -> str:
    """Public and private parameters are declared completely: names, shapes, rates, order of updates; and a row's start
    depends on the seed and its own id only."""
    backbone = plugin.cls(plugin.cls.Settings())
    checks.check_declaration(backbone)
    with random_state(1):
        whole = backbone.new_rows(3, range(0, 6), range(0, 9))
    with random_state(2):
        parts = [backbone.new_rows(3, range(0, 4), range(0, 5)), backbone.new_rows(3, range(4, 6), range(5, 9))]
    sequential = is_sequential(plugin.cls)  # Glorot's start depends on the size of the table
    for k, kind in enumerate(("public", "private")):
        for name, table in whole[k].items():
            grown = torch.cat([part[k][name] for part in parts])
            if not torch.equal(grown, table) and not sequential:
                raise Violated(f"new_rows: {kind} '{name}' starts otherwise when it grows in two steps than in one; a "
                               f"row's values may depend on the seed and its own id only")
    with random_state(1):
        dense = backbone.new_dense(3)
    with random_state(2):
        mismatch = tables_differ(dense, backbone.new_dense(3), 0.0)
    if mismatch:
        raise Violated(f"new_dense: {mismatch} from call to call; draw from fedcl_bench.rng with the seed")
    public, private = (", ".join(tables) for tables in whole)
    private = ", ".join([*filter(None, [private]), *backbone.new_personal(0, range(0))])
    return f"public {public}{', ' + ', '.join(dense) if dense else ''}; private {private or 'none'}"


def finite_losses(plugin: Plugin) -> str:
    """The recommendation loss and its gradient are finite for logits up to 10,000."""
    if is_sequential(plugin.cls):
        raise Inapplicable("sessions have the engine's loss")
    backbone = plugin.cls(plugin.cls.Settings())
    scores = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]], requires_grad=True)
    weights = torch.full((1, 5), 0.2)
    if backbone.pairwise:
        hook, loss = "pair_loss", backbone.pair_loss(scores, scores.flip(1).detach(), weights)
    else:
        hook, loss = "loss", backbone.loss(scores, torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]]), weights)
    gradient, = torch.autograd.grad(loss.sum(), scores)
    if not (torch.isfinite(loss).all() and torch.isfinite(gradient).all()):
        raise Violated(f"{hook}: loss {loss.tolist()}, gradient {gradient.tolist()} for logits from -10,000 to 10,000; "
                       f"use softplus or logsigmoid instead of a logarithm of a sigmoid")
    return f"{hook} is finite for logits from -10,000 to 10,000"


def names_of_hooks(plugin: Plugin) -> str:
    """No method or attribute that it has for itself and does not read has nearly the name of one that the suite reads.
    """
    own = [cls for cls in plugin.cls.__mro__ if cls.__module__.partition(".")[0] != "fedcl_bench" and cls is not object]
    base = next(cls for cls in plugin.cls.__mro__ if cls not in own)
    read = {node.attr for path in {inspect.getfile(cls) for cls in own}
            for node in ast.walk(ast.parse(Path(path).read_bytes())) if isinstance(node, ast.Attribute)}
    known = {name for cls in base.__mro__ for name in (*vars(cls), *vars(cls).get("__annotations__", ()))
             if not name.startswith("_")}
    defined = dict.fromkeys(name for cls in own for name in vars(cls) if not name.startswith("_"))
    unread = [name for name in defined if name not in known | read]
    for name in unread:
        if near := difflib.get_close_matches(name, sorted(known - defined.keys()), 1, cutoff=0.8):
            raise Violated(f"nothing reads '{name}'; did you mean '{near[0]}'?")
    of_users = [name for name in HOOKS + ("uploads",) if name in defined and name not in vars(DomainMethod)]
    if issubclass(plugin.cls, DomainMethod) and of_users:
        raise Violated(f"'{of_users[0]}' is a hook of clients of one user each, which nothing calls with domains")
    return f"{len(defined)} names" + (f"; nothing reads {', '.join(unread)}" if unread else "")


def valid_settings(plugin: Plugin) -> str:
    """Every setting has a help text, its default and searched values are within its range, others are refused."""
    fields = dataclasses.fields(plugin.cls.Settings)
    refused = 0
    for field in fields:
        meta = field.metadata
        if "help" not in meta or not str(meta["help"]).strip():
            raise Violated(f"setting '{field.name}' is not declared with setting(default, help)")
        for value in (field.default, *(meta["search"] or ()), *(meta["choices"] or ())):
            try:
                checked(plugin.cls.Settings, field.name, value, "its declaration")
            except UserError as error:
                raise Violated(str(error)) from None
        for value in _outside(meta):
            try:
                checked(plugin.cls.Settings, field.name, value, "check")
            except UserError:
                refused += 1
            else:
                raise Violated(f"setting '{field.name}' accepts {value!r}")
    if not plugin.cls.Settings.__dataclass_params__.frozen:
        raise Violated("Settings is not @dataclass(frozen=True): a run could change what its record says")
    return f"{len(fields)} setting{'s' * (len(fields) != 1)}, {refused} values out of range refused"


def _outside(meta) -> Iterator[Any]:
    if meta["choices"]:
        yield "no such choice"
    for bound, step in (("low", -1), ("high", 1), ("above", 0), ("below", 0)):
        if meta[bound] is not None:
            yield meta[bound] + step


def settings_read(plugin: Plugin, pairs: list[Pair]) -> str:
    """Every setting is read: with its defaults, each named choice, and every number changed. Those that no run has
    active, as its partner refuses the choices that they belong to, are named as not tried."""
    of_items = {field.name for field in dataclasses.fields(ItemFeatureSettings)}  # read where data is loaded
    names = [field.name for field in dataclasses.fields(plugin.cls.Settings)
             if field.name not in of_items or not issubclass(plugin.cls.Settings, (TextSettings, ItemFeatureSettings))]
    if not names:
        raise Inapplicable("no settings")
    seen: set[str] = set()
    active: set[str] = set()
    tried = 0
    for pair in pairs:
        for values in _variations(plugin.cls.Settings):
            if seen >= set(names):
                break
            try:
                parts = pair.parts(**values)
                recording = _recording(getattr(parts, plugin.kind), seen)
                f = pair.federation(parts=parts._replace(**{plugin.kind: recording}))
                finished(f)
                list(f.method.privacy()), list(f.method.notes(5)), list(f.backbone.notes())
                active.update(set(names) - set(inactive(parts)))
                tried += 1
            except (UserError, RunFailed, Inapplicable):  # a choice that this pair refuses, or that diverges
                continue
    unread = [name for name in names if name not in seen]
    if wrong := [name for name in unread if name in active]:
        raise Violated(f"never read in {tried} runs: {', '.join(wrong)}; a user who sets it changes nothing")
    return f"{len(names) - len(unread)} of {len(names)} read" + (
        f"; active in no run, so not tried: {', '.join(unread)}" if unread else "")


def _variations(cls: type) -> Iterator[dict[str, Any]]:
    """Settings that differ from the defaults: none, all numbers, and on both each choice."""
    hints = typing.get_type_hints(cls)
    numbers: dict[str, Any] = {}
    choices: list[dict[str, Any]] = []
    for field in dataclasses.fields(cls):
        meta, kind = field.metadata, hints[field.name]
        if meta["choices"]:
            choices += [{field.name: value} for value in meta["choices"] if value != field.default]
        elif kind is bool:
            choices.append({field.name: not field.default})
        elif kind in (int, float) and not field.name.startswith("lr"):
            value = field.default * 0.5 if kind is float and field.default else field.default + 1
            try:
                numbers[field.name] = checked(cls, field.name, value, "check")
            except UserError:
                continue
    yield {}
    yield numbers
    for choice in choices:
        yield choice
        yield {**numbers, **choice}


def _recording(settings: Any, seen: set[str]) -> Any:
    """The same settings, which note the names that are read; copying them all with ``replace`` does not count."""
    names = {field.name for field in dataclasses.fields(settings)}

    def read(self, name):
        reader = sys._getframe(1)
        if name in names and (reader.f_globals.get("__name__"), reader.f_code.co_name) not in (
                ("dataclasses", "replace"), ("dataclasses", "_replace")):
            seen.add(name)
        return object.__getattribute__(self, name)

    copy = object.__new__(type(type(settings).__name__, (type(settings),), {"__getattribute__": read}))
    for name in names:
        object.__setattr__(copy, name, object.__getattribute__(settings, name))
    return copy


# Of a pair.


def runs(pair: Pair) -> str:
    """It runs through all steps, with the users and items that are new in them."""
    last = pair.points[-1]
    steps = pair.stream.steps
    for tables, count in ((last.best.model.public, steps[-1].n_items), (last.best.model.private, steps[-1].n_users)):
        for name, table in tables.items():
            if len(table) != count:
                raise Violated(f"'{name}' ends with {len(table)} rows, expected {count}")
    expected = {(t, s) for t in range(len(steps)) for s in range(t + 1)}
    tested = {(t, s) for t, s, _ in last.tests}
    if tested != expected:
        raise Violated(f"tested {sorted(tested)}, expected {sorted(expected)}")
    require_numbers(pair)
    users, items = (" to ".join(map(str, dict.fromkeys(getattr(s, what) for s in steps)))
                    for what in ("n_users", "n_items"))
    return f"{len(steps)} steps, {users} users, {items} items, {len(last.curve)} rounds"


@mock.patch.object(SIZES, "dense_items", SIZES.dense_items_compiled)  # else nobody of so few items is padded
def one_by_one(pair: Pair) -> str:
    """Clients trained together, each alone, and in another order upload the same."""
    for start in _starts(pair):
        batched = client_round(pair.federation(), start)
        for how, split in (("alone", lambda users: users.split(1)),
                           ("in groups of 3, the last first", lambda users: reversed(users.split(3)))):
            apart = client_round(pair.federation(), start, split)
            if mismatch := difference(batched, apart):
                raise Violated(f"step {start.step}, clients trained together and {how}: {mismatch}"
                               f"{_cause(batched, apart)}")
        if mismatch := _aggregated_otherwise(pair, start):
            raise Violated(f"step {start.step}, aggregate_updates of the same clients in other chunks and another "
                           f"order: {mismatch}; take what belongs to a client by its position")
    return f"{len(batched['user'])} clients together, alone, and in groups of 3 in reverse"


def _cause(batched: Tables, apart: Tables) -> str:
    """What the cause of a difference may be: whoever has the most samples has no padding, but is a client as others."""
    same = [int(user) for user in batched["user"] if not difference(batched, apart, user[None])]
    if not same:
        return "; is a mean or a sum taken over the first dimension, which is clients?"
    return (f", not so {len(same)} of {len(batched['user'])} clients, as client {same[0]}; does a loss count padded "
            f"slots, which clients with fewer samples than others beside them have? There ``weights`` are 0 and "
            f"``batch.mask`` is False, of sessions ``batch.sequence.real``")


def _aggregated_otherwise(pair: Pair, start: Progress) -> str | None:
    """What a server that looks at each client's update makes otherwise when they come in another order, in words."""
    def made(split: Callable[[Tensor], Iterable[Tensor]]) -> Tables:
        opened, progress, groups = open_round(pair.federation(), start, split)
        key, sent, sums = trained_round(opened, progress, groups)
        if sums.held is None:  # it does not act yet
            return {}
        return aggregate_updates(sums, progress.model, opened.method, OPEN, key, sent).sent

    if pair.method_cls.aggregate_updates is Method.aggregate_updates:
        return None
    return tables_differ(made(lambda users: [users]), made(lambda users: reversed(users.split(3))))


def _starts(pair: Pair) -> list[Progress]:
    """States at which a round begins: of the first step, a later step, and a later round of it."""
    later = [p for p in pair.points if p.step == len(pair.stream.steps) - 1 and not p.trained]
    return [Progress(), *[p for p in later if p.round in (0, 1)]] if len(pair.stream.steps) > 1 else [
        Progress(), next(p for p in pair.points if p.round == 1)]


@torch.no_grad()
def padding(pair: Pair) -> str:
    """With a sequential backbone: ids at padding and vectors outside the mask change no score, nor do other items, and
    a session as a whole scores as without padding."""
    if not is_sequential(pair.backbone_cls):
        raise Inapplicable("no sequences")
    backbone, model = pair.federation().backbone, pair.points[-1].best.model
    users, sequence = _first_sessions(pair)
    table, generator = model.public[ITEM], torch.Generator().manual_seed(0)

    def vectors(sequence: Sequence, users: Tensor = users) -> SessionVectors:
        return _vectors(backbone, model, users, sequence)

    def scores(session: SessionVectors, table: Tensor = table) -> Tensor:
        return backbone.session_scores(session.vectors, session.mask, table)

    session = vectors(sequence)
    expected, mask = scores(session), session.mask.unsqueeze(2)
    noise = torch.randn(session.vectors.shape, generator=generator, dtype=table.dtype)
    chosen = torch.randperm(len(table), generator=generator)[:7]
    ids = torch.randint(0, len(table), sequence.items.shape, generator=generator)
    other = replace(sequence, items=sequence.items.where(sequence.real, ids))
    _same(expected, scores(vectors(other)), "session_vectors", "other ids at padding")
    _same(expected, scores(replace(session, vectors=session.vectors.where(mask, noise))), "session_scores",
          "other vectors outside the mask")
    _same(expected[:, chosen], scores(session, table[chosen]), "session_scores", "fewer items")
    _same(expected, scores(session, table.expand(len(users), *table.shape)), "session_scores", "a table per client")
    for number, real in enumerate(() if backbone.positionwise and backbone.pads else sequence.real):
        own = slice(number, number + 1), slice(len(real) - int(real.sum()), None)
        short = Sequence(sequence.real[own], sequence.times[own], sequence.items[own])
        _same(expected[own[0]], scores(vectors(short, users[own[0]])), "session_vectors",
              "no padding" + ", which pads = False promises" * backbone.positionwise)
    return f"{len(users)} sessions of {int(sequence.real.sum(1).min())} to {sequence.real.shape[1]} positions"


@torch.no_grad()
def later_positions(pair: Pair) -> str:
    """With a representation at every position: other items behind it change none, as it is to predict the next one."""
    backbone = pair.federation().backbone
    if not isinstance(backbone, SequentialBackbone) or not backbone.positionwise:
        raise Inapplicable("no representation at every position")
    model, (users, sequence) = pair.points[-1].best.model, _first_sessions(pair)
    place, length = torch.arange(sequence.items.shape[1]), sequence.items.shape[1]
    expected = _vectors(backbone, model, users, sequence).vectors
    for last in range(length - 1):
        behind, before = sequence.real & (place > last), (sequence.real & (place <= last)).unsqueeze(2)
        other = replace(sequence, items=((sequence.items + 1) % len(model.public[ITEM])).where(behind, sequence.items))
        found = _vectors(backbone, model, users, other).vectors
        if mismatch := tables_differ({"what it makes": expected * before}, {"what it makes": found * before}):
            raise Violated(f"encode: {mismatch} up to position {last} with other items behind it: a position must see "
                           f"the items up to itself alone, as it is to predict the next one")
    return f"{len(users)} sessions of up to {length} positions, each of the items up to it"


def _first_sessions(pair: Pair) -> tuple[Tensor, Sequence]:
    """Ids of the users with a training session, and each one's first as a sequence."""
    sessions = pair.stream.steps[0].sessions["train"]
    users = (sessions.count > 0).nonzero().flatten()
    return users, window(sessions, sessions.of_user[users], pair.federation().backbone.settings.max_length)[1]


def _vectors(backbone: SequentialBackbone, model: Snapshot, users: Tensor, sequence: Sequence) -> SessionVectors:
    real = sequence.real  # whatever stands at padding
    rows = input_rows(backbone, model, users, replace(sequence, items=sequence.items.where(real, -1)))
    return backbone.session_vectors(model.clients(users), rows, sequence, Dropout())


def _same(expected: Tensor, scores: Tensor, hook: str, what: str) -> None:
    """Raise Violated unless scores are what they are expected to be."""
    if mismatch := tables_differ({"scores": expected}, {"scores": scores}):
        raise Violated(f"{hook}: {mismatch} with {what}; use sequence.real and the mask, and score an item by its row")


def threads(pair: Pair) -> str:
    """The same numbers on one thread and on three."""
    before = torch.get_num_threads()
    ends = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            ends.append(finished(pair.federation()))
    finally:
        torch.set_num_threads(before)
    if mismatch := runs_differ(*ends):
        raise Violated(f"one thread and three: {mismatch}; do hooks of different clients write to the same place?")
    return f"{similarity(*ends)} on 1 and 3 threads"


def similarity(a: Progress, b: Progress) -> str:
    """How alike two runs are that do not differ: libraries may round otherwise where memory is aligned otherwise."""
    return "the same to rounding" if runs_differ(a, b, tolerance=0.0) else "bit-identical"


def random_numbers(pair: Pair) -> str:
    """Nothing depends on the state of a global generator of random numbers."""
    with random_state(1):
        a = finished(pair.federation())
    with random_state(2):
        b = finished(pair.federation())
    if mismatch := runs_differ(a, b):
        raise Violated(f"two states of the global generators (torch, numpy, random): {mismatch}; draw from "
                       f"fedcl_bench.rng with the keys that hooks get")
    return f"{similarity(a, b)} under two states of torch's, numpy's and Python's generators"


@contextlib.contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seeds the global generators inside the block and puts them back after it."""
    with torch.random.fork_rng(devices=[]), seeded_generators(seed):
        torch.manual_seed(seed)
        yield


def resumes(pair: Pair) -> str:
    """Killed after any round or step, or in the middle of an epoch, and resumed from its checkpoint, it ends with the
    same numbers."""
    last, how, count = pair.points[-1], set(), 0
    left: list[tuple[Progress, Tables]] = []  # states, and their tables when they were yielded
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(_stops(pair)) as stops:
        file = Path(folder) / "checkpoint.pt"
        for point in stops:
            save_progress(file, point, 0.0)
            count += 1
            if not point.within:
                left.append((point, {name: table.clone() for name, table in _kept(point).items()}))
            f = pair.federation()
            restored, _ = load_progress(file, "cpu", f)
            try:
                end = finished(f, restored)
                mismatch = runs_differ(last, end)
                how.add(mismatch or similarity(last, end))
            except (KeyError, AttributeError) as error:
                mismatch = f"{type(error).__name__}: {error}"
            if mismatch:
                where = f"within round {point.round + 1}" if point.within else f"after round {point.round}"
                raise Violated(f"resumed {where} of step {point.step}: {mismatch}; "
                               f"{_hidden(f.method) or _hidden(f.backbone) or 'it depends on what is not saved'}")
    for point, tables in left:
        if mismatch := tables_differ(tables, _kept(point), 0.0):
            raise Violated(f"what the run had after round {point.round} of step {point.step} was written to later: "
                           f"{mismatch}; assign new tensors and change none in place, as the best round's are kept")
    return f"{max(how)} from each of {count} checkpoints"


def arriving_items(pair: Pair) -> str:
    """It runs with new items that arrive after a block's training, with the rows that the method makes of them if it
    does, and draws no random numbers for them."""
    rows = "popularity" if pair.method_cls.new_item_rows is Method.new_item_rows else "method"
    later = replace(pair, settings={**pair.settings, "cold_items": rows})
    try:
        later.federation()
    except UserError as reason:
        raise Inapplicable(str(reason)) from None
    return f"cold_items={rows}: {runs(later)}, {random_numbers(later)}"


def _kept(point: Progress) -> Tables:
    """All tables of a state, those of the best round's among them."""
    best = replace(point, model=point.best.model, client_state=point.best.client_state,
                   server_state=point.best.server_state)
    return {**all_tables(point), **{f"best {name}": table for name, table in all_tables(best).items()}}


def _stops(pair: Pair) -> Iterator[Progress]:
    """The states that a run is resumed from: after every round and step before the end, and within each round that has
    batches, of its first sign of life after the middle."""
    within = -1
    with mock.patch.object(SIZES, "report_every", 0.0):
        for point in run(pair.federation()):
            if point.within and (within == point.round or point.fraction_done < 0.5):
                continue
            within = point.round if point.within else -1
            if point.step < len(pair.stream.steps):
                yield point


def _hidden(plugin) -> str:
    """What an object keeps besides its settings and declared state, in words."""
    cls = type(plugin)
    fresh = set(vars(cls(plugin.settings)))
    kept = [name for name in vars(plugin) if name not in fresh]
    return f"self.{kept[0]} is no part of client_state or server_state" if kept else ""


def neutral_server(pair: Pair) -> str:
    """A server's optimiser and an aggregator of single updates that come to the mean change nothing."""
    neutral = {"server_optimiser": "momentum", "server_momentum": 0.0, "server_optimiser_lr": 1.0,
               "aggregator": "norm_bound", "norm_bound": 1e9}
    try:
        f = pair.federation(parts=pair.parts(**neutral))
    except UserError as refused:
        raise Inapplicable(str(refused).partition("\n")[0]) from None
    mean = pair.points[-1]
    if pair.federation().server.optimiser is not None:  # by the backbone's own defaults
        mean = finished(pair.federation(parts=pair.parts(server_optimiser="none")))
    if mismatch := runs_differ(mean, finished(f)):
        raise Violated(f"with server_optimiser and aggregator that come to the mean, {mismatch}")
    return "server_optimiser and aggregator that come to the mean change nothing"


def fast_forms(pair: Pair) -> str:
    """What a backbone does by hand or faster (``score_all``, ``sgd_step``, ``factors``) is what ``score`` says."""
    f = pair.federation()
    cls = type(f.backbone)
    plain: dict[str, Any] = {hook: getattr(Backbone, hook) for hook in ("score_all", "sgd_step")
                             if f.backbone.overrides(hook)}
    if f.backbone.overrides("score") and (f.backbone.overrides("factors") or cls.factor_names):
        plain |= {"factors": Backbone.factors, "factor_names": None}
    if not plain or is_sequential(cls):
        raise Inapplicable("no faster forms of score")
    f.backbone.__class__ = type(cls.__name__, (cls,), plain)
    if mismatch := runs_differ(pair.points[-1], finished(f)):
        raise Violated(f"without {', '.join(plain)}, by score alone, {mismatch}; both must say the same")
    return f"{', '.join(plain)} and score say the same"


def every_parameter_trained(pair: Pair) -> str:
    """Training moves every declared parameter, or at least scores depend on it; all changes are finite. Of the method's
    terms of the loss one at least depends on a parameter."""
    changed: dict[str, bool] = {}
    terms: list[bool] = []
    for start in _starts(pair):
        for name, change in client_round(_listened(pair.federation(), terms), start).items():
            if name.startswith(("upload ", "private ")) and change.numel():
                if change.is_floating_point() and not torch.isfinite(change).all():
                    raise Violated(f"{name} is not finite in step {start.step}")
                changed[name] = changed.get(name, False) or bool((change != 0).any())
    if terms and not any(terms):
        raise Violated("local_loss returns terms that are cut off from all parameters (detach, no_grad, .data or "
                       "numpy?), so that they train nothing")
    still = [name.split(" ", 1)[1] for name, moved in changed.items() if not moved and not name.endswith(PADDING)]
    if unused := [name for name in still if not _scores_depend_on(pair, name)]:
        raise Violated(f"no training changes {', '.join(unused)}, and no score depends on it")
    return (f"{len(changed) - len(still)} parameters and uploads move, all finite"
            + (f"; {', '.join(still)} cancels out in the loss" if still else ""))


def _listened(f: Federation, terms: list[bool]) -> Federation:
    """A federation that lists of each of its method's terms of the loss whether it depends on a parameter."""
    method = f.acting_in(f.stream.steps[-1])
    term_of = method.local_loss

    def local_loss(batch: Any) -> Any:
        term = term_of(batch)
        if isinstance(term, Tensor):
            terms.append(term.requires_grad)
        return term
    setattr(method, local_loss.__name__, local_loss)
    return f


def _scores_depend_on(pair: Pair, name: str) -> bool:
    """Whether other values of a parameter give other scores; for what is neither item table nor private, say yes."""
    model = pair.points[-1].model
    for kind in ("public", "private", "dense"):
        tables = getattr(model, kind)
        if name in tables:
            other = replace(model, **{kind: {**tables, name: tables[name] + torch.randn(
                tables[name].shape, generator=torch.Generator().manual_seed(0), dtype=tables[name].dtype)}})
            return not torch.equal(_some_scores(pair, model), _some_scores(pair, other))
    return True


@torch.no_grad()
def _some_scores(pair: Pair, model: Snapshot) -> Tensor:
    """Scores of all items for some users, without the method."""
    backbone = pair.federation().backbone
    if not is_sequential(pair.backbone_cls):
        users = torch.arange(min(3, model.n_users)) if model.private else torch.arange(1)
        return score_users(backbone, model, users)
    session = _vectors(backbone, model, *_first_sessions(pair))
    return backbone.session_scores(session.vectors, session.mask, model.public[ITEM])


OF_PAIRS: list[tuple[str, Callable[[Pair], str]]] = [
    ("runs", runs),
    ("trains every parameter", every_parameter_trained),
    ("batched = one by one", one_by_one),
    ("padding does not matter", padding),
    ("no later position is seen", later_positions),
    ("threads", threads),
    ("random numbers", random_numbers),
    ("resumes", resumes),
    ("items that arrive later", arriving_items),
    ("neutral server", neutral_server),
    ("fast forms", fast_forms),
]


# Of a pair whose settings name an attack.


def nobody_malicious(pair: Pair) -> str:
    """With malicious=0, every number is that of a run without the attack."""
    honest = finished(replace(pair, settings={}).federation())
    if mismatch := runs_differ(honest, finished(pair.federation(parts=pair.parts(malicious=0.0))), tolerance=0.0):
        raise Violated(f"with malicious=0 and without an attack: {mismatch}")
    return "bit-identical with malicious=0 and without it"


def has_an_effect(pair: Pair) -> str:
    """Malicious clients change the model, and in the blocks after attack_blocks they are gone."""
    attacked = all_tables(pair.points[-1])
    effect = tables_differ(all_tables(finished(replace(pair, settings={}).federation())), attacked)
    if not effect:
        raise Violated("a run with malicious clients is the same as without")
    if not tables_differ(all_tables(finished(pair.federation(parts=pair.parts(attack_blocks=1)))), attacked):
        raise Violated("attack_blocks=1 changes nothing in later blocks")
    return f"{effect}; attack_blocks has an effect"


OF_ATTACKS = [("no malicious client, no change", nobody_malicious),
              ("malicious clients change the model", has_an_effect)]
