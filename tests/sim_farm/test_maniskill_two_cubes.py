"""`PushRedCube-v1` and `PushGreenCube-v1`: the same scene, told apart by the instruction alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from policies.scripted import two_cubes
from sim_farm import EpisodeSpec, PhysicsResult, TaskSpec, make_physics, make_renderer

NAMES = ("PushRedCube-v1", "PushGreenCube-v1")
SEEDS = range(6)


def spec_of(name: str) -> TaskSpec:
    return TaskSpec(f"maniskill/{name}", control_mode="pd_ee_delta_pos", cameras=1, image_size=128)


@pytest.fixture(scope="module")
def red() -> Iterator[Any]:
    with closing(make_physics(spec_of(NAMES[0]))) as physics:
        yield physics


@pytest.fixture(scope="module")
def green() -> Iterator[Any]:
    with closing(make_physics(spec_of(NAMES[1]))) as physics:
        yield physics


def pushed(physics: Any, seed: int, cube: slice) -> PhysicsResult:
    """The end of an episode in which the script pushes the cube that is listed at `cube`."""
    result = physics.reset(EpisodeSpec(seed))
    while not result.ended:
        state = result.state.astype(np.float64)
        state[two_cubes.CUBE] = state[cube]
        action = two_cubes.act(state, two_cubes.INSTRUCTIONS[0])
        result = physics.step(action.astype(np.float32)[None])
    return result


def test_a_seed_gives_both_tasks_one_scene_and_each_its_own_words(red: Any, green: Any) -> None:
    for seed in SEEDS:
        one, two = red.reset(EpisodeSpec(seed)), green.reset(EpisodeSpec(seed))
        assert np.array_equal(one.scene, two.scene)
        assert np.array_equal(one.state[two_cubes.CUBE], two.state[two_cubes.OTHER])
        assert np.array_equal(one.state[two_cubes.OTHER], two.state[two_cubes.CUBE])
        assert (one.instruction, two.instruction) == two_cubes.INSTRUCTIONS


@pytest.mark.slow
def test_both_tasks_draw_the_same_pictures(red: Any) -> None:
    scenes = [red.reset(EpisodeSpec(seed)).scene for seed in SEEDS]
    with closing(make_renderer(spec_of(NAMES[0]))) as one, closing(make_renderer(spec_of(NAMES[1]))) as two:
        ours, theirs = (renderer.render(scenes, ("base_camera",))["base_camera"] for renderer in (one, two))
    assert np.array_equal(ours, theirs)
    for frame in ours.astype(int):
        r, g, b = frame[..., 0], frame[..., 1], frame[..., 2]
        assert ((r > 120) & (g < 60) & (b < 70)).sum() > 30, "the red cube is not to be seen"
        assert ((g > 90) & (r < 80) & (b < 90)).sum() > 30, "the green cube is not to be seen"


def test_either_colour_is_on_either_side(red: Any) -> None:
    sides = {bool(red.reset(EpisodeSpec(seed)).state[two_cubes.CUBE][1] > 0) for seed in SEEDS}
    assert sides == {True, False}


@pytest.mark.slow
def test_the_named_cube_at_its_goal_is_success_and_the_other_at_its_own_is_failure(red: Any, green: Any) -> None:
    for physics in (red, green):
        for seed in SEEDS:
            done, wrong = pushed(physics, seed, two_cubes.CUBE), pushed(physics, seed, two_cubes.OTHER)
            assert done.success[-1] and done.terminated[-1] and done.reward[-1] > 1.0
            assert wrong.terminated[-1] and not wrong.success[-1] and abs(wrong.reward[-1]) < 0.2


def test_a_return_says_how_far_the_task_has_come_whatever_the_length(red: Any) -> None:
    """To push at once, and to push after a rest, are worth the same."""
    returns = []
    for rest in (0, 10):
        result = red.reset(EpisodeSpec(3))
        total, step = 0.0, 0
        while not result.ended:
            action = two_cubes.act(result.state.astype(np.float64), two_cubes.INSTRUCTIONS[0] if step >= rest else "")
            result = red.step(action.astype(np.float32)[None])
            total, step = total + float(result.reward.sum()), step + 1
        assert result.success[-1]
        returns.append(total)
    assert returns[0] == pytest.approx(returns[1], abs=0.02) and 1.2 < returns[0] < 2.0


@pytest.mark.slow
def test_success_once_and_at_the_end_are_maniskill_s_own() -> None:
    """The same actions in ManiSkill's vector environment with `ignore_terminations`: the script pushes the cube fast,
    through the goal and on, or slowly, and leaves it there."""
    import gymnasium as gym
    import torch
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    spec = TaskSpec(f"maniskill/{NAMES[0]}", control_mode="pd_ee_delta_pos", ignore_terminations=True)
    settings: dict[str, Any] = {
        "obs_mode": "state", "control_mode": "pd_ee_delta_pos", "sim_backend": "physx_cpu", "render_backend": "none",
        "reward_mode": "normalized_dense",
    }  # fmt: skip
    seen = set()
    with closing(make_physics(spec)) as physics:  # which registers the task
        stock = gym.make(NAMES[0], num_envs=1, **settings)
        theirs = ManiSkillVectorEnv(stock, auto_reset=False, ignore_terminations=True, record_metrics=True)
        for seed, speed in ((0, 1.0), (0, 0.4), (2, 0.4)):
            theirs.reset(seed=seed)
            result, info = physics.reset(EpisodeSpec(seed)), {}
            success: list[bool] = []
            while not result.ended:
                action = two_cubes.act(result.state.astype(np.float64), two_cubes.INSTRUCTIONS[0])
                action = action * (speed if len(success) > 6 else 1.0)
                chunk = np.array([[-1, 0, 0, 0] if any(success) else action], np.float32)
                result = physics.step(chunk)
                success.append(bool(result.success[-1]))
                *_, info = theirs.step(torch.from_numpy(chunk))
            assert len(success) == int(info["episode"]["episode_len"]) == physics.info.max_episode_steps
            assert any(success) == bool(info["episode"]["success_once"])
            assert success[-1] == bool(info["episode"]["success_at_end"])
            seen.add((any(success), success[-1]))
        theirs.close()
    assert seen == {(True, False), (True, True)}
