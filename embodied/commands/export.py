"""`embodied export`: a run's policy as its community's programs load it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich import print as show

import policies
from embodied.commands.arguments import ExportArguments as Arguments
from embodied.errors import UserError
from embodied.run.folder import whole_checkpoint
from embodied.run.saved_settings import find_run


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
