"""Less Python around the same PhysX calls: what ManiSkill recomputes within one env step is computed once.

Nothing here changes a number: `tests/sim_farm/test_maniskill.py` compares states, rewards and observations
bit for bit with an environment from plain `gym.make`. Outside `frozen_poses` and on environments that were
not given to `speed_up`, ManiSkill is what it was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from mani_skill.agents.controllers.base_controller import BaseController
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController, PDJointPosMimicController
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.utils.structs.actor import Actor
from mani_skill.utils.structs.link import Link
from mani_skill.utils.structs.pose import Pose

_poses: dict[int, torch.Tensor] | None = None
"""While poses are frozen: id of an actor or link to its pose [1, 7]. None: every read asks the simulator."""


@contextmanager
def frozen_poses() -> Iterator[None]:
    """Within the block each actor's and link's pose is read from the simulator once.

    Evaluation, observation and reward of one env step read the same poses nine times and more, and nothing
    moves between them. A pose that is set inside the block all the same ends the freeze.
    """
    global _poses
    _poses = {}
    try:
        yield
    finally:
        _poses = None


def frozen(thing: Any, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What is read of the thing; while poses are frozen, a copy of what was read first. A task may write into it."""
    if _poses is None:
        return read()
    known = _poses.get(id(thing))
    if known is None:
        known = _poses[id(thing)] = read()
    return known.clone()


def _freeze(cls: Any, simulator_pose: Any) -> None:
    stock = cls.pose

    def read(self: Any) -> Any:
        return stock.fget(self) if _poses is None else Pose(raw_pose=frozen(self, lambda: first_read(self)))

    def first_read(self: Any) -> torch.Tensor:
        if len(self._objs) != 1:
            return stock.fget(self).raw_pose
        pose = simulator_pose(self._objs[0])
        return torch.from_numpy(np.concatenate((pose.p, pose.q)))[None]

    def write(self: Any, pose: Any) -> None:
        global _poses
        _poses = None
        stock.fset(self, pose)

    cls.pose = property(read, write, doc=stock.__doc__)


_freeze(Actor, lambda entity: entity.pose)
_freeze(Link, lambda link: link.entity_pose)


@contextmanager
def short_collections() -> Iterator[None]:
    """Within the block a garbage collection looks at nothing that was there before.

    ManiSkill collects whenever it builds or closes a scene. Beside PyTorch that looks at 300,000 objects, which takes
    longer than all else that building an environment of PushCube does. Where the process has frozen them for good
    (`sim_farm.workers.worker`), nothing is left to do.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def bare_reset(env: Any) -> Iterator[None]:
    """Within the block `env.reset` makes no observation, which the caller makes, and seeds PyTorch's generator of the
    CPU alone. For GPUs that are not in use PyTorch would keep every seed, with a traceback."""
    stock = torch.manual_seed
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    env.get_info, env.get_obs = dict, lambda info: None
    try:
        yield
    finally:
        torch.manual_seed = stock
        del env.get_info, env.get_obs


def speed_up(env: Any) -> None:
    """Install the quicker equivalents on one environment; to be repeated when it has rebuilt its scene."""
    for articulation in env.scene.articulations.values():
        articulation.set_joint_drive_targets = MethodType(_set_joint_drive_targets, articulation)
    for agent in robots(env):
        # The agent's own method only adds a check for NaN, which the caller has made for the whole chunk.
        agent.set_action = agent.controller.set_action
    for controller in controllers(env):
        # Controllers of the end effector's pose scale in a way of their own.
        usual = type(controller)._clip_and_scale_action is BaseController._clip_and_scale_action
        if usual and hasattr(controller, "action_space_low"):
            _scale_with_constants(controller)
            if type(controller) in (PDJointPosController, PDJointPosMimicController):
                _set_action_in_numpy(controller)


def controllers(env: Any) -> list[Any]:
    """Those that the robots' actions go to: of the arm, of the gripper."""
    found: list[Any] = []
    for agent in robots(env):
        found += getattr(agent.controller, "controllers", {"": agent.controller}).values()
    return found


def robots(env: Any) -> list[Any]:
    return env.agent.agents if isinstance(env.agent, MultiAgent) else [env.agent]


def _set_joint_drive_targets(self: Any, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
    """`Articulation.set_joint_drive_targets` on the CPU, without a tensor per joint."""
    row = targets[0].numpy()
    for i, joint in enumerate(joints):
        joint._objs[0].drive_target = row[i : i + 1]


def _scale_with_constants(controller: Any) -> None:
    """Clip and scale an action by a middle and a half-width that are computed once."""
    low, high = controller.action_space_low, controller.action_space_high
    middle, half = 0.5 * (high + low), 0.5 * (high - low)
    controller._clip_and_scale_action = lambda action: middle + half * torch.clip(action, -1, 1)


def _set_action_in_numpy(controller: Any) -> None:
    """`set_action` of the joint position controllers for one environment: between ManiSkill's own scaling of the action
    and the drives, the same float32 operations in the same order, in numpy.

    The controller's `_start_qpos` is left alone: only an interpolating controller, which keeps ManiSkill's own
    `set_action`, reads it.
    """
    config = controller.config
    if config.interpolate or config.use_target:
        return
    robot = controller.articulation._objs[0]
    active = controller.active_joint_indices.numpy()
    driven, mimic = slice(None), None
    if isinstance(controller, PDJointPosMimicController):
        driven = controller.control_joint_indices.numpy()
        parts = controller.mimic_joint_indices, controller.mimic_control_joint_indices
        mimic = [part.numpy() for part in (*parts, controller._multiplier, controller._offset)]

    def set_action(action: torch.Tensor) -> None:
        scaled = controller._preprocess_action(action)[0].numpy()
        # New for each action: an array that is kept would outlive its episode.
        target = controller._target_qpos[0].numpy().copy()
        target[driven] = robot.qpos[active][driven] + scaled if config.use_delta else scaled
        if mimic:
            follower, leader, multiplier, offset = mimic
            target[follower] = target[leader] * multiplier + offset
        controller._target_qpos = torch.from_numpy(target[None])
        controller.set_drive_targets(controller._target_qpos)

    controller.set_action = set_action
