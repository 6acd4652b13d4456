"""`embodied report`: the page of a run, or of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import print as show

from embodied.commands.arguments import ReportArguments as Arguments
from embodied.errors import UserError
from embodied.reporting.report import write_report
from embodied.reporting.run_record import ReportError
from embodied.reporting.runs_page import write_runs_page
from embodied.run.saved_settings import find_run


def run(args: Arguments) -> dict[str, Any]:
    return report_runs(args.run, args.runs_dir, args.out)


def report_runs(runs: Sequence[str], runs_dir: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the page of a run, or of several beside each other."""
    folders = [_folder(run, runs_dir) for run in runs]
    if not folders:
        raise UserError("name a run, or several: embodied report RUN [RUN ...]")
    if len(folders) == 1 and out is not None:
        raise UserError(f"--out is the page of several runs; that of one is {folders[0] / 'report.html'}")
    try:
        if len(folders) == 1:
            result = {"run": str(folders[0]), "report": str(write_report(folders[0]))}
        else:
            result = write_runs_page(folders, out or runs_dir / "report.html")
    except ReportError as error:
        raise UserError(str(error)) from error
    show(f"report: [bold]{result['report']}[/]")
    return result


def _folder(run: str, runs_dir: Path) -> Path:
    folder = find_run(run, runs_dir)
    if folder is None:
        raise UserError(f"no run {run!r}: neither {run}/config.yaml nor {runs_dir / run}/config.yaml exists")
    return folder
