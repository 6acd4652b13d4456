"""Runs as folders: finding one, beginning one, its configuration and its newest checkpoint.

One process at a time trains into a run's folder: it holds the lock of RUN/.owner, a file that names it. Others may
read the folder meanwhile, and evaluate into folders below it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rich import print as say
from rich.markup import escape

from embodied import hub
from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.errors import UserError, shown
from embodied.files import new_folder
from embodied.run import checkpoint, continued
from embodied.run.checkpoint import CheckpointError
from embodied.run.saved_settings import CONFIG, find_run, recorded_settings
from policies import registry

ELSEWHERE = "make it writable, or choose another place with --runs-dir"
METRICS, OWNER = "metrics.jsonl", ".owner"
TRACKED = ("tensorboard", "trackers.json")
"""Files of trackers in a run's folder, with which they continue."""


def lasting_root(run_dir: Path) -> Path:
    """Folder of a run's lasting checkpoints."""
    return run_dir / "checkpoints"


def interim_root(run_dir: Path) -> Path:
    """Folder of a run's interim checkpoint (`embodied/training/checkpoints.py`)."""
    return run_dir / "checkpoints" / "interim"


def newest_whole(run_dir: Path) -> tuple[Path | None, list[CheckpointError]]:
    """The newest checkpoint of a run that is whole, lasting or interim, or None; and what is wrong with newer ones.

    The caller owns the run. Raises `CheckpointError` where there are lasting checkpoints and nothing is whole.
    """
    try:
        interim, damages = checkpoint.recover(interim_root(run_dir))
    except CheckpointError as error:
        interim, damages = None, [error]
    try:
        lasting, more = checkpoint.recover(lasting_root(run_dir))
    except CheckpointError as error:
        if interim is None:
            raise
        lasting, more = None, [error]
    found = [folder for folder in (interim, lasting) if folder is not None]
    return max(found, key=lambda folder: int(folder.name), default=None), damages + more


def whole_checkpoint(run_dir: Path | None, named: Path | None) -> Path | None:
    """The checkpoint `named`, or the one that the run ends with, complete and undamaged; None where there is neither.

    That is the best where it was evaluated during training (eval.every), else the newest. Its average of the weights
    where `named` is `average`.

    Raises `UserError` if the run has no checkpoint yet, or if the checkpoint is damaged.
    """
    average = named == Path(checkpoint.AVERAGE)
    if run_dir is not None and (named is None or average):
        named = checkpoint.best(run_dir / "checkpoints") or checkpoint.latest(run_dir / "checkpoints")
        if named is None:
            raise UserError(f"{run_dir} has no checkpoint yet; train it first, or name one with --checkpoint")
        named = named / checkpoint.AVERAGE if average else named
        if not named.is_dir():
            raise UserError(f"{named.parent} has no average of the weights: its run kept none (optim.ema 0.999)")
    if named is not None:
        checkpoint.verify(named)
    return named


def fetched(config: Config) -> Config:
    """The configuration with the policy's checkpoint downloaded, if it has a Hugging Face name, and its commit in that
    name; `policy.chunk` is a number of actions. Raises `UserError`."""
    kind, named = config.policy.kind, config.policy.hub_name
    if named is None:
        return _with_chunk(config)
    if "checkpoint" not in registry.arguments_of(registry.policy_kind(kind)):
        raise UserError(
            f"policy.options.checkpoint {shown(named)} is a checkpoint that a pretrained policy is made of (openvla, "
            f"openvla_oft, pi0, smolvla, act), and policy.kind is {kind}: name its kind, or begin a {kind} from a run "
            "with policy.init"
        )
    return _with_chunk(_with_checkpoint(config, hub.pinned(named, hub.checkpoint_folder(named))))


def _with_chunk(config: Config) -> Config:
    """The configuration with the checkpoint's number of executed actions where `policy.chunk` is 0. Raises `UserError`
    where the checkpoint has none."""
    policy = config.policy
    if policy.chunk:
        return config
    found = registry.policy_kind(policy.kind).format.executed(policy.architecture)
    if found is None:
        raise UserError(
            f"policy.chunk is 0, the checkpoint's own number of executed actions, and no file of a {policy.kind} has "
            "one: set policy.chunk to at least 1"
        )
    return _with_policy(config, chunk=found)


