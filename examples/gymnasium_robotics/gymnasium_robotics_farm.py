"""`robotics/<task>`: Gymnasium-Robotics' Fetch (reach, push, slide, pick and place) and its Franka kitchen.

`robotics/FrankaKitchen` is solved when all seven of its goals have been reached in the episode,
`robotics/FrankaKitchen-kettle` (or another goal) when that one has been.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

# Imported before the environments, whose own import of MuJoCo would choose how this process draws.
from sim_farm.backends.mujoco_gl import drawn_by, mujoco
from sim_farm.backends.mujoco_scene import SceneRenderer, camera_names, scene_bytes, scene_of
from sim_farm.contract import Backend, EpisodeOver, EpisodeSpec, FarmError, Float32, PhysicsResult, TaskInfo, TaskSpec

from gymnasium_robotics.envs.fetch import fetch_env, pick_and_place, push, reach, slide  # isort: skip
from gymnasium_robotics.envs.franka_kitchen import franka_env, kitchen_env  # isort: skip

FETCH = {
    "FetchReach": reach.MujocoFetchReachEnv,
    "FetchPush": push.MujocoFetchPushEnv,
    "FetchSlide": slide.MujocoFetchSlideEnv,
    "FetchPickAndPlace": pick_and_place.MujocoFetchPickAndPlaceEnv,
}
KITCHEN = "FrankaKitchen"
GOALS = {goal.replace(" ", "-"): goal for goal in kitchen_env.OBS_ELEMENT_GOALS}
"""The kitchen's goals, by what a task's name says of them."""
TASKS = [*FETCH, KITCHEN, *(f"{KITCHEN}-{goal}" for goal in GOALS)]
LIMITS = {"Fetch": 50, "Franka": 280}
"""Env steps of an episode, as the environments are registered with Gymnasium."""
VIEW = "default"
"""The camera of the environments' own pictures, which is in no model."""


class RoboticsPhysics:
    """One environment of a Fetch or kitchen task.

    An episode is what `env.reset(seed=...)` and the actions make it. Actions are the environment's own in [-1, 1]
    (Fetch: 5 cm of the hand and the gripper; kitchen: nine joint velocities). The state is the observation, its parts
    in the order of their names, flattened: what is achieved, the goal, the rest. There is no proprioception. Success
    ends an episode unless terminations are ignored. Dense reward is minus the distance in m (Fetch), or the share of
    the kitchen's goals that the env step reached; sparse is 1 where the task is solved.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.info = describe(spec)
        self._env = _environment(_name(spec))
        self._goal_mark = mujoco.MjData(self._env.model)
        self._steps_left = 0

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        observation, _ = self._env.reset(seed=episode.seed)
        self._steps_left = self.info.max_episode_steps
        return self._result(observation, [], [], terminated=False)

    def step(self, actions: Float32) -> PhysicsResult:
        if not self._steps_left:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        solved: list[bool] = []
        terminated, observation = False, None
        for action in np.clip(actions, -1.0, 1.0).astype(np.float64):
            observation, reward, _, _, info = self._env.step(action)
            solved.append(self._solved(info))
            rewards.append(float(solved[-1]) if self.info.spec.reward == "sparse" else self._dense(reward))
            self._steps_left -= 1
            terminated = solved[-1] and not self.info.spec.ignore_terminations
            if terminated or not self._steps_left:
                break
        result = self._result(observation, rewards, solved, terminated)
        if terminated:
            self._steps_left = 0
        return result

    def close(self) -> None:
        self._env.close()
        self._steps_left = 0

    def _solved(self, info: dict[str, Any]) -> bool:
        if "is_success" in info:
            return bool(info["is_success"])
        return len(info["episode_task_completions"]) == len(self._env.goal)

    def _dense(self, reward: float) -> float:
        return float(reward) / (len(self._env.goal) if isinstance(self._env, kitchen_env.KitchenEnv) else 1)

    def _scene(self) -> Any:
        """Fetch shows its goal by moving a site of the model and computing all forces again; here in a copy of the
        data, so that looking changes nothing."""
        env = self._env
        if isinstance(env, kitchen_env.KitchenEnv):
            return scene_of(env.data)
        shown, site = self._goal_mark, env.model.site("target0").id
        env.model.site_pos[site] = env.goal - (env.data.site_xpos - env.model.site_pos)[0]
        shown.qpos[:], shown.mocap_pos[:], shown.mocap_quat[:] = env.data.qpos, env.data.mocap_pos, env.data.mocap_quat
        mujoco.mj_kinematics(env.model, shown)
        mujoco.mj_comPos(env.model, shown)
        mujoco.mj_camlight(env.model, shown)
        return scene_of(shown)

    def _result(self, observation: Any, rewards: list[float], solved: list[bool], terminated: bool) -> PhysicsResult:
        ends = np.zeros((2, len(rewards)), np.bool_)
        if rewards:
            ends[:, -1] = terminated, not terminated and not self._steps_left
        name = _name(self.info.spec)
        return PhysicsResult(
            reward=np.array(rewards, np.float32),
            success=np.array(solved, np.bool_),
            terminated=ends[0],
            truncated=ends[1],
            proprio=np.zeros(0, np.float32),
            state=spaces.flatten(self._env.observation_space, observation).astype(np.float32),
            scene=self._scene() if self.info.cameras else np.zeros(0, np.uint8),
            instruction=INSTRUCTIONS[name] if name in INSTRUCTIONS else f"kitchen: {GOALS[name.partition('-')[2]]}",
        )


INSTRUCTIONS = {
    "FetchReach": "reach the mark",
    "FetchPush": "push the block to the mark",
    "FetchSlide": "hit the puck so that it slides to the mark",
    "FetchPickAndPlace": "put the block where the mark is",
    KITCHEN: "kitchen: everything",
}
"""The environments have none; the kitchen's goals are named."""


