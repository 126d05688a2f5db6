"""Central: the backbone without a federation, trained on everybody's data in mini-batches; and CCD, such a party that
replays its past."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from fedcl_bench import (Incompatible, LocalSettings, Method, SequentialBackbone, UserError, draw_negatives,
                         inherited, make_chunks, rng, session_losses, setting)
from fedcl_bench.toolbox.proxies import ProxyReplay, ProxySettings


@dataclass(frozen=True)
class CentralSettings:
    central_lr: float = setting(1e-2, "Adam's learning rate of all parameters, in place of lr", above=0.0,
                                search=(1e-3, 3e-3, 1e-2, 3e-2))
    central_batch: int = setting(2048, "interactions in a mini-batch; a session counts as max_length of them", low=1)
    central_negatives: int = setting(4, "sampled negatives of each interaction; in sessions one", low=1)


class Central(Method):
    """One party holds all clients' data of the block. A round is an epoch: all interactions in a random order, each
    with the negatives that its client would draw, and Adam on the backbone's loss, averaged over the mini-batch. All
    parameters take their steps together. With a sequential backbone an epoch is of all training sessions, each with
    the loss of a client that trains on it.
    """

    name = "central"
    numbers = 1
    title = "bound: no federation, one party trains on everybody's data of the block"
    reference = "centralised training, the usual upper reference of federated learning (McMahan et al., AISTATS 2017)"
    Settings = CentralSettings
    first_step = 0
    trains, topology, needs_sequential = "server", "central", None
    reads_logits = True
    ignored = {"init": "with the method central, which has no clients that could start with their own",
               "gradient_norm": "with the method central, which scales no gradients"}
    gives_up = {"F1": "one party holds all data", "F4": "and trains on them"}

    def trained_backbone(self, backbone, clients):
        sequential = isinstance(backbone, SequentialBackbone)
        if sequential and self.settings.central_negatives != CentralSettings().central_negatives:
            raise UserError("setting 'central_negatives': has no effect with sequential backbones, whose sessions have "
                            "one negative; leave it out.")
        if sequential and backbone.private_output:
            raise UserError(f"setting 'output_embedding': found private, accepted: tied with the method {self.name}, "
                            f"under which nobody has rows of its own.")
        if backbone.whole_tables or backbone.scores_local_tables or backbone.serves_tables:
            raise Incompatible(f"method '{self.name}' trains the rows of sampled items, and clients of "
                               f"'{backbone.name}' train all rows or keep their own.", "backbone",
                               lambda cls: not (cls.whole_tables or cls.scores_local_tables or cls.serves_tables))
        return backbone

    def central_round(self, step, model, backbone, draw):
        tables = {**model.public, **model.private, **model.dense}
        parameters = {name: table.clone().requires_grad_() for name, table in tables.items()}
        adam = torch.optim.Adam(parameters.values(), lr=self.settings.central_lr)
        self._restore(adam, parameters, draw.round)
        batches = self._of_sessions if isinstance(backbone, SequentialBackbone) else self._of_items
        total = count = 0
        for loss, size in batches(step, model, backbone, parameters, draw):
            adam.zero_grad()
            loss.backward()
            adam.step()
            total, count = total + float(loss.detach()) * size, count + size
        self._save(adam, parameters)
        kinds = {kind: {name: parameters[name].detach() for name in getattr(model, kind)}
                 for kind in ("public", "private", "dense")}
        return replace(model, **kinds), total / count

    def _of_sessions(self, step, model, backbone, parameters, draw):
        """The mean loss of each mini-batch of sessions, by the parameters after the one before, and its size."""
        at_once = max(1, self.settings.central_batch // backbone.settings.max_length)
        for chosen in self._order(len(step.sessions["train"].lengths), step, draw).split(at_once):
            yield session_losses(backbone, parameters, step, chosen, draw).mean(), len(chosen)

    def _of_items(self, step, model, backbone, parameters, draw):
        """The same of mini-batches of interactions."""
        for user, item in zip(*(of.split(self.settings.central_batch) for of in self.samples(step, draw))):
            yield self._loss(backbone, model, parameters, user, item, draw.round), len(user)

    def _order(self, n, step, draw, of="central"):
        """The numbers below n in the order of the epoch."""
        key = rng.key(draw.seed, f"{of} order", draw.step, draw.round)
        return rng.sort_keys(rng.row_keys(key, torch.arange(n, device=step.train.values.device))).argsort()

    def samples(self, step, draw):
        """All interactions in the order of the epoch: users, (n,), and each one's item and negatives, (n, 1 + k)."""
        k, parts = self.settings.central_negatives, []
        local = LocalSettings(negatives=k)
        for chunk in make_chunks(step, (step.train.lengths > 0).nonzero().flatten(), local, row_width=1):
            chunk = chunk.materialise()
            own = torch.arange(chunk.positives.shape[1], device=chunk.users.device) < chunk.count[:, None]
            negatives = draw_negatives(chunk, local, draw.seed, draw.step, draw.round).view(*own.shape, k)
            items = torch.cat([chunk.positives[:, :, None], negatives], 2)
            parts.append((chunk.users[:, None].expand_as(own)[own], items[own]))
        user, item = map(torch.cat, zip(*parts))
        order = self._order(len(user), step, draw)
        return user[order], item[order]

    def _scored(self, backbone, model, parameters, user, item):
        """Each interaction's client, the rows of its items (n, m), and their scores."""
        personal = backbone.new_personal(0, range(0))
        clients = {name: parameters[name][user[:, None], item] if name in personal else parameters[name][user]
                   for name in model.private}
        clients |= {name: parameters[name].expand(len(user), *value.shape) for name, value in model.dense.items()}
        clients |= {name: table[user] for name, table in model.client_context.items()}
        rows = {name: parameters[name][item] for name in model.public}
        return clients, rows, backbone.score(clients, rows)

    def _loss(self, backbone, model, parameters, user, item, round_):
        """The mean loss of a mini-batch: every interaction is a client's local batch."""
        clients, rows, scores = self._scored(backbone, model, parameters, user, item)
        if backbone.pairwise:
            weights = torch.full_like(scores[:, 1:], 1.0 / (scores.shape[1] - 1))
            loss = backbone.pair_loss(scores[:, :1].expand_as(weights), scores[:, 1:], weights)
            weights = torch.full_like(scores, 1.0 / scores.shape[1])
        else:
            weights = torch.full_like(scores, 1.0 / scores.shape[1])
            labels = torch.zeros_like(scores)
            labels[:, 0] = 1.0
            loss = backbone.loss(scores, labels, weights)
        own = backbone.regulariser(clients, rows, weights, {}, round_)
        return (loss if own is None else loss + own).mean()

    def _restore(self, adam, parameters, round_):
        """Adam's moments after the last epoch; a block begins with none."""
        for name, value in parameters.items() if round_ else ():
            adam.state[value] = {part: self.server_state[f"{part} of {name}"].clone()
                                 for part in ("step", "exp_avg", "exp_avg_sq")}

    def _save(self, adam, parameters):
        self.server_state = {**self.server_state, **{f"{part} of {name}": moment for name, value in parameters.items()
                                                     for part, moment in adam.state[value].items()}}


