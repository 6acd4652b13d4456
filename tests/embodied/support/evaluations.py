"""Small evaluations, and runs to evaluate, which several test modules share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.commands.evaluate import evaluate_run
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.folder import EvalFolder, read_folder

RANDOM: dict[str, Any] = {
    "env": {"task": "tabletop/reach", "num_envs": 8},
    "policy": {"kind": "random", "chunk": 2},
    "farm": {"physics_workers": 1},
    "eval": {"greedy": False, "videos": 0},
    "runtime": {"mode": "inline"},
}


def config(base: dict[str, Any] = RANDOM, **sections: dict[str, Any]) -> Config:
    """`base` with some keys of some sections replaced."""
    return parse_config(base | {name: base.get(name, {}) | own for name, own in sections.items()}, "test")


def evaluated(folder: Path, settings: Config, **how: Any) -> EvalFolder:
    evaluate_run("untrained", settings, None, folder.parent, into=folder, **how)
    return read_folder(folder)


def assert_same_episodes(a: EvalFolder, b: EvalFolder) -> None:
    assert a.in_order() == b.in_order()
    for outcome in a.in_order():
        assert np.array_equal(a.actions(outcome), b.actions(outcome)), f"other actions in {outcome}"


def trained(
    runs_dir: Path,
    name: str,
    seed: int,
    iterations: int = 1,
    sections: dict[str, dict[str, Any]] | None = None,
    **optim: Any,
) -> Path:
    """A run's folder. `sections` has further keys of the configuration's sections."""
    small = {"iterations": iterations, "name": name, "seed": seed, "stop_at": None, "optim": optim}
    every: dict[str, Any] = {
        **small,
        "env": {"task": "tabletop/reach", "num_envs": 8},
        "policy": {"options": {"widths": [64, 64]}},
        "rollout": {"decisions": 16},
        "farm": {"physics_workers": 1},
        "eval": {"episodes": 4, "videos": 0},
        "runtime": {"mode": "inline"},
    }
    every |= {section: every[section] | own for section, own in (sections or {}).items()}
    return Path(train_run(parse_config(every, "test"), "reach", runs_dir, False)["report"]).parent


def refusal(folder: Path, settings: Config, kind: type[Exception] = UserError, **how: Any) -> str:
    with pytest.raises(kind) as caught:
        evaluated(folder, settings, **how)
    return str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy multiplies matrices, trained for an iteration: its rounding shows the shape of a batch."""
    return trained(tmp_path_factory.mktemp("runs"), "run", seed=1)
