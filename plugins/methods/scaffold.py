"""SCAFFOLD: clients correct their steps by how their gradients differ from those of all clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench import Method, setting
from fedcl_bench.toolbox import item_memory
from fedcl_bench.toolbox.functional import with_trailing_dims
from fedcl_bench.toolbox.layers import public_shapes
from fedcl_bench.toolbox.places import at_places, distinct

CONTROL = "control of "  # begins the names of c and c_u, by parameter
STEPS = "steps of "  # begins the names of sums of K eta, by item table
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
        c <- (N' c + sum_u (c_u' - c_u)) / N    N: clients that have taken part in the block so far, N' before

    The server needs the sums alone. N is all clients in the paper, and here from the round on in which all have taken
    part. Item rows that a client does not look up have g_u = 0: they move by K eta (c_u - c), and c_u' = 0. So clients
    keep c_u of the rows that they looked up last and send what else there is of c_u and g_u; K eta c is left to the
    server, which knows c, by the sum of K eta.
    """

    name = "scaffold"
    numbers = 2
    title = "control variates of clients and server correct local steps"
    reference = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    Settings = ScaffoldSettings
    first_step = 0
    sees_rows = True
    optimisers = ("sgd",)
    broadcasts = (CONTROL,)

    def _shapes(self, backbone, n_items):
        """Of public item tables, and of public parameters without item rows."""
        tables, dense = public_shapes(backbone)
        return {name: (n_items, *shape[1:]) for name, shape in tables.items()}, dense

    def sums(self, backbone, n_items):
        tables, dense = self._shapes(backbone, n_items)
        shapes = tables | dense
        return {**shapes, **{CONTROL + name: shape for name, shape in shapes.items()},
                **{STEPS + name: () for name in tables}, JOINED: ()}

    def new_server_state(self, seed, public):
        return {CONTROL + name: torch.zeros_like(table) for name, table in public.items()}

    def begin_step(self, step, model, backbone):
        self.client_state, self.server_state = {}, self.new_server_state(0, {**model.public, **model.dense})

    def begin_round(self, step, round_, backbone):
        """Chunks of clients write their rows of these tables, of which the ones before are kept."""
        before, like = self.client_state, next(iter(self.server_state.values()))
        tables, dense = self._shapes(backbone, step.n_items)
        whole = {JOINED: (), **{CONTROL + name: shape for name, shape in dense.items()}}
        self.client_state = {name: before[name].clone() if before else like.new_zeros(step.n_users, *shape)
                             for name, shape in whole.items()}
        self._n_items = step.n_items
        for name, shape in tables.items():
            self.client_state |= item_memory.copied(before, CONTROL + name, shape, step.n_users, like)

    def gradient_correction(self, local, items):
        """c - c_u."""
        state, users = self.client_state, local.users
        for control in (name for name in state if name.startswith(CONTROL)):
            name = control.removeprefix(CONTROL)
            if name in local.dense:
                local.kept[name] = self.server_state.get(control, 0.0) - state[control][users]
            else:
                local.kept[name] = self.server_state[control][items] - item_memory.look_up(state, control, users, items)
        return dict(local.kept)

    def end_local(self, local):
        for name, (change, items) in local.changes.items():
            steps = local.step_sizes[name].to(change)
            size = with_trailing_dims(steps, change)
            if name in local.dense:
                own, after = self.client_state[CONTROL + name], mean_gradient(change, size, local.kept[name])
                local.add(name, change)
                local.add(CONTROL + name, after - own[local.users])
                own[local.users] = after
            else:
                local.add(STEPS + name, steps)
                self._end_table(local, name, change, items, size)
        local.add(JOINED, 1.0 - self.client_state[JOINED][local.users])
        self.client_state[JOINED][local.users] = 1.0

    def _end_table(self, local, name, change, items, size):
        """Send y - x + K eta c and c_u' - c_u of an item table, and keep c_u'."""
        if items is None:
            items = torch.arange(change.shape[1], device=change.device).expand(change.shape[:2])
        places, count = distinct(items, self._n_items)
        items, change, correction = (at_places(each, places) for each in (items, change, local.kept[name]))
        before, listed = item_memory.listed(self.client_state, CONTROL + name, local.users)
        listed = torch.cat([listed, items], 1)
        real = with_trailing_dims(torch.arange(places.shape[1], device=places.device) < count[:, None], change)
        after = mean_gradient(change, size, correction) * real
        local.add(name, torch.cat([before * size, (change + correction * size) * real], 1), listed)
        local.add(CONTROL + name, torch.cat([-before, after], 1), listed)
        item_memory.write(self.client_state, CONTROL + name, local.users, after, items, count)

    def aggregate_sums(self, sums, count, public, draw):
        before = self.server_state.get(JOINED, 0.0)
        state, changes = {JOINED: before + sums[JOINED]}, {}
        for name, table in public.items():
            mean = self.server_state.get(CONTROL + name, torch.zeros_like(table))
            state[CONTROL + name] = (mean * before + sums[CONTROL + name]) / state[JOINED]
            moved = sums[name] - mean * sums[STEPS + name] if STEPS + name in sums else sums[name]
            changes[name] = self.settings.global_lr / count * moved
        self.server_state = state
        return changes


def mean_gradient(change, size, correction):
    """c_u' from y - x, K eta and c - c_u; 0 of a client without a local batch."""
    return -(change / size.clamp(min=1e-30) + correction) * (size > 0.0)
