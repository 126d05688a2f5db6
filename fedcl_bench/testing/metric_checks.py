"""What every metric must do: say what it is, and give each user a number that depends on that user's list alone.

A property is a function of a plugin that returns its evidence, or raises ``Violated`` with it.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from ..evaluation.metrics import measure
from ..plugin.metric import Catalogue, Metric, RankedLists
from ..runs.registry import Plugin, Registry
from .properties import random_state
from .report import Inapplicable, Violated
from .trials import TOLERANCE, Pair, finished

_ITEMS, _USERS, _LONGEST = 40, 23, 7


def _lists(kind: str, length: int = _LONGEST, users: int = _USERS) -> RankedLists:
    """Lists with all that metrics may see. Kinds: ``random``; ``no hit``; ``all hits``; ``short``, some empty."""
    rng = np.random.default_rng(length)
    items = rng.random((users, _ITEMS)).argsort(1)[:, :length]
    hits = {"no hit": np.zeros((users, length)), "all hits": np.ones((users, length))}.get(
        kind, rng.random((users, length)) < 0.3).astype(bool)
    if kind == "short":
        beyond = np.arange(length) >= rng.integers(0, length, users)[:, None]
        items, hits = np.where(beyond, -1, items), hits & ~beyond
    relevant = np.maximum(hits.sum(1) + rng.integers(0, 4, users), 1)
    owners = rng.integers(0, users + 1, _ITEMS).astype(float)
    catalogue = Catalogue(torch.from_numpy(owners * rng.integers(1, 3, _ITEMS)), torch.from_numpy(owners), float(users),
                          torch.from_numpy(rng.normal(size=(_ITEMS, 4)).astype(np.float32)))
    return RankedLists(torch.from_numpy(hits), torch.from_numpy(relevant), torch.from_numpy(items), catalogue)


def _values(metric: Metric, lists: RankedLists) -> Tensor:
    """What a run records of the lists."""
    return measure([metric], lists, [lists.k])[f"{metric.name}@{lists.k}"]


def _rows(lists: RankedLists, users: Tensor) -> RankedLists:
    """The lists of these users."""
    return RankedLists(lists.hits[users], lists.relevant[users], lists.items[users], lists.catalogue)


def described(plugin: Plugin) -> str:
    """It has a title, a formula and a source."""
    cls = plugin.cls
    formula = " ".join((vars(cls).get("__doc__") or "").split())
    for what, text in (("title", getattr(cls, "title", "")), ("formula as its docstring", formula),
                       ("source as its reference", cls.reference)):
        if not text:
            raise Violated(f"it has no {what}")
    return f"{formula} ({cls.reference})"


def numbers(plugin: Plugin) -> str:
    """Finite numbers, one per user, whatever the lists are."""
    metric, seen = plugin.cls(), []
    for kind, lists in _worlds():
        try:
            seen.append(_values(metric, lists))
        except (AttributeError, TypeError) as error:
            if metric.of_items or not _works_with_items(metric, lists):
                raise
            raise Violated(f"values looks at `items` or `catalogue`, which a metric has only with of_items = True "
                           f"({error})") from None
        except Exception as error:
            raise Violated(f"lists with {kind}, K = {lists.k}: {error}") from None
    values = torch.cat(seen)
    return f"{len(values)} lists, values from {float(values.min()):.3g} to {float(values.max()):.3g}"


def _worlds() -> Iterator[tuple[str, RankedLists]]:
    for kind in ("random", "no hit", "all hits", "short"):
        for length in (1, _LONGEST):
            yield kind, _lists(kind, length)
    yield "nobody", _lists("random", users=0)


def _works_with_items(metric: Metric, lists: RankedLists) -> bool:
    try:
        metric.values(lists)
    except Exception:
        return False
    return True


def own_list_alone(plugin: Plugin) -> str:
    """A user's value is the same alone, among others and in another order: how many are ranked at once is chance."""
    metric = plugin.cls()
    for kind in ("random", "short"):
        lists = _lists(kind)
        together = _values(metric, lists)
        everybody = torch.arange(_USERS)
        for words, pieces in (("alone", everybody.split(1)), ("in pieces of 7", everybody.split(7)),
                              ("in another order", [everybody.flip(0)])):
            apart = torch.cat([_values(metric, _rows(lists, users)) for users in pieces])
            apart = apart.flip(0) if words == "in another order" else apart
            difference = (together - apart).abs()
            if bool((difference > TOLERANCE * together.abs().clamp(min=1.0)).any()):
                user = int(difference.argmax())
                raise Violated(f"user {user} has {float(together[user]):.6g} among {_USERS} users and "
                               f"{float(apart[user]):.6g} {words}; a value may depend on the user's own list alone")
    return f"{_USERS} users together, alone, in pieces and in another order"


