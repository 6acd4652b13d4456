"""`embodied train`: train, evaluate, film, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.commands.finish import finish_run
from embodied.config import Config
from embodied.execution.session import open_session
from embodied.planning.run_plans import check_files
from embodied.run_folder import begun_from, open_run_folder
from embodied.training import loop


def train_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Train, evaluate, film, report. Returns the result as plain data."""
    config = begun_from(config, runs_dir, resume)
    check_files(config)
    with open_run_folder(config, source, runs_dir, resume, "rl") as (run_dir, found), open_session(config) as session:
        result = loop.train(config, run_dir, session, found)
        return finish_run(config, run_dir, session, result, found is not None)
