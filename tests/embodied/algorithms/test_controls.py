"""The scale of returns and the learning rates: by their formulas, over a checkpoint, and in real updates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algorithms.controls import LEAST_DEVIATION, ReturnScale, UpdateControls
from embodied.config.files import parse_config
from embodied.config.schema import AdvantageConfig, Config, LossConfig
from embodied.errors import UserError
from embodied.run import checkpoint
from tests.embodied.learning.test_learner import make_batch, make_learner, to_rows
from tests.embodied.run.test_resume import STATES, assert_same_run, config_of, run
from tests.embodied.support.checked import check


def config(**sections: dict[str, Any]) -> Config:
    return parse_config(sections, "test")


# --- formulas


def test_returns_of_the_first_iteration_are_their_own_scale_and_later_ones_join() -> None:
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)).double() * 3 + i for i in range(3)]
    found = ReturnScale()
    assert found.scale == (0.0, 1.0)
    for value in values:
        found = found.seen(float(value.mean()), float(value.square().mean()))
        if value is values[0]:
            assert found.scale == pytest.approx((float(value.mean()), float(value.std(unbiased=False))))
    weights = torch.tensor([0.81, 0.9, 1.0]) / 2.71
    mean = sum(float(w * v.mean()) for w, v in zip(weights, values, strict=True))
    square = sum(float(w * v.square().mean()) for w, v in zip(weights, values, strict=True))
    assert found.scale == pytest.approx((mean, math.sqrt(square - mean**2)))
    assert ReturnScale().seen(2.0, 4.0).scale == (2.0, LEAST_DEVIATION)


# --- in real updates


def test_normalised_returns_give_the_same_advantages(tmp_path: Path) -> None:
    """A critic that says the same in deviations of returns changes nothing of what the policy learns from."""
    adapting = config(advantage={"normalise_returns": True})
    controls, batch = UpdateControls(adapting), make_batch()
    controls.load({"return_mean": 2.0, "return_square": 13.0, "return_weight": 0.5})
    spoken = replace(
        batch,
        **{name: (getattr(batch, name) - 2) / 3 for name in ("value", "final_value", "last_value")},
    )
    back = controls.in_rewards(spoken)
    for name in ("value", "final_value", "last_value"):
        torch.testing.assert_close(getattr(back, name), getattr(batch, name))
    assert UpdateControls(config()).in_rewards(batch) is batch


def test_values_of_an_update_ago_were_recorded_in_the_scale_of_then() -> None:
    adapting = config(advantage={"normalise_returns": True})
    controls, batch = UpdateControls(adapting), make_batch()
    rows = to_rows(batch)
    first = controls.in_rewards(batch)
    assert torch.equal(first.value, batch.value), "before any update there is no scale"
    controls.in_deviations(rows)
    mean, deviation = float(rows.returns.double().mean()), float(rows.returns.double().std(unbiased=False))
    torch.testing.assert_close(controls.in_rewards(batch).value, batch.value * deviation + mean)
    late = controls.in_rewards(batch, now=2 * batch.value)
    torch.testing.assert_close(late.value, 2 * batch.value * deviation + mean)
    assert torch.equal(late.final_value, batch.final_value) and torch.equal(late.last_value, batch.last_value)


def test_a_clipped_critic_moves_when_the_scale_does(tmp_path: Path) -> None:
    """The bound is on how far it moves from what it said, not from what that means in the new scale."""
    adapting = AdvantageConfig(normalise_returns=True)
    learner = make_learner(tmp_path, LossConfig(value_clip=0.2), adapting, epochs=1, minibatch=0)
    batch = make_batch()
    seen: list[float] = []
    clip = learner._parallel.clip_grad_norm

    def watched(limit: float) -> torch.Tensor:
        gradients = [p.grad for p in learner.policy.value_head.parameters() if p.grad is not None]
        seen.append(float(sum(g.abs().sum() for g in gradients)))
        return clip(limit)

    learner._parallel.clip_grad_norm = watched  # type: ignore[method-assign]
    metrics = learner.update(replace(batch, reward=batch.reward * 5 + 100), 0)
    assert seen[0] > 1e-3 and metrics["learner/value_loss"] < 10


def test_a_critic_that_would_be_misunderstood_is_refused(tmp_path: Path) -> None:
    settings = {**STATES, "advantage": {"normalise_returns": True}}
    run(config_of(settings, 3), tmp_path / "first")
    begun = tmp_path / "first" / "checkpoints" / "000003"
    kept = checkpoint.read_state(begun).controls
    policy: dict[str, Any] = {"init": begun}
    further = UpdateControls(config(policy=policy, advantage={"normalise_returns": True}))
    assert further._state.scale == ReturnScale.read(kept).scale
    with pytest.raises(UserError, match="predicts in deviations of returns"):
        UpdateControls(config(policy=policy))
    with pytest.raises(UserError, match="predicts in deviations of returns"):
        run(config_of(STATES, 6), tmp_path / "first", resume=True)


def test_a_policys_rate_rises_after_its_critic_has_warmed_up(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, lr_warmup=1, critic_warmup=2, policy_lr=1e-3, value_lr=2e-3)
    rates = []
    for iteration in range(4):
        learner._controls.set_learning_rates(learner.optimizer, iteration)
        rates.append(tuple(group["lr"] for group in learner.optimizer.param_groups))
    assert rates == [(0.0, 1e-3), (0.0, 2e-3), (5e-4, 2e-3), (1e-3, 2e-3)]


def test_a_critic_learns_large_returns_in_deviations(tmp_path: Path) -> None:
    """Rewards a thousand times as large: in their own unit the head hardly moves towards them."""
    losses = []
    for number, normalise in enumerate((True, False)):
        learner = make_learner(tmp_path / str(number), epochs=8, value_lr=3e-3)
        learner._controls = UpdateControls(learner._config.model_copy(
            update={"advantage": learner._config.advantage.model_copy(update={"normalise_returns": normalise})}
        ))  # fmt: skip
        batch = make_batch()
        metrics = learner.update(replace(batch, reward=batch.reward * 1000), 0)
        losses.append(metrics["learner/value_loss"])
        assert ("learner/return_deviation" in metrics) == normalise
    assert losses[0] < 10 < losses[1]


def test_a_run_that_goes_on_adapts_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    optim: Any = STATES["optim"]
    settings: dict[str, Any] = {
        **STATES,
        "optim": {**optim, "lr_warmup": 2},
        "advantage": {"normalise_returns": True},
    }
    run(config_of(settings, 6), tmp_path / "whole")
    run(config_of(settings, 3), tmp_path / "parts")
    kept = checkpoint.read_state(tmp_path / "parts" / "checkpoints" / "000003").controls
    assert set(kept) == {"return_mean", "return_square", "return_weight"}
    run(config_of(settings, 6), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_returns_without_a_critic_are_not_scaled() -> None:
    with pytest.raises(UserError, match="has no critic"):
        check(parse_config({"workflow": "grpo", "advantage": {"normalise_returns": True}}, "test"))


def test_controls_of_earlier_versions_are_left_out_and_unknown_ones_refused() -> None:
    assert ReturnScale.read({"lr_share": 0.5, "return_mean": 2.0}) == ReturnScale(return_mean=2.0)
    with pytest.raises(UserError, match="has a control 'speed'"):
        ReturnScale.read({"speed": 1.0})
