"""`maniskill/<task>`: ManiSkill 3's tabletop tasks on PhysX's CPU solver, split into physics and renderer.

What makes the split exact:
- physics is a function of (task, seed, actions): a reset rebuilds whatever an earlier episode may have left
  behind, so a reused environment equals a new one;
- a scene is the pose of every entity that can move, preceded by the seed in tasks that draw their geometry
  when they are reconfigured, so that the renderer can build the same geometry;
- the renderer is an ordinary ManiSkill environment that is never stepped.

A task's reward, cameras and reset are those of its ManiSkill class; `two_cubes.py` is a class of this project's own,
and `my_package.my_tasks:maniskill/MyTask-v1` one that a user's module registers with `register_env`.

SAPIEN needs a Vulkan device even to build a scene that is never drawn, because materials are stored on the device.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import sapien
import torch
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosMimicController
from mani_skill.sensors.camera import parse_camera_configs
from mani_skill.utils.registration import REGISTERED_ENVS

from sim_farm.backends.camera_poses import SAPIEN, orbited
from sim_farm.backends.maniskill import two_cubes as _registers_its_tasks  # noqa: F401
from sim_farm.backends.maniskill.culling import Culling
from sim_farm.backends.maniskill.rendering import drawn_by, draws_in_software, light_cameras, make_on_device
from sim_farm.backends.maniskill.speed import bare_reset, controllers, robots, short_collections, speed_up
from sim_farm.backends.maniskill.tasks import INSTRUCTIONS
from sim_farm.backends.maniskill.together import Evaluated, Together, after_physics, flat, seen
from sim_farm.contract import (
    INSTRUCTION_BYTES,
    Backend,
    CameraChange,
    EpisodeOver,
    EpisodeSpec,
    FarmError,
    Float32,
    PhysicsResult,
    SceneChange,
    SimulatorState,
    TaskInfo,
    TaskSpec,
    UInt8,
    new_frames,
)
from sim_farm.perturbations import CameraPose, ObjectOffset, RobotOffset, direction

DEFAULT_CONTROL_MODE = "pd_joint_delta_pos"

NEEDS_RENDER_SCENE = {"PushT-v1"}
"""Tasks that recolour their table while building it, and so cannot be built without a render scene; nor can those that
are derived from them."""

EnvStep = tuple[float, bool, bool, bool]
"""Reward, success, terminated, truncated."""

MAX_REPLICAS = 16
"""Scene replicas a renderer keeps; only tasks that draw their geometry per episode need more than one."""


def tasks() -> tuple[str, ...]:
    """ManiSkill's own in the catalogue, then those that other modules have registered in this process."""
    others = (name for name, one in REGISTERED_ENVS.items() if one.cls.__module__.partition(".")[0] != "mani_skill")
    return tuple(dict.fromkeys((*INSTRUCTIONS, *others)))


def instruction_of(task: str) -> str:
    """The robot's instruction: the class attribute `instruction` of a user's own task, else the task's name in words.

    Raises `FarmError` for an instruction that is no text, or too long.
    """
    if task in INSTRUCTIONS:
        return INSTRUCTIONS[task]
    cls = REGISTERED_ENVS[task].cls
    found = getattr(cls, "instruction", None)
    if found is None:
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", re.sub(r"-v[0-9]+$", "", task))
        return " ".join(words).lower()
    if not isinstance(found, str) or not 0 < len(found.encode()) <= INSTRUCTION_BYTES:
        raise FarmError(
            f"{cls.__name__}.instruction, of {task}, is a text of 1 to {INSTRUCTION_BYTES} bytes, got "
            f"{str(found)[:100]!r}"
        )
    return found


def _needs_render_scene(task: str) -> bool:
    cls = REGISTERED_ENVS[task].cls
    return any(issubclass(cls, REGISTERED_ENVS[known].cls) for known in NEEDS_RENDER_SCENE)


