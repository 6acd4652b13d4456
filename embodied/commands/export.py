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
from embodied.workflows.conventions import in_words, trained_under
from policies.contract import Policy
from policies.quantised import RELATIVE_ERROR


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
    changed = f"; {_dequantised(policy.base)}" if policy.base is not None else ""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        policies.export(policy, aside)
        _describe(aside / "README.md", policy, found)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another folder with --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    show(f"[bold]{out}[/]: {policy.kind} of {found}; its conventions are in README.md{changed}")
    return {"checkpoint": str(found), "kind": policy.kind, "exported": str(out)}


def _dequantised(base: str) -> str:
    """A sentence on the matrices that were quantised, and that the export holds dequantised."""
    return (
        f"its base was trained above in {base}: the exported matrices are the dequantised ones with the adapter added, "
        f"by which the policy computed, and differ from the base's files by about {RELATIVE_ERROR[base]:.1%} of their "
        "norm"
    )


def _describe(path: Path, policy: Policy, folder: Path) -> None:
    """Write the conventions that the policy was trained under, which no community's layout has a place for, and what
    quantising has changed."""
    trained = trained_under(folder)
    rows = {} if trained is None else in_words(trained)
    text = "Nothing says under which conventions it was trained: the checkpoint does not lie below its run.\n"
    if rows:
        table = "".join(f"| {name} | {said} |\n" for name, said in rows.items())
        text = (
            f"A program that loads it has to show and to execute what it was trained with:\n\n| | |\n|---|---|\n{table}"
        )
    with path.open("a") as file:  # behind that of the base
        file.write(f"\n# {policy.kind} of {folder.name}\n\n{text}")
        if policy.base is not None:
            file.write(f"\nQuantised: {_dequantised(policy.base)}.\n")
