"""Rounds on sessions against a straightforward per-client loop: plain averaging and FCUCR on every sequential backbone.

    python benchmarks/sessions.py [--data-dir data] [--repeats 5] [--clients 20] [--threads N]
    python benchmarks/sessions.py --methods ft --backbones miasrec/bce,dmi-gnn/bce,hearint/bce

The second compares backbones of whole sessions with the loss behind the slash: ``bce`` or ``cross_entropy``, whose
rounds take minutes.

The engine's rounds are those of a run with default settings: local training, retrieval, validation, and the test after
a round that is the best so far. Round 1 (which draws the clients' own starts) and the next warm up and do not count.

The loop does what federated research scripts do: for every client it deep-copies the server's model with its whole item
table, makes an Adam over all parameters, trains 4 local epochs on the session with the method's loss, asks the
knowledge base, adds the model to a running sum, and ranks the client's validation item. It is timed on a sample of the
clients in turn with the engine, so that a slow moment of the machine hits both, and scaled to all of them. It has a
process of its own, because the engine changes how memory is allocated, and 1 or --threads threads, whichever is faster
for it.

Beside the time, the table has the processor time of both, which other jobs on the machine disturb less, and both
ratios. The engine's is that of all its threads.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from machine import heading
from peer_rounds.sasrec import DROPOUT, LENGTH, FeedForward, SASRec
from torch import nn
from torch.nn import functional

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels.memory import peak_mib, reset_peak
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover

D, SPAN, HIDDEN, NEIGHBOURS, CAP = 50, 256, 80, 20, 10.0  # the defaults of the plugins


class GRU4Rec(nn.Module):
    def __init__(self, n_items):
        super().__init__()
        self.items, self.drop = nn.Embedding(n_items + 1, D, padding_idx=0), nn.Dropout(DROPOUT)
        self.gru, self.out = nn.GRU(D, D, bias=False, batch_first=True), nn.Linear(D, D)

    def forward(self, rows, times):
        return self.out(self.gru(self.drop(self.items(rows)))[0])


class TiSASRec(nn.Module):
    def __init__(self, n_items):
        super().__init__()
        self.items, self.drop = nn.Embedding(n_items + 1, D, padding_idx=0), nn.Dropout(DROPOUT)
        self.position_keys, self.position_values = nn.Embedding(LENGTH, D), nn.Embedding(LENGTH, D)
        self.interval_keys, self.interval_values = nn.Embedding(SPAN + 1, D), nn.Embedding(SPAN + 1, D)
        self.query, self.key, self.value = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm, self.last, self.feed_forward = nn.LayerNorm(D, eps=1e-8), nn.LayerNorm(D, eps=1e-8), FeedForward(D)
        self.future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def forward(self, rows, times):
        real = (rows > 0)[..., None]
        gaps = (times[:, :, None] - times[:, None]).abs()
        counted = gaps[gaps > 0]
        apart = (gaps / (counted.min() if len(counted) else 1.0)).round().clamp(max=SPAN).long()
        x = self.drop(self.items(rows) * D ** 0.5)
        query = self.norm(x)
        q, keys = self.query(query), self.key(x) + self.drop(self.position_keys.weight)
        scores = q @ keys.transpose(1, 2) + torch.einsum("bid,bijd->bij", q, self.drop(self.interval_keys(apart)))
        attention = self.drop((scores / D ** 0.5).masked_fill(self.future, -torch.inf).softmax(2))
        values = self.value(x) + self.drop(self.position_values.weight)
        timed = torch.einsum("bij,bijd->bid", attention, self.drop(self.interval_values(apart)))
        x = query + attention @ values + timed
        return self.last(self.feed_forward(x) * real)


class MiaSRec(nn.Module):
    """The set of vectors of a session, and the pooled scores of item rows."""

    def __init__(self, n_items, d=100):
        super().__init__()
        self.items, self.positions = nn.Embedding(n_items + 1, d, padding_idx=0), nn.Embedding(LENGTH + 1, d)
        self.repeats, self.norm = nn.Embedding(3, d), nn.LayerNorm(d, eps=1e-12)
        layer = nn.TransformerEncoderLayer(d, 2, 256, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.highway, self.drop = nn.Linear(2 * d, d), nn.Dropout(0.1)

    def forward(self, rows, times):
        rows = rows[:, rows[0] > 0].flip(1)
        x = self.items(rows)
        x = self.drop(torch.cat([x.mean(1, keepdim=True), x], 1))
        tokens = torch.cat([torch.ones_like(rows[:, :1]), rows], 1)
        count = (tokens[:, None] == tokens[:, :, None]).sum(2).clamp(max=2)
        h = self.drop(self.norm(x + self.positions.weight[:x.shape[1]] + self.repeats(count)))
        h = self.encoder(h)
        gate = torch.sigmoid(self.highway(torch.cat([x, h], 2)))
        return functional.normalize(gate * x + (1.0 - gate) * h, dim=2)

    def score(self, vectors, rows):
        rows = functional.dropout(rows, 0.1, self.training)
        cosines = vectors[0] @ functional.normalize(rows, dim=1).T
        return (0.9 * cosines.max(0).values + 0.1 * cosines.mean(0)) / 0.07


class DMIGNN(nn.Module):
    """The interests of a session; ``near`` has an item's neighbours in the client's own clicks, and their counts."""

    def __init__(self, n_items, d=100, interests=3):
        super().__init__()
        self.items, self.positions = nn.Embedding(n_items + 1, d, padding_idx=0), nn.Embedding(LENGTH, d)
        self.edges, self.mix = nn.Parameter(torch.randn(4, d)), nn.Linear(2 * d, d, bias=False)
        self.pattern, self.weights = nn.Linear(d, interests * d), nn.Parameter(torch.randn(interests, d))
        self.first, self.second = nn.Linear(d + 1, d, bias=False), nn.Linear(d, 1, bias=False)
        self.both, self.drop, self.near = nn.Linear(2 * d, d, bias=False), nn.Dropout(0.5), {}

    def forward(self, rows, times):
        clicks = rows[0, rows[0] > 0].flip(0)
        nodes, alias = clicks.unique(return_inverse=True)
        step = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        step[alias[:-1], alias[1:]] = True
        back = step.T
        kinds = (torch.eye(len(nodes), dtype=torch.bool), step & ~back, back & ~step, step & back)
        own = self.items(nodes)
        h = functional.normalize(own, dim=1)
        scores = torch.full((len(nodes), len(nodes)), -9e15)
        for edge, where in zip(self.edges, kinds):
            scores = torch.where(where, functional.leaky_relu((h * edge) @ h.T, 0.2), scores)
        near = [self.near.get(item, ([], []))[:2] for item in nodes.tolist()]
        ids = torch.tensor([[*items, *[0] * (12 - len(items))] for items, _ in near])
        counts = torch.tensor([[*number, *[0] * (12 - len(number))] for _, number in near]).float()
        others = self.items(ids)
        given = torch.cat([self.items(clicks).mean(0) * others, counts.unsqueeze(2)], 2)
        alpha = self.second(functional.leaky_relu(self.first(given), 0.2)).squeeze(2)
        alpha = alpha.masked_fill(ids == 0, -9e15).softmax(1)
        mixed = (alpha.unsqueeze(2) * others).sum(1)
        h = scores.softmax(1) @ h + self.drop(torch.relu(self.both(torch.cat([own, mixed], 1))))
        h = h[alias]
        m = torch.tanh(self.mix(torch.cat([self.positions.weight[:len(h)], h], 1)))
        n = torch.sigmoid(self.pattern(m)).view(len(h), len(self.weights), -1)
        return (torch.einsum("lkd,kd->kl", n, self.weights) @ h).unsqueeze(0)

    def score(self, vectors, rows):
        return (vectors[0] @ functional.normalize(rows, dim=1).T).max(0).values


class HearInt(nn.Module):
    """The vector of a session; ``clusters`` has each item's cluster and centroids' cosines, in training alone."""

    def __init__(self, n_items, d=100):
        super().__init__()
        self.items, self.positions = nn.Embedding(n_items + 1, d, padding_idx=0), nn.Embedding(LENGTH, d)
        self.edges, self.drop = nn.Parameter(torch.randn(2, 4, d)), nn.Dropout(0.1)
        self.query, self.first, self.second, self.soft = (nn.Linear(d, d) for _ in range(4))
        self.graphs, self.mix, self.gate = nn.Linear(2 * d, d), nn.Linear(2 * d, d, bias=False), nn.Linear(2 * d, d)
        self.mean, self.out = nn.Linear(d, d, bias=False), nn.Linear(d, 1, bias=False)
        self.near, self.clusters = {}, None

    def views(self, rows):
        """The positions of the short-term view, and which of the session's items the long-term view shows."""
        nodes = rows.unique()
        if self.clusters is None or not self.training:
            return rows > 0, nodes > 0
        of_item, cosine = self.clusters
        cluster = of_item[rows] * (rows > 0)
        frequent = (torch.bincount(cluster, minlength=len(cosine)) * (torch.arange(len(cosine)) > 0)).argmax()
        hidden = [(cosine[cluster, one] <= 0) & (torch.rand(len(rows)) < 0.4) for one in (cluster[-1], frequent)]
        return (rows > 0) & ~hidden[0], (nodes > 0) & ~hidden[1][:len(nodes)]

    def kinds(self, nodes, clicks):
        """The kinds of edges from item to item on both graphs, -1 where there is none."""
        index = {row: n for n, row in enumerate(nodes.tolist())}
        session, clicked = torch.full((2, len(nodes), len(nodes)), -1)
        for n in range(len(nodes)):
            session[n, n], clicked[n, n] = 0, 3
        for a, b in zip(clicks, clicks[1:]):
            if a != b:
                one, other = index[a], index[b]
                session[one, other], session[other, one] = (3, 3) if session[other, one] in (1, 3) else (1, 2)
                for x, y in ((a, b), (b, a)):
                    items, counts = self.near.get(x, ([], []))
                    if y in items:
                        clicked[index[x], index[y]] = min(3, int(4 * counts[items.index(y)] / sum(counts)))
        return session, clicked

    def forward(self, rows, times):
        rows = rows[0]
        short, shown = self.views(rows)
        nodes, alias = rows.unique(return_inverse=True)
        embedded = self.items(rows)
        x = embedded + self.positions.weight
        scores = x @ functional.selu(self.query(x[-1])) / x.shape[1] ** 0.5
        y = scores.masked_fill(~short, -torch.inf).softmax(0) @ self.drop(x)
        temporal = y + self.drop(self.second(functional.selu(self.first(y))))
        h, outputs = self.items(nodes), []
        kept = nodes > 0
        kinds = torch.full((2, len(nodes), len(nodes)), -1)
        kinds[:, kept.nonzero(), kept.nonzero().T] = torch.stack(self.kinds(nodes[kept], rows[rows > 0].tolist()))
        for vectors, kind in zip(self.edges, kinds):
            scores = torch.full(kind.shape, -9e15)
            for number, vector in enumerate(vectors):
                edges = functional.leaky_relu((h * vector) @ h.T, 0.2)
                scores = torch.where((kind == number) & shown, edges, scores)
            outputs.append((scores.softmax(1) @ h)[alias])
        gate = torch.sigmoid(self.graphs(torch.cat(outputs, 1)))
        h = gate * outputs[0] + (1.0 - gate) * outputs[1]
        mask = shown[alias].float()[:, None]
        mean = (h * mask).sum(0) / mask.sum().clamp(min=1.0)
        mixed = torch.tanh(self.mix(torch.cat([self.positions.weight, h], 1)))
        spatial = (self.out(torch.sigmoid(self.soft(mixed) + self.mean(mean))) * mask * h).sum(0)
        gate = torch.sigmoid(self.gate(torch.cat([temporal, spatial])))
        return functional.normalize(gate * temporal + (1.0 - gate) * spatial, dim=0)[None, None]

    def score(self, vectors, rows):
        return 13.0 * (vectors[0, 0] @ functional.normalize(rows, dim=1).T)


