"""CCDR: neighbours in each domain's graph are linked, and graphs are contrasted within and between domains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcl_bench import DomainData, DomainModule, Histories, ModuleBackbone, TextSettings, once_in_ranking, rng, setting
from fedcl_bench.toolbox.clustering import cluster
from fedcl_bench.toolbox.cosine import cosines, rows_at


@dataclass(frozen=True)
class CCDRSettings(TextSettings):
    """The released code's values, where it has them, but for the learning rate, there 1e-5, and its clipping of
    gradients at 5."""

    dim: int = setting(50, "length d of nodes' vectors", low=1)
    categories: int = setting(100, "clusters of all items' texts, which stand for the categories that domains share",
                              low=2, high=10_000)
    neighbours: tuple[int, ...] = setting((25, 10), "of a node each layer looks at so many in training, on average at "
                                          "most", low=1)
    dropout: float = setting(0.3, "share of neighbours' values that are dropped in training", low=0.0, below=1.0)
    link_negatives: int = setting(30, "nodes that a batch's links are told from", low=1)
    intra: str = setting("contrast", "two views of a node in its domain: InfoNCE, or a link like those of neighbours",
                         choices=("contrast", "link"), only_if="intra_weight")
    intra_weight: float = setting(1.0, "of that term", low=0.0, search=(0.1, 1.0))
    category_weight: float = setting(1.0, "of the contrast of categories between domains", low=0.0, search=(0.1, 1.0))
    neighbour_weight: float = setting(1.0, "of the contrast of items of a category between domains", low=0.0,
                                      search=(0.1, 1.0))
    temperature: float = setting(0.1, "of all contrasts", above=0.0, search=(0.05, 0.1, 0.2),
                                 only_if=("intra_weight or category_weight or neighbour_weight",
                                          "intra=contrast or category_weight or neighbour_weight"))


@dataclass(frozen=True)
class Graph:
    """Who is next to whom in a domain: users, then items, then categories."""

    # Of every edge, in both directions, (edges,) each
    nodes: Tensor
    neighbours: Tensor
    degrees: Tensor  # of all nodes, (users + items + categories,)

    def mean(self, vectors: Tensor, samples: int | None = None) -> Tensor:
        """Of each node's neighbours' vectors, (nodes, d), zero where there are none. ``samples``: every neighbour is
        kept with a probability by which they are so many on average, where a node has more; None: all are."""
        nodes, neighbours, counts = self.nodes, self.neighbours, self.degrees
        if samples is not None:
            kept = torch.rand(len(nodes), device=nodes.device) * counts[nodes] < samples
            nodes, neighbours = nodes[kept], neighbours[kept]
            counts = torch.bincount(nodes, minlength=len(counts))
        size = len(counts)
        matrix = torch.sparse_coo_tensor(torch.stack([nodes, neighbours]), counts[nodes].to(vectors.dtype).reciprocal(),
                                         (size, size), check_invariants=False)
        return torch.sparse.mm(matrix, vectors)


def graph_of(data: DomainData, categories: int) -> Graph:
    """Edges of users with the items of their training histories, once each, and of items with their category."""
    items, ends = data.histories
    users = torch.arange(data.n_users, device=items.device).repeat_interleave(ends.diff())
    linked = torch.stack([users, items + data.n_users]).unique(dim=1)
    of_items = data.codes[:, 0].to(items.device)
    known = (of_items >= 0).nonzero().flatten()
    belongs = torch.stack([known + data.n_users, of_items[known] + data.n_users + data.n_items])
    edges = torch.cat([linked, linked.flip(0), belongs, belongs.flip(0)], 1)
    edges = edges[:, edges[0].argsort(stable=True)]
    degrees = torch.bincount(edges[0], minlength=data.n_users + data.n_items + categories)
    return Graph(edges[0], edges[1], degrees)


@dataclass(frozen=True)
class View:
    """Representations of a domain's items (M, d) and categories (K, d)."""

    items: Tensor
    categories: Tensor


