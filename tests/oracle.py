"""The oracle: federated rounds as the papers write them, one client at a time, on full tables.

It deep-copies an ordinary torch.nn model per client (RecBole's BPR for FedMF), trains it with torch.optim on samples
listed in Python, and averages whole tables. It shares no code with the engine; even the random numbers are an
implementation of its own, on Python integers.
"""

from __future__ import annotations

import copy
import hashlib
import math

import torch
from recbole.model.general_recommender import BPR
from torch import nn

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream(seed, purpose, *counters):
    """The i-th number of the stream named by seed, purpose and counters, as a function of i."""
    state = mix((seed + GAMMA) & MASK)
    for c in (int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little"), *counters):
        state = mix((state + GAMMA * ((c + 1) & MASK)) & MASK)
    return lambda i: mix((state + GAMMA * (i + 1)) & MASK)


class Sizes:
    def __init__(self, users, items):
        self.sizes = {"user_id": users, "item_id": items}

    def num(self, field):
        return self.sizes[field]


def recbole_bpr(users, items, dim, dtype=torch.float32):
    config = {"USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "NEG_PREFIX": "neg_", "device": "cpu",
              "embedding_size": dim}
    return BPR(config, Sizes(users, items)).to(dtype)


class Client(nn.Module):
    """One client's model; ``forward`` gives the logits of a list of items."""

    pairwise = False
    groups = None  # names by update, in order; None: one joint update
    weight_decay = 0.0

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def extra(self, items, round):
        """The backbone's own terms on a batch."""
        return 0.0


def shared_start(sizes):
    return nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))


class FedMF(Client):
    def __init__(self, settings, items):
        super().__init__(settings)
        model = recbole_bpr(1, items, settings.dim)
        self.user_embedding, self.item_embedding, self.bpr = model.user_embedding, model.item_embedding, [model]

    def __deepcopy__(self, memo):
        twin = FedMF(self.settings, self.item_embedding.num_embeddings).to(self.item_embedding.weight.dtype)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, items):
        """RecBole's own predict."""
        items = torch.as_tensor(items, dtype=torch.long)
        return self.bpr[0].predict({"user_id": torch.zeros(len(items), dtype=torch.long), "item_id": items})

    def rate(self, name, n_items, round, batch):
        times = n_items if self.settings.item_lr == "times_items" else 1
        return self.settings.lr * (times if "item" in name else 1)


class FedNCF(Client):
    def __init__(self, settings, items):
        super().__init__(settings)
        self.user_embedding, self.item_embedding = nn.Embedding(1, settings.dim), nn.Embedding(items, settings.dim)
        self.predictor = shared_start([2 * settings.dim, *settings.hidden, 1])

    def forward(self, items):
        item = self.item_embedding(torch.as_tensor(items, dtype=torch.long))
        x = torch.cat([self.user_embedding.weight.expand(len(item), -1), item], 1)
        for k, layer in enumerate(self.predictor):
            x = layer(x if k == 0 else torch.relu(x))
        return x.flatten()

    def rate(self, name, n_items, round, batch):
        s = self.settings
        return s.lr * (1 if "predictor" in name else s.lr_eta * (n_items if "item" in name else 1))


class PFedRec(Client):
    groups = [["score.weight", "score.bias"], ["item_embedding.weight"]]

    def __init__(self, settings, items):
        super().__init__(settings)
        self.item_embedding, self.score = nn.Embedding(items, settings.dim), nn.Linear(settings.dim, 1)

    def forward(self, items):
        return self.score(self.item_embedding(torch.as_tensor(items, dtype=torch.long))).flatten()

    def rate(self, name, n_items, round, batch):
        return self.settings.lr * (self.settings.lr_eta * n_items if "item" in name else 1)


