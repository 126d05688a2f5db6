"""RecGURU: one encoder makes users' representations in all domains, which a discriminator cannot tell apart."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcl_bench import DomainData, DomainModule, Histories, ModuleBackbone, ModuleSettings, Stage, setting
from fedcl_bench.toolbox.cosine import rows_at
from fedcl_bench.toolbox.transformer import attended

RECONSTRUCT, ALIGN, RECOMMEND = "reconstruct", "align", "recommend"


@dataclass(frozen=True)
class RecGURUSettings(ModuleSettings):
    """The released code's values, but for lengths of histories (there 100), rounds, and the optimiser before
    recommending (there with warm-up, and at 1e-4 with betas of .5 and .9 against the discriminator)."""

    dim: int = setting(32, "length d of item vectors and representations", low=1)
    layers: int = setting(3, "blocks of the encoder and of each decoder", low=1)
    heads: int = setting(1, "attention heads", low=1)
    head_size: int = setting(32, "length of a head's queries, keys and values", low=1)
    inner_size: int = setting(512, "length of the feed-forward parts' hidden layer", low=1)
    dropout: float = setting(0.5, "share of values that are dropped in training", low=0.0, below=1.0)
    pretrain_rounds: int = setting(2, "rounds of reconstruction alone", low=1)
    align_rounds: int = setting(2, "rounds of reconstruction against the discriminator", low=1)
    adversary: str = setting("wasserstein", "what the discriminator and the encoder make of its outputs",
                             choices=("wasserstein", "cross_entropy"), only_if="adversary_weight")
    adversary_weight: float = setting(1.0, "of both", low=0.0, search=(0.1, 1.0))
    penalty: float = setting(0.1, "weight of the discriminator's gradient penalty", low=0.0, only_if="adversary_weight")
    reconstruction_negatives: int = setting(30, "items that each one of a history is told from", low=1)
    bpr_negatives: int = setting(5, "items that the next one is ranked above", low=1)
    fixed_encoder: bool = setting(True, "recommending does not train the encoder")
    tuning_reconstructs: bool = setting(True, "reconstruction goes on while recommending is trained")
    shared_decoder: bool = setting(False, "one decoder reconstructs histories of all domains")


class Attention(nn.Module):
    """LN(x + out(softmax(q k / sqrt(head_size)) v)), with dropout of the attention alone."""

    def __init__(self, s: RecGURUSettings):
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.query, self.key, self.value = (nn.Linear(s.dim, s.heads * s.head_size) for _ in range(3))
        self.out, self.norm = nn.Linear(s.heads * s.head_size, s.dim), nn.LayerNorm(s.dim, eps=1e-8)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """(B, L, d), where position i looks at the positions ``seen`` (B, 1, 1 or L, L)."""
        mixed = attended(self.query(x), self.key(x), self.value(x), self.heads, self.dropout if self.training else 0.0,
                         attn_mask=seen)
        return self.norm(x + self.out(mixed))


class Block(nn.Module):
    """Attention, in decoders that to the user's representation, and a feed-forward part with GELU, each with LN. The
    released decoder attends to as many copies of the representation as there are positions. Whatever the weights, that
    gives the representation's value, so queries and keys are not made."""

    def __init__(self, s: RecGURUSettings, decodes: bool):
        super().__init__()
        self.attention, self.dropout = Attention(s), s.dropout
        if decodes:
            self.value = nn.Linear(s.dim, s.heads * s.head_size)
            self.out, self.user_norm = nn.Linear(s.heads * s.head_size, s.dim), nn.LayerNorm(s.dim, eps=1e-8)
        self.inner, self.outer = nn.Linear(s.dim, s.inner_size), nn.Linear(s.inner_size, s.dim)
        self.norm = nn.LayerNorm(s.dim, eps=1e-8)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, seen: Tensor, user: Tensor | None = None) -> Tensor:
        """(B, L, d); ``user`` (B, d) is what a decoder looks at."""
        x = self.attention(x, seen)
        if user is not None:
            x = self.user_norm(x + self.out(self.value(user)).unsqueeze(1))
        hidden = F.gelu(self._drop(self.inner(x)), approximate="tanh")
        return self.norm(x + self._drop(self.outer(hidden)))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, s: RecGURUSettings, decodes: bool):
        super().__init__()
        self.blocks = nn.ModuleList(Block(s, decodes) for _ in range(s.layers))

    def forward(self, x: Tensor, seen: Tensor, user: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, seen, user)
        return x


class Discriminator(nn.Sequential):
    """A logit of users' representations, (B, d), for each domain but the first, (B, domains - 1)."""

    def __init__(self, dim: int, domains: int):
        sizes, layers = (dim, 5 * dim, 10 * dim, 5 * dim), []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(0.2)]
        super().__init__(*layers, nn.Linear(sizes[-1], max(1, domains - 1)))


def sinusoids(length: int, dim: int) -> Tensor:
    """The fixed position table of Vaswani et al. (2017), (length, d)."""
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000) / dim))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :dim]


