"""Any RecBole model as a backbone: ``--backbone recbole:NAME``.

A client trains RecBole's own model of one user with its own ``calculate_loss``, on the client's items of the block.
What grows with users is private, what grows with items is a public table, the rest is public and dense
(``parameters.py``). Clients are trained at once where ``torch.func.vmap`` takes the model, else one by one, to the same
numbers (``client_facts.py`` says which).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Mapping

import torch
from torch import Tensor, nn

from ..plugin.backbone import Backbone, BackboneSettings, OwnBatch
from ..data.stream import TrainingStep
from ..plugin.silo import TextSettings
from ..rng import Tables
from ..core.errors import UserError
from ..toolbox.layers import same_for_all
from ..plugin.local_settings import LocalSettings, OwnSamples
from ..toolbox.text_fusion import AddedSemanticSettings
from ..core.settings import setting
from . import client_facts, domain_facts, models
from .calls import HISTORY, BatchSamples, Caller, Elements
from .client_facts import Facts
from .domain_facts import READS_TEXT
from .models import PREFIX, Refused
from .parameters import Parameter, Starts, classify


@dataclass(frozen=True)
class RecBoleSettings(BackboneSettings):
    """Settings of every RecBole model; its own hyper-parameters are in ``model``."""

    NAME: ClassVar[str]

    lr: float = setting(0.1, "learning rate of all parameters", above=0.0)
    dim: int = setting(0, "length of embeddings and hidden states (RecBole's *embedding_size, hidden_size); 0: "
                       "RecBole's own", low=0)
    max_length: int = setting(50, "longest sequence; earlier items are cut off", low=2)
    private: str = setting("", "patterns of more parameters to keep at the client, as output.*,item_bias.weight")
    model: str = setting("", "hyper-parameters of the model by RecBole's names, as {dropout_prob: 0.0}")

    def hyper_parameters(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """RecBole's names and values that differ from those that are ``known``, by default those of RecBole's file;
        raises UserError for a bad ``model``."""
        known = models.defaults(self.NAME) if known is None else known
        sized = dict.fromkeys(filter(models.is_size, known), self.dim) if self.dim else {}
        return {**sized, **models.parse_model(self.NAME, self.model, known)}

    def patterns(self) -> list[str]:
        return [part.strip() for part in self.private.split(",") if part.strip()]


@dataclass(frozen=True)
class _Design:
    """What is known of a model with certain settings; ``build`` is ``models.build`` with them."""

    build: Callable[..., nn.Module]
    parameters: tuple[Parameter, ...]
    facts: Facts
    elements: Elements


@functools.lru_cache(maxsize=64)
def _design(settings: RecBoleSettings) -> _Design:
    name, values = settings.NAME, settings.hyper_parameters()
    facts = client_facts.TABLE[name]
    if isinstance(facts, str):
        raise Refused(facts)
    facts = facts.chosen({**models.defaults(name), **values})
    build = functools.partial(models.build, name, values, settings.max_length)
    parameters = tuple(classify(build, settings.patterns()))
    return _Design(build, parameters, facts, Elements.measure(build, parameters, facts, settings.max_length))


def _advice(name: str) -> str:
    """What to do where a model cannot be trained by clients of one user each."""
    if isinstance(domain_facts.TABLE.get(name, ""), str):
        from .pooled import KINDS

        pooled = f"`--method {PREFIX}{name}` trains it on everybody's data; " if name in KINDS else ""
        return f"{pooled}`run_bench.py list recbole` shows the RecBole models that clients can train."
    return ("Domains of many users can train it: name two or more datasets, as in --dataset A+B, with --set "
            "topology=local.")


OF_SETTINGS = " (settings 'dim', 'max_length' and 'model' are part of it)."  # why RecBole refuses a model that it has


class RecBoleBackbone(Backbone):
    """Base class of the backbones made by ``plugin``. Scores are what the model's ``full_sort_predict``, or ``predict``
    on all items, returns; a last sigmoid is taken back, and a softmax becomes its logarithm, so that they are logits.
    Raises UserError for a model that cannot be a federated backbone, saying why, and for bad settings."""

    numbers = 1
    whole_tables = True
    defaults = {"optimiser": "adam"}
    central_defaults = {"optimiser": "adam", "adam_beta2": 0.999, "lr": 0.001}  # as RecBole's trainer

    def __init__(self, settings: RecBoleSettings):
        super().__init__(settings)
        try:
            design = _design(settings)
        except Refused as error:
            never = isinstance(client_facts.TABLE[settings.NAME], str)
            cure = f".\n{_advice(settings.NAME)}" if never else OF_SETTINGS
            raise UserError(f"backbone '{PREFIX}{settings.NAME}' {error}{cure}") from None
        self.parameters, self.facts, self._design = design.parameters, design.facts, design
        self._starts: dict[int, Starts] = {}
        self._caller = Caller(design.build, self.parameters, self.facts, settings.max_length, design.elements.score)

    def _start(self, seed: int) -> Starts:
        if seed not in self._starts:
            self._starts[seed] = Starts.measure(self._design.build, self.parameters, seed)
        return self._starts[seed]

    def _dense_names(self, p: Parameter) -> list[str]:
        """Names of the dense parameters that belong to a parameter of the model."""
        if not p.follows:
            return [p.name]
        return [] if p.follows == "users" else [p.padding, p.rows_behind] if p.behind else [p.padding]

    def new_rows(self, seed, users, items):
        start, public, private = self._start(seed), {}, {}
        for p in self.parameters:
            if p.follows == "users":
                private[p.name] = start.laws[p.name].rows(seed, p.name, users, p.row)
            elif p.private:
                private |= same_for_all({name: start.dense[name] for name in self._dense_names(p)}, users)
            elif p.follows == "items":
                public[p.name] = start.laws[p.name].rows(seed, p.name, items, p.row)
        return public, private

    def new_dense(self, seed):
        start = self._start(seed)
        return {name: start.dense[name] for p in self.parameters if not p.private for name in self._dense_names(p)}

    def new_personal(self, seed, items):
        return {p.name: self._start(seed).laws[p.name].rows(seed, p.name, items, p.row)
                for p in self.parameters if p.follows == "items" and p.private}

    def remember(self, step: TrainingStep, memory: Tables) -> Tables:
        """The clients' own training items of their latest block, as RecBole's ids, 0 where there are fewer: the last
        ``max_length`` for sequential models, else all."""
        if not self.facts.remembers:
            return {}
        lists, longest = step.train, self._longest(step)
        known = memory.get(HISTORY, torch.zeros(0, 0, dtype=torch.int64, device=lists.values.device))
        table = torch.zeros(step.n_users, max(longest, known.shape[1]), dtype=torch.int64, device=lists.values.device)
        table[:len(known), :known.shape[1]] = known
        users = (lists.lengths > 0).nonzero().flatten()
        row, item = lists.select(users)
        length = lists.lengths[users]
        column = torch.arange(len(row), device=row.device) - (length.cumsum(0) - length)[row]
        column = column - (length - longest).clamp(min=0)[row]
        table[users] = 0
        table[users[row[column >= 0]], column[column >= 0]] = item[column >= 0] + 1
        return {HISTORY: table}

    def _longest(self, step: TrainingStep) -> int:
        """How many items of a client are kept at most."""
        return self.settings.max_length if self.facts.sequential else int(step.train.lengths.max())

    def own_samples(self, settings: LocalSettings) -> OwnSamples:
        kind, k = self.facts.samples, settings.negatives
        of = {"point": lambda n: n * (1 + k), "pair": lambda n: n * k, "group": lambda n: n, "target": lambda n: n - 1,
              "target pair": lambda n: (n - 1) * k, "user": torch.ones_like}[kind]
        per_batch = max(1, settings.batch_size // k) if kind == "group" else settings.batch_size
        return OwnSamples(of, per_batch, self._design.elements.loss)

    def own_loss(self, clients: Tables, rows: Tables, batch: OwnBatch) -> Tensor:
        row = next(iter(rows.values()))
        samples = BatchSamples(batch.positives, batch.negatives, batch.chosen)
        return self._caller.loss({**clients, **rows}, samples, batch.draw.clients("recbole", batch.users), batch.done,
                                 row.shape[1], row.dtype)

    def score(self, clients, rows):
        tables = {name: value for name, value in {**clients, **rows}.items() if name != HISTORY}
        return self._caller.scores(tables, clients.get(HISTORY), next(iter(rows.values())).shape[1])

    def learning_rates(self, n_items, round_=0, batch=0):
        return {name: self.settings.lr for p in self.parameters for name in (p.name, *self._dense_names(p))}

    def notes(self) -> list[str]:
        """What the user should know before a run."""
        alone = [f"{what} ({why})" for what, why in (("training", self.facts.loss_alone),
                                                     ("scoring", self.facts.score_alone)) if why]
        return [f"{PREFIX}{self.settings.NAME}: one client at a time in {' and '.join(alone)}, as vmap does not take "
                f"it; the numbers are the same."] if alone else []


@dataclass(frozen=True)
class RecBoleTextSettings(RecBoleSettings, TextSettings):
    """The same of a model that reads what items' texts say, which it does in streams of domains."""


