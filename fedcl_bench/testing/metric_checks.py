"""What every metric must do: say what it is, and give each user a number that depends on that user's list alone.

A property is a function of a plugin that returns its evidence, or raises ``Violated`` with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from ..evaluation.metrics import measure
from ..plugin.metric import Catalogue, Metric, RankedLists
from ..runs.registry import Plugin, Registry
from .properties import random_state
from .report import Inapplicable, Violated
from .trials import Pair, finished

_USERS, _LONGEST = 23, 7
_MANY, _LONG = 2100, 120
_TABLES, _OF_ITEMS = ("hits", "relevant", "items"), ("counts", "owners", "vectors")  # of lists and their catalogue
_ROUNDING = 1e-5  # of metrics in float32, by the order in which they add


def _lists(kind: str, length: int = _LONGEST, users: int = _USERS) -> RankedLists:
    """Lists with all that metrics may see. Kinds: ``random``; ``no hit``; ``all hits``; ``short``, some empty."""
    rng, count = np.random.default_rng(length), max(40, 2 * length)
    items = rng.random((users, count)).argsort(1)[:, :length]
    hits = {"no hit": np.zeros((users, length)), "all hits": np.ones((users, length))}.get(
        kind, rng.random((users, length)) < 0.3).astype(bool)
    if kind == "short":
        beyond = np.arange(length) >= rng.integers(0, length, users)[:, None]
        items, hits = np.where(beyond, -1, items), hits & ~beyond
    relevant = np.maximum(hits.sum(1) + rng.integers(0, 4, users), 1)
    owners = rng.integers(0, users + 1, count).astype(float)
    catalogue = Catalogue(torch.from_numpy(owners * rng.integers(1, 3, count)), torch.from_numpy(owners), float(users),
                          torch.from_numpy(rng.normal(size=(count, 4)).astype(np.float32)))
    return RankedLists(torch.from_numpy(hits), torch.from_numpy(relevant), torch.from_numpy(items), catalogue)


def _values(metric: Metric, lists: RankedLists) -> Tensor:
    """What a run records of the lists."""
    return measure([metric], lists, [lists.k])[f"{metric.name}@{lists.k}"]


def _rows(lists: RankedLists, users: Tensor) -> RankedLists:
    return replace(lists, **{name: getattr(lists, name)[users] for name in _TABLES})


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
    yield "many users and ranks", _lists("short", _LONG, _MANY)
    yield "nobody", _lists("random", users=0)


def _works_with_items(metric: Metric, lists: RankedLists) -> bool:
    try:
        metric.values(lists)
    except Exception:
        return False
    return True


def own_list_alone(plugin: Plugin) -> str:
    """A user's value is the same alone, among others, in another order and with other numbers of items: how many are
    ranked at once is chance."""
    metric = plugin.cls()
    for kind, length, users in (("random", _LONGEST, _USERS), ("short", _LONGEST, _USERS), ("short", _LONG, _MANY)):
        lists, all_users = _lists(kind, length, users), torch.arange(users)
        values = _values(metric, lists)
        for words, shown, pieces in (("alone", lists, all_users[-_USERS:].split(1)),
                                     ("in pieces", lists, all_users.split(users // 3)),
                                     ("in another order", lists, [all_users.roll(1).flip(0)]),
                                     ("when items are numbered otherwise", _renumbered(lists), [all_users])):
            apart = torch.cat([_values(metric, _rows(shown, piece)) for piece in pieces])
            chosen = torch.cat(list(pieces))
            together = values[chosen]
            difference = (together - apart).abs()
            if bool((difference > _ROUNDING * together.abs().clamp(min=1.0)).any()):
                row = int(difference.argmax())
                raise Violated(f"user {int(chosen[row])} has {float(together[row]):.6g} among {users} users and "
                               f"{float(apart[row]):.6g} {words}; a value may depend on the user's own list alone")
    return f"{_USERS} and {_MANY} users together, alone, in pieces, in another order, and with items renumbered"


def _renumbered(lists: RankedLists) -> RankedLists:
    """The lists when items have other numbers."""
    of = lists.catalogue
    new = torch.randperm(len(of.counts), generator=torch.Generator().manual_seed(1))
    old = new.argsort()
    items = torch.where(lists.items >= 0, new[lists.items.clamp(min=0)], -1)
    return replace(lists, items=items, catalogue=replace(of, **{name: getattr(of, name)[old] for name in _OF_ITEMS}))


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
    for now, before, names in ((lists, untouched, _TABLES), (lists.catalogue, untouched.catalogue, _OF_ITEMS)):
        for name in names:
            if not torch.equal(getattr(now, name), getattr(before, name)):
                raise Violated(f"values changes `{name}`, which others read after it")
    return "the same under other random states; lists are unchanged"


def a_hit_counts(plugin: Plugin) -> str:
    """Of a metric of hits: one hit more, at whatever rank, lowers nobody's value and raises somebody's; more is
    better."""
    if plugin.cls.of_items:
        raise Inapplicable("it looks at items, of which none is better in itself")
    metric, raised = plugin.cls(), 0
    for kind, length in (("random", _LONGEST), ("no hit", _LONGEST), ("random", _LONG), ("no hit", _LONG)):
        lists = _lists(kind, length)
        lists = replace(lists, relevant=lists.hits.sum(1) + 1)  # one more can be a hit
        before = _values(metric, lists)
        for rank in range(lists.k):
            hits = lists.hits.clone()
            hits[:, rank] = True
            gain = _values(metric, replace(lists, hits=hits)) - before
            if float(gain.min()) < -_ROUNDING:
                user = int(gain.argmin())
                raise Violated(f"user {user} has {float(before[user]):.6g}, and {float(gain[user]):+.6g} with a hit "
                               f"more, at rank {rank + 1}; the best round is the one with the highest value")
            raised += int((gain > _ROUNDING).sum())
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
