"""Steps one LIBERO environment; never draws, and needs no OpenGL library."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.control import SIMULATION_STEPS, Control, ObservationClock, control_of
from sim_farm.backends.libero.data_wheels import task_of
from sim_farm.backends.libero.environment import (
    ModelUser,
    Position,
    SceneLayout,
    SharedModel,
    build_environment,
    build_variant,
    callers_generator,
    camera_names,
    fast_contact_check,
    forget_contacts,
    free,
    parts,
    shared_model,
    stream_of,
    visual_states,
)
from sim_farm.backends.libero.recordings import STATE, RecordedModel, continue_control, state_deviation
from sim_farm.backends.libero.reward import Progress
from sim_farm.backends.libero.tasks import LiberoTask, find_task, initial_states, task_files
from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.contract import (
    EpisodeOver,
    EpisodeSpec,
    FarmError,
    Float32,
    PhysicsResult,
    SceneChange,
    SimulatorState,
    TaskInfo,
    TaskSpec,
)
from sim_farm.perturbations import HomePosture, RobotOffset, TaskFile, direction

CONTROL_MODES = ("osc_pose",)
ACTION_DIM = 7
ROBOT_STATE = 25
"""Leading numbers of the state that belong to the robot."""


@dataclass(frozen=True)
class _Loaded:
    """robosuite's environment of a task file, and what is read of it once."""

    task: LiberoTask
    env: Any
    user: ModelUser
    visible: list[tuple[Any, Any]]
    """For each part its sites that the task's logic shows or hides, and how they begin."""
    samplers: list[Any]
    layout: SceneLayout | None
    sensors: _Sensors
    progress: Progress | None
    recorded_model: RecordedModel
    home: Any


