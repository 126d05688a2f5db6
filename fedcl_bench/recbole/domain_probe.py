"""Finding out by trying: whether a RecBole model can be that of a domain, and what its loss reads and draws.

A model is trained on a made-up domain, with noise on all parameters so that nothing is zero by chance.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any, Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..domain_module import DomainData, Histories
from . import models
from .calls import Host
from .domain_networks import Design, RecBoleModule, made, prepared
from .models import NEGATIVE, Refused
from .parameters import Parameter, classify
from .probe import first_line

_USERS, _ITEMS, _LONGEST, _TEXT = 7, 23, 6, 5  # of the made-up domain
_TRANSFORMS = None, "mask_itemseq"
_HANDED_OVER = ("", "dataset"), ("", "same_item_index")  # attributes that every batch sets anew


def probe(name: str, values: Mapping[str, Any], width: int) -> Design:
    """Try a model.

    Args:
        name: RecBole's; values: hyper-parameters that differ from RecBole's file.
        width: longest history.

    Raises:
        Refused: if it cannot be used, saying why.
    """
    if models.names()[name] != "sequential":
        raise Refused("is no sequential recommender, and domains are sequences of items of many users")
    if (transform := models.defaults(name).get("transform")) not in _TRANSFORMS:
        raise Refused(f"needs RecBole's transform '{transform}' of every batch")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of RecBole's code
        torch.manual_seed(0)
        return _tried(name, values, width)


def made_up(n_users: int = _USERS, n_items: int = _ITEMS) -> DomainData:
    """A domain of random histories."""
    lengths = 2 + torch.arange(n_users) % (_LONGEST - 1)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(0)
    return DomainData(n_users, n_items, torch.randn(n_items, 1, _TEXT, generator=generator),
                      (torch.randint(n_items, (int(bounds[-1]),), generator=generator), bounds))


def _batch(lengths: Tensor, width: int) -> tuple[Histories, Tensor]:
    """Random histories of the made-up domain and their targets."""
    column = torch.arange(width)
    items = torch.randint(_ITEMS, (len(lengths), width)).masked_fill(column >= lengths[:, None], -1)
    return Histories(items, lengths, torch.arange(len(lengths)) % _USERS), torch.randint(_ITEMS, lengths.shape)


def _tried(name: str, values: Mapping[str, Any], width: int) -> Design:
    parameters = _parameters(lambda users, items: prepared(name, values, width, made_up(users, items))[0])
    module = made(name, values, width, made_up(), Design(parameters, draws=False))
    with torch.no_grad():
        for value in module.parameters():
            value += 0.1 * torch.randn_like(value)
    batch, targets = _batch(torch.arange(_USERS) % min(_LONGEST, width) + 1, width)
    negatives, draws = _look_at_loss(module, batch, targets)
    _look_at_scores(module, batch)
    module.design = Design(parameters, negatives, draws)
    return replace(module.design, fixed_length=not _can_be_shorter(module, width))


def _parameters(build: Callable[[int, int], nn.Module]) -> tuple[Parameter, ...]:
    """A model's parameters; rows of users are refused, and whatever else grows without being trained."""
    parameters = tuple(classify(build, []))
    of_users = [p.name for p in parameters if p.follows == "users"]
    if of_users:
        raise Refused(f"keeps a vector of every user ({', '.join(of_users)}), and domains have different numbers of "
                      f"users")
    of_few, of_many = ({key: value.shape for key, value in build(3, items).state_dict().items()} for items in (20, 27))
    followed = {p.name for p in parameters if p.follows}
    for key, shape in of_few.items():
        if key not in followed and of_many[key] != shape:
            raise Refused(f"keeps '{key}' of all items outside its parameters")
    return parameters


def _look_at_loss(module: RecBoleModule, batch: Histories, targets: Tensor) -> tuple[bool, bool]:
    """Whether the loss reads negatives, and whether it draws from Python's or NumPy's generator."""
    read: set[str] = set()

    def watched(fields):
        from recbole.data.interaction import Interaction

        class Watched(Interaction):
            def __getitem__(self, index):
                read.add(index)
                return super().__getitem__(index)

        return Watched(fields)

    module.interaction = watched
    host, before = Host(module.train().model), (random.getstate(), np.random.get_state())
    losses = []
    try:
        for _ in range(2):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            start = random.getstate(), np.random.get_state()
            losses.append(module.loss(batch, targets))
        draws = random.getstate() != start[0] or not all(map(np.array_equal, np.random.get_state(), start[1]))
    except Exception as error:  # whatever a model's code raises is a reason, not a traceback
        raise Refused(f"its loss fails: {first_line(error)}") from error
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        del module.interaction
    _refuse_memory(host, losses)
    if not losses[0].requires_grad:
        raise Refused("has a loss without a gradient")
    return NEGATIVE in read, draws


def _refuse_memory(host: Host, losses: list[Tensor]) -> None:
    """Raise Refused for a model that counts its batches, or whose loss depends on the batch before.

    Args:
        losses: of the same batch with the same random numbers, one after the other.
    """
    for attribute, (old, new) in host.changed().items():
        counts = type(old) in (int, float) and type(new) in (int, float)
        if attribute not in _HANDED_OVER and (counts or not torch.equal(*losses)):
            raise Refused(f"keeps '{'.'.join(filter(None, attribute))}' from batch to batch outside its parameters")


def _look_at_scores(module: RecBoleModule, batch: Histories) -> None:
    try:
        with torch.no_grad():
            scores = module.eval().scores(batch)
    except NotImplementedError:
        raise Refused("scores one item at a time, and here all items are ranked") from None
    except Exception as error:
        raise Refused(f"full_sort_predict fails: {first_line(error)}") from error
    if scores.shape != (len(batch.lengths), _ITEMS):
        raise Refused(f"gives scores of shape {tuple(scores.shape)} for {len(batch.lengths)} histories and {_ITEMS} "
                      f"items")


def _can_be_shorter(module: RecBoleModule, width: int) -> bool:
    """Whether loss and scores are the same without padding behind the longest history of a batch."""
    for part in module.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for longest in {1, min(3, width)}:
        padded, targets = _batch(torch.arange(_USERS) % longest + 1, width)
        results = []
        for batch in (padded, replace(padded, items=padded.items[:, :longest])):
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    results.append((module.loss(batch, targets), module.scores(batch)))
            except Exception:  # of a model that knows one length
                return False
        if not all(torch.allclose(value, other, rtol=1e-4, atol=1e-5) for value, other in zip(*results)):
            return False
    return True