class RoboticsRenderer(SceneRenderer):
    """Draws what a stock environment's `rgb_array` shows (camera `default`), and the model's own cameras."""

    def __init__(self, spec: TaskSpec) -> None:
        module = franka_env if _name(spec).startswith(KITCHEN) else fetch_env
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FREE
        for name, value in module.DEFAULT_CAMERA_CONFIG.items():
            setattr(view, name, value)
        super().__init__(describe(spec), copy.copy(_made(_name(spec)).model), views={VIEW: view})


def describe(spec: TaskSpec) -> TaskInfo:
    """All sizes of the task. Raises `FarmError` for a control mode or a camera that it has not."""
    name = _name(spec)
    mode = "joint_velocity" if name.startswith(KITCHEN) else "ee_delta_pos"
    if spec.control_mode not in (None, mode):
        raise FarmError(f"{spec.name} has no control mode {spec.control_mode!r}; valid: {mode}")
    env = _made(name)
    cameras = camera_names(spec, env.model, first=(VIEW,))
    limit = spec.max_episode_steps or next(limit for family, limit in LIMITS.items() if name.startswith(family))
    size = env.action_space.shape[0]
    return TaskInfo(
        spec=replace(spec, control_mode=mode, max_episode_steps=limit, cameras=cameras),
        action_dim=size,
        action_low=(-1.0,) * size,
        action_high=(1.0,) * size,
        proprio_dim=0,
        state_dim=spaces.flatdim(env.observation_space),
        scene_bytes=scene_bytes(env.model) if cameras else 0,
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=float(env.metadata["render_fps"]),
    )


def _name(spec: TaskSpec) -> str:
    return spec.name.partition("/")[2]


@functools.cache
def _made(name: str) -> Any:
    """An environment of the task that nobody steps: what there is to know of it, and its model."""
    return _environment(name)


def _environment(name: str) -> Any:
    if name in FETCH:
        return FETCH[name](reward_type="dense")
    goal = name.removeprefix(KITCHEN).removeprefix("-")
    return kitchen_env.KitchenEnv(
        tasks_to_complete=[GOALS[goal]] if goal else list(GOALS.values()), terminate_on_tasks_completed=False
    )


BACKEND = Backend("robotics", RoboticsPhysics, RoboticsRenderer, tasks=lambda: TASKS, drawn_by=drawn_by)
