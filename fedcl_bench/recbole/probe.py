"""Finding out by trying: what a RecBole model reads, whether it may be used, and whether vmap takes it.

A model is called on made-up clients, one by one and all at once, and everything that must hold is looked at: the fields
it reads, state that it keeps outside its parameters, global generators that it moves, and that both ways give the same
losses, gradients and scores.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import replace
from typing import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..draws import Tables
from .calls import Caller, Facts, padded_sequences, training_fields
from .models import INVERSE, ITEM, LABEL, LENGTH, NEGATIVE, SEQUENCE, USER, Refused
from .parameters import Parameter

ITEMS, CLIENTS, POSITIVES, PER_POSITIVE = 23, 3, 4, 2
_KNOWN = (USER, ITEM, LABEL, NEGATIVE, SEQUENCE, LENGTH, INVERSE)


class _Watching(Caller):
    """Notes what a model reads of its batches."""

    def batch(self, fields: Tables):
        from recbole.data.interaction import Interaction

        self.read: set[str] = set()

        class Watched(Interaction):
            def __getitem__(batch, index):
                if isinstance(index, str) or index is None:
                    self.read.add(index)
                    if index not in fields:
                        raise Refused(f"reads '{index}' of a batch, which is not among {', '.join(_KNOWN)}")
                return super().__getitem__(index)

        return Watched(fields)


class _Keeping(Caller):
    """Keeps what a model returns."""

    raw: list[Tensor]

    def call(self, *arguments):
        result, mode = super().call(*arguments)
        self.raw = [*getattr(self, "raw", []), result]
        return result, mode


def probe(build: Callable[..., nn.Module], parameters: Sequence[Parameter], width: int) -> Facts:
    """Try a model.

    Args:
        build: the model of one user for a number of items, of negatives per positive, a device, and a history.
        parameters: its parameters.
        width: of sequences.

    Raises:
        Refused: if it cannot be used, saying why.
    """
    trial = _Trial(build, parameters, width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of RecBole's code
        return _tried(trial)


def _tried(trial: "_Trial") -> Facts:
    facts = _look_at_loss(trial, Facts("", history=_history_attributes(trial.build)))
    alone = _blocked(lambda alone: trial.losses(replace(facts, loss_alone=alone)), "its loss")
    facts = _look_at_scores(trial, replace(facts, loss_alone=alone))
    return replace(facts, **_elements(trial, _Trial(trial.build, trial.parameters, trial.width, 2 * ITEMS), facts))


class _Trial:
    """Made-up clients of a model: parameters, items and random numbers."""

    def __init__(self, build: Callable[..., nn.Module], parameters: Sequence[Parameter], width: int,
                 items: int = ITEMS):
        generator = torch.Generator().manual_seed(0)
        self.items = items
        self.build, self.parameters, self.width = build, parameters, width
        shapes = {}
        for p in parameters:
            shapes[p.name] = (items, *p.row) if p.follows == "items" else p.row
            if p.follows == "items":
                shapes |= {p.padding: p.row, p.rest: (p.behind, *p.row)}
        self.tables = {name: 0.1 * torch.randn(CLIENTS, *shape, generator=generator, dtype=torch.float64)
                       for name, shape in shapes.items()}
        order = torch.stack([torch.randperm(items, generator=generator) for _ in range(CLIENTS)])
        self.positives = order[:, :POSITIVES]
        self.negatives = order[:, POSITIVES:POSITIVES + POSITIVES * PER_POSITIVE]
        self.keys = torch.arange(CLIENTS)

    def caller(self, facts: Facts, kind: type[Caller] = Caller) -> Caller:
        return kind(lambda *size: self.build(*size, None), self.parameters, facts, self.width)

    def history(self, facts: Facts) -> Tensor | None:
        """Of every client; padded for sequences, as they are."""
        if facts.sequential:
            empty = torch.zeros(CLIENTS, max(0, self.width - POSITIVES), dtype=torch.int64)
            return torch.cat([self.positives + 1, empty], 1)[:, :self.width]
        return self.positives + 1 if facts.history else None

    def fields(self, facts: Facts, chosen: Tensor) -> Tables:
        return training_fields(facts.samples, facts.reversed, self.positives, self.negatives, chosen, self.width,
                               torch.float64)

    def losses(self, facts: Facts) -> list[Tensor]:
        """Every client's loss on two batches, and the gradients of all parameters."""
        values = []
        for chosen in ([[0]] if facts.samples == "user" else [[1, 0, 2], [0]]):
            tables = {name: value.clone().requires_grad_() for name, value in self.tables.items()}
            loss = self.caller(facts).loss(tables, self.history(facts) if facts.history else None,
                                           self.fields(facts, torch.tensor(chosen).expand(CLIENTS, -1)), self.keys, 0,
                                           self.items, PER_POSITIVE)
            values += [loss, *torch.autograd.grad(loss.sum(), list(tables.values()), allow_unused=True)]
        return [torch.zeros(()) if value is None else value.detach() for value in values]


