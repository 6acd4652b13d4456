"""The learner: which rows it learns from, when it refuses to, and what does not change its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import policies
from embodied.algorithms.estimators import gae, gae_of
from embodied.algorithms.samples import Estimate, Samples, samples_of
from embodied.config.schema import AdvantageConfig, Config, LossConfig, OptimConfig
from embodied.errors import UserError
from embodied.learning.learner import Learner
from embodied.learning.update import NonFinite, OffPolicy
from embodied.trajectories.batch import TensorDecisions, Trajectories, without_broken_episodes
from embodied.workflows.run_spec import RunSpec
from policies.contract import Evaluation, Inputs, Policy, PolicySpec, actor_parameters
from policies.small.gaussian_mlp import GaussianMLP
from tests.embodied.support.checked import check

T, B, C, A, S = 6, 5, 3, 2, 4
SPEC = PolicySpec(action_dim=A, chunk=C, state_dim=S)
OPTIM = OptimConfig(epochs=2, minibatch=8, policy_lr=3e-3, value_lr=3e-3)


def make_policy() -> Policy:
    return policies.build("gaussian_mlp", SPEC, seed=1, widths=[16])


def make_learner(
    run_dir: Path,
    loss: LossConfig | None = None,
    advantage: AdvantageConfig | None = None,
    policy: Policy | None = None,
    **optim: Any,
) -> Learner:
    run = Config(
        seed=5,
        iterations=10,
        optim=OPTIM.model_copy(update=optim),
        advantage=advantage or AdvantageConfig(),
        loss=loss or LossConfig(),
    )
    return Learner(policy or make_policy(), RunSpec.of(run), run_dir)


def to_rows(batch: Trajectories, settings: AdvantageConfig | None = None) -> Samples:
    return samples_of(batch, gae_of(batch, settings or AdvantageConfig()))


def make_batch(seed: int = 0) -> Trajectories:
    """What an untrained policy of `make_policy` would have gathered from a world of noise."""
    g = torch.Generator().manual_seed(seed)
    policy = make_policy()
    inputs = Inputs(state=torch.randn(T * B, S, generator=g))
    action = policy.act(inputs, torch.randn(T * B, C * A, generator=g))
    draw = torch.rand(T, B, generator=g)
    terminated, truncated = draw < 0.1, draw > 0.9
    executed = torch.where(terminated | truncated, torch.randint(1, C + 1, (T, B), generator=g), C)
    return Trajectories(
        decisions=TensorDecisions(inputs, action.trace),
        log_prob=action.log_prob.view(T, B, C, A),
        value=action.value.view(T, B),
        reward=torch.randn(T, B, generator=g),
        success=terminated,
        executed=executed,
        mask=torch.ones(T, B, dtype=torch.bool),
        terminated=terminated,
        truncated=truncated,
        final_value=torch.randn(T, B, generator=g) * truncated,
        last_value=torch.randn(B, generator=g),
        version=0,
    )


def parameters(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 0.0) -> None:
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= atol, f"{name} differs by {worst:.1e}"


class Witness(GaussianMLP):
    """Keeps what it was asked to evaluate."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Tensor] = []

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        assert inputs.state is not None
        self.seen.append(inputs.state[:, 0].clone())
        return super().evaluate(inputs, trace)


def make_witness() -> Witness:
    witness = Witness(SPEC, widths=[16])
    witness.load_state_dict(make_policy().state_dict())
    return witness


# --- masked rows


def masked(batch: Trajectories, mask: Tensor, fill: float) -> Trajectories:
    """The batch with what the masked rows hold for the model replaced by `fill`."""
    rows = mask.flatten()[:, None]
    assert batch.inputs.state is not None
    return replace(
        batch,
        mask=mask,
        decisions=TensorDecisions(
            replace(batch.inputs, state=torch.where(rows, batch.inputs.state, fill)),
            {key: torch.where(rows[..., None], tensor, fill) for key, tensor in batch.trace.items()},
        ),
        log_prob=torch.where(mask[..., None, None], batch.log_prob, fill),
    )