def link_loss(ones: Tensor, others: Tensor, candidates: Tensor) -> Tensor:
    """Neighbours' similarity: cross-entropy of sigmoids of inner products, the mean over the B links. ``ones``,
    ``others``: the two ends of each link, (B, d); ``candidates``: nodes that all of them are told from, (n, d)."""
    linked, apart = (ones * others).sum(1), ones @ candidates.T
    return (F.softplus(-linked) + F.softplus(apart).sum(1)).mean()


def contrast(ones: Tensor, others: Tensor, temperature: float, excluded: Tensor | None = None) -> Tensor:
    """InfoNCE by cosines: of each of n rows its partner among the others, the mean. ``excluded``: pairs of a row and
    another's partner that are no negatives, bool (n, n)."""
    logits = cosines(ones, others) / temperature
    if excluded is not None:
        logits = logits.masked_fill(excluded, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(ones), device=ones.device))


class CCDRModule(DomainModule):
    """A graph of users, items and categories, whose layers average neighbours; users have no vectors of their own. A
    user is the mean of its history's items, and items are ranked by inner products with that."""

    rows = ("items",)

    def __init__(self, s: CCDRSettings, data: DomainData):
        super().__init__()
        self.s, self.n_users = s, data.n_users
        self.categories = nn.Parameter(torch.empty(s.categories, s.dim))
        self.items = nn.Parameter(torch.empty(data.n_items, s.dim))
        for table in (self.categories, self.items):
            nn.init.normal_(table, std=s.dim ** -0.5)
        graph = graph_of(data, s.categories)
        for name in ("nodes", "neighbours", "degrees"):
            self.register_buffer(name, getattr(graph, name), persistent=False)
        self.register_buffer("category", data.codes[:, 0], persistent=False)

    @once_in_ranking
    def view(self) -> View:
        """What the layers make of items and categories: the mean of their inputs and of all layers. In training each
        layer looks at a sample of neighbours, so that two views differ."""
        graph, s = Graph(self.nodes, self.neighbours, self.degrees), self.s
        start = torch.cat([self.items.new_zeros(self.n_users, s.dim), self.items, self.categories])
        users = self.nodes < self.n_users  # a user begins as the mean of its items
        first = Graph(self.nodes[users], self.neighbours[users], self.degrees)
        vectors = start + first.mean(start)
        total = vectors
        for count in s.neighbours:
            vectors = F.dropout(graph.mean(vectors, count if self.training else None), s.dropout, self.training)
            total = total + vectors
        total = total[self.n_users:] / (1 + len(s.neighbours))
        return View(*total.split([len(self.items), s.categories]))

    def users(self, view: View, batch: Histories) -> Tensor:
        """(B, d), the mean of each history's items."""
        vectors = rows_at(batch.items, view.items) * batch.real.unsqueeze(2)
        return vectors.sum(1) / batch.lengths.unsqueeze(1)

    def scores(self, batch: Histories) -> Tensor:
        view = self.view()
        return self.users(view, batch) @ view.items.T

    def loss(self, batch: Histories, targets: Tensor) -> Tensor:
        return self.within(self.view(), batch, targets)

    def within(self, view: View, batch: Histories, targets: Tensor) -> Tensor:
        """Links of a batch's users and next items, and two views of these items, both in the domain. Candidates are
        drawn for the whole batch with probabilities proportional to degree^.75."""
        chances = self.degrees[self.n_users:self.n_users + len(self.items)].to(view.items.dtype) ** 0.75
        drawn = torch.multinomial(chances, self.s.link_negatives, replacement=True)
        loss = link_loss(self.users(view, batch), view.items[targets], view.items[drawn])
        if self.s.intra_weight:
            once = targets.unique()
            ones, others = view.items[once], self.view().items
            term = contrast(ones, others[once], self.s.temperature) if self.s.intra == "contrast" else \
                link_loss(ones, others[once], others[drawn])
            loss = loss + self.s.intra_weight * term
        return loss

    def of_category(self, categories: Tensor) -> Tensor:
        """An item of each given category (n,), drawn; each must have one."""
        order = self.category.argsort(stable=True)
        counts = torch.bincount(self.category + 1, minlength=self.s.categories + 1)
        ends = counts.cumsum(0)
        place = (torch.rand(len(categories), device=order.device) * counts[categories + 1]).long()
        return order[ends[categories] + place]

    @property
    def has_category(self) -> Tensor:
        """Which categories have an item, bool (K,)."""
        return self.degrees[self.n_users + len(self.items):] > 0