def _history_attributes(build: Callable[..., nn.Module]) -> dict[tuple[str, str], str]:
    """The attributes of a model that hold the user's history, found by giving it two."""
    seen = []
    for items in ([3, 7, 2, 0], [5, 9, 0, 0]):
        ids = torch.tensor([[0] * 4, items])
        real = (ids > 0).float()
        length = real.long().sum(1)
        model = build(ITEMS, 1, "cpu", (ids, real, length))
        values = {(name, attribute): value for name, module in model.named_modules()
                  for attribute, value in vars(module).items() if isinstance(value, Tensor)}
        values |= {("", name): value for name, value in model.named_buffers()}
        seen.append((values, {"ids": ids, "values": real, "lengths": length}))
    (first, _), (second, given) = seen
    history = {}
    for attribute, value in second.items():
        if attribute in first and torch.equal(first[attribute], value):
            continue
        what = [kind for kind, known in given.items() if known.shape == value.shape and torch.equal(known, value)]
        if not what:
            raise Refused(f"makes '{'.'.join(filter(None, attribute))}' of the user's history in a way of its own")
        history[attribute] = what[0]
    return history


def _look_at_loss(trial: _Trial, facts: Facts) -> Facts:
    """What the loss reads, counts and keeps, by calling it for one client."""
    facts = replace(facts, samples="point")
    positions = torch.arange(POSITIVES)[None]
    tables = {name: value[0] for name, value in trial.tables.items()}
    item, length = trial.positives[:1] + 1, torch.full((1, POSITIVES), POSITIVES).clamp(max=trial.width)
    fields = {ITEM: item, NEGATIVE: trial.negatives[:1, :POSITIVES] + 1, LABEL: (positions < 2).double(),
              LENGTH: length, SEQUENCE: padded_sequences(item, torch.zeros_like(length), length, trial.width, False),
              USER: torch.ones_like(item)}
    fields[INVERSE] = fields[SEQUENCE]
    fields = {name: value[0] for name, value in fields.items()}
    caller = trial.caller(facts, _Watching)
    host = caller.host(ITEMS, PER_POSITIVE, trial.keys.device)
    kept = {f"{name}.{attribute}".strip("."): value for name, module in host.model.named_modules()
            for attribute, value in [*vars(module).items(), *module.named_buffers(recurse=False)]
            if isinstance(value, Tensor)}
    versions = {name: value._version for name, value in kept.items()}
    generators = _generators()
    try:
        caller.call(host, "calculate_loss", tables, item[0] if facts.history else None, fields, trial.keys[0], 0)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"its loss fails on one client: {first_line(error)}") from error
    if _generators() != generators:
        raise Refused("draws its loss from a global random generator, which no client owns")
    for name, value in kept.items():
        if value._version != versions[name]:
            raise Refused(f"keeps '{name}' from batch to batch outside its parameters, where the federation does not "
                          f"see it")
    counters = {}
    for attribute, (before, now) in host.changed().items():
        if type(before) in (int, float) and type(now) in (int, float):
            if now != before + 1:
                raise Refused(f"changes '{'.'.join(filter(None, attribute))}' from batch to batch")
            counters[attribute] = before
    read = caller.read
    if read & {SEQUENCE, INVERSE}:
        samples = "target pair" if NEGATIVE in read else "target"
    elif NEGATIVE in read:
        samples = "group" if "train_neg_sample_args" in host.model.asked else "pair"
    elif LABEL in read:
        samples = "point"
    elif read == {USER}:
        samples = "user"
    else:
        raise Refused(f"reads {', '.join(sorted(read)) or 'nothing'} of a batch, which is no kind of sample known here")
    return replace(facts, samples=samples, reversed=INVERSE in read, counters=counters)


