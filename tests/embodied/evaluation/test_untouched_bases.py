"""Bases of the recipes of small policies: a recipe proves learning only if its base does not solve the task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied import cli
from embodied.config.files import load_config

EPISODES = 25
"""Episodes of each task."""
MOST = {
    "openvla_small": 0.25,
    "openvla_oft_small": 0.25,
    "pi0_small": 0.2,
    "smolvla_small": 0.2,
    "act_small": 0.2,
    "diffusion_small": 0.2,
    # An arm that moves at all pushes a cube now and then.
    "pi0_two_cubes": 0.45,
    "smolvla_two_cubes": 0.1,
    "openvla_oft_two_cubes": 0.1,
    "pi0_goal_small_grpo": 0.1,
    "smolvla_goal_small": 0.1,
}
"""Most episodes that the untouched base may solve, with room for their number."""


@pytest.mark.slow
@pytest.mark.parametrize("config", MOST)
def test_an_untouched_base_does_not_solve_the_recipes_tasks(config: str, tmp_path: Path) -> None:
    options = ["--eval.episodes", str(EPISODES), "--eval.videos", "0", "--runtime.mode", "inline"]
    out = tmp_path / "result.json"
    assert cli.main(["eval", config, *options, "--folder", str(tmp_path / "eval"), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    tasks = len(load_config(config).eval.tasks) or 1
    assert found["episodes"] == tasks * EPISODES and found["success_rate"] <= MOST[config]
