"""SCAFFOLD: clients correct their steps by how their gradients differ from those of all clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench import Method, setting
from fedcl_bench.toolbox.functional import with_trailing_dims

CONTROL = "control of "  # begins the names of c and c_u, by parameter
JOINED = "joined"  # whether a client has taken part in the block, and at the server how many have


@dataclass(frozen=True)
class ScaffoldSettings:
    global_lr: float = setting(1.0, "eta_g: multiple of the clients' mean change that the server makes", above=0.0,
                               search=(0.5, 1.0, 2.0))


class Scaffold(Method):
    """With public parameters x of the server, y of client u, control variates c of the server, which it sends with x,
    and c_u, which stays at the client, all 0 when a block begins (Algorithm 1, option II):

        y <- y - eta (g_u(y) - c_u + c)         in every local batch, K of them
        c_u' = c_u - c + (x - y) / (K eta)      the mean of g_u over these batches
        x <- x + eta_g / S sum_u (y - x)        over the S clients that take part
        c <- c + 1 / N sum_u (c_u' - c_u)       N: clients that have taken part in the block so far

    The server needs the sums alone. N is all clients in the paper, and here from the round on in which all have taken
    part. Item rows that a client does not look up have g_u = 0, so that they move by K steps of c_u - c, and c_u' = 0.
    A client keeps as many numbers as the public parameters have.
    """

    name = "scaffold"
    numbers = 1
    title = "control variates of clients and server correct local steps"
    reference = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    Settings = ScaffoldSettings
    first_step = 0
    sees_rows = True
    optimisers = ("sgd",)
    broadcasts = (CONTROL,)

    def __init__(self, settings):
        super().__init__(settings)
        self._public = {}  # of the run's backbone, which is asked once

    def _shapes(self, backbone, n_items):
        """Of all public parameters."""
        if type(backbone) not in self._public:
            self._public[type(backbone)] = backbone.new_rows(0, range(0), range(0))[0], backbone.new_dense(0)
        tables, dense = self._public[type(backbone)]
        return {**{name: (n_items, *table.shape[1:]) for name, table in tables.items()},
                **{name: tuple(value.shape) for name, value in dense.items()}}

    def sums(self, backbone, n_items):
        shapes = self._shapes(backbone, n_items)
        return {**shapes, **{CONTROL + name: shape for name, shape in shapes.items()}, JOINED: ()}

    def new_server_state(self, seed, public):
        return {CONTROL + name: torch.zeros_like(table) for name, table in public.items()}

    def begin_step(self, step, model, backbone):
        self.client_state, self.server_state = {}, self.new_server_state(0, {**model.public, **model.dense})

    def begin_round(self, step, round_, backbone):
        """Chunks of clients write their rows of these tables, of which the ones before are kept."""
        like = next(iter(self.server_state.values()))
        shapes = {CONTROL + name: shape for name, shape in self._shapes(backbone, step.n_items).items()}
        self.client_state = {name: self.client_state[name].clone() if self.client_state else
                             like.new_zeros(step.n_users, *shape) for name, shape in {**shapes, JOINED: ()}.items()}

    def local_loss(self, batch):
        """Its gradient is c - c_u."""
        kept, users, term = batch.kept, batch.users, 0.0
        for name, moved in batch.moved.items():
            if name not in kept:
                own, shared = self.client_state[CONTROL + name], self.server_state.get(CONTROL + name, 0.0)
                items = batch.moved_items
                kept[name] = (shared - own[users] if name in batch.dense else shared[items] - own.flatten(0, 1)
                              .index_select(0, cells(own, users, items)).view(*items.shape, *own.shape[2:]))
            term = term + (kept[name] * moved).flatten(1).sum(1)
        return term

    def end_local(self, local):
        for name, (change, items) in local.changes.items():
            own, shared = self.client_state[CONTROL + name], self.server_state.get(CONTROL + name, 0.0)
            before, size = own[local.users], with_trailing_dims(local.step_sizes[name].to(change), change)
            if items is None:
                after = before - shared - change / size.clamp(min=1e-30)
            else:
                change, after = self._whole(before, shared, size, change, items)
            after = after.where(size > 0.0, before)  # of a client without a local batch
            local.add(name, change)
            local.add(CONTROL + name, after - before)
            own[local.users] = after
        local.add(JOINED, 1.0 - self.client_state[JOINED][local.users])
        self.client_state[JOINED][local.users] = 1.0

    def _whole(self, before, shared, size, change, items):
        """The change of all rows of a table, and c_u' (C, items, ...), given c_u, c and the change of the rows held."""
        at = cells(before, torch.arange(len(before), device=items.device), items)
        whole = (before - shared) * size
        rows = whole.flatten(0, 1).index_fill_(0, at, 0.0).index_add_(0, at, change.flatten(0, 1)).index_select(0, at)
        held = rows.view_as(change) / size.clamp(min=1e-30) + shared[items]  # the same where an item is repeated
        held = before.flatten(0, 1).index_select(0, at) - held.flatten(0, 1)
        return whole, torch.zeros_like(before).flatten(0, 1).index_copy_(0, at, held).view_as(before)

    def aggregate_sums(self, sums, count, public, draw):
        before = self.server_state.get(JOINED, 0.0)
        state = {JOINED: before + sums[JOINED]}
        for name, table in public.items():
            mean = self.server_state.get(CONTROL + name, torch.zeros_like(table))
            state[CONTROL + name] = (mean * before + sums[CONTROL + name]) / state[JOINED]
        self.server_state = state
        return {name: self.settings.global_lr / count * sums[name] for name in public}


def cells(tables, clients, items):
    """Where rows of clients' tables (users, items, ...) lie if these lie end to end."""
    return (clients[:, None] * tables.shape[1] + items).reshape(-1)
