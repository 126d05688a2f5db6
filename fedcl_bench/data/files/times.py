"""How times are written as numbers: in which units, or as days."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Iterator

import numpy as np

from ...core.errors import UserError
from ...core.text import quoted

# Seconds count fewer than the first of these numbers until the year 5138, and so on.
UNITS = ((1e11, 1, "seconds"), (1e14, 1e3, "milliseconds"), (1e17, 1e6, "microseconds"), (np.inf, 1e9, "nanoseconds"))
_FIRST, _END = 3e8, 4.2e9  # seconds, of the years 1979 and 2103; no number is between them in two units
_ZONE = r"[0-9][Tt ].*(?:[Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)$"
ISO = "ISO8601"  # what pandas calls it
_MONTH = r"(?i)\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_WEEKDAY = r"(?i)\b(mon|tue|wed|thu|fri|sat|sun)[a-z]*"
# What of a time is what in a format of strptime, of which %d, %m, %H and %I may have one digit.
_PARTS = (
    (r"(:\d\d(?:\.\d+)? ?(?:GMT|UTC)?)[+-]\d\d:?\d\d(?!\d)", r"\1%z"), (r"\b\d{14}\b", "%Y%m%d%H%M%S"),
    (r"\b\d{12}\b", "%Y%m%d%H%M"), (r"\b\d{10}\b", "%Y%m%d%H"), (r"(?<!\d)(19|20)\d\d(?!\d)", "%Y"),
    (_MONTH, "%b"), (_WEEKDAY, "%a"), (r"\d?\d:\d\d:\d\d\.\d+", "%H:%M:%S.%f"),
    (r"\d?\d:\d\d:\d\d", "%H:%M:%S"), (r"\d?\d:\d\d", "%H:%M"), (r"(?i)\b[ap]m\b", "%p"))
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


def are_dates(numbers: np.ndarray) -> bool:
    """Whether all numbers look like days from 19000101 to 21001231, or like an hour, a minute or a second of them."""
    if not len(numbers):
        return True
    days = next((numbers // scale for scale in (1, 1e2, 1e4, 1e6) if 19000101 <= numbers.min() / scale < 21010101),
                None)
    if days is None or days.max() > 21001231:
        return False
    month, day = days // 100 % 100, days % 100
    return bool(np.all((1 <= month) & (month <= 12) & (1 <= day) & (day <= 31) & (numbers % 1 == 0)))


def read(texts: np.ndarray, form: str) -> np.ndarray:
    """float64 seconds since 1970 of times in a format of strptime, or ``ISO``; NaN where one is written otherwise."""
    import pandas as pd

    series = pd.Series(texts, dtype=object)
    for name, directive in ((_MONTH, "%b"), (_WEEKDAY, "%a")):
        series = series.str.replace(name, r"\1", regex=True) if directive in form else series
    seconds = np.empty(len(texts))
    zoned = series.str.contains(_ZONE).to_numpy(bool)
    for rows in (zoned, ~zoned):  # among others with a zone, pandas gives times without one that of another row
        times = pd.to_datetime(series[rows], format=form, utc=True, errors="coerce")
        stamps = times.dt.tz_localize(None).to_numpy("datetime64[us]")  # of nanoseconds float64 rounds even quarters
        seconds[rows] = np.where(np.isnat(stamps), np.nan, stamps.astype(np.int64) / 1e6)
    return seconds


def require_form(form: str, where: str) -> None:
    """Raise UserError for a format that pandas does not take, or that says no year."""
    try:
        written = datetime(2010, 1, 31, tzinfo=timezone.utc).strftime(form)
        if 1262304000 <= read(np.array([written], dtype=object), form)[0] < 1293840000:
            return
    except (ValueError, re.error):
        pass
    raise UserError(f"{where}: found {quoted(form)}, accepted: a format of Python's strptime with a year, as "
                    f"'%d/%m/%Y %H:%M'.")


def form_of(texts: np.ndarray) -> str:
    """The format in which most of some times can be read. Raises UserError if there are two, in which they differ."""
    best, found, other = ISO, read(texts, ISO), ""
    some = () if np.isfinite(found).all() else texts[np.linspace(0, len(texts) - 1, 99).astype(int)]
    for form in dict.fromkeys(form for text in some for form in _forms(text)):
        seconds = read(texts, form)
        more = np.isfinite(seconds).sum() - np.isfinite(found).sum()
        if more > 0:
            best, found, other = form, seconds, ""
        elif more == 0 and (different := np.isfinite(seconds) & np.isfinite(found) & (seconds != found)).any():
            other = f"{texts[different.argmax()]!r}, which may be {best} or {form}"
    if other:
        raise UserError(f"--time: found times as {other}; say which with --time-format.")
    return best


def _forms(text: str) -> Iterator[str]:
    """Formats that a time may be written in; none if it has words that are none of a time."""
    form = text.replace("%", "%%")
    for part, directive in _PARTS:
        form = re.sub(part, directive, form, count=1)
    form = form.replace("%H", "%I") if "%p" in form else form
    orders = [("%d", "%m"), ("%m", "%d")]
    if "%b" in form or "%d" in form:
        orders = [("%d",) * ("%d" not in form)]
    elif form.startswith("%Y") or re.search(r"\d\.\d", form):  # nobody writes the other order
        orders = orders[form.startswith("%Y"):][:1]
    for order in orders:
        left = list(order)
        made = re.sub(r"(?<!\d)\d\d?(?!\d)", lambda number: left.pop(0) if left else number[0], form)
        rest, parts = re.sub("%.|UTC|GMT|at|[TZ]", "", made), re.findall("%.", made)
        if not left and "%Y" in parts and len({*parts}) == len(parts) and not re.search(r"[^\W_]", rest):
            yield made


def check(numbers: np.ndarray, where: str) -> None:
    """Raise UserError for times in several units, or dates as 20100131, whose differences are no durations."""
    refuse_several(by_unit(numbers, {}), where)
    if are_dates(numbers):
        raise UserError(f"{where}: found dates, as {numbers[0]:.0f}, in all rows ({len(numbers):,}), accepted: "
                        f"seconds since 1970.\n`data convert --table FILE` writes dates as seconds.")