class CentralJoint(Central):
    """The same on all data up to the block, in each block from untrained parameters: without any constraint."""

    name = "central-joint"
    numbers = 1
    title = "bound: no federation and no forgetting, one party trains on everybody's data up to the block"
    history = restarts = True
    gives_up = {**Central.gives_up, "C1": "data of all earlier blocks are kept"}


@dataclass(frozen=True)
class CCDSettings(ProxySettings, CentralSettings):
    lambda_replay: float = inherited(ProxySettings, "lambda_replay", default=0.5)
    replay_redraw: int = setting(5, "rounds after which the items to replay are drawn anew", low=1)


class CCD(ProxyReplay, Central):
    """The continual update of CCD's student, by a party that holds the data of the block.

    From the second block on an epoch of ``central`` is followed by one over the items that users replay, shuffled into
    mini-batches, under the same Adam: lambda exp(-epoch / T) times the mean cross-entropy to the proxies'
    probabilities. A proxy is a moving average of the models W that blocks started from,

        S <- s_w S + (1 - s_w) W,    P <- p_w P + (1 - p_w) W

    on rows known before; both begin as the first W, and only S is replayed until they differ. Of a proxy's top A items,
    without those of this and the previous block, a user replays some, drawn with weights
    exp(eps (rank_W - rank_proxy)), anew after epochs 5, 10, ... from 0 on; of an item drawn from both, the larger
    probability. W's ranks are those of the block's start in all its epochs, as in the released code (Run/S_update.py).

    Left out: the teachers, so that W is what the previous block ended with (in CCD it is distilled from them in
    between, and they from it); that new users and items start from their neighbours; that negatives are none of these
    models' top items. Losses are means, so that the last, smaller mini-batch counts as others (code: sums), and there
    is no weight decay.
    """

    name = "ccd"
    numbers = 1
    title = "one party, whose model distils stability and plasticity proxies of its own past (CCD's student)"
    reference = "Lee et al., Continual Collaborative Distillation for Recommender System, KDD 2024, arXiv 2405.19046"
    Settings = CCDSettings
    needs_sequential = False
    gives_up = Central.gives_up

    def _of_items(self, step, model, backbone, parameters, draw):
        yield from super()._of_items(step, model, backbone, parameters, draw)
        drawn = None if self.off or step.index == 0 else self.drawn(
            torch.arange(step.n_users, device=step.train.values.device),
            replace(draw, round=max(draw.round - 1, 0) // self.settings.replay_redraw))
        if drawn is None:
            return
        items, labels, weights = drawn
        user, column = weights.nonzero().T
        order = self._order(len(user), step, draw, of="replay")
        weight = self.settings.lambda_replay * math.exp(-draw.round / self.settings.anneal)
        for chosen in order.split(self.settings.central_batch) if len(order) else ():
            who, which = user[chosen], (user[chosen], column[chosen])
            scores = self._scored(backbone, model, parameters, who, items[which][:, None])[2].squeeze(1)
            yield weight * binary_cross_entropy_with_logits(scores, labels[which]), len(who)
