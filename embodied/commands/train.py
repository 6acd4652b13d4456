"""`embodied train`: train, evaluate, film, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from embodied.commands.finish import finish_run
from embodied.config import Config
from embodied.evaluation.protocol import protocol_of
from embodied.execution.preflight import check_evaluation, check_training
from embodied.execution.session import open_session
from embodied.planning.run_plans import check_files
from embodied.run_folder import RUNS, begun_from, open_run_folder
from embodied.training import loop


@dataclass(frozen=True)
class Arguments:
    """Train a policy; evaluate it at the end, film it and write the report."""

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest checkpoint of the run called --name, or begin it."""
    cluster: str | None = None
    """HOST:PORT of a running Ray cluster that has this machine as a node (docs/cluster.md): runtime.address."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    settings = args.settings
    if args.cluster is not None:
        runtime = settings.runtime.model_copy(update={"address": args.cluster})
        settings = settings.model_copy(update={"runtime": runtime})
    return train_run(settings, args.config, args.runs_dir, args.resume == "auto")


def train_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Train, evaluate, film, report. Returns the result as plain data."""
    config = begun_from(config, runs_dir, resume)
    check_training(config)
    check_evaluation(config, protocol_of(config).tasks)
    check_files(config)
    with open_run_folder(config, source, runs_dir, resume, "rl") as (run_dir, found), open_session(config) as session:
        result = loop.train(config, run_dir, session, found)
        return finish_run(config, run_dir, session, result, found is not None)
