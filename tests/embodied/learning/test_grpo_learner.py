"""What is learned from episode groups: their advantages, what never reaches the model, part by part or all at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algorithms.advantages import differing, group_advantages
from embodied.algorithms.estimators import group_relative, outcomes
from embodied.execution.roles import LearnerRole
from embodied.learning.learner import Learner, ReceivedPart
from embodied.trajectories.batch import TensorDecisions, Trajectories, join_columns
from embodied.workflows.run_spec import RunSpec
from tests.embodied.support import episode_parts
from tests.embodied.support.episode_parts import (
    CHUNK,
    ENVS,
    NOTING,
    SEEN,
    SIZE,
    assert_equal,
    begun,
    config_of,
    episodes_in_parts,
    gradients,
    iterations_of,
    learner_of,
    policy_of,
)

skilled = episode_parts.skilled
parts = episode_parts.parts


def literal_advantages(batch: Trajectories) -> list[float]:
    """(R - mean) / (unbiased deviation + 1e-6) of every column."""
    assert batch.episode_group is not None
    returns = [sum(batch.reward[batch.mask[:, b], b].tolist()) for b in range(ENVS)]
    found = []
    for b in range(ENVS):
        peers = [returns[i] for i in range(ENVS) if batch.episode_group[i] == batch.episode_group[b]]
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        found.append((returns[b] - mean) / (deviation + 1e-6))
    return found


def test_every_decision_has_its_episodes_advantage_within_the_group(parts: list[Trajectories]) -> None:
    for batch in parts:
        estimate = group_relative(batch, config_of())
        expected = literal_advantages(batch)
        for b in range(ENVS):
            assert estimate.advantage[:, b].tolist() == pytest.approx([expected[b]] * len(batch.mask), abs=1e-4)
        assert estimate.keep.all() and max(expected) > 1


def poisoned(batch: Trajectories, columns: Tensor) -> Trajectories:
    """The batch with NaN in all that the model would be shown of the columns."""
    assert batch.inputs.state is not None
    rows = columns.expand_as(batch.mask).flatten()[:, None]
    return replace(
        batch,
        decisions=TensorDecisions(
            replace(batch.inputs, state=torch.where(rows, torch.nan, batch.inputs.state)),
            {key: torch.where(rows[..., None], torch.nan, tensor) for key, tensor in batch.trace.items()},
        ),
        log_prob=torch.where(columns[None, :, None, None], torch.nan, batch.log_prob),
    )


@pytest.mark.parametrize("minibatch", [0, 8])
def test_groups_with_equal_outcomes_never_reach_the_model(minibatch: int, skilled: Path, tmp_path: Path) -> None:
    config = config_of(advantage={"outcome": "success"}, optim={"minibatch": minibatch})
    dropped = 0
    learner, other = learner_of(config, tmp_path, skilled), learner_of(config, tmp_path, skilled)
    parts = episodes_in_parts(config, tmp_path, skilled)
    for batch in parts:
        assert batch.episode_group is not None
        teaches = differing(outcomes(batch, config.advantage), batch.episode_group, SIZE)
        dropped += int((~teaches).sum())
        part = learner.receive(poisoned(batch, ~teaches), 0)
        assert part == replace(other.receive(batch, 0), learn_s=part.learn_s)
        assert part.samples == int(batch.mask[:, teaches].sum())
        assert part.groups == int(teaches.sum()) // SIZE
    assert 0 < dropped < ENVS * len(parts), "this seed does not test it"
    metrics = learner.finish(0)
    other.finish(0)
    assert metrics["learner/skipped_steps"] == 0 < metrics["learner/steps"]
    assert_equal(learner.weights(), other.weights())


@pytest.mark.parametrize("minibatch", [0, 8])
def test_an_iteration_that_teaches_nothing_changes_nothing(minibatch: int, tmp_path: Path) -> None:
    config = config_of(env={"reward": "sparse", "max_episode_steps": 3}, optim={"minibatch": minibatch}, iterations=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done, weights = iterations_of(config, tmp_path)
    for one in done:
        assert one.learned["learner/steps"] == 0 and math.isnan(one.learned["learner/grad_norm"])
        assert math.isnan(one.learned["learner/first_ratio_error"])
    assert_equal(weights, dict(policy_of(config).state_dict()))


def test_the_critic_is_left_alone(tmp_path: Path) -> None:
    done, weights = iterations_of(config_of(), tmp_path)
    before = policy_of(config_of()).state_dict()
    assert all(one.learned["learner/steps"] == 1 for one in done)
    for name, tensor in before.items():
        assert torch.equal(weights[name], tensor) == name.startswith("value_head."), name


# --- part by part


def collected(learner: Learner, parts: Sequence[Trajectories]) -> list[ReceivedPart]:
    return [learner.receive(part, 0) for part in parts]


def test_streaming_equals_the_same_data_afterwards(tmp_path: Path) -> None:
    """Each part learned from while the next is rolled out, or all of them when nothing is left to roll out."""
    config = config_of()
    assert RunSpec.of(config).streams
    with begun(config, tmp_path / "a") as workers:
        during = workers.iterate(0)
        found = {name: tensor.clone() for name, tensor in workers.learner.call(LearnerRole.weights).items()}
    learner = learner_of(config, tmp_path)
    collected(learner, episodes_in_parts(config, tmp_path / "b"))
    afterwards = learner.finish(0)
    assert_equal(found, learner.weights())
    for name in afterwards.keys() - {"learner/update_s"}:
        assert during.learned[name] == pytest.approx(afterwards[name], abs=0, rel=0, nan_ok=True), name


@pytest.mark.parametrize("unit", ["chunk", "action", "element"])
@pytest.mark.parametrize("micro_batch", [None, 7])
def test_streaming_has_the_gradient_of_one_step_over_all_rows(
    unit: str, micro_batch: int | None, parts: list[Trajectories], skilled: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"loss": {"ratio_unit": unit, "entropy_coef": 0.01}}
    found = []
    for minibatch in (0, 10**6):
        config = config_of(**changes)
        optim = config.optim.model_copy(update={"minibatch": minibatch, "micro_batch": micro_batch})
        config = config.model_copy(update={"optim": optim})
        assert RunSpec.of(config).streams == (minibatch == 0)
        learner = learner_of(config, tmp_path, skilled)
        collected(learner, parts)
        metrics = learner.finish(0)
        found.append((gradients(learner), {k: v for k, v in metrics.items() if k != "learner/update_s"}))
    (streamed, metrics), (whole, others) = found
    assert metrics == pytest.approx(others, abs=1e-5, nan_ok=True)
    assert metrics["learner/grad_norm"] > 0.01
    for name, expected in whole.items():
        torch.testing.assert_close(streamed[name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("unit", ["chunk", "action"])
def test_the_gradient_is_that_of_the_formula_written_out(
    unit: str, parts: list[Trajectories], skilled: Path, tmp_path: Path
) -> None:
    """The mean over all units of -A times the ratio."""
    config = config_of(loss={"ratio_unit": unit})
    learner = learner_of(config, tmp_path, skilled)
    collected(learner, parts)
    found = learner.finish(0)
    policy = learner_of(config, tmp_path, skilled).policy
    sums, counts = [], []
    for batch in parts:
        new = policy.evaluate(batch.inputs, batch.trace).log_prob.view(*batch.mask.shape, CHUNK, 3)
        for b, advantage in enumerate(literal_advantages(batch)):
            terms = []
            for t in batch.mask[:, b].nonzero()[:, 0].tolist():
                actions = range(int(batch.executed[t, b]))
                moved = [(new[t, b, c] - batch.log_prob[t, b, c]).sum() for c in actions]
                terms += moved if unit == "action" else [torch.stack(moved).sum()]
            sums.append(-advantage * torch.stack(terms).exp().sum())
            counts.append(len(terms))
    loss = torch.stack(sums).sum() / sum(counts)
    loss.backward()
    assert found["learner/policy_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            grad = gradients(learner)[name]
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


# --- all parts at once, where the estimator needs them


def first(batch: Trajectories, count: int) -> Trajectories:
    """The part's first decisions."""
    rows = torch.arange(count * ENVS)
    per_decision = ("log_prob", "value", "reward", "success", "executed", "mask", *ENDS)
    return replace(
        batch,
        decisions=TensorDecisions(batch.inputs.rows(rows), {key: tensor[rows] for key, tensor in batch.trace.items()}),
        **{name: getattr(batch, name)[:count] for name in per_decision},
    )


