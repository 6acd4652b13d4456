"""Runs as folders: what `train`, `sft`, `eval`, `export` and `report` do from beginning to end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from rich import get_console
from rich import print as show

import policies
from embodied import checkpoint, training
from embodied.config import Config, UserError, load_config, parse_config
from embodied.devices import release
from embodied.eval_folder import PROTOCOL, EvalFolder, read_folder
from embodied.evaluating import Subject, compare, evaluate, evaluation_folder, write_result
from embodied.planning import check_files
from embodied.protocol import Protocol, protocol_of
from embodied.reporting.report import write_report
from embodied.reporting.run_folder import ReportError
from embodied.reporting.tables import evaluation_table
from embodied.session import Session, open_session
from embodied.workers import task_spec
from sim_farm.hosts import InProcess


def settings_of(run: str, runs_dir: Path) -> Config:
    """The configuration of a run's folder, or, where there is no such run, of a configuration called so."""
    folder = find_run(run, runs_dir)
    if folder is None:
        try:
            return load_config(run)
        except UserError as error:
            raise UserError(f"no run {run!r} here or below {runs_dir}/, and {error}") from error
    path = folder / "config.yaml"
    return parse_config(yaml.safe_load(path.read_text()), str(path))


def find_run(run: str, runs_dir: Path) -> Path | None:
    """The run's folder: `run` itself, or below `runs_dir`. None if neither holds a run."""
    for folder in (Path(run), runs_dir / run):
        if (folder / "config.yaml").is_file():
            return folder
    return None


def whole_checkpoint(run_dir: Path | None, named: Path | None) -> Path | None:
    """The checkpoint `named`, or the newest of the run, complete and undamaged; None where there is neither.

    Raises `UserError` if the run has no checkpoint yet, or if the checkpoint is damaged.
    """
    if named is None and run_dir is not None:
        named = checkpoint.latest(run_dir / "checkpoints")
        if named is None:
            raise UserError(f"{run_dir} has no checkpoint yet; train it first, or name one with --checkpoint")
    if named is not None:
        checkpoint.verify(named)
    return named


def train_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Train, evaluate, film, report. Returns the result as plain data."""
    config = _begun_from(config, runs_dir, resume)
    check_files(config)
    with _run_folder(config, source, runs_dir, resume, "rl") as (run_dir, found), open_session(config) as session:
        result = training.train(config, run_dir, session, found)
        return _finish(config, run_dir, session, result, found is not None)


def sft_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Learn from demonstrations, evaluate, film, report. Returns the result as plain data."""
    from embodied.imitation import STAGE, imitate

    config = _begun_from(config, runs_dir, resume)
    info = InProcess().describe(task_spec(config))
    with _run_folder(config, source, runs_dir, resume, STAGE) as (run_dir, found):
        if found is not None:
            recorded = settings_of(str(run_dir), runs_dir).sft.data
            if config.sft.data not in ((), recorded):
                given, known = (", ".join(map(str, paths)) for paths in (config.sft.data, recorded))
                raise UserError(f"{run_dir} learns from {known}, not {given}: begin another run with --policy.init")
            config = config.model_copy(update={"sft": config.sft.model_copy(update={"data": recorded})})
        result = imitate(config, info, run_dir, found)
        release()  # the evaluator, in a process of its own, needs the device's memory
        with open_session(config) as session:
            return _finish(config, run_dir, session, result, found is not None)


def with_init(config: Config, runs_dir: Path, required: bool = True) -> Config:
    """The configuration with `policy.init` as the folder of a whole checkpoint. Raises `UserError` where it is none.

    Not `required`: what a run once began from may be gone, and its configuration is used as it is.
    """
    named = config.policy.init
    if named is None:
        return config
    if (named / checkpoint.MANIFEST).is_file():
        found = whole_checkpoint(None, named)
    else:
        run_dir = find_run(str(named), runs_dir)
        if run_dir is None and not required:
            return config
        if run_dir is None:
            raise UserError(f"policy.init {str(named)!r} is neither a run, here or below {runs_dir}/, nor a checkpoint")
        found = whole_checkpoint(run_dir, None)
    assert found is not None
    policy = config.policy.model_copy(update={"init": found.resolve()})
    return config.model_copy(update={"policy": policy})


def _begun_from(config: Config, runs_dir: Path, resume: bool) -> Config:
    """`with_init` for a run; one that goes on keeps what it once began from, of which it needs nothing any more."""
    run_dir = runs_dir / (config.name or "")
    if not (resume and config.name and checkpoint.latest(run_dir / "checkpoints")):
        return with_init(config, runs_dir)
    recorded = settings_of(str(run_dir), runs_dir).policy.init
    kept = recorded if recorded is not None and recorded.exists() else None
    return config.model_copy(update={"policy": config.policy.model_copy(update={"init": kept})})


