"""Which ambiguities a result hangs on: each setting that a paper and its code read differently, changed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping

from ..core.errors import PluginError
from ..runs.config import declared, resolve, without_effect
from ..runs.readings import READING, READINGS, values_of
from ..runs.registry import Registry
from ..runs.specs import RunSpec, Tuned
from ..core.settings import as_text, flat


@dataclass(frozen=True)
class Case:
    """The runs of one reading, but for their seeds."""

    # The method looked at, and the one that its lead is over, or None.
    proposed: RunSpec
    against: RunSpec | None
    # The one setting in which it differs from the default case, which has none; ``reading`` for all in which the
    # default case differs from a reading.
    setting: str = ""
    # That setting's values there and here, each with whose reading it is, for people.
    default: str = ""
    other: str = ""

    @property
    def specs(self) -> list[RunSpec]:
        return [spec for spec in (self.proposed, self.against) if spec is not None]


def cases(registry: Registry, proposed: RunSpec, against: RunSpec | None,
          tuned: Tuned | None = None) -> tuple[list[Case], list[str]]:
    """The default case, then one for each other value of each of the ``ambiguities`` of the method and the backbone,
    then one for all values of the paper together and of the code.

    A setting changes for both methods if both have it. One without effect beside the others is left out. Returns the
    cases, and sentences on what is left out. Raises UserError for a setting or value that a run does not take, and
    PluginError if a plugin reads a setting differently that no run of it has.
    """
    parts = resolve(registry, proposed.method, proposed.backbone, proposed.dataset, proposed.layers(tuned))
    usual, inactive = flat(parts), without_effect(parts, registry.get("backbone", proposed.backbone).cls,
                                                  registry.get("method", proposed.method).cls)
    result, notes = [Case(proposed, against)], []
    differs = declared(parts.stream, *(registry.get(kind, getattr(proposed, kind)).cls
                                       for kind in ("method", "backbone")))
    for name, values in differs.items():
        if name not in usual:
            raise PluginError(f"ambiguities of {proposed.method} or {proposed.backbone} name '{name}', expected a "
                              f"setting of their runs.")
        if name in inactive:
            notes.append(f"{name} is left out, as it has no effect {inactive[name]}.")
            continue
        specs = {value: [spec and _changed(registry, spec, name, value, tuned) for spec in (proposed, against)]
                 for value in values}
        taken = {value: settings_of(registry, of_both[0], tuned)[name] for value, of_both in specs.items()}
        told = {value_text(taken[value]): f"{value_text(taken[value])} ({whose})" for value, whose in values.items()}
        default = value_text(usual[name])
        result += [Case(*of_both, name, told.get(default, default), told[value_text(taken[value])])
                   for value, of_both in specs.items() if taken[value] != usual[name]]
    return [*result, *_joint(registry, proposed, against, differs, tuned)], notes


def _joint(registry: Registry, proposed: RunSpec, against: RunSpec | None,
           differs: Mapping[str, Mapping[Any, str]], tuned: Tuned | None) -> Iterator[Case]:
    """A case for each reading in which more than one setting differs from the default case: all of them together."""
    usual = settings_of(registry, proposed, tuned)
    for reading in READINGS:
        if not values_of(reading, differs):
            continue
        joint = replace(proposed, settings=(*proposed.settings, (READING, reading)))
        there = settings_of(registry, joint, tuned)
        changed = [name for name in differs if there.get(name) != usual.get(name)]
        if len(changed) > 1:
            other = against and replace(against, settings=tuple({**dict(against.settings), **{
                name: there[name] for name in changed if name in settings_of(registry, against, tuned)}}.items()))
            yield Case(joint, other, READING, "the values above", f"{reading}: {', '.join(changed)}")


def _changed(registry: Registry, spec: RunSpec, name: str, value: Any, tuned: Tuned | None) -> RunSpec:
    """The spec with another value of a setting, if its runs have that setting."""
    if name not in settings_of(registry, spec, tuned):
        return spec
    return replace(spec, settings=tuple({**dict(spec.settings), name: value}.items()))


def settings_of(registry: Registry, spec: RunSpec, tuned: Tuned | None) -> dict[str, Any]:
    """All settings of a spec's runs, those without effect too."""
    return flat(resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned)))


def value_text(value: Any) -> str:
    return as_text(value).lower() if isinstance(value, bool) else as_text(value)
