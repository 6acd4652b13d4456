"""Credit for single actions of a chunk: advantages, losses and critics that know which action did what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from embodied.algorithms.advantages import action_advantages, generalised_advantages
from embodied.algorithms.estimators import gae
from embodied.algorithms.samples import samples_of
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.learning.learner import Learner
from embodied.rollout.policy_worker import PolicyWorker
from embodied.rollout.rollout_loop import RolloutSettings
from embodied.trajectories.batch import TensorDecisions, Trajectories, alive_actions, join_columns
from embodied.trajectories.memory import TrajectoryMemory
from embodied.workflows.run_spec import RunSpec
from policies.contract import Action, Evaluation, Inputs, PolicySpec
from policies.layers import mlp
from policies.small.gaussian_mlp import GaussianMLP
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.embodied.support.checked import check
from tests.embodied.support.copied_out import copied_out

T, B, C, A, S = 7, 5, 3, 2, 4
Bootstrap = Literal["truncated", "always"]


class ActionValues(GaussianMLP):
    """A value for each action of a chunk."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec, widths=[16])
        self.value_head = mlp(spec.state_dim, [16], spec.chunk, last_gain=1.0)

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        return replace(super().act(inputs, noise), value=self._values(inputs))

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        return replace(super().evaluate(inputs, trace), value=self._values(inputs))

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self._values(inputs)

    def _values(self, inputs: Inputs) -> Tensor:
        return self.value_head(self._state(inputs))


def make_policy(state_dim: int = S, action_dim: int = A) -> ActionValues:
    torch.manual_seed(0)
    return ActionValues(PolicySpec(action_dim=action_dim, chunk=C, state_dim=state_dim))


def config_of(unit: str = "action", epochs: int = 1, **loss: Any) -> Config:
    optim = {"epochs": epochs, "minibatch": 0, "micro_batch": 4, "max_grad_norm": 1e9}
    return parse_config(
        {"advantage": {"credit": "action"}, "loss": {"ratio_unit": unit, **loss}, "optim": optim}, "test"
    )


def make_batch(seed: int = 0) -> Trajectories:
    """What an untrained policy would have gathered from a world of noise."""
    g = torch.Generator().manual_seed(seed)
    policy, inputs = make_policy(), Inputs(state=torch.randn(T * B, S, generator=g))
    action = policy.act(inputs, torch.randn(T * B, C * A, generator=g))
    draw = torch.rand(T, B, generator=g)
    terminated, truncated = draw < 0.15, draw > 0.8
    executed = torch.where(terminated | truncated, torch.randint(1, C + 1, (T, B), generator=g), C)
    first = (torch.rand(T, B, generator=g) * (C + 1 - executed)).long()
    step_reward = torch.randn(T, B, C, generator=g) * alive_actions(executed, C, first)
    return Trajectories(
        decisions=TensorDecisions(inputs, action.trace),
        log_prob=action.log_prob.view(T, B, C, A),
        value=action.value.view(T, B, C),
        reward=step_reward.sum(2),
        success=terminated,
        executed=executed,
        mask=torch.ones(T, B, dtype=torch.bool),
        terminated=terminated,
        truncated=truncated,
        final_value=torch.randn(T, B, generator=g) * truncated,
        last_value=torch.randn(B, generator=g),
        version=0,
        step_reward=step_reward,
        first=first,
    )


def advantages_of(batch: Trajectories, bootstrap: Bootstrap = "truncated") -> tuple[Tensor, Tensor]:
    assert batch.step_reward is not None
    ends = (batch.terminated, batch.truncated, batch.final_value, batch.last_value)
    return action_advantages(batch.step_reward, batch.value, batch.alive, *ends, 0.97, 0.9, bootstrap)


# --- advantages


