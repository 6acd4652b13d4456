"""One evaluation for several environments of a task.

ManiSkill writes controllers, observations, `evaluate` and rewards for batches of environments, as its GPU simulation
has them; on the CPU each environment runs them for a batch of one. `Together` runs them once for N environments, each
of which steps its own PhysX scene. Environments are built and reset one by one, and keep their scenes and random
streams.

- A `_Code` stands for an environment, a robot or a controller of all N. It has their class, so that the task's own
  methods run on it. Its attributes are theirs, joined when they are first read: tensors and poses row by row, the rest
  must be equal.
- An `Each` stands for anything else, such as an actor or a scene. What is read of it is that of each of the N, joined.
  Methods of ManiSkill that change nothing are called on each; no others are called, and nothing is set.

A batch has to give, bit for bit, what N batches of one give. The first env steps are computed both ways and compared,
and `row_checks.py` looks for operations that mix rows or may round differently in a batch. Where something is not equal
or cannot be joined, each environment runs its own Python from then on, and `Together.reason` says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector.utils import batch_space
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils.common import flatten_state_dict
from mani_skill.utils.structs.actor import Actor
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.base import BaseStruct
from mani_skill.utils.structs.link import Link
from mani_skill.utils.structs.pose import Pose

from sim_farm.backends.maniskill.row_checks import RowChecks, apart, by_rows, result, rows
from sim_farm.backends.maniskill.speed import controllers, frozen, frozen_poses, robots
from sim_farm.contract import Bool, Float32

CHECKED = 12
"""Env steps, the first ones of a `Together`, that are computed both ways."""
HOOKS = ("_before_control_step", "_after_control_step", "_before_simulation_step", "_after_simulation_step")
"""Methods that a task may have between the steps of its physics."""
READING = ("get_", "is_", "compute_")
"""Beginnings of the names of ManiSkill's methods that change nothing."""
POSE = 7
"""Numbers of a pose."""
PLAIN = (bool, int, float, str, bytes, type(None), type, np.ndarray, np.generic, torch.dtype, torch.device)


Arrays = tuple[npt.NDArray[Any], ...]


class NotTogether(Exception):
    """The environments' Python cannot be shared: the message says why."""


# --- what environments have in common


class _Joining:
    """Joins what `count` environments have in the same place."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.acting: Sequence[int] = range(count)
        """Rows whose environments are stepped. The drives of the others are not set; methods are called on all."""
        self.codes: list[_Code] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        """Of the first environment's objects: number, object (kept, or its number might become another's), joined."""

    def join(self, values: Sequence[Any], vectors: bool = True) -> Any:
        """One value for all. `vectors`: tensors [1] have a row for each environment, too. Raises `NotTogether`."""
        first = values[0]
        if all(value is first for value in values):
            return first
        if any(type(value) is not type(first) for value in values):
            raise NotTogether(f"is a {' or '.join(sorted({type(value).__name__ for value in values}))}")
        if isinstance(first, torch.Tensor):
            return _joined_rows(values, vectors)
        if isinstance(first, Pose):
            return Pose(raw_pose=_joined_rows([value.raw_pose for value in values]))
        if isinstance(first, PLAIN):
            if not all(np.array_equal(cast(Any, value), cast(Any, first)) for value in values):
                raise NotTogether("differs from environment to environment and is no tensor with a row for each")
            return first
        if isinstance(first, dict):
            if any(value.keys() != first.keys() for value in values):
                raise NotTogether("has other keys in other environments")
            return {key: self.join([value[key] for value in values], vectors) for key in first}
        if isinstance(first, (list, tuple)):
            if any(len(value) != len(first) for value in values):
                raise NotTogether("has another length in other environments")
            return type(first)([self.join(each, vectors) for each in zip(*values, strict=True)])
        kind = _kind(first)
        if kind is Each:  # not remembered: there may be new ones in every env step
            return first if _equal_records(values) else Each(self, tuple(values))
        if id(first) not in self._known:
            self._known[id(first)] = first, kind(self, tuple(values))
        return self._known[id(first)][1]

    def part(self, value: Any, row: int) -> Any:
        """One environment's part of an argument. Raises `NotTogether` if that is not clear."""
        if isinstance(value, torch.Tensor):
            if value.dim() == 1 and len(value) == self.count:
                raise NotTogether("a simulator's method is given a vector as long as there are environments")
            return value[row : row + 1] if value.dim() and len(value) == self.count else value
        if isinstance(value, Pose):
            return Pose(raw_pose=self.part(value.raw_pose, row))
        if isinstance(value, (Each, _Code)):
            return vars(value)["_members"][row]
        if isinstance(value, dict):
            return {key: self.part(each, row) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.part(each, row) for each in value])
        return value


