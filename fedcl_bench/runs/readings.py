"""All that a paper and its code read differently, at once: ``reading=paper`` and ``reading=code``.

A plugin's ``ambiguities`` say whose reading each value of a setting is. ``reading`` stands for the values of one of the
two in all settings of a run's method and backbone; what the user sets wins over it.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from ..core.errors import UserError, unknown
from ..core.settings import as_text

READING = "reading"
READINGS = {"paper": ("paper",), "code": ("code", "released")}  # how texts in ``ambiguities`` begin

Layer = tuple[str, Mapping[str, Any]]


def ambiguities(*plugins: type) -> dict[str, Mapping[Any, str]]:
    """Setting to its values with whose reading each is, as a method and a backbone declare; a setting of both has the
    values of both."""
    merged: dict[str, Mapping[Any, str]] = {}
    for plugin in plugins:
        for setting, values in plugin.ambiguities.items():
            merged[setting] = {**merged.get(setting, {}), **values}
    return merged


def values_of(reading: str, declared: Mapping[str, Mapping[Any, str]], known: Iterable[str] | None = None
              ) -> dict[str, list[Any]]:
    """The values that a reading has, by setting, of the ``known`` ones or of all; those that the paper or the code
    leaves open are left out."""
    found = {name: [value for value, whose in values.items() if whose.startswith(READINGS[reading])]
             for name, values in declared.items() if known is None or name in known}
    return {name: values for name, values in found.items() if values}


def requested_reading(layers: Iterable[Layer]) -> tuple[str, str]:
    """The reading that the last layer with one asks for, and where that is; empty if none does. Raises UserError for an
    unknown reading."""
    origin, reading = next(((origin, str(layer[READING])) for origin, layer in reversed(list(layers))
                            if READING in layer), ("", ""))
    if origin and reading not in READINGS:
        raise unknown(f"reading ({origin})", reading, READINGS)
    return reading, origin


def expanded(layers: Iterable[Layer], declared: Mapping[str, Mapping[Any, str]], usual: Mapping[str, Any],
             inactive: Iterable[str]) -> list[Layer]:
    """The layers with the settings that their reading stands for in the place of the first ``reading``. Raises
    UserError if method and backbone have no setting that the reading has a value of.

    Args:
        declared: as of ``ambiguities``.
        usual: all settings without the reading. Of several values of a reading, one that a run has anyway stays.
        inactive: settings without effect, which keep their values.
    """
    layers = list(layers)
    reading, origin = requested_reading(layers)
    values = values_of(reading, declared)
    if not values:
        raise UserError(f"setting 'reading' ({origin}): found '{reading}', but neither method nor backbone names "
                        f"settings that their {reading} reads in its own way; leave it out (see `ambiguities` in "
                        f"docs/plugins.md).")
    chosen = {name: usual[name] if usual[name] in several else several[0]
              for name, several in values.items() if name in usual and name not in set(inactive)}
    first = next(i for i, (_, layer) in enumerate(layers) if READING in layer)
    plain = without_reading(layers)
    return [*plain[:first], (f"reading={reading}", chosen), *plain[first:]]


def without_reading(layers: Iterable[Layer]) -> list[Layer]:
    return [(origin, {name: value for name, value in layer.items() if name != READING}) for origin, layer in layers]


def in_effect(declared: Mapping[str, Mapping[Any, str]], settings: Mapping[str, Any]) -> list[str]:
    """The readings whose values all of these settings have, as far as they are among them."""
    return [reading for reading in READINGS if (values := values_of(reading, declared, settings))
            and all(settings[name] in several for name, several in values.items())]


def note(reading: str, declared: Mapping[str, Mapping[Any, str]], settings: Mapping[str, Any]) -> str:
    """What a run's reading comes to, and what was set otherwise, for people."""
    values = values_of(reading, declared, settings)
    said = ", ".join(f"{name}={as_text(settings[name])}" for name, several in values.items()
                     if settings[name] in several)
    others = ", ".join(f"{name}={as_text(settings[name])} ({reading}: {as_text(several[0])})"
                       for name, several in values.items() if settings[name] not in several)
    return f"reading={reading}: {said or 'nothing'}{f'; set otherwise: {others}' if others else ''}."