def between(modules: Sequence[CCDRModule], views: Sequence[View], targets: Sequence[Tensor]) -> Tensor:
    """The terms across two domains: a category in one and in the other, and items of one category in both. Each is
    InfoNCE from either domain to the other, the mean of both."""
    s, loss = modules[0].s, views[0].items.new_zeros(())
    shared = (modules[0].has_category & modules[1].has_category).nonzero().flatten()
    for a, b in ((0, 1), (1, 0)):
        if s.category_weight and len(shared) > 1:
            loss = loss + s.category_weight / 2 * contrast(views[a].categories[shared], views[b].categories[shared],
                                                           s.temperature)
        if s.neighbour_weight:
            items = targets[a].unique()
            of_items = modules[a].category[items]
            items = items[torch.isin(of_items, shared)]
            of_items = modules[a].category[items]
            if len(of_items.unique()) > 1:
                alike = (of_items.unsqueeze(1) == of_items) & ~torch.eye(len(items), dtype=torch.bool,
                                                                        device=items.device)
                partners = views[b].items[modules[b].of_category(of_items)]
                loss = loss + s.neighbour_weight / 2 * contrast(views[a].items[items], partners, s.temperature, alike)
    return loss


class CCDR(ModuleBackbone):
    """CCDR without its alignment of users, whom domains do not share, and by averages in place of attention."""

    name = "ccdr"
    numbers = 1
    title = "contrasts of graphs within and between domains (re-implementation)"
    reference = "Xie et al., Contrastive Cross-domain Recommendation in Matching, KDD 2022"
    Settings = CCDRSettings
    needs_features = True
    topologies = ("central",)
    central_defaults = {"optimiser": "adam", "adam_beta2": 0.999, "batch_size": 1000}
    ambiguities = {"intra": {"contrast": "paper", "link": "released code"}}

    def prepared(self, domains):
        """Categories are clusters of all domains' texts; items without text have none (-1)."""
        texts = [data.features.double().mean(1) for data in domains]
        told = [each.abs().sum(1) > 0 for each in texts]
        points = F.normalize(torch.cat([each[known] for each, known in zip(texts, told)]), dim=1)
        labels, _ = cluster(points, self.settings.categories, rng.key(0, "categories of texts"))
        codes = []
        for known, part in zip(told, labels.split([int(known.sum()) for known in told])):
            codes.append(torch.full((len(known), 1), -1, dtype=torch.int64, device=known.device))
            codes[-1][known, 0] = part
        return [replace(data, codes=each) for data, each in zip(domains, codes)]

    def module(self, data):
        return CCDRModule(self.settings, data)

    def joint_loss(self, modules, batches, targets):
        """The mean of the domains' own terms by their samples, and that of the terms of all pairs of domains."""
        count, views = sum(map(len, targets)), [module.view() for module in modules]
        loss = sum(module.within(view, batch, wanted) * (len(wanted) / count)
                   for module, view, batch, wanted in zip(modules, views, batches, targets))
        pairs = list(combinations(range(len(modules)), 2))
        for a, b in pairs:
            loss = loss + between([modules[a], modules[b]], [views[a], views[b]], [targets[a], targets[b]]) / len(pairs)
        return loss
