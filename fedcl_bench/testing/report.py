"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Violated(Exception):
    """A property does not hold; the message is the evidence."""


class Inapplicable(Exception):
    """A property says nothing about this pair; the message is the reason."""


@dataclass(frozen=True)
class Outcome:
    """One property of a plugin with one partner.

    Attributes:
        property: its name.
        pair: the method, backbone and stream it was tried with; empty if it concerns the plugin alone.
        passed: None if the property does not apply.
        evidence: what was seen.
    """

    property: str
    pair: str
    passed: bool | None
    evidence: str


@dataclass
class Report:
    """All outcomes for one plugin."""

    kind: str
    name: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures and any(outcome.passed for outcome in self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.passed is False]

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "passed": self.passed,
                "outcomes": [vars(outcome) for outcome in self.outcomes]}


def assert_passed(report: Report) -> None:
    """Raise AssertionError with the properties that a plugin violates, for a test of one's own."""
    lines = [f"{outcome.property} ({outcome.pair or 'alone'}): {outcome.evidence}" for outcome in report.failures]
    if not report.passed:
        raise AssertionError(f"{report.kind} '{report.name}' violates {len(lines)} properties:\n" + "\n".join(lines))
