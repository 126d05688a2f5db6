"""Papers whose tables can be filled and rebuilt: what runs each table needs, and the numbers it prints."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Iterable, Iterator, Mapping

from ...core.errors import UserError, unknown
from ...runs.specs import RunSpec
from .definitions import Key, Lead, PaperTable, Printed

_NAMES = ("f3crec", "fcucr", "ffmsr")


class _Papers(Mapping[str, ModuleType]):
    """The definitions of each paper, imported when they are asked for."""

    def __getitem__(self, paper: str) -> ModuleType:
        if paper not in _NAMES:
            raise KeyError(paper)
        return importlib.import_module(f"{__name__}.{paper}")

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


PAPERS = _Papers()
__all__ = ["PAPERS", "Key", "Lead", "PaperTable", "Printed", "figure_specs", "get", "label", "select", "specs"]


def get(paper: str) -> ModuleType:
    """The definitions of a paper. Raises UserError for an unknown one."""
    if paper not in PAPERS:
        raise unknown("paper", paper, PAPERS)
    return PAPERS[paper]


def label(name: str) -> str:
    """A method, backbone, dataset or metric as the papers call it; as it is if none of them knows it."""
    return next((paper.LABELS[name] for paper in PAPERS.values() if name in paper.LABELS), name)


def select(paper: str, tables: Iterable[int]) -> list[PaperTable]:
    """Tables of a paper by number. Raises UserError for an unknown paper or table."""
    known, left_out = get(paper).TABLES, get(paper).LEFT_OUT
    for number in (tables := list(tables)):
        if number in left_out:
            raise UserError(f"table {number} of {paper}: {left_out[number]}")
        if number not in known:
            raise unknown(f"table of {paper}", str(number), map(str, known))
    return [known[number] for number in dict.fromkeys(tables)]


def _filtered(paper: str, needed: Iterable[RunSpec], datasets: Iterable[str] | None, backbones: Iterable[str] | None,
              methods: Iterable[str] | None) -> list[RunSpec]:
    """The specs of these names, each once; UserError for a name that none of them has."""
    needed = list(dict.fromkeys(needed))
    chosen = {"dataset": datasets, "backbone": backbones, "method": methods}
    chosen = {kind: list(names) for kind, names in chosen.items() if names is not None}
    for kind, names in chosen.items():
        known = {getattr(spec, kind) for spec in needed}
        for name in names if needed else ():
            if name not in known:
                raise unknown(f"{kind} of these tables of {paper}", name, known)
    return [spec for spec in needed if all(getattr(spec, kind) in names for kind, names in chosen.items())]


def specs(paper: str, tables: Iterable[int], datasets: Iterable[str] | None = None,
          backbones: Iterable[str] | None = None, methods: Iterable[str] | None = None) -> list[RunSpec]:
    """Every run that tables of a paper need, each once.

    Args:
        paper: name, as ``f3crec``.
        tables: the tables' numbers.
        datasets, backbones, methods: only these; None is all.

    Raises:
        UserError: for an unknown paper or table, or a name that none of the tables has.
    """
    needed = [spec for table in select(paper, tables) for spec in table.specs()]
    return _filtered(paper, needed, datasets, backbones, methods)


def figure_specs(paper: str, figures: Iterable[str | int], datasets: Iterable[str] | None = None,
                 backbones: Iterable[str] | None = None, methods: Iterable[str] | None = None) -> list[RunSpec]:
    """Every run that figures of a paper need, each once; arguments and errors as for ``specs``."""
    known, aliases = get(paper).FIGURES, get(paper).FIGURE_ALIASES
    needed: list[RunSpec] = []
    for figure in map(str, figures):
        name = aliases.get(figure, figure)
        if name not in known:
            raise unknown(f"figure of {paper}", figure, [*known, *aliases])
        needed += known[name]()
    return _filtered(paper, needed, datasets, backbones, methods)
