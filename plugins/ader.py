"""ADER: every client keeps exemplars of its past items and distils its previous model on them, more where they are many
beside its new data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcl_bench import Method, in_pieces, padded, pair_keys, score_users, setting
from fedcl_bench.toolbox.distillation import TopNDistillation
from fedcl_bench.toolbox.functional import rows_of


@dataclass(frozen=True)
class ADERSettings:
    lambda_kd: float = setting(0.1, "lambda_base, weight of the distillation loss before it is adapted to each client",
                               low=0.0, search=(0.01, 0.1, 0.5))
    exemplars: int = setting(30, "N, the most exemplars of a client", low=1, search=(10, 30))
    kd_reduction: str = setting("mean", "distillation over a client's exemplars is averaged (ADER) or summed",
                                choices=("mean", "sum"))


def herded(keys: Tensor, there: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Exemplars by herding (Welling, ICML 2009): one after the other, each the item with which the mean of the chosen
    comes nearest to the mean of all.

    Args:
        keys: representations of each client's items, (C, items, k).
        there: which of them there are, bool of shape (C, items).

    Returns:
        (their places among the items; which of these are filled), both (C, n or fewer).
    """
    mean = (keys * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
    left, total, places = there.clone(), torch.zeros_like(mean), []
    filled = torch.arange(n, device=keys.device) < there.sum(1, keepdim=True)
    for k in range(min(n, keys.shape[1])):
        distance = (mean[:, None] - (total[:, None] + keys) / (k + 1)).square().sum(2)
        place = distance.masked_fill(~left, torch.inf).argmin(1, keepdim=True)
        left.scatter_(1, place, False)
        total += keys.gather(1, place[..., None].expand(-1, -1, keys.shape[2]))[:, 0]
        places.append(place)
    return torch.cat(places, 1), filled[:, :len(places)]


class ADER(TopNDistillation):
    """Our adaptation of ADER to federated clients on lists of items.

    After block t-1 client u keeps E_u, up to N items herded from those it trained on and its former exemplars, and of
    each the probability sigmoid(s) under the model of that block. In block t its loss gets
    lambda_u times the mean cross-entropy to these, with lambda_u = lambda_base sqrt(|I_{t-1}| / |I_t| * |E_u| / |D_u|)
    of the known and all items and of its exemplars and new interactions. ADER's clients are sessions, whose exemplars
    are shared out by the frequency of items and whose targets are softmax outputs over all of them; a client has an
    item once, and losses here are of single items.
    """

    name = "ader"
    numbers = 1
    title = "exemplars of each client's past, distilled with a weight of its own (ADER, federated)"
    reference = "Mi et al., ADER, RecSys 2020, arXiv 2007.12000; for sessions at one place"
    Settings = ADERSettings
    ambiguities = {}
    reimplementation = True

    check = Method.check

    def begin_step(self, step, model, backbone):
        """Each client's |E_u| / |D_u|, and the share of items that the teacher knew."""
        if self.settings.lambda_kd == 0.0 or "filled" not in self.client_state:
            return
        exemplars = rows_of(self.client_state["filled"], torch.arange(step.n_users, device=step.train.values.device))
        ratio = exemplars.sum(1).double() / step.train.lengths.clamp(min=1)
        self.client_state["adapted"] = (ratio * step.old_items / step.n_items).sqrt().to(model.item_vectors)

    def chosen(self, batch, known, lists):
        return self.client_state["filled"][batch.users[known]]

    def weight(self, users):
        return self.settings.lambda_kd * self.client_state["adapted"][users]

    def end_step(self, step, model, backbone, trained, draw):
        if self.settings.lambda_kd == 0.0:
            return
        n = self.settings.exemplars
        everybody = torch.arange(model.n_users, device=trained.device)
        lists, filled = (rows_of(self.client_state.get(name, torch.zeros(0, n, dtype=kind, device=trained.device)),
                                 everybody).clone() for name, kind in (("lists", torch.int64), ("filled", torch.bool)))
        for users in in_pieces(trained, model.n_items):
            new = padded(step.train, users)
            here = torch.arange(new.shape[1], device=new.device) < step.train.lengths[users, None]
            items = torch.cat([new, lists[users]], 1)
            there = _once(items, torch.cat([here, filled[users]], 1), model.n_items)
            place, kept = herded(pair_keys(backbone, model, users, items).detach(), there, n)
            column = torch.arange(place.shape[1], device=new.device)
            lists[users], filled[users] = 0, False
            lists[users[:, None], column] = items.gather(1, place).where(kept, 0)
            filled[users[:, None], column] = kept
        teacher = [torch.sigmoid(score_users(backbone, model, users).gather(1, lists[users]))
                   for users in in_pieces(everybody, model.n_items)]
        self.client_state |= {"lists": lists, "filled": filled, "teacher": torch.cat(teacher).detach()}


def _once(items: Tensor, there: Tensor, n_items: int) -> Tensor:
    """Which of the items that are there stand for the first time, (C, items)."""
    places = torch.arange(items.shape[1], device=items.device).expand_as(items).where(there, items.shape[1])
    first = torch.full((len(items), n_items), items.shape[1], device=items.device).scatter_reduce_(
        1, items, places, "amin")
    return there & (first.gather(1, items) == places)
