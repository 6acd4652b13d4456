"""ManiSkill's two cubes: the script that makes demonstrations, and the way from these to reinforcement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied.commands.evaluate import evaluate_run
from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.demonstrations import Dataset
from embodied.evaluation.folder import read_folder
from embodied.reporting.metrics import read

TASKS = ("maniskill/PushRedCube-v1", "maniskill/PushGreenCube-v1")
SHORT: dict[str, Any] = {
    "env.num_envs": 2, "farm.physics_workers": 1, "eval.videos": 0, "runtime.mode": "inline",
}  # fmt: skip


def short(source: str, **settings: Any) -> Config:
    """The configuration with seconds of work, and these settings; `env__task` is env.task."""
    chosen = {key.replace("__", "."): value for key, value in settings.items()}
    return with_settings(load_config(source), SHORT | chosen, "test")


@pytest.mark.slow
def test_the_script_pushes_the_cube_that_is_named(tmp_path: Path) -> None:
    config = short("two_cubes_scripted", env__cameras=0, env__num_envs=2, eval__tasks=TASKS, eval__episodes=2)
    evaluate_run("untrained", config, None, tmp_path, into=tmp_path / "e")
    outcomes = read_folder(tmp_path / "e").in_order()
    assert [outcome.success for outcome in outcomes] == [True] * 4
    assert max(outcome.length for outcome in outcomes) < 20


@pytest.mark.slow
def test_a_vla_learns_from_the_script_and_is_reinforced(tmp_path: Path) -> None:
    """Every step of the configuration, with little of each: what its pictures, actions and words are fits together."""
    demos = [tmp_path / name for name in ("red", "green")]
    for task, folder in zip(TASKS, demos, strict=True):
        record_run("two_cubes_scripted", short("two_cubes_scripted", env__task=task), None, folder, 3, False, tmp_path)
    assert {text for folder in demos for text in Dataset(folder).tasks.values()} == {
        "push the red cube to the goal",
        "push the green cube to the goal",
    }
    little: dict[str, Any] = {
        "env__max_episode_steps": 8, "eval__episodes": 2, "sft__steps": 20, "sft__batch": 16, "sft__measure_every": 5,
    }  # fmt: skip
    learned = short("openvla_oft_two_cubes", name="warm", sft__data=demos, **little)
    sft_run(learned, "test", tmp_path, False)
    losses = [row["sft/loss"] for row in read(tmp_path / "warm")]
    assert losses[-1] < 0.8 * losses[0], "nothing was learned from the demonstrations"
    further = short(
        "openvla_oft_two_cubes", name="further", policy__init=tmp_path / "warm", iterations=2, rollout__decisions=4,
        optim__micro_batch=8, optim__minibatch=16, **little,
    )  # fmt: skip
    result = train_run(further, "test", tmp_path, False)
    assert result["env_steps"] > 0
    assert [row["learner/first_ratio_error"] < 1e-4 for row in read(tmp_path / "further")] == [True, True]
