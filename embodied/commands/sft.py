"""`embodied sft`: learn from demonstrations, evaluate, film, report."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich import print as show

from embodied import hub
from embodied.commands.arguments import SftArguments as Arguments
from embodied.commands.evaluate import finish_run
from embodied.config.schema import Config
from embodied.devices import release
from embodied.errors import UserError
from embodied.execution.session import Session, open_session
from embodied.reporting.trackers import tracked
from embodied.run.folder import begun_from, has_checkpoint, open_run_folder
from embodied.run.saved_settings import find_run, recorded_settings
from embodied.training.checks import Checked, check_described, check_start
from embodied.training.sft import STAGE, imitate
from embodied.workflows.run_spec import task_spec
from sim_farm.workers.hosts import InProcess


def run(args: Arguments) -> dict[str, Any]:
    learning = args.settings.sft.model_copy(update={"data": args.data or args.settings.sft.data})
    settings = args.settings.model_copy(update={"sft": learning})
    if args.dry_run:
        from embodied.training.dry_run import sft_dry_run

        return sft_dry_run(begun_from(settings, args.runs_dir, args.resume == "auto", STAGE), args.card)
    return sft_run(settings, args.config, args.runs_dir, args.resume == "auto")


def _with_data(config: Config, runs_dir: Path, resume: bool) -> Config:
    """The configuration with the datasets of `sft.data` downloaded where they are Hugging Face names, and with the
    their current commits. A resumed run keeps its commits; raises `UserError` if other commits are given."""
    names = config.sft.data
    run_dir = find_run(config.name or "", runs_dir) if resume else None
    if run_dir is None or not has_checkpoint(run_dir):
        data = tuple(Path(hub.pinned(name, hub.dataset_folder(name))) for name in names)
    else:
        recorded = recorded_settings(run_dir).sft.data
        data = tuple(Path(hub.kept(*pair)) for pair in zip(names, recorded, strict=False)) + names[len(recorded) :]
        if names and data != recorded:
            given, known = (", ".join(map(str, paths)) for paths in (data, recorded))
            raise UserError(
                f"{run_dir} learns from {known}, not {given}: leave --data as it was, or begin another run "
                f"(--name OTHER --policy.init {run_dir} --resume no)"
            )
        data = recorded
    return config.model_copy(update={"sft": config.sft.model_copy(update={"data": data})})


def ranks_session(config: Config) -> AbstractContextManager[Session | None]:
    """A session for several ranks; None for one, which learns in this process, as everything does inline."""
    several = config.optim.ranks > 1 and config.runtime.mode != "inline"
    return open_session(config) if several else nullcontext()


def sft_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Learn from demonstrations, evaluate, film, report. Returns the result as plain data."""
    config = _with_data(begun_from(config, runs_dir, resume, STAGE), runs_dir, resume)
    resumed = runs_dir / config.name if resume and config.name else None
    checked = Checked(command="sft", config=config, run_dir=resumed)
    check_start(checked)
    info = InProcess().describe(task_spec(config))
    if not checked.is_quick:
        check_described(checked, [info])
    with open_run_folder(config, source, runs_dir, resume, STAGE) as (run_dir, found):
        if config.eval.every:
            show("[yellow]eval.every is of reinforcement: this training is evaluated at its end[/]")
        with tracked(config, run_dir) as tracking:
            with ranks_session(config) as session:
                result = imitate(config, info, run_dir, found, session=session, tracking=tracking)
            release()  # the evaluator, in a process of its own, needs the device's memory
            with open_session(config) as session:
                return finish_run(config, run_dir, session, result, found is not None, tracking=tracking)
