"""One row of numbers per iteration, in `metrics.jsonl` and in TensorBoard; those of evaluations during training, which
not every iteration has, in `selection.jsonl`.

`metrics.jsonl` is the record: one JSON object per line with `iteration`, `env_steps`, `wall_s` (seconds
since the run began, continuing over resumes) and the metrics. TensorBoard's files repeat it, over env steps.
`selection.jsonl` alike.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "metrics.jsonl"
SELECTION = "selection.jsonl"
"""Of evaluations during training."""


class MetricsError(Exception):
    """A record that cannot be read, with a message that names the line."""


class MetricsWriter:
    """Appends rows to a run's record. A row that `write` has returned from survives the process's death."""

    def __init__(self, run_dir: str | os.PathLike[str], tensorboard: bool = True, file: str = FILE) -> None:
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError("TensorBoard is missing: `pip install tensorboard`, or turn it off")
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._name, self._path = file, self._run_dir / file
        self._tensorboard = tensorboard
        self._summary: SummaryWriter | None = None
        self._purge_step: int | None = None
        _drop_torn_line(self._path)
        self._file = self._path.open("a")

    def write(self, iteration: int, env_steps: int, values: Mapping[str, float]) -> None:
        """Append one row; numbers that are not finite are written as null. `values` holds `wall_s` too."""
        counts = {"iteration": int(iteration), "env_steps": int(env_steps)}
        numbers = {name: _number(value) for name, value in values.items() if name not in counts}
        row = {**counts, "wall_s": None, **numbers}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard:
            summary = self._summary_writer()
            for name, value in values.items():
                summary.add_scalar(name, float(value), global_step=int(env_steps))
            summary.flush()

    def truncate(self, after_iteration: int) -> None:
        """Drop the rows of iterations later than this one: those that a resumed run will repeat.

        TensorBoard is told to forget the same points.
        """
        rows = read(self._run_dir, self._name)
        kept = [row for row in rows if row["iteration"] <= after_iteration]
        if len(kept) == len(rows):
            return
        aside = self._run_dir / (self._name + ".partial")
        aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file.close()
        aside.replace(self._path)
        self._file = self._path.open("a")
        self._purge_step = rows[len(kept)]["env_steps"]
        if self._summary is not None:  # a file says at its beginning what it replaces
            self._summary.close()
            self._summary = None

    def close(self) -> None:
        self._file.close()
        if self._summary is not None:
            self._summary.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _summary_writer(self) -> SummaryWriter:
        if self._summary is None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds: only where it is used

            # TensorBoard reads one file of a folder at a time, and never comes back to an earlier one.
            folder = self._run_dir / "tensorboard" / ("" if self._name == FILE else Path(self._name).stem)
            self._summary = SummaryWriter(str(folder), purge_step=self._purge_step)
        return self._summary


def read(run_dir: str | os.PathLike[str], file: str = FILE) -> list[dict[str, Any]]:
    """The rows of a run's record, in the order of their iterations; none if there is no record yet.

    A last line without its end is what a process killed while writing leaves behind: it is not a row.
    Any other line that is not one raises `MetricsError`.
    """
    path = Path(run_dir) / file
    if not path.exists():
        return []
    *lines, _torn = path.read_text().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "iteration": int(row["iteration"]), "env_steps": int(row["env_steps"])})
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsError(f"{path}, line {number} is not a row of metrics: {line[:80]!r}") from error
    return sorted(rows, key=lambda row: row["iteration"])


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)  # whatever has one: NumPy's scalars, a tensor's element
    return value if math.isfinite(value) else None


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of a line, lest the next row be glued to it."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