def _make(spec: TaskSpec, render: bool) -> Any:
    """The unwrapped ManiSkill environment. Raises `FarmError` for what the user can mend."""
    task = spec.name.partition("/")[2]
    reward = {"dense": "normalized_dense", "sparse": "sparse"}[spec.reward or "dense"]
    supported = REGISTERED_ENVS[task].cls.SUPPORTED_REWARD_MODES
    if reward not in supported:
        offered = [name for name, mode in (("dense", "normalized_dense"), ("sparse", "sparse")) if mode in supported]
        raise FarmError(f"{spec.name} has no {spec.reward} reward; it has: {', '.join(offered) or 'none'}")
    logging.getLogger("mani_skill").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    modes = (spec.control_mode,) if spec.control_mode else (DEFAULT_CONTROL_MODE, None)
    for mode in modes:
        try:
            with short_collections(), light_cameras():
                return make_on_device(
                    task,
                    num_envs=1,
                    sim_backend="physx_cpu",
                    render_backend="cpu" if render or _needs_render_scene(task) else "none",
                    obs_mode="rgb+state" if render else "state",
                    reward_mode=reward,
                    control_mode=mode,
                    sensor_configs={"width": spec.image_size, "height": spec.image_size},
                )
        except AssertionError as error:
            # The agent asserts "MODE not in supported modes: ['...', ...]"; some robots lack our default.
            valid = re.findall(r"'(\w+)'", str(error).partition("not in supported modes: ")[2])
            if not valid:
                raise
            if spec.control_mode is None:
                continue
            raise FarmError(f"{spec.name} has no control mode {mode!r}; it has: {', '.join(valid)}") from error
        except RuntimeError as error:
            if any(said in str(error) for said in ("rendering device", "physical device", "vk::createInstance")):
                raise FarmError(
                    f"{spec.name} needs a Vulkan device and none was found ({error}). "
                    "Run `embodied doctor`: it names the driver to install"
                ) from error
            raise
    raise AssertionError("unreachable: the robot's own default control mode is always valid")