def test_masked_rows_never_reach_the_model(tmp_path: Path) -> None:
    batch = make_batch()
    mask = torch.ones(T, B, dtype=torch.bool)
    mask[4:, 1] = mask[2:, 3] = False
    batch.terminated[3, 1] = batch.terminated[1, 3] = True
    results = []
    for fill in (torch.nan, 0.0):
        learner = make_learner(tmp_path)
        metrics = learner.update(masked(batch, mask, fill), 0)
        assert metrics["learner/skipped_steps"] == 0
        assert all(tensor.isfinite().all() for tensor in learner.weights().values())
        assert learner.weights()["normalizer.count"] == mask.sum()
        results.append((parameters(learner), {k: v for k, v in metrics.items() if k != "learner/update_s"}))
    assert_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_an_environment_that_is_masked_out_might_as_well_not_be_there(tmp_path: Path) -> None:
    batch, gone = make_batch(), 2
    mask = torch.ones(T, B, dtype=torch.bool)
    mask[:, gone] = False
    kept = [env for env in range(B) if env != gone]
    rows = torch.arange(T * B).view(T, B)[:, kept].flatten()
    per_env = ("log_prob", "value", "reward", "executed", "mask", "terminated", "truncated", "final_value")
    smaller = replace(
        batch,
        decisions=TensorDecisions(batch.inputs.rows(rows), {key: tensor[rows] for key, tensor in batch.trace.items()}),
        last_value=batch.last_value[kept],
        **{name: getattr(batch, name)[:, kept] for name in per_env},
    )
    with_it, without_it = make_learner(tmp_path), make_learner(tmp_path)
    with_it.update(masked(batch, mask, torch.nan), 0)
    without_it.update(smaller, 0)
    assert_equal(parameters(with_it), parameters(without_it))


def test_rows_keep_the_order_of_decision_and_environment() -> None:
    batch = make_batch()
    batch.mask[1, 2] = False
    rows = to_rows(batch)
    assert len(rows) == T * B - 1
    expected = torch.cat([batch.value.flatten()[: B + 2], batch.value.flatten()[B + 3 :]])
    assert torch.equal(rows.value, expected)


# --- the loss


def units_of(values: Tensor, unit: str) -> list[Tensor]:
    """Those of a row's executed actions [n, A]."""
    return {"chunk": [values.sum()], "action": list(values.sum(1)), "element": list(values.flatten())}[unit]


def literal_loss(policy: Policy, rows: Samples, settings: LossConfig) -> Tensor:
    """The loss of all rows, unit by unit."""
    new = policy.evaluate(rows.inputs, rows.trace)
    losses, entropies, errors = [], [], []
    for row in range(len(rows)):
        alive = int(rows.executed[row])
        ratio = new.log_prob[row, :alive] - rows.log_prob[row, :alive]
        entropy = new.entropy[row, :alive]
        entropies += units_of(entropy, settings.ratio_unit)
        for unit in units_of(ratio, settings.ratio_unit):
            gain, high = rows.advantage[row], 1 + (settings.clip_high or settings.clip)
            loss = -torch.minimum(gain * unit.exp(), gain * unit.exp().clamp(1 - settings.clip, high))
            losses.append(loss)
        moved = new.value[row] - rows.value[row]
        guesses = [new.value[row]]
        if settings.value_clip is not None:
            guesses.append(rows.value[row] + moved.clamp(-settings.value_clip, settings.value_clip))
        errors.append(torch.stack([(guess - rows.returns[row]).square() / 2 for guess in guesses]).max())
    mean = [torch.stack(parts).mean() for parts in (losses, errors, entropies)]
    return mean[0] + settings.value_coef * mean[1] - settings.entropy_coef * mean[2]