def clusters_of(table: torch.Tensor, count: int = 100, iterations: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Each item's cluster by K-means, and the cosines of centroids."""
    centroids = table[torch.randperm(len(table))[:count]]
    for _ in range(iterations):
        nearest = torch.cdist(table, centroids).argmin(1)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, table)
        centroids = sums / torch.bincount(nearest, minlength=count).clamp(min=1)[:, None]
    unit = functional.normalize(centroids, dim=1)
    return torch.cdist(table, centroids).argmin(1), unit @ unit.T


def clicked_together(sessions: list[list[int]]) -> dict[int, tuple[list[int], list[int]]]:
    """Item to its 12 most frequent neighbours within 3 positions, and how often they are."""
    counts: dict[int, Counter] = {}
    for session in sessions:
        for apart in (1, 2, 3):
            for a, b in zip(session, session[apart:]):
                if a != b:
                    counts.setdefault(a, Counter())[b] += 1
                    counts.setdefault(b, Counter())[a] += 1
    return {item: tuple(map(list, zip(*near.most_common(12)))) for item, near in counts.items()}


class Head(nn.Module):
    """FCUCR's private prediction module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2 * D, HIDDEN), nn.Linear(HIDDEN, D)
        self.norm, self.alpha = nn.BatchNorm1d(HIDDEN, eps=1e-9), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, features, rho):
        x = self.first(torch.cat([features, rho], 2))
        p = torch.sigmoid(self.norm(x.flatten(0, 1))).view_as(x)
        return self.second(p * x + (1.0 - p) * self.alpha * x)


def padded(values: list, length: int = LENGTH) -> list:
    return [0] * (length - len(values)) + values


class Loop:
    """One client after the other.

    Args:
        name: of the backbone.
        fcucr: FCUCR's losses and retrieval; otherwise plain averaging.
    """

    def __init__(self, name: str, fcucr: bool, step):
        self.step, self.fcucr, self.train = step, fcucr, step.sessions["train"]
        name, _, self.loss = name.partition("/")
        self.server = {"sasrec": SASRec, "gru4rec": GRU4Rec, "tisasrec": TiSASRec, "miasrec": MiaSRec,
                       "dmi-gnn": DMIGNN, "hearint": HearInt}[name](step.n_items)
        self.total = {key: torch.zeros_like(value) for key, value in self.server.state_dict().items()}
        self.heads: dict[int, Head] = {}
        self.graphs: dict[int, dict] = {}
        # Once a round; the loop is timed on few clients, so not among what is timed.
        self.clusters = clusters_of(self.server.items.weight.detach()) if name == "hearint" else None

    def session(self, sessions, number: int) -> tuple[list[int], list[float]]:
        rows = slice(int(sessions.start[number]), int(sessions.start[number + 1]))
        return (1 + sessions.items[rows]).tolist()[-LENGTH - 1:], sessions.times[rows].tolist()[-LENGTH - 1:]

    def graph(self, user: int) -> dict[int, tuple[list[int], list[int]]]:
        """The client's own graph of clicks, made once; empty where the model reads none."""
        if not isinstance(self.server, (DMIGNN, HearInt)):
            return {}
        if user not in self.graphs:
            first, count = int(self.train.of_user[user]), int(self.train.count[user])
            self.graphs[user] = clicked_together([self.session(self.train, first + n)[0] for n in range(count)])
        return self.graphs[user]

    def inputs(self, items: list[int], times: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([padded(items[:-1])]), torch.tensor([padded(times[:-1])], dtype=torch.float64)

    def answer(self, query: torch.Tensor, user: int, base: dict) -> torch.Tensor:
        """The fused prototypes of other clients."""
        similarity = functional.cosine_similarity(query.flatten()[None], base["prototypes"])
        near = similarity.masked_fill(base["owner"] == user, -torch.inf).topk(NEIGHBOURS)
        return (near.values.softmax(0) @ base["prototypes"][near.indices]).view_as(query)

    def client(self, user: int, round_: int, base: dict) -> None:
        """Everything that a round does for one client."""
        first, count = int(self.train.of_user[user]), int(self.train.count[user])
        items, times = self.session(self.train, first + round_ % count)
        known = {1 + item for item in self.step.train.of(user).tolist()}
        negatives = []
        while len(negatives) < len(items) - 1:
            drawn = int(torch.randint(1, self.step.n_items + 1, ()))
            if drawn not in known:
                negatives.append(drawn)
        rows, clock = self.inputs(items, times)
        positive, negative = torch.tensor([padded(items[1:])]), torch.tensor([padded(negatives)])
        real = positive > 0

        self.server.near = {}
        if isinstance(self.server, HearInt):
            self.server.clusters = self.clusters
        model = copy.deepcopy(self.server).train()
        model.near = self.graph(user)
        head, rho = None, torch.zeros(1, LENGTH, D)
        parameters = list(model.parameters())
        if self.fcucr:
            head = self.heads.setdefault(user, Head()).train()
            parameters += head.parameters()
            with torch.no_grad():
                teacher = copy.deepcopy(self.server).eval()(rows, clock)
            rho = self.answer(teacher, user, base)
        optimiser = torch.optim.Adam(parameters, lr=0.1, betas=(0.9, 0.98))
        for _ in range(4):
            optimiser.zero_grad()
            features = model(rows, clock)
            outputs = head(features, rho) if head else features
            loss = self.recommendation(model, outputs, positive, negative, real)
            if head:
                distance = functional.mse_loss(features, teacher)
                loss = loss + (loss.detach() / (distance.detach() + 1e-8)).clamp(max=CAP) * distance
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            if head:
                following = self.session(self.train, first + (round_ + 1) % count)
                self.answer(model(*self.inputs(*following)), user, base)
            for key, value in model.state_dict().items():  # what the mean of all clients costs
                self.total[key] += value
            self.rank(user, head, base)

    def recommendation(self, model, outputs, positive, negative, real) -> torch.Tensor:
        """The recommendation loss: of all positions, or of the last item by the loss that the backbone's name says."""
        if self.loss == "cross_entropy":
            return functional.cross_entropy(model.score(outputs, model.items.weight)[None], positive[:, -1])
        if self.loss:
            logits = [model.score(outputs, model.items(rows[0, -1:])) for rows in (positive, negative)]
        else:
            logits = [(outputs * model.items(rows)).sum(2)[real] for rows in (positive, negative)]
        return sum(functional.binary_cross_entropy_with_logits(found, torch.full_like(found, label))
                   for found, label in zip(logits, (1.0, 0.0)))

    def rank(self, user: int, head: Head | None, base: dict) -> None:
        """Validate: the item to find among 100 others."""
        valid = self.step.sessions["valid"]
        if not int(valid.count[user]):
            return
        items, times = self.session(valid, int(valid.of_user[user]))
        self.server.near = self.graph(user)
        features = self.server.eval()(*self.inputs(items, times))
        outputs = head.eval()(features, self.answer(features, user, base)) if head else features
        candidates = torch.cat([torch.tensor(items[-1:]), torch.randint(1, self.step.n_items + 1, (100,))])
        rows = self.server.items(candidates)
        scores = self.server.score(outputs, rows) if self.loss else rows @ outputs[0, -1]
        int((scores[1:] >= scores[0]).sum())


_loop: Loop


def begin_loop(method: str, backbone: str, data_dir: Path) -> None:
    """In the loop's own process."""
    global _loop
    torch.manual_seed(0)
    config = configured("ft", backbone, data_dir)
    _loop = Loop(backbone, method == "fcucr", load_stream(config.source, config.stream).steps[0])


def time_loop(users: list[int], round_: int, base: dict, threads: int) -> tuple[float, float]:
    """Seconds and processor seconds per client of a round, after one that warms up."""
    torch.set_num_threads(threads)
    base = {name: torch.from_numpy(value) for name, value in base.items()}
    _loop.client(users[0], round_, base)
    began, used = time.perf_counter(), time.process_time()
    for user in users:
        _loop.client(user, round_, base)
    return (time.perf_counter() - began) / len(users), (time.process_time() - used) / len(users)


def configured(method: str, backbone: str, data_dir: Path):
    name, _, loss = backbone.partition("/")
    settings = {"patience": 0, **({"loss": loss} if loss else {})}
    return make_config(discover(), method, name, "xing", 0, [("here", settings)], data_dir)


def compare(method: str, backbone: str, args: argparse.Namespace) -> None:
    """Print a line of the table."""
    config = configured(method, backbone, args.data_dir)
    stream = load_stream(config.source, config.stream)
    federation = config.federation(stream)
    federation.check()
    clients = stream.steps[0].n_users
    sample = torch.linspace(0, clients - 1, args.clients * args.repeats).long().view(args.repeats, -1).tolist()
    reset_peak()
    torch.set_num_threads(args.threads)
    train, evaluate, used, each = [], [], [], []
    rounds = run(federation)
    with ProcessPoolExecutor(1, get_context("spawn"), begin_loop, (method, backbone, args.data_dir)) as pool:
        for number in range(2 + args.repeats):
            before = time.process_time()
            progress = next(rounds)
            before = time.process_time() - before
            base = {name: progress.server_state[name].numpy() for name in ("prototypes", "owner")
                    if name in progress.server_state}
            if number == 1:  # small operations can take longer on several threads
                trial = {threads: pool.submit(time_loop, sample[0][:3], 1, base, threads).result()
                         for threads in {1, args.threads}}
                threads = min(trial, key=lambda threads: trial[threads][0])
            elif number > 1:
                train.append(progress.curve[-1]["train_seconds"])
                evaluate.append(progress.curve[-1]["evaluate_seconds"])
                used.append(before)
                each.append(pool.submit(time_loop, sample[number - 2], number, base, threads).result())
    rounds.close()
    together, busy = statistics.median(a + b for a, b in zip(train, evaluate)), statistics.median(used)
    client, client_busy = (statistics.median(times) for times in zip(*each))
    print(f"{method:6}{backbone:22}{1e3 * statistics.median(train):9.0f}{1e3 * statistics.median(evaluate):11.0f}"
          f"{1e3 * together:9.0f}{1e3 * busy:8.0f}{peak_mib():7.0f}"
          f"{threads:9}{1e3 * client:9.1f}{1e3 * client_busy:8.1f}"
          f"{client * clients:9.1f}{client * clients / together:9.0f}x{client_busy * clients / busy:7.0f}x"
          f"{os.getloadavg()[0]:7.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder with xing/xing.inter")
    parser.add_argument("--methods", default="ft,fcucr")
    parser.add_argument("--backbones", default="sasrec,gru4rec,tisasrec")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each; medians are shown")
    parser.add_argument("--clients", type=int, default=20, help="clients of the loop per repeat, others in each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    print(heading(args.threads), flush=True)
    print(f"XING, default settings, medians of {args.repeats} rounds after 2; loop: {args.clients} clients each time")
    print(f"{'':28}{'engine, ms per round':^37}{'peak':>7}{'loop:':>9}{'ms per client':^17}{'s per':>9}"
          f"{'engine is':^18}{'load':>7}")
    print(f"{'':28}{'training':>9}{'evaluation':>11}{'together':>9}{'CPU':>8}{'MiB':>7}{'threads':>9}{'time':>9}"
          f"{'CPU':>8}{'round':>9}{'time':>10}{'CPU':>8}")
    for backbone in args.backbones.split(","):
        for method in args.methods.split(","):
            compare(method, backbone, args)


if __name__ == "__main__":
    main()