class ManiSkillPhysics:
    """One ManiSkill environment without pictures. See `sim_farm.contract.Physics`."""

    def __init__(self, spec: TaskSpec) -> None:
        self.env = _make(spec, render=False)
        self.info = _info(spec, self.env)
        self._low = np.array(self.info.action_low, np.float32)
        self._high = np.array(self.info.action_high, np.float32)
        self._prepare()
        self._instruction = instruction_of(spec.name.partition("/")[2])
        self.left = 0
        self._seed = 0
        self._recorded = False
        """True if a recording is followed: to its end, solved or not."""
        self._lent: tuple[Together, int] | None = None
        """What has this environment's state while it runs no code of its own, and its row there."""
        if not _objects(self.env) and any(isinstance(c, ObjectOffset) for p in spec.perturbations for c in p.scene):
            raise FarmError(f"{spec.name} has no movable object: it has the axes camera and start, not objects")

    def lend(self, row: int, together: Together) -> None:
        """Let `together` have the environment's state whenever it is not stepped by itself."""
        self._lent = together, row

    def _take_back(self) -> None:
        if self._lent is not None:
            together, row = self._lent
            together.take_back(row)

    def _prepare(self) -> None:
        """Find the parts of the scene again, after ManiSkill has rebuilt it."""
        speed_up(self.env)
        self._entities = _movable_entities(self.env)

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        self._seed, self._recorded = episode.seed, False
        with torch.inference_mode():
            self._take_back()
            if self.env.reconfiguration_freq == 0:
                _forget_contacts(self.env)
                _forget_targets(self.env)
            self._reset(episode)
            return self.result([], self._observe())

    def _reset(self, episode: EpisodeSpec) -> None:
        with bare_reset(self.env):
            self.env.reset(seed=episode.seed)
        if self.env.reconfiguration_freq != 0:
            self._prepare()
        self.left = self.info.max_episode_steps

    def perturb(self, change: SceneChange, draw: np.random.Generator) -> PhysicsResult:
        """The objects are the actors that are neither static nor kinematic; what moves is at rest. Several robots are
        each displaced independently."""
        with torch.inference_mode():
            self._take_back()
            if isinstance(change, RobotOffset):
                _displace_robots(self.env, change.norm, draw)
            else:
                assert isinstance(change, ObjectOffset), "check_perturbations has seen the task"
                shift = (change.distance * direction(draw, 2)).astype(np.float32)
                for entity in _objects(self.env):
                    pose = entity.pose
                    entity.pose = sapien.Pose(pose.p + np.array([*shift, 0], np.float32), pose.q)
                    _stop(entity)
            return self.result([], self._observe())

    def step(self, actions: Float32) -> PhysicsResult:
        if self.left == 0:
            raise EpisodeOver("this episode has ended; reset the environment first")
        chunk = torch.from_numpy(self.clipped(actions))
        taken: list[EnvStep] = []
        with torch.inference_mode():
            self._take_back()
            for i in range(len(chunk)):
                last = i == len(chunk) - 1 or self.left == 1
                evaluated = self._step_once(chunk[i : i + 1], observe=last)
                taken.append(self.count_step(evaluated, 0))
                if self.ended:
                    break
            return self.result(taken, self._observe() if evaluated.state is None else evaluated.state[0])

    def _step_once(self, action: torch.Tensor, observe: bool) -> Evaluated:
        """ManiSkill's `step`, in its order, but observations are made only when they are read."""
        stepped = self.env._step_action(split_action(self.env, action))
        return Evaluated(*after_physics(self.env, stepped, observe))

    def clipped(self, actions: Float32) -> Float32:
        """Not every control mode of ManiSkill clips."""
        return np.clip(actions, self._low, self._high, dtype=np.float32)

    @property
    def ended(self) -> bool:
        return self.left == 0

    def count_step(self, evaluated: Evaluated, row: int) -> EnvStep:
        """The env step that has been executed: reward, success, and whether the episode has terminated or is cut."""
        success, fail = bool(evaluated.success[row]), bool(evaluated.fail[row])
        terminated = (success or fail) and not (self.info.spec.ignore_terminations or self._recorded)
        self.left = 0 if terminated else self.left - 1
        return float(evaluated.reward[row]), success, terminated, self.left == 0 and not terminated

    def _observe(self) -> Float32:
        return seen(self.env)[0]

    def result(self, taken: Sequence[EnvStep], state: Float32) -> PhysicsResult:
        reward, success, terminated, truncated = zip(*taken, strict=True) if taken else ((), (), (), ())
        return PhysicsResult(
            reward=np.array(reward, np.float32),
            success=np.array(success, np.bool_),
            terminated=np.array(terminated, np.bool_),
            truncated=np.array(truncated, np.bool_),
            proprio=state[: self.info.proprio_dim].copy(),  # ManiSkill's state begins with the agent's
            state=state,
            scene=_encode_scene(self.env, self._entities, self._seed) if self.info.cameras else np.empty(0, np.uint8),
            instruction=self._instruction,
        )

    def go_on(self, episode: EpisodeSpec) -> None:
        self._seed = episode.seed
        with torch.inference_mode():
            self._take_back()
            self._reset(episode)

    def begin_at(self, start: SimulatorState) -> PhysicsResult:
        self._recorded = True
        with torch.inference_mode():
            self._take_back()
            put_state(self.env, start)
            return self.result([], self._observe())

    def place(self, recorded: SimulatorState) -> PhysicsResult:
        with torch.inference_mode():
            self._take_back()
            put_state(self.env, recorded)
            return self.result([], self._observe())

    def deviation(self, recorded: SimulatorState) -> float:
        return state_deviation(self.env, recorded)

    def close(self) -> None:
        with short_collections():
            self.env.close()