ENDS = ("terminated", "truncated", "final_value")


def test_joined_parts_are_their_columns_side_by_side(parts: list[Trajectories]) -> None:
    parts = [first(parts[0], 7), parts[1], first(parts[2], 3)]
    whole = join_columns(parts)
    for number, batch in enumerate(parts):
        own = slice(number * ENVS, (number + 1) * ENVS)
        count = len(batch.mask)
        for name in ("log_prob", "value", "reward", "success", "executed", "mask", "terminated", "truncated"):
            assert torch.equal(getattr(whole, name)[:count, own], getattr(batch, name)), name
        for name in ("reward", "success", "executed", "mask", "terminated", "truncated", "final_value"):
            assert not getattr(whole, name)[count:, own].any(), name
        assert whole.episode_group is not None and batch.episode_group is not None
        assert torch.equal(whole.episode_group[own], batch.episode_group)
        assert whole.inputs.state is not None and batch.inputs.state is not None
        width = ENVS * len(parts)
        assert torch.equal(whole.inputs.state.view(-1, width, 16)[:count, own].flatten(0, 1), batch.inputs.state)
        action = whole.trace["action"].view(-1, width, CHUNK, 3)[:count, own]
        assert torch.equal(action.flatten(0, 1), batch.trace["action"])
    assert whole.env_steps == sum(batch.env_steps for batch in parts)


def test_advantages_scaled_by_the_batch_are_scaled_by_all_of_an_iteration(tmp_path: Path) -> None:
    config = config_of(workflow=NOTING, advantage={"scale": "batch"}, iterations=1)
    assert not RunSpec.of(config).streams and RunSpec.of(config_of(workflow=NOTING)).streams
    SEEN.clear()
    done, weights = iterations_of(config, tmp_path / "a")
    whole = SEEN[-1]
    assert whole.episode_group is not None and len(whole.episode_group) == 3 * ENVS
    estimate = group_relative(whole, config)
    expected, _ = group_advantages(outcomes(whole, config.advantage), whole.episode_group, SIZE, "batch")
    assert torch.equal(estimate.advantage[0], expected)
    learner = learner_of(
        config_of(advantage={"scale": "batch"}, rollout={"episodes_per_env": 1}, optim={"minibatch": 10**6}), tmp_path
    )
    learner.update(whole, 0)
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert done[0].learned["learner/steps"] == 1
