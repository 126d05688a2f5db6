"""MergeRec: domains train alone, and their models are merged once, with weights that are learned on items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from fedcl_bench import TEXT_MODEL, DomainData, DomainMethod, DomainModule, Histories, Stage, rng, setting
from fedcl_bench.rng import Tables
from fedcl_bench.toolbox.cosine import CosineModule, cosines

TOGETHER, ALONE, MERGED = "together", "alone", "merged"
START, TEXTS = "start", "content.texts"  # the latter is the buffer by which a text model knows its items


@dataclass(frozen=True)
class MergeRecSettings:
    federated_rounds: int = setting(0, "rounds in which models are averaged, before domains train alone; MergeRec's "
                                    "models start from a language model instead", low=0, search=(0, 5, 20))
    merging: str = setting("task_vectors", "what of a domain's training is added: all of it, or by TIES its largest "
                           "numbers, where their sign is that of most", choices=("task_vectors", "ties"))
    ties_density: float = setting(0.2, "share of its numbers that TIES keeps of each domain", above=0.0, high=1.0,
                                  only_if="merging=ties")
    initial_weight: float = setting(0.0, "weight of each domain at first; 0: its weight in the server's mean, and 1 "
                                    "with TIES, which has a mean of its own", low=0.0, search=(0.2, 0.5, 1.0))
    learning_steps: int = setting(500, "steps in which the server learns the weights; 0: they stay", low=0)
    weights_lr: float = setting(0.001, "learning rate of the weights", above=0.0, only_if="learning_steps")
    pseudo_users: int = setting(16, "items of all domains in a step, each the history of a pseudo-user", low=1,
                                only_if="learning_steps")
    distillation: float = setting(1000.0, "weight of the distillation from the domains' models", low=0.0,
                                  only_if="learning_steps")
    distillation_temperature: float = setting(0.05, "temperature T of the distillation; cosines are divided by it",
                                              above=0.0, only_if="learning_steps")


class MergeableModule(DomainModule):
    """A domain's recommender, with the parameters that it started from. ``start``: all parameters of the recommender
    before the domain trained alone, (P,)."""

    def __init__(self, content: CosineModule):
        super().__init__()
        self.content, self.fixed_length = content, content.fixed_length
        self.register_buffer(START, torch.zeros_like(parameters_to_vector(content.parameters())))

    def enter_stage(self, stage):
        if stage == ALONE:
            self.start.copy_(parameters_to_vector(self.content.parameters()))

    def loss(self, batch, targets):
        return self.content.loss(batch, targets)

    def scores(self, batch):
        return self.content.scores(batch)

    def item_vectors(self):
        return self.content.item_vectors()


class Recommender(nn.Module):
    """A recommender of the server's own, whose parameters and texts are given whenever it is used."""

    def __init__(self, content: CosineModule):
        super().__init__()
        self.content = content.eval()

    def vectors(self, model: Tables, texts: Tensor) -> Tensor:
        """Of items with these texts, (items, d_W): (items, d)."""
        return functional_call(self, model | {TEXTS: texts})

    def cosines(self, model: Tables, texts: Tensor, candidates: Tensor) -> Tensor:
        """Of pseudo-users with candidates' vectors, (B, items). Each has had one item, with these texts, (B, d_W)."""
        return functional_call(self, model | {TEXTS: texts}, (candidates,))

    def forward(self, candidates: Tensor | None = None) -> Tensor:
        vectors = self.content.vectors()
        if candidates is None:
            return vectors
        items = torch.arange(len(vectors), device=vectors.device)
        users = Histories(items[:, None], torch.ones_like(items), torch.zeros_like(items))
        return cosines(self.content.represent(users, vectors), candidates)


class MergeRec(DomainMethod):
    """A domain trains its recommender alone, and sends it once, theta_c. With theta_0 as they all were before and tau_c
    = theta_c - theta_0, every domain gets theta_0 + sum_c w_c tau_c, and is tested with that.

    The server learns w on pseudo-users, each with one item, of which it knows the text. With s and s_c the cosines by
    the merged model and by that of the item's domain, it minimises cross-entropy(s, argmax s_c) + kappa T^2 KL(softmax
    (s_c / T) || softmax(s / T)).
    """

    name = "mergerec"
    numbers = 1
    title = "models trained alone, merged once with learned weights, for domains"
    reference = ("Kim, Moon, Park & Lee, MergeRec: Model Merging for Data-Isolated Cross-Domain Sequential "
                 "Recommendation, KDD 2026")
    Settings = MergeRecSettings
    needs = TEXT_MODEL
    sent = ("content.", START, TEXTS)
    backbone_defaults = {"ids": False}
    ambiguities = {"initial_weight": {0.0: "the mean", 0.2: "released code, for eight domains"}}

    def stages(self):
        rounds = self.settings.federated_rounds
        return (*([Stage(TOGETHER, rounds)] if rounds else []),
                Stage(ALONE, None, exchanges=False, new_optimiser=True),
                Stage(MERGED, 1, from_best=True, new_optimiser=True, trains=False))

    def module(self, backbone, data):
        return MergeableModule(backbone.module(data))

    def upload(self, module, draw):
        sent = super().upload(module, draw)
        if module.stage == MERGED:
            sent[START] = module.start
            if self.settings.learning_steps:
                sent[TEXTS] = module.content.texts
        return sent

    def aggregate(self, uploads, weights, draw):
        """All parameters, merged: the same for every domain."""
        if START not in uploads[0]:
            return super().aggregate(uploads, weights, draw)
        s, start, texts = self.settings, uploads[0][START], [sent.get(TEXTS) for sent in uploads]
        models = [{name: value for name, value in sent.items() if name not in (START, TEXTS)} for sent in uploads]
        changes = torch.stack([parameters_to_vector(model.values()) - start for model in models])
        if s.merging == "ties":
            changes, weights = ties(changes, s.ties_density), torch.ones_like(weights)
        if s.initial_weight:
            weights = torch.full_like(weights, s.initial_weight)
        merge = Merge(start, changes, models)
        weights = weights.to(changes.dtype)
        if s.learning_steps:
            key = rng.key(draw.seed, "pseudo-users", draw.round)
            weights = learned(s, merge, weights, texts, self._recommender(texts[0]), key)
        return [merge(weights)] * len(uploads)

    def _recommender(self, texts: Tensor) -> Recommender:
        """One of the server's own, as the backbone makes it; only its shape counts."""
        nobody = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        with torch.random.fork_rng(devices=[]):
            return Recommender(self.backbone.module(DomainData(0, 1, texts[:1, None], nobody)).to(texts))


