"""Films: an episode and its actions, drawn afterwards, show what was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from sim_farm.client.episode_replay import Replayer
from sim_farm.conformance.checks import random_actions
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics, make_renderer

PUSH = TaskSpec("tabletop/push", cameras=2, image_size=24, max_episode_steps=8)
EPISODE = EpisodeSpec(4)


@pytest.fixture(scope="module")
def replayer() -> Iterator[Replayer]:
    with closing(Replayer(PUSH)) as replayer:
        yield replayer


@pytest.fixture(scope="module")
def actions() -> np.ndarray:
    with closing(make_physics(PUSH)) as physics:
        return random_actions(physics.info, 8)


@pytest.fixture(scope="module")
def pictures(actions: np.ndarray) -> np.ndarray:
    """What the task's first camera shows at the start and after each action."""
    with closing(make_physics(PUSH)) as physics, closing(make_renderer(PUSH)) as renderer:
        scenes = [physics.reset(EPISODE).scene, *(physics.step(action[None]).scene for action in actions)]
        return renderer.render(scenes, ["front"])["front"]


@pytest.mark.parametrize(
    ("count", "every", "shown"),
    [(8, 1, range(9)), (8, 3, (0, 3, 6, 8)), (6, 3, (0, 3, 6)), (2, 5, (0, 2)), (0, 1, (0,))],
)
def test_a_film_shows_the_start_every_nth_step_and_the_end(
    replayer: Replayer, actions: np.ndarray, pictures: np.ndarray, count: int, every: int, shown: tuple[int, ...]
) -> None:
    film = replayer.film(EPISODE, actions[:count], every)
    assert len(film) == len(shown)
    for frame, index in zip(film, shown, strict=True):
        assert np.array_equal(frame, pictures[index]), f"the film shows something else after {index} steps"


def test_a_film_ends_with_its_episode(replayer: Replayer, actions: np.ndarray, pictures: np.ndarray) -> None:
    film = replayer.film(EPISODE, np.concatenate([actions, actions]), every=5)
    assert len(film) == 3 and np.array_equal(film[-1], pictures[-1])


def test_a_replayer_can_be_used_again(replayer: Replayer, actions: np.ndarray) -> None:
    first = replayer.film(EPISODE, actions)
    replayer.film(EpisodeSpec(5), actions[:3])
    assert np.array_equal(first, replayer.film(EPISODE, actions))


def test_a_task_without_a_camera_cannot_be_filmed(actions: np.ndarray) -> None:
    with (
        closing(Replayer(TaskSpec("tabletop/push"))) as blind,
        pytest.raises(FarmError, match="tabletop/push has no camera to film with"),
    ):
        blind.film(EPISODE, actions)
