"""Trials of published evaluations, which seed LIBERO once and let its generator run on, against LIBERO itself."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from sim_farm.backends.libero.environment import stream_of
from sim_farm.backends.libero.tasks import find_task, initial_states
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm import libero_stock as stock
from tests.sim_farm.libero_stock import SIZE, assert_models_equal, assert_states_equal, backend_of, random_actions
from tests.variants import often

CAMERAS = ("agentview", "robot0_eye_in_hand")
SETTLE, REST = 10, [0.0] * 6 + [-1.0]
MICROWAVE = "libero/libero_10/9"
"""Its microwave's door is drawn once more at every reset."""
SEVERAL = [
    MICROWAVE,
    "libero/libero_spatial/0",
    "libero/libero_object/3",
    "libero/libero_goal/7",
    "libero/libero_10/3",
    "libero/libero_90/20",
]


def spec_of(task: str) -> TaskSpec:
    return TaskSpec(task, cameras=CAMERAS, image_size=SIZE, settle_steps=SETTLE, orientation="stock")


def begun(env: Any, task: str, trial: int) -> dict[str, np.ndarray]:
    """What a published evaluation's policy sees first in the trial."""
    env.reset()
    env.set_init_state(initial_states(find_task(task))[trial])
    seen: dict[str, np.ndarray] = {}
    for _ in range(SETTLE):
        seen, *_ = env.step(REST)
    return seen


def assert_begun_alike(
    env: Any, seen: dict[str, np.ndarray], physics: Any, renderer: Any, episode: EpisodeSpec
) -> None:
    """State, model, pictures, and what a few actions make of them."""
    scene = physics.reset(episode).scene
    assert_states_equal(env, physics, f"at the beginning of {episode}")
    assert_models_equal(env, physics)
    for camera, frames in renderer.render([scene], CAMERAS).items():
        assert np.array_equal(frames[0], seen[f"{camera}_image"]), f"the first picture of {episode} differs"
    actions = random_actions(3, seed=episode.resets)
    physics.step(actions)
    for action in actions:
        env.step(action)
    assert_states_equal(env, physics, f"after three steps of {episode}")


def compare_running_stream(task: str, seed: int, trials: tuple[int, ...]) -> None:
    """As openpi and OpenVLA-OFT: seeded once, one reset a trial, whose number of env steps changes nothing."""
    env = stock.stock_environment(task, SIZE, CAMERAS)
    with closing(make_physics(spec_of(task))) as physics, closing(make_renderer(spec_of(task))) as renderer:
        # Another order than theirs, after an episode of another stream.
        physics.reset(EpisodeSpec(3, 1))
        env.seed(seed)
        for trial in range(max(trials) + 1):
            if trial in trials:
                seen = begun(env, task, trial)
                assert_begun_alike(env, seen, physics, renderer, EpisodeSpec(seed, trial, resets=trial))
            else:
                env.reset()
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", often((MICROWAVE,), SEVERAL[:1]))
def test_trials_of_a_stream_that_runs_on_equal_those_of_stock_libero(task: str) -> None:
    compare_running_stream(task, 7, (0, 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "seed", "last"), [(SEVERAL[0], 7, 49), *((task, 0, 7) for task in SEVERAL[1:])])
def test_trials_of_a_stream_equal_those_of_stock_libero_up_to_the_last(task: str, seed: int, last: int) -> None:
    compare_running_stream(task, seed, (0, 1, last))


@pytest.mark.slow
@pytest.mark.parametrize("task", often((MICROWAVE,), SEVERAL[:2]))
def test_an_unseeded_reset_leaves_the_traces_that_it_leaves_in_stock_libero(task: str) -> None:
    """As LeRobot: a reset, then for each trial a new seed and another."""
    episode = EpisodeSpec(1004, 4, unseeded_resets=1)
    env = stock.stock_environment(task, SIZE, CAMERAS)
    env.reset()
    env.seed(episode.seed)
    with closing(make_physics(spec_of(task))) as physics, closing(make_renderer(spec_of(task))) as renderer:
        assert_begun_alike(env, begun(env, task, 4), physics, renderer, episode)
        if task == MICROWAVE:
            with_reset, without = (physics.reset(spec).state for spec in (episode, EpisodeSpec(1004, 4)))
            assert not np.array_equal(with_reset, without), "the test does not see whether there was a reset before"
    env.close()


def test_fixtures_stand_elsewhere_in_each_trial_of_a_stream_and_do_not_depend_on_the_order_of_trials() -> None:
    def position(physics: Any, trial: int) -> np.ndarray:
        return physics.reset(EpisodeSpec(7, trial, resets=trial)).state[25:]

    task = "libero/libero_goal/0"
    with closing(make_physics(TaskSpec(task))) as one, closing(make_physics(TaskSpec(task))) as other:
        forward = [position(one, trial) for trial in range(4)]
        stream_of.cache_clear()
        backward = [position(other, trial) for trial in reversed(range(4))][::-1]
        assert all(np.array_equal(*pair) for pair in zip(forward, backward, strict=True))
        cabinet = [state[-3 * 7 :] for state in forward]
        assert len({tuple(placed) for placed in cabinet}) == 4, "fixtures stand where they stood before"


def test_the_callers_generator_is_left_where_it_was() -> None:
    np.random.seed(5)
    expected = np.random.RandomState(5).uniform(size=3)
    with closing(make_physics(TaskSpec("libero/libero_goal/0"))) as physics:
        physics.reset(EpisodeSpec(7, 1, resets=2))
        physics.step(random_actions(2))
    assert np.array_equal(np.random.uniform(size=3), expected)


def test_an_episode_that_is_solved_while_settling_goes_on() -> None:
    """As in published evaluations, which do not look at `done` while they wait."""
    task = "libero/libero_goal/7"  # the stove, whose knob is turned
    with closing(make_physics(TaskSpec(task, settle_steps=3))) as physics:
        backend, begin = backend_of(physics), backend_of(physics)._begin_at
        knob = backend._env.sim.model.get_joint_qpos_addr("flat_stove_1_button")

        def begin_solved(recorded: np.ndarray) -> None:
            recorded = recorded.copy()
            recorded[1 + knob] = 1.2
            begin(recorded)

        backend._begin_at = begin_solved
        first = physics.reset(EpisodeSpec(0, 0))
        assert backend._env._check_success(), "the test's episode does not begin solved"
        assert first.steps == 0 and not first.ended
        result = physics.step(np.array([REST], np.float32))
        assert result.steps == 1 and result.terminated[0] and result.success[0]