class LiberoPhysics:
    """One environment of a LIBERO task.

    Actions are [dx, dy, dz, rx, ry, rz, grip] in [-1, 1]: 5 cm and 0.5 rad of the end effector's goal, -1
    opens the gripper, 1 closes it. The reward is 1 where the task is solved, which ends the episode unless terminations
    are ignored; elsewhere 0, or,
    dense, what the goal's progress has gained in the env step (progress.py).

    Proprioception is end effector position (3) and axis-angle (3) and finger positions (2): what VLA policies
    read. The state is end effector position and quaternion (x, y, z, w), finger positions, joint positions and
    velocities, finger velocities (25 numbers), then position and quaternion of every movable object, then of
    every fixture with its joints' positions. Both are of the moment at which robosuite samples its
    observations, which is that of the picture.
    """

    def __init__(self, spec: TaskSpec) -> None:
        task = find_task(spec.name)
        shared = shared_model(task)
        self.info = describe(spec, task, shared)
        user = ModelUser(shared)
        self._current: _Loaded | None = None
        self._own: _Loaded | None = self._loaded(task, build_environment(task, user), user)
        self._use(self._own)
        self._episode = EpisodeSpec(0)
        self._done = 0.0
        """The goal's progress after the last env step, where the reward is dense."""
        self._clock = ObservationClock()
        self._control: Control | None = None
        self._steps_left = 0
        self._recorded = False
        """True if a recording is followed: to its end, solved or not."""
        self._seen: PhysicsResult | None = None

    def _loaded(self, task: LiberoTask, env: Any, user: ModelUser) -> _Loaded:
        env.check_contact = fast_contact_check(env)
        # Its predicates look the same addresses up in every env step, by names.
        env.sim.model.get_joint_qpos_addr = functools.cache(env.sim.model.get_joint_qpos_addr)
        return _Loaded(
            task,
            env,
            user,
            visible=[(shown, dict(shown)) for shown in visual_states(env)],
            samplers=list(env.object_property_initializers),
            layout=SceneLayout(user.shared) if self.info.cameras else None,
            sensors=_Sensors(env),
            progress=Progress(env) if self.info.spec.reward == "dense" else None,
            recorded_model=RecordedModel(env),
            home=env.robots[0].init_qpos,
        )

    def _use(self, loaded: _Loaded) -> None:
        """Go on with that environment: the task's own, or that of another file of its objects, which is then freed."""
        self._free_variant()
        self._control, self._steps_left = None, 0
        self._current = loaded
        self._task, self._user = loaded.task, loaded.user
        self._env: Any = loaded.env
        self._data: Any = loaded.env.sim.data._data
        self._visible, self._samplers, self._layout = loaded.visible, loaded.samplers, loaded.layout
        self._sensors: _Sensors | None = loaded.sensors
        self._progress: Progress | None = loaded.progress
        self._recorded_model, self._home = loaded.recorded_model, loaded.home

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        assert self._own is not None, "the environment is closed"
        if self._current is not self._own:
            self._use(self._own)
        self._env.robots[0].init_qpos = self._home
        return self._begin(episode)

    def _begin(self, episode: EpisodeSpec) -> PhysicsResult:
        """Reset to the episode, as the environment now is."""
        self._recorded, self._episode = False, episode
        self._user.take()
        self._recorded_model.restore()
        with callers_generator():
            self._draw(episode)
        self._observe_forced()
        if episode.init_state is not None:
            states = initial_states(self._task)
            # Where a perturbation's task file has one state alone, every episode begins from it.
            self._begin_at(states[episode.init_state if len(states) > 1 else 0])
        self._control = control_of(self._env)
        self._steps_left = self.info.max_episode_steps
        self._gain()
        forget_contacts(self._data)
        return self._result([], [], False, False)

    def go_on(self, episode: EpisodeSpec) -> None:
        self.reset(episode)  # MuJoCo's reset leaves nothing

    def begin_at(self, start: SimulatorState) -> PhysicsResult:
        self._user.take()
        self._recorded = True
        if start:
            self._recorded_model.take(start)
            self._begin_at(start[STATE].astype(np.float64))
            self._control = control_of(self._env)
            continue_control(self._env, start)
        self._gain()
        return self._result([], [], False, False)

    def perturb(self, change: SceneChange, draw: np.random.Generator) -> PhysicsResult:
        """The objects are the movable ones, not the fixtures. What moves is at rest, and the controller aims from where
        the robot now is. Other postures and task files are there from the reset on, which is done again."""
        if isinstance(change, HomePosture):
            self._env.robots[0].init_qpos = np.array(change.joints)
            return self._begin(self._episode)
        if isinstance(change, TaskFile):
            assert self._own is not None, "the environment is closed"
            task = task_of(self._own.task, change)
            self._use(self._loaded(task, *build_variant(task, self._own.user.shared)))
            return self._begin(self._episode)
        self._user.take()
        env, model, data = self._env, self._user.shared.model, self._data
        robot = env.robots[0]
        if isinstance(change, RobotOffset):
            joints, speeds = list(robot._ref_joint_pos_indexes), list(robot._ref_joint_vel_indexes)
            low, high = model.jnt_range[[model.joint(name).id for name in robot.robot_joints]].T
            data.qpos[joints] = np.clip(data.qpos[joints] + change.norm * direction(draw, len(joints)), low, high)
            data.qvel[speeds] = 0.0
        else:
            shift = change.distance * direction(draw, 2)
            for name in env.objects_dict:
                joint = model.jnt_qposadr[model.body_jntadr[env.obj_body_id[name]]]
                data.qpos[joint : joint + 2] += shift
        env.sim.forward()
        if isinstance(change, RobotOffset):
            robot.controller.update(force=True)
            robot.controller.reset_goal()
        env._check_success()
        env._post_process()
        self._sense(data.qpos.copy())
        self._gain()
        return self._result([], [], False, False)

    def place(self, recorded: SimulatorState) -> PhysicsResult:
        self._user.take()
        self._put(recorded[STATE].astype(np.float64))
        self._sense(self._data.qpos.copy())
        self._gain()
        return self._result([], [], False, False)

    def deviation(self, recorded: SimulatorState) -> float:
        return state_deviation(self._data, recorded)

    def step(self, actions: Float32) -> PhysicsResult:
        if self._steps_left == 0 or self._control is None:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        successes: list[bool] = []
        terminated = False
        self._user.take()
        for action in np.clip(actions, -1.0, 1.0).astype(np.float64):
            self._advance(self._control, action)
            solved = bool(self._env._check_success())
            self._env._post_process()
            rewards.append(1.0 if solved else self._gain())
            successes.append(solved)
            self._steps_left -= 1
            terminated = solved and not (self.info.spec.ignore_terminations or self._recorded)
            if terminated or self._steps_left == 0:
                break
        truncated = self._steps_left == 0 and not terminated
        if terminated:
            self._steps_left = 0
        return self._result(rewards, successes, terminated, truncated)

    def settle(self, steps: int) -> PhysicsResult:
        assert self._control is not None, "settle follows a reset"
        self._user.take()
        rest = np.array(self.info.rest_action)
        for _ in range(steps):
            self._advance(self._control, rest)
            self._env._check_success()
            self._env._post_process()
        self._gain()
        return self._result([], [], False, False)

    def close(self) -> None:
        self._steps_left, self._control, self._seen = 0, None, None
        self._free_variant()
        if self._own is not None:
            free(self._own.env)
        self._own = self._current = self._env = self._data = self._sensors = self._progress = None

    def _free_variant(self) -> None:
        if self._current is not None and self._current is not self._own:
            free(self._current.env)

    def _gain(self) -> float:
        """Gain of the goal's progress since the last call; 0 if the reward is sparse."""
        before, self._done = self._done, 0.0 if self._progress is None else self._progress()
        return self._done - before

    def _draw(self, episode: EpisodeSpec) -> None:
        """Draw the episode's beginning from where its seed's stream has run to."""
        stream = stream_of(self._task, episode.seed, episode.unseeded_resets)
        while len(stream) <= episode.resets:
            stream.append(self._reset_environment(stream[-1]))
        self._reset_environment(stream[episode.resets])

    def _reset_environment(self, begin: Position) -> Position:
        """The part of robosuite's hard reset after compiling the model, on the model that exists, and with
        what it draws at this position of the stream. Returns the position after it."""
        env, sim = self._env, self._env.sim
        np.random.set_state(begin.generator)
        gripper = env.robots[0].gripper
        gripper.current_action = np.zeros(len(gripper.actuators))
        for shown, original in self._visible:
            shown.clear()
            shown.update(original)
        loads = begin.loads
        while True:
            loads += 1
            # LIBERO adds these samplers to its list at every load of the model; the last of them counts.
            env.object_property_initializers = self._samplers * loads
            self._user.restore()
            sim.reset()
            try:
                env._reset_internal()
                break
            except importlib.import_module("robosuite.utils.errors").RandomizationError:
                continue  # no room for an object: LIBERO draws again, from a rebuilt environment
        sim.forward()
        env.visualize(vis_settings={name: False for name in env._visualizations})
        self._clock.reset()
        return Position(np.random.get_state(), loads)

    def _begin_at(self, recorded: npt.NDArray[np.float64]) -> None:
        """LIBERO's `set_init_state`."""
        self._put(recorded)
        self._observe_forced()

    def _put(self, recorded: npt.NDArray[np.float64]) -> None:
        self._env.sim.set_state_from_flattened(recorded)
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()

    def _observe_forced(self) -> None:
        self._clock.tick(force=True)
        self._sense(self._data.qpos.copy())

    def _advance(self, control: Control, action: npt.NDArray[np.float64]) -> None:
        """One env step, with the observation taken where robosuite takes it."""
        control.aim(action)
        done = 0
        for step in self._clock.samples(SIMULATION_STEPS):
            self._sense(control.simulate(action, step + 1 - done))
            done = step + 1
        if done < SIMULATION_STEPS:
            control.simulate(action, SIMULATION_STEPS - done)

    def _sense(self, kinematics: npt.NDArray[np.float64]) -> None:
        """Take the observation; `kinematics` are the joint positions from which MuJoCo's poses were computed."""
        assert self._sensors is not None, "the environment is closed"
        proprio, state = self._sensors.read()
        nothing = np.zeros(0, np.bool_)
        self._seen = PhysicsResult(
            reward=np.zeros(0, np.float32),
            success=nothing,
            terminated=nothing,
            truncated=nothing,
            proprio=proprio,
            state=state,
            scene=np.zeros(0, np.uint8) if self._layout is None else self._layout.pack(kinematics),
            instruction=self._task.instruction,
        )

    def _result(self, rewards: list[float], successes: list[bool], terminated: bool, truncated: bool) -> PhysicsResult:
        assert self._seen is not None
        ends = np.zeros((2, len(rewards)), np.bool_)
        if rewards:
            ends[:, -1] = terminated, truncated
        seen = self._seen
        return replace(
            seen,
            reward=np.array(rewards, np.float32),
            success=np.array(successes, np.bool_),
            terminated=ends[0],
            truncated=ends[1],
            proprio=seen.proprio.copy(),
            state=seen.state.copy(),
            scene=seen.scene.copy(),
        )


