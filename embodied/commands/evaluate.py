"""`embodied eval`: a checkpoint under a protocol, alone or beside another on the same episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import get_console
from rich import print as show

from embodied.commands.arguments import EvalArguments as Arguments
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.evaluate import (
    Subject,
    compare,
    evaluate,
    evaluation_folder,
    film,
    film_differences,
    write_result,
)
from embodied.evaluation.folder import PROTOCOL, EvalFolder, read_folder
from embodied.evaluation.protocol import Protocol, protocol_of
from embodied.evaluation.result_metrics import metrics_of
from embodied.execution.session import Session, open_session
from embodied.reporting.live import optional, tell
from embodied.reporting.metrics import read
from embodied.reporting.report import write_report
from embodied.reporting.tables import evaluation_table
from embodied.reporting.trackers import Tracking
from embodied.run import checkpoint
from embodied.run.folder import whole_checkpoint, with_init
from embodied.run.saved_settings import find_run, settings_of
from embodied.training.checks import AT_END, Checked, check_start, check_tasks


def run(args: Arguments) -> dict[str, Any]:
    settings = with_init(args.settings, args.runs_dir, required=False)
    resume = args.resume == "auto"
    return evaluate_run(args.run, settings, args.checkpoint, args.runs_dir, args.folder, resume, args.against)


def evaluate_run(
    run: str,
    config: Config,
    folder: Path | None,
    runs_dir: Path,
    into: Path | None = None,
    resume: bool = False,
    against: str | None = None,
) -> dict[str, Any]:
    """Evaluate the checkpoint `folder`, or the one that a run ends with, by the protocol of the configuration.

    Results and films go into the folder `into`, or one below the run's evals/; with `resume` an evaluation that is
    there is gone on with. `against` names what is compared with it on the same episodes: a run, a checkpoint, or
    the folder of an evaluation by the same protocol. Returns the result as plain data.
    """
    subject, protocol = subject_of(run, config, folder, runs_dir), protocol_of(config)
    checked = [_checked(subject, protocol)]
    other = None if against is None else _other(against, subject, protocol, runs_dir)
    if isinstance(other, Subject) and _is_same(other, subject, protocol):
        raise UserError(
            f"--against {against} is what is evaluated itself, {subject.named}: name another run, or a checkpoint of "
            "this one (--against RUN/checkpoints/NNNNNN)"
        )
    if isinstance(other, Subject):
        checked.append(_checked(other, protocol.shown_to(other.config)))
    with evaluation_folder(subject, protocol, into, resume) as own, open_session(config) as session:
        for each in checked:
            check_tasks(each, session)
        result = evaluate(subject, protocol, session, own)
        theirs = None if other is None else _evaluated(other, protocol, session)
        if theirs is not None:
            result = compare(result, own, theirs, str(against))
            write_result(own.path, result)
        show_table(result)  # before the films, which take longer than the episodes where drawing is slow
        film(subject, protocol, session, own)
        if theirs is not None:
            film_differences(subject, session, own, theirs, str(against))
    return result


def _checked(subject: Subject, protocol: Protocol) -> Checked:
    """The evaluation, all checked that needs no worker."""
    checked = Checked(command="eval", config=subject.config, checkpoint=subject.checkpoint, by=protocol)
    check_start(checked)
    return checked


def subject_of(run: str, config: Config, folder: Path | None, runs_dir: Path) -> Subject:
    """The subject that `embodied eval RUN --checkpoint FOLDER` names, with a complete checkpoint."""
    run_dir = find_run(run, runs_dir)
    folder = whole_checkpoint(run_dir, folder)
    return Subject(Path(run).stem, config, folder, run_dir, (run_dir or runs_dir) / "evals")


def _other(against: str, subject: Subject, protocol: Protocol, runs_dir: Path) -> Subject | EvalFolder:
    """The other side of `--against`: results that are there, or the subject to evaluate for them."""
    folder = Path(against)
    if (folder / PROTOCOL).is_file():
        found = read_folder(folder)
        if not found.identity.protocol.same_episodes(protocol):
            raise UserError(
                f"{folder} is an evaluation by another protocol ({found.identity.protocol.line()}) than the requested "
                f"one ({protocol.line()}): ask for the same, or name its run or checkpoint with --against"
            )
        return found
    named = None
    if (folder / checkpoint.MANIFEST).is_file():
        named, folder = folder, folder.resolve().parent.parent
        if find_run(str(folder), runs_dir) is None:  # not below a run: a checkpoint of the same policy
            checkpoint.verify(named)
            return Subject(named.name, subject.config, named, None, runs_dir / "evals")
    elif folder.parent.name == "checkpoints" and not folder.exists():
        raise UserError(f"--against: {checkpoint.absent(folder)}")
    elif find_run(against, runs_dir) is None:
        raise UserError(f"--against {against!r} is neither a run, nor a checkpoint, nor the folder of an evaluation")
    else:
        folder = folder if find_run(str(folder), Path()) else runs_dir / against
    own = subject.config
    evaluation = own.eval.model_copy(update={"num_envs": own.eval.num_envs or own.env.num_envs, "videos": 0})
    same = {"eval": evaluation, "farm": own.farm, "runtime": own.runtime}
    theirs = settings_of(str(folder), runs_dir, own.named_code)
    return subject_of(str(folder), theirs.model_copy(update=same), named, runs_dir)


def _is_same(other: Subject, subject: Subject, protocol: Protocol) -> bool:
    """True if both are one policy, whose episodes would be compared with themselves."""
    same_place = other.home.resolve() == subject.home.resolve()
    return same_place and other.identity(protocol.shown_to(other.config)) == subject.identity(protocol)


def _evaluated(other: Subject | EvalFolder, protocol: Protocol, session: Session) -> EvalFolder:
    """The other's episodes, those that are there and those that are not yet."""
    if isinstance(other, EvalFolder):
        return other
    protocol = protocol.shown_to(other.config)
    with evaluation_folder(other, protocol, None, resume=True) as folder:
        evaluate(other, protocol, session, folder)
        return folder


def show_table(result: dict[str, Any]) -> None:
    get_console().print(evaluation_table(result), markup=False, highlight=False, soft_wrap=True)
    show(f"kept in [bold]{result['folder']}[/]")


# --- What `train` and `sft` end with: evaluation, film and report of what was learned.


def finish_run(
    config: Config, run_dir: Path, session: Session, result: dict[str, Any], resumed: bool, *, tracking: Tracking
) -> dict[str, Any]:
    """Evaluate what a run has learned, film it and write the report, for trackers too; both results as one."""
    check_tasks(Checked(command=AT_END, config=config), session)
    subject = replace(subject_of(str(run_dir), config, None, run_dir.parent), at_end=True)
    # A run that goes on after its training had ended has its evaluation gone on with.
    with evaluation_folder(subject, protocol_of(config), None, resume=resumed) as folder:
        evaluated = evaluate(subject, protocol_of(config), session, folder)
        show_table(evaluated)
        film(subject, protocol_of(config), session, folder)
    rows = read(run_dir)
    tracking.evaluation(metrics_of(evaluated, "final"), rows[-1]["env_steps"] if rows else 0)
    tracking.file(Path(evaluated["folder"]) / "videos" / "evaluation.mp4")
    result = {**evaluated, "eval_wall_s": evaluated["wall_s"], **result}
    with optional("the report"):
        result["report"] = str(write_report(run_dir))
        show(f"report: [bold]{result['report']}[/]")
        tracking.file(Path(result["report"]))
    if "not_learned" in result:
        tell(f"Warning: {result['not_learned']}")
    return result