@contextmanager
def _run_folder(
    config: Config, source: str, runs_dir: Path, resume: bool, stage: str
) -> Iterator[tuple[Path, Path | None]]:
    """The run's folder, and the checkpoint to go on from, if any. A run that fails before it has done anything leaves
    nothing worth a name."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    if resume and config.name is None:
        raise UserError("--resume auto goes on with a run that has a name; say which with --name")
    run_dir = runs_dir / (config.name or f"{Path(source).stem}-{stamp}")
    found = training.prepare_run(config, run_dir, resume, stage)
    show(f"[bold]{run_dir}[/]: {config.policy.kind} on {config.env.task}", flush=True)
    try:
        yield run_dir, found
    finally:
        if not training.has_content(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)


def _finish(config: Config, run_dir: Path, session: Session, result: dict[str, Any], resumed: bool) -> dict[str, Any]:
    """Evaluate what a run has learned, film it and write the report; both results as one."""
    subject = _subject(str(run_dir), config, checkpoint.latest(run_dir / "checkpoints"), run_dir.parent)
    # A run that goes on after its training had ended has its evaluation gone on with.
    with evaluation_folder(subject, protocol_of(config), None, resume=resumed) as folder:
        evaluated = evaluate(subject, protocol_of(config), session, folder)
    _show_table(evaluated)
    result = {**evaluated, "eval_wall_s": evaluated["wall_s"], **result, "report": str(write_report(run_dir))}
    show(f"report: [bold]{result['report']}[/]")
    return result


def evaluate_run(
    run: str,
    config: Config,
    folder: Path | None,
    runs_dir: Path,
    into: Path | None = None,
    resume: bool = False,
    against: str | None = None,
) -> dict[str, Any]:
    """Evaluate the checkpoint `folder`, or a run's newest, by the protocol of the configuration.

    Results and films go into the folder `into`, or one below the run's evals/; with `resume` an evaluation that is
    there is gone on with. `against` names what is compared with it on the same episodes: a run, a checkpoint, or
    the folder of an evaluation by the same protocol. Returns the result as plain data.
    """
    subject, protocol = _subject(run, config, folder, runs_dir), protocol_of(config)
    other = None if against is None else _other(against, subject, protocol, runs_dir)
    with evaluation_folder(subject, protocol, into, resume) as own, open_session(config) as session:
        result = evaluate(subject, protocol, session, own)
        if other is not None:
            result = compare(result, own, _evaluated(other, protocol, session), str(against))
            write_result(own.path, result)
    _show_table(result)
    return result


def _subject(run: str, config: Config, folder: Path | None, runs_dir: Path) -> Subject:
    """What `embodied eval RUN --checkpoint FOLDER` names. Its checkpoint is whole."""
    run_dir = find_run(run, runs_dir)
    folder = whole_checkpoint(run_dir, folder)
    return Subject(Path(run).stem, config, folder, run_dir, (run_dir or runs_dir) / "evals")


def _other(against: str, subject: Subject, protocol: Protocol, runs_dir: Path) -> Subject | EvalFolder:
    """What `--against` names: results that are there, or what has to be evaluated for them."""
    folder = Path(against)
    if (folder / PROTOCOL).is_file():
        found = read_folder(folder)
        if found.identity.protocol != protocol:
            raise UserError(
                f"{folder} is an evaluation by another protocol ({found.identity.protocol.line()}) than asked for "
                f"({protocol.line()}): ask for the same, or name its run or checkpoint with --against"
            )
        return found
    named = None
    if (folder / checkpoint.MANIFEST).is_file():
        named, folder = folder, folder.resolve().parent.parent
        if find_run(str(folder), runs_dir) is None:  # not below a run: a checkpoint of the same policy
            checkpoint.verify(named)
            return Subject(named.name, subject.config, named, None, runs_dir / "evals")
    elif find_run(against, runs_dir) is None:
        raise UserError(f"--against {against!r} is neither a run, nor a checkpoint, nor the folder of an evaluation")
    else:
        folder = folder if find_run(str(folder), Path()) else runs_dir / against
    own = subject.config
    evaluation = own.eval.model_copy(update={"num_envs": own.eval.num_envs or own.env.num_envs, "videos": 0})
    same = {"eval": evaluation, "farm": own.farm, "runtime": own.runtime}
    return _subject(str(folder), settings_of(str(folder), runs_dir).model_copy(update=same), named, runs_dir)


def _evaluated(other: Subject | EvalFolder, protocol: Protocol, session: Session) -> EvalFolder:
    """The other's episodes, those that are there and those that are not yet."""
    if isinstance(other, EvalFolder):
        return other
    with evaluation_folder(other, protocol, None, resume=True) as folder:
        evaluate(other, protocol, session, folder)
        return folder


def _show_table(result: dict[str, Any]) -> None:
    get_console().print(evaluation_table(result), markup=False, highlight=False, soft_wrap=True)
    show(f"kept in [bold]{result['folder']}[/]")


def export_run(run: str, folder: Path | None, out: Path, runs_dir: Path) -> dict[str, Any]:
    """Write the policy of the checkpoint `folder`, or of the run's newest, for its community's own programs."""
    run_dir = find_run(run, runs_dir)
    if run_dir is None and folder is None:
        raise UserError(f"no run {run!r}: neither {run}/config.yaml nor {runs_dir / run}/config.yaml exists")
    if out.exists():
        raise UserError(f"{out} exists: name another folder with --out")
    found = whole_checkpoint(run_dir, folder)
    assert found is not None
    policy = policies.load(found)
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        policy.export(aside)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another folder with --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    show(f"[bold]{out}[/]: {policy.kind} of {found}")
    return {"checkpoint": str(found), "kind": policy.kind, "exported": str(out)}


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
