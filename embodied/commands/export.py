"""`embodied export`: a run's policy as its community's programs load it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import print as show

import policies
from embodied.config.files import RUNS
from embodied.errors import UserError
from embodied.run.folder import find_run, whole_checkpoint


@dataclass(frozen=True)
class Arguments:
    """Write a run's policy as its community's own programs load it: for OpenVLA a Hugging Face directory, an adapter
    merged into the weights."""

    run: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir."""
    checkpoint: Path | None = None
    """Folder of a checkpoint; none: the one that the run ends with, the best or else the newest."""
    out: Path = tyro.MISSING
    """Folder to write; there must be none of that name."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    return export_run(args.run, args.checkpoint, args.out, args.runs_dir)


def export_run(run: str, folder: Path | None, out: Path, runs_dir: Path) -> dict[str, Any]:
    """Write the policy of the checkpoint `folder`, or of the one that the run ends with, for its community's own
    programs."""
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