def with_init(config: Config, runs_dir: Path, required: bool = True) -> Config:
    """The configuration with `policy.init` as the folder of a whole checkpoint, and the policy `fetched`. Raises
    `UserError` where it is none.

    Not `required`: what a run once began from may be gone, and its configuration is used as it is.
    """
    config = fetched(config)
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
            if named.parent.name == "checkpoints" and not named.exists():
                raise UserError(f"policy.init: {checkpoint.absent(named)}")
            raise UserError(f"policy.init {str(named)!r} is neither a run, here or below {runs_dir}/, nor a checkpoint")
        found = whole_checkpoint(run_dir, None)
    assert found is not None
    return _with_policy(config, init=found.resolve())


def begun_from(config: Config, runs_dir: Path, resume: bool, stage: str = "rl") -> Config:
    """`with_init` for a run; a resumed run keeps its `policy.init`.

    The files of `policy.init` are then needed only for a reference policy: raises `UserError` if they are missing. Also
    raises it if the run has another seed, task or policy, before other checks.
    """
    run_dir = runs_dir / (config.name or "")
    if not (resume and config.name and has_checkpoint(run_dir)):
        return with_init(config, runs_dir)
    recorded_run = recorded_settings(run_dir)
    recorded_policy, done = recorded_run.policy, continued.done(run_dir)
    if not config.policy.chunk:
        config = _with_policy(config, chunk=recorded_policy.chunk)
    own = [one for one in continued.changes(recorded_run, config) if not one.key.startswith("sft.")]
    continued.refuse_fixed(own, recorded_policy.kind, run_dir, done, stage)
    _refuse_another_beginning(config.policy.init, recorded_policy.init, run_dir, runs_dir)
    if (named := config.policy.hub_name) is not None and recorded_policy.hub_name is not None:
        config = _with_checkpoint(config, hub.kept(named, recorded_policy.hub_name))
    config = fetched(config)
    recorded = recorded_policy.init
    kept = recorded if recorded is not None and recorded.exists() else None
    if kept != recorded and config.loss.reference_kl:
        raise UserError(
            f"{run_dir} began from {recorded}, which is gone, and its reference policy is made of that: bring it back, "
            "or go on without (--workflow without a reference, or --loss.reference-kl 0)"
        )
    return _with_policy(config, init=kept)


def _refuse_another_beginning(named: Path | None, began: Path | None, run_dir: Path, runs_dir: Path) -> None:
    """Raise `UserError` where `policy.init` names another run or checkpoint than the one that the run began from. One
    that is gone says nothing."""
    found = [folder.resolve() for folder in (named, runs_dir / named) if folder.is_dir()] if named is not None else []
    known = () if began is None else (began.resolve(), *began.resolve().parents)
    if found and not any(folder in known for folder in found):
        raise UserError(
            f"{run_dir} began {'from no other policy' if began is None else f'from {began}'}, and policy.init is "
            f"{named}: leave --policy.init out to go on with it, or begin another run with another --name"
        )


def _with_checkpoint(config: Config, named: str) -> Config:
    return _with_policy(config, options=config.policy.options | {"checkpoint": named})


def _with_policy(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"policy": config.policy.model_copy(update=changes)})


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Make the run's folder and hold its lock. The system lets go of it when the process ends, however it ends.

    Raises `UserError` if another process holds it, on this machine or on another that sees the folder.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        owner = (run_dir / OWNER).open("a+")
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    with owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(_owned_by_another(run_dir)) from None
        owner.truncate(0)
        json.dump({"process": os.getpid(), "host": socket.gethostname()}, owner)
        owner.flush()
        yield


def _owned_by_another(run_dir: Path) -> str:
    try:
        by = json.loads((run_dir / OWNER).read_text())
        owner, stop = f"process {by['process']} on {by['host']}", f" (kill -INT {by['process']} there)"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not written its name yet
        owner, stop = "another process", ""
    return (
        f"{owner} trains into {run_dir} now: wait until it has ended, stop it{stop} and go on with --resume auto, or "
        "choose another --name"
    )


def _unwritable(run_dir: Path, error: OSError) -> UserError:
    return UserError(f"the run folder {run_dir} cannot be written ({error.strerror}); {ELSEWHERE}")