class ManiSkillBatch:
    """Environments of one task that share their Python (`together.py`). See `sim_farm.contract.PhysicsBatch`."""

    def __init__(self, physics: Sequence[ManiSkillPhysics]) -> None:
        self._physics = tuple(physics)
        self._together = Together([one.env for one in physics])
        for row, one in enumerate(physics):
            one.lend(row, self._together)

    @property
    def alone(self) -> str:
        return self._together.reason

    def step(self, which: Sequence[int], actions: Float32) -> list[PhysicsResult]:
        physics = self._physics
        if self.alone or len(which) < 2:
            return [physics[row].step(chunk) for row, chunk in zip(which, actions, strict=True)]
        if any(physics[row].ended for row in which):
            raise EpisodeOver("this episode has ended; reset the environment first")
        chunks = np.zeros((len(physics), *actions.shape[1:]), np.float32)
        chunks[list(which)] = physics[0].clipped(actions)
        taken: dict[int, list[EnvStep]] = {row: [] for row in which}
        states: dict[int, Float32] = {}
        with torch.inference_mode():
            for step in range(actions.shape[1]):
                under_way = [row for row in which if not physics[row].ended]
                last = step == actions.shape[1] - 1
                action = split_action(physics[0].env, torch.from_numpy(chunks[:, step]))
                evaluated = self._together.step(
                    under_way, action, last or any(physics[row].left == 1 for row in under_way)
                )
                for row in under_way:
                    taken[row].append(physics[row].count_step(evaluated, row))
                over = [row for row in under_way if last or physics[row].ended]
                if over:
                    shown = self._together.seen(over) if evaluated.state is None else evaluated.state
                    states.update((row, shown[row].copy()) for row in over)
                if len(over) == len(under_way):
                    break
            return [physics[row].result(taken[row], states[row]) for row in which]


@dataclass(frozen=True)
class _Replica:
    """An environment that is never stepped, and what is drawn of its scene."""

    env: Any
    culling: Culling | None


class ManiSkillRenderer:
    """Draws scenes of one task with SAPIEN's rasteriser. See `sim_farm.contract.Renderer`."""

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec
        first = _make(spec, render=True)
        self.info = _info(spec, first)
        self._replicas: OrderedDict[int, _Replica] = OrderedDict()
        self._spare = [first]
        """Built environments that hold no geometry anybody asked for yet."""
        self._standing = {
            name: camera.camera._render_cameras[0].local_pose
            for name, camera in first._sensors.items()
            if camera.entity is None
        }
        """Poses of the cameras that stand in the world."""
        self._aimed: dict[str, sapien.Pose] = {}
        """Poses of those that a perturbation has moved."""

    def aim(self, changes: Sequence[CameraChange], draw: np.random.Generator) -> None:
        self._aimed = {}
        side = draw.bit_generator.state
        for change in changes:
            if change.camera is not None and change.camera not in self._standing:
                raise FarmError(
                    f"{self._spec.name} has no camera {change.camera!r} that stands in the world; valid: "
                    f"{', '.join(self._standing)}"
                )
            if isinstance(change, CameraPose):
                self._aimed[change.camera] = sapien.Pose(change.position, change.quaternion)
                continue
            for name in self._standing if change.camera is None else [change.camera]:
                draw.bit_generator.state = side  # all cameras go to the same side
                matrix = self._standing[name].to_transformation_matrix().astype(np.float64)
                matrix[:3, 3], matrix[:3, :3] = orbited(matrix[:3, 3], matrix[:3, :3], SAPIEN, change, draw)
                self._aimed[name] = sapien.Pose(matrix.astype(np.float32))

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        size = self._spec.image_size
        frames = new_frames(len(scenes), cameras, size) if out is None else out
        for i, scene in enumerate(scenes):
            replica = self._place(scene)
            env = replica.env
            for hidden in env._hidden_objects:
                hidden.hide_visual()
            for name, pose in (self._standing | self._aimed).items() if self._spec.perturbations else ():
                env._sensors[name].camera._render_cameras[0].local_pose = pose
            sensors = [env._sensors[name] for name in cameras]
            if replica.culling is not None:
                replica.culling.update([sensor.camera._render_cameras[0] for sensor in sensors])
            env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
            for sensor in sensors:
                sensor.capture()
            for name, sensor in zip(cameras, sensors, strict=True):
                frames[name][i] = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"][0]
        return frames

    def _place(self, scene: UInt8) -> _Replica:
        """A replica with the scene's geometry, moved to the scene's state."""
        geometry, poses = _decode_scene(scene)
        replica = self._replicas.pop(geometry, None)
        if replica is None:
            replica = self._build(geometry)
        self._replicas[geometry] = replica
        # Entity poses are what the rasteriser reads. Setting the simulator's own state instead would pass through
        # PhysX's arithmetic (a robot's base moves by one unit in the last place) and change pixels.
        for entity, pose in zip(_movable_entities(replica.env), poses, strict=True):
            entity.pose = sapien.Pose(pose[:3], pose[3:])
        return replica

    def _build(self, geometry: int) -> _Replica:
        """A replica with that geometry: the spare one, the least recently used, or a new one."""
        if self._spare:
            env = self._spare.pop()
        elif len(self._replicas) >= MAX_REPLICAS:
            env = self._replicas.popitem(last=False)[1].env
        else:
            env = _make(self._spec, render=True)
        with light_cameras():
            env.reset(seed=max(geometry - 1, 0))
        # On a GPU vertices are cheap.
        return _Replica(env, Culling(env.scene.sub_scenes[0]) if draws_in_software() else None)

    def close(self) -> None:
        for env in (*self._spare, *(replica.env for replica in self._replicas.values())):
            env.close()
        self._spare.clear()
        self._replicas.clear()