def gradient_penalty(discriminator: nn.Module, ones: Tensor, others: Tensor, number: int) -> Tensor:
    """The mean of (||gradient of a logit|| - 1)^2 at points between pairs of the two (WGAN-GP)."""
    count = min(len(ones), len(others))
    share = torch.rand(count, 1, dtype=ones.dtype, device=ones.device)
    between = (share * ones[:count] + (1 - share) * others[:count]).detach().requires_grad_()
    gradient, = torch.autograd.grad(discriminator(between)[:, number].sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def adversarial(s: RecGURUSettings, discriminator: nn.Module, ones: Tensor, others: Tensor, number: int) -> Tensor:
    """What the discriminator minimises about two domains' users (B, d), plus what the encoder does. The discriminator
    sees users detached, and the encoder is judged by a discriminator whose parameters are: the gradient of the sum is
    that of both players. ``number``: of the logit, which is to be high for the first domain's users and low for the
    other's."""
    fixed = {name: value.detach() for name, value in discriminator.named_parameters()}
    told = [discriminator(users.detach())[:, number] for users in (ones, others)]
    judged = [torch.func.functional_call(discriminator, fixed, (users,))[:, number] for users in (ones, others)]
    if s.adversary == "wasserstein":
        loss = told[1].mean() - told[0].mean() + judged[0].mean() - judged[1].mean()
    else:
        loss = F.softplus(-told[0]).mean() + F.softplus(told[1]).mean() \
            + F.softplus(judged[0]).mean() + F.softplus(-judged[1]).mean()
    return loss + s.penalty * gradient_penalty(discriminator, ones.detach(), others.detach(), number)


class RecGURUModule(DomainModule):
    """An encoder of whole histories, and decoders that make of its result the history or the next item. A decoder's
    inputs are a mark for the beginning and the history; its output at a position is compared with item vectors. What
    pooled domains have apart, but for items, is of all domains in every module: ``number`` says its own."""

    rows = ("items",)

    def __init__(self, s: RecGURUSettings, data: DomainData):
        super().__init__()
        self.s, self.number = s, data.number
        self.encoder = Stack(s, decodes=False)
        self.decoders = nn.ModuleList(Stack(s, decodes=True) for _ in range(1 if s.shared_decoder else data.count))
        self.recommenders = nn.ModuleList(Stack(s, decodes=True) for _ in range(data.count))
        self.discriminator = Discriminator(s.dim, data.count)
        self.marks = nn.Parameter(torch.randn(data.count, 2, s.dim))  # a beginning and an end per domain
        self.items = nn.Parameter(torch.randn(data.n_items, s.dim))
        self.register_buffer("positions", sinusoids(s.max_length + 1, s.dim), persistent=False)
        for name, values in zip(("history", "bounds"), data.histories):
            self.register_buffer(name, values, persistent=False)
        for other, pairs in data.known.items():
            twin = torch.full((data.n_users,), -1, device=pairs.device)
            self.register_buffer(f"twin{other}", twin.index_put((pairs[:, 0],), pairs[:, 1]), persistent=False)

    def _placed(self, vectors: Tensor, real: Tensor) -> Tensor:
        """Vectors (B, L, d) with their positions, zero at padding, with dropout."""
        x = (vectors + self.positions[:vectors.shape[1]]) * real.unsqueeze(2)
        return F.dropout(x, self.s.dropout, self.training)

    def users(self, batch: Histories) -> Tensor:
        """The generalised user representations (B, d): what the encoder makes of the mark after the last item."""
        places = torch.arange(batch.items.shape[1] + 1, device=batch.items.device)
        end = (places == batch.lengths.unsqueeze(1)).unsqueeze(2)
        vectors = F.pad(rows_at(batch.items, self.items), (0, 0, 0, 1)).where(~end, self.marks[self.number, 1])
        real = places <= batch.lengths.unsqueeze(1)
        x = self.encoder(self._placed(vectors, real), real[:, None, None])
        return x[torch.arange(len(x), device=x.device), batch.lengths]

    def histories(self, users: Tensor) -> Histories:
        """The whole training histories of some users, their last ``max_length`` items."""
        lengths = (self.bounds[users + 1] - self.bounds[users]).clamp(max=self.s.max_length)
        places = torch.arange(int(lengths.max()), device=users.device)
        at = (self.bounds[users + 1] - lengths).unsqueeze(1) + places
        real = places < lengths.unsqueeze(1)
        return Histories(self.history[at.where(real, 0)].where(real, -1), lengths, users)

    def twins(self, users: Tensor, other: RecGURUModule) -> tuple[Tensor, Tensor]:
        """Those of some users who are known in another domain and have a history there, and who they are there; nobody
        without ``known_users``."""
        if not hasattr(self, f"twin{other.number}"):
            return users[:0], users[:0]
        users = users.unique()
        twins = getattr(self, f"twin{other.number}")[users]
        there = (twins >= 0) & (other.bounds[twins + 1] > other.bounds[twins])  # -1 is nobody, whose row is any
        return users[there], twins[there]

    def decoded(self, decoder: Stack, batch: Histories, users: Tensor) -> Tensor:
        """(B, L + 1, d): position i stands for the item after the first i."""
        first = self.marks[self.number, 0].expand(len(users), 1, -1)
        vectors = torch.cat([first, rows_at(batch.items, self.items)], 1)
        real = F.pad(batch.real, (1, 0), value=True)
        length = real.shape[1]
        before = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
        return decoder(self._placed(vectors, real), real[:, None, None] & before, users)

    def reconstruction(self, batch: Histories, users: Tensor) -> Tensor:
        """Cross-entropy of each item of the histories among drawn ones, the mean over all items."""
        decoder = self.decoders[0 if self.s.shared_decoder else self.number]
        vectors = self.decoded(decoder, batch, users)[:, :-1][batch.real]
        drawn = torch.randint(len(self.items), (len(vectors), self.s.reconstruction_negatives), device=vectors.device)
        candidates = torch.cat([batch.items[batch.real].unsqueeze(1), drawn], 1)
        logits = (self.items[candidates] @ vectors.unsqueeze(2)).squeeze(2)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))

    def _next(self, batch: Histories, users: Tensor) -> Tensor:
        x = self.decoded(self.recommenders[self.number], batch, users)
        return x[torch.arange(len(x), device=x.device), batch.lengths]

    def recommendation(self, batch: Histories, targets: Tensor, users: Tensor) -> Tensor:
        """-log sigmoid(score of the next item - mean score of drawn ones), the mean over samples."""
        vectors = self._next(batch, users.detach() if self.s.fixed_encoder else users)
        drawn = torch.randint(len(self.items), (len(vectors), self.s.bpr_negatives), device=vectors.device)
        difference = self.items[targets] - self.items[drawn].mean(1)
        return F.softplus(-(difference * vectors).sum(1)).mean()

    def scores(self, batch: Histories) -> Tensor:
        return self._next(batch, self.users(batch)) @ self.items.T

    def loss(self, batch: Histories, targets: Tensor) -> Tensor:
        return self.of_stage(batch, targets, self.users(batch))

    def of_stage(self, batch: Histories, targets: Tensor, users: Tensor) -> Tensor:
        """What the domain minimises by itself in its stage."""
        if self.stage != RECOMMEND:
            return self.reconstruction(batch, users)
        loss = self.recommendation(batch, targets, users)
        return loss + self.reconstruction(batch, users) if self.s.tuning_reconstructs else loss


