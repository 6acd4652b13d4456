"""`embodied report`: the page of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import print as show

from embodied.errors import UserError
from embodied.reporting.report import write_report
from embodied.reporting.run_record import ReportError
from embodied.run_folder import RUNS, find_run


@dataclass(frozen=True)
class Arguments:
    """Write a run's report: one self-contained HTML page."""

    run: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    return report_run(args.run, args.runs_dir)


def report_run(run: str, runs_dir: Path) -> dict[str, Any]:
    """Write the page of a run."""
    folder = find_run(run, runs_dir)
    if folder is None:
        raise UserError(f"no run {run!r}: neither {run}/config.yaml nor {runs_dir / run}/config.yaml exists")
    try:
        path = write_report(folder)
    except ReportError as error:
        raise UserError(str(error)) from error
    show(f"report: [bold]{path}[/]")
    return {"run": str(folder), "report": str(path)}
