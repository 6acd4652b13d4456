"""`gymnasium/*`: the laws of a backend, equality with the bare environment, and what is refused."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from sim_farm.catalogue import check_task, versions
from sim_farm.conformance.checks import Law, name_of, random_actions
from sim_farm.conformance.physics_laws import PHYSICS_LAWS
from sim_farm.conformance.render_laws import RENDER_LAWS
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics, make_renderer


class Dot(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A dot that is to be moved to the middle of a wide picture; it says so in its info. Actions are [2, 1]."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None, reports: str = "is_success") -> None:
        self.render_mode, self._reports = render_mode, reports
        self.action_space = spaces.Box(np.array([[-1.0], [-0.5]]), np.array([[1.0], [0.5]]), dtype=np.float64)
        box = spaces.Box(-1.0, 1.0, (2,), np.float64)
        away = spaces.Box(0.0, 2.0, (), np.float32)
        self.observation_space: spaces.Space[Any] = spaces.Dict({"where": box, "away": away})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._where = self.np_random.uniform(-1, 1, 2)
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.float64 and self.action_space.contains(action)
        self._where = np.clip(self._where + 0.1 * action[:, 0], -1, 1)
        away = float(np.abs(self._where).max())
        info = {self._reports: np.bool_(away < 0.1)} if self._reports else {}
        return self._seen(), -away, away < 0.1, False, info

    def render(self) -> np.ndarray:
        picture = np.zeros((60, 90, 3), np.uint8)
        row, column = ((self._where + 1) / 2 * (50, 80)).astype(int)
        picture[row : row + 10, column : column + 10] = 50 + 100 * np.abs(np.array([*self._where, 0.5]))
        return picture

    def _seen(self) -> dict[str, np.ndarray]:
        return {"where": self._where.copy(), "away": np.array(np.abs(self._where).max(), np.float32)}


class Without(gymnasium.Env[Any, Any]):
    """An environment of the given spaces, which draws nothing."""

    def __init__(self, action_space: spaces.Space[Any], observation_space: spaces.Space[Any] | None = None) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


def register(name: str, kind: Any, limit: int | None = 50, **arguments: Any) -> None:
    gymnasium.register(f"farm-tests/{name}", entry_point=kind, max_episode_steps=limit, kwargs=arguments)


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
register("Dot-v0", Dot)
register("DotThatSucceeds-v0", Dot, reports="success")
register("DotThatSaysNothing-v0", Dot, reports="")
register("From3-v0", Without, action_space=spaces.Discrete(4, start=3))
register("Endless-v0", Without, limit=None, action_space=BOX)
register("Dictionary-v0", Without, action_space=spaces.Dict(move=BOX, grip=spaces.Discrete(2)))
register("Several-v0", Without, action_space=spaces.Tuple((BOX, BOX)))
register("Choices-v0", Without, action_space=spaces.MultiDiscrete([2, 3]))
register("Unbounded-v0", Without, action_space=spaces.Box(-np.inf, np.inf, (2,)))
register("Text-v0", Without, action_space=BOX, observation_space=spaces.Sequence(BOX))

gymnasium.register("farm-tests/Lacking-v0", entry_point="no_such_package:Env", max_episode_steps=9)

DOT = TaskSpec("gymnasium/farm-tests/Dot-v0", cameras=1, image_size=32)
CART_POLE, PENDULUM = TaskSpec("gymnasium/CartPole-v1"), TaskSpec("gymnasium/Pendulum-v1")


@pytest.mark.parametrize("law", PHYSICS_LAWS, ids=name_of)
@pytest.mark.parametrize("spec", [CART_POLE, PENDULUM, DOT], ids=name_of)
def test_physics_law(law: Law, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.parametrize("law", RENDER_LAWS, ids=name_of)
def test_render_law(law: Law) -> None:
    law(DOT)


@pytest.mark.parametrize("spec", [CART_POLE, PENDULUM, DOT, replace(PENDULUM, max_episode_steps=7)], ids=name_of)
def test_an_episode_is_that_of_the_bare_environment(spec: TaskSpec) -> None:
    """Observations, rewards, ends and pictures, to the end of three episodes, stepped beside it."""
    drawn = "rgb_array" if spec.cameras else None
    bare = gymnasium.make(spec.name.removeprefix("gymnasium/"), spec.max_episode_steps, render_mode=drawn)
    limit = bare.get_wrapper_attr("_max_episode_steps")
    with closing(make_physics(spec)) as physics, closing(make_renderer(spec)) as renderer:
        assert physics.info.max_episode_steps == limit
        for seed in (0, 5, 2**31 - 1):
            seen, ended = physics.reset(EpisodeSpec(seed)), False
            observation, _ = bare.reset(seed=seed)
            for action in random_actions(physics.info, limit, seed):
                assert not ended and np.array_equal(seen.state, flat(observation)) and seen.state.dtype == np.float32
                if spec.cameras:
                    whole: Any = bare.render()
                    own = Image.fromarray(whole).resize((32, 32), Image.Resampling.BILINEAR)
                    assert np.array_equal(renderer.render([seen.scene], ["render"])["render"][0], np.array(own))
                seen = physics.step(action[None])
                observation, reward, terminated, truncated, info = bare.step(own_action(spec, action))
                ended = terminated or truncated
                assert seen.reward[0] == np.float32(reward) and seen.success[0] == info.get("is_success", False)
                assert (seen.terminated[0], seen.truncated[0]) == (terminated, truncated)
                if ended:
                    break
            assert ended and np.array_equal(seen.state, flat(observation))
    bare.close()


def test_a_picture_is_that_of_the_bare_environment() -> None:
    """Of an environment that its authors draw with pygame, and larger than what is asked for."""
    spec = replace(CART_POLE, cameras=1, image_size=64)
    bare = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    with closing(make_physics(spec)) as physics, closing(make_renderer(spec)) as renderer:
        scenes = [physics.reset(EpisodeSpec(3)).scene, physics.step(np.array([[0], [0], [1]], np.float32)).scene]
        bare.reset(seed=3)
        for scene, then in zip(scenes, ((0, 0, 1), ()), strict=True):
            whole: Any = bare.render()
            own = Image.fromarray(whole).resize((64, 64), Image.Resampling.BILINEAR)
            assert np.array_equal(renderer.render([scene], ["render"])["render"][0], np.array(own))
            assert np.array(own).std() > 1
            for action in then:
                bare.step(action)
    bare.close()


def own_action(spec: TaskSpec, action: np.ndarray) -> Any:
    """The action as the bare environment takes it."""
    if spec is CART_POLE:
        return round(float(action[0]))
    return action.astype(np.float64)[:, None] if spec is DOT else action


def flat(observation: Any) -> np.ndarray:
    """A dictionary's parts in the order of their keys' names."""
    parts = [observation[key] for key in sorted(observation)] if isinstance(observation, dict) else [observation]
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)


def test_a_task_says_what_it_acts_by_and_is_measured_by() -> None:
    def info_of(name: str) -> Any:
        with closing(make_physics(TaskSpec(f"gymnasium/{name}"))) as physics:
            return physics.info

    cart, dot = info_of("CartPole-v1"), info_of("farm-tests/Dot-v0")
    assert (cart.discrete_actions, cart.action_dim, cart.action_low, cart.action_high) == (2, 1, (0.0,), (1.0,))
    assert (cart.state_dim, cart.max_episode_steps, cart.control_hz) == (4, 500, 50.0)
    assert (dot.discrete_actions, dot.action_dim, dot.action_high) == (0, 2, (1.0, 0.5)) and dot.state_dim == 3
    assert not cart.has_success and not info_of("farm-tests/DotThatSaysNothing-v0").has_success
    assert dot.has_success and info_of("farm-tests/DotThatSucceeds-v0").has_success


def test_choices_are_counted_from_zero() -> None:
    """Whatever the space begins with; a number that is not whole is the nearest, one beyond the bounds the last."""
    with closing(make_physics(TaskSpec("gymnasium/farm-tests/From3-v0"))) as physics:
        physics.reset(EpisodeSpec(0))
        actions = np.array([[0], [3], [1.4], [-7], [9]], np.float32)
        assert physics.step(actions).reward.tolist() == [3, 6, 4, 3, 6]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec("gymnasium/CartPol-v1"), "unknown task 'gymnasium/CartPol-v1'; did you mean gymnasium/CartPole-v1"),
        (TaskSpec("gymnasium/farm-tests/Dictionary-v0"), r"actions of Dict\(.*one Discrete choice or one Box"),
        (TaskSpec("gymnasium/farm-tests/Several-v0"), r"actions of Tuple\(.*one Discrete choice or one Box"),
        (TaskSpec("gymnasium/farm-tests/Choices-v0"), r"actions of MultiDiscrete\(.*one Discrete choice or one Box"),
        (TaskSpec("gymnasium/farm-tests/Unbounded-v0"), "without bounds: .*RescaleAction"),
        (TaskSpec("gymnasium/farm-tests/Text-v0"), r"observations of Sequence\(.*no fixed length"),
        (TaskSpec("gymnasium/farm-tests/Endless-v0"), "no time limit of its own: set env.max_episode_steps"),
        (TaskSpec("gymnasium/farm-tests/From3-v0", cameras=1), "draws no frames: its render modes are none"),
        (TaskSpec("gymnasium/farm-tests/Lacking-v0"), "cannot be made: .*no_such_package"),
        (replace(DOT, cameras=2), "no 2 cameras, only render"),
    ],
    ids=lambda value: value.name if isinstance(value, TaskSpec) else "",
)
def test_what_cannot_be_is_refused(spec: TaskSpec, message: str) -> None:
    for make in (make_physics, make_renderer):
        with pytest.raises(FarmError, match=message):
            make(spec)


def test_frames_without_the_package_that_draws_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    message = r"CartPole-v1 cannot draw \(pygame is not installed.*embodied-farm\[gymnasium\]"
    with pytest.raises(FarmError, match=message):
        make_physics(replace(CART_POLE, cameras=1))


def test_names_and_versions_are_gymnasiums() -> None:
    check_task("gymnasium/Pendulum-v1")
    check_task("gymnasium/phys2d/CartPole-v0")
    with pytest.raises(FarmError, match="did you mean gymnasium/Pendulum-v1"):
        check_task("gymnasium/Pendulum-v2")
    assert versions("gymnasium") == f"gymnasium {gymnasium.__version__}"
