"""What adapts itself from update to update: by its formulas, over a checkpoint, and in real updates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algorithms.controls import (
    ENTROPY_RATE,
    LEAST_DEVIATION,
    Controls,
    UpdateControls,
    adapted_share,
    adapted_weight,
)
from embodied.config.files import parse_config
from embodied.config.schema import AdvantageConfig, Config, LossConfig
from embodied.errors import UserError
from embodied.run import checkpoint
from embodied.workflows.checks import check_algorithm
from tests.embodied.learning.test_learner import make_batch, make_learner, to_rows
from tests.embodied.run.test_resume import STATES, assert_same_run, config_of, run

MEASURED = {"learner/entropy": 1.0, "learner/approx_kl": 0.01}


def config(**sections: dict[str, Any]) -> Config:
    return parse_config(sections, "test")


# --- formulas


@pytest.mark.parametrize(("divergence", "weight"), [(0.31, 0.2), (0.3, 0.1), (0.14, 0.1), (0.13, 0.05), (0.0, 0.05)])
def test_the_weight_of_a_divergence_doubles_and_halves(divergence: float, weight: float) -> None:
    assert adapted_weight(0.1, divergence, 0.2) == weight


def test_a_rate_falls_and_rises_within_its_range() -> None:
    assert adapted_share(1.0, 0.021, 0.01) == pytest.approx(1 / 1.5)
    assert adapted_share(1.0, 0.004, 0.01) == 1.5
    assert adapted_share(1.0, 0.02, 0.01) == adapted_share(1.0, 0.005, 0.01) == 1.0
    assert adapted_share(1.0, 0.0, 0.01) == 1.0, "a critic's warm-up changes no policy and says nothing of its rate"
    fallen = risen = 1.0
    for _ in range(50):
        fallen, risen = adapted_share(fallen, 1.0, 0.01), adapted_share(risen, 1e-6, 0.01)
    assert (fallen, risen) == (0.01, 10.0)


def test_the_weight_of_the_entropy_follows_its_target() -> None:
    adapting = config(loss={"entropy_coef": 0.01, "entropy_target": 1.2})
    start = Controls.of(adapting)
    assert start.after(adapting, MEASURED).entropy_coef == pytest.approx(0.01 * math.exp(ENTROPY_RATE * 0.2))
    far = start.after(adapting, {**MEASURED, "learner/entropy": 9.0})
    assert far.entropy_coef == pytest.approx(0.01 * math.exp(-ENTROPY_RATE)), "one iteration changes it by so much"
    assert start.after(adapting, {**MEASURED, "learner/entropy": float("nan")}) == start


def test_returns_of_the_first_iteration_are_their_own_scale_and_later_ones_join() -> None:
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)).double() * 3 + i for i in range(3)]
    found = Controls.of(config())
    assert found.scale == (0.0, 1.0)
    for value in values:
        found = found.seen(float(value.mean()), float(value.square().mean()))
        if value is values[0]:
            assert found.scale == pytest.approx((float(value.mean()), float(value.std(unbiased=False))))
    weights = torch.tensor([0.81, 0.9, 1.0]) / 2.71
    mean = sum(float(w * v.mean()) for w, v in zip(weights, values, strict=True))
    square = sum(float(w * v.square().mean()) for w, v in zip(weights, values, strict=True))
    assert found.scale == pytest.approx((mean, math.sqrt(square - mean**2)))
    assert Controls.of(config()).seen(2.0, 4.0).scale == (2.0, LEAST_DEVIATION)


def test_nothing_adapts_unless_it_is_requested() -> None:
    plain = config(loss={"entropy_coef": 0.1})
    start = Controls.of(plain)
    assert start.after(plain, {**MEASURED, "learner/reference_kl": 5.0, "learner/approx_kl": 5.0}) == start
    assert start.numbers(plain) == {}


def test_what_is_no_longer_adapted_is_as_the_configuration_says() -> None:
    adapting = config(
        loss={"reference_kl": 0.1, "reference_kl_target": 0.01, "entropy_coef": 0.2, "entropy_target": 9.0},
        optim={"lr_kl": 1.0},
    )
    grown = Controls.of(adapting).after(adapting, {**MEASURED, "learner/reference_kl": 1.0})
    numbers = grown.numbers(adapting)
    assert set(numbers) == {"reference_kl", "entropy_coef", "lr_share"} and numbers["reference_kl"] == 0.2
    assert Controls.read(numbers, adapting) == grown
    plain = config(loss={"reference_kl": 0.3, "entropy_coef": 0.4})
    assert Controls.read(numbers, plain) == Controls.of(plain)


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


def test_nothing_adapts_while_the_critic_warms_up(tmp_path: Path) -> None:
    adapting = config(
        loss={"entropy_coef": 0.1, "entropy_target": 9.0, "reference_kl": 0.1, "reference_kl_target": 1.0},
        optim={"lr_kl": 0.01, "critic_warmup": 3},
    )
    controls, metrics = UpdateControls(adapting), {**MEASURED, "learner/steps": 4.0, "learner/reference_kl": 1e-9}
    for iteration in range(3):
        controls.note({**metrics, "learner/approx_kl": 3e-9}, iteration)
    assert controls.numbers() == {}
    controls.note({**metrics, "learner/approx_kl": 1.0, "learner/steps": 0.0}, 3)
    assert controls.numbers() == {}, "no step was taken"
    controls.note({**metrics, "learner/approx_kl": 1.0}, 3)
    assert set(controls.numbers()) == {"entropy_coef", "reference_kl", "lr_share"}


def test_weights_stay_within_their_range() -> None:
    adapting = config(
        loss={"entropy_coef": 0.1, "entropy_target": 9.0, "reference_kl": 0.1, "reference_kl_target": 1.0}
    )
    found = Controls.of(adapting)
    for _ in range(100):
        found = found.after(adapting, {**MEASURED, "learner/reference_kl": 0.0})
    assert found.entropy_coef == pytest.approx(100) and found.reference_kl == pytest.approx(1e-4)


def test_a_critic_that_would_be_misunderstood_is_refused(tmp_path: Path) -> None:
    settings = {**STATES, "advantage": {"normalise_returns": True}}
    run(config_of(settings, 3), tmp_path / "first")
    begun = tmp_path / "first" / "checkpoints" / "000003"
    kept = checkpoint.read_state(begun).controls
    policy: dict[str, Any] = {"init": begun}
    further = UpdateControls(config(policy=policy, advantage={"normalise_returns": True}))
    assert further._state.scale == Controls.read(kept, config()).scale
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


def test_a_rate_that_is_too_great_falls(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, policy_lr=0.05, lr_kl=0.001, epochs=4)
    rate = learner.update(make_batch(), 0)["learner/policy_lr"]
    learner._controls.set_learning_rates(learner.optimizer, 1)
    assert rate == 0.05 and learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 1.5)
    assert learner.optimizer.param_groups[1]["lr"] == learner._config.optim.value_lr


def test_a_run_that_goes_on_adapts_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    optim: Any = STATES["optim"]
    settings: dict[str, Any] = {
        **STATES,
        "optim": {**optim, "lr_kl": 1e-4, "lr_warmup": 2},
        "loss": {"entropy_coef": 1e-3, "entropy_target": 1.0},
        "advantage": {"normalise_returns": True},
    }
    run(config_of(settings, 6), tmp_path / "whole")
    run(config_of(settings, 3), tmp_path / "parts")
    kept = checkpoint.read_state(tmp_path / "parts" / "checkpoints" / "000003").controls
    assert set(kept) == {"entropy_coef", "lr_share", "return_mean", "return_square", "return_weight"}
    run(config_of(settings, 6), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"loss": {"entropy_target": 1.0}}, "loss.entropy_coef, which it adapts, begins as 0"),
        ({"workflow": "ppo_reference", "loss": {"reference_kl_target": 0.1}}, "loss.reference_kl, which it adapts"),
        ({"workflow": "grpo", "advantage": {"normalise_returns": True}}, "has no critic"),
        ({"optim": {"lr_kl": 0.01, "epochs": 1, "minibatch": 0}}, "an update is one step"),
    ],
)
def test_what_cannot_adapt_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_algorithm(parse_config(sections, "test"))
