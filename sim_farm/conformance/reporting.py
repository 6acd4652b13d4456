"""The report of a conformance suite: law by law, what holds, what does not, and what cannot be promised then.

`policies` has a link to this module, since the packages do not import each other.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # laws are functions, and can be called where pytest is not installed
    import pytest

Outcome = Literal["holds", "broken", "declared", "not applicable"]
"""`declared`: not examined, since it is declared that the law is not kept."""


class NotApplicable(unittest.SkipTest):
    """The law says nothing about what is examined; the message says why. Test runners count it as skipped."""


@dataclass(frozen=True)
class Promise:
    """Something that is relied on, and the laws that it rests on."""

    title: str
    laws: tuple[Callable[..., None], ...]
    otherwise: str
    """Promise that fails if one of the laws is broken."""


@dataclass(frozen=True)
class Examined:
    """A law, and what came out."""

    promise: str
    law: str
    statement: str
    outcome: Outcome
    why: str = ""
    """Why it does not hold, or does not apply; else empty."""
    otherwise: str = ""
    """Promise that fails; empty if the law holds or does not apply."""


class Reporter:
    """Plugin of pytest: prints a line for each law at the end, and writes the report to a file."""

    def __init__(self, subject: str, promises: Sequence[Promise], path: str | None) -> None:
        self._subject, self._promises, self._path = subject, promises, path
        self._outcomes: dict[str, tuple[Outcome, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        law = dict(report.user_properties).get("law")
        if not isinstance(law, str) or report.when != "call":
            return
        skipped: Outcome = "declared" if dict(report.user_properties).get("declared") else "not applicable"
        if report.passed:
            self._outcomes[law] = "holds", ""
        elif report.skipped:
            self._outcomes[law] = skipped, _first_line(str(_last(report.longrepr))).removeprefix("Skipped: ")
        else:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr) if crash is None else crash.message
            self._outcomes[law] = "broken", _first_line(message).removeprefix("AssertionError: ")

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            report = {"examined": self._subject, "laws": [asdict(each) for each in self._examined()]}
            Path(self._path).write_text(json.dumps(report, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        examined = self._examined()
        counts = {outcome: sum(each.outcome == outcome for each in examined) for outcome in _WORDS}
        said = ", ".join(f"{number} {_COUNTED[outcome]}" for outcome, number in counts.items() if number)
        terminalreporter.section(f"the laws of {self._subject}: {said or 'none was examined'}")
        for promise in self._promises:
            mine = [each for each in examined if each.promise == promise.title]
            if not mine:
                continue
            terminalreporter.line(promise.title)
            for each in mine:
                why = f": {each.why}" if each.why else ""
                terminalreporter.line(f"  {_WORDS[each.outcome]:14}  {words(each.law)}{why}", **_COLOURS[each.outcome])
            if any(each.otherwise for each in mine):
                terminalreporter.line(f"  so              {promise.otherwise}", bold=True)

    def _examined(self) -> list[Examined]:
        found = []
        for promise in self._promises:
            for law in promise.laws:
                name = law.__name__
                if name in self._outcomes:
                    outcome, why = self._outcomes[name]
                    otherwise = promise.otherwise if outcome in ("broken", "declared") else ""
                    statement = _first_line(law.__doc__ or "")
                    found.append(Examined(promise.title, name, statement, outcome, why, otherwise))
        return found


def words(law: str) -> str:
    """The law's name as words."""
    return law.removeprefix("law_").replace("_", " ")


_WORDS: dict[Outcome, str] = {
    "holds": "holds",
    "broken": "BROKEN",
    "declared": "not kept",
    "not applicable": "not applicable",
}
_COUNTED: dict[Outcome, str] = {**_WORDS, "holds": "hold", "broken": "broken"}
_COLOURS: dict[Outcome, dict[str, bool]] = {
    "holds": {},
    "broken": {"red": True},
    "declared": {"yellow": True},
    "not applicable": {"light": True},
}


def _last(longrepr: object) -> object:
    """The reason of a skip: the last of pytest's (file, line, reason)."""
    return longrepr[-1] if isinstance(longrepr, tuple) else longrepr


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
