"""ClusterAttack: malicious users pull all item rows into few clusters, so that lists lose their order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedcl_bench import Attack, rng, setting
from fedcl_bench.toolbox.clustering import Lloyd, drawn, lloyd


@dataclass(frozen=True)
class ClusterAttackSettings:
    clusters: int = setting(2, "K: clusters at first", low=1)
    fewest_clusters: int = setting(1, "K never falls below", low=1)
    most_clusters: int = setting(50, "K never rises above", low=1)
    cluster_window: float = setting(100.0, "by how many rounds the rises of the smoothed loss must outnumber its "
                                    "falls, or the reverse, before K changes", above=0.0)
    cluster_window_growth: float = setting(0.0, "by which share this number grows with every change of K", low=0.0)
    cluster_smoothing: float = setting(0.999, "weight of the past in the smoothed loss", low=0.0, below=1.0)
    norm_scale: float = setting(3.0, "rows are as long as the mean of honest ones plus up to so many standard "
                                "deviations", low=0.0)
    sampled_clients: int = setting(50, "malicious clients whose honest changes give mean and deviation, at most", low=1)


class ClusterAttack(Attack):
    """Malicious users train as all others, then send, in place of their change of item row v_i with centroid c_i,

        (1)  L = sum_i ||v_i - c_i||^2 / K, clusters by K-means of the rows received
        (2)  a_i = -dL/dv_i, at length mean + r std norm_scale, r uniform on (0, 1) for each client and item;
             mean and std over all items of the norms of rows of their own changes, many of which are 0
        (3)  K rises by sqrt(most - K) where the smoothed L rises, and falls by sqrt(K - fewest) where it falls

    Other parameters are sent as trained. Numbers of equations are ours; (2) is the released code's, which fixes no
    cluster_window_growth and leaves malicious users out of the tests, as is not done here.
    """

    name = "clusterattack"
    numbers = 1
    title = "some users pull all item rows into few clusters (untargeted)"
    reference = ("Yu et al., Untargeted Attack against Federated Recommendation Systems via Poisonous Item Embeddings "
                 "and the Defense, AAAI 2023, arXiv 2212.05399")
    Settings = ClusterAttackSettings
    among_users = True

    def upload(self, seen):
        name, rows = next(iter(seen.public.items()))
        flat, keys = rows.flatten(1), seen.draw.clients("attack clients", seen.clients)
        sample = rng.sort_keys(rng.bits(keys, torch.zeros_like(keys))).argsort()[:self.settings.sampled_clients]
        norms = seen.changes[name][sample].flatten(2).norm(dim=2)
        count = min(int(self.state.get("clusters", self.settings.clusters)), len(flat))
        key = rng.key(seen.draw.seed, "attack clusters", seen.draw.step, seen.draw.round)
        nearest, centroids = lloyd(flat, drawn(flat, count, key), Lloyd())
        apart = flat - centroids[nearest]
        self._adapt(count, float(apart.double().square().sum()) / count)
        slope = 2.0 / count * apart
        luck = rng.uniform(rng.bits(seen.draw.clients("attack lengths", seen.clients)[:, None],
                                    torch.arange(len(flat), device=flat.device))).to(flat)
        length = norms.mean() + luck * norms.std() * self.settings.norm_scale
        sent = -slope * (length / (slope.norm(dim=1) + 1e-8))[:, :, None]
        return {name: (sent.view(len(seen.clients), *rows.shape), None)}

    def _adapt(self, count: int, loss: float) -> None:
        """(3): the state after a round of so many clusters with this loss."""
        s = self.settings
        average, last, rounds, balance, window = self.state.get(
            "smoothed", torch.tensor([0.0, -1.0, 0.0, 0.0, s.cluster_window], dtype=torch.float64)).tolist()
        average = s.cluster_smoothing * average + (1.0 - s.cluster_smoothing) * loss
        rounds += 1
        smoothed = average / (1.0 - s.cluster_smoothing ** rounds)
        balance += 0 if last < 0.0 else 1 if smoothed > last else -1
        last = smoothed
        if abs(balance) >= window:
            if balance > 0:
                count = min(round(count + math.sqrt(max(s.most_clusters - count, 0))), s.most_clusters)
            else:
                count = max(round(count - math.sqrt(max(count - s.fewest_clusters, 0))), s.fewest_clusters)
            average, last, rounds, balance, window = 0.0, -1.0, 0.0, 0.0, window * (1.0 + s.cluster_window_growth)
        self.state = {"clusters": torch.tensor(count),
                      "smoothed": torch.tensor([average, last, rounds, balance, window], dtype=torch.float64)}
