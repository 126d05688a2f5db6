"""PFCR: domains share the vectors of texts' codes, and then each tunes prompts of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

import torch
from torch import Tensor, nn

from fedcl_bench import DomainMethod, DomainModule, Histories, Stage, UserError, rng, setting
from fedcl_bench.toolbox.cosine import CosineModule, cosines, rows_at
from fedcl_bench.toolbox.randomised_response import budget, estimated, kept_share, randomise, shifted_share
from fedcl_bench.toolbox.transformer import TransformerEncoder, by_length

FEDERATED, SINGLE, PROMPTED = "fed_pretrain", "single_train", "prompt_finetune"
TABLE = "content.code_table"


@dataclass(frozen=True)
class PFCRSettings:
    federated_rounds: int = setting(10, "rounds in which the server learns the vectors of codes", low=1)
    server_lr: float = setting(0.001, "learning rate of these at the server", above=0.0, search=(0.001, 0.01, 0.1))
    single_train: bool = setting(True, "after them each domain trains alone until its validation ends it, before it "
                                 "tunes prompts")
    ldp: str = setting("off", "what domains do to the gradients that they send: off: nothing; unbiased: they clip, "
                       "round and randomise them; released: as the released code, whose mean is not the gradient",
                       choices=("off", "unbiased", "released"))
    ldp_epsilon: float = setting(0.3, "budget of each number of each upload", above=0.0, search=(0.3, 1.0, 3.0),
                                 only_if="ldp!=off")
    ldp_clip: float = setting(0.12, "largest size of a number that is sent", above=0.0, only_if="ldp!=off")
    ldp_levels: int = setting(256, "values that a number can have when it is sent", low=2, high=65536,
                              only_if="ldp!=off")
    prompt: str = setting("full", "what is tuned: full: prompts and an encoder of item rows; light: prompts alone, "
                          "added; context: full without item rows; ids: full without prompts",
                          choices=("full", "light", "context", "ids"))
    prompts: int = setting(1024, "context prompts", low=1, only_if="prompt!=ids")
    prompt_heads: int = setting(4, "heads of the attention over prompts, a divisor of dim", low=1,
                                only_if="prompt!=ids")
    frozen_dropout: bool = setting(True, "the encoder of texts, frozen while prompts are tuned, has its dropout there")


class PromptedModule(DomainModule):
    """A recommender of texts' codes, and what is tuned over it. ``content``: the recommender, whose ``code_table``
    domains share; ``received``, ``gradient``: that table before the epoch, and the sum of its gradients since;
    ``tallied``: of how many batches."""

    def __init__(self, settings: PFCRSettings, sizes, content: CosineModule, n_items: int):
        """``sizes``: the backbone's settings. Raises UserError if ``prompt_heads`` does not divide ``dim``."""
        super().__init__()
        if settings.prompt != "ids" and sizes.dim % settings.prompt_heads:
            raise UserError(f"setting 'prompt_heads': found {settings.prompt_heads}, accepted: a divisor of dim, which "
                            f"is {sizes.dim}.")
        d, self.settings, self.content = sizes.dim, settings, content
        self.rows = tuple(f"content.{name}" for name in content.rows)
        self.register_buffer("received", torch.zeros_like(content.code_table))
        self.register_buffer("gradient", torch.zeros_like(content.code_table))
        self.register_buffer("tallied", torch.zeros((), dtype=torch.int64))
        self._listening = content.code_table.register_hook(self._tally)
        if settings.prompt != "ids":
            self.prompts = nn.Parameter(nn.init.xavier_uniform_(torch.empty(settings.prompts, d)))
            self.attention = nn.MultiheadAttention(d, settings.prompt_heads)
        if settings.prompt in ("full", "ids"):
            self.rows += ("items",)
            self.items = nn.Parameter(torch.randn(n_items, d))
            self.encoder = TransformerEncoder(sizes)
            for part in self.encoder.modules():
                if isinstance(part, nn.Linear):
                    part.reset_parameters()  # the released code leaves PyTorch's start here
        if settings.prompt != "light":
            self.norm, self.drop = nn.LayerNorm(d, eps=1e-12), nn.Dropout(sizes.dropout)
            self.joint = nn.Linear(d * (3 if settings.prompt == "full" else 2), d)

    def _apply(self, *args, **kwargs):
        """As for any module; on another device the table is another tensor, to which hooks do not move along."""
        super()._apply(*args, **kwargs)
        self._listening.remove()
        self._listening = self.content.code_table.register_hook(self._tally)
        return self

    def _tally(self, gradient: Tensor) -> None:
        """Before each step of the optimiser: adds the code table's gradient to the epoch's."""
        if self.stage != FEDERATED:
            return
        if not self.tallied:
            self.received.copy_(self.content.code_table.detach())
            self.gradient.zero_()
        self.gradient += gradient
        self.tallied += 1

    def scores(self, batch):
        if self.stage != PROMPTED:
            return self.content.scores(batch)
        self.content.train(self.training and self.settings.frozen_dropout)
        vectors = self.content.vectors()
        return cosines(self._prompted(batch, vectors), vectors) / self.content.temperature

    def item_vectors(self):
        return self.content.vectors()

    def _prompted(self, batch: Histories, vectors: Tensor) -> Tensor:
        """What users are looking for, (B, d)."""
        content = self.content.represent(batch, vectors)
        parts = [content]
        if self.settings.prompt in ("full", "ids"):
            parts.insert(0, by_length(batch, self._of_rows))
        if self.settings.prompt != "ids":
            parts.insert(0, self.attention(content, self.prompts, self.prompts, need_weights=False)[0])
        return sum(parts) if self.settings.prompt == "light" else self.drop(self.norm(self.joint(torch.cat(parts, 1))))

    def _of_rows(self, batch: Histories) -> Tensor:
        """The representation of histories by the items' own rows, with the frozen positions, (B, d)."""
        positions = self.content.history.positions[:batch.items.shape[1]]
        return self.encoder.last(self.drop(self.norm(rows_at(batch.items, self.items) + positions)), batch.lengths)