class _Sensors:
    """Reads proprioception and state: numbers of MuJoCo's arrays, whose places are looked up once."""

    def __init__(self, env: Any) -> None:
        robot, data = env.robots[0], env.sim.data._data
        # MuJoCo's own memory: it stays where it is.
        arrays = {name: getattr(data, name).reshape(-1) for name in ("site_xpos", "xpos", "xquat", "qpos", "qvel")}
        self._arrays = tuple(arrays.values())
        begins = dict(zip(arrays, np.cumsum([0, *map(len, self._arrays)]), strict=False))

        def places(name: str, numbers: Sequence[int]) -> npt.NDArray[np.intp]:
            return begins[name] + np.array(numbers, np.intp)

        def pose(body: int) -> list[npt.NDArray[np.intp]]:
            """Position, and quaternion (x, y, z, w)."""
            return [
                places("xpos", range(3 * body, 3 * body + 3)),
                places("xquat", [4 * body + i for i in (1, 2, 3, 0)]),
            ]

        site, fingers = robot.eef_site_id, robot._ref_gripper_joint_pos_indexes
        hand = [
            places("site_xpos", range(3 * site, 3 * site + 3)),
            pose(env.sim.model.body_name2id(robot.robot_model.eef_name))[1],
        ]
        own = [
            *hand,
            places("qpos", fingers),
            places("qpos", robot._ref_joint_pos_indexes),
            places("qvel", robot._ref_joint_vel_indexes),
            places("qvel", robot._ref_gripper_joint_vel_indexes),
        ]
        address = env.sim.model.get_joint_qpos_addr
        for name, joints in parts(env):
            own += [*pose(env.obj_body_id[name]), places("qpos", [address(joint) for joint in joints])]
        self._state = np.concatenate(own)
        self._axis_angle = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle

    def read(self) -> tuple[Float32, Float32]:
        """[8] and [S] float32."""
        state = np.concatenate(self._arrays)[self._state]
        position, quaternion, fingers = state[:3], state[3:7], state[7:9]
        proprio = np.concatenate((position, self._axis_angle(quaternion.copy()), fingers), dtype=np.float32)
        return proprio, state.astype(np.float32)


