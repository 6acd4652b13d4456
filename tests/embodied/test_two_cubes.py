"""The script that makes demonstrations of ManiSkill's two cubes, as `embodied eval two_cubes_scripted` runs it."""

from __future__ import annotations

from pathlib import Path

from embodied.commands.evaluate import evaluate_run
from embodied.config import load_config
from embodied.evaluation.folder import read_folder
from embodied.training.variants import with_settings


def test_the_script_pushes_the_cube_that_is_named(tmp_path: Path) -> None:
    tasks = ["maniskill/PushRedCube-v1", "maniskill/PushGreenCube-v1"]
    settings = {
        "eval.tasks": tasks, "eval.episodes": 4, "eval.videos": 0, "env.cameras": 0, "env.num_envs": 4,
        "farm.physics_workers": 1, "runtime.mode": "inline",
    }  # fmt: skip
    config = with_settings(load_config("two_cubes_scripted"), settings, "test")
    evaluate_run("untrained", config, None, tmp_path, into=tmp_path / "e")
    outcomes = read_folder(tmp_path / "e").in_order()
    assert [outcome.success for outcome in outcomes] == [True] * 8
    assert max(outcome.length for outcome in outcomes) < 20
