"""Whether a run's tables fit into memory and its checkpoints onto the disk, asked before it starts, and what is said
when memory ends later.

Counted are the tables that grow with users and items. What is made of a chunk of clients or of evaluated users is
bounded (see ``core/tuning.py``) and not counted, nor what a method keeps, so a run that passes may still run out of
memory.
"""

from __future__ import annotations

import math
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Mapping

import torch

from ..data.stream import Step
from ..plugin.silo import ModuleBackbone
from ..rng import Tables
from ..core.errors import OutOfMemory, UserError
from ..core.files import free_bytes
from ..federation.parts import Federation
from ..kernels.memory import available, in_gib

_SNAPSHOTS = 3  # of a model: before a round, after it, and of the best round
_LENGTHS = ("dim", "embedding_size", "hidden_size", "max_length")  # what plugins call those of vectors and sequences
_PER_SCORE = 3  # numbers that live for each score of a mini-batch: itself, its probability and its gradient


def require_item_tables(f: Federation) -> None:
    """Raise UserError if the public item tables alone need more memory than there is. Asked before anything else, with
    tables of no row: what looks closer makes rows, of which one may be too long."""
    if isinstance(f.backbone, ModuleBackbone):
        return
    made = f.backbone.new_rows(f.seed, range(0), range(0))
    if isinstance(made, tuple) and isinstance(made[0], Mapping):  # or a check that follows says that it is not
        needed = _SNAPSHOTS * _bytes_of_number(f) * f.stream.steps[-1].n_items * _per_row(made[0])
        _require(f, needed, "item tables alone take")


def require(f: Federation) -> None:
    """Raise UserError if a run's tables need more memory than there is; does nothing where that is not known."""
    without_users = None if f.cross_silo else max(_of_step(f, _without_users(step)) for step in f.stream.steps)
    _require(f, bytes_of_tables(f), "tables take", without_users)


def require_disk(f: Federation, results: Path) -> None:
    """Raise UserError if the disk has no room for two of a run's checkpoints, as one is written beside the last.
    Clients that hold many users have few parameters, which are not counted."""
    if f.cross_silo:
        return
    needed, without_users = (2 * max(_of_checkpoint(f, step) for step in steps)
                             for steps in (f.stream.steps, list(map(_without_users, f.stream.steps))))
    if needed > (free := free_bytes(results)):
        raise UserError(f"results folder {results}: not enough room: {in_gib(free)} are free, and two checkpoints of "
                        f"the run take {in_gib(needed)} ({_sizes(f)}).\nWhat helps: another disk with --results DIR, "
                        f"smaller tables, fewer users and items.{_that_fit(f, free, needed, without_users)}")


def bytes_of_tables(f: Federation) -> int:
    """What the tables of a run take in the step in which they are largest."""
    return _in_epochs(f) if f.cross_silo else max(_of_step(f, step) for step in f.stream.steps)


def ended(error: BaseException, f: Federation) -> OutOfMemory:
    """The error to raise when memory ends in a run: what could not be allocated, what its tables take, what helps."""
    said = str(error) if isinstance(error, OutOfMemory) else _in_words(error)
    return OutOfMemory(f"{said}\nThe run's tables take {in_gib(bytes_of_tables(f))} ({_sizes(f)}).\n"
                       f"{_what_helps(f)}\nThe same command goes on from the run's last checkpoint.")


def _in_words(error: BaseException) -> str:
    """What such an error says, without where in PyTorch it was and its advice on the allocator."""
    if not isinstance(error, torch.OutOfMemoryError):
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        return "out of memory: " + (f"Tried to allocate {in_gib(int(asked[1]))}." if asked else
                                    f"{str(error) or 'no more is known'}.")
    words = [part for part in str(error).split(". ") if part.startswith(("Tried", "GPU", "CUDA"))]
    return f"out of GPU memory: {'. '.join(words or [str(error) or 'no more is known']).rstrip('.')}."


def _require(f: Federation, needed: int, what: str, without_users: int | None = None) -> None:
    memory = available(f.device)
    if memory is not None and needed > memory.bytes:
        fitting = "" if without_users is None else _that_fit(f, memory.bytes, needed, without_users)
        raise UserError(f"not enough memory: {in_gib(memory.bytes)} are left ({memory.limit}). The run's {what} "
                        f"{in_gib(needed)} ({_sizes(f)}).\n{_what_helps(f)}{fitting}")


def _that_fit(f: Federation, room: int, needed: int, without_users: int) -> str:
    """How many users there is room for, as one more line; empty if there is for none."""
    users = f.stream.steps[-1].n_users
    fitting = users * max(room - without_users, 0) // max(needed - without_users, 1)
    return f"\nAbout {fitting:,} of the users would fit." if 0 < fitting < users else ""


def _without_users(step: Step) -> Step:
    """A step's items alone."""
    nobody = replace(step.train, indptr=step.train.indptr[:1], values=step.train.values[:0], ratings=None)
    return replace(step, n_users=0, old_users=0, train=nobody)