@dataclass(frozen=True)
class Merge:
    """The merged model as a function of the domains' weights, (domains,)."""

    # theta_0, (P,), and what of each domain's training is added, (domains, P)
    start: Tensor
    changes: Tensor
    models: Sequence[Tables]  # the domains' own, all parameters by their names

    def __call__(self, weights: Tensor) -> Tables:
        model = self.models[0]
        parts = (self.start + weights @ self.changes).split([value.numel() for value in model.values()])
        return {name: part.view_as(value) for (name, value), part in zip(model.items(), parts, strict=True)}


def learned(s: MergeRecSettings, merge: Merge, weights: Tensor, texts: Sequence[Tensor], recommender: Recommender,
            key: int) -> Tensor:
    """The domains' weights after Adam, (domains,). Candidates' vectors are those by the first weights throughout, as in
    the released code. ``texts``: of each domain's items, (items, d_W); ``key``: names the random numbers (see
    ``rng.key``)."""
    with torch.no_grad():
        own = [recommender.vectors(model, known) for model, known in zip(merge.models, texts)]
        candidates = [recommender.vectors(merge(weights), known) for known in texts]
    weights = weights.clone().requires_grad_()
    optimiser = torch.optim.Adam([weights], lr=s.weights_lr)
    for chosen in pseudo_users([len(known) for known in texts], s, key):
        with torch.enable_grad():
            merged, losses = merge(weights), []
            for number, items in chosen.items():
                histories = texts[number][items.to(weights.device)]
                wanted = recommender.cosines(merge.models[number], histories, own[number])
                cosine = recommender.cosines(merged, histories, candidates[number])
                losses.append(learning_loss(cosine, wanted.detach(), s) * len(items))
            loss = sum(losses) / s.pseudo_users
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return weights.detach()


def learning_loss(cosine: Tensor, wanted: Tensor, s: MergeRecSettings) -> Tensor:
    """Mean loss of pseudo-users, a scalar. ``cosine``, ``wanted``: by the merged model and by the one of the domain,
    (B, items)."""
    t = s.distillation_temperature
    apart = F.kl_div((cosine / t).log_softmax(1), (wanted / t).log_softmax(1), reduction="batchmean", log_target=True)
    return F.cross_entropy(cosine, wanted.argmax(1)) + s.distillation * t * t * apart


def pseudo_users(sizes: Sequence[int], s: MergeRecSettings, key: int) -> Iterator[dict[int, Tensor]]:
    """For each step its items by the number of their domain: all items in random order, then again in another.
    ``sizes``: how many items each domain has; ``key``: names the random numbers (see ``rng.key``)."""
    generator, total = torch.Generator().manual_seed(key >> 1), sum(sizes)
    passes = -(-s.learning_steps * s.pseudo_users // total)
    order = torch.cat([torch.randperm(total, generator=generator) for _ in range(passes)])
    for chosen in order.split(s.pseudo_users)[:s.learning_steps]:
        parts, first = {}, 0
        for number, size in enumerate(sizes):
            items = chosen[(chosen >= first) & (chosen < first + size)] - first
            if len(items):
                parts[number] = items
            first += size
        yield parts


def ties(changes: Tensor, density: float) -> Tensor:
    """What TIES leaves of task vectors, (domains, P), so that their sum is the merged one. Of each its largest numbers
    are kept. At every parameter the sign of their sum is elected, and those of that sign are divided by how many they
    are. (Yadav et al., TIES-Merging, NeurIPS 2023, as MergeRec's code has it.)"""
    count = int(density * changes.shape[1])
    largest = changes.abs().topk(count, dim=1).indices
    kept = torch.zeros_like(changes).scatter(1, largest, changes.gather(1, largest))
    positive = kept.sum(0) >= 0
    kept = kept.where((kept > 0) == positive, torch.zeros_like(kept))
    return kept / (kept != 0).sum(0).clamp(min=1)

