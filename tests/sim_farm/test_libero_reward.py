"""LIBERO's dense reward against LIBERO's own predicates, along episodes that solve their task and some that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from policies.scripted import libero
from sim_farm.backends.libero import tasks
from sim_farm.backends.libero.physics import LiberoPhysics
from sim_farm.backends.libero.reward import HELD
from sim_farm.contract import EpisodeSpec, PhysicsResult, TaskSpec
from tests.variants import often

PLATE, DRAWER, KNOB, BASKET = "libero_goal/8", "libero_goal/0", "libero_goal/7", "libero_object/0"
CLOSE, TURN_OFF = "libero_90/33", "libero_90/39"
TWO_PREDICATES, DRAWER_AND_BOWL = "libero_10/0", "libero_10/3"
ALL = tasks.task_names()
UP = np.array([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0]], np.float32)


def dense(task: str) -> LiberoPhysics:
    return LiberoPhysics(TaskSpec(f"libero/{task}", reward="dense", cameras=(), max_episode_steps=300))


def progress_of(physics: LiberoPhysics) -> float:
    assert physics._progress is not None
    return physics._progress()


def scripted(physics: LiberoPhysics, seed: int) -> Iterator[PhysicsResult]:
    """The env steps of an episode that the script solves."""
    result = physics.reset(EpisodeSpec(seed))
    while not (len(result.success) and result.terminated[-1]):
        action = libero.act(result.state.astype(np.float64), result.instruction)
        result = physics.step(np.array([action], np.float32))
        yield result
    assert result.success[-1], "the script did not solve the task"


@pytest.mark.parametrize("task", often((PLATE, KNOB), (PLATE, DRAWER, KNOB, BASKET)))
def test_a_solved_episode_gains_what_was_to_do_and_one_where_solved(task: str) -> None:
    with closing(dense(task)) as physics:
        physics.reset(EpisodeSpec(3))
        begun = progress_of(physics)
        rewards, done = [], []
        for result in scripted(physics, seed=3):
            rewards.append(float(result.reward[0]))
            done.append(progress_of(physics))
    assert rewards[-1] == 1.0 and done[-1] == 1.0
    np.testing.assert_allclose(np.cumsum(rewards[:-1]), np.array(done[:-1]) - begun, atol=1e-5)
    assert 0.0 <= begun < 0.5 and max(done[:-1]) > begun + 0.25
    assert max(done[:-1]) < 1.0, "progress is complete while the task is not solved"


def test_a_hand_that_goes_away_loses() -> None:
    with closing(dense(PLATE)) as physics:
        physics.reset(EpisodeSpec(3))
        assert sum(float(physics.step(UP).reward[0]) for _ in range(10)) < -0.01


def test_reaching_grasping_and_carrying_are_rewarded_one_after_the_other() -> None:
    """A grasp is what robosuite calls one, by its own contacts as by the fast ones."""
    with closing(dense(PLATE)) as physics:
        env: Any = physics._env
        fast, bowl = env.check_contact, env.get_object("akita_black_bowl_1")
        seen, rewards = [], []
        for result in scripted(physics, seed=0):
            rewards.append(float(result.reward[0]))
            seen.append(env._check_grasp(env.robots[0].gripper, bowl))
            del env.check_contact  # robosuite's own again
            assert seen[-1] == env._check_grasp(env.robots[0].gripper, bowl)
            env.check_contact = fast
    grasped = seen.index(True)
    reaching, grasping, carrying = sum(rewards[:grasped]), rewards[grasped], sum(rewards[grasped + 1 : -1])
    assert reaching > 0.05 and grasping == pytest.approx(HELD, abs=0.05) and carrying > 0.1


@pytest.mark.parametrize("episode", [EpisodeSpec(3), EpisodeSpec(3, init_state=7)])
def test_what_settling_gains_is_not_the_policys(episode: EpisodeSpec) -> None:
    away = np.array([[1.0, 0.0, -1.0, 0.0, 0.0, 0.0, -1.0]] * 5, np.float32)
    with closing(dense(PLATE)) as physics:
        physics.reset(EpisodeSpec(0))
        physics.step(away)
        for settled in (0, 4):
            physics.reset(episode)
            physics.step(away)
            physics.reset(episode)
            physics.settle(settled)
            begun = progress_of(physics)
            rewards = physics.step(away).reward
            assert float(rewards.sum()) == pytest.approx(progress_of(physics) - begun, abs=1e-6) != 0.0


@pytest.mark.parametrize("task", often((DRAWER, TURN_OFF), (DRAWER, KNOB, CLOSE, TURN_OFF)))
def test_a_joint_is_where_it_should_be_where_libero_says_so(task: str) -> None:
    """LIBERO's ranges are open to one side: within a joint's own range that is the same."""
    with closing(dense(task)) as physics:
        physics.reset(EpisodeSpec(0))
        env: Any = physics._env
        (predicate,) = env.parsed_problem["goal_state"]
        part = env.object_states_dict[predicate[1]]
        site = part.object_state_type == "site"
        (name,) = (env.object_sites_dict[predicate[1]] if site else env.get_object(predicate[1])).joints
        joint = env.sim.model._model.joint(name)
        seen, holds = [], []
        for position in np.linspace(joint.range[0] + 1e-6, joint.range[1] - 1e-6, 60):
            env.sim.data._data.qpos[joint.qposadr[0]] = position
            seen.append(progress_of(physics))
            holds.append(bool(env._eval_predicate(predicate)))
    assert [value == 1.0 for value in seen] == holds and any(holds) and not all(holds)
    # The nearer the better: rising towards the side at which it holds.
    away = [value for value, done in zip(seen, holds, strict=True) if not done]
    assert away == sorted(away, reverse=holds[0])


@pytest.mark.parametrize("task", often((DRAWER_AND_BOWL,), (TWO_PREDICATES, DRAWER_AND_BOWL)))
def test_a_goal_of_two_predicates_is_half_done_where_one_holds(task: str) -> None:
    with closing(dense(task)) as physics:
        physics.reset(EpisodeSpec(0))
        terms = physics._progress._terms if physics._progress is not None else []
        assert len(terms) == 2
        assert progress_of(physics) == pytest.approx((terms[0]() + terms[1]()) / 2)
        assert all(0.0 <= term() < 0.9 for term in terms)


@pytest.mark.parametrize("task", often((TWO_PREDICATES,), ALL))
def test_progress_has_a_beginning_in_every_kind_of_task(task: str) -> None:
    with closing(dense(task)) as physics:
        physics.reset(EpisodeSpec(0))
        assert 0.0 <= progress_of(physics) < 1.0


def test_success_is_the_reward_unless_it_is_requested() -> None:
    with closing(LiberoPhysics(TaskSpec(f"libero/{PLATE}", cameras=()))) as physics:
        assert physics.info.spec.reward == "sparse"
        rewards = [float(result.reward[0]) for result in scripted(physics, seed=3)]
    assert rewards[:-1] == [0.0] * (len(rewards) - 1) and rewards[-1] == 1.0
