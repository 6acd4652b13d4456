"""The policy worker: what it gathers is what happened, in an order of its own, whoever did the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import policies
from embodied.rollout.policy_worker import PolicyWorker
from embodied.rollout.rollout_loop import RolloutSettings, rows_for_finals
from embodied.trajectories.batch import EndedEpisode, Trajectories
from embodied.trajectories.memory import TrajectoryMemory
from embodied.trajectories.random_streams import SamplingNoise
from policies.contract import Action, Inputs, Policy, PolicySpec
from sim_farm.client.farm import Farm
from sim_farm.contract import EpisodeSpec, PhysicsResult, TaskSpec
from sim_farm.episodes import EndlessEpisodes, Episodes, ListedEpisodes
from sim_farm.observation_history import FrameRows
from sim_farm.registry import make_physics, make_renderer
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.embodied.support.copied_out import copied_out

SEED, ENVS, CHUNK, STEPS = 7, 4, 2, 7
"""Seven steps in chunks of two: an episode that is truncated ends in the middle of a chunk."""
REACH = TaskSpec("tabletop/reach", max_episode_steps=STEPS)
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
"""(groups of environments, physics workers)"""
ROUNDS = 14
"""Decisions of each environment that the trajectory memory holds, unless a test says otherwise."""


class Reflex(Policy):
    """Goes towards the goal, unsteadily. Every number is a product or sum of its own row's numbers, which all
    processors round alike, so that two rollouts can be compared to the last bit whatever their batches."""

    kind = "reflex"
    gain: Tensor

    def __init__(self, action_dim: int = 3, chunk: int = CHUNK) -> None:
        super().__init__()
        self.spec = PolicySpec(action_dim=action_dim, chunk=chunk, state_dim=16)
        self.noise_dim = chunk * action_dim
        self.value_head = nn.Identity()
        self.register_buffer("gain", torch.tensor(8.0))

    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        assert inputs.state is not None and noise is not None
        z = noise.view(-1, self.spec.chunk, self.spec.action_dim)
        chunk = self.gain * inputs.state[:, None, 13:16] + z * 0.25
        return Action(chunk, z * z * -0.5, self.value(inputs), {"action": chunk, "noise": noise})

    def value(self, inputs: Inputs) -> Tensor:
        assert inputs.state is not None
        return inputs.state[:, 0] + inputs.state[:, 1] * 2 + inputs.state[:, 2] * 4


class Watcher(Reflex):
    """Acts at random and values a picture by its brightness: a sum of whole numbers, hence exact."""

    def __init__(self, image_size: int = 16, observations: int = 1) -> None:
        super().__init__()
        seen = {"image_size": image_size, "observations": observations}
        self.spec = replace(self.spec, state_dim=0, cameras=("front",), **seen)

    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        assert noise is not None
        chunk = noise.view(-1, self.spec.chunk, self.spec.action_dim)
        return Action(chunk, chunk, self.value(inputs), {"action": chunk, "noise": noise})

    def value(self, inputs: Inputs) -> Tensor:
        return inputs.frames["front"].long().flatten(1).sum(1).float()


@contextmanager
def worker(
    policy: Policy | None = None, groups: int = 2, physics_workers: int = 1, task: TaskSpec = REACH,
    episodes: Episodes | None = None, bootstrap: str = "truncated", snapshot: Mapping[str, np.ndarray] | None = None,
    rounds: int = ROUNDS, finals: int | None = None,
) -> Iterator[PolicyWorker]:  # fmt: skip
    policy = policy or Reflex()
    chunk = policy.spec.chunk
    spec = FarmSpec(
        task, episodes or EndlessEpisodes(SEED), ENVS, chunk, groups, physics_workers,
        final_frames="truncated" if task.cameras else "never", observations=policy.spec.observations,
    )  # fmt: skip
    history = spec.history
    if finals is None:
        finals = rows_for_finals(ENVS, rounds, history, task.max_episode_steps or 1)
    farm = Farm.create(
        spec, InProcess(), frame_rows=FrameRows(history, rounds + 1 + history.rounds, ENVS).count + finals
    )
    try:
        reads = ("images",) if task.cameras else ("state",)
        made = PolicyWorker(policy, farm, RolloutSettings(reads, (SEED,), bootstrap, rounds))
        made.use(TrajectoryMemory.create(made.layout(), farm.frames, shared=False))
        made.begin(snapshot)
        yield made
    finally:
        farm.close()


def roll(made: PolicyWorker, decisions: int = 14) -> tuple[Trajectories, tuple[EndedEpisode, ...]]:
    summary = made.rollout(decisions)
    batch = copied_out(made.trajectories())
    assert summary.env_steps == batch.env_steps
    return batch, summary.episodes


def tensors(batch: Trajectories) -> dict[str, Tensor]:
    named = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    assert batch.inputs.state is not None
    return {**named, **{f"trace.{key}": value for key, value in batch.trace.items()}, "state": batch.inputs.state}


# --- a rollout is what happens when its actions are replayed


@dataclass(frozen=True)
class Replayed:
    """What a plain loop over the simulator finds for the same actions; indexed [decision][environment]."""

    results: list[list[PhysicsResult]]
    """After each decision's chunk."""
    before: list[list[PhysicsResult]]
    """What the decision saw."""
    places: list[list[tuple[int, int]]]
    """(episode, env step) of the decision."""
    episodes: list[EndedEpisode]