def same_each_time(plugin: Plugin) -> str:
    """The same values each time, whatever random numbers and lists were there before; lists stay as they are."""
    lists, values = _lists("short"), []
    untouched = _lists("short")
    metric = plugin.cls()
    for seed in (1, 2):
        with random_state(seed):
            values.append(_values(metric, lists))
        _values(metric, _lists("all hits"))
    if not torch.equal(*values):
        raise Violated("its values differ from call to call; it draws random numbers or keeps something")
    parts = [(name, getattr(lists, name), getattr(untouched, name)) for name in ("hits", "relevant", "items")]
    parts += [(name, getattr(lists.catalogue, name), getattr(untouched.catalogue, name))
              for name in ("counts", "owners", "vectors")]
    for name, now, before in parts:
        if not torch.equal(now, before):
            raise Violated(f"values changes `{name}`, which others read after it")
    return "the same under other random states; lists are unchanged"


def a_hit_counts(plugin: Plugin) -> str:
    """Of a metric of hits: one hit more, at whatever rank, lowers nobody's value and raises somebody's; more is
    better."""
    if plugin.cls.of_items:
        raise Inapplicable("it looks at items, of which none is better in itself")
    metric, raised = plugin.cls(), 0
    for kind in ("random", "no hit"):
        lists = _lists(kind)
        lists = RankedLists(lists.hits, lists.hits.sum(1) + 1, lists.items, lists.catalogue)  # one more can be a hit
        before = _values(metric, lists)
        for rank in range(lists.k):
            hits = lists.hits.clone()
            hits[:, rank] = True
            gain = _values(metric, RankedLists(hits, lists.relevant, lists.items, lists.catalogue)) - before
            if float(gain.min()) < -TOLERANCE:
                user = int(gain.argmin())
                raise Violated(f"user {user} has {float(before[user]):.6g}, and {float(gain[user]):+.6g} with a hit "
                               f"more, at rank {rank + 1}; the best round is the one with the highest value")
            raised += int((gain > TOLERANCE).sum())
    if not raised:
        raise Violated("no hit at any rank changes a value; it does not say how well a list ranks")
    return f"one hit more, at any rank, raises {raised} values and lowers none"


def runs(registry: Registry, plugin: Plugin) -> str:
    """It is recorded in blocks and in sessions, and a metric of hits chooses the best round."""
    words = []
    settings = {"extra_metrics": plugin.name} if plugin.cls.of_items else {"valid_metric": f"{plugin.name}@5"}
    for stream in ("blocks", "sessions"):
        progress = finished(Pair(registry, "ft", "fedmf", stream, settings).federation())
        name = f"all:{plugin.name}@5" if stream == "sessions" else f"{plugin.name}@5"
        words.append(f"{name} {progress.tests[-1][2].mean(name):.4g} in {stream}")
    return ", ".join(words)


OF_METRICS = (("says what it is", described), ("a number per user", numbers), ("own list alone", own_list_alone),
              ("the same each time", same_each_time), ("a hit counts", a_hit_counts))
