"""Compares the tasks of a simulator of examples/ with stock environments, bit for bit: python stock_examples.py NAME.

It is run where the example is installed, so it imports nothing of the tests. States, rewards and pictures are those
after a reset of a used environment and after each of a dozen env steps; of Meta-World, states and rewards also those of
a whole episode of its scripted expert, which touches and moves what the task has.
"""

from __future__ import annotations

import copy
import importlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from sim_farm.backends.mujoco_gl import mujoco, platform
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.registry import make_physics, make_renderer

SIZE, SEED, STEPS = 64, 9, 12


class Stock:
    """A stock environment: `reset`, `step` and `frame` as its package has them, and MuJoCo's model."""

    camera: str
    model: Any
    fields: tuple[str, ...] = ()
    """Arrays of the model that the example restores; all that resets and steps change must be among them."""

    def reset(self) -> np.ndarray:
        raise NotImplementedError

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float]:
        raise NotImplementedError

    def frame(self) -> np.ndarray:
        raise NotImplementedError

    def expert(self, state: np.ndarray) -> np.ndarray | None:
        """The scripted expert's action; None where there is no expert."""
        return None

    def close(self) -> None: ...


class MetaWorld(Stock):
    camera = "corner2"

    def __init__(self, name: str) -> None:
        from metaworld.policies import ENV_POLICY_MAP
        from metaworld_farm.simulator import ALL_V3_ENVIRONMENTS, FIELDS

        self._expert: Any = ENV_POLICY_MAP[name]()
        self.env: Any = ALL_V3_ENVIRONMENTS[name](
            render_mode="rgb_array", camera_name=self.camera, width=SIZE, height=SIZE
        )
        self.model, self.fields = self.env.model, FIELDS
        self.env._set_task_called, self.env._partially_observable = True, False
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True
        del self.env.sawyer_observation_space

    def reset(self) -> np.ndarray:
        self.env.seed(SEED)
        return self.env.reset()[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float]:
        state, reward, *_ = self.env.step(action)
        return state, reward / 10

    def frame(self) -> np.ndarray:
        return self.env.render()

    def expert(self, state: np.ndarray) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that actions are clipped
            return np.clip(self._expert.get_action(state), -1.0, 1.0)

    def close(self) -> None:
        self.env.close()


class Robotics(Stock):
    camera = "default"

    def __init__(self, name: str) -> None:
        from gymnasium_robotics_farm import FETCH, GOALS, kitchen_env

        drawn: dict[str, Any] = {"render_mode": "rgb_array", "width": SIZE, "height": SIZE}
        if name in FETCH:
            self.env: Any = FETCH[name](reward_type="dense", **drawn)
        else:
            goal = name.partition("-")[2]
            self.env = kitchen_env.KitchenEnv([GOALS[goal]] if goal else list(GOALS.values()), **drawn)
        self.model = self.env.model
        # The mark of the goal is moved in the model before each picture, which is then drawn by it.
        self.fields = ("site_pos",)

    def reset(self) -> np.ndarray:
        return self._flat(self.env.reset(seed=SEED)[0])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float]:
        observation, reward, *_ = self.env.step(action)
        return self._flat(observation), reward / (len(self.env.goal) if isinstance(self.env.goal, dict) else 1)

    def frame(self) -> np.ndarray:
        # Looking at Fetch computes its kinematics and forces again, which the next env step and observation then read.
        kept = copy.copy(self.env.data)
        drawn = self.env.render()
        mujoco.mj_copyData(self.env.data, self.model, kept)
        return drawn

    def _flat(self, observation: Any) -> np.ndarray:
        from gymnasium import spaces

        return np.asarray(spaces.flatten(self.env.observation_space, observation))

    def close(self) -> None:
        self.env.close()