def replay(batch: Trajectories, task: TaskSpec = REACH) -> Replayed:
    decisions = len(batch.reward)
    actions = batch.trace["action"].view(decisions, ENVS, CHUNK, -1).numpy()
    found = Replayed([[] for _ in range(decisions)], [[] for _ in range(decisions)], [[] for _ in range(decisions)], [])
    ended: list[tuple[int, EndedEpisode]] = []
    for env in range(ENVS):
        physics = make_physics(task)
        episode, step, total = 0, 0, 0.0
        now = physics.reset(EndlessEpisodes(SEED).spec(env, episode))
        for t in range(decisions):
            found.before[t].append(now)
            found.places[t].append((episode, step))
            now = physics.step(actions[t, env])
            found.results[t].append(now)
            step, total = step + now.steps, total + float(now.reward.sum())
            if now.ended:
                ended.append((t, EndedEpisode(env, bool(now.success[-1]), total, step)))
                episode, step, total = episode + 1, 0, 0.0
                now = physics.reset(EndlessEpisodes(SEED).spec(env, episode))
        physics.close()
    found.episodes.extend(e for _, e in sorted(ended, key=lambda place: (place[0], place[1].env)))
    return found


@pytest.mark.parametrize("bootstrap", ["truncated", "always"])
def test_trajectories_are_what_a_plain_loop_over_the_simulator_finds(bootstrap: str) -> None:
    with worker(bootstrap=bootstrap) as made:
        batch, episodes = roll(made)
    truth = replay(batch)
    assert batch.inputs.state is not None and batch.mask.all()
    states = batch.inputs.state.view(14, ENVS, -1)
    valued = 0
    for t in range(14):
        for env in range(ENVS):
            result = truth.results[t][env]
            assert np.array_equal(states[t, env].numpy(), truth.before[t][env].state)
            assert batch.executed[t, env] == result.steps
            assert float(batch.reward[t, env]) == pytest.approx(float(result.reward.sum()), abs=1e-7)
            assert bool(batch.terminated[t, env]) == bool(result.terminated[-1])
            assert bool(batch.truncated[t, env]) == bool(result.truncated[-1])
            last = Reflex().value(Inputs(state=torch.from_numpy(result.state)[None]))
            wanted = result.truncated[-1] or (bootstrap == "always" and result.terminated[-1])
            # V of the ended episode's own final observation, not of the next episode's first.
            assert batch.final_value[t, env] == (float(last) if wanted else 0.0)
            valued += int(wanted)
    assert batch.terminated.any() and batch.truncated.any() and (batch.executed < CHUNK).any(), "nothing to test"
    assert valued == int(batch.truncated.sum() + (bootstrap == "always") * batch.terminated.sum())
    assert [e.env for e in episodes] == [e.env for e in truth.episodes]
    for found, expected in zip(episodes, truth.episodes, strict=True):
        assert (found.success, found.length) == (expected.success, expected.length)
        assert found.total_reward == pytest.approx(expected.total_reward, abs=1e-6)


def test_noise_is_keyed_by_env_episode_and_step() -> None:
    with worker() as made:
        batch, _ = roll(made)
    noise = SamplingNoise(SEED, Reflex().noise_dim)
    used = batch.trace["noise"].view(14, ENVS, -1)
    for t, row in enumerate(replay(batch).places):
        for env, (episode, step) in enumerate(row):
            expected = noise.draw(np.array([env]), np.array([episode]), np.array([step]))
            assert np.array_equal(used[t, env].numpy(), expected[0])


@pytest.mark.parametrize("observations", [1, 2])
def test_final_values_are_of_the_episodes_own_last_frames(observations: int) -> None:
    task = TaskSpec("tabletop/reach", max_episode_steps=3, cameras=1, image_size=16)
    with worker(Watcher(observations=observations), task=task) as made:
        batch, _ = roll(made, 4)
    renderer = make_renderer(task)
    truth = replay(batch, task)
    assert batch.truncated.any()
    for t, env in batch.truncated.nonzero().tolist():
        assert batch.executed[t, env] == 1, "the decision's own observation is that of the env step before the last"
        scenes = [truth.results[t][env].scene, truth.before[t][env].scene][:observations]
        frames = renderer.render(scenes, ["front"])["front"]
        assert batch.final_value[t, env] == int(frames.astype(np.int64).sum())
    renderer.close()