def prepare_run(config: Config, run_dir: Path, resume: bool, stage: str = "rl") -> Path | None:
    """Fill the run's folder and save the configuration. With `resume`, returns the checkpoint to continue from, if any.

    This is the newest whole checkpoint; damaged newer ones are set aside. Without a checkpoint, the run begins anew,
    and its earlier records are kept as metrics.jsonl.1 (.2, ...) and tensorboard.1. Without a run, it begins. All three
    cases are reported. The caller owns the folder.

    Changed settings are printed and recorded (`continued.note_changes`). Raises `UserError` if there is a run and it is
    not to be resumed, if it is of another stage, if a setting changes that is fixed for a run, if it has checkpoints
    and none is whole, or if the folder cannot be written.
    """
    if not resume and run_dir.exists() and (not run_dir.is_dir() or _has_files(run_dir)):
        raise UserError(f"the run folder {run_dir} exists: go on with it by --resume auto, or choose another --name")
    if resume and not _has_files(run_dir):
        say(f"[yellow]there is no run {escape(str(run_dir))} on {socket.gethostname()}: it begins[/]")
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not (run_dir / CONFIG).exists():
            save_config(config, run_dir / CONFIG)
        found = _checkpoint_to_go_on_from(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    if found is None:
        continued.forget_earlier(run_dir)
        return None
    state = checkpoint.read_state(found)
    if state.stage != stage:
        raise UserError(
            f"{run_dir} is a run of `embodied {continued.VERBS[state.stage]}`: go on with that, or begin another run "
            f"from what it has learned with --policy.init {run_dir}"
        )
    continued.note_changes(config, run_dir, state.iteration, stage)
    return found


def _has_files(run_dir: Path) -> bool:
    """True if there is a folder with a file besides its owner's name."""
    return run_dir.is_dir() and any(path.name != OWNER for path in run_dir.iterdir())


def _checkpoint_to_go_on_from(run_dir: Path) -> Path | None:
    found, damages = newest_whole(run_dir)
    for damage in damages:
        say(f"[yellow]{escape(str(damage))}. It is kept as NAME.damaged, and the run goes on from {found}[/]")
    if found is None and (record := _set_record_aside(run_dir)) is not None:
        say(f"[yellow]{run_dir} has no checkpoint: the run begins anew; what it had recorded is kept in {record}[/]")
    return found


def _set_record_aside(run_dir: Path) -> Path | None:
    """Rename metrics.jsonl to metrics.jsonl.1 (.2, ...), with what trackers keep; None where there was no row to keep.

    A run that begins anew is then tracked as another."""
    record = run_dir / METRICS
    if not _has_rows(record):
        return None
    suffix = next(f".{n}" for n in count(1) if not (run_dir / f"{METRICS}.{n}").exists())
    for kept in (run_dir / name for name in TRACKED):
        if kept.exists():
            kept.rename(kept.with_name(kept.name + suffix))
    return record.rename(run_dir / (METRICS + suffix))


def _has_rows(record: Path) -> bool:
    return record.is_file() and record.stat().st_size > 0


def has_checkpoint(run_dir: Path) -> bool:
    """True if the run has a checkpoint, lasting or interim."""
    return any(checkpoint.latest(root(run_dir)) for root in (lasting_root, interim_root))


def has_content(run_dir: Path) -> bool:
    """True if the folder has rows or checkpoints of a run that would be lost."""
    recorded = any(_has_rows(record) for record in run_dir.glob(f"{METRICS}*"))
    return recorded or has_checkpoint(run_dir)


@contextmanager
def open_run_folder(
    config: Config, source: str, runs_dir: Path, resume: bool, stage: str
) -> Iterator[tuple[Path, Path | None]]:
    """The run's folder, which only this process trains into, and the checkpoint to continue from, if any.

    If a run stops early and has a checkpoint, the command that resumes it is printed. A run that fails before it has
    done anything leaves no folder.
    """
    if resume and config.name is None:
        raise UserError("--resume auto goes on with a run that has a name; say which with --name")
    run_dir = new_folder(runs_dir, Path(source).stem, ELSEWHERE) if config.name is None else runs_dir / config.name
    with owned(run_dir):
        found = prepare_run(config, run_dir, resume, stage)
        say(f"[bold]{run_dir}[/]: {config.policy.kind} on {config.env.task}", flush=True)
        try:
            yield run_dir, found
        except BaseException:
            if has_checkpoint(run_dir):
                continued.say(f"go on with: {continued.command(run_dir, runs_dir, source, config, stage)}")
            raise
        finally:
            if not has_content(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