@pytest.mark.parametrize("bootstrap", ["truncated", "always"])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_those_of_the_env_steps_that_were_executed(seed: int, bootstrap: Bootstrap) -> None:
    """Environment by environment, as if each env step had been a decision."""
    batch = make_batch(seed)
    assert batch.step_reward is not None
    found, returns = advantages_of(batch, bootstrap)
    assert (batch.executed < C).any()
    for env in range(B):
        alive = batch.alive[:, env]
        places = [(t, c) for t in range(T) for c in alive[t].nonzero()[:, 0].tolist()]
        last = [c == int(alive[t].nonzero()[-1]) for t, c in places]

        def column(values: Tensor, places: list[tuple[int, int]] = places, env: int = env) -> Tensor:
            return torch.stack([values[t, env, c] if values.ndim == 3 else values[t, env] for t, c in places])[:, None]

        ends = torch.tensor(last)[:, None]
        expected, expected_returns = generalised_advantages(
            column(batch.step_reward), column(batch.value), column(batch.terminated) & ends,
            column(batch.truncated) & ends, column(batch.final_value), batch.last_value[env : env + 1],
            0.97, 0.9, bootstrap,
        )  # fmt: skip
        torch.testing.assert_close(column(found), expected)
        torch.testing.assert_close(column(returns), expected_returns)
    assert not found[~batch.alive].any(), "an action that was not executed has an advantage"


def test_chunks_of_one_action_have_the_advantages_of_decisions() -> None:
    batch = make_batch()
    assert batch.step_reward is not None
    reward, value = batch.step_reward[:, :, :1], batch.value[:, :, :1]
    ends = (batch.terminated, batch.truncated, batch.final_value, batch.last_value, 0.97, 0.9)
    found, _ = action_advantages(reward, value, torch.ones_like(value, dtype=torch.bool), *ends)
    expected, _ = generalised_advantages(reward[:, :, 0], value[:, :, 0], *ends)
    assert torch.equal(found[:, :, 0], expected)


def test_what_was_not_executed_does_not_matter() -> None:
    batch = make_batch()
    assert batch.step_reward is not None
    dead = ~batch.alive
    other = replace(
        batch,
        step_reward=batch.step_reward.masked_fill(dead, torch.nan),
        value=batch.value.masked_fill(dead, torch.nan),
        final_value=torch.where(batch.truncated, batch.final_value, torch.nan),
    )
    assert torch.equal(advantages_of(other)[0], advantages_of(batch)[0])


def test_normalised_over_the_actions_that_were_executed() -> None:
    batch = make_batch()
    advantage = gae(batch, config_of()).advantage[batch.alive]
    assert float(advantage.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantage.std()) == pytest.approx(1, abs=1e-6)


# --- the update


