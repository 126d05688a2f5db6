"""How times are written as numbers: in which units, or as days."""

from __future__ import annotations

import numpy as np

from ...core.errors import UserError

# Seconds count fewer than the first of these numbers until the year 5138, and so on.
UNITS = ((1e11, 1, "seconds"), (1e14, 1e3, "milliseconds"), (1e17, 1e6, "microseconds"), (np.inf, 1e9, "nanoseconds"))
_FIRST, _END = 3e8, 4.2e9  # seconds, of the years 1979 and 2103; no number is between them in two units
Counts = dict[str, tuple[int, float]]  # unit to how many times of these years there are in it, and one of them


def by_unit(numbers: np.ndarray, counts: Counts) -> Counts:
    """The counts with those of more numbers."""
    for _, scale, unit in UNITS:
        inside = (numbers >= _FIRST * scale) & (numbers < _END * scale)
        if inside.any():
            count, example = counts.get(unit, (0, numbers[inside.argmax()]))
            counts[unit] = count + int(inside.sum()), example
    return counts


def refuse_several(counts: Counts, where: str) -> None:
    """Raise UserError for times in more than one unit."""
    if len(counts) > 1:
        found = " and ".join(f"{count:,} time{'s' * (count > 1)} in {unit} (as {example:.0f})"
                             for unit, (count, example) in counts.items())
        cure = ", ".join(f"{unit} by {scale:,.0f}" for _, scale, unit in UNITS[1:] if unit in counts)
        raise UserError(f"{where}: found {found}, accepted: one unit.\nMake all seconds: divide {cure}.")


def require_seconds(numbers: np.ndarray, where: str) -> None:
    """Raise UserError for times of these years that are in another unit."""
    for unit, (_, example) in by_unit(numbers, {}).items():
        if unit != "seconds":
            raise UserError(f"{where}: found times in {unit} (as {example:.0f}), accepted: seconds, as sessions are "
                            f"cut at pauses.\n`data convert --table FILE` writes them.")


def are_days(numbers: np.ndarray) -> bool:
    """Whether all numbers look like days from 19000101 to 21001231."""
    if not len(numbers) or numbers.min() < 19000101 or numbers.max() > 21001231:
        return not len(numbers)
    month, day = numbers // 100 % 100, numbers % 100
    return bool(np.all((1 <= month) & (month <= 12) & (1 <= day) & (day <= 31) & (day % 1 == 0)))


def check(numbers: np.ndarray, where: str) -> None:
    """Raise UserError for times in several units, or days as 20100131, whose differences are no durations."""
    refuse_several(by_unit(numbers, {}), where)
    if are_days(numbers):
        raise UserError(f"{where}: found days, as {numbers[0]:.0f}, in all rows ({len(numbers):,}), accepted: "
                        f"seconds since 1970.\n`data convert --table FILE` writes days as seconds.")
