"""Environments of other people's packages: each keeps the laws, and trains for some iterations.

The packages are none of this project's: `pip install --no-deps --target DIR minigrid highway-env pandas box2d
flappy-bird-gymnasium`, with DIR on PYTHONPATH. Environments of one that is missing are skipped.
"""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodied
from embodied.config.schema import Config
from embodied.reporting.metrics import read as read_metrics
from sim_farm.conformance.checks import close_kept
from sim_farm.conformance.physics_laws import (
    PHYSICS_LAWS,
    episodes_with_other_seeds_differ,
    rewards_are_normalised,
    truncation_at_the_limit,
)
from sim_farm.conformance.render_laws import RENDER_LAWS
from sim_farm.conformance.reporting import NotApplicable
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.registry import make_physics

CLASSIC = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "FrozenLake-v1")
BOX2D = ("LunarLander-v3", "BipedalWalker-v3", "CarRacing-v3")
MUJOCO = (
    "InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Reacher-v5", "Hopper-v5", "Walker2d-v5", "HalfCheetah-v5",
    "Swimmer-v5", "Pusher-v5", "Ant-v5",
)  # fmt: skip
MINIGRID = (
    "MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-Random-6x6-v0", "MiniGrid-DoorKey-5x5-v0", "MiniGrid-FourRooms-v0",
    "MiniGrid-LavaGapS5-v0", "BabyAI-GoToRedBallGrey-v0",
)  # fmt: skip
HIGHWAY = ("highway-fast-v0", "merge-v0", "roundabout-v0", "parking-v0", "racetrack-v0")
PACKAGES = {
    "gymnasium": CLASSIC,
    "Box2D": BOX2D,
    "mujoco": MUJOCO,
    "minigrid": MINIGRID,
    "highway_env": HIGHWAY,
    "flappy_bird_gymnasium": ("FlappyBird-v0",),
}
OF_GYMNASIUM = ("gymnasium", "Box2D", "mujoco")
"""Packages whose environments Gymnasium has registered itself."""
LIMIT = 40
"""Env steps of an episode: some environments have no limit of their own."""
SIZE = 32
ALIKE = ("FrozenLake-v1", "MiniGrid-Empty-5x5-v0", "FlappyBird-v0")
"""Their episodes all begin alike, whatever the seed."""
SHORT = ("InvertedPendulum-v5",)
"""Random actions end their episodes before any limit."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the packages
    pytest.mark.parametrize(
        ("package", "name"), [(package, name) for package, names in PACKAGES.items() for name in names]
    ),
]


def spec_of(package: str, name: str) -> TaskSpec:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    backend = "gymnasium" if package in OF_GYMNASIUM else f"{package}:gymnasium"
    return TaskSpec(f"{backend}/{name}", max_episode_steps=LIMIT, image_size=SIZE)


def seen_of(package: str, name: str) -> tuple[TaskSpec, TaskInfo]:
    """The task, with the camera that its observation is, if it is one."""
    spec = spec_of(package, name)
    with closing(make_physics(spec)) as physics:
        info = physics.info
    assert not info.inexact, info.inexact
    return (
        (spec, info)
        if info.state_dim
        else (TaskSpec(spec.name, max_episode_steps=LIMIT, cameras=1, image_size=SIZE), info)
    )


def test_it_keeps_the_laws(package: str, name: str) -> None:
    spec, _ = seen_of(package, name)
    broken: dict[str, str] = {}
    try:
        for law in (*PHYSICS_LAWS, *(RENDER_LAWS if spec.cameras else ())):
            if law is rewards_are_normalised:  # they are the environment's own
                continue
            try:
                law(spec)
            except NotApplicable:
                pass
            except AssertionError as error:
                broken[law.__name__] = str(error)
    finally:
        close_kept()
    expected = {episodes_with_other_seeds_differ.__name__} if name in ALIKE else set()
    expected |= {truncation_at_the_limit.__name__} if name in SHORT else set()
    assert broken.keys() == expected, broken


def test_it_trains(package: str, name: str, tmp_path: Path) -> None:
    spec, info = seen_of(package, name)
    options: dict[str, Any] = {"widths": [16]}
    if spec.cameras:
        options |= {"encoder": "cnn", "features": 16, "channels": [4, 4, 4]}
    env: dict[str, Any] = {"task": spec.name, "num_envs": 2, "max_episode_steps": LIMIT}
    env |= {"cameras": 1, "image_size": SIZE} if spec.cameras else {}
    kind = "categorical_mlp" if info.discrete_actions else "flow" if spec.cameras else "gaussian_mlp"
    config = {
        "name": "trained",
        "iterations": 20,
        "env": env,
        "farm": {"groups": 1, "physics_workers": 1},
        "runtime": {"mode": "inline"},
        "policy": {"kind": kind, "reads": ["images" if spec.cameras else "state"], "options": options},
        "rollout": {"decisions": 8},
        "optim": {"epochs": 1, "minibatch": 16},
        "eval": {"videos": 0, "episodes": 2},
        "track": [],
    }
    embodied.train(Config.model_validate(config), runs_dir=tmp_path)
    rows = read_metrics(tmp_path / "trained")
    assert len(rows) == 20 and all(np.isfinite(row["learner/policy_loss"]) for row in rows)
