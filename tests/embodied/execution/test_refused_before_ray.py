"""What only a simulator knows of a task is refused before an environment is built and before Ray is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied.config.files import parse_config
from embodied.errors import UserError
from embodied.execution.assignment import configured
from embodied.execution.iteration import start_run
from embodied.execution.session import open_session
from embodied.workflows.run_spec import RunSpec
from policies.errors import PolicyError
from sim_farm.contract import FarmError

OWN = "tests.sim_farm.test_gymnasium:gymnasium/farm-tests"
REACH = {"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 10}
SEEING = {
    "policy": {"kind": "flow", "reads": ["images"], "options": {"encoder": "cnn"}},
    "env": {**REACH, "cameras": 1, "image_size": 32},
}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "discrete actions": (
        {"env": {"task": "gymnasium/CartPole-v1", "num_envs": 2}},
        "one of 2 choices, and gaussian_mlp says real numbers",
    ),
    "actions of several numbers of choices": ({"env": {"task": f"{OWN}/Choices-v0", "num_envs": 2}}, "MultiDiscrete"),
    "no time limit": ({"env": {"task": f"{OWN}/Endless-v0", "num_envs": 2}}, "no time limit of its own"),
    "tasks of other sizes": (
        {**SEEING, "extra_tasks": [{"task": "tabletop/push", "image_size": 64}]},
        "an image size of 64, and the tasks of one farm share them",
    ),
    "recorded states": ({"env": {**REACH, "init_states": 3}}, "the task's recorded initial states are none"),
    "a measure": (
        {"env": {"task": "gymnasium/Pendulum-v1", "num_envs": 2}, "workflow": "grpo", "rollout": {"episode_group": 2}},
        "gymnasium/Pendulum-v1 has no success",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_simulator_knows_is_refused_before_ray_is_started(mistake: str, tmp_path: Path) -> None:
    settings, says = MISTAKES[mistake]
    farm = {"groups": 1, "physics_workers": 1}
    run = RunSpec.of(parse_config({"farm": farm, "runtime": {"mode": "ray"}, **settings}, "test"))
    with open_session(run.config) as session:
        with (
            pytest.raises((UserError, PolicyError, FarmError), match=says),
            start_run(run, tmp_path, session, configured(run, session.cores)),
        ):
            pass
        assert not session.runtime.started