class FedRAP(Client):
    def __init__(self, settings, items):
        super().__init__(settings)
        self.item_commonality, self.item_personality = (nn.Embedding(items, settings.dim) for _ in range(2))
        self.score, self.weight_decay = nn.Linear(settings.dim, 1), settings.l2

    def forward(self, items):
        items = torch.as_tensor(items, dtype=torch.long)
        return self.score(self.item_personality(items) + self.item_commonality(items)).flatten()

    def extra(self, items, round):
        items = torch.as_tensor(items, dtype=torch.long)
        c, d = self.item_commonality(items), self.item_personality(items)
        growth = {"fixed": 1.0, "tanh": math.tanh(round.round / 10)}[self.settings.schedule]
        size = c.abs() if self.settings.sparsity == "l1" else c.square()
        return growth * (self.settings.mu * size.mean() - self.settings.lambda_apart * nn.MSELoss()(d, c))

    def rate(self, name, n_items, round, batch):
        return (self.settings.lr if "score" in name else self.settings.lr_items) * 0.97 ** round * 0.95 ** batch


class GPFedRec(FedNCF):
    target = None

    def extra(self, items, round):
        return self.settings.reg * nn.MSELoss()(self.item_embedding.weight, self.target)

    def rate(self, name, n_items, round, batch):
        s = self.settings
        if "predictor" in name:
            return s.lr
        return s.lr * s.lr_eta * (n_items if "item" in name else 1) - (s.lr if s.lr_offset == "code" else 0)


class BiasMF(Client):
    pairwise = True

    def __init__(self, settings, items):
        super().__init__(settings)
        self.user_embedding, self.item_embedding = nn.Embedding(1, settings.dim), nn.Embedding(items, settings.dim)
        self.user_bias, self.item_bias = nn.Embedding(1, 1), nn.Embedding(items, 1)
        self.global_bias = nn.Parameter(torch.zeros(1))

    def forward(self, items):
        items = torch.as_tensor(items, dtype=torch.long)
        return ((self.item_embedding(items) * self.user_embedding.weight).sum(1) + self.item_bias(items).flatten()
                + self.user_bias.weight.flatten() + self.global_bias)

    def rate(self, name, n_items, round, batch):
        return self.settings.lr


class NCF(BiasMF):
    def __init__(self, settings, items):
        Client.__init__(self, settings)
        d = settings.dim
        self.user_gmf, self.user_mlp = nn.Embedding(1, d), nn.Embedding(1, d)
        self.item_gmf, self.item_mlp = nn.Embedding(items, d), nn.Embedding(items, d)
        self.mlp, self.output = shared_start([2 * d, *settings.hidden]), nn.Linear(d + settings.hidden[-1], 1)

    def forward(self, items):
        items = torch.as_tensor(items, dtype=torch.long)
        x = torch.cat([self.user_mlp.weight.expand(len(items), -1), self.item_mlp(items)], 1)
        for layer in self.mlp:
            x = torch.relu(layer(x))
        score = self.output(torch.cat([self.user_gmf.weight * self.item_gmf(items), x], 1)).flatten()
        return torch.sigmoid(score) if self.settings.output == "sigmoid" else score


MODELS = {"fedmf": FedMF, "fedncf": FedNCF, "pfedrec": PFedRec, "fedrap": FedRAP, "gpfedrec": GPFedRec,
          "biasmf": BiasMF, "ncf": NCF}
# Private tables with a row per item, by backbone.
PERSONAL = {"item_personality.weight"}


def load(name, settings, model, user, dtype, public=None):
    """One client's model with the parameters that a snapshot holds for it (``public`` overrides the item tables)."""
    public = public or model.public
    client = MODELS[name](settings, len(next(iter(public.values())))).to(dtype)
    with torch.no_grad():
        for key, parameter in client.named_parameters():
            value = public.get(key, model.dense.get(key))
            if value is None:
                value = model.private[key][user]
            parameter.copy_(value.reshape(parameter.shape))
    return client


