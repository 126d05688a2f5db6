"""What a check found, and how it is shown on the terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ..runs.registry import Plugin


class Violated(Exception):
    """A property does not hold; the message is the evidence."""


class Inapplicable(Exception):
    """A property says nothing about this pair; the message is the reason."""


@dataclass(frozen=True)
class Verdict:
    """Whether a plugin has one property with one partner."""

    property: str  # its name
    pair: str  # the method, backbone and stream it was tried with; empty if it concerns the plugin alone
    passed: bool | None  # None if the property does not apply
    evidence: str  # what was seen


@dataclass
class Report:
    """All verdicts on one plugin."""

    kind: str
    name: str
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures and any(verdict.passed for verdict in self.verdicts)

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.passed is False]

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "passed": self.passed,
                "outcomes": [vars(verdict) for verdict in self.verdicts]}


def assert_passed(report: Report) -> None:
    """Raise AssertionError with the properties that a plugin violates, for a test of one's own."""
    lines = [f"{verdict.property} ({verdict.pair or 'alone'}): {verdict.evidence}" for verdict in report.failures]
    if not report.passed:
        raise AssertionError(f"{report.kind} '{report.name}' violates {len(lines)} properties:\n" + "\n".join(lines))


class CheckDisplay:
    """Shows on a terminal what is being tried, and in the end all verdicts; ``quiet``: show nothing meanwhile."""

    def __init__(self, plugin: Plugin, quiet: bool = False):
        self.plugin = plugin
        terminal = False if quiet else None  # None: if there is one
        self.status = Console(stderr=True, force_terminal=terminal).status(f"{plugin.kind} {plugin.name}: starting")
        self.count: Counter = Counter()

    def __enter__(self) -> "CheckDisplay":
        self.status.start()
        return self

    def __exit__(self, *error) -> None:
        self.status.stop()

    def add(self, verdict: Verdict) -> None:
        self.count[verdict.passed] += 1
        self.status.update(f"{self.plugin.kind} {self.plugin.name}: {self.count[True]} passed, {self.count[False]} "
                           f"failed; {verdict.pair or 'alone'}: {verdict.property}")

    def conclude(self, report: Report) -> None:
        print(f"{report.kind} {report.name}: {self.plugin.cls.title}")
        for name in dict.fromkeys(verdict.property for verdict in report.verdicts):
            verdicts = [verdict for verdict in report.verdicts if verdict.property == name]
            failed = [verdict for verdict in verdicts if verdict.passed is False]
            passed = [verdict for verdict in verdicts if verdict.passed]
            if failed:
                print(f"  FAILED  {name}")
                for verdict in failed:
                    print(f"          {verdict.pair or 'alone'}: {verdict.evidence}")
            elif passed:
                pairs = f" ({len(passed)} pairs)" if len(passed) > 1 else ""
                print(f"  passed  {name}{pairs}: {passed[0].evidence}")
            else:
                print(f"  -       {name}: {verdicts[0].evidence}")
        pairs = list(dict.fromkeys(verdict.pair for verdict in report.verdicts if verdict.pair))
        if report.kind != "metric":
            print(f"with {'; '.join(pairs) or 'no partner'}")
        print(f"{'all properties hold' if report.passed else f'{len(report.failures)} FAILED'}\n")
