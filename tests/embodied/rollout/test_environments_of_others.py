"""Gymnasium environments of others in runs: ranges of actions, pictures, success, and seeds that determine nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import embodied
from embodied.config.schema import Config
from embodied.errors import UserError
from tests.sim_farm.test_gymnasium_doors import PICTURES  # noqa: F401  registers environments


class Share(gymnasium.Env[Any, Any]):
    """The best action is at 60% of the range, whatever its unit."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high
        self.action_space = spaces.Box(low, high, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        share = (float(action[0]) - self._low) / (self._high - self._low)
        return self._seen(), 1 - abs(share - 0.6), False, False, {}

    def _seen(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 1).astype(np.float32)


RANGES = {"Unit": (-1.0, 1.0), "Far": (0.0, 1000.0), "Near": (0.0, 0.001)}
for name, (low, high) in RANGES.items():
    gymnasium.register(f"others/{name}-v0", Share, max_episode_steps=5, kwargs={"low": low, "high": high})  # pyrefly: ignore


def config_of(task: str, *, policy: dict[str, Any] | None = None, **sections: Any) -> Config:
    env = {"task": f"gymnasium/{task}-v0", "num_envs": 4, **sections.pop("env", {})}
    evaluation = {"videos": 0, "episodes": 4, **sections.pop("eval", {})}
    return Config.model_validate(
        {
            "iterations": 1,
            "env": env,
            "farm": {"groups": 1, "physics_workers": 1},
            "runtime": {"mode": "inline"},
            "policy": {"kind": "categorical_mlp", "options": {"widths": [16]}, **(policy or {})},
            "rollout": {"decisions": 8},
            "optim": {"epochs": 1, "minibatch": 16},
            "eval": evaluation,
            "track": [],
            **sections,
        }
    )


def trained(config: Config, runs: Path) -> dict[str, Any]:
    embodied.train(config.model_copy(update={"name": "run"}), runs_dir=runs)
    return json.loads((runs / "run" / "eval.json").read_text())


@pytest.mark.slow
def test_the_unit_of_actions_changes_nothing(tmp_path: Path) -> None:
    """The same seeds and rewards: the same learning, up to the rounding of the environment's numbers."""
    found = {}
    for name in RANGES:
        config = config_of(
            f"others/{name}",
            policy={"kind": "gaussian_mlp"},
            iterations=15,
            rollout={"decisions": 32},
            optim={"epochs": 4, "minibatch": 64, "policy_lr": 3e-3, "value_lr": 1e-3},
        )
        found[name] = trained(config, tmp_path / name)["return"]
    assert found["Far"] == pytest.approx(found["Unit"], abs=0.05)
    assert found["Near"] == pytest.approx(found["Unit"], abs=0.05)
    assert found["Unit"] > 4.6  # 4.5 is that of a policy that stays in the middle


def test_a_policy_of_states_does_not_take_pictures_for_one(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="has no state.*--policy.reads images --env.cameras 1 --policy.options.encoder cnn"
    ):
        trained(config_of("farm-tests/Seen-rgb"), tmp_path)


def test_pictures_and_state_of_an_observation_are_read_together(tmp_path: Path) -> None:
    policy = {
        "reads": ["images", "state"],
        "options": {"widths": [16], "encoder": "cnn", "features": 8, "channels": [4, 4, 4]},
    }
    found = trained(config_of("farm-tests/Seen-beside", env={"cameras": 1, "image_size": 16}, policy=policy), tmp_path)
    assert found["episodes"] == 4
    actor = json.loads((tmp_path / "run/checkpoints/000001/policy/config.json").read_text())
    assert actor["spec"]["cameras"] == ["front"] and actor["spec"]["state_dim"] == 4


def test_success_need_not_end_an_episode(tmp_path: Path) -> None:
    found = trained(config_of("farm-tests/Middle"), tmp_path)
    assert (found["success_once"], found["success_at_end"]) == (1, 0)
    assert found["protocol"]["success"].endswith("at the end: after the last one, as success need not end an episode")


def test_seeds_that_determine_nothing_are_said_before_and_in_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(config_of("farm-tests/Global"), tmp_path)
    note = "the seeds of gymnasium/farm-tests/Global-v0 do not determine its episodes: reset twice with seed 0"
    assert any(note in each for each in found["notes"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(note) >= 2, "before the training and before the evaluation"
    assert not any(
        word in str(trained(config_of("farm-tests/AtTheEnd"), tmp_path / "other")["notes"]) for word in ("seeds of g",)
    )


def test_terminations_that_cannot_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set eval.ignore_terminations to False"):
        trained(config_of("farm-tests/AtTheEnd", eval={"ignore_terminations": True}), tmp_path)
    assert not list(tmp_path.glob("*/checkpoints")), "before anything runs"
