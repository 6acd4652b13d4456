"""The stack against `tests/reference_ppo.py`, which was written without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policies
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.session import open_session
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from tests import reference_ppo

TOLERANCE = 1e-6
"""Float32: the stack infers environments in batches and the reference one by one, which rounds differently."""

SETTINGS = {
    # With this seed, some episodes are solved and most are truncated, in every iteration.
    "truncated": reference_ppo.Settings(
        max_episode_steps=20, seed=9, iterations=3, num_envs=4, steps=36, widths=(32, 24), initial_log_std=1.5,
        gamma=0.97, lam=0.9, clip=0.1, value_clip=0.05, entropy_coef=0.01, epochs=3, minibatch=40,
        policy_lr=2e-3, value_lr=1e-3,
    ),
    "always": reference_ppo.Settings(
        max_episode_steps=15, seed=3, iterations=3, num_envs=4, steps=36, widths=(16,), initial_log_std=1.0,
        bootstrap_terminations=True, epochs=2, minibatch=64,
    ),
}  # fmt: skip


def config_of(settings: reference_ppo.Settings) -> Config:
    """The stack's words for the reference's settings."""
    options = {"widths": list(settings.widths), "initial_log_std": settings.initial_log_std}
    loss = ("clip", "value_clip", "value_coef", "entropy_coef")
    optim = ("epochs", "minibatch", "policy_lr", "value_lr", "max_grad_norm")
    bootstrap = "always" if settings.bootstrap_terminations else "truncated"
    return parse_config(
        {
            "seed": settings.seed,
            "iterations": settings.iterations,
            "env": {
                "task": settings.task,
                "num_envs": settings.num_envs,
                "max_episode_steps": settings.max_episode_steps,
            },
            "policy": {"options": options},
            "rollout": {"decisions": settings.steps},
            "advantage": {"bootstrap": bootstrap, **named(settings, ("gamma", "lam"))},
            "loss": named(settings, loss),
            "optim": {**named(settings, optim)},
            "runtime": {"mode": "inline"},
        },
        "test",
    )


def named(settings: reference_ppo.Settings, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def run(config: Config, folder: Path) -> policies.Policy:
    """The policy that the stack ends with; its record is in the folder."""
    prepare_run(config, folder, resume=False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), folder, session, None)
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None
    checkpoint.verify(last)
    return policies.load(last)


@pytest.mark.parametrize("bootstrap", SETTINGS)
def test_stack_computes_what_the_single_file_reference_computes(bootstrap: str, tmp_path: Path) -> None:
    settings = SETTINGS[bootstrap]
    trained = run(config_of(settings), tmp_path / "run")
    agent, history = reference_ppo.train(settings)
    rows = read(tmp_path / "run")

    episodes = [episode for ended in history for episode in ended]
    assert any(episode.solved for episode in episodes), "no termination: this run would not test it"
    assert any(episode.length == settings.max_episode_steps for episode in episodes), "no truncation"
    assert len(rows) == len(history) == settings.iterations
    for row, ended in zip(rows, history, strict=True):
        assert row["env/episodes"] == len(ended)
        assert row["env/success_once"] == np.mean([episode.solved for episode in ended])
        assert row["env/episode_len"] == np.mean([episode.length for episode in ended])
        assert row["env/return"] == pytest.approx(np.mean([episode.total for episode in ended]), abs=TOLERANCE)
        assert row["env_steps"] == row["iteration"] * settings.num_envs * settings.steps

    initial = policies.build("gaussian_mlp", trained.spec, settings.seed, **trained.architecture()).state_dict()
    state = trained.state_dict()
    for name, expected in agent.state_dict().items():
        assert (expected - initial[name]).abs().max() > 1e-3, f"{name} was hardly trained"
        worst = float((state[name] - expected).detach().abs().max())
        assert worst < TOLERANCE, f"{name} differs by {worst:.1e}"
    for name, statistic in (("mean", agent.mean), ("var", agent.var)):
        torch.testing.assert_close(state[f"normalizer.{name}"], statistic, rtol=TOLERANCE, atol=TOLERANCE)
    assert state["normalizer.count"] == sum(len(part) for part in agent.seen)
