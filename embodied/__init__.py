"""The stack: rollout, learning and evaluation over a simulator farm. What the command line does, from Python:

import embodied
config = embodied.load_config("pushcube")
result = embodied.train(config, runs_dir="runs")
again = embodied.evaluate(result["run"])
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied.config.schema import Config

# Nothing heavy is imported here: `embodied doctor` must run where the packages it looks for are missing.


def _check_siblings() -> None:
    """Raise `ImportError` where another module has the name of a package beside this one, in whose place it would be
    imported. The command line ends with the message alone and exit status 2."""
    for name in ("policies", "schedulers", "sim_farm"):
        ours, found = Path(__file__).resolve().parent.parent / name, _place(name)
        if found is None or not ours.is_dir() or ours in (found.resolve(), found.resolve().parent):
            continue
        message = (
            f"{found} hides this project's package {name}, {ours}: rename it, start from another folder, or take its "
            "folder out of PYTHONPATH"
        )
        if Path(sys.argv[0]).name == "embodied" or "embodied.cli" in sys.orig_argv:
            print(f"embodied: {message}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(message)


def _place(name: str) -> Path | None:
    """The file that `import name` executes, without executing it; None where there is none."""
    try:
        spec = find_spec(name)
    except ValueError:  # imported already, from nowhere
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


_check_siblings()


def load_config(reference: str, code: Collection[str] = ()) -> Config:
    """The configuration of that name in `configs/`, or in the YAML file of that path.

    `code`: what it may name as `package.module:NAME` where it is that of a run's folder, which may come from elsewhere.
    """
    from embodied.config import files

    return files.load_config(reference, code)


def train(config: Config, runs_dir: str | Path = "runs", resume: bool = False) -> dict[str, Any]:
    """Train, evaluate, film and report, as `embodied train` does. Returns the result as plain data."""
    from embodied.commands.train import train_run

    return train_run(config, config.name or "run", Path(runs_dir), resume)


def evaluate(
    run: str | Path, checkpoint: str | Path | None = None, code: Collection[str] = (), **settings: Any
) -> dict[str, Any]:
    """Evaluate the checkpoint that a run ends with (or another) as `embodied eval` does.

    `settings` are keys of `eval` (`protocol="openpi"`, `tasks=("libero/libero_goal",)`); the run's own otherwise.
    `code`: what the run's configuration may name as `package.module:NAME`.
    """
    from embodied.commands.evaluate import evaluate_run
    from embodied.config.files import parse_config
    from embodied.run.saved_settings import settings_of

    data = settings_of(str(run), Path("."), code).model_dump(mode="json")
    data["eval"] |= settings
    config = parse_config(data, "embodied.evaluate")
    return evaluate_run(str(run), config, None if checkpoint is None else Path(checkpoint), Path("."))


__all__ = ["evaluate", "load_config", "train"]
