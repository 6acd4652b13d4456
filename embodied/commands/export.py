"""`embodied export`: a run's policy as its community's programs load it."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import get_console
from rich.markup import escape

import policies
from embodied.commands.arguments import ExportArguments as Arguments
from embodied.errors import UserError
from embodied.files import read_json
from embodied.hub import Name
from embodied.run.folder import whole_checkpoint
from embodied.run.saved_settings import find_run
from embodied.workflows.conventions import in_words, trained_under
from policies.contract import Policy
from policies.policy_kind import LoadedBy
from policies.quantised import RELATIVE_ERROR
from policies.registry import policy_kind


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
    changed = f"; {dequantised(policy.base)}" if policy.base is not None else ""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write_policy(policy, found, aside)
        _describe(aside / "README.md", policy, found, out)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another folder with --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    loaded = policy_kind(policy.kind).format.loaded_by(out)
    by = f"loaded by {loaded.program}" if loaded.program else "loaded by this project alone"
    said = escape(f"{policy.kind} of {found}, {by}; its conventions are in README.md{changed}")
    get_console().print(f"[bold]{escape(str(out))}[/]: {said}", highlight=False, soft_wrap=True)
    return {"checkpoint": str(found), "kind": policy.kind, "exported": str(out), "loaded_by": loaded.program or None}


def write_policy(policy: Policy, checkpoint: Path, folder: Path) -> None:
    """Write the checkpoint's policy in its community's layout."""
    policies.export(policy, folder)
    trained = trained_under(checkpoint)
    base = None if trained is None else Name.parse(trained.policy.hub_name or "")
    if base is not None:
        _refer_to_code(folder, base.repository)


def dequantised(base: str) -> str:
    """A sentence on the matrices that were quantised, and that the export holds dequantised."""
    return (
        f"its base was trained above in {base}: the exported matrices are the dequantised ones with the adapter added, "
        f"by which the policy computed, and differ from the base's files by about {RELATIVE_ERROR[base]:.1%} of their "
        "norm"
    )


def conventions(checkpoint: Path) -> str:
    """The conventions that the policy was trained under, as Markdown: no community's layout has a place for them."""
    trained = trained_under(checkpoint)
    if trained is None:
        return "Nothing says under which conventions it was trained: the checkpoint does not lie below its run.\n"
    table = "".join(f"| {name} | {said} |\n" for name, said in in_words(trained).items())
    return f"A program that loads it has to show and to execute what it was trained with:\n\n| | |\n|---|---|\n{table}"


def loading(loaded: LoadedBy, beginning: str) -> str:
    """Which program loads the folder, as Markdown, with the lines to type after the `beginning`, which defines
    `folder`."""
    if not loaded.program:
        return f"embodied-farm {version()} loads it, and no other program: {loaded.note or 'its layout is ours'}.\n"
    lines = f"{beginning}\n\n{loaded.lines}" if beginning else loaded.lines
    note = f"\n{loaded.note}\n" if loaded.note else ""
    return f"{loaded.program} loads it, and embodied-farm {version()}:\n\n```python\n{lines}\n```\n{note}"


def _describe(path: Path, policy: Policy, checkpoint: Path, out: Path) -> None:
    """Write what loads the folder, the conventions of the training, and what quantising has changed."""
    how = loading(policy_kind(policy.kind).format.loaded_by(path.parent), f'folder = "{out.name}"')
    with path.open("a") as file:  # behind that of the base
        file.write(f"\n# {policy.kind} of {checkpoint.name}\n\n{how}\n{conventions(checkpoint)}")
        if policy.base is not None:
            file.write(f"\nQuantised: {dequantised(policy.base)}.\n")


def _refer_to_code(folder: Path, base: str) -> None:
    """Let `auto_map` of the folder's JSON files, by which transformers finds Python code, name the code in the
    repository `base` where it is not in the folder: checkpoints are downloaded without code (`embodied.hub`)."""
    for path in folder.glob("*.json"):
        data = read_json(path)
        if not isinstance(data, dict) or not isinstance(named := data.get("auto_map"), dict):
            continue
        data["auto_map"] = {key: _with_home(value, folder, base) for key, value in named.items()}
        path.write_text(json.dumps(data, indent=2) + "\n")


def _with_home(value: Any, folder: Path, base: str) -> Any:
    if isinstance(value, list):
        return [_with_home(item, folder, base) for item in value]
    here = not isinstance(value, str) or "--" in value or (folder / f"{value.partition('.')[0]}.py").exists()
    return value if here else f"{base}--{value}"


def version() -> str:
    """The version of this project; empty for a source tree that is not installed."""
    try:
        return metadata.version("embodied-farm")
    except metadata.PackageNotFoundError:
        return ""
