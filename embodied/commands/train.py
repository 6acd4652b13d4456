"""`embodied train`: train, evaluate, film, report; several seeds or settings one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import print as show

from embodied.commands.finish import finish_run
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.session import open_session
from embodied.reporting.runs_page import write_runs_page
from embodied.run.folder import RUNS, begun_from, open_run_folder
from embodied.training import loop
from embodied.training.preflight import check_training
from embodied.training.variants import variants


@dataclass(frozen=True)
class Arguments:
    """Train a policy; evaluate it at the end, film it and write the report."""

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest checkpoint of the run called --name, or begin it."""
    seeds: tuple[int, ...] = ()
    """Train once with each seed, one after the other, and compare: runs NAME-seed1, ... and the page NAME.html."""
    sweep: tuple[str, ...] = ()
    """Train with each value of a setting, `optim.policy_lr=1e-4,3e-4`; of several settings, each combination."""
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
    if args.seeds or args.sweep:
        return train_variants(settings, args.config, args.runs_dir, args.resume == "auto", args.seeds, args.sweep)
    return train_run(settings, args.config, args.runs_dir, args.resume == "auto")


def train_variants(
    config: Config, source: str, runs_dir: Path, resume: bool, seeds: Sequence[int], sweep: Sequence[str]
) -> dict[str, Any]:
    """Train every variant and write the page that compares them. Returns their results, and what they come to.

    Nothing begins before all of them are known to be possible; with `resume` each goes on where it was.
    """
    every = variants(config, source, seeds, sweep)
    for variant in every:
        check_training(begun_from(variant, runs_dir, resume))
        if not resume and (runs_dir / (variant.name or "")).exists():
            raise UserError(
                f"the run folder {runs_dir / (variant.name or '')} exists: choose another --name, or go on "
                "with all of them by --resume auto"
            )
    results = []
    for number, variant in enumerate(every, start=1):
        show(f"[bold]{variant.name}[/], {number} of {len(every)}")
        try:
            results.append(train_run(variant, source, runs_dir, resume))
        except KeyboardInterrupt:
            show("the same command with --resume auto goes on with all of them")
            raise
    page = runs_dir / f"{config.name or Path(source).stem}.html"
    compared = write_runs_page([runs_dir / (variant.name or "") for variant in every], page)
    show(f"compared: [bold]{page}[/]")
    return {"runs": results, **compared}


def train_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Train, evaluate, film, report. Returns the result as plain data."""
    config = begun_from(config, runs_dir, resume)
    check_training(config)
    with open_run_folder(config, source, runs_dir, resume, "rl") as (run_dir, found), open_session(config) as session:
        result = loop.train(config, run_dir, session, found)
        return finish_run(config, run_dir, session, result, found is not None)
