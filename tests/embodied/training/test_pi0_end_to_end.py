"""A tiny pi0.5 learns from demonstrations, and by reinforcement with the same code as every other policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, parse_config, with_settings
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from policies import load
from tests.embodied.run.test_resume import assert_same_run, run

CHECKPOINT = Path(__file__).parents[2] / "golden" / "pi05" / "checkpoint"
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "iterations": 2,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/reach_red", "cameras": 1, "image_size": 32, "num_envs": 4, "max_episode_steps": 12},
    "policy": {
        "kind": "pi0",
        "chunk": 4,
        "reads": ["images", "instruction"],
        "options": {"checkpoint": str(CHECKPOINT), "asset": "demonstrations", "steps": 3, "value_widths": [8]},
    },
    "rollout": {"decisions": 4},
    "optim": {"epochs": 2, "minibatch": 8, "policy_lr": 1e-3},
    "sft": {"steps": 3, "batch": 8, "lr": 1e-3},
    "eval": {"episodes": 2, "videos": 0},
    "runtime": {"mode": "inline"},
}


EPISODES: dict[str, Any] = {
    "workflow": "grpo",
    "rollout": {"episode_group": 4},
    "advantage": {"outcome": "return"},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, EPISODES], ids=["ppo", "grpo"])
def test_it_is_trained_by_what_it_acted_with(changes: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config({**SETTINGS, **changes}, "test")
    run(config, tmp_path / "run")
    rows = read(tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert row["learner/first_ratio_error"] < 1e-4
    assert rows[-1]["learner/approx_kl"] > 0, "nothing was learned: nothing is shown"


@pytest.mark.slow
def test_an_adapter_is_trained_beside_the_policy_that_it_began_as(tmp_path: Path) -> None:
    """The frozen reference is the same weights without the adapter."""
    options = {**SETTINGS["policy"]["options"], "lora_rank": 2, "steps": 2}
    policy = {**SETTINGS["policy"], "options": options}
    settings = {**SETTINGS, "policy": policy, "workflow": "ppo_reference", "loss": {"reference_kl": 0.1}}
    run(parse_config(settings, "test"), tmp_path / "run")
    rows = read(tmp_path / "run")
    assert rows[0]["learner/first_ratio_error"] < 1e-4
    assert all(row["learner/reference_kl"] > 0 for row in rows), "the reference learns too"
    folder = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert folder is not None and not (folder / "policy" / "model.safetensors").exists()


def test_a_run_that_is_stopped_and_gone_on_with_is_the_same_run(tmp_path: Path) -> None:
    run(parse_config(SETTINGS, "test"), tmp_path / "whole")
    run(parse_config({**SETTINGS, "iterations": 1}, "test"), tmp_path / "parts")
    run(parse_config(SETTINGS, "test"), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_it_learns_from_demonstrations_in_their_units(tmp_path: Path) -> None:
    scene = {"env.task": "tabletop/reach_red", "env.cameras": 1, "env.image_size": 32, "runtime.mode": "inline"}
    script = with_settings(load_config("tabletop_scripted"), scene, "script")
    record_run("tabletop_scripted", script, None, tmp_path / "demos", 3, False, tmp_path)
    config = parse_config({**SETTINGS, "name": "warm"}, "test")
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"data": (tmp_path / "demos",)})})
    assert sft_run(config, "test", tmp_path, False)["episodes"] == 3
    begun = {"policy": {**SETTINGS["policy"], "init": str(tmp_path / "warm")}, "name": "further"}
    train_run(parse_config({**SETTINGS, **begun}, "test"), "test", tmp_path, False)
    assert read(tmp_path / "further")[0]["learner/first_ratio_error"] < 1e-4
    warm, after = (load(checkpoint.latest(tmp_path / name / "checkpoints")) for name in ("warm", "further"))  # type: ignore[arg-type]
    scales = [policy.get_buffer("units.action_scale") for policy in (warm, after)]
    assert torch.equal(*scales) and (scales[0] != 1).any(), "the demonstrations' units were lost"
