"""What a run will hold in memory at its peak, estimated before it starts, and whether that is there.

Each room tells the bytes of what it holds (``client/footprint.py``, ``evaluation/footprint.py``,
``federation/footprint.py``); the plan adds them up. Its parts are what a round and its evaluation hold at the same
time, beyond the process and the stream, which are there already. Training, uploads and evaluation follow one another,
so the largest of them counts. Checkpoints are written without a copy.

``tests/runs/test_memory_plan.py`` holds two runs of one block to 30 % of the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Mapping

from ..client import footprint as client
from ..data.stream import Step
from ..domain_module import ModuleBackbone
from ..errors import UserError
from ..evaluation import footprint as evaluation
from ..federation import footprint as federation
from ..federation.parts import Federation
from ..ops.memory import available

_SNAPSHOTS = 3  # of the item tables: before a round, after it, and in the best round
_PROCESS = 40 << 20  # what PyTorch and the allocator take for each thread when work begins


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of a run by what they are for (see the module)."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def plan(f: Federation, threads: int) -> MemoryPlan:
    """What a run needs at its peak, in the step that needs most.

    Args:
        threads: that train and evaluate at the same time (``--threads``).
    """
    threads = threads if f.device.type == "cpu" else 1
    if f.stream.domains:
        return MemoryPlan({**federation.of_domains(f), "process": _PROCESS * threads})
    return max((_of_step(f, step, threads) for step in f.stream.steps), key=lambda plan: plan.total)


def _of_step(f: Federation, step: Step, threads: int) -> MemoryPlan:
    if f.central:
        return MemoryPlan({**federation.of_one_client(f, step), "process": _PROCESS * threads})
    load = federation.load_of(f, step, threads)
    state, working = f.acting_in(step).memory(load)
    phases = {"training": client.training(load) + threads * working, "uploads": federation.uploads(load),
              "evaluation": evaluation.scores(load)}
    largest = max(phases, key=phases.get)
    return MemoryPlan({"tables": federation.tables(load, f.server.fold_in > 0),
                       "making tables": federation.making_tables(f, load), "the method's state": state,
                       "lists": client.lists(load) + evaluation.candidates(step, f.evaluation),
                       largest: phases[largest], "metrics": evaluation.metrics(step, f.evaluation),
                       "process": _PROCESS * threads})


def require_item_tables(f: Federation) -> None:
    """Raise UserError if the public item tables alone need more memory than there is.

    Asked before anything else, with tables of no row: what looks closer makes rows, of which one may be too long.
    """
    if isinstance(f.backbone, ModuleBackbone):  # whose tables the plan of a run counts
        return
    memory, made = available(f.device), f.backbone.new_rows(f.seed, range(0), range(0))
    if memory is None or not (isinstance(made, tuple) and isinstance(made[0], Mapping)):  # said by a check that follows
        return
    row = sum(math.prod(table.shape[1:]) for table in made[0].values())
    items = f.stream.steps[-1].n_items
    needed = _SNAPSHOTS * federation.number_of(f) * items * row
    if needed > memory.bytes:
        raise UserError(f"not enough memory: {_gib(memory.bytes)} are left ({memory.limit}). "
                        f"The item tables alone need {_gib(needed)} ({items:,} items of {row:,} numbers).\n"
                        f"What helps: {', '.join(_helps(f))}.")


def require(f: Federation, threads: int) -> None:
    """Raise UserError if a run needs more memory than there is; does nothing where that is not known."""
    memory = available(f.device)
    if memory is None:
        return
    needed = plan(f, threads)
    if needed.total <= memory.bytes:
        return
    fewer = [f"--threads 1, which needs {_gib(plan(f, 1).total)} and changes no number"] if (
        threads > 1 and f.device.type == "cpu" and plan(f, 1).total <= memory.bytes) else []
    raise UserError(f"not enough memory: {_gib(memory.bytes)} are left ({memory.limit}). {advice(f, threads, fewer)}")


def advice(f: Federation, threads: int, first: Iterable[str] = ()) -> str:
    """How much a run needs, for what, and what makes it need less; ``first`` stands before the general ways."""
    needed = plan(f, threads)
    part, most = max(needed.parts.items(), key=lambda item: item[1])
    step = f.stream.steps[-1]
    return (f"This run needs about {_gib(needed.total)} beyond its data, {_gib(most)} of it for {part} "
            f"({step.n_users:,} users, {step.n_items:,} items).\nWhat helps: {', '.join([*first, *_helps(f)])}.")


def _helps(f: Federation) -> list[str]:
    """What makes a run need less memory."""
    settings = f.backbone.settings
    return [*([f"a smaller --set dim=N (now {settings.dim})"] if hasattr(settings, "dim") else []),
            *(["--set precision=float32"] if f.server.precision == "float64" else []),
            *(["--device cpu"] if f.device.type == "cuda" else []), "a larger machine", "fewer users and items"]


def _gib(number: float) -> str:
    return f"{number / (1 << 30):.2f} GiB"