def _forget_contacts(env: Any) -> None:
    """Move every entity into a new PhysX scene, which takes 0.4 ms where rebuilding them takes 200.

    PhysX remembers contacts across a reset, and after contact-rich episodes of any task that shows: one episode in
    ten takes another course than in a new environment. The new scene does not forget which bodies are asleep, so they
    are woken.
    """
    scene = env.scene
    old, system = scene.sub_scenes[0], sapien.physx.PhysxCpuSystem()
    system.timestep = scene.px.timestep
    drawn = _needs_render_scene(env.spec.id)
    systems = [system, old.render_system] if drawn else [system]
    new = sapien.Scene(systems)
    entities = list(old.entities)
    for entity in entities:
        old.remove_entity(entity)
    for entity in entities:  # only now: an articulation's links may never be in two scenes
        new.add_entity(entity)
    scene.sub_scenes[0], scene.px = new, system
    _wake(entities)


def _forget_targets(env: Any) -> None:
    """Aim every joint's drive at zero and every controller at nothing, as in a new environment. ManiSkill leaves both
    aiming at where the last action of the episode before had sent them, until the next action."""
    for articulation in env.scene.articulations.values():
        for joint in articulation._objs[0].joints:
            if joint.dof:
                joint.drive_target = joint.drive_velocity_target = np.zeros(joint.dof, np.float32)
    for controller in controllers(env):
        vars(controller).pop("_target_pose", None)


def _wake(entities: Sequence[Any]) -> None:
    """Wake every body and every articulation. If an earlier episode left one asleep, or about to fall asleep, it would
    sleep earlier than in a new environment, and respond to a push a sub-step later."""
    movable = sapien.physx.PhysxRigidDynamicComponent, sapien.physx.PhysxArticulationLinkComponent
    for entity in entities:
        for component in entity.components:
            if isinstance(component, movable):
                component.wake_up()


def _objects(env: Any) -> list[Any]:
    """The SAPIEN entities of the actors that PhysX moves, in the order in which the task built them."""
    return [actor._objs[0] for actor in env.scene.actors.values() if actor.px_body_type == "dynamic"]


def _stop(entity: Any) -> None:
    for component in entity.components:
        if isinstance(component, sapien.physx.PhysxRigidDynamicComponent):
            component.linear_velocity = component.angular_velocity = np.zeros(3, np.float32)
            component.wake_up()


