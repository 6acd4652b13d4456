"""Rollouts under a delay: what is executed, and which decision owns what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.algorithms.advantages import generalised_advantages
from embodied.errors import CheckpointError
from embodied.rollout.executed_chunks import Delayed
from embodied.rollout.policy_worker import PolicyWorker
from embodied.rollout.rollout_loop import RolloutSettings, rows_for_finals
from embodied.rollout.rollout_summary import EpisodePart
from embodied.trajectories.batch import Trajectories
from embodied.trajectories.memory import TrajectoryMemory
from embodied.trajectories.random_streams import SamplingNoise
from policies.contract import Action, Inputs, Policy, PolicySpec
from sim_farm.client.farm import Farm
from sim_farm.contract import PhysicsResult, TaskSpec
from sim_farm.episodes import EndlessEpisodes, Episodes, GroupedEpisodes
from sim_farm.registry import make_physics
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.embodied.rollout.test_policy_worker import ENVS, SEED, Reflex, Watcher
from tests.embodied.support.clock_policy import Clock
from tests.embodied.support.copied_out import copied_out
from tests.embodied.support.evaluations import config, evaluated

LIMIT = 11
"""Env steps of an episode; with chunks of 4 some end within the env steps of the decision before."""
TASK = TaskSpec("tabletop/reach", max_episode_steps=LIMIT)
DELAYS = [("3", 4), ("4", 4), ("1", 1), ("0:50,2:20,3:30", 4), ("0:50,4:50", 4)]
"""(delay, env steps between decisions)"""


class Foresees(Reflex):
    """Has a value for each action."""

    def value(self, inputs: Inputs) -> Tensor:
        return super().value(inputs)[:, None] * torch.arange(1, self.spec.chunk + 1)


@contextmanager
def worker(
    delay: str, interval: int, groups: int = 2, physics_workers: int = 1, kind: Callable[..., Policy] = Reflex,
    episodes: Episodes | None = None, rounds: int = 13, reads: tuple[str, ...] = ("state",),
) -> Iterator[PolicyWorker]:  # fmt: skip
    delayed = Delayed("naive", delay, interval)
    policy = kind(chunk=interval + delayed.most)
    spec = FarmSpec(
        TASK, episodes or EndlessEpisodes(SEED), ENVS, interval, groups, physics_workers, final_frames="never"
    )
    farm = Farm.create(spec, InProcess(), frame_rows=0)
    try:
        settings = RolloutSettings(reads, (SEED,), "always", rounds, delayed=delayed)
        made = PolicyWorker(policy, farm, settings)
        made.use(TrajectoryMemory.create(made.layout(), farm.frames, shared=False))
        yield made
    finally:
        farm.close()


# --- the law, written out: one environment, env step by env step


@dataclass
class Owned:
    """A decision, and what came of the env steps that executed its actions."""

    episode: int
    step: int
    late: int
    action: Action
    rewards: dict[int, float] = field(default_factory=dict)
    """By the place of the action in the chunk."""
    success: bool = False
    end: PhysicsResult | None = None
    """What its last env step showed, where it ended the episode."""
    missed: bool = False
    """The episode ended before it arrived."""


@cache
def lived(env: int, delay: str, interval: int, decisions: int, kind: type[Reflex], episodes: Episodes) -> list[Owned]:
    """The decisions of an environment from its first episode on."""
    delayed, found = Delayed("naive", delay, interval), list[Owned]()
    policy = kind(chunk=interval + delayed.most)
    noise = SamplingNoise(SEED, policy.noise_dim)
    physics = make_physics(TASK)
    for episode in range(100):
        spec = episodes.spec(env, episode)
        assert spec is not None
        seen, step, earlier = physics.reset(spec), 0, list[Owned]()
        while not seen.ended or step == 0:
            if step % interval == 0:
                if len(found) == decisions:
                    return found
                z = noise.draw(*(np.array([number]) for number in (env, episode, step)))
                action = policy.act(Inputs(state=torch.from_numpy(seen.state)[None]), torch.from_numpy(z))
                late = delayed.drawn(SEED, env, episode, step) if step else 0
                found.append(Owned(episode, step, late, action))
                earlier.append(found[-1])
            arrived = [one for one in earlier if one.step + one.late <= step]
            newest = arrived[-1]
            place = step - newest.step
            seen = physics.step(newest.action.chunk[0, place : place + 1].numpy())
            newest.rewards[place] = float(seen.reward[0])
            newest.success |= bool(seen.success[0])
            newest.end = seen if seen.ended else None
            step += 1
        for one in earlier:
            one.missed = one.step + one.late >= step
    raise AssertionError("no end")


def assert_lived(batch: Trajectories, t: int, env: int, owned: Owned) -> None:
    places = sorted(owned.rewards)
    assert bool(batch.mask[t, env]) != owned.missed
    if owned.missed:
        return
    assert batch.first is not None and batch.step_reward is not None
    torch.testing.assert_close(batch.log_prob[t, env], owned.action.log_prob[0], rtol=0, atol=0)
    torch.testing.assert_close(batch.value[t, env], owned.action.value[0], rtol=0, atol=0)
    assert batch.alive[t, env].nonzero()[:, 0].tolist() == places, "scored is what was executed"
    assert int(batch.first[t, env]) == owned.late and int(batch.executed[t, env]) == len(places)
    assert not places or places[0] == owned.late
    expected = torch.zeros(batch.step_reward.shape[2])
    for place, reward in owned.rewards.items():
        expected[place] = reward
    torch.testing.assert_close(batch.step_reward[t, env], expected, rtol=0, atol=0)
    torch.testing.assert_close(batch.reward[t, env], expected.sum())
    assert bool(batch.success[t, env]) == owned.success
    end = owned.end
    assert bool(batch.terminated[t, env]) == (end is not None and bool(end.terminated[-1]))
    assert bool(batch.truncated[t, env]) == (end is not None and bool(end.truncated[-1]))


@pytest.mark.parametrize(("groups", "physics_workers"), [(1, 1), (2, 2)])
@pytest.mark.parametrize(("delay", "interval"), DELAYS)
def test_a_decision_owns_the_env_steps_of_its_actions(
    delay: str, interval: int, groups: int, physics_workers: int
) -> None:
    """Over three rollouts of five decisions, between each two of which one is taken that is not learned from."""
    with worker(delay, interval, groups, physics_workers) as made:
        made.begin()
        batches = []
        for _ in range(3):
            summary = made.rollout(5)
            batches.append(copied_out(made.trajectories()))
            assert summary.env_steps == batches[-1].env_steps
        policy = made.policy
    assert isinstance(policy, Reflex)
    missed = ends = overtaken = 0
    for env in range(ENVS):
        owned = lived(env, delay, interval, 18, Reflex, EndlessEpisodes(SEED))
        for number, batch in enumerate(batches):
            mine = owned[6 * number : 6 * number + 6]
            for t in range(5):
                assert_lived(batch, t, env, mine[t])
                end = mine[t].end
                if end is not None and mine[t].rewards:
                    final = policy.value(Inputs(state=torch.from_numpy(end.state)[None]))
                    torch.testing.assert_close(batch.final_value[t, env], final[0], rtol=0, atol=0)
            missed += sum(one.missed for one in mine[:5])
            overtaken += sum(not one.missed and not one.rewards for one in mine[:5])
            ends += sum(one.end is not None for one in mine[:5])
            torch.testing.assert_close(batch.last_value[env], mine[5].action.value[0], rtol=0, atol=0)
    assert ends > 5 and missed > 0 and (overtaken > 0) == (delay == "0:50,4:50"), "not tested"


def test_advantages_are_those_of_the_decisions_that_own_env_steps() -> None:
    """As of an environment whose chunks are what each decision owns."""
    with worker("0:50,2:20,3:30", 4) as made:
        made.begin()
        made.rollout(12)
        batch = copied_out(made.trajectories())
    ends = (batch.terminated, batch.truncated, batch.final_value)
    found, _ = generalised_advantages(batch.reward, batch.value, *ends, batch.last_value, 0.9, 0.8)
    assert not batch.mask.all()
    for env in range(ENVS):
        mine = batch.mask[:, env]

        def column(values: Tensor, mine: Tensor = mine, env: int = env) -> Tensor:
            return values[mine, env, None]

        expected, _ = generalised_advantages(
            column(batch.reward), column(batch.value), column(batch.terminated), column(batch.truncated),
            column(batch.final_value), batch.last_value[env, None], 0.9, 0.8,
        )  # fmt: skip
        torch.testing.assert_close(found[mine, env], expected[:, 0], rtol=0, atol=0)


def test_the_last_value_of_actions_is_that_of_the_first_executed_one() -> None:
    with worker("2", 4, kind=Foresees) as made:
        made.begin()
        made.rollout(5)
        batch = copied_out(made.trajectories())
    for env in range(ENVS):
        further = lived(env, "2", 4, 6, Foresees, EndlessEpisodes(SEED))[5]
        torch.testing.assert_close(batch.last_value[env], further.action.value[0, further.late], rtol=0, atol=0)


def test_whole_episodes_have_all_of_their_env_steps() -> None:
    episodes = GroupedEpisodes(SEED, 2)
    with worker("3", 4, episodes=episodes, rounds=12) as made:
        made.begin(rest=True)
        batches = []
        for _ in range(2):
            made.rollout_episodes(EpisodePart(0, 2 * ENVS), 2)
            batches.append(copied_out(made.trajectories()))
    for env in range(ENVS):
        owned = lived(env, "3", 4, 20, Reflex, episodes)
        for number, batch in enumerate(batches):
            for piece in range(2):
                mine = [one for one in owned if one.episode == 2 * number + piece]
                column = piece * ENVS + env
                for t, one in enumerate(mine):
                    if one.rewards:  # only the last can have none
                        assert_lived(batch, t, column, one)
                assert int(batch.mask[:, column].sum()) == sum(bool(one.rewards) for one in mine)
                assert int((batch.executed * batch.mask)[:, column].sum()) == sum(len(one.rewards) for one in mine)


@pytest.mark.parametrize(("delay", "interval"), [("3", 5), ("4", 4), ("1", 2)])
def test_an_evaluation_under_the_runs_delay_executes_what_training_does(
    delay: str, interval: int, tmp_path: Path
) -> None:
    """Executed actions name the decision that they are of: the policy is a clock (`clock_policy.py`)."""

    def clock(chunk: int) -> Clock:
        return Clock(PolicySpec(action_dim=3, chunk=chunk, state_dim=16))

    with worker(delay, interval, kind=clock, reads=("state", "episode")) as made:
        made.begin()
        made.rollout(LIMIT)
        batch = copied_out(made.trajectories())
    assert batch.first is not None and batch.executed is not None
    settings = config(
        {"runtime": {"mode": "inline"}, "farm": {"physics_workers": 1}},
        env={"task": TASK.name, "num_envs": 2, "max_episode_steps": LIMIT, "delay": delay},
        policy={"kind": f"{Clock.__module__}:Clock", "reads": ["state", "episode"], "chunk": interval},
        eval={"episodes": 2, "videos": 0},
    )
    folder = evaluated(tmp_path / "e", settings)
    under, _, without, _ = (folder.actions(outcome) for outcome in folder.in_order())
    for env in range(ENVS):
        rows = zip(batch.first[:, env].tolist(), batch.executed[:, env].tolist(), strict=True)
        parts = [batch.trace["action"][t * ENVS + env, first : first + count] for t, (first, count) in enumerate(rows)]
        executed = torch.cat(parts)[:LIMIT]
        assert np.array_equal(under, executed.numpy())
    assert not np.array_equal(under, without) and len(under) == len(without) == LIMIT


# --- snapshots


@pytest.mark.parametrize("groups", [1, 2])
def test_a_rollout_continues_from_a_snapshot_bit_for_bit(groups: int) -> None:
    with worker("0:30,2:30,3:40", 4, groups) as made:
        made.begin()
        made.rollout(4)
        made.trajectories()
        snapshot = made.snapshot()
        made.rollout(5)
        expected = copied_out(made.trajectories())
    assert snapshot["left_over"].shape == (ENVS, 3, 3) and snapshot["left_over"].any()
    with worker("0:30,2:30,3:40", 4, groups) as made:
        made.begin(snapshot)
        made.rollout(5)
        found = copied_out(made.trajectories())
    for name, tensor in vars(expected).items():
        if isinstance(tensor, Tensor):
            assert torch.equal(getattr(found, name), tensor), name
    for name, tensor in expected.trace.items():
        assert torch.equal(found.trace[name], tensor), name
    with worker("2", 4) as made, pytest.raises(CheckpointError, match="left_over has shapes .*this run has 4"):
        made.begin(snapshot)


# --- frames of final observations


def test_final_observations_that_are_not_valued_leave_the_frame_memory() -> None:
    """A hundred episodes and more: rows that stayed taken would run out, and frames be copied."""
    task = TaskSpec("tabletop/reach", max_episode_steps=3, cameras=1, image_size=16)
    delayed, rounds = Delayed("naive", "2", 2), 5
    policy = Watcher()
    policy.spec = type(policy.spec)(action_dim=3, chunk=4, cameras=("front",), image_size=16)
    policy.noise_dim = 12
    spec = FarmSpec(task, EndlessEpisodes(SEED), ENVS, 2, 1, 1, final_frames="truncated")
    rows = ENVS * (rounds + 1) + rows_for_finals(ENVS, rounds, spec.history, 3)
    farm = Farm.create(spec, InProcess(), frame_rows=rows)
    try:
        made = PolicyWorker(policy, farm, RolloutSettings(("images",), (SEED,), "truncated", rounds, delayed=delayed))
        made.use(TrajectoryMemory.create(made.layout(), farm.frames, shared=False))
        made.begin()
        free = len(made._loop.finals._free)
        for _ in range(10):
            made.rollout(4)
            batch = copied_out(made.trajectories())
            assert batch.truncated.any() and (batch.final_value[batch.truncated] > 0).all()
        assert len(made._loop.finals._free) == free and not made._loop.finals._kept
    finally:
        farm.close()
