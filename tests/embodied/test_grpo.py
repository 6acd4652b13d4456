"""Episodes in groups, through the executor: what is gathered, what is learned from it, and that it learns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.algorithms.episode_groups import differing, group_advantages
from embodied.algorithms.estimators import Estimate, group_relative, outcomes
from embodied.checkpoint import RunState
from embodied.config import Config
from embodied.config_files import parse_config
from embodied.data.trajectories import HeldDecisions, Trajectories, join_columns
from embodied.errors import UserError
from embodied.execution.assignment import configured
from embodied.execution.executor import Executor, Iteration, executor
from embodied.execution.session import open_session
from embodied.reporting.metrics import read
from embodied.workers.context import make_policy
from embodied.workers.learner import Learner
from embodied.workers.roles import CollectStatistics, Decider, EpisodePart, Trainer
from embodied.workflows.recipes import GRPO
from embodied.workflows.sizes import episodes_of, streams
from policies.contract import Policy, PolicySpec
from tests.embodied.held import held
from tests.embodied.test_resume import assert_same_run, rewind
from tests.embodied.test_resume import run as train

ENVS, SIZE, CHUNK, LIMIT = 8, 4, 2, 19
"""An episode that is truncated ends in the middle of a chunk."""
SETTINGS: dict[str, Any] = {
    "workflow": "grpo",
    "seed": 6,
    "iterations": 3,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": LIMIT},
    "farm": {"groups": 2},
    "policy": {"chunk": CHUNK, "options": {"widths": [32, 32], "initial_log_std": -1.0}},
    "rollout": {"episode_group": SIZE, "episodes_per_env": 3},
    "advantage": {"outcome": "return"},
    "optim": {"epochs": 1, "minibatch": 0, "threads": 1, "policy_lr": 1e-2, "max_grad_norm": 1e9},
    "runtime": {"mode": "inline", "trace": False},
}


def config_of(**changes: Any) -> Config:
    """The settings with changes, section by section: `rollout={"episodes_per_env": 1}`."""
    return parse_config(
        {
            **SETTINGS,
            **{k: {**SETTINGS.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()},
        },
        "test",
    )


@contextmanager
def begun(config: Config, folder: Path, policy: Path | None = None) -> Iterator[Executor]:
    """The run's workers; the policy is new, or from a checkpoint."""
    with (
        open_session(config) as session,
        executor(config, folder, session, configured(config, session.cores)) as workers,
    ):
        if policy is not None:
            workers.load(policy)
        workers.begin(None, 0)
        yield workers


@pytest.fixture(scope="module")
def skilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a policy that solves some episodes early, and others not: a new one hardly solves any."""
    config = config_of(env={"num_envs": 32}, rollout={"episodes_per_env": 1}, iterations=8)
    root = tmp_path_factory.mktemp("skilled")
    with begun(config, root) as workers:
        done = [workers.iterate(number) for number in range(config.iterations)]
        workers.save(root, RunState(0, 0, 0.0, ()), done[-1].environments)
    (folder,) = root.glob("0*")
    return folder


def iterations_of(
    config: Config, folder: Path, policy: Path | None = None
) -> tuple[list[Iteration], dict[str, Tensor]]:
    with begun(config, folder, policy) as workers:
        done = [workers.iterate(number) for number in range(config.iterations)]
        return done, {k: v.clone() for k, v in workers.trainer.call(Trainer.weights).items()}


def part_of(number: int) -> EpisodePart:
    """Episode `number` of every environment."""
    return EpisodePart(number * ENVS, (number + 1) * ENVS)


def roll(workers: Executor, number: int, limit: int) -> Trajectories:
    """Episode `number` of every environment, of which each may end `limit`."""
    workers.decider.call(Decider.rollout_episodes, part_of(number), limit, 60.0)
    return held(workers.decider.call(Decider.trajectories))


def episodes_in_parts(config: Config, folder: Path, policy: Path | None = None) -> list[Trajectories]:
    """One iteration's trajectories, before anything is learned."""
    with begun(config, folder, policy) as workers:
        episodes = config.rollout.episodes_per_env
        return [roll(workers, number, episodes) for number in range(episodes)]


@pytest.fixture(scope="module")
def parts(skilled: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectories]:
    return episodes_in_parts(config_of(), tmp_path_factory.mktemp("parts"), skilled)


def policy_of(config: Config) -> Policy:
    return make_policy(config, PolicySpec(action_dim=3, chunk=CHUNK, state_dim=16))


