"""RecBole's sequential recommenders in streams of domains: ``--backbone recbole:NAME --dataset A+B``.

A domain trains RecBole's own model in mini-batches, as RecBole's trainer does, with hyper-parameters of RecBole's
file.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..plugin.backbone import Backbone
from ..plugin.silo import DomainData, DomainModule, Histories, ModuleBackbone, Stage
from ..core.errors import UserError
from ..toolbox.text_fusion import SEMANTICS, AddedSemanticSettings
from . import domain_facts, models
from .domain_facts import READS_TEXT, DomainFacts
from .domain_modules import PRETRAIN, Design, RecBoleModule, hyper_parameters, prepared
from .domain_semantics import SemanticRecommender
from .adapter import OF_SETTINGS, RecBoleSettings
from .models import PREFIX, Refused, tried
from .parameters import classify


@functools.lru_cache(maxsize=64)
def _design(settings) -> Design:
    name, width = settings.NAME, settings.max_length
    values = settings.hyper_parameters(hyper_parameters(name))
    facts = domain_facts.TABLE.get(name)
    if not isinstance(facts, DomainFacts):
        raise Refused(facts or "is no sequential recommender, and domains are sequences of items of many users")
    negatives = facts.bpr and {**hyper_parameters(name), **values}["loss_type"] == "BPR"
    with torch.random.fork_rng(devices=[]):
        parameters = classify(lambda users, items: prepared(name, values, width, random_domain(users, items))[0], [])
        design = Design(tuple(parameters), facts, negatives)
        _try(RecBoleModule(name, values, width, random_domain(), design), width)
    return design


def random_domain(n_users: int = 7, n_items: int = 23) -> DomainData:
    """A domain of random histories and texts, whose longest history has 6 items."""
    lengths = 2 + torch.arange(n_users) % 5
    generator = torch.Generator().manual_seed(0)
    return DomainData(n_users, n_items, torch.randn(n_items, 1, 5, generator=generator),
                      (torch.randint(n_items, (int(lengths.sum()),), generator=generator),
                       nn.functional.pad(lengths.cumsum(0), (1, 0))))


def random_batch(lengths: Tensor, width: int) -> tuple[Histories, Tensor]:
    """Random histories in the domain ``random_domain`` and their targets."""
    items = torch.randint(23, (len(lengths), width)).masked_fill(torch.arange(width) >= lengths[:, None], -1)
    return Histories(items, lengths, torch.arange(len(lengths)) % 7), torch.randint(23, lengths.shape)


def _try(module: DomainModule, width: int) -> None:
    """Raise Refused if a model fails."""
    batch, targets = random_batch(torch.arange(7) % min(6, width) + 1, width)
    with torch.no_grad():
        tried("its loss fails", lambda: module.train().loss(batch, targets))
        tried("full_sort_predict fails", lambda: module.eval().scores(batch))


class RecBoleDomainBackbone(ModuleBackbone):
    """Base class of what stands for RecBole's models in streams of domains; raises UserError for a model that cannot be
    trained there, saying why, and for bad settings."""

    numbers = 1
    of_stages = ("pretrain_rounds",)

    def __init__(self, settings):
        if settings.private:
            raise UserError(f"setting 'private': found '{settings.private}', accepted: none in a stream of domains, "
                            f"where topology=local keeps all parameters at the domain.")
        known = hyper_parameters(settings.NAME)
        self._values = settings.hyper_parameters(known)
        _require_masked({**known, **self._values}, settings)
        try:
            self.design = _design(settings)
        except Refused as error:
            cure = OF_SETTINGS if isinstance(domain_facts.TABLE.get(settings.NAME), DomainFacts) else (
                ", so it cannot be trained by domains.\n`run_bench.py list recbole` shows the RecBole models that can.")
            raise UserError(f"backbone '{PREFIX}{settings.NAME}' {error}{cure}") from None
        width = max(size for key, size in {**known, **self._values}.items() if models.is_size(key))
        super().__init__(replace(settings, dim=width))
        if not self._has_semantics:
            self.exchanges = frozenset()

    @property
    def _has_semantics(self) -> bool:
        return getattr(self.settings, "semantics", False)

    def module(self, data: DomainData) -> DomainModule:
        """RecBole's model of a domain; raises UserError for one that has too few items for RecBole's masks."""
        if models.defaults(self.settings.NAME).get("transform") and data.n_items <= self.settings.max_length:
            _require_unseen(data)
        if getattr(self.settings, "item_text", "vectors") == "noise":
            # As UniSRec's released baselines read: numbers with the law of all their initial weights, N(0, .02^2).
            numbers = torch.randn(data.features.shape, generator=torch.Generator().manual_seed(0))
            data = replace(data, features=(0.02 * numbers).to(data.features))
        module = RecBoleModule(self.settings.NAME, self._values, self.settings.max_length, data, self.design)
        return SemanticRecommender(module, data.features, self.settings) if self._has_semantics else module

    def stages(self) -> Sequence[Stage]:
        if self.settings.NAME != "S3Rec":
            return super().stages()
        return Stage(PRETRAIN, rounds=self.settings.pretrain_rounds), Stage("finetune", new_optimiser=True)


def _require_masked(values: Mapping[str, Any], settings: RecBoleSettings) -> None:
    """Raise UserError if RecBole's masking, which rounds down, would mask no item, with which it does not go on."""
    share = values.get("mask_ratio")
    if models.defaults(settings.NAME).get("transform") and isinstance(share, (int, float)) \
            and int(share * settings.max_length) < 1:
        raise UserError(f"setting 'max_length': found {settings.max_length}, accepted: so many items that mask_ratio="
                        f"{share} of them is one or more.")


def _require_unseen(data: DomainData) -> None:
    """Raise UserError if a user has all items: RecBole's masking would look without an end for another one."""
    values, bounds = data.histories
    users = torch.arange(data.n_users, device=values.device).repeat_interleave(bounds.diff())
    different = torch.unique(users * data.n_items + values) // data.n_items
    if len(different) and int(different.bincount().max()) >= data.n_items:
        raise UserError(f"a user of a domain of {data.n_items} items has all of them, and RecBole's masked training "
                        f"draws one that the user has not; leave such users out of the data.")


@functools.cache
def domain_backbone_class(name: str, cls: type[Backbone]) -> type[RecBoleDomainBackbone]:
    """What stands for a RecBole model in streams of domains, with the settings of ``cls``, which it is in others."""
    return type(name, (RecBoleDomainBackbone,), {
        "name": f"{PREFIX}{name}", "title": f"RecBole 1.2.0's sequential recommender {name}, of a domain",
        "reference": "Zhao et al., RecBole 2.0, CIKM 2022", "Settings": cls.Settings, "ambiguities": cls.ambiguities,
        "needs_features": name in READS_TEXT, "__module__": __name__,
        "exchanges": frozenset({SEMANTICS} if issubclass(cls.Settings, AddedSemanticSettings) else ())})
