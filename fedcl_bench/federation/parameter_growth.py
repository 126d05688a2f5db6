"""How the tables grow when a step brings new users and items."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import rng
from ..plugin.backbone import Backbone
from ..data.stream import Step
from ..rng import Tables
from ..plugin.method import Method
from ..plugin.state import Snapshot


_USERS = 1 << 16  # whose rows are drawn together: on the way they take several times as much as a model of them


def _new_rows(backbone: Backbone, seed: int, users: range, items: range, dtype: torch.dtype | None = None
              ) -> tuple[Tables, Tables]:
    """``Backbone.new_rows``, of clients by the numbers they draw by (see ``rng.global_client_ids``); private ones of
    ``dtype``, or as they are drawn."""
    first, *others = [drawn_by[start:start + _USERS] for drawn_by in rng.names_of(users)
                      for start in range(0, max(len(drawn_by), 1), _USERS)]
    with rng.global_client_ids(None):
        public, private = backbone.new_rows(seed, first, items)
        parts = [{name: rows.to(dtype or rows.dtype) for name, rows in private.items()}]
        for interval in others:
            rows = backbone.new_rows(seed, interval, range(0))[1]
            parts.append({name: rows[name].to(parts[0][name].dtype) for name in private})
    return public, {name: torch.cat([part.pop(name) for part in parts]) for name in private} if others else parts[0]


def grow(model: Snapshot, backbone: Backbone, seed: int, step: Step, dtype: torch.dtype, device: torch.device,
         method: Method | None = None) -> Snapshot:
    """Append rows for the users and items that are new in ``step``; ``method`` may have private ones of its own."""
    def grown(old: Tables, rows: Tables) -> Tables:
        rows = {name: added.to(device, dtype) for name, added in rows.items()}
        return {name: torch.cat([old[name], added]) if name in old else added for name, added in rows.items()}

    def grown_each(old: Tables, rows: Tables) -> Tables:
        """Tables with one row per user and item; ``rows`` are those every new cell starts from."""
        result = {}
        for name, start in rows.items():
            result[name] = start.to(device, dtype).expand(step.n_users, *start.shape).clone()
            if name in old:
                users, items = old[name].shape[:2]
                result[name][:users, :items] = old[name]
        return result

    users, items = range(step.old_users, step.n_users), range(step.old_items, step.n_items)
    new_public, new_private = _new_rows(backbone, seed, users, items, dtype)
    if method is not None:
        rows = _private_of(method, backbone, seed, users)
        if users.start and rows.keys() - model.private.keys():  # of a method that did not act in the steps before
            every = _private_of(method, backbone, seed, range(users.stop))
            rows = {name: table if name in model.private else every[name] for name, table in rows.items()}
        new_private |= rows
        # A method may make state up to the last number it is told; there are no more than the clients that are here.
        method.client_state = {name: values[:step.n_users].to(device) for name, values in method.client_state.items()}
    public = grown(model.public, new_public)
    personal = grown_each(model.private, backbone.new_personal(seed, range(step.n_items)))
    dense = model.dense or grown({}, backbone.new_dense(seed))
    local = grown_each(model.local, public) if backbone.keeps_local_tables else {}
    served = grown_each(model.personalised, public) if backbone.serves_tables else {}
    return Snapshot(public, {**grown(model.private, new_private), **personal}, dense, local, served,
                    backbone.remember(step.training, model.client_context))


def _private_of(method: Method, backbone: Backbone, seed: int, users: range) -> Tables:
    """A method's own private parameters that some users start with."""
    drawn_by = rng.names(torch.arange(users.start, users.stop))
    among = range(int(drawn_by.min()), 1 + int(drawn_by.max())) if users else users
    with rng.global_client_ids(None):
        rows = method.new_private(seed, among, backbone)
    return {name: table[drawn_by - among.start] for name, table in rows.items()}


def reset_private(model: Snapshot, backbone: Backbone, seed: int, users: Tensor) -> Snapshot:
    """Give some users the private parameters (but for personal tables) that they started with."""
    fresh = _new_rows(backbone, seed, range(model.n_users), range(0))[1]
    return replace(model, private={
        name: table.index_copy(0, users, fresh[name].to(table)[users]) if name in fresh else table
        for name, table in model.private.items()})


def initial_private(model: Snapshot, backbone: Backbone, seed: int, users: range) -> Tables:
    """The backbone's private parameters that some users start with, personal tables too, each (users, ...)."""
    rows = _new_rows(backbone, seed, users, range(0))[1]
    rows |= {name: table.expand(len(users), *table.shape)
             for name, table in backbone.new_personal(seed, range(model.n_items)).items()}
    return {name: table.to(model.private[name]) for name, table in rows.items()}


def row_width(model: Snapshot, backbone: Backbone) -> int:
    """Numbers per item that one client holds."""
    tables = [*(table[0] for table in model.public.values()),
              *(model.private[name][0, 0] for name in backbone.new_personal(0, range(0)))]
    return sum(row.numel() for row in tables)