@pytest.mark.parametrize("unit", ["action", "element"])
def test_the_gradient_is_that_of_the_formula_written_out(unit: str, tmp_path: Path) -> None:
    config, batch = config_of(unit, clip=0.1, value_clip=0.05), make_batch()
    noise = torch.randn(batch.log_prob.shape, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, log_prob=batch.log_prob + 0.2 * noise, value=batch.value + 0.1)
    learner, expected = Learner(make_policy(), RunSpec.of(config), tmp_path), make_policy()
    learner.policy.ratio_tolerance = 10.0  # these ratios are far from one on purpose
    rows = samples_of(batch, gae(batch, config))
    new = expected.evaluate(rows.inputs, rows.trace)
    gains, errors = [], []
    for row in range(len(rows)):
        for c in rows.alive[row].nonzero()[:, 0].tolist():
            gap = new.log_prob[row, c] - rows.log_prob[row, c]
            for ratio in [gap.sum().exp()] if unit == "action" else gap.exp():
                gain = rows.advantage[row, c]
                gains.append(torch.maximum(-gain * ratio, -gain * ratio.clamp(0.9, 1.1)))
            moved = (new.value[row, c] - rows.value[row, c]).clamp(-0.05, 0.05)
            guesses = torch.stack([new.value[row, c], rows.value[row, c] + moved])
            errors.append((guesses - rows.returns[row, c]).square().max() / 2)
    (torch.stack(gains).mean() + config.loss.value_coef * torch.stack(errors).mean()).backward()
    metrics = learner.update(batch, 0)
    for (name, found), other in zip(learner.policy.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert metrics["learner/value_loss"] == pytest.approx(float(torch.stack(errors).mean().detach()), rel=1e-4)


def test_the_critic_learns_the_returns_of_actions(tmp_path: Path) -> None:
    learner, batch = Learner(make_policy(), RunSpec.of(config_of(epochs=30, value_clip=None)), tmp_path), make_batch()
    first = learner.update(batch, 0)["learner/explained_variance"]
    value = learner.policy.value(batch.inputs).view(T, B, C)
    alive, (_, returns) = batch.alive, advantages_of(batch)
    assert first < 0.5
    before = (returns - batch.value)[alive].var()
    assert (returns - value)[alive].var() < before


# --- the rollout


def rolled_out(policy: GaussianMLP, decisions: int) -> Trajectories:
    task = TaskSpec("tabletop/reach", max_episode_steps=7)
    farm = Farm.create(FarmSpec(task, EndlessEpisodes(3), 4, C, 2, 1, final_frames="never"), InProcess())
    try:
        worker = PolicyWorker(policy, farm, RolloutSettings(("state",), (3,), "truncated", decisions))
        memory = TrajectoryMemory.create(worker.layout(), farm.frames, shared=False)
        worker.use(memory)
        worker.begin()
        worker.rollout(decisions)
        return copied_out(worker.trajectories())
    finally:
        farm.close()


def test_a_rollout_keeps_values_and_rewards_of_actions(tmp_path: Path) -> None:
    policy = make_policy(state_dim=16, action_dim=3)
    batch = rolled_out(policy, 8)
    assert batch.step_reward is not None and batch.inputs.state is not None
    assert batch.value.shape == batch.step_reward.shape == (8, 4, C)
    torch.testing.assert_close(batch.value, policy.value(batch.inputs).view(8, 4, C))
    torch.testing.assert_close(batch.step_reward.sum(2), batch.reward)
    assert not batch.step_reward[~batch.alive].any() and batch.step_reward.any()
    assert batch.final_value.shape == (8, 4) and batch.last_value.shape == (4,)
    assert batch.truncated.any() and (batch.final_value[batch.truncated] != 0).all()
    metrics = Learner(policy, RunSpec.of(config_of()), tmp_path).update(batch, 0)
    assert metrics["learner/first_ratio_error"] < 1e-5 and metrics["learner/skipped_steps"] == 0


def test_joined_parts_keep_the_rewards_of_actions() -> None:
    policy = make_policy(state_dim=16, action_dim=3)
    whole = rolled_out(policy, 5)
    short = replace(rolled_out(policy, 3), episode_group=torch.zeros(4, dtype=torch.int64))
    joined = join_columns([replace(whole, episode_group=torch.ones(4, dtype=torch.int64)), short])
    assert joined.step_reward is not None and whole.step_reward is not None and short.step_reward is not None
    assert torch.equal(joined.step_reward[:, :4], whole.step_reward)
    assert torch.equal(joined.step_reward[:3, 4:], short.step_reward)
    assert not joined.step_reward[3:, 4:].any()


# --- what does not fit


def test_credit_for_actions_needs_units_that_are_no_more() -> None:
    with pytest.raises(UserError, match="set it to action or element"):
        check(parse_config({"advantage": {"credit": "action"}}, "test"))


def test_a_policy_without_values_of_actions_is_refused() -> None:
    batch = make_batch()
    with pytest.raises(UserError, match="one value for a whole chunk: set it to chunk"):
        gae(replace(batch, value=batch.value[:, :, 0]), config_of())
    with pytest.raises(UserError, match="a value for each action: set advantage.credit to action"):
        gae(batch, Config())
