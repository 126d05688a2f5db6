"""What the tables of a federation take in memory in a step, in bytes, estimated before the run starts."""

from __future__ import annotations

import torch

from ..client.footprint import StepLoad, encoded
from ..client.ways import choose_way
from ..data.stream import Step
from ..domain_module import ModuleBackbone
from ..model import Snapshot, numbers
from ..sizes import SIZES
from .parts import Federation

_VECTORS_OF_SAMPLE = 8  # that a sample has on average where they are as many as its items
_DRAWN = 2  # arrays of 8 bytes that live while normal numbers are drawn and scaled


def load_of(f: Federation, step: Step, threads: int) -> StepLoad:
    """What decides how much memory a step needs.

    Args:
        threads: that train and evaluate at the same time.
    """
    backbone, first, acting = f.backbone, range(1), f.acting_in(step)
    public, private = backbone.new_rows(f.seed, first, first)
    model = Snapshot(public, private | acting.new_private(f.seed, first, backbone), backbone.new_dense(f.seed))
    return StepLoad(backbone, step, model, numbers(backbone.new_personal(f.seed, first)), number_of(f), f.local,
                    choose_way(backbone, acting, model, f.local, bool(step.sessions)), threads, f.device)


def number_of(f: Federation) -> int:
    """Bytes of a parameter."""
    return 8 if f.server.precision == "float64" else 4


def tables(load: StepLoad, arrivals: bool) -> int:
    """The parameters of all clients and the server: before the round, after it, and in the best round; and after new
    users have arrived. What clients remember is the same in all of them.

    From the second step on also those of the step before, whose memory the allocator does not give back for larger
    tables.
    """
    step = load.step
    now, before = (_snapshot(load, *counts) for counts in ((step.n_users, step.n_items),
                                                           (step.old_users, step.old_items)))
    return (4 if arrivals else 3) * (now + before) + load.backbone.remembered_bytes(step)


def making_tables(f: Federation, load: StepLoad) -> int:
    """What drawing initial rows in double precision takes beyond the tables; no other snapshots of the step are there
    yet, and nobody trains."""
    step = load.step
    new_users, new_items = step.n_users - step.old_users, step.n_items - step.old_items
    making = 8 * (_DRAWN * max(new_items * load.public, new_users * _drawn(f)) + new_users * load.private)
    return max(making - 2 * _snapshot(load, step.n_users, step.n_items), 0)


def uploads(load: StepLoad) -> int:
    """Every participant's item tables, and the tables that the server makes of them (twice on the way)."""
    if not load.backbone.keeps_local_tables:
        return 0
    copies = 3 if load.backbone.serves_tables else 1
    return load.number * load.step.n_users * load.step.n_items * load.public * copies


def of_one_client(f: Federation, step: Step) -> dict[str, int]:
    """What training takes with ``topology=central``: tables before and after, in the best round and at the optimiser,
    gradients and moments; of a batch what the encoder keeps, scores with what they are pooled from, and what is kept to
    differentiate them."""
    return _in_epochs(f, step.n_items, step.n_items, 1)


def of_domains(f: Federation) -> dict[str, int]:
    """The same for a stream of domains, one of which trains at a time, or all in the same batches. What items' texts
    say is mapped from files where it need not be on a GPU."""
    steps = f.stream.steps
    if isinstance(f.backbone, ModuleBackbone):
        of_optimiser = 4 + 2 * (f.local.optimiser == "adam")
        each = [f.backbone.bytes_of(step.n_items - step.old_items, f.local.batch_size, number_of(f)) for step in steps]
        on_device = 0 if f.device.type == "cpu" else 4 * sum(vectors.numel() for vectors in f.stream.features)
        return {"tables": sum(tables for tables, _ in each) * (4 + of_optimiser),
                "training": max(training for _, training in each), "what items' texts say": on_device}
    return _in_epochs(f, steps[-1].n_items, max(step.n_items - step.old_items for step in steps), len(steps))


def _in_epochs(f: Federation, items: int, scored: int, copies: int) -> dict[str, int]:
    """Of so many items, of which a sample scores so many; with so many copies of dense parameters."""
    backbone, local, number = f.backbone, f.local, number_of(f)
    public = numbers(backbone.new_rows(f.seed, range(0), range(1))[0])
    parameters = items * public + copies * numbers(backbone.new_dense(f.seed))
    of_optimiser = 4 + 2 * (local.optimiser == "adam")
    vectors = min(backbone.n_vectors, _VECTORS_OF_SAMPLE) if not backbone.positionwise else 1
    samples = max(local.batch_size, SIZES.central_scored)
    longest = max(int(step.sessions["train"].lengths.max()) for step in f.stream.steps)
    return {"tables": number * parameters * (4 + of_optimiser) + 8 * _DRAWN * items * public,
            "training": number * samples * (scored * (3 + vectors) + encoded(backbone, longest))}


def _snapshot(load: StepLoad, users: int, items: int) -> int:
    """One model of so many users and items. Tables with a row per user and item (personal ones, clients' copies, those
    that the server makes for each client) are nearly all of it where there are any."""
    copies = load.backbone.keeps_local_tables + load.backbone.serves_tables
    return load.number * (items * load.public + users * load.private + load.dense
                          + users * items * (load.personal + copies * load.public))


def _drawn(f: Federation) -> int:
    """Private numbers per user that differ between users from the start."""
    private = f.backbone.new_rows(f.seed, range(2), range(1))[1]
    return sum(rows[0].numel() for rows in private.values() if not torch.equal(rows[0], rows[1]))
