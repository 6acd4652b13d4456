"""Meta-World's environments behind the simulator contract: physics, description, renderer."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np

# Imported before Meta-World, whose own import of MuJoCo would choose how this process draws.
from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.backends.mujoco_scene import SceneRenderer, camera_names, scene_bytes, scene_of
from sim_farm.contract import EpisodeOver, EpisodeSpec, FarmError, Float32, PhysicsResult, TaskInfo, TaskSpec

from metaworld_farm.speed import quick_functions, speed_up  # isort: skip
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # isort: skip

HIDDEN = "-goal-hidden"
CAMERAS = ("corner2", "gripperPOV")
"""The camera of most published results, and the one at the hand; the others follow."""
CONTROL_MODE = "ee_delta_pos"
CONTROL_HZ = 80.0
"""5 simulation steps of 2.5 ms per env step."""
MOST_REWARD = 10.0
"""Meta-World's reward where a task is solved."""
PROPRIO = 4
"""Leading numbers of the observation: the hand's position (3) and how far the gripper is open."""
FIELDS = ("body_pos", "site_pos")
"""Arrays of the model that Meta-World's resets write to (tests/stock_examples.py looks at every one)."""


def task_names() -> list[str]:
    return [name + ending for ending in ("", HIDDEN) for name in ALL_V3_ENVIRONMENTS]


class MetaWorldPhysics:
    """One environment of a Meta-World task.

    An episode is what a new stock environment plays after `seed(episode.seed)`: Meta-World's `reset(seed=...)` ignores
    its seed. What an episode leaves behind, in the environment and in the model, ends with it. Actions are
    [dx, dy, dz, grip] in [-1, 1], 1 cm of the hand's set point; -1 opens, 1 closes. The state is the observation
    (39 numbers: hand, gripper and objects now and one env step before, and the goal), proprioception its first 4.

    Success ends an episode unless terminations are ignored; Meta-World's own never do. Dense reward is a tenth of
    Meta-World's, which is 10 where the task is solved; sparse is 1 there and 0 elsewhere.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.info = describe(spec)
        self._class, self._hides_goal = _task_of(spec)
        self._model = copy.copy(_model(self._class))
        self._data = mujoco.MjData(self._model)
        self._env: Any = None
        self._steps_left = 0

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        for name in FIELDS:
            getattr(self._model, name)[...] = getattr(_model(self._class), name)
        mujoco.mj_resetData(self._model, self._data)
        self._env = _environment(self._class, self._model, self._data)
        self._env.max_path_length = self._steps_left = self.info.max_episode_steps
        # As Meta-World's `set_task` does it, but that the goal is drawn from the seed in place of being given.
        self._env._set_task_called, self._env._partially_observable = True, self._hides_goal
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True
        del self._env.sawyer_observation_space
        self._env.seed(episode.seed)
        observation, _ = self._env.reset()
        return self._result(observation, [], [], terminated=False)

    def step(self, actions: Float32) -> PhysicsResult:
        if not self._steps_left:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        solved: list[bool] = []
        terminated = False
        observation = None
        with quick_functions(self._class):
            for action in np.clip(actions, -1.0, 1.0).astype(np.float64):
                observation, reward, _, _, info = self._env.step(action)
                solved.append(bool(info["success"]))
                rewards.append(float(solved[-1]) if self.info.spec.reward == "sparse" else float(reward) / MOST_REWARD)
                self._steps_left -= 1
                terminated = solved[-1] and not self.info.spec.ignore_terminations
                if terminated or not self._steps_left:
                    break
        result = self._result(observation, rewards, solved, terminated)
        if terminated:
            self._steps_left = 0
        return result

    def close(self) -> None:
        self._env, self._steps_left = None, 0

    def _result(self, observation: Any, rewards: list[float], solved: list[bool], terminated: bool) -> PhysicsResult:
        ends = np.zeros((2, len(rewards)), np.bool_)
        if rewards:
            ends[:, -1] = terminated, not terminated and not self._steps_left
        state = observation.astype(np.float32)
        return PhysicsResult(
            reward=np.array(rewards, np.float32),
            success=np.array(solved, np.bool_),
            terminated=ends[0],
            truncated=ends[1],
            proprio=state[:PROPRIO].copy(),
            state=state,
            scene=scene_of(self._data) if self.info.cameras else np.zeros(0, np.uint8),
            instruction=instruction_of(self.info.spec.name),
        )


class MetaWorldRenderer(SceneRenderer):
    """Draws what a stock environment's `rgb_array` shows; the camera `corner2` hangs upside down, and so do its
    pictures."""

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(describe(spec), copy.copy(_model(_task_of(spec)[0])))


def describe(spec: TaskSpec) -> TaskInfo:
    """All sizes of the task. Raises `FarmError` for a control mode or a camera that it has not."""
    if spec.control_mode not in (None, CONTROL_MODE):
        raise FarmError(f"{spec.name} has no control mode {spec.control_mode!r}; valid: {CONTROL_MODE}")
    task = _task_of(spec)[0]
    model = _model(task)
    cameras = camera_names(spec, model, first=CAMERAS)
    limit = spec.max_episode_steps or task.max_path_length
    return TaskInfo(
        spec=replace(spec, control_mode=CONTROL_MODE, max_episode_steps=limit, cameras=cameras),
        action_dim=4,
        action_low=(-1.0,) * 4,
        action_high=(1.0,) * 4,
        proprio_dim=PROPRIO,
        state_dim=39,
        scene_bytes=scene_bytes(model) if cameras else 0,
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=CONTROL_HZ,
    )


def instruction_of(task: str) -> str:
    """The task's name in words: Meta-World has no instructions."""
    return task.partition("/")[2].removesuffix(HIDDEN).removesuffix("-v3").replace("-", " ")


def _task_of(spec: TaskSpec) -> tuple[type[Any], bool]:
    """The class of the task's environment, and whether its state hides the goal."""
    name = spec.name.partition("/")[2]
    return ALL_V3_ENVIRONMENTS[name.removesuffix(HIDDEN)], name.endswith(HIDDEN)


@functools.cache
def _model(task: type[Any]) -> mujoco.MjModel:
    """The task's model as a new environment has it; compiling takes longer than an episode's beginning."""
    return task().model


def _environment(task: type[Any], model: mujoco.MjModel, data: mujoco.MjData) -> Any:
    """A new environment around what is compiled already."""
    env = task.__new__(task)
    env._initialize_simulation = lambda: (model, data)
    env.__init__()
    speed_up(env)
    return env
