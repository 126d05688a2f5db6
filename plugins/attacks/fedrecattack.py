"""FedRecAttack: added clients promote items, with user vectors fitted to few interactions that the attacker knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcl_bench import Attack, UserError, inner_product_table, rng, setting

_ADAM = 0.9, 0.999, 1e-8
_LIST = 10  # length of the lists that promoted items are to be in


@dataclass(frozen=True)
class FedRecAttackSettings:
    target_items: int = setting(1, "promoted items", low=1, high=_LIST)
    known_interactions: float = setting(0.01, "xi: share of each user's training interactions that the attacker knows, "
                                        "rounded up", above=0.0, high=1.0)
    item_limit: int = setting(60, "kappa: items whose rows a malicious client changes", low=1)
    gradient_limit: float = setting(1.0, "C: largest norm of the gradient of a row that it sends", above=0.0)
    attack_lr: float = setting(0.01, "learning rate of the attacker's user vectors (Adam)", above=0.0)
    attack_batch: int = setting(256, "users in a batch of their training", low=1)


class FedRecAttack(Attack):
    """With item rows V as received, p_u of all users with known interactions D', and targets T:

        (1)  p_u: a pass of Adam a round over the BPR loss of D', against an item drawn beside each
        (2)  L = sum_u sum_{i in T, not in D'_u} g(s(u, j) - s(u, i)), g(x) = x for x >= 0, else e^x - 1,
             with j from the end of u's list of 10 of other items: the 10th for the first target, the 9th for the next
        (3)  client m chooses T and kappa - |T| other items once, by their share in the norms of what those before it
             have left of dL/dV
        (4)  it sends at most norm C of each of these rows

    A sent gradient counts as one of kappa samples of an honest client: rows change by -(lr / kappa) times it. Numbers
    of equations are ours; so is that reading, as the released code adds the gradients of all clients' summed losses.
    Its noise of variance 1e-7 is left out, and its server bounds honest clients' rows by C, too.
    """

    name = "fedrecattack"
    numbers = 3
    title = "added clients promote items, knowing a share of the interactions"
    reference = ("Rong et al., FedRecAttack: Model Poisoning Attack to Federated Recommendation, ICDE 2022, "
                 "arXiv 2204.01499")
    Settings = FedRecAttackSettings

    def __init__(self, settings):
        super().__init__(settings)
        self.targets, self.known_share = settings.target_items, settings.known_interactions

    def check(self, step, backbone):
        inner_product_table(self, backbone)
        s = self.settings
        if s.target_items > s.item_limit or s.item_limit > step.n_items:
            raise UserError(f"setting 'item_limit': found {s.item_limit}, accepted: from target_items, "
                            f"{s.target_items}, to the number of items, {step.n_items}.")

    def upload(self, seen):
        (name, items), = seen.public.items()
        seen = replace(seen, known=seen.known.distinct())  # D' is a set
        slope = self._slope(seen, items, self._fitted(seen, items))
        chosen, norms = self._sent(seen, slope.norm(dim=1))
        sent = norms[:, :, None] * torch.nn.functional.normalize(slope, dim=1, eps=1e-30)[chosen]
        return {name: (-seen.rates[name] / self.settings.item_limit * sent, chosen)}

    def _grown(self, seen, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The attacker's user vectors and Adam's two moments, with rows for all users."""
        before = self.state.get("users", items.new_zeros(3, 0, items.shape[1]))
        first, width = before.shape[1:]
        start = rng.normal_rows(seen.draw.seed, "users of the attacker", first, len(seen.known.lengths) - first, width)
        start = 0.01 * start
        rows = torch.stack([start, torch.zeros_like(start), torch.zeros_like(start)]).to(items)
        return torch.cat([before, rows], 1).unbind()

    def _fitted(self, seen, items: Tensor) -> Tensor:
        """(1): the vectors of all users, (users, d)."""
        users, first, second = (each.clone() for each in self._grown(seen, items))
        step, known = int(self.state.get("adam_steps", torch.zeros(1))), seen.known
        beta1, beta2, epsilon = _ADAM
        everyone = torch.arange(len(users), device=items.device)
        place = rng.sort_keys(rng.bits(seen.draw.clients("attack order", everyone), torch.zeros_like(everyone))) \
            .argsort().argsort()  # of each user in the pass
        owner, positive, negative = known.owners, known.values, _unknown_items(seen, len(items))
        for start in range(0, len(users), self.settings.attack_batch):
            pairs = (place[owner] >= start) & (place[owner] < start + self.settings.attack_batch)
            u, apart = owner[pairs], items[positive[pairs]] - items[negative[pairs]]
            pull = torch.sigmoid(-(users[u] * apart).sum(1))
            gradient = torch.zeros_like(users).index_add_(0, u, -pull[:, None] * apart)
            step += 1
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient.square()
            users = users - self.settings.attack_lr * (first / (1 - beta1 ** step)) \
                / ((second / (1 - beta2 ** step)).sqrt() + epsilon)
        self.state = {**self.state, "users": torch.stack([users, first, second]), "adam_steps": torch.tensor([step])}
        return users

    def _slope(self, seen, items: Tensor, vectors: Tensor) -> Tensor:
        """dL/dV of (2), (items, d)."""
        users = (seen.known.lengths > 0).nonzero().flatten()
        row, known = seen.known.select(users)
        missing = torch.ones(len(users), len(items), dtype=torch.bool, device=items.device)
        missing[row, known] = False
        wanted = missing[:, seen.targets]
        others = missing.index_fill(1, seen.targets, False)
        lists = (vectors[users] @ items.T).where(others, -torch.inf).topk(min(_LIST, len(items)), dim=1).indices
        last = lists.flip(1).gather(1, (wanted.cumsum(1) - 1).clamp(min=0))
        client, which = wanted.nonzero(as_tuple=True)
        better, target, p = last[client, which], seen.targets[which], vectors[users[client]]
        weight = (p * (items[better] - items[target])).sum(1).clamp(max=0.0).exp()[:, None] * p  # g' of x
        return torch.zeros_like(items).index_add_(0, better, weight).index_add_(0, target, -weight)

    def _sent(self, seen, left: Tensor) -> tuple[Tensor, Tensor]:
        """(3) and (4): the items of the round's clients, and norms of what they send of their rows, (M, kappa) both;
        ``left``: norms of the rows of dL/dV, (items,)."""
        size, last = self.settings.item_limit, int(seen.clients[-1]) + 1
        chosen = self.state.get("items", seen.clients.new_full((0, size), -1))
        chosen = torch.cat([chosen, chosen.new_full((max(last - len(chosen), 0), size), -1)])
        norms = []
        for client in seen.clients:
            if chosen[client, 0] < 0:
                chosen[client] = self._drawn(seen, client, left.double())
            norms.append(left[chosen[client]].clamp(max=self.settings.gradient_limit))
            left = left.index_add(0, chosen[client], -norms[-1])
        self.state = {**self.state, "items": chosen}
        return chosen[seen.clients], torch.stack(norms)

    def _drawn(self, seen, client: Tensor, left: Tensor) -> Tensor:
        """(3) of one client, (kappa,)."""
        share = left.clamp(min=max(1e-9 * float(left.max()), 1e-300))
        keys = rng.row_keys(rng.key(seen.draw.seed, "items of the attack"), client)
        luck = rng.uniform(rng.bits(keys, torch.arange(len(left), device=left.device)))
        race = (-torch.log(luck) / share).index_fill_(0, seen.targets, -1.0)  # the targets win
        return race.argsort(stable=True)[:self.settings.item_limit]


def _unknown_items(seen, n_items: int) -> Tensor:
    """An item beside each known interaction that is not known of its user, all equally likely."""
    known, owner = seen.known, seen.known.owners
    place = torch.arange(len(owner), device=owner.device) - known.indptr[owner]
    keys = seen.draw.clients("attack negatives", owner)
    free = (n_items - known.lengths[owner]).clamp(min=1)
    number = (rng.uniform(rng.bits(keys, place)) * free).long()
    width = int(known.lengths.max()) if len(owner) else 0
    ordered = torch.full((len(known.lengths), width), n_items + width, device=owner.device)
    ordered[owner, place] = known.values
    ordered = ordered.sort(dim=1).values[owner]
    below = ordered - torch.arange(width, device=owner.device)  # unknown items before each known one
    return (number + (below <= number[:, None]).sum(1)).clamp(max=n_items - 1)
