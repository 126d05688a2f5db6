"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Violated(Exception):
    """A property does not hold; the message is the evidence."""


class Inapplicable(Exception):
    """A property says nothing about this pair; the message is the reason."""


@dataclass(frozen=True)
class Verdict:
    """Whether a plugin has one property with one partner.

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