def _joined_rows(values: Sequence[torch.Tensor], vectors: bool = True) -> torch.Tensor:
    first = values[0]
    if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
        raise NotTogether("is a tensor of another shape in other environments")
    if first.dim() > (0 if vectors else 1) and len(first) == 1:
        return rows(torch.cat(tuple(values)))
    if not all(torch.equal(value, first) for value in values):
        raise NotTogether("is a tensor that differs from environment to environment and has no row for each")
    return first


def _equal_records(values: Sequence[Any]) -> bool:
    """True for equal dataclasses, such as a controller's configuration."""
    if not dataclasses.is_dataclass(values[0]) or isinstance(values[0], BaseStruct):
        return False
    try:
        return all(bool(value == values[0]) for value in values)
    except (TypeError, ValueError, RuntimeError):  # of fields that are arrays, or cannot be compared
        return False


class Each:
    """The same object of every environment, which is only read. A method that changes something would change it in
    environments that are not stepped as well, and would do so twice in the env steps that are computed both ways."""

    gpu_sim_enabled = False

    def __init__(self, joining: _Joining, members: tuple[Any, ...]) -> None:
        vars(self).update(_joining=joining, _members=members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with apart():
            found = [getattr(member, name) for member in self._members]
        return self._calls(name, found) if callable(found[0]) else self._joining.join(found)

    def _calls(self, name: str, methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        raise NotTogether(f"{_name_of(self, name)} may change what one environment has to itself")

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotTogether(f"{_name_of(self, name)} is set, which one environment has to itself")


def _name_of(each: Each, name: str) -> str:
    return f"{type(vars(each)['_members'][0]).__name__}.{name}"


class _Known(Each):
    """The same object of ManiSkill in every environment: methods whose names begin with `READING` change nothing."""

    def _calls(self, name: str, methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        joining = self._joining
        if not name.startswith(READING):
            return super()._calls(name, methods)

        def call(*args: Any, **kwargs: Any) -> Any:
            with apart():
                found = [
                    method(*joining.part(args, row), **joining.part(kwargs, row)) for row, method in enumerate(methods)
                ]
            try:
                return joining.join(found)
            except NotTogether as problem:
                raise NotTogether(f"what {_name_of(self, name)} returns {problem}") from None

        return call


class _Struct(_Known):
    """Of a scene, where it stays."""


class _Scenes(_Known):
    @property
    def num_envs(self) -> int:
        return self._joining.count


class _Bodies(_Known):
    """Of an actor, or of a link of a robot."""

    def __init__(self, joining: _Joining, members: tuple[Any, ...]) -> None:
        super().__init__(joining, members)
        single = all(len(member._objs) == 1 for member in members)
        vars(self)["_placed"] = [member._objs[0] for member in members] if single else []
        vars(self)["_pose_of"] = attrgetter("entity_pose" if isinstance(members[0], Link) else "pose")

    @property
    def pose(self) -> Pose:
        return Pose(raw_pose=frozen(self, self._poses))

    def _poses(self) -> torch.Tensor:
        if not self._placed:
            return rows(torch.cat([member.pose.raw_pose for member in self._members]))
        poses = np.empty((len(self._placed), POSE), np.float32)
        for row, placed in zip(poses, self._placed, strict=True):
            pose = self._pose_of(placed)
            row[:3], row[3:] = pose.p, pose.q
        return rows(torch.from_numpy(poses))


class _Articulations(_Known):
    @property
    def qpos(self) -> torch.Tensor:
        return rows(torch.from_numpy(np.stack([member._objs[0].qpos for member in self._members])))

    @property
    def qvel(self) -> torch.Tensor:
        return rows(torch.from_numpy(np.stack([member._objs[0].qvel for member in self._members])))

    def get_qpos(self) -> torch.Tensor:
        return self.qpos

    def get_qvel(self) -> torch.Tensor:
        return self.qvel

    def set_joint_drive_targets(self, targets: torch.Tensor, joints: Any, joint_indices: Any = None) -> None:
        self._drive("drive_target", targets, joints)

    def set_joint_drive_velocity_targets(self, targets: torch.Tensor, joints: Any, joint_indices: Any = None) -> None:
        self._drive("drive_velocity_target", targets, joints)

    def _drive(self, what: str, targets: torch.Tensor, joints: Any) -> None:
        numbers = result(targets).numpy()
        for row in self._joining.acting:
            for i, joint in enumerate(joints):
                setattr(joint._members[row]._objs[0], what, numbers[row, i : i + 1])


class _Later:
    """An attribute that the class has, too, and that is joined when it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, code: Any, cls: Any) -> Any:
        return code.join(self._name)


class _Code:
    """The same environment, robot or controller of every environment, of their class."""

    def __getattr__(self, name: str) -> Any:
        members = vars(self).get("_members", ())
        if not members or any(name not in vars(member) for member in members):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return self.join(name)

    def member(self, row: int) -> Any:
        return vars(self)["_members"][row]

    def __del__(self) -> None:
        """An environment's own would close its scene."""

    def join(self, name: str) -> Any:
        vars(self)[name] = self.joined(name)
        return vars(self)[name]

    def joined(self, name: str) -> Any:
        """The attribute of that name, joined over the environments. What is equal in all is copied, since an env step
        may change it in place."""
        members = vars(self)["_members"]
        # A controller's vectors are of its joints, and it may have one joint.
        vectors = isinstance(members[0], BaseEnv)
        try:
            return _copied(vars(self)["_joining"].join([vars(member)[name] for member in members], vectors))
        except NotTogether as problem:
            raise NotTogether(f"{type(members[0]).__name__}.{name} {problem}") from None

    def fetch(self, row: int, others: Sequence[int]) -> None:
        """Take what the row's environment has changed by itself. What is not in rows is joined again when it is next
        read, also from the other environments, which are given what they have come to."""
        mine, members = vars(self), vars(self)["_members"]
        theirs = vars(members[row])
        for name, known in tuple(mine.items()):
            if name in OWN or name not in theirs:
                continue
            value = theirs[name]
            if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and _is_row(value, known):
                known[row] = value[0]
            elif isinstance(known, Pose) and isinstance(value, Pose) and _is_row(value.raw_pose, known.raw_pose):
                known.raw_pose[row] = value.raw_pose[0]
            elif not (isinstance(known, (Each, _Code)) and vars(known)["_members"][row] is value):
                for other in others:
                    vars(members[other])[name] = _part_of(known, vars(members[other]).get(name), other)
                del mine[name]

    def store(self, row: int) -> None:
        """Give the row's environment what has been computed for it."""
        mine = vars(self)
        theirs = vars(mine["_members"][row])
        for name, value in mine.items():
            if name not in OWN:
                theirs[name] = _part_of(value, theirs.get(name), row)


OWN = ("_joining", "_members", "num_envs", "action_space", "set_action")
"""Attributes of a `_Code` that are not its members'."""


def _part_of(value: Any, own: Any, row: int) -> Any:
    """One environment's part of an attribute that all have, where it has `own` at the moment (None: nothing)."""
    if isinstance(value, torch.Tensor):
        is_row = _is_row(own, value) if isinstance(own, torch.Tensor) else value.dim() > 0
        return (value[row : row + 1] if is_row else value).clone()
    if isinstance(value, Pose):
        return Pose(raw_pose=value.raw_pose[row : row + 1].clone())
    if isinstance(value, (Each, _Code)):
        return vars(value)["_members"][row]
    if type(value) is dict:
        known = own if isinstance(own, dict) else {}
        return {key: _part_of(each, known.get(key), row) for key, each in value.items()}
    if type(value) in (list, tuple):
        parts = own if isinstance(own, (list, tuple)) and len(own) == len(value) else [None] * len(value)
        return type(value)(_part_of(each, part, row) for each, part in zip(value, parts, strict=True))
    return _copied(value) if own is None or isinstance(value, PLAIN) else own


def _is_row(value: torch.Tensor, known: torch.Tensor) -> bool:
    """True if `value` [1, ...] can be a row of `known` [N, ...]."""
    return value.dim() == known.dim() > 0 and len(value) == 1 < len(known) and value.shape[1:] == known.shape[1:]


def _code(joining: _Joining, members: tuple[Any, ...]) -> Any:
    cls = type(members[0])
    # What can be called has been put there for one environment: the class's own is for any number.
    shadowing = [name for name, value in vars(members[0]).items() if hasattr(cls, name) and not callable(value)]
    own: Any = type(f"Shared{cls.__name__}", (_Code, cls), {name: _Later(name) for name in shadowing})
    code = object.__new__(own)
    vars(code).update(_joining=joining, _members=members)
    joining.codes.append(code)
    if isinstance(members[0], BaseEnv):
        vars(code)["num_envs"] = joining.count
    if isinstance(members[0], BaseController):
        vars(code)["action_space"] = batch_space(members[0].single_action_space, joining.count)
    return code


def _kind(first: Any) -> Callable[[_Joining, tuple[Any, ...]], Any]:
    for base, kind in KINDS:
        if isinstance(first, base):
            return kind
    return Each


KINDS: tuple[tuple[Any, Any], ...] = (
    ((BaseEnv, BaseAgent, BaseController), _code),
    (ManiSkillScene, _Scenes),
    ((Actor, Link), _Bodies),
    (Articulation, _Articulations),
    (BaseStruct, _Struct),
    (Kinematics, _Known),
)


# --- env steps


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What an env step has come to in N environments."""

    reward: Float32
    """[N]"""
    success: Bool
    """[N]"""
    fail: Bool
    """[N]"""
    state: Float32 | None = None
    """[N, S]; None where it was not asked for."""


def evaluate(env: Any, action: Any, observe: bool) -> Arrays:
    """The parts of `Evaluated`, in ManiSkill's order; `env` may stand for N environments. Observations are made only
    where they are read."""
    with frozen_poses():
        info = env.get_info()
        obs = env.get_obs(info, unflattened=True) if observe else None
        reward = env.get_reward(obs=obs, action=action, info=info)
    count = env.num_envs
    numbers = (
        _numbers(reward, count, torch.float32),
        _numbers(info.get("success", False), count, torch.bool),
        _numbers(info.get("fail", False), count, torch.bool),
    )
    return (*numbers, flat(obs)) if observe else numbers


def seen(env: Any) -> Float32:
    """[N, S]: the state now."""
    with frozen_poses():
        return flat(env.get_obs(env.get_info(), unflattened=True))


def flat(obs: Any) -> Float32:
    """ManiSkill's own flattening of nested observations, as an array [N, S]."""
    return result(flatten_state_dict(obs, use_torch=True).float()).numpy().copy()


def _numbers(value: Any, count: int, dtype: torch.dtype) -> npt.NDArray[Any]:
    """A number for each environment [N]."""
    tensor = value if isinstance(value, torch.Tensor) else torch.full((count,), value)
    return result(tensor).reshape(count).to(dtype).numpy().copy()


class Together:
    """N environments of one task that are stepped at once.

    The Python that they share has their state, but of the environments in `_own`. Once something cannot be shared,
    `reason` says what, all have their own state, and each is to be stepped by itself.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        self._envs = tuple(envs)
        self._unchecked = CHECKED
        self._own: set[int] = set()
        self.reason = ""
        cls = type(self._envs[0])
        acting = [hook for hook in HOOKS if getattr(cls, hook) is not getattr(BaseEnv, hook)]
        if acting:
            self.reason = f"{cls.__name__}.{acting[0]} acts on one environment"
        else:
            self._build()

    def _build(self) -> None:
        self._joining = _Joining(len(self._envs))
        self._env = _code(self._joining, self._envs)
        self._own = set()
        busy = [part for env in self._envs for part in (*robots(env), *controllers(env)) if not _rests(part)]
        if busy:
            self.reason = f"{type(busy[0]).__name__} acts between the steps of one environment's physics"
            return
        for robot in robots(self._env):
            vars(robot)["set_action"] = robot.controller.set_action  # as `speed_up` does

    # --- whose state it is

    def take_back(self, row: int) -> None:
        """Before the environment runs code of its own: give it the state that it has come to."""
        if row not in self._own and not self.reason:
            for code in self._joining.codes:
                code.store(row)
            self._own.add(row)

    def _fetch(self) -> None:
        """Take over what environments have done by themselves."""
        if not self._own or self.reason:
            return
        if self._envs[0].reconfiguration_freq != 0:  # their scenes are new
            for row in range(len(self._envs)):
                self.take_back(row)
            self._build()
            return
        others = [row for row in range(len(self._envs)) if row not in self._own]
        for row in self._own:
            for code in self._joining.codes:
                code.fetch(row, others)
        self._own.clear()

    @contextmanager
    def _only(self, rows: Sequence[int]) -> Iterator[None]:
        """Within the block the other environments' state stays as it is."""
        self._joining.acting = rows
        idle = [row for row in range(len(self._envs)) if row not in rows]
        kept = {code: _copied(vars(code)) for code in self._joining.codes} if idle else {}
        yield
        for code in tuple(self._joining.codes) if idle else ():
            for name, value in tuple(vars(code).items()):
                known = kept.get(code, {})
                if name in OWN or known.get(name) is value:
                    continue
                if name not in known and any(name not in vars(code.member(row)) for row in idle):
                    continue  # it is new
                before = known[name] if name in known else code.joined(name)  # joined within the block
                if not _stays(value, before, idle, len(self._envs)):
                    cls = type(code.member(0)).__name__
                    raise NotTogether(f"{cls}.{name} changes in some environments alone, and has no row for each")

    def _row_tensors(self) -> Iterator[tuple[_Code, str, torch.Tensor]]:
        for code in self._joining.codes:
            for name, value in vars(code).items():
                if isinstance(value, (torch.Tensor, Pose)):
                    tensor = _tensor(value)
                    if tensor.dim() and len(tensor) == len(self._envs):
                        yield code, name, tensor

    # --- steps

    def step(self, rows: Sequence[int], action: Any, observe: bool) -> Evaluated:
        """An env step of the environments of `rows`. `action` has a row for each of the N (of several robots it is a
        dict of such). What is returned for other rows has no meaning."""
        self._fetch()
        self._run(rows, lambda: self._act(rows, action), lambda row: self._act_alone(row, action))
        for row in rows:
            env = self._envs[row]
            for _ in range(env._sim_steps_per_control):
                env.scene.step()
        found = self._run(
            rows,
            lambda: after_physics(self._env, action, observe),
            lambda row: after_physics(self._envs[row], _row_of(action, row), observe),
        )
        self._unchecked = max(0, self._unchecked - 1)
        return Evaluated(*found)

    def seen(self, rows: Sequence[int]) -> Float32:
        """[N, S]: the states of `rows` now."""
        return self._run(rows, lambda: (seen(self._env),), lambda row: (seen(self._envs[row]),))[0]

    def _run(self, rows: Sequence[int], together: Callable[[], Arrays], alone: Callable[[int], Arrays]) -> Arrays:
        """What is computed for `rows`: together, or one by one where that fails or is compared."""
        if self.reason:
            return self._one_by_one(rows, alone)
        checking, checks = self._unchecked > 0, RowChecks(len(self._envs))
        before = [] if checking else [(code, _copied(vars(code))) for code in self._joining.codes]
        found: Arrays = ()
        try:
            with self._only(rows), by_rows(), checks if checking else nullcontext():
                for code, name, value in self._row_tensors() if checking else ():
                    own = vars(code.member(0)).get(name)
                    if own is None or _tensor(own).shape != value.shape:  # else it is equal in all
                        checks.mark(value)
                found = together()
            reason = checks.doubt
        except Exception as problem:  # whatever a task's code raises that is not written for batches
            reason = str(problem) if isinstance(problem, NotTogether) else f"{type(problem).__name__}: {problem}"
        if not checking:
            if not reason:
                return found
            for code, values in before:
                vars(code).clear()
                vars(code).update(values)
            for row in range(len(self._envs)):
                self.take_back(row)
            self.reason = reason
            return self._one_by_one(rows, alone)
        expected = self._one_by_one(rows, alone)
        if not reason and not all(_same(*pair, rows) for pair in zip(found, expected, strict=True)):
            reason = "its numbers are others in a batch"
        self.reason = reason
        return expected

    def _one_by_one(self, rows: Sequence[int], alone: Callable[[int], Arrays]) -> Arrays:
        each = [alone(row) for row in rows]
        found = tuple(np.zeros((len(self._envs), *part.shape[1:]), part.dtype) for part in each[0])
        for row, parts in zip(rows, each, strict=True):
            for whole, part in zip(found, parts, strict=True):
                whole[row] = part[0]
        return found

    def _act(self, rows: Sequence[int], action: Any) -> Arrays:
        self._env.agent.set_action(action)
        return self._one_by_one(rows, lambda row: (_targets(self._envs[row])[None],)) if self._unchecked else ()

    def _act_alone(self, row: int, action: Any) -> Arrays:
        env = self._envs[row]
        env.agent.set_action(_row_of(action, row))
        return (_targets(env)[None],)


def after_physics(env: Any, action: Any, observe: bool) -> Arrays:
    """The parts of `Evaluated`, once an env step's physics has been simulated."""
    env._elapsed_steps += 1
    return evaluate(env, action, observe)


def _targets(env: Any) -> Float32:
    """What the drives of all joints aim at."""
    joints = [joint for one in env.scene.articulations.values() for joint in one._objs[0].joints if joint.dof]
    return np.concatenate([target for joint in joints for target in (joint.drive_target, joint.drive_velocity_target)])


def _row_of(action: Any, row: int) -> Any:
    if isinstance(action, dict):
        return {name: part[row : row + 1] for name, part in action.items()}
    return action[row : row + 1]


def _same(one: npt.NDArray[Any], two: npt.NDArray[Any], rows: Sequence[int]) -> bool:
    """Equal to the last bit in these rows."""
    return one[list(rows)].tobytes() == two[list(rows)].tobytes()


def _rests(part: Any) -> bool:
    """True if the robot or controller does nothing between the steps of physics."""
    idle = (BaseAgent, MultiAgent, BaseController, PDJointPosController)
    known = any(type(part).before_simulation_step is one.before_simulation_step for one in idle)
    return known and not getattr(getattr(part, "config", None), "interpolate", False)


def _copied(value: Any) -> Any:
    """The value as it is now, for all that is changed in place."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.clone() if isinstance(value, torch.Tensor) else value.copy()
    if isinstance(value, Pose):
        return Pose(raw_pose=value.raw_pose.clone())
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _stays(value: Any, before: Any, idle: Sequence[int], count: int) -> bool:
    """Give the rows `idle` of `count` what they had before. False if that cannot be."""
    if type(value) is not type(before):
        return False
    if isinstance(value, (torch.Tensor, Pose)):
        new, old = _tensor(value), _tensor(before)
        if new.dim() and len(new) == count and new.shape == old.shape:
            new[list(idle)] = old[list(idle)]
            return True
        return torch.equal(new, old)
    if type(value) is dict:
        return value.keys() == before.keys() and all(_stays(value[key], before[key], idle, count) for key in value)
    if type(value) in (list, tuple):
        return len(value) == len(before) and all(
            _stays(new, old, idle, count) for new, old in zip(value, before, strict=True)
        )
    if isinstance(value, (Each, _Code)):
        return all(vars(value)["_members"][row] is vars(before)["_members"][row] for row in idle)
    return value is before or (isinstance(value, PLAIN) and bool(np.array_equal(cast(Any, value), before)))


def _tensor(value: Any) -> torch.Tensor:
    return value.raw_pose if isinstance(value, Pose) else value
