"""Recommenders of domains sample by sample in NumPy and float64, and a tiny world for them."""

import math

import numpy as np
import torch

from fedcl_bench.plugin.silo import DomainData, Histories

N_USERS, N_ITEMS, WIDTH = 7, 11, 6  # of the world, and the length of its texts' encodings


def world(seed=0, layers=1, n_items=N_ITEMS):
    """What a domain knows: random encodings of texts, the last item without one, and training histories that leave the
    last two items out."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_items, layers, WIDTH, generator=generator)
    features[-1] = 0
    start = torch.arange(N_USERS + 1) * 5
    values = torch.randint(n_items - 2, (int(start[-1]),), generator=generator)
    values[:n_items - 2] = torch.arange(n_items - 2)
    return DomainData(N_USERS, n_items, features, (values, start))


def histories_of(users):
    """Lists of items, one per user, as a domain knows them: (items, where each user's begin and end)."""
    return torch.tensor([item for user in users for item in user]), torch.tensor([0, *map(len, users)]).cumsum(0)


def samples(n_items=N_ITEMS, lengths=(4, 1, 3, 5), seed=1):
    """Histories of these lengths and their next items."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(n_items, (len(lengths), max(lengths)), generator=generator)
    counts = torch.tensor(lengths)
    items[torch.arange(max(lengths)) >= counts[:, None]] = -1
    targets = torch.randint(n_items, (len(lengths),), generator=generator)
    return Histories(items, counts, torch.arange(len(lengths)) % N_USERS), targets


def batch_of(*histories):
    """Histories given as lists."""
    width = max(map(len, histories))
    return Histories(torch.tensor([[*each, *[-1] * (width - len(each))] for each in histories]),
                     torch.tensor([len(each) for each in histories]), torch.arange(len(histories)))


def spread(module, seed=5):
    """The module in float64, with parameters that no start leaves equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.double().parameters():
            value += torch.randn(value.shape, generator=generator) * 0.3
    return module


def arrays(module):
    """Its parameters and buffers by name."""
    return {name: value.detach().numpy() for name, value in [*module.named_parameters(), *module.named_buffers()]}


def normalised(x, p, name, eps=1e-12):
    """LayerNorm of one vector."""
    return (x - x.mean()) / math.sqrt(x.var() + eps) * p[f"{name}.weight"] + p[f"{name}.bias"]


def affine(x, p, name):
    return p[f"{name}.weight"] @ x + p[f"{name}.bias"]


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def attention(queries, keys, values, heads, causal=True):
    """What each query makes of the values: of all, or of those up to its own place."""
    size, mixed = len(queries[0]) // heads, []
    for now, query in enumerate(queries):
        seen, parts = range(now + 1 if causal else len(keys)), []
        for part in (slice(head * size, (head + 1) * size) for head in range(heads)):
            shares = softmax(np.array([query[part] @ keys[then][part] / math.sqrt(size) for then in seen]))
            parts.append(sum(share * values[then][part] for share, then in zip(shares, seen)))
        mixed.append(np.concatenate(parts))
    return mixed


def transformer(xs, p, name, layers, heads):
    """RecBole's encoder of one history without padding, causal: the last representation."""
    for k in range(layers):
        part = f"{name}.layers.{k}"
        asked = ([affine(x, p, f"{part}.{kind}") for x in xs] for kind in ("query", "key", "value"))
        after = []
        for x, mixed in zip(xs, attention(*asked, heads)):
            y = normalised(x + affine(mixed, p, f"{part}.out"), p, f"{part}.norm")
            inner = affine(y, p, f"{part}.inner")
            inner = np.array([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in inner])
            after.append(normalised(y + affine(inner, p, f"{part}.outer"), p, f"{part}.ffn_norm"))
        xs = after
    return xs[-1]


def represent(history, vectors, p, name, layers, heads):
    """What ``Positioned`` makes of one history of item numbers."""
    xs = [normalised(vectors[item] + p[f"{name}.positions"][at], p, f"{name}.norm") for at, item in enumerate(history)]
    return transformer(xs, p, f"{name}.encoder", layers, heads)


def cosine(a, b):
    return a @ b / max(np.linalg.norm(a), 1e-12) / max(np.linalg.norm(b), 1e-12)


def each_history(batch):
    return [items[:count].tolist() for items, count in zip(batch.items, batch.lengths)]


def cross_entropy(scores, targets):
    return float(np.mean([-math.log(softmax(row)[target]) for row, target in zip(scores, targets.tolist())]))