def _displace_robots(env: Any, norm: float, draw: np.random.Generator) -> None:
    """Move each robot's arm joints by a vector of that norm, within their limits, and aim its controllers at the new
    positions."""
    for agent in robots(env):
        body = agent.robot._objs[0]
        qpos = body.qpos.copy()
        arm = _arm_joints(agent)
        low, high = np.asarray(body.qlimits)[arm].T
        qpos[arm] = np.clip(qpos[arm] + norm * direction(draw, len(arm)), low, high)
        body.qpos, body.qvel = qpos, np.zeros_like(qpos)
        agent.controller.reset()


def _arm_joints(agent: Any) -> list[int]:
    """The joints that a controller moves independently; a gripper's fingers follow one another."""
    parts = getattr(agent.controller, "controllers", {"": agent.controller})
    arms = [part for part in parts.values() if not isinstance(part, PDJointPosMimicController)]
    return sorted({int(joint) for part in arms for joint in part.active_joint_indices})


def _info(spec: TaskSpec, env: Any) -> TaskInfo:
    task = spec.name.partition("/")[2]
    space: Any = env.action_space
    boxes: list[Any] = (
        [box for _, box in sorted(space.spaces.items())] if isinstance(space, gym.spaces.Dict) else [space]
    )
    low = np.concatenate([box.low.ravel() for box in boxes])
    high = np.concatenate([box.high.ravel() for box in boxes])
    obs = env.get_obs(env.get_info(), unflattened=True)
    cameras = _resolve_cameras(spec, env)
    limit = spec.max_episode_steps or REGISTERED_ENVS[task].max_episode_steps
    if limit is None:
        raise FarmError(
            f"{spec.name} is registered without a step limit: register_env({task!r}, max_episode_steps=...), or set "
            "env.max_episode_steps"
        )
    mode = env.agent.control_mode
    resolved = replace(
        spec,
        control_mode=next(iter(mode.values())) if isinstance(mode, dict) else mode,
        cameras=cameras,
        max_episode_steps=limit,
    )
    return TaskInfo(
        spec=resolved,
        action_dim=len(low),
        action_low=tuple(low.tolist()),
        action_high=tuple(high.tolist()),
        proprio_dim=flat(obs["agent"]).size,
        state_dim=flat({"agent": obs["agent"], "extra": obs["extra"]}).size,
        scene_bytes=8 + 28 * len(_movable_entities(env)) if cameras else 0,
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=float(env.control_freq),
    )


def split_action(env: Any, action: torch.Tensor) -> Any:
    """Tasks with several robots take one action per robot, in the order of `TaskInfo.action_low`."""
    space: Any = env.action_space
    if not isinstance(space, gym.spaces.Dict):
        return action
    names = sorted(space.spaces)
    parts = torch.split(action, [int(np.prod(space[name].shape or ())) for name in names], dim=-1)
    return dict(zip(names, parts, strict=True))


def _resolve_cameras(spec: TaskSpec, env: Any) -> tuple[str, ...]:
    """Names of the observed cameras. A physics environment has no camera objects, but has their configurations."""
    names = tuple(
        {**parse_camera_configs(env._default_sensor_configs), **parse_camera_configs(env.agent._sensor_configs)}
    )
    if isinstance(spec.cameras, int):
        if spec.cameras > len(names):
            raise FarmError(f"{spec.cameras} cameras were asked for, {spec.name} has {len(names)}: {', '.join(names)}")
        return names[: spec.cameras]
    unknown = sorted(set(spec.cameras) - set(names))
    if unknown:
        raise FarmError(f"{spec.name} has no camera {', '.join(unknown)}; it has: {', '.join(names)}")
    return spec.cameras


def _movable_entities(env: Any) -> list[Any]:
    """The SAPIEN entities whose poses can change, in the order in which the task built them."""
    actors = [a._objs[0] for a in env.scene.actors.values() if a.px_body_type != "static"]
    links = [link.entity for art in env.scene.articulations.values() for link in art._objs[0].links]
    return actors + links