class Round:
    """Everything that fixes one round: see ``tests/test_oracle.py`` for the values."""

    def __init__(self, *, seed, step, round, backbone, settings, optimiser, batch_size, epochs, negatives,
                 tolerance=0.0, weighted=False, frozen=()):
        self.seed, self.step, self.round, self.backbone, self.settings = seed, step, round, backbone, settings
        self.optimiser, self.batch_size, self.epochs, self.negatives = optimiser, batch_size, epochs, negatives
        self.tolerance, self.weighted, self.frozen = tolerance, weighted, frozen

    def samples(self, user, positives, n_items, pairwise):
        others = sorted(set(range(n_items)) - set(positives))
        number = stream(self.seed, "negatives", self.step, self.round, user)
        drawn = [others[((number(j) >> 32) * len(others)) >> 32] for j in range(self.negatives * len(positives))]
        if pairwise:
            return [(positives[j // self.negatives], item) for j, item in enumerate(drawn)]
        return [(item, 1.0) for item in positives] + [(item, 0.0) for item in drawn]

    def batch_loss(self, model, some, user, added_loss, passes):
        if model.pairwise:
            good, bad = model([p for p, _ in some]), model([n for _, n in some])
            loss = -nn.functional.logsigmoid(good - bad).mean()
            items = []
        else:
            items = [item for item, _ in some]
            scores = model(items)
            loss = nn.BCEWithLogitsLoss()(scores, torch.tensor([label for _, label in some], dtype=scores.dtype))
        return loss + model.extra(items, self) + added_loss(self, user, model, passes)

    def client(self, user, positives, snapshot, added_loss):
        """Train one client; returns its model."""
        dtype = next(iter(snapshot.public.values())).dtype
        model = copy.deepcopy(load(self.backbone, self.settings, snapshot, user, dtype))
        if self.backbone == "gpfedrec":
            model.target = snapshot.personalised["item_embedding.weight"][user]
        n_items = len(next(iter(snapshot.public.values())))
        samples = self.samples(user, positives, n_items, model.pairwise)
        named = dict(model.named_parameters())
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimiser]
        groups = [[key for key in group if key not in self.frozen] for group in model.groups or [list(named)]]
        optimisers = [kind([{"params": [named[key]], "lr": 0.0, "name": key} for key in group],
                           weight_decay=model.weight_decay) for group in groups if group]
        passes = batch = 0
        before = None
        for epoch in range(self.epochs):
            number = stream(self.seed, "shuffle", self.step, self.round, epoch, user)
            order = sorted(range(len(samples)), key=lambda i: number(i) >> 1)
            losses = 0.0
            for start in range(0, len(samples), self.batch_size):
                some = [samples[i] for i in order[start:start + self.batch_size]]
                for turn, optimiser in enumerate(optimisers):
                    loss = self.batch_loss(model, some, user, added_loss, passes)
                    losses += float(loss.detach()) if turn == 0 else 0.0
                    for group in optimiser.param_groups:
                        group["lr"] = model.rate(group["name"], n_items, self.round, batch)
                    model.zero_grad(set_to_none=False)
                    loss.backward()
                    for parameter in named.values():  # torch.optim skips parameters without a gradient
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
                    optimiser.step()
                    passes += 1
                batch += 1
            if self.tolerance and before is not None and abs(before - losses) / abs(before) < self.tolerance:
                break
            before = losses
        return model

    def run(self, train, snapshot, added_loss):
        """One round of the clients in ``train`` (user to positives): mean of public parameters, all uploads by user,
        and private parameters by user."""
        uploads, private = {}, {}
        for user, positives in train.items():
            values = {key: p.detach()
                      for key, p in self.client(user, positives, snapshot, added_loss).named_parameters()}
            uploads[user] = {key: values[key] for key in (*snapshot.public, *snapshot.dense)}
            private[user] = {key: values[key] for key in snapshot.private}
        weight = {user: len(positives) if self.weighted else 1 for user, positives in train.items()}
        mean = {key: sum(weight[user] * upload[key] for user, upload in uploads.items()) / sum(weight.values())
                for key in (*snapshot.public, *snapshot.dense)}
        return mean, uploads, private


def sizes(updates):
    """The norm of each client's whole update."""
    return {user: math.sqrt(sum(float(change.square().sum()) for change in update.values()))
            for user, update in updates.items()}


def norm_bounded(updates, weight, bound):
    """The mean of updates, by user and parameter, of at most ``bound`` times their median norm."""
    norms = sizes(updates)
    most = bound * sorted(norms.values())[(len(norms) - 1) // 2]
    return {key: sum(weight[user] * min(1.0, most / norms[user]) * update[key] for user, update in updates.items())
            / sum(weight.values()) for key in next(iter(updates.values()))}


def of_senders(updates, tables, middle):
    """Of every number what ``middle`` makes of those who sent it, of item ``tables`` by rows, times their share."""
    result = {}
    for key, like in next(iter(updates.values())).items():
        rows = zip(*(u[key].reshape(len(like), -1).tolist() for u in updates.values()))
        sent = [[row for row in of_clients if key not in tables or any(row)] for of_clients in rows]
        result[key] = torch.tensor([[middle(numbers) * len(senders) / len(updates)
                                     for numbers in zip(*senders)] if senders else [0.0] * like[0].numel()
                                    for senders in sent], dtype=like.dtype).view(like.shape)
    return result


def trimmed_mean(share):
    """The mean of numbers without the largest and the smallest ``share``."""
    def middle(numbers):
        kept = sorted(numbers)[int(share * len(numbers)):len(numbers) - int(share * len(numbers))]
        return sum(kept) / len(kept)
    return middle


def multi_krum(updates, malicious, selected):
    """The mean of the ``selected`` updates that are nearest to all but ``malicious`` and 2 of them."""
    def distance(a, b):
        return sum(float((updates[a][key] - updates[b][key]).square().sum()) for key in updates[a])
    scores = {a: sum(sorted(distance(a, b) for b in updates if b != a)[:len(updates) - malicious - 2]) for a in updates}
    chosen = sorted(updates, key=lambda user: (scores[user], user))[:selected]
    return {key: sum(updates[user][key] for user in chosen) / selected for key in next(iter(updates.values()))}


def server_step(kind, lr, beta1, beta2, tau, sent, mean, memory):
    """A step of the server's optimiser (FedOpt's Algorithm 2, FedAvgM), number by number; ``memory`` is updated."""
    result = []
    for i, (x, y) in enumerate(zip(sent.flatten().tolist(), mean.flatten().tolist())):
        delta, (m, v) = y - x, memory.get(i, (0.0, tau * tau))
        if kind == "momentum":
            m = beta1 * m + delta
            result.append(x + lr * m)
        else:
            m = beta1 * m + (1 - beta1) * delta
            if kind == "adagrad":
                v += delta * delta
            elif kind == "adam":
                v = beta2 * v + (1 - beta2) * delta * delta
            elif v != delta * delta:
                v -= (1 - beta2) * delta * delta * (1 if v > delta * delta else -1)
            result.append(x + lr * m / (math.sqrt(v) + tau))
        memory[i] = m, v
    return torch.tensor(result, dtype=sent.dtype).view_as(sent)


def fold_in(rounds, train, start):
    """Private parameters by name of all users after those in ``train`` (user to positives) have trained theirs alone in
    rounds that freeze the public ones; the others keep those of ``start``."""
    private = {key: table.clone() for key, table in start.private.items()}
    for round in rounds:
        begin = type(start)(start.public, private, start.dense, start.local, start.personalised)
        _, _, trained = round.run(train, begin, nothing)
        for user, values in trained.items():
            for key, value in values.items():
                private[key][user] = value.reshape(private[key][user].shape)
    return private


def graph_server(tables, sign, neighbours, threshold):
    """GPFedRec's server, client by client: (mean table, table of each)."""
    flat = [t.flatten() for t in tables]
    cosine = [[float(a @ b / (a.norm() * b.norm())) for b in flat] for a in flat]
    if sign == "code":
        cosine = [[0.0 if i == j else 1 - c for j, c in enumerate(row)] for i, row in enumerate(cosine)]
    mean = sum(map(sum, cosine)) / len(flat) ** 2
    served = []
    for i, row in enumerate(cosine):
        if neighbours:
            linked = sorted(range(len(row)), key=lambda j: -row[j])[:neighbours]
        else:
            linked = [j for j, c in enumerate(row) if c > mean * threshold] or [i]
        served.append(sum(tables[j] for j in linked) / len(linked))
    return sum(served) / len(served), served


def nothing(round, user, model, passes):
    return 0.0


def reg(old, weight, reduction):
    """``old``: the previous block's snapshot."""
    def added(round, user, model, passes):
        mse, loss = nn.MSELoss(reduction=reduction), 0.0
        for key, parameter in model.named_parameters():
            if key in old.public or key in old.dense:
                anchor = old.public.get(key, old.dense.get(key))
                loss = loss + mse(parameter[:len(anchor)] if key in old.public else parameter, anchor)
            elif user < old.n_users:
                anchor = old.private[key][user]
                now = parameter[:len(anchor)] if key in PERSONAL else parameter.reshape(anchor.shape)
                loss = loss + mse(now, anchor)
        return weight * loss
    return added


def aligned(anchors, weight):
    """IFedRec: the mean squared distance of all item rows to ``anchors``, by table; later items have none."""
    def added(round, user, model, passes):
        named = dict(model.named_parameters())
        rows = torch.cat([named[key][:len(anchor)].flatten(1) for key, anchor in anchors.items()], dim=1)
        return weight * nn.MSELoss()(rows, torch.cat([anchor.flatten(1) for anchor in anchors.values()], dim=1))
    return added


class AttributeNetwork(nn.Sequential):
    """IFedRec's server: two linear layers with a ReLU between them and tanh behind, and an Adam for all rounds."""

    def __init__(self, first, second, lr):
        layers = [nn.Linear(*weight.T.shape, dtype=weight.dtype) for weight, _ in (first, second)]
        super().__init__(layers[0], nn.ReLU(), layers[1], nn.Tanh())
        for layer, (weight, bias) in zip(layers, (first, second)):
            layer.load_state_dict({"weight": weight, "bias": bias})
        self.optimiser = torch.optim.Adam(self.parameters(), lr=lr)

    def fit(self, attributes, rows, steps):
        for _ in range(steps):
            self.optimiser.zero_grad()
            nn.MSELoss()(self(attributes), rows).backward()
            self.optimiser.step()
        return self(attributes).detach()


def proximal(sent, mu):
    """``sent``: the server's snapshot, of which clients have a copy."""
    def added(round, user, model, passes):
        return mu / 2 * sum((parameter - {**sent.public, **sent.dense}[key]).square().sum()
                            for key, parameter in model.named_parameters() if key not in sent.private)
    return added


def distillation(old, weight, n, eps=None, local=False):
    """KD, or F3CRec's adaptive replay if ``eps`` is given; ``local``: the teacher uses the client's own item table."""
    def added(round, user, model, passes):
        if user >= old.n_users:
            return 0.0
        dtype = next(iter(old.public.values())).dtype
        public = {key: table[user] for key, table in old.local.items()} if local else None
        with torch.no_grad():
            teacher = load(round.backbone, round.settings, old, user, dtype, public)(range(old.n_items))
            everything = model(range(len(next(p for k, p in model.named_parameters() if k in old.public))))
        top = teacher.argsort(descending=True)[:n].tolist()
        if eps is not None:
            shift = sum(abs(1 + int((everything > everything[item]).sum()) - k) for k, item in enumerate(top, start=1))
            size = math.floor(math.exp(-eps * shift) * n)
            if size == 0:
                return 0.0
            number = stream(round.seed, "replay", round.step, round.round, passes, user)
            top = [top[k] for k in sorted(range(n), key=lambda k: number(k) >> 1)[:size]]
        return weight * nn.BCEWithLogitsLoss()(model(top), torch.sigmoid(teacher[top]))
    return added


def exemplar_distillation(old, lists, new_lists, share, weight, n, key_of):
    """ADER: each client's exemplars are herded one by one from ``lists``, and their teacher is the old model.

    Args:
        lists, new_lists: of each client, the items it trained on in the old block and in the new one.
        share: of the items that were known. key_of: the representation of a user's pair with an item.
    """
    def added(round, user, model, passes):
        if user >= old.n_users or not lists[user]:
            return 0.0
        keys = {item: key_of(user, item) for item in lists[user]}
        mean, chosen = sum(keys.values()) / len(keys), []
        while len(chosen) < min(n, len(keys)):
            left = [item for item in keys if item not in chosen]
            chosen.append(min(left, key=lambda item: float((mean - (sum(keys[c] for c in chosen) + keys[item]) /
                                                            (len(chosen) + 1)).pow(2).sum())))
        dtype = next(iter(old.public.values())).dtype
        with torch.no_grad():
            teacher = load(round.backbone, round.settings, old, user, dtype)(chosen)
        adapted = weight * math.sqrt(share * len(chosen) / len(new_lists[user]))
        return adapted * nn.BCEWithLogitsLoss()(model(chosen), torch.sigmoid(teacher))
    return added


def temporal_mean(mean, previous, beta):
    """F3CRec's server, item by item."""
    result = mean.clone()
    for i in range(len(previous)):
        phi = float(((previous[i] - mean[i]) ** 2).sum()) / math.sqrt(mean.shape[1])
        gamma = beta / (1 + phi)
        result[i] = (1 - gamma) * mean[i] + gamma * previous[i]
    return result


def average(old, new, weight):
    """Proxy of SPP over whole snapshots of equal size."""
    kind = type(new)
    return kind(*({key: weight * getattr(old, part)[key] + (1 - weight) * value
                   for key, value in getattr(new, part).items()} for part in ("public", "private", "dense")))


def from_proxies(start, teachers, counts, seen, candidates, eps):
    """What a user replays in a round of SPP and CCD, item to label in the order of the draws.

    Args:
        start: the model the block starts from, old rows only; teachers: proxy name to snapshot; counts: items of each.
        seen: user to the set of items observed in this and the previous block.
    """
    def drawn(round, user):
        dtype = next(iter(start.public.values())).dtype
        found = {}
        with torch.no_grad():
            mine = load(round.backbone, round.settings, start, user, dtype)(range(start.n_items)).tolist()
        left = [i for i in range(start.n_items) if i not in seen[user]]
        place = {item: k for k, item in enumerate(sorted(left, key=lambda i: (-mine[i], i)))}
        for proxy, teacher in teachers.items():
            with torch.no_grad():
                theirs = load(round.backbone, round.settings, teacher, user, dtype)(range(start.n_items))
            top = sorted(left, key=lambda i: -float(theirs[i]))[:candidates]
            number = stream(round.seed, "replay from " + proxy, round.step, round.round, 0, user)
            noise = [-math.log(-math.log(((number(k) >> 11) + 0.5) * 2.0 ** -53)) for k in range(len(top))]
            gumbel = [eps * (place[item] - k) + noise[k] for k, item in enumerate(top)]
            for k in sorted(range(len(top)), key=lambda k: -gumbel[k])[:counts[proxy]]:
                label = float(torch.sigmoid(theirs[top[k]]))
                if label > found.get(top[k], 0.0):
                    found.pop(top[k], None)
                    found[top[k]] = label
        return found
    return drawn


def proxies(start, teachers, counts, seen, weight, candidates, eps, anneal):
    """SPP's replay loss; arguments as of ``from_proxies``."""
    drawn = from_proxies(start, teachers, counts, seen, candidates, eps)

    def added(round, user, model, passes):
        if user >= start.n_users:
            return 0.0
        replay = drawn(round, user)
        scores = model(list(replay))
        labels = torch.tensor(list(replay.values()), dtype=scores.dtype)
        return weight * math.exp(-round.round / anneal) * nn.BCEWithLogitsLoss()(scores, labels)
    return added


def corrected(snapshot, backbone, settings, user, memory, key_of, weight, neighbours, temperature):
    """RLP2's probabilities of all items for one user, from a list of (key, error)."""
    dtype = next(iter(snapshot.public.values())).dtype
    with torch.no_grad():
        client = load(backbone, settings, snapshot, user, dtype)
        probability = torch.sigmoid(client(range(snapshot.n_items)))
        result = []
        for item in range(snapshot.n_items):
            here = key_of(client, item)
            distance = sorted((float((here - key).square().sum()), error) for key, error in memory)
            near = distance[:neighbours]
            total = sum(math.exp(-(d - near[0][0]) / temperature) for d, _ in near)
            estimate = sum(math.exp(-(d - near[0][0]) / temperature) / total * e for d, e in near)
            result.append(float(probability[item]) + weight * estimate)
    return result


class Controls:
    """SCAFFOLD's control variates, of the server and of each client (Algorithm 1, option II)."""

    def __init__(self):
        self.server, self.own = {}, {}

    def correction(self, user, key, like):
        return self.server.get(key, torch.zeros_like(like)) - self.own.get((user, key), torch.zeros_like(like))

    def added(self, round, user, model, passes):
        return sum((self.correction(user, key, parameter) * parameter).sum()
                   for key, parameter in model.named_parameters() if key in self.public)

    def run(self, round, train, sent):
        """A round of oracle ``round``: public parameters after it, and private ones by user."""
        self.public = {**sent.public, **sent.dense}
        _, uploads, private = round.run(train, sent, self.added)
        for user, items in train.items():
            model, n_items = load(round.backbone, round.settings, sent, user, torch.float64), sent.n_items
            samples = len(round.samples(user, items, n_items, model.pairwise))
            steps = round.epochs * math.ceil(samples / round.batch_size)
            for key, x in self.public.items():
                rate = model.rate(key, n_items, round, 0)
                self.own[user, key] = (x - uploads[user][key]) / (steps * rate) - self.correction(user, key, x)
        joined = {user for user, _ in self.own}
        self.server = {key: sum(self.own[user, key] for user in joined) / len(joined) for key in self.public}
        return {key: sum(upload[key] for upload in uploads.values()) / len(uploads) for key in self.public}, private


class OnTheSphere(Round):
    """A round of CanonFedRec's clients: alignment weighted by ``spread``, by item, and uniformity."""

    spread = None

    def batch_loss(self, model, some, user, added_loss, passes):
        p = model.user_embedding.weight[0] if self.backbone == "fedmf" else model.score.weight[0]
        items, s, loss = [item for item, _ in some], self.method, 0.0 * p.sum()  # without a positive its slope is 0
        p, q = p / p.norm(), torch.stack([row / row.norm() for row in model.item_embedding(torch.tensor(items))])
        positives = [k for k, (_, label) in enumerate(some) if label]
        for k in positives:
            known = self.spread is not None and items[k] < len(self.spread)
            spread = float(self.spread[items[k]]) if known else 1e-8 * s.sphere_step ** 2
            weight = 1.0 if self.spread is None else 1 / (s.spread_scale * spread + s.spread_floor)
            loss = loss + weight * (p - q[k]).square().sum() / len(positives)
        differ = torch.tensor([[a != b for a in items] for b in items])
        near = torch.exp(-2 * (q[:, None] - q[None]).square().sum(2))[differ]
        return loss + s.uniformity_weight * (torch.log(near.mean()) if len(near) else 0.0)


def along(base, target):
    """The tangent vector at ``base`` of the great circle to ``target``, both of length 1."""
    cosine = float(base @ target)
    beside = target - cosine * base
    return math.acos(max(-1.0, min(1.0, cosine))) * beside / beside.norm() if float(beside.norm()) else beside


def on_the_sphere(sent, tables, weight, drawn, method):
    """CanonFedRec's server on ``tables`` by user, each client's ``weight`` and ``drawn`` order of items: (table,
    spread)."""
    anchors = torch.stack([row / row.norm() for row in sent])
    tangents, changers = {}, {}
    for user, table in tables.items():
        changed = [i for i in range(len(sent)) if float((table[i] - sent[i]).norm()) > 1e-6]
        rest = [i for i in drawn[user] if i not in changed]
        fitted = changed + rest[:int(len(rest) * method.anchor_share)]
        m = sum(torch.outer(table[i], anchors[i]) for i in fitted) + method.rotation_ridge * torch.eye(len(sent[0]))
        u, _, v = torch.linalg.svd(m.to(sent))
        u[:, -1] *= torch.sign(torch.linalg.det(u @ v))
        turned = table @ u @ v
        tangents[user] = torch.stack([along(a, b / b.norm()) for a, b in zip(anchors, turned)])
        changers[user] = changed
    total, rows, spread = sum(weight.values()), [], []
    for i, a in enumerate(anchors):
        v = method.sphere_step * sum(weight[user] * tangents[user][i] for user in tables) / total
        row = a * torch.cos(v.norm()) + (torch.sin(v.norm()) * v / v.norm() if float(v.norm()) else v)
        rows.append(row / row.norm())
        own = [user for user in tables if i in changers[user]]
        whole = sum(weight[user] for user in own)
        mean = sum(weight[user] * tangents[user][i] for user in own) / whole if own else 0.0
        variance = sum(weight[user] * (tangents[user][i] - mean).square().sum() for user in own) / whole if own else 0.0
        spread.append(max(float(variance), 1e-8) * method.sphere_step ** 2)
    return torch.stack(rows), torch.tensor(spread, dtype=sent.dtype)