def _look_at_scores(trial: _Trial, facts: Facts) -> Facts:
    """Which method scores all items, and whether vmap takes it."""
    usable, why = {}, ""
    for method in ("full_sort_predict", "predict"):
        scored = replace(facts, score=method)
        generators = _generators()
        caller = trial.caller(replace(scored, score_alone="trial"), _Keeping)
        try:
            values = caller.scores(trial.tables, trial.history(scored), ITEMS)
        except NotImplementedError:
            continue
        except Exception as error:
            why = f"{method} fails on one client: {first_line(error)}"
            continue
        if _generators() != generators:
            why = f"draws its scores ({method}) from a global random generator"
        elif values.shape != (CLIENTS, ITEMS):
            why = f"{method} gives scores of shape {tuple(values.shape[1:])} for {ITEMS} items"
        else:
            scored = replace(scored, log=all(bool((raw >= 0.0).all()) and abs(float(raw.sum()) - 1.0) < 1e-9
                                           for raw in caller.raw))
            alone = _blocked(lambda alone: [trial.caller(replace(scored, score_alone=alone)).scores(
                trial.tables, trial.history(scored), ITEMS)], "scoring")
            usable[method] = replace(scored, score_alone=alone), values
    if not usable:
        raise Refused(why or "has no method that scores items")
    first, values = next(iter(usable.values()))
    if first.score_alone and "predict" in usable:
        second, others = usable["predict"]
        if not second.score_alone and torch.equal(values.argsort(1), others.argsort(1)):
            first = second
    return first


def _elements(small: _Trial, large: _Trial, facts: Facts) -> dict[str, tuple[int, int]]:
    """Numbers made on the way by the loss per sample, and by scoring: a part that is fixed and one per item."""
    made: dict[str, list[int]] = {"loss_elements": [], "score_elements": []}

    class Counting(Caller):
        def call(self, *arguments):
            result, mode = super().call(*arguments)
            counts.append(mode.elements)
            return result, mode

    for trial in (small, large):
        caller = trial.caller(replace(facts, loss_alone="trial", score_alone="trial"), Counting)
        chosen = torch.arange(1 if facts.samples == "user" else POSITIVES - 1).expand(CLIENTS, -1)
        counts: list[int] = []
        caller.loss(trial.tables, trial.history(facts) if facts.history else None, trial.fields(facts, chosen),
                    trial.keys, 0, trial.items, PER_POSITIVE)
        made["loss_elements"].append(-(-max(counts) // chosen.shape[1]))
        counts.clear()
        caller.scores(trial.tables, trial.history(facts), trial.items)
        made["score_elements"].append(max(counts))
    slopes = {name: -(-(more - less) // (large.items - small.items)) for name, (less, more) in made.items()}
    return {name: (max(1, less - slopes[name] * small.items), slopes[name]) for name, (less, _) in made.items()}


def _blocked(results: Callable[[str], list[Tensor]], what: str) -> str:
    """Why vmap does not take something, or nothing: ``results`` of both ways must be equal."""
    try:
        alone = results("one by one")
    except Exception as error:
        raise Refused(f"{what} fails on one client: {first_line(error)}") from error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            at_once = results("")
        except Exception as error:
            return _operator(error)
    for warning in said:
        if "batching rule" in str(warning.message):
            return _operator(warning.message)
    for value, other in zip(alone, at_once):
        if not torch.allclose(value, other, rtol=1e-9, atol=1e-9, equal_nan=True):
            return "vmap gives other numbers"
    return ""


def _operator(error: Exception | Warning) -> str:
    """The operator that vmap does not know, from what PyTorch says."""
    operator = re.search(r"aten::\w+(\.\w+)?", str(error))
    if operator:
        return operator[0]
    if ".item()" in str(error) or "data-dependent" in str(error):
        return "control flow that depends on data"
    if "storage" in str(error) or "numpy" in str(error):
        return "Tensor.numpy"
    return first_line(error)


def first_line(error: Exception | Warning) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:100] if text else ''}".rstrip(": ")


def _generators() -> tuple:
    kind, state, *position = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), state.tobytes(), tuple(position), random.getstate()
