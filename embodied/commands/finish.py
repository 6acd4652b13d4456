"""What `train` and `sft` end with: evaluation, film and report of what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import print as show

from embodied.commands.evaluate import show_table, subject_of
from embodied.config.schema import Config
from embodied.evaluation.evaluate import evaluate, evaluation_folder
from embodied.evaluation.protocol import protocol_of
from embodied.execution.session import Session
from embodied.reporting.report import write_report


def finish_run(
    config: Config, run_dir: Path, session: Session, result: dict[str, Any], resumed: bool
) -> dict[str, Any]:
    """Evaluate what a run has learned, film it and write the report; both results as one."""
    subject = subject_of(str(run_dir), config, None, run_dir.parent)
    # A run that goes on after its training had ended has its evaluation gone on with.
    with evaluation_folder(subject, protocol_of(config), None, resume=resumed) as folder:
        evaluated = evaluate(subject, protocol_of(config), session, folder)
    show_table(evaluated)
    result = {**evaluated, "eval_wall_s": evaluated["wall_s"], **result, "report": str(write_report(run_dir))}
    show(f"report: [bold]{result['report']}[/]")
    return result
