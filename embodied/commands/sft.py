"""`embodied sft`: learn from demonstrations, evaluate, film, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.commands.finish import finish_run
from embodied.config import Config
from embodied.errors import UserError
from embodied.execution.session import open_session
from embodied.run_folder import begun_from, open_run_folder, settings_of
from embodied.training.sft import STAGE, imitate
from embodied.workers.context import task_spec
from embodied.workers.devices import release
from sim_farm.hosts import InProcess


def sft_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Learn from demonstrations, evaluate, film, report. Returns the result as plain data."""
    config = begun_from(config, runs_dir, resume)
    info = InProcess().describe(task_spec(config))
    with open_run_folder(config, source, runs_dir, resume, STAGE) as (run_dir, found):
        if found is not None:
            recorded = settings_of(str(run_dir), runs_dir).sft.data
            if config.sft.data not in ((), recorded):
                given, known = (", ".join(map(str, paths)) for paths in (config.sft.data, recorded))
                raise UserError(f"{run_dir} learns from {known}, not {given}: begin another run with --policy.init")
            config = config.model_copy(update={"sft": config.sft.model_copy(update={"data": recorded})})
        result = imitate(config, info, run_dir, found)
        release()  # the evaluator, in a process of its own, needs the device's memory
        with open_session(config) as session:
            return finish_run(config, run_dir, session, result, found is not None)
