"""CanonFedRec: the server turns each client's item table towards its own and takes the mean on the unit sphere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from fedcl_bench import Incompatible, Method, rng, setting
from fedcl_bench.toolbox.places import at_places, true_places

SPREAD = "spread of "  # begins the names of items' variances
PAIRS = 1 << 20  # of samples, whose similarities are made at once: 4 MiB, which stay in the cache


@dataclass(frozen=True)
class CanonFedRecSettings:
    sphere_step: float = setting(3.0, "gamma: multiple of the mean tangent vector that the server moves a row by",
                                 above=0.0, search=(1.0, 3.0, 10.0))
    anchor_share: float = setting(0.4, "share of the rows that a client did not change, drawn anew, which its rotation "
                                  "is fitted to too", low=0.0, high=1.0)
    rotation_ridge: float = setting(1e-4, "what is added to the diagonal of the matrix that a rotation is made of",
                                    low=0.0)
    client_loss: str = setting("alignment", "clients train by alignment and uniformity on the unit sphere (use the "
                               "released code's optimiser=adam, lr=0.1, item_lr=plain) or by the backbone's loss",
                               choices=("alignment", "backbone"))
    uniformity_weight: float = setting(0.005, "weight of uniformity", low=0.0, search=(0.005, 0.05, 0.5),
                                       only_if="client_loss=alignment")
    spread_scale: float = setting(0.5, "an item counts 1 / (spread_scale variance + spread_floor) in the alignment",
                                  low=0.0, only_if="client_loss=alignment")
    spread_floor: float = setting(1.0, "see spread_scale; at 1e-6 (released code, whose clients have several users) an "
                                  "item that one client changed counts 10^5 times as much as others", above=0.0,
                                  search=(1e-6, 1e-2, 1.0), only_if="client_loss=alignment")


class CanonFedRec(Method):
    """With the server's table A, rows a_i on the unit sphere, and a client's table B_u, the server takes in every round

        (1)  R_u, the rotation with the largest sum_i a_i . (b_ui R_u) + ridge trace R_u, over the rows that u changed
             and a drawn share of the others
        (2)  v_ui = log_{a_i}(b_ui R_u / |b_ui|), by the geodesic from a_i
        (3)  a_i <- exp_{a_i}(gamma sum_u w_u v_ui), w_u the shares of clients in the mean (setting ``weighting``)
        (4)  s_i = max(sum over dimensions of the weighted variance of v_ui among those who changed row i, 1e-8) gamma^2

    and sends s beside A. A client's loss, in place of the backbone's, with unit vectors p of its own and q of items, is

        (5)  mean_i |p - q_i|^2 / (spread_scale s_i + spread_floor) over positives, without weights in the first round,
        (6)  + uniformity_weight log mean_{i != j} exp(-2 |q_i - q_j|^2) over all samples.

    Numbers of equations are ours. The code has Adam with lr = 0.1 for all parameters, whose moments clients keep from
    round to round (here: anew), clients of several users, and ``weighting=interactions``. (5) divides a vector's
    gradient by its length, so that rates of SGD that suit inner products are far too high. A round takes as long as (1)
    and (2) for users x items rows, whoever does it.
    """

    name = "canonfedrec"
    numbers = 2
    title = "item tables are rotated to the server's and averaged on the unit sphere; loss by items' agreement"
    reference = "CanonFedRec, A Canonical Geometric Framework for Personalized Federated Recommendation, KDD 2026"
    Settings = CanonFedRecSettings
    ambiguities = {"spread_floor": {1.0: "weights of one order", 1e-6: "released code"},
                   "client_loss": {"alignment": "released code", "backbone": "the server's part alone"}}
    first_step = 0
    broadcasts = (SPREAD,)
    gives_up = {"F7": "the server rotates each client's item table by itself"}

    def trained_backbone(self, backbone, clients):
        tables = backbone.new_rows(0, range(0), range(0))[0]
        if backbone.factor_names is None or len(tables) != 1:
            raise Incompatible(f"method '{self.name}' turns item vectors that scores are inner products with, of which "
                               f"'{backbone.name}' has none.", "backbone", lambda cls: cls.factor_names is not None)
        return backbone

    @property
    def sees_rows(self):
        return self.settings.client_loss == "alignment"

    def aggregate_updates(self, updates):
        (name, sent), = updates.sent.items()
        anchors, weights = normalize(sent, dim=1), updates.weights / updates.weights.sum()
        total = torch.zeros(sent.shape, dtype=torch.float64, device=sent.device)
        first, second, whole = total.clone(), total[:, 0].clone(), total[:, 0].clone()  # of those who changed a row
        for positions, changes in updates.chunks():
            changed = changes[name].norm(dim=2) > 1e-6
            fitted = changed | self._drawn(updates.draw, updates.users[positions], changed)
            tangents = Tangents(anchors, self._turned(sent + changes[name], anchors, fitted))
            share = weights[positions].to(total)[:, None].expand(changed.shape)
            total += tangents.sum(share)
            share = share * changed
            whole += share.sum(0)
            first += tangents.sum(share)
            second += (share * tangents.angles.square()).sum(0)
        if self.sees_rows:
            whole = whole.where(whole > 0.0, 1.0)
            variance = (second / whole - (first / whole[:, None]).square().sum(1)).clamp(min=1e-8)
            self.server_state = {SPREAD + name: (variance * self.settings.sphere_step ** 2).to(sent)}
        return {name: exp_map(anchors, self.settings.sphere_step * total.to(sent)) - sent}

    def _drawn(self, draw, users, changed):
        """Some of the rows that each client did not change, bool (C, items)."""
        keys = rng.client_keys(rng.key(draw.seed, "canonfedrec anchors", draw.step, draw.round), users)
        order = rng.sort_keys(rng.bits(keys[:, None], torch.arange(changed.shape[1], device=users.device)))
        order = order.masked_fill(changed, torch.iinfo(torch.int64).max)
        count = ((~changed).sum(1, keepdim=True).double() * self.settings.anchor_share).long()
        last = order.sort(1).values.gather(1, (count - 1).clamp(min=0))
        return (order <= last) & (count > 0)

    def _turned(self, tables, anchors, fitted):
        """(1): tables (C, items, d) after the rotation that brings their ``fitted`` rows nearest to the anchors."""
        ridge = self.settings.rotation_ridge * torch.eye(anchors.shape[1], dtype=anchors.dtype, device=anchors.device)
        left, _, right = torch.linalg.svd((tables * fitted[:, :, None]).transpose(1, 2) @ anchors + ridge)
        left[:, :, -1] *= torch.where(torch.linalg.det(left @ right) < 0.0, -1.0, 1.0)[:, None]
        return tables @ (left @ right)

    def begin_round(self, step, round_, backbone):
        self._user, self._n_items = backbone.factor_names[0], step.n_items

    def local_loss(self, batch):
        if not self.sees_rows:
            return None
        s, items, weights, (rows,) = self.settings, batch.items, batch.weights, batch.rows.values()
        rows = normalize(rows, dim=2)
        user = normalize(batch.private[self._user].flatten(1), dim=1)
        positive = weights * (batch.labels > 0.0)
        distances = 2.0 - 2.0 * (rows @ user[:, :, None]).squeeze(2)
        loss = (positive * self._certainty(items) * distances).sum(1) / positive.sum(1).clamp(min=1e-12)
        if s.uniformity_weight > 0.0:
            loss = loss + s.uniformity_weight * uniformity(rows, weights, items, self._n_items)
        return loss - batch.loss

    def _certainty(self, items):
        """The weights of items in (5); one that is new since the last round counts like one that nobody changed."""
        if not self.server_state:
            return 1.0
        spread, = self.server_state.values()
        s = self.settings
        known = spread[items.clamp(max=len(spread) - 1)].where(items < len(spread), 1e-8 * s.sphere_step ** 2)
        return 1.0 / (s.spread_scale * known + s.spread_floor)


def uniformity(rows, weights, items, n_items):
    """log mean exp(-2 |q_i - q_j|^2) over pairs of samples of different items, (C,), 0 of a client without such pairs.
    Its gradient is made on the way, for some clients after the other, as there are as many pairs as squares of samples.
    A row's similarity to itself is 1 however it moves. Columns of no weight, of other local batches, are left out."""
    places, count = true_places(weights > 0.0, weights.shape[1])
    real = torch.arange(places.shape[1], device=places.device) < count[:, None]
    rows, weights, items = (at_places(each, places) for each in (rows, weights, items))
    weights = weights * real
    weighted, sums, gradients = weights[:, :, None] * torch.cat([rows, torch.ones_like(rows[:, :, :1])], 2), [], []
    with torch.no_grad():
        for some, with_weight in zip(*(each.split(max(1, PAIRS // rows.shape[1] ** 2)) for each in (rows, weighted))):
            near = torch.baddbmm(some.new_full((), -4.0), some, some.transpose(1, 2), alpha=4.0).exp_() @ with_weight
            sums.append((near[:, :, -1] * with_weight[:, :, -1]).sum(1))
            gradients.append(8.0 * with_weight[:, :, -1:] * near[:, :, :-1])
        same = rows.new_zeros(len(rows), n_items).scatter_add_(1, items, weights).square().sum(1)
        pairs = weights.sum(1).square() - same
        near = (torch.cat(sums) - same).where(pairs > 1e-6, 1.0).clamp(min=1e-12)
        slopes = torch.cat(gradients) * ((pairs > 1e-6) / near)[:, None, None]
    linear = (rows * slopes).sum((1, 2))
    return (near / pairs.where(pairs > 1e-6, 1.0)).log() + linear - linear.detach()


class Tangents:
    """Those at unit vectors a (n, d) towards clients' vectors b (C, n, d), which it overwrites: log_a(b), as long as
    the angle. With the chord c from a to b / |b|, which is 2 sin(angle / 2) long,

        log_a(b) = angle / sin(angle) (c + 2 sin^2(angle / 2) a)

    so that sums over clients are sums of chords: what a client's tangent has of its own are two numbers per row."""

    def __init__(self, base, targets):
        self.base = base
        self.chords = targets.div_(targets.norm(dim=2, keepdim=True).clamp(min=1e-12)).sub_(base)
        self.half = (self.chords.norm(dim=2).double() / 2.0).clamp(1e-9, 1.0 - 1e-14)  # sines of half the angles
        self.angles = 2.0 * self.half.asin()

    def sum(self, weights):
        """Of the tangents times weights (C, n), float64, over clients: (n, d)."""
        weights = weights * self.angles / self.angles.sin()
        total = torch.zeros_like(self.base)
        for factors, chords in zip(weights.to(total)[:, :, None], self.chords):  # one by one: in the cache
            total.addcmul_(factors, chords)
        return total.double() + 2.0 * (weights * self.half.square()).sum(0)[:, None] * self.base


def exp_map(base, tangent):
    """Where the geodesics from ``base`` along ``tangent`` end."""
    length = tangent.norm(dim=-1, keepdim=True)
    return normalize(length.cos() * base + length.sin() / length.clamp(min=1e-30) * tangent, dim=-1)