@dataclass(frozen=True)
class FDSASettings(RecBoleTextSettings, AddedSemanticSettings):
    """The same of a baseline of UniSRec."""

    item_text: str = setting("vectors", "an item's feature is what its text says (vectors), or frozen normal numbers "
                             "(noise)", choices=("vectors", "noise"))


@dataclass(frozen=True)
class S3RecSettings(FDSASettings):
    """The same with pre-training."""

    pretrain_rounds: int = setting(0, "rounds of pre-training; 0: as many as 'rounds', which is 300, as in UniSRec "
                                   "(RecBole: 500)", low=0)


_OF_TEXT = {"FDSA": FDSASettings, "S3Rec": S3RecSettings}
_AMBIGUITIES = {"item_text": {"vectors": "paper of UniSRec", "noise": "released FDSA and S3Rec, whose initial "
                           "weights are drawn over the vectors"}}


@functools.cache
def backbone_class(name: str) -> type[RecBoleBackbone]:
    """The backbone of RecBole's model ``name``."""
    kind = _OF_TEXT.get(name, RecBoleTextSettings if name in READS_TEXT else RecBoleSettings)
    settings = type(f"{name}Settings", (kind,), {"NAME": name, "__module__": __name__})
    ignored = {}
    if not any(map(models.is_size, models.defaults(name))):
        ignored["dim"] = f"with {PREFIX}{name}; its sizes are hyper-parameters in 'model'"
    if models.names()[name] == "general":
        ignored["max_length"] = f"with {PREFIX}{name}, which reads no sequences"
    return type(name, (RecBoleBackbone,), {
        "name": f"{PREFIX}{name}", "title": f"RecBole 1.2.0's {models.names()[name]} recommender {name}",
        "reference": "Zhao et al., RecBole 2.0, CIKM 2022", "Settings": settings, "ignored": ignored,
        "ambiguities": _AMBIGUITIES if name in _OF_TEXT else {},
        "__module__": __name__})