def _encode_scene(env: Any, entities: Sequence[Any], seed: int) -> UInt8:
    """Eight bytes that name the geometry (seed + 1; 0 where it is always the same), then poses as float32."""
    geometry = seed + 1 if env.reconfiguration_freq != 0 else 0
    values = np.empty((len(entities), 7), np.float32)
    for row, entity in zip(values, entities, strict=True):
        pose = entity.pose
        row[:3] = pose.p
        row[3:] = pose.q
    return np.concatenate([np.array([geometry], np.int64).view(np.uint8), values.ravel().view(np.uint8)])


def _decode_scene(scene: UInt8) -> tuple[int, Float32]:
    """The geometry's number and the poses [entities, 7]: position in m, then the unit quaternion (w first)."""
    scene = np.ascontiguousarray(scene)
    return int(scene[:8].view(np.int64)[0]), scene[8:].copy().view(np.float32).reshape(-1, 7)


# --- recorded states

# ManiSkill's own recordings (`RecordEpisode`) have `actors/NAME` and `articulations/NAME`, float32. An actor's state is
# position, quaternion (w first), linear and angular velocity; an articulation's is that of its root, then positions and
# velocities of its joints. States of controllers (`controller/...`) are left alone: at an episode's beginning they
# follow from the robot's.

POSE = 7
"""Leading elements of a state that are a position and a quaternion."""
ROOT = 13
"""Elements before those of the joints."""


def put_state(env: Any, start: SimulatorState) -> None:
    """Put the bodies into the recorded state. Those that are in it already, bit for bit, are left alone: PhysX rounds
    what it is given. Raises `FarmError` for bodies that the scene or the recording lacks."""
    now = _states(env)
    recorded = {name: row for name, row in start.items() if not name.startswith("controller/")}
    if not recorded:
        return
    if set(recorded) != set(now):
        raise FarmError(
            f"the recorded scene is another one: it has {_only(recorded, now)}, which the task's has not, and lacks "
            f"{_only(now, recorded)}"
        )
    for name, row in recorded.items():
        if row.shape != now[name].shape:
            raise FarmError(f"the recorded state of {name} has {row.size} numbers, the task's {now[name].size}")
    changed = {name: row for name, row in recorded.items() if not np.array_equal(row, now[name])}
    if not changed:
        return
    state: dict[str, dict[str, npt.NDArray[np.float32]]] = {}
    for name, row in changed.items():
        kind, _, body = name.partition("/")
        state.setdefault(kind, {})[body] = row.astype(np.float32)[None]
    env.set_state_dict(state)
    for controller in controllers(env):
        controller.reset()


def state_deviation(env: Any, recorded: SimulatorState) -> float:
    """See `sim_farm.contract.RecordedPhysics.deviation`. Names that the scene lacks are not compared."""
    now, furthest = _states(env), 0.0
    for name, row in recorded.items():
        own = now.get(name)
        if own is None or row.shape != own.shape or np.array_equal(row, own):
            continue
        joints = (len(own) - ROOT) // 2
        where = np.r_[0:POSE, ROOT : ROOT + joints]
        # Velocities alone may differ in their last bit, which is no equality either.
        away = float(np.abs(row.astype(np.float32)[where] - own[where]).max())
        furthest = max(furthest, away, float(np.finfo(np.float32).tiny))
    return furthest


def _states(env: Any) -> dict[str, npt.NDArray[np.float32]]:
    kinds = env.scene.get_sim_state()
    return {f"{kind}/{name}": row[0].numpy() for kind, rows in kinds.items() for name, row in rows.items()}


def _only(one: Any, other: Any) -> str:
    return ", ".join(sorted(set(one) - set(other))[:5]) or "nothing"


BACKEND = Backend(
    "maniskill",
    ManiSkillPhysics,
    ManiSkillRenderer,
    tasks=tasks,
    drawn_by=drawn_by,
    make_batch=ManiSkillBatch,
    axes={"camera": 8.0, "start": 0.1, "objects": 0.01},
)
