"""Runs as folders: finding one, beginning one, its configuration and its newest checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import yaml
from rich import print as show

from embodied import checkpoint
from embodied.config import Config, load_config, parse_config, save_config
from embodied.errors import UserError

RUNS = Path("runs")
"""Where runs are, unless --runs-dir says otherwise."""


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


def begun_from(config: Config, runs_dir: Path, resume: bool) -> Config:
    """`with_init` for a run; one that goes on keeps what it once began from, of which it needs nothing any more."""
    run_dir = runs_dir / (config.name or "")
    if not (resume and config.name and checkpoint.latest(run_dir / "checkpoints")):
        return with_init(config, runs_dir)
    recorded = settings_of(str(run_dir), runs_dir).policy.init
    kept = recorded if recorded is not None and recorded.exists() else None
    return config.model_copy(update={"policy": config.policy.model_copy(update={"init": kept})})


def prepare_run(config: Config, run_dir: Path, resume: bool, stage: str = "rl") -> Path | None:
    """Make the run's folder and save the configuration; with `resume`, the checkpoint to go on from, if any.

    Raises `UserError` when the folder exists and is not to be resumed, is of another stage, or cannot be written.
    """
    if run_dir.exists() and not resume:
        raise UserError(f"the run folder {run_dir} exists: go on with it by --resume auto, or choose another --name")
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not (run_dir / "config.yaml").exists():
            save_config(config, run_dir / "config.yaml")
    except OSError as error:
        raise UserError(
            f"the run folder {run_dir} cannot be written ({error.strerror}); make it writable, or choose another "
            "place with --runs-dir"
        ) from error
    found = checkpoint.latest(run_dir / "checkpoints") if resume else None
    if found is not None:
        checkpoint.verify(found)
        other = checkpoint.read_state(found).stage
        if other != stage:
            verb = {"rl": "train", "sft": "sft"}[other]
            raise UserError(
                f"{run_dir} is a run of `embodied {verb}`: go on with that, or begin another run from what it has "
                f"learned with --policy.init {run_dir}"
            )
    return found


def has_content(run_dir: Path) -> bool:
    """Whether a run has done anything that somebody could miss."""
    metrics = run_dir / "metrics.jsonl"
    learned = metrics.is_file() and metrics.stat().st_size > 0
    return learned or checkpoint.latest(run_dir / "checkpoints") is not None


@contextmanager
def open_run_folder(
    config: Config, source: str, runs_dir: Path, resume: bool, stage: str
) -> Iterator[tuple[Path, Path | None]]:
    """The run's folder, and the checkpoint to go on from, if any. A run that fails before it has done anything leaves
    nothing worth a name."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    if resume and config.name is None:
        raise UserError("--resume auto goes on with a run that has a name; say which with --name")
    run_dir = runs_dir / (config.name or f"{Path(source).stem}-{stamp}")
    found = prepare_run(config, run_dir, resume, stage)
    show(f"[bold]{run_dir}[/]: {config.policy.kind} on {config.env.task}", flush=True)
    try:
        yield run_dir, found
    finally:
        if not has_content(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)
