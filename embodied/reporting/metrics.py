"""One row of numbers per iteration, in `metrics.jsonl`; those of evaluations during training, which not every iteration
has, in `selection.jsonl`.

`metrics.jsonl` is the record: one JSON object per line with `iteration`, `env_steps`, `wall_s` (seconds
since the run began, continuing over resumes) and the metrics. Trackers (`embodied.reporting.trackers`) repeat it, over
env steps. `selection.jsonl` alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.files import Lines, read_lines, write_whole
from embodied.reporting.live import tell
from embodied.reporting.trackers import NOT_TRACKED, Tracking

FILE = "metrics.jsonl"
SELECTION = "selection.jsonl"
"""File of the evaluations during training."""
MOST = 2**53
"""Largest number of iterations or env steps: larger integers are not exact as JSON numbers."""


class MetricsError(UserError):
    """A record that cannot be read, with a message that names the line."""


class MetricsWriter:
    """Appends rows to a run's record. A row that `write` has returned from survives the process's death.

    A row that cannot be written, as on a full disk, is reported once, and the run continues: the row is kept in memory
    and written before the next one.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        tracking: Tracking = NOT_TRACKED,
        file: str = FILE,
        say: Callable[[str], None] = tell,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._name, self._path = file, self._run_dir / file
        self._tracking = tracking
        self._say = say
        self._unwritten: list[dict[str, Any]] = []
        self._lines = Lines(self._path)

    def write(self, iteration: int, env_steps: int, values: Mapping[str, float]) -> None:
        """Append one row; numbers that are not finite are written as null. `values` holds `wall_s` too."""
        counts = {"iteration": int(iteration), "env_steps": int(env_steps)}
        numbers = {name: _number(value) for name, value in values.items() if name not in counts}
        row = {**counts, "wall_s": None, **numbers}
        self._unwritten.append(row)
        self._catch_up()
        if self._name != FILE:  # the iteration has its count and time from its own row
            row = {name: value for name, value in numbers.items() if name != "wall_s"}
        self._tracking.log(self._name, row, int(env_steps))

    def _catch_up(self) -> None:
        """Write the rows that wait."""
        behind = len(self._unwritten) > 1
        try:
            while self._unwritten:
                self._lines.append(json.dumps(self._unwritten[0], allow_nan=False))
                del self._unwritten[0]
        except OSError as error:
            if not behind:
                self._say(
                    f"cannot write {self._path} ({error.strerror}): the run goes on, and its rows are written as soon "
                    "as that is possible; free some room on that disk"
                )
            return
        if behind:
            self._say(f"{self._path} is written again, and has all rows")

    def sync(self) -> None:
        """Have the rows on the disk, as far as there is room: before anything counts that comes after them."""
        with suppress(OSError):
            self._lines.sync()

    def truncate(self, after_iteration: int) -> None:
        """Drop the rows of iterations later than this one: those that a resumed run will repeat.

        Trackers drop the same rows. Raises `MetricsError`; then all rows are kept.
        """
        self._unwritten = [row for row in self._unwritten if row["iteration"] <= after_iteration]
        rows = read(self._run_dir, self._name)
        kept = [row for row in rows if row["iteration"] <= after_iteration]
        if len(kept) == len(rows):
            return
        self._lines.close()
        try:
            write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        except OSError as error:
            raise MetricsError(f"cannot write {self._path} ({error.strerror}): free some room on that disk") from error
        finally:
            self._lines = Lines(self._path)
        self._tracking.rewind(self._name, rows[len(kept)]["env_steps"], rows[-1]["env_steps"])

    def close(self) -> None:
        if self._unwritten:
            self._catch_up()
        self._lines.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(run_dir: str | os.PathLike[str], file: str = FILE) -> list[dict[str, Any]]:
    """The rows of a run's record, in the order of their iterations; none if there is no record yet.

    What a crash has left of a last line is not a row. Any other line that is not one raises `MetricsError`.
    """
    path = Path(run_dir) / file
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            rows.append(_row(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise MetricsError(
                f"{path}, line {number} is not a row of metrics: {line[:80]!r}; delete the line to go on without it"
            ) from error
    return sorted(rows, key=lambda row: row["iteration"])


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in row.values()):
        raise TypeError("a metric is a finite number, or null")
    counts = {name: int(row[name]) for name in ("iteration", "env_steps")}
    if not all(0 <= count < MOST for count in counts.values()):
        raise ValueError("more than can be counted")
    return {**row, **counts}


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)  # whatever has one: NumPy's scalars, a tensor's element
    return value if math.isfinite(value) else None