# --- a plan changes when and where, never what


def test_groups_and_workers_do_not_change_the_trajectories() -> None:
    """To the last bit, for a policy whose arithmetic does not depend on how rows are batched."""
    found = []
    for groups, physics_workers in SHAPES:
        with worker(groups=groups, physics_workers=physics_workers) as made:
            batch, episodes = roll(made)
            found.append((tensors(batch), episodes))
    for other, episodes in found[1:]:
        assert episodes == found[0][1]
        for name, expected in found[0][0].items():
            assert torch.equal(other[name], expected), name


def test_groups_and_workers_do_not_change_the_trajectories_of_a_network() -> None:
    """Matrix products over 4, 2 or 1 rows round differently, by 1e-7 of what they add up, and the simulator
    carries that on: 1e-5 on everything, while what is counted (steps, ends, masks) is equal."""
    found = []
    for groups, physics_workers in SHAPES[:4]:
        spec = PolicySpec(action_dim=3, chunk=CHUNK, state_dim=16)
        policy = policies.build("gaussian_mlp", spec, seed=1, widths=[64, 64])
        with worker(policy, groups=groups, physics_workers=physics_workers) as made:
            batch, _ = roll(made)
            found.append(tensors(batch))
    for other in found[1:]:
        for name, expected in found[0].items():
            torch.testing.assert_close(other[name], expected, rtol=0, atol=1e-5 if expected.is_floating_point() else 0)


def test_two_short_rollouts_are_one_long_one() -> None:
    with worker() as made:
        whole, all_episodes = roll(made, 12)
    with worker() as made:
        (first, early), (second, late) = roll(made, 5), roll(made, 7)
    assert early + late == all_episodes
    assert torch.equal(first.last_value, second.value[0]), "last_value is of another observation than the next one"
    parts = (tensors(first), tensors(second))
    for name, expected in tensors(whole).items():
        joined = parts[1][name] if name == "last_value" else torch.cat([parts[0][name], parts[1][name]])
        assert torch.equal(joined, expected), name


@pytest.mark.parametrize(("groups", "physics_workers"), [(2, 1), (1, 2)])
def test_a_worker_that_begins_from_a_snapshot_goes_on_as_the_first_would_have(
    groups: int, physics_workers: int
) -> None:
    with worker() as made:
        roll(made, 5)
        snapshot = made.snapshot()
        expected, expected_episodes = roll(made, 9)
    assert snapshot["base_step"].any(), "no episode was under way"
    with worker(groups=groups, physics_workers=physics_workers, snapshot=snapshot) as made:
        found, episodes = roll(made, 9)
    assert episodes == expected_episodes, "returns or lengths of the episodes under way were lost"
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensors(found)[name], tensor), name


def test_weights_and_their_version_count_from_the_next_rollout() -> None:
    with worker() as made:
        before, _ = roll(made, 2)
        made.load_weights({"gain": torch.tensor(-3.0)}, 5)
        after, _ = roll(made, 2)
    assert (before.version, after.version) == (0, 5)
    direction = after.trace["action"] - after.trace["noise"].view_as(after.trace["action"]) * 0.25
    assert after.inputs.state is not None
    torch.testing.assert_close(direction[:, 0], -3 * after.inputs.state[:, 13:16])


# --- environments without an episode left


def test_environments_without_an_episode_are_masked_and_count_nothing() -> None:
    specs = tuple(EpisodeSpec(seed) for seed in range(ENVS + 1))  # environment 0 has two episodes, the others one
    with worker(episodes=ListedEpisodes(specs, ENVS)) as made:
        batch, episodes = roll(made, 10)
    for env in range(ENVS):
        ends = (batch.terminated | batch.truncated)[:, env].nonzero().flatten().tolist()
        assert len(ends) == (2 if env == 0 else 1)
        assert batch.mask[: ends[-1] + 1, env].all(), "a decision that was taken is masked"
        assert not batch.mask[ends[-1] + 1 :, env].any(), "a decision that was not taken is not masked"
    for name in ("reward", "executed", "terminated", "truncated", "final_value"):
        assert not getattr(batch, name)[~batch.mask].any(), name
    assert batch.env_steps == sum(episode.length for episode in episodes) < 10 * CHUNK * ENVS
    assert sorted(episode.env for episode in episodes) == [0, 0, 1, 2, 3]
    for name, tensor in tensors(batch).items():
        assert tensor.isfinite().all(), name
