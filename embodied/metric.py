"""A metric as its maker declares it: its name in the record of a run, its unit, and what it says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number of a row, or a family of them: `time/<component>_s` has one for each component."""

    name: str
    unit: str
    meaning: str

    def names(self, name: str) -> bool:
        """True if the metric, or one of its family, has this name."""
        parts = re.split(r"<\w+>", self.name)
        return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None


def undeclared(names: Iterable[str], metrics: Iterable[Metric]) -> set[str]:
    """The names that none of the metrics has."""
    declared = tuple(metrics)
    return {name for name in names if not any(metric.names(name) for metric in declared)}