def learner_of(config: Config, folder: Path, policy: Path | None = None) -> Learner:
    learner = Learner(policy_of(config), config, folder)
    if policy is not None:
        learner.load(policy)
    return learner


def gradients(learner: Learner) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in learner.policy.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --- what a part is


def test_a_part_is_one_whole_episode_of_every_environment(parts: list[Trajectories]) -> None:
    lengths = set()
    for batch in parts:
        ended = (batch.terminated | batch.truncated) & batch.mask
        assert batch.mask[0].all() and torch.equal(ended.sum(0), torch.ones(ENVS, dtype=torch.int64))
        for env in range(ENVS):
            (last,) = ended[:, env].nonzero()[:, 0].tolist()
            assert batch.mask[: last + 1, env].all() and not batch.mask[last + 1 :, env].any()
            assert batch.executed[last + 1 :, env].sum() == 0 and batch.reward[last + 1 :, env].abs().sum() == 0
            lengths.add(int(batch.executed[:, env].sum()))
        assert batch.mask[-1].any(), "a row that is nobody's decision"
    assert LIMIT in lengths and min(lengths) < LIMIT - CHUNK, f"no early end: {lengths}"


def test_groups_are_complete_and_named_once(parts: list[Trajectories]) -> None:
    seen: set[int] = set()
    for batch in parts:
        assert batch.episode_group is not None
        names, count = batch.episode_group.unique(return_counts=True)
        assert count.tolist() == [SIZE] * (ENVS // SIZE)
        assert not seen & set(names.tolist())
        seen |= set(names.tolist())
    assert len(seen) == len(parts) * ENVS // SIZE


def test_members_of_a_group_begin_alike_and_go_on_differently(parts: list[Trajectories]) -> None:
    first_states = set()
    for batch in parts:
        assert batch.episode_group is not None and batch.inputs.state is not None
        first = batch.inputs.state.view(-1, ENVS, 16)[0]
        actions = batch.trace["action"].view(-1, ENVS, CHUNK, 3)[0]
        for name in batch.episode_group.unique():
            members = (batch.episode_group == name).nonzero()[:, 0]
            assert (first[members] == first[members[0]]).all()
            assert len(actions[members].unique(dim=0)) == SIZE, "members share their noise"
            first_states.add(first[members[0]].numpy().tobytes())
    assert len(first_states) == len(parts) * ENVS // SIZE, "groups begin alike"


def test_environments_that_end_early_go_on_with_the_next_part(skilled: Path, tmp_path: Path) -> None:
    """And what they gather is what they gather when everybody waits."""
    with begun(config_of(), tmp_path, skilled) as workers:
        going = [roll(workers, 0, 3)]
        now = workers.decider.call(Decider.snapshot)
        ahead = (now["base_episode"] == 1) & (now["base_step"] > 0)
        assert ahead.any() and not ahead.all()
        going += [roll(workers, 1, 3), roll(workers, 2, 3)]
        now = workers.decider.call(Decider.snapshot)
        assert (now["base_episode"] == 3).all() and (now["base_step"] == 0).all(), "somebody began a fourth episode"
    with begun(config_of(), tmp_path, skilled) as workers:
        waiting = []
        for number in range(3):
            waiting.append(roll(workers, number, number + 1))
            now = workers.decider.call(Decider.snapshot)
            assert (now["base_episode"] == number + 1).all() and (now["base_step"] == 0).all()
    for found, expected in zip(going, waiting, strict=True):
        for name in ("mask", "executed", "success", "terminated", "truncated", "episode_group"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for name in ("log_prob", "reward"):  # other batches, other rounding
            mask = found.mask.view(*found.mask.shape, *[1] * (getattr(found, name).ndim - 2))
            difference = (getattr(found, name) - getattr(expected, name)) * mask
            assert difference.abs().max() < 1e-4, name


LONG = {"num_envs": 32, "max_episode_steps": 60}
"""Episodes of very different lengths."""


def test_each_part_tells_its_own_episodes(skilled: Path, tmp_path: Path) -> None:
    """Even where an environment has ended an episode of the next part before the part is complete."""
    with begun(config_of(env=LONG), tmp_path, skilled) as workers:
        for number in range(3):
            part = EpisodePart(number * 32, (number + 1) * 32)
            summary = workers.decider.call(Decider.rollout_episodes, part, 3, 60.0)
            batch = workers.decider.call(Decider.trajectories)
            now = workers.decider.call(Decider.snapshot)
            assert number or now["base_episode"].max() >= 2, "nobody was two parts ahead"
            assert [e.env for e in summary.episodes] == list(range(32))
            assert [e.length for e in summary.episodes] == batch.executed.sum(0).tolist()
            assert [e.success for e in summary.episodes] == (batch.success & batch.mask).any(0).tolist()
            assert summary.env_steps == sum(e.length for e in summary.episodes)


def test_an_iteration_has_no_more_decisions_than_its_longest_environment(skilled: Path, tmp_path: Path) -> None:
    """Between two parts of an iteration nobody waits for the others."""
    SEEN.clear()
    config = config_of(
        workflow=f"{__name__}:NOTING",
        farm={"groups": 1},
        env={"max_episode_steps": 60},
        iterations=1,
        runtime={"trace": True},
    )  # fmt: skip
    (one,), _ = iterations_of(config, tmp_path, skilled)
    acted = sum(span.name.startswith("act") for span in one.summary.spans)
    decisions = torch.stack([batch.mask.sum(0) for batch in SEEN])
    assert acted == decisions.sum(0).max() < decisions.max(1).values.sum()


def test_environments_that_do_not_make_groups_are_refused(tmp_path: Path) -> None:
    config = config_of(env={"num_envs": 10})
    with pytest.raises(
        UserError, match="10 environments of tabletop/reach do not make episode groups of 4; set env.num_envs to 8"
    ):
        episodes_of(config, 0)


# --- what is learned from


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
        decisions=HeldDecisions(
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
        collected = learner.collect(poisoned(batch, ~teaches), 0)
        assert collected == replace(other.collect(batch, 0), learn_s=collected.learn_s)
        assert collected.rows == int(batch.mask[:, teaches].sum())
        assert collected.groups == int(teaches.sum()) // SIZE
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


def collected(learner: Learner, parts: Sequence[Trajectories]) -> list[CollectStatistics]:
    return [learner.collect(part, 0) for part in parts]


def test_streaming_equals_the_same_data_afterwards(tmp_path: Path) -> None:
    """Each part learned from while the next is rolled out, or all of them when nothing is left to roll out."""
    config = config_of()
    assert streams(config)
    with begun(config, tmp_path / "a") as workers:
        during = workers.iterate(0)
        found = {name: tensor.clone() for name, tensor in workers.trainer.call(Trainer.weights).items()}
    learner = learner_of(config, tmp_path)
    collected(learner, episodes_in_parts(config, tmp_path / "b"))
    afterwards = learner.finish(0)
    assert_equal(found, learner.weights())
    for name in afterwards.keys() - {"learner/update_s"}:
        assert during.learned[name] == pytest.approx(afterwards[name], abs=0, rel=0, nan_ok=True), name


@pytest.mark.parametrize("weight", ["decision", "episode"])
@pytest.mark.parametrize("unit", ["chunk", "action", "element"])
@pytest.mark.parametrize("micro_batch", [None, 7])
def test_streaming_has_the_gradient_of_one_step_over_all_rows(
    weight: str, unit: str, micro_batch: int | None, parts: list[Trajectories], skilled: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"loss": {"weight": weight, "ratio_unit": unit, "entropy_coef": 0.01}}
    found = []
    for minibatch in (0, 10**6):
        config = config_of(**changes)
        optim = config.optim.model_copy(update={"minibatch": minibatch, "micro_batch": micro_batch})
        config = config.model_copy(update={"optim": optim})
        assert streams(config) == (minibatch == 0)
        learner = learner_of(config, tmp_path, skilled)
        collected(learner, parts)
        metrics = learner.finish(0)
        found.append((gradients(learner), {k: v for k, v in metrics.items() if k != "learner/update_s"}))
    (streamed, metrics), (whole, others) = found
    assert metrics == pytest.approx(others, abs=1e-5, nan_ok=True)
    assert metrics["learner/grad_norm"] > 0.01
    for name, expected in whole.items():
        torch.testing.assert_close(streamed[name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("weight", ["decision", "episode"])
@pytest.mark.parametrize("unit", ["chunk", "action"])
def test_the_gradient_is_that_of_the_formula_written_out(
    weight: str, unit: str, parts: list[Trajectories], skilled: Path, tmp_path: Path
) -> None:
    """The mean over all units, or over episodes of the mean over their units, of -A times the ratio."""
    config = config_of(loss={"weight": weight, "ratio_unit": unit})
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
    if weight == "episode":
        loss = torch.stack([part / count for part, count in zip(sums, counts, strict=True)]).mean()
    else:
        loss = torch.stack(sums).sum() / sum(counts)
    loss.backward()
    assert found["learner/policy_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            grad = gradients(learner)[name]
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_entropy_is_per_unit_whatever_the_weights(parts: list[Trajectories], skilled: Path, tmp_path: Path) -> None:
    found = {}
    for weight in ("decision", "episode"):
        learner = learner_of(config_of(loss={"weight": weight}), tmp_path, skilled)
        collected(learner, parts[:1])
        found[weight] = learner.finish(0)["learner/entropy"]
    assert found["decision"] == pytest.approx(found["episode"], abs=0.5) != 0


# --- all parts at once, where the estimator needs them


SEEN: list[Trajectories] = []


def noting(batch: Trajectories, config: Config) -> Estimate:
    SEEN.append(held(batch))
    return group_relative(batch, config)


NOTING = replace(GRPO, estimator=noting)


def first(batch: Trajectories, count: int) -> Trajectories:
    """The part's first decisions."""
    rows = torch.arange(count * ENVS)
    per_decision = ("log_prob", "value", "reward", "success", "executed", "mask", *ENDS)
    return replace(
        batch,
        decisions=HeldDecisions(batch.inputs.rows(rows), {key: tensor[rows] for key, tensor in batch.trace.items()}),
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
    config = config_of(workflow=f"{__name__}:NOTING", advantage={"scale": "batch"}, iterations=1)
    assert not streams(config) and streams(config_of(workflow=f"{__name__}:NOTING"))
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


# --- as many episodes as it takes


def parts_in(one: Iteration) -> int:
    return sum(span.name.startswith("roll out part") for span in one.spans)


def test_episodes_go_on_until_enough_groups_teach(skilled: Path, tmp_path: Path) -> None:
    SEEN.clear()
    config = config_of(
        workflow=f"{__name__}:NOTING",
        iterations=4,
        advantage={"outcome": "success"},
        rollout={"episodes_per_env": 1, "max_episodes_per_env": 4},
        runtime={"trace": True},
    )
    counts = []
    with begun(config, tmp_path, skilled) as workers:
        begun_episodes = 0
        for number in range(config.iterations):
            SEEN.clear()
            one = workers.iterate(number)
            counts.append(parts_in(one))
            taught = [int(group_relative(part, config).keep[0].sum()) // SIZE for part in SEEN]
            assert len(taught) == counts[-1]
            wanted = ENVS // SIZE
            assert sum(taught[:-1]) < wanted, "a part too many"
            assert sum(taught) >= wanted or counts[-1] == 4, "a part too few"
            begun_episodes += counts[-1]
            assert (one.environments["base_episode"] == begun_episodes).all(), "an episode began before it was decided"
            assert (one.environments["base_step"] == 0).all()
            assert len(one.summary.episodes) == ENVS * counts[-1]
    assert len(set(counts)) > 1, f"this seed does not test it: {counts}"


# --- a stop changes nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"episodes_per_env": 2}},
        {
            "advantage": {"outcome": "success"},
            "rollout": {"episodes_per_env": 1, "max_episodes_per_env": 3},
            "env": {"max_episode_steps": 41},
            "policy": {"options": {"widths": [16], "initial_log_std": 1.5}},
        },
    ],
    ids=["episodes_per_env", "max_episodes_per_env"],
)
def test_a_run_that_stopped_goes_on_as_if_it_had_not(changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(**changes)
    train(config, tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "stopped", 1)
    train(config, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert any(row["learner/steps"] for row in read(tmp_path / "whole")[1:]), "nothing was learned after the stop"


# --- and it learns


def test_the_return_rises(tmp_path: Path) -> None:
    """Two seeds: from hardly moving to a goal that is reached in most episodes, in 25 iterations."""
    config = config_of(
        iterations=25,
        env={"num_envs": 32, "max_episode_steps": 20},
        rollout={"episodes_per_env": 1},
        optim={"max_grad_norm": 0.5},
    )
    for seed in (1, 2):
        done, _ = iterations_of(config.model_copy(update={"seed": seed}), tmp_path)
        returns = [float(np.mean([e.total_reward for e in one.summary.episodes])) for one in done]
        solved = [float(np.mean([e.success for e in one.summary.episodes])) for one in done]
        first, last = np.mean(returns[:5]), np.mean(returns[-5:])
        assert first < 0.3 and last > 0.8, f"seed {seed}: mean return {first:.2f}, then {last:.2f}"
        assert np.mean(solved[-5:]) > 0.5, f"seed {seed}: {np.mean(solved[-5:]):.2f} solved"
