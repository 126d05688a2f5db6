"""A check on the terminal: what is being tried, what failed, and a summary by property."""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console

from ..runs.registry import Plugin
from .report import Report, Verdict


class CheckDisplay:
    """Shows verdicts as they come: a line that moves on a terminal, and every failure at once; ``quiet``: show nothing.
    """

    def __init__(self, plugin: Plugin, quiet: bool = False):
        self.plugin, self.quiet = plugin, quiet
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self.status = None
        self.count: Counter = Counter()

    def __enter__(self) -> "CheckDisplay":
        if not self.quiet and sys.stderr.isatty():
            self.status = self.console.status(f"{self.plugin.kind} {self.plugin.name}: starting")
            self.status.start()
        return self

    def __exit__(self, *error) -> None:
        if self.status is not None:
            self.status.stop()

    def add(self, verdict: Verdict) -> None:
        self.count[verdict.passed] += 1
        if self.status is not None:
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
