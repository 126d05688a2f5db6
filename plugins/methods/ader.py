"""ADER: every client keeps exemplars of its past and distils the previous model on them, more where they are many
beside its new data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcl_bench import LocalSessions, Method, in_pieces, padded, pair_keys, score_users, setting
from fedcl_bench.toolbox.distillation import TopNDistillation
from fedcl_bench.toolbox.functional import rows_of
from fedcl_bench.toolbox.places import stands_first


@dataclass(frozen=True)
class ADERSettings:
    lambda_kd: float = setting(0.1, "lambda_base, weight of the distillation loss before it is adapted to each client "
                               "(released code: 0.8, on YOOCHOOSE 1)", low=0.0, search=(0.01, 0.1, 0.5))
    exemplars: int = setting(30, "N, the most exemplars of a client", low=1, search=(10, 30))
    kd_reduction: str = setting("mean", "distillation over a client's exemplars is averaged (ADER) or summed",
                                choices=("mean", "sum"))


def herded(keys: Tensor, there: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Exemplars by herding (Welling, ICML 2009): one after the other, each the item with which the mean of the chosen
    comes nearest to the mean of all. ``keys``: representations of each client's items, (C, items, k); ``there``: which
    of them there are, bool of shape (C, items). Returns (their places among the items; which of these are filled), both
    (C, n or fewer)."""
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
    """Our adaptation of ADER to federated clients. A client's loss gets lambda_u times the distillation of the previous
    model on its exemplars E_u, with lambda_u = lambda_base sqrt(|I_{t-1}| / |I_t| * |E_u| / |D_u|) of the known and all
    items and of its exemplars and new interactions D_u.

    On lists of items the period t is a block. After block t-1 client u keeps up to N items herded from those it trained
    on and its former exemplars, and of each the probability sigmoid(s) under the model of that block, to which the loss
    is the mean cross-entropy: a client has an item once, and losses here are of single items.

    In sessions the period is a session, and the previous model what the server sends at the beginning of the next round
    that the client takes part in. By its representations up to N exemplars are herded from the samples of the session
    before and the former ones. A sample is a position of a session's last items and the item that follows, as clients
    train on; the loss is the mean cross-entropy to the softmax of the previous model's scores, as in the paper. A
    client's items I_{t-1} are those of the sessions that its exemplars were herded from, and the softmax is over them,
    as it holds no rows of others.

    In the paper exemplars are shared out by the frequency of the item to predict, and herded for each; a client has few
    samples of any. The released code herds representations of length 1, here they are as they are.
    """

    name = "ader"
    numbers = 1
    title = "exemplars of each client's past, distilled with a weight of its own (ADER, federated)"
    reference = "Mi et al., ADER, RecSys 2020, arXiv 2007.12000; for sessions at one place"
    Settings = ADERSettings
    ambiguities = {}
    reimplementation = True
    needs_sequential = None
    acts_in_sessions = True

    check = Method.check

    # On lists of items.

    def begin_step(self, step, model, backbone):
        """Each client's |E_u| / |D_u|, and the share of items that the teacher knew."""
        if self.settings.lambda_kd == 0.0 or "filled" not in self.client_state:
            return
        exemplars = rows_of(self.client_state["filled"], torch.arange(step.n_users, device=step.train.values.device))
        ratio = exemplars.sum(1).double() / step.train.lengths.clamp(min=1)
        self.client_state["adapted"] = (ratio * step.old_items / step.n_items).sqrt().to(model.item_vectors)

    def soft_targets(self):
        soft = super().soft_targets()
        if soft is None or "adapted" not in self.client_state:
            return None
        filled, adapted = self.client_state["filled"], self.client_state["adapted"][:len(soft.items)]
        return replace(soft, chosen=filled, weights=self.settings.lambda_kd * adapted)

    def end_step(self, step, model, backbone, trained, draw):
        if self.settings.lambda_kd == 0.0 or step.sessions:
            return
        n = self.settings.exemplars
        everybody = torch.arange(model.n_users, device=trained.device)
        lists, filled = (rows_of(self.client_state.get(name, torch.zeros(0, n, dtype=kind, device=trained.device)),
                                 everybody).clone() for name, kind in (("lists", torch.int64), ("filled", torch.bool)))
        for users in in_pieces(trained, model.n_items) if len(trained) else ():
            new = padded(step.train, users)
            here = torch.arange(new.shape[1], device=new.device) < step.train.lengths[users, None]
            items = torch.cat([new, lists[users]], 1)
            there = stands_first(items, torch.cat([here, filled[users]], 1), model.n_items)
            place, kept = herded(pair_keys(backbone, model, users, items).detach(), there, n)
            column = torch.arange(place.shape[1], device=new.device)
            lists[users], filled[users] = 0, False
            lists[users[:, None], column] = items.gather(1, place).where(kept, 0)
            filled[users[:, None], column] = kept
        teacher = [torch.sigmoid(score_users(backbone, model, users).gather(1, lists[users]))
                   for users in in_pieces(everybody, model.n_items)]
        self.client_state |= {"lists": lists, "filled": filled, "teacher": torch.cat(teacher).detach()}

    # In sessions.

    def begin_round(self, step, round_, backbone):
        if self.settings.lambda_kd == 0.0 or not step.sessions:
            return
        self.n_items, device = step.n_items, step.train.values.device
        if "latest" not in self.client_state:
            none = torch.full((step.n_users, self.settings.exemplars), -1, device=device)
            self.client_state = {"session": none, "position": none, "latest": none[:, 0]}
        # begin_local and end_local write into these.
        self.client_state = {name: table.clone() for name, table in self.client_state.items()}

    def replayed_sessions(self, users, draw):
        """Those of the exemplars, and the latest that the client trained on."""
        if self.settings.lambda_kd == 0.0 or draw.round == 0:
            return None
        number = torch.cat([self.client_state["session"][users], self.client_state["latest"][users, None]], 1)
        last = torch.iinfo(number.dtype).max
        number = number.where(number >= 0, last).sort(1).values
        number[:, 1:] = number[:, 1:].where(number[:, 1:] != number[:, :-1], last)
        number = number.sort(1).values
        return number.where(number < last, -1)

    @torch.no_grad()
    def begin_local(self, local):
        """The client's exemplars by the model just received, and its scores of them."""
        if not isinstance(local, LocalSessions) or local.replayed is None:
            return
        vectors = local.replay(dropout=False)
        real = local.replayed.real[:, :, -vectors.shape[2]:]
        there = self._candidates(local, real)
        place, filled = herded(vectors.flatten(1, 2), there, self.settings.exemplars)
        # In order: of two items the mean is as near to either, and rounding would say which comes first.
        place = place.where(filled, there.shape[1]).sort(1).values.where(filled, 0)
        self._keep(local, place, filled, vectors.shape[2])
        items = local.replayed.items
        known = (local.replayed.sessions >= 0)[:, :, None].expand_as(items).flatten(1)
        classes = stands_first(items.flatten(1), known, self.n_items)
        every = stands_first(torch.cat([items.flatten(1), local.items], 1),
                      torch.cat([known, torch.ones_like(local.items, dtype=torch.bool)], 1), self.n_items)
        samples = local.sequence.real[:, -vectors.shape[2]:].sum(1)
        ratio = filled.sum(1).to(vectors) * classes.sum(1) / (samples * every.sum(1))
        local.kept |= {"place": place, "filled": filled, "classes": classes, "adapted": ratio.sqrt()}
        local.kept["teacher"] = self._logits(local, vectors).softmax(2)

    def _candidates(self, local, real: Tensor) -> Tensor:
        """Which samples of the replayed sessions are of the latest one, or exemplars so far: (C, K M) of ``real``."""
        sessions, users = local.replayed.sessions, local.users
        session, position, latest = (self.client_state[name][users] for name in ("session", "position", "latest"))
        there = ((sessions == latest[:, None])[:, :, None] & real).flatten(1)
        column = (sessions[:, None] == session[:, :, None]).long().argmax(2)
        place = (column * real.shape[2] + position).where(session >= 0, there.shape[1])
        former = torch.cat([there, torch.zeros_like(there[:, :1])], 1).scatter_(1, place, True)
        return there | former[:, :-1]

    def _keep(self, local, place: Tensor, filled: Tensor, vectors: int) -> None:
        """Remember the exemplars, at their places (C, n) among so many vectors of each replayed session."""
        for name, values in (("session", local.replayed.sessions.gather(1, place // vectors)),
                             ("position", place % vectors)):
            new = torch.full_like(self.client_state[name][local.users], -1)
            new[:, :place.shape[1]] = values.where(filled, -1)
            self.client_state[name].index_copy_(0, local.users, new)

    def _logits(self, local, vectors: Tensor) -> Tensor:
        """Scores of the replayed sessions' items after each exemplar, (C, n, items); of an item that stands there again
        one so low that it has no share in a softmax."""
        place = local.kept["place"].unsqueeze(2).expand(-1, -1, vectors.shape[3])
        scores = local.replay_scores(vectors.flatten(1, 2).gather(1, place))
        return scores.masked_fill(~local.kept["classes"][:, None], -1e30)

    def local_loss(self, batch):
        if "teacher" not in batch.kept:  # as always on lists of items
            return None
        logits, teacher = self._logits(batch, batch.replay()), batch.kept["teacher"]
        weights = batch.kept["filled"].to(logits)
        if self.settings.kd_reduction == "mean":
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        each = logits.logsumexp(2) - (teacher * logits).sum(2)
        return self.settings.lambda_kd * batch.kept["adapted"] * (weights * each).sum(1)

    def end_local(self, local):
        if isinstance(local, LocalSessions) and self.settings.lambda_kd > 0.0:
            self.client_state["latest"].index_copy_(0, local.users, local.session)
