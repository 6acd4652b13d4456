"""Settings that runs have saved in their folders, by the run's name. Reading them imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from embodied.config.files import load_config, saved_config
from embodied.config.schema import Config, refuse_code
from embodied.errors import UserError

CONFIG = "config.yaml"


def settings_of(run: str, runs_dir: Path, code: Collection[str] = ()) -> Config:
    """The configuration of a run's folder or, if there is no such run, the configuration of this name.

    Raises `UserError` if neither exists, and if a run's configuration names other code than `code` allows: its folder
    may come from others.
    """
    folder = find_run(run, runs_dir)
    if folder is None:
        try:
            return load_config(run, code)
        except UserError as error:
            raise UserError(f"no run {run!r} here or below {runs_dir}/, and {error}") from error
    saved = saved_config(folder / CONFIG)
    refuse_code(saved, folder / CONFIG, code)
    return saved


def recorded_settings(run_dir: Path) -> Config:
    """The configuration that a run has saved, to look up values: the code that it names is not allowed to run.

    Raises `UserError` where there is none.
    """
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"{run_dir} has no {CONFIG}, which every run saves: bring it back, or choose another --name")
    return saved_config(run_dir / CONFIG)


def find_run(run: str, runs_dir: Path) -> Path | None:
    """The run's folder: `run` itself, or below `runs_dir`. None if neither holds a run."""
    for folder in (Path(run), runs_dir / run):
        if (folder / CONFIG).is_file():
            return folder
    return None


def run_of_checkpoint(folder: Path) -> Path | None:
    """The run below which a checkpoint lies: RUN/checkpoints/000120, one in a folder of interim checkpoints, or the
    average of either."""
    return next((up for up in list(folder.resolve().parents)[1:4] if (up / CONFIG).is_file()), None)