class Robosuite(Stock):
    camera = "agentview"

    def __init__(self, name: str) -> None:
        import robosuite_farm
        from robosuite.utils import binding_utils

        # The example imports robosuite without a platform for drawing; stock environments need one.
        kind = {"egl": "EGLGLContext", "osmesa": "OSMesaGLContext"}[platform()]
        context = importlib.import_module(f"robosuite.renderers.context.{platform()}_context")
        binding_utils.GLContext = getattr(context, kind)
        self.seen: Any = robosuite_farm._seen
        np.random.seed(0)
        self.env: Any = robosuite_farm.robosuite.make(
            name,
            robots=["Panda"] * (2 if name.startswith("TwoArm") else 1),
            controller_configs=robosuite_farm.robosuite.load_controller_config(default_controller="OSC_POSE"),
            control_freq=20,
            reward_shaping=True,
            use_camera_obs=True,
            has_renderer=False,
            camera_names=self.camera,
            camera_heights=SIZE,
            camera_widths=SIZE,
            ignore_done=True,
            hard_reset=False,
        )
        self.model, self.fields = self.env.sim.model._model, robosuite_farm.FIELDS
        self.drawn = np.zeros(0)

    def reset(self) -> np.ndarray:
        np.random.seed(SEED)
        random.seed(SEED)
        return self._state(self.env.reset())

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float]:
        observations, reward, *_ = self.env.step(action)
        return self._state(observations), reward

    def frame(self) -> np.ndarray:
        return self.drawn[::-1]

    def _state(self, observations: Any) -> np.ndarray:
        self.drawn = observations[f"{self.camera}_image"]
        return self.seen(observations)[1]

    def close(self) -> None:
        self.env.close()


def changed(before: Any, after: Any) -> Iterator[str]:
    """Names of the model's arrays that differ."""
    for name in dir(before):
        one, two = getattr(before, name), getattr(after, name)
        if isinstance(one, np.ndarray) and one.tobytes() != two.tobytes():
            yield name


def differences(stock: Stock, task: str) -> list[str]:
    """What differs between the stock environment and the example's task, in words.

    Stock is run to its end first: of two drawing libraries in turn, one may read what the other has drawn.
    """
    spec = TaskSpec(task, cameras=(stock.camera,), image_size=SIZE)
    physics = make_physics(spec)
    drawn = np.random.default_rng(1).uniform(-1, 1, (2, STEPS, physics.info.action_dim)).astype(np.float32)
    stock.reset()
    compiled = copy.copy(stock.model)
    seen = [(stock.reset(), 0.0, stock.frame().copy())]
    seen += [(*stock.step(action.astype(np.float64)), stock.frame().copy()) for action in drawn[1]]
    found = [f"{name} of the model changes" for name in changed(compiled, stock.model) if name not in stock.fields]
    stock.close()
    renderer = make_renderer(spec)
    physics.reset(EpisodeSpec(SEED + 1))
    physics.step(drawn[0])
    result = physics.reset(EpisodeSpec(SEED))
    for number, (state, reward, frame) in enumerate(seen):
        if number:
            result = physics.step(drawn[1][number - 1 : number])
            if result.reward[0] != np.float32(reward):
                found.append(f"reward of step {number}: {result.reward[0]}, {reward}")
        if not np.array_equal(result.state, state.astype(np.float32)):
            found.append(f"state after {number} steps")
        if not np.array_equal(renderer.render([result.scene], (stock.camera,))[stock.camera][0], frame):
            found.append(f"picture after {number} steps")
        if result.ended:
            break
    renderer.close()
    physics.close()
    return found


def episode_differences(stock: Stock, task: str) -> list[str]:
    """What differs within the expert's episode, in words; nothing where there is no expert."""
    state = stock.reset()
    if stock.expert(state) is None:
        return []
    physics = make_physics(TaskSpec(task, ignore_terminations=True))
    result, found = physics.reset(EpisodeSpec(SEED)), []
    for step in range(1, physics.info.max_episode_steps + 1):
        action = np.asarray(stock.expert(state), np.float32)
        state, reward = stock.step(action.astype(np.float64))
        result = physics.step(action[None])
        if not np.array_equal(result.state, state.astype(np.float32)) or result.reward[0] != np.float32(reward):
            found.append(f"state or reward of the expert's step {step}")
            break
    physics.close()
    return found


def main(example: str) -> None:
    kind = {"metaworld": MetaWorld, "robosuite": Robosuite, "gymnasium_robotics": Robotics}[example]
    module = f"{example}_farm"
    os.environ["MUJOCO_GL"] = platform()  # stock renderers ask for a window elsewhere
    print("MuJoCo", mujoco.__version__, "drawn by", platform())
    equal = 0
    for name in importlib.import_module(module).BACKEND.tasks():
        if name.endswith("-goal-hidden"):
            continue
        task = f"{module}:BACKEND/{name}"
        found = differences(kind(name), task) + episode_differences(kind(name), task)
        print(name, ", ".join(found) or "equal", flush=True)
        equal += not found
    print(f"equal: {equal} tasks")


if __name__ == "__main__":
    main(sys.argv[1])
