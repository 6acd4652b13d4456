"""`robosuite/<task>`: tasks of robosuite 1.4 (Lift, Stack, PickPlace, NutAssembly, Door, Wipe, two arms), by Pandas.

The environment is robosuite's own, stepped by its own `step`. It samples its observations within a control step, and
what is drawn is of that moment: so the scene is one more of its observables.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from sim_farm.backends.libero.package import import_robosuite
from sim_farm.backends.mujoco_gl import drawn_by, mujoco
from sim_farm.backends.mujoco_scene import SceneRenderer, camera_names, scene_bytes, scene_of
from sim_farm.contract import Backend, EpisodeOver, EpisodeSpec, FarmError, Float32, PhysicsResult, TaskInfo, TaskSpec

import_robosuite()  # whose import would choose how this process draws

import robosuite  # noqa: E402
from robosuite.utils.errors import RandomizationError  # noqa: E402
from robosuite.utils.observables import Observable, sensor  # noqa: E402

CONTROL_MODES = ("osc_pose", "osc_position", "joint_position", "joint_velocity")
CONTROL_HZ = 20.0
LIMIT = 500
"""Env steps of an episode in robosuite's own benchmark."""
CAMERAS = ("agentview", "robot0_eye_in_hand")
COLLISION_GROUP = 0
"""Geoms of this group are collision shapes, which robosuite does not draw."""
FIELDS = ("body_pos", "body_quat", "site_pos", "site_rgba", "geom_rgba")
"""Arrays of the model that resets and rewards write to (tests/test_example_simulators.py looks at every one)."""


class RobosuitePhysics:
    """One environment of a robosuite task, with robosuite's own noise of the robot's first pose.

    An episode is what an environment plays whose random numbers begin with `np.random.seed(episode.seed)`. Sizes that
    robosuite draws when it loads a model (Lift's cube: 4.0 to 4.4 cm) are those of one load, the same for all. Actions are
    those of the controller (`osc_pose`: 5 cm and 0.5 rad of the hand's goal, and the gripper; two arms one after the
    other), in [-1, 1]. The state is the robots' proprioception and the objects' observations; proprioception is the
    position and orientation (x, y, z, w) of each hand and its fingers' positions. Success ends an episode unless
    terminations are ignored. Dense reward is robosuite's shaped one (at most 1), sparse is 1 where the task is solved.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.info = describe(spec)
        self._env = _environment(*_build_of(self.info.spec), shaped=self.info.spec.reward == "dense")
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        self._pristine = {name: getattr(_model(*_build_of(self.info.spec)), name) for name in FIELDS}
        if self.info.cameras:
            self._env.add_observable(Observable("scene", self._scene_sensor(), sampling_rate=CONTROL_HZ))
        self._steps_left = 0

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        for robot in self._env.robots:
            grippers = robot.gripper.values() if isinstance(robot.gripper, dict) else [robot.gripper]
            for gripper in grippers:
                gripper.current_action = np.zeros(len(gripper.actuators))
        with _callers_generator():
            np.random.seed(episode.seed)
            observations = self._drawn()
        self._steps_left = self.info.max_episode_steps
        return self._result(observations, [], [], terminated=False)

    def step(self, actions: Float32) -> PhysicsResult:
        if not self._steps_left:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        solved: list[bool] = []
        terminated, observations = False, {}
        low, high = np.array(self.info.action_low), np.array(self.info.action_high)
        for action in np.clip(actions.astype(np.float64), low, high):
            observations, reward, _, _ = self._env.step(action)
            solved.append(bool(self._env._check_success()))
            rewards.append(float(solved[-1]) if self.info.spec.reward == "sparse" else float(reward))
            self._steps_left -= 1
            terminated = solved[-1] and not self.info.spec.ignore_terminations
            if terminated or not self._steps_left:
                break
        result = self._result(observations, rewards, solved, terminated)
        if terminated:
            self._steps_left = 0
        return result

    def close(self) -> None:
        self._env.close()
        self._steps_left = 0

    def _drawn(self) -> Any:
        """Observations of an episode's beginning. Where an object finds no room robosuite raises: it is asked again."""
        while True:
            for name, values in self._pristine.items():
                getattr(self._model, name)[...] = values
            try:
                return self._env.reset()
            except RandomizationError:
                continue

    def _scene_sensor(self) -> Any:
        @sensor(modality="picture")
        def scene(_: Any) -> Any:
            return scene_of(self._data).view(np.float64)

        return scene

    def _result(self, observations: Any, rewards: list[float], solved: list[bool], terminated: bool) -> PhysicsResult:
        ends = np.zeros((2, len(rewards)), np.bool_)
        if rewards:
            ends[:, -1] = terminated, not terminated and not self._steps_left
        proprio, state = _seen(observations)
        return PhysicsResult(
            reward=np.array(rewards, np.float32),
            success=np.array(solved, np.bool_),
            terminated=ends[0],
            truncated=ends[1],
            proprio=proprio,
            state=state,
            scene=observations["scene"].view(np.uint8).copy() if self.info.cameras else np.zeros(0, np.uint8),
            instruction=re.sub("(?<!^)([A-Z])", r" \1", self.info.spec.name.partition("/")[2]).lower(),
        )