@pytest.mark.parametrize("unit", ["chunk", "action", "element"])
@pytest.mark.parametrize(
    ("changes", "advantage"),
    [
        ({}, AdvantageConfig()),
        ({"clip": 0.1, "clip_high": 0.4, "entropy_coef": 0.1, "value_coef": 0.3}, AdvantageConfig()),
        ({"clip": 0.1, "value_clip": None}, AdvantageConfig(gamma=0.8, lam=0.7)),
    ],
    ids=["default", "clip_high", "value_clip"],
)
def test_the_gradient_is_that_of_the_formula_written_out(
    unit: str, changes: dict[str, Any], advantage: AdvantageConfig, tmp_path: Path
) -> None:
    settings = LossConfig.model_validate({"ratio_unit": unit, **changes})
    batch = make_batch()
    noise = torch.randn(batch.log_prob.shape, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, log_prob=batch.log_prob + 0.2 * noise)
    learner = make_learner(tmp_path, settings, advantage, epochs=1, minibatch=T * B, micro_batch=7, max_grad_norm=1e9)
    learner.policy.ratio_tolerance = 10.0  # these ratios are far from one on purpose
    expected = make_policy()
    literal_loss(expected, to_rows(batch, advantage), settings).backward()
    learner.update(batch, 0)
    for (name, found), other in zip(learner.policy.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


# --- batching


@pytest.mark.parametrize("unit", ["chunk", "action", "element"])
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_batches_do_not_change_the_result(micro_batch: int, unit: str, tmp_path: Path) -> None:
    loss = LossConfig.model_validate({"ratio_unit": unit, "entropy_coef": 0.01, "clip_high": 0.3})
    whole, split = make_learner(tmp_path, loss), make_learner(tmp_path, loss, micro_batch=micro_batch)
    expected, found = whole.update(make_batch(), 0), split.update(make_batch(), 0)
    assert_equal(parameters(split), parameters(whole), atol=1e-6)
    for name in expected.keys() - {"learner/update_s"}:
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name


def test_every_epoch_and_iteration_visits_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    batch = make_batch()
    assert batch.inputs.state is not None
    batch.inputs.state[:, 0] = torch.arange(T * B) / (T * B)
    orders = []
    for iteration in range(2):
        witness = make_witness()
        action = witness.act(batch.inputs, torch.zeros(T * B, C * A))
        again = replace(
            batch,
            decisions=TensorDecisions(batch.inputs, action.trace),
            log_prob=action.log_prob.view(T, B, C, A),
            version=iteration,
        )
        make_learner(tmp_path, policy=witness, epochs=3).update(again, iteration)
        visited = torch.cat(witness.seen).mul(T * B).round().int().view(3, T * B)
        assert [len(part) for part in witness.seen] == [8, 8, 8, 6] * 3
        orders += visited.tolist()
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(T * B)) for order in orders)


# --- on-policy is proved


def test_tampered_log_probs_are_refused_with_an_explanation(tmp_path: Path) -> None:
    learner, batch = make_learner(tmp_path), make_batch()
    before = parameters(learner)
    tampered = replace(batch, log_prob=batch.log_prob + 1e-3)
    with pytest.raises(OffPolicy, match=r"ratio - 1.* above the policy's tolerance of 1e-04.*temperature.*precision"):
        learner.update(tampered, 0)
    assert_equal(parameters(learner), before)


def test_the_first_ratio_error_is_recorded_and_small(tmp_path: Path) -> None:
    metrics = make_learner(tmp_path).update(make_batch(), 0)
    assert 0 <= metrics["learner/first_ratio_error"] < 1e-6


def test_log_probs_of_actions_that_were_not_executed_are_not_compared(tmp_path: Path) -> None:
    batch = make_batch()
    dead = torch.arange(C) >= batch.executed[..., None]
    assert dead.any()
    tampered = replace(batch, log_prob=torch.where(dead[..., None], batch.log_prob + 5, batch.log_prob))
    honest, other = make_learner(tmp_path), make_learner(tmp_path)
    honest.update(batch, 0)
    other.update(tampered, 0)
    assert_equal(parameters(other), parameters(honest))


# --- non-finite losses


def test_a_step_that_is_not_finite_leaves_the_parameters_and_keeps_its_minibatch(tmp_path: Path) -> None:
    learner, batch = make_learner(tmp_path, epochs=1, minibatch=T * B), replace(make_batch(), version=3)
    before = parameters(learner)
    batch.value[2, 1] = torch.nan
    metrics = learner.update(batch, 3)
    assert metrics["learner/skipped_steps"] == 1
    trained = {name: tensor for name, tensor in before.items() if not name.startswith("normalizer.")}
    assert_equal(parameters(learner), trained)
    assert not learner.optimizer.state, "the optimiser has stepped"
    (path,) = (tmp_path / "non_finite").iterdir()
    saved = load_file(path)
    order = torch.from_numpy(np.argsort(saved["value"].numpy()))
    expected = to_rows(batch)
    by_value = torch.from_numpy(np.argsort(expected.value.numpy()))
    assert path.name.startswith("000003-")
    assert expected.inputs.state is not None
    assert torch.equal(saved["inputs.state"][order], expected.inputs.state[by_value])
    assert torch.equal(saved["trace.action"][order], expected.trace["action"][by_value])
    assert saved["advantage"].isnan().any()