def describe(spec: TaskSpec, task: LiberoTask, shared: SharedModel) -> TaskInfo:
    """All sizes of the task; raises `FarmError` for an unknown control mode or camera."""
    mode = CONTROL_MODES[0] if spec.control_mode is None else spec.control_mode
    if mode not in CONTROL_MODES:
        raise FarmError(f"{spec.name} has no control mode {mode!r}; valid: {', '.join(CONTROL_MODES)}")
    limit = task.limit if spec.max_episode_steps is None else spec.max_episode_steps
    cameras = _cameras(spec, shared.model)
    return TaskInfo(
        spec=replace(spec, control_mode=mode, reward=spec.reward or "sparse", max_episode_steps=limit, cameras=cameras),
        action_dim=ACTION_DIM,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        proprio_dim=8,
        state_dim=ROBOT_STATE + shared.parts_dim,
        scene_bytes=SceneLayout(shared).nbytes if cameras else 0,
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=20.0,
        rest_action=(0.0,) * 6 + (-1.0,),
        init_states=len(initial_states(task)),
        stock_upside_down=True,
        stream=True,
        digest=task_files(spec.name).digest,
    )


def _cameras(spec: TaskSpec, model: mujoco.MjModel) -> tuple[str, ...]:
    valid = camera_names(model)
    if isinstance(spec.cameras, int):
        if not 0 <= spec.cameras <= len(valid):
            raise FarmError(f"{spec.name} has {len(valid)} cameras ({', '.join(valid)}), got cameras={spec.cameras}")
        return valid[: spec.cameras]
    for name in spec.cameras:
        if name not in valid:
            raise FarmError(f"{spec.name} has no camera {name!r}; valid: {', '.join(valid)}")
    return spec.cameras