class RobosuiteRenderer(SceneRenderer):
    """Draws what the camera observations of a stock environment show."""

    def __init__(self, spec: TaskSpec) -> None:
        info = describe(spec)
        super().__init__(info, copy.copy(_model(*_build_of(info.spec))), hidden_groups=(COLLISION_GROUP,))


def describe(spec: TaskSpec) -> TaskInfo:
    """All sizes of the task. Raises `FarmError` for a control mode or a camera that it has not."""
    mode = spec.control_mode or CONTROL_MODES[0]
    if mode not in CONTROL_MODES:
        raise FarmError(f"{spec.name} has no control mode {mode!r}; valid: {', '.join(CONTROL_MODES)}")
    spec = replace(spec, control_mode=mode, max_episode_steps=spec.max_episode_steps or LIMIT)
    sizes, model = _sizes(*_build_of(spec)), _model(*_build_of(spec))
    cameras = camera_names(spec, model, first=CAMERAS)
    return TaskInfo(
        spec=replace(spec, cameras=cameras),
        scene_bytes=scene_bytes(model) if cameras else 0,
        cameras=cameras,
        max_episode_steps=spec.max_episode_steps,
        control_hz=CONTROL_HZ,
        stock_upside_down=True,
        **sizes,
    )


def _seen(observations: Any) -> tuple[Float32, Float32]:
    """[P] proprioception and [S] state."""
    robots = sorted(name.removesuffix("_proprio-state") for name in observations if name.endswith("_proprio-state"))
    parts = ("eef_pos", "eef_quat", "gripper_qpos")
    felt = [observations[f"{robot}_{part}"] for robot in robots for part in parts if f"{robot}_{part}" in observations]
    state = [*(observations[f"{robot}_proprio-state"] for robot in robots), observations["object-state"]]
    return np.concatenate(felt, dtype=np.float32), np.concatenate(state, dtype=np.float32)


def _build_of(spec: TaskSpec) -> tuple[str, str]:
    """What an environment is built by: the task, the control mode."""
    return spec.name.partition("/")[2], str(spec.control_mode)


@functools.cache
def _built(task: str, control_mode: str) -> tuple[mujoco.MjModel, dict[str, Any]]:
    """The task's model as a reset leaves it, which hides marks, and the sizes that an environment alone knows."""
    env = _environment(task, control_mode, shaped=True)
    with _callers_generator():
        np.random.seed(0)
        proprio, state = _seen(env.reset())
    model = copy.copy(env.sim.model._model)
    low, high = env.action_spec
    env.close()
    return model, {
        "action_dim": len(low),
        "action_low": tuple(low.tolist()),
        "action_high": tuple(high.tolist()),
        "proprio_dim": len(proprio),
        "state_dim": len(state),
    }


def _model(task: str, control_mode: str) -> mujoco.MjModel:
    return _built(task, control_mode)[0]


def _sizes(task: str, control_mode: str) -> dict[str, Any]:
    return _built(task, control_mode)[1]


def _environment(task: str, control_mode: str, shaped: bool) -> Any:
    arms = 2 if task.startswith("TwoArm") else 1
    with _callers_generator():
        np.random.seed(0)  # its constructor draws the sizes of objects, and a beginning that nobody plays
        return robosuite.make(
            task,
            robots=["Panda"] * arms,
            controller_configs=robosuite.load_controller_config(default_controller=control_mode.upper()),
            control_freq=int(CONTROL_HZ),
            reward_shaping=shaped,
            use_camera_obs=False,
            has_renderer=False,
            has_offscreen_renderer=False,
            ignore_done=True,
            hard_reset=False,
        )


@contextmanager
def _callers_generator() -> Iterator[None]:
    """Within the block NumPy's global generator may be drawn from; afterwards it is where it was."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


BACKEND = Backend(
    "robosuite", RobosuitePhysics, RobosuiteRenderer, tasks=lambda: list(robosuite.ALL_ENVIRONMENTS), drawn_by=drawn_by
)
