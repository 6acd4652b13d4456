"""A tiny SmolVLA learns from demonstrations, and by reinforcement with the same code as every other policy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, with_settings
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from policies import load
from tests.embodied.run.test_resume import assert_same_run, run
from tests.embodied.support.checked import check

ROOT = Path(__file__).parents[3]
SMALLER: dict[str, Any] = {
    "iterations": 2,
    "checkpoint_every": 1,
    "env.num_envs": 4,
    "env.max_episode_steps": 12,
    "policy.options.checkpoint": str(ROOT / "assets" / "smolvla_tiny"),
    "policy.options.steps": 3,
    "rollout.decisions": 4,
    "optim.epochs": 2,
    "optim.minibatch": 8,
    "sft.steps": 3,
    "sft.batch": 8,
    "eval.episodes": 2,
    "eval.videos": 0,
    "runtime.mode": "inline",
}
EPISODES: dict[str, Any] = {
    "rollout.episode_group": 4,
    "rollout.decisions": 64,
    "advantage.gamma": 0.99,
    "advantage.lam": 0.95,
    "loss.value_clip": 0.2,
    "optim.value_lr": 3e-4,
}
"""Without a critic: what only one reads is at its default."""
WAYS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "every step": {"policy.options.scored": "all"},
    "flow-noise": {"policy.options.scored": "learned", "policy.options.critic": "suffix"},
    "without the cache": {"policy.options.cache_prefix": False},
    "adapter": {"policy.options.lora_rank": 2},
    "language and vision too": {"policy.options.train": ["expert", "projections", "language", "vision"]},
    "grpo": {"workflow": "grpo", "advantage.outcome": "return", **EPISODES},
    "stepnft": {"workflow": "stepnft", "loss.ratio_unit": "action", **EPISODES},
}


def configured(**settings: Any) -> Any:
    return with_settings(load_config("smolvla_tiny"), {**SMALLER, **settings}, "test")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way not in ("ppo", "flow-noise"))) for way in WAYS]
)
def test_it_is_trained_by_what_it_acted_with(way: str, tmp_path: Path) -> None:
    run(configured(**WAYS[way]), tmp_path / "run")
    rows = read(tmp_path / "run")
    assert len(rows) == 2
    if way != "stepnft":
        assert all(row["learner/first_ratio_error"] <= 1e-5 for row in rows)
        assert rows[-1]["learner/approx_kl"] > 0, "nothing was learned: nothing is shown"


def test_a_run_that_is_stopped_and_gone_on_with_is_the_same_run(tmp_path: Path) -> None:
    run(configured(), tmp_path / "whole")
    run(configured(iterations=1), tmp_path / "parts")
    run(configured(), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_the_executed_actions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(configured(**{"policy.chunk": 3}))
    assert "LeRobot executes 4 actions of a chunk (n_action_steps), and policy.chunk is 3" in caplog.text


@pytest.mark.slow
def test_it_learns_from_demonstrations_in_their_units(tmp_path: Path) -> None:
    scene = {"env.task": "tabletop/reach_red", "env.cameras": 1, "env.image_size": 32, "runtime.mode": "inline"}
    script = with_settings(load_config("tabletop_scripted"), scene, "script")
    record_run("tabletop_scripted", script, None, tmp_path / "demos", 3, False, tmp_path)
    config = configured(name="warm", **{"sft.data": [str(tmp_path / "demos")]})
    assert sft_run(config, "test", tmp_path, False)["episodes"] == 3
    further = configured(name="further", **{"policy.init": str(tmp_path / "warm")})
    train_run(further, "test", tmp_path, False)
    assert read(tmp_path / "further")[0]["learner/first_ratio_error"] <= 1e-5
    warm, after = (load(checkpoint.latest(tmp_path / name / "checkpoints")) for name in ("warm", "further"))  # type: ignore[arg-type]
    scales = [policy.get_buffer("units.action_scale") for policy in (warm, after)]
    assert torch.equal(*scales) and (scales[0] != 1).any(), "the demonstrations' units were lost"