def pulled(module: RecGURUModule, other: RecGURUModule, users: Tensor) -> Tensor:
    """The mean square of what differs between the representations of one user in two domains, made of the user's whole
    training histories; 0 if none of the users is known in the other domain. ``users``: of the one domain; each counts
    once."""
    ones, twins = module.twins(users, other)
    if not len(ones):
        return module.marks.new_zeros(())
    return F.mse_loss(module.users(module.histories(ones)), other.users(other.histories(twins)))


class RecGURU(ModuleBackbone):
    """RecGURU; its pull between representations of the same user acts with ``known_users`` alone, which FFMSR's
    comparison has not."""

    name = "recguru"
    numbers = 1
    title = "generalised user representations by an adversarial autoencoder"
    reference = ("Li et al., RecGURU: Adversarial Learning of Generalized User Representations for Cross-Domain "
                 "Recommendation, WSDM 2022")
    Settings = RecGURUSettings
    topologies = ("central",)
    uses_known_users = True
    central_defaults = {"optimiser": "adam", "adam_beta2": 0.98}
    ambiguities = {
        "adversary": {"wasserstein": "released main program", "cross_entropy": "its other variant"},
        "tuning_reconstructs": {True: "released main program", False: "its other variant"},
        "fixed_encoder": {True: "released code's default", False: "the code's other value"},
        "shared_decoder": {False: "released code's default", True: "the code's other value"},
    }

    def stages(self):
        s = self.settings
        return (Stage(RECONSTRUCT, rounds=s.pretrain_rounds), Stage(ALIGN, rounds=s.align_rounds, new_optimiser=True),
                Stage(RECOMMEND, new_optimiser=True))

    def prepared(self, domains):
        return [replace(data, number=number, count=len(domains)) for number, data in enumerate(domains)]

    def module(self, data):
        return RecGURUModule(self.settings, data)

    def joint_loss(self, modules, batches, targets):
        """The sum of the domains' own losses, each weighted by its samples; in ``align`` the adversarial ones too, and
        the pull between users who are known in two domains. Users of the first domain are told from those of every
        other one."""
        s, count = self.settings, sum(map(len, targets))
        users = [module.users(batch) for module, batch in zip(modules, batches)]
        loss = sum(module.of_stage(batch, wanted, own) * (len(modules) * len(wanted) / count)
                   for module, batch, wanted, own in zip(modules, batches, targets, users))
        if modules[0].stage == ALIGN and s.adversary_weight and modules[0].number == 0:
            for module, others in zip(modules[1:], users[1:]):
                loss = loss + s.adversary_weight * adversarial(s, modules[0].discriminator, users[0], others,
                                                               module.number - 1)
        if modules[0].stage == ALIGN:
            for one, other in itertools.combinations(range(len(modules)), 2):
                loss = loss + pulled(modules[one], modules[other], batches[one].users)
        return loss