def _of_checkpoint(f: Federation, step: Step) -> int:
    """The model, the best one, and that of the step before."""
    per_item, per_user, per_pair, dense = _numbers(f, step)
    return _bytes_of_number(f) * sum(
        copies * (items * per_item + users * per_user + users * items * per_pair + dense)
        for copies, users, items in ((2, step.n_users, step.n_items), (1, step.old_users, step.old_items)))


def _numbers(f: Federation, step: Step) -> tuple[int, int, int, int]:
    """How many numbers a model has per item, per user, per pair of both, and besides."""
    backbone = f.backbone
    public, private = backbone.new_rows(f.seed, range(1), range(1))
    of_method = f.acting_in(step).new_private(f.seed, range(1), backbone)
    per_item, copies = _per_row(public), backbone.keeps_local_tables + backbone.serves_tables
    per_pair = _per_row(backbone.new_personal(f.seed, range(1))) + copies * per_item
    return (per_item, _per_row({**private, **of_method}), per_pair,
            sum(table.numel() for table in backbone.new_dense(f.seed).values()))


def _of_step(f: Federation, step: Step) -> int:
    """Those before a round, after it and of the best round, after arrivals too with ``fold_in``; the best of the step
    before; what a server makes of uploads that are whole tables; uploads that it looks at one by one; and what its
    optimiser remembers."""
    backbone, number = f.backbone, _bytes_of_number(f)
    per_item, per_user, per_pair, dense = _numbers(f, step)
    copies = backbone.keeps_local_tables + backbone.serves_tables

    def model(users: int, items: int) -> int:
        return items * per_item + users * per_user + users * items * per_pair + dense

    models = (_SNAPSHOTS + (f.server.fold_in > 0)) * model(step.n_users, step.n_items)
    models += model(step.old_users, step.old_items)
    of_pairs = 0
    uploads = {0: 0, 1: 1, 2: 3}[copies] * step.n_users * step.n_items * per_item
    if f.server.single_updates or f.acting_in(step).overrides("aggregate_updates"):  # of the samples' rows, or of all
        held = step.train.lengths * (1 + f.local.negatives)
        rows = step.n_users * step.n_items if backbone.whole_tables else int(held.clamp(max=step.n_items).sum())
        uploads += rows * per_item + step.n_users * dense
        of_pairs = 3 * 8 * step.n_users ** 2 if f.server.aggregator == "krum" else 0
    if f.attack is not None:  # what malicious clients trained, and what they send
        uploads += 2 * int(f.server.malicious * step.n_users) * (step.n_items * per_item + dense)
    optimiser = f.server.optimiser
    moments = optimiser.tables * (step.n_items * per_item + dense) if optimiser else 0
    return number * (models + uploads + moments) + of_pairs


def _in_epochs(f: Federation) -> int:
    """Of clients that hold many users: also gradients, what the optimiser remembers, and all items' scores of a
    mini-batch."""
    backbone, items = f.backbone, f.stream.steps[-1].n_items
    scored = max((len(domain.items) for domain in f.stream.domains), default=items)
    if isinstance(backbone, ModuleBackbone):  # whose tables are the modules', of vectors of the setting dim
        parameters = items * backbone.settings.dim
    else:
        dense = sum(table.numel() for table in backbone.new_dense(f.seed).values())
        parameters = items * _per_row(backbone.new_rows(f.seed, range(0), range(0))[0]) + f.stream.per_step * dense
    texts = 4 * sum(vectors.numel() for vectors in f.stream.features or ()) if f.device.type == "cuda" else 0
    of_optimiser = 2 * (f.local.optimiser == "adam") + 1
    return _bytes_of_number(f) * (parameters * (_SNAPSHOTS + of_optimiser)
                                  + _PER_SCORE * f.local.batch_size * scored) + texts


def _per_row(tables: Tables) -> int:
    """Numbers in a row of all tables together."""
    return sum(math.prod(table.shape[1:]) for table in tables.values())


def _bytes_of_number(f: Federation) -> int:
    return 8 if f.server.precision == "float64" else 4


def _sizes(f: Federation) -> str:
    step = f.stream.steps[-1]
    return f"{step.n_users:,} users, {step.n_items:,} items, {f.server.precision}"


def _what_helps(f: Federation) -> str:
    """Settings that lower what a run needs, first those that its backbone and method read."""
    lengths = {name: getattr(plugin.settings, name) for plugin in (f.backbone, f.method) for name in _LENGTHS
               if name not in plugin.ignored and hasattr(plugin.settings, name)}
    helps = [f"a smaller --set {name}=N (now {value or 'that of the model'})" for name, value in lengths.items()]
    if f.cross_silo:
        helps.append(f"a smaller --set batch_size=N (now {f.local.batch_size})")
    if f.server.precision == "float64":
        helps.append("--set precision=float32")
    if f.device.type == "cuda":
        helps.append("--device cpu")
    elif torch.get_num_threads() > 1:
        helps.append("--threads 1, which trains fewer clients at a time and changes no number")
    if multiprocessing.parent_process() is not None:
        helps.append("fewer --jobs")
    return f"What helps: {', '.join([*helps, 'a larger machine', 'fewer users and items'])}."