class PFCR(DomainMethod):
    """Three stages, as the authors run them:

    - fed_pretrain: a domain trains its recommender for an epoch. It sends G_c, the sum over the epoch's batches of the
      gradients of the table E of its codes' vectors, and gets E - lr sum_c w_c G_c, which replaces its own table.
    - single_train: each domain trains the whole recommender alone.
    - prompt_finetune: it tunes prompts, and the table, over the frozen encoder. With h the encoder's output, p what h
      attends to of the prompts P, and r the output of an encoder of the items' own rows, users are looking for
      LN(W [p; r; h] + b); with ``prompt=light`` for h + p. Candidates are the means of codes' vectors throughout.

    The server's step is linear in what domains send. So a domain sends E - lr G_c, made of what it would send of G_c,
    and the server takes the mean.
    """

    name = "pfcr"
    numbers = 2
    title = "codes' vectors learned together, prompts alone"
    reference = ("Guo et al., Prompt-enhanced Federated Content Representation Learning for Cross-domain "
                 "Recommendation, WWW 2024")
    Settings = PFCRSettings
    needs = "codes"
    sent = (TABLE,)
    ambiguities = {"ldp": {"off": "no noise", "unbiased": "paper", "released": "released code"},
                "single_train": {True: "released code, say its authors", False: "paper"},
                "weighting": {"uniform": "FedAvg of domains", "interactions": "released code, which counts samples"},
                "frozen_dropout": {True: "released code", False: "a frozen encoder as it is ranked with"}}

    def stages(self):
        prompts = ("prompts", "attention", "items", "encoder", "norm", "joint")
        return (Stage(FEDERATED, self.settings.federated_rounds, trained=("content",)),
                *([Stage(SINGLE, None, False, ("content",), new_optimiser=True)] if self.settings.single_train else []),
                Stage(PROMPTED, None, False, (TABLE, *prompts), from_best=self.settings.single_train,
                      new_optimiser=True))

    def module(self, backbone, data):
        content = backbone.module(data)
        if getattr(content, "permutation", None) is not None:
            content.permutation = None  # there is no stage that trains it
        return PromptedModule(self.settings, backbone.settings, content, data.n_items)

    def upload(self, module, draw):
        gradient = module.gradient
        module.tallied.zero_()
        if self.settings.ldp != "off":
            key = rng.key(draw.seed, "upload", draw.round)
            if draw.step:  # what is sent in two blocks under one noise would tell more than both budgets
                key = rng.key(key, "block", draw.step)
            gradient = responded(gradient, self.settings, key)
        return {TABLE: module.received - self.settings.server_lr * gradient}

    def privacy(self) -> Iterable[str]:
        s = self.settings
        if s.ldp != "off":
            stated = "" if s.ldp == "unbiased" else f", and not {s.ldp_epsilon:g} as stated"
            spent = budget(_truth_probability(s), s.ldp_levels)
            yield (f"each number of each upload has {spent:.2g}-local differential privacy by itself{stated}; an "
                   f"upload has as many as its table, and budgets add up.")


def responded(gradient: Tensor, s: PFCRSettings, key: int) -> Tensor:
    """What the server takes for numbers that are clipped to [-c, c], rounded to k levels from 0 on and randomised.

    - unbiased: rounded up or down by chance, k-ary randomised response with the whole budget, and decoded so that the
      mean is the clipped number. Levels are 2 c / (k - 1) apart.
    - released: levels are c / k apart, so those of the upper half wrap; a uniform number is added with probability
      (e^eps + 1) / (e^eps + 2), modulo k; decoded as (level - c) c / k, which leaves the zero point where it is not.

    ``key``: names the random numbers (see ``rng.key``).
    """
    c, k, unbiased = s.ldp_clip, s.ldp_levels, s.ldp == "unbiased"
    width = 2 * c / (k - 1) if unbiased else c / k
    level = (gradient.double().clamp(-c, c) + c) / width
    if unbiased:
        index = torch.arange(level.numel(), device=level.device).view(level.shape)
        keys = rng.row_keys(rng.key(key, "rounding"), torch.zeros(1, dtype=torch.int64, device=level.device))
        level = (level + rng.uniform(rng.bits(keys, index))).floor().clamp(max=k - 1)
    reports = randomise(level.round().long() % k, k, _truth_probability(s), rng.key(key, "response"))
    values = estimated(reports, k, _truth_probability(s)) * width - c if unbiased else (reports - c) * width
    return values.to(gradient.dtype)


def _truth_probability(s: PFCRSettings) -> float:
    """The probability of a true report."""
    if s.ldp == "unbiased":
        return kept_share(s.ldp_epsilon, s.ldp_levels)
    return shifted_share((math.exp(s.ldp_epsilon) + 1) / (math.exp(s.ldp_epsilon) + 2), s.ldp_levels)