def one_bad_row(batch: Trajectories, config: Config) -> Estimate:
    """The usual advantages, but for an infinite one."""
    found = gae(batch, config)
    found.advantage[0, 1] = torch.inf
    return found


def test_a_single_bad_minibatch_is_skipped_and_the_others_are_learned_from(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, epochs=1)
    learner._estimate = one_bad_row
    before = parameters(learner)
    metrics = learner.update(make_batch(), 0)
    assert (metrics["learner/skipped_steps"], metrics["learner/steps"]) == (1, 4)
    after = parameters(learner)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not torch.equal(after["actor.0.weight"], before["actor.0.weight"])
    (path,) = (tmp_path / "non_finite").iterdir()
    assert len(load_file(path)["value"]) <= 8


def test_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    learner, batch = make_learner(tmp_path, epochs=5, minibatch=T * B), make_batch()
    before = parameters(learner)
    batch.value[0, 0] = torch.nan
    with pytest.raises(NonFinite, match="3 optimiser steps in a row"):
        learner.update(batch, 0)
    assert_equal(parameters(learner), before)
    assert len(list((tmp_path / "non_finite").iterdir())) == 3


def test_bad_steps_that_are_not_in_a_row_do_not_end_the_run(tmp_path: Path) -> None:
    # Two minibatches an epoch, one of them bad: at most two bad ones meet.
    learner = make_learner(tmp_path, epochs=8, minibatch=T * B // 2)
    learner._estimate = one_bad_row
    assert learner.update(make_batch(), 0)["learner/skipped_steps"] == 8
    assert len(list((tmp_path / "non_finite").iterdir())) == 8, "one minibatch was written over another"


# --- what ends or scales an update


def test_target_kl_ends_the_update_before_the_step_that_would_go_on(tmp_path: Path) -> None:
    free = make_learner(tmp_path, policy_lr=0.05, epochs=6).update(make_batch(), 0)
    assert (free["learner/steps"], free["learner/stopped_by_kl"]) == (24, 0)
    bounded = make_learner(tmp_path, target_kl=0.02, policy_lr=0.05, epochs=6)
    metrics = bounded.update(make_batch(), 0)
    assert metrics["learner/stopped_by_kl"] == 1
    assert 1 <= metrics["learner/steps"] < 24
    steps = {float(state["step"]) for state in bounded.optimizer.state.values()}
    assert steps == {metrics["learner/steps"]}, "the step that met the bound was taken"


def test_rates_rise_over_the_first_iterations(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, lr_warmup=3, policy_lr=1e-3, value_lr=2e-3)
    shares = []
    for iteration in range(5):
        rate = learner.update(make_batch(1), iteration)["learner/policy_lr"]
        shares.append(rate / 1e-3)
        assert learner.optimizer.param_groups[1]["lr"] == pytest.approx(2 * rate)
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_rates_fall_linearly_over_the_run(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, lr_schedule="linear", policy_lr=1e-3, value_lr=2e-3)
    for iteration in (0, 5, 9):
        metrics = learner.update(make_batch(), iteration) if iteration == 0 else {}
        learner._controls.set_learning_rates(learner.optimizer, iteration)
        rates = {group["name"]: group["lr"] for group in learner.optimizer.param_groups}
        share = 1 - iteration / 10
        assert rates == pytest.approx({"policy": 1e-3 * share, "value_head": 2e-3 * share})
        assert not metrics or metrics["learner/policy_lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("frozen", ["value_head", "actor"])
def test_policy_and_value_head_have_rates_of_their_own(frozen: str, tmp_path: Path) -> None:
    learner = make_learner(tmp_path, value_lr=3e-3 * (frozen == "actor"), policy_lr=3e-3 * (frozen == "value_head"))
    before = parameters(learner)
    learner.update(make_batch(), 0)
    after = parameters(learner)
    for name in before:
        if not name.startswith("normalizer."):
            is_frozen = name.startswith("value_head.") == (frozen == "value_head")
            assert torch.equal(after[name], before[name]) == is_frozen, name


def test_a_critic_that_warms_up_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, critic_warmup=2, epochs=3)
    begun = parameters(learner)
    for iteration in range(3):
        before = parameters(learner)
        metrics = learner.update(make_batch(iteration), iteration)
        assert metrics["learner/explained_variance"] == metrics["learner/explained_variance"]
        for name, tensor in parameters(learner).items():
            if name.startswith("value_head."):
                assert not torch.equal(tensor, before[name]), name
            elif not name.startswith("normalizer."):
                assert torch.equal(tensor, begun[name]) == (iteration < 2), name
    steps = {
        group["name"]: {float(learner.optimizer.state[p]["step"]) for p in group["params"]}
        for group in learner.optimizer.param_groups
    }
    assert steps["value_head"] == {3 * next(iter(steps["policy"]))}, "the policy's moments are of its own steps"


def test_a_critic_that_warms_up_makes_no_backward_pass_through_the_policy(tmp_path: Path) -> None:
    counts = []
    for warmup in (1, 0):
        learner = make_learner(tmp_path / str(warmup), critic_warmup=warmup)
        with FlopCounterMode(display=False) as counter:
            learner.update(make_batch(), 0)
        counts.append(counter.get_total_flops())
    actor = {id(parameter) for parameter in actor_parameters(learner.policy)}
    weights = sum(p.numel() for p in learner.policy.parameters() if p.ndim == 2 and id(p) in actor)
    rows = learner._config.optim.epochs * len(to_rows(make_batch()))
    assert counts[0] <= counts[1] - 2 * rows * weights, "a gradient of the policy's weights was computed"
    assert all(parameter.requires_grad for parameter in learner.policy.parameters())


def test_a_warm_up_without_a_critic_is_refused() -> None:
    with pytest.raises(UserError, match="the workflow grpo has no critic"):
        check(Config(workflow="grpo", optim=OPTIM.model_copy(update={"critic_warmup": 1})))


def test_gradients_are_scaled_down_to_the_norm(tmp_path: Path) -> None:
    """Adam hides a gradient's size, but for eps: with a norm that small, it all but stops."""
    moved = {}
    for bound in (1e-9, 1e9):
        learner = make_learner(tmp_path, epochs=1, max_grad_norm=bound)
        before = parameters(learner)
        assert learner.update(make_batch(), 0)["learner/grad_norm"] > 0.01
        after = parameters(learner)
        moved[bound] = max(float((after[n] - before[n]).abs().max()) for n in after if "normalizer" not in n)
    assert moved[1e-9] < 1e-2 * moved[1e9]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_episode_with_a_reward_that_is_not_finite_is_left_out_and_counted(bad: float, tmp_path: Path) -> None:
    """The others are learned from as if it had not been."""
    batch = make_batch()
    ends = (batch.terminated | batch.truncated).nonzero().tolist()
    t, env = next((t, env) for t, env in ends if t > 0 and not (batch.terminated | batch.truncated)[t - 1, env])
    first = t
    while first > 0 and not (batch.terminated | batch.truncated)[first - 1, env]:
        first -= 1
    reward, mask = batch.reward.clone(), batch.mask.clone()
    reward[t - 1, env] = bad
    mask[first : t + 1, env] = False
    found, expected = make_learner(tmp_path / "a"), make_learner(tmp_path / "b")
    metrics = found.update(replace(batch, reward=reward), 0)
    without = expected.update(replace(batch, mask=mask, reward=batch.reward.masked_fill(~mask, 0.0)), 0)
    assert metrics["learner/broken_episodes"] == 1 and "learner/broken_episodes" not in without
    assert_equal(parameters(found), parameters(expected))
    assert "learner/broken_episodes" not in found.update(make_batch(1), 1)


def test_a_broken_episode_takes_its_group_out(tmp_path: Path) -> None:
    """A group of which one member is not known is not complete."""
    batch = make_batch()
    group = torch.arange(B) // 2
    reward = batch.reward.clone()
    reward[0, 0] = float("nan")
    found, count = without_broken_episodes(replace(batch, reward=reward, episode_group=group))
    assert count == 1 and found.episode_group is not None
    assert found.episode_group[0] < 0 and found.episode_group[1:].tolist() == group[1:].tolist()
    same, none = without_broken_episodes(batch)
    assert same is batch and none == 0


def test_statistics_are_learned_after_the_update_and_not_before(tmp_path: Path) -> None:
    learner, batch = make_learner(tmp_path), make_batch()
    metrics = learner.update(batch, 0)
    assert batch.inputs.state is not None
    assert metrics["learner/first_ratio_error"] < 1e-6, "the rows were evaluated with other statistics than acted with"
    torch.testing.assert_close(learner.weights()["normalizer.mean"], batch.inputs.state.double().mean(0))
