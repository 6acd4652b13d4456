"""A run that is killed, wherever it is, goes on with --resume auto to what it would have been: bit for bit."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied.config.files import load_config
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from tests.embodied.run.test_resume import STATES, assert_same_run
from tests.embodied.support.episode_parts import config_of as grpo
from tests.embodied.support.expert import record_reach
from tests.embodied.support.killed_run import Killed, Moments, run
from tests.embodied.training.test_imitation import STATES as IMITATION
from tests.variants import often

PPO = {**STATES, "iterations": 6, "checkpoint_every": 2}
GRPO = {
    **grpo(iterations=4, rollout={"episodes_per_env": 2}).model_dump(mode="json"),
    "checkpoint_every": 1,
    "runtime": {"mode": "inline"},
}


def tiny_vla() -> dict[str, Any]:
    """OpenVLA's network at a toy's size, with a LoRA adapter: the adapter alone is trained."""
    data = load_config("openvla_tiny").model_dump(mode="json")
    changes = {
        "env": {"num_envs": 2, "max_episode_steps": 4},
        "optim": {"minibatch": 8, "micro_batch": 3, "epochs": 2},
        "rollout": {"decisions": 6},
        "runtime": {"mode": "inline"},
    }
    return {**data, "iterations": 4, "checkpoint_every": 1, **{key: data[key] | new for key, new in changes.items()}}


def countdown() -> dict[str, Any]:
    """Countdown with two tries, by a network of a toy's size."""
    data = load_config("countdown_grpo").model_dump(mode="json")
    changes: dict[str, Any] = {
        "env": {"task": "text/countdown_3_two_tries", "num_envs": 8, "max_episode_steps": 24},
        "policy": {"chunk": 12},
        "loss": {"reference_kl": 0.01},
        "advantage": {"overlong": 20},
        "rollout": {"episode_group": 4, "episodes_per_env": 1},
        "optim": {"minibatch": 8, "micro_batch": 3},
        "eval": {"episodes": 2},
        "runtime": {"mode": "inline"},
    }
    merged = {key: data[key] | new for key, new in changes.items()}
    return {**data, "workflow": "grpo_reference", "iterations": 4, "checkpoint_every": 1, **merged}


RUNS = {"ppo": PPO, "grpo": GRPO, "vla": tiny_vla(), "countdown": countdown()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Moments]]:
    return {}


def whole(name: str, known: dict[str, tuple[Path, Moments]], factory: pytest.TempPathFactory) -> tuple[Path, Moments]:
    if name not in known:
        folder = factory.mktemp(name) / "whole"
        moments = run(RUNS[name], folder)
        assert moments is not None
        known[name] = folder, moments
    return known[name]


def kill_twice(
    settings: dict[str, Any], folder: Path, moments: Moments, drawn: random.Random, save: bool, latest: float
) -> None:
    """Kill the run, and then what goes on, at drawn moments; the second may come after the end."""
    first, second = (
        Killed(event=1 + int(at * moments.events)) if within else Killed(cpu_s=at * moments.cpu_s)
        for at, within in ((drawn.uniform(0.05, latest), save), (drawn.uniform(0.05, latest) / 2, not save))
    )
    while run(settings, folder, first) is not None:  # it took less CPU time than the undisturbed one
        assert first.cpu_s, f"its saves have fewer events than {first.event}"
        shutil.rmtree(folder)
        first = replace(first, cpu_s=first.cpu_s / 2)
    run(settings, folder, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "save", "number"),
    often(
        [("ppo", False, 0)],
        [("ppo", False, n) for n in range(15)]
        + [("ppo", True, n) for n in range(5)]
        + [(name, save, n) for name in ("grpo", "vla", "countdown") for save in (False, True) for n in range(3)],
    ),
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    name: str,
    save: bool,
    number: int,
    undisturbed: dict[str, tuple[Path, Moments]],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """Killed at a random moment, and what goes on at a random one within a save; or the other way round."""
    expected, moments = whole(name, undisturbed, tmp_path_factory)
    kill_twice(RUNS[name], tmp_path / "run", moments, random.Random(f"{name} {save} {number}"), save, 0.95)
    assert run(RUNS[name], tmp_path / "run") is not None
    assert_same_run(tmp_path / "run", expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "number"), often([(True, 0)], [(save, n) for save in (False, True) for n in range(4)])
)
def test_a_killed_training_from_demonstrations_goes_on_as_if_it_had_not_been(
    save: bool, number: int, tmp_path: Path
) -> None:
    """With decay, a schedule and an average of the weights; killed and resumed twice."""
    demos = record_reach(tmp_path / "demos", 6)
    settings = {
        **IMITATION,
        "optim": {"ema": 0.9, "weight_decay": 0.1, "lr_schedule": "cosine"},
        "sft": {
            **IMITATION["sft"],
            "data": [str(demos.folder)],
            "steps": 60,
            "checkpoint_every": 4,
            "measure_every": 4,
        },
    }
    moments = run(settings, tmp_path / "whole")
    assert moments is not None
    kill_twice(settings, tmp_path / "run", moments, random.Random(f"{save} {number}"), save, 0.7)
    assert run(settings, tmp_path / "run") is not None
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def contents(run_dir: Path) -> dict[str, Any]:
    """Tensors of the last checkpoint, average and optimiser among them, and the rows of metrics without times."""
    folder = checkpoint.latest(run_dir / "checkpoints")
    assert folder is not None
    tensors = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    rows = [{name: value for name, value in row.items() if not name.endswith("wall_s")} for row in read(run_dir)]
    return {**tensors, "rows": rows}
