"""Less Python around the same PhysX calls: what ManiSkill recomputes within one env step is computed once.

Nothing here changes a number; `tests/sim_farm/test_maniskill.py` compares states, rewards and observations
bit for bit with an environment from plain `gym.make`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from mani_skill.utils.structs.actor import Actor
from mani_skill.utils.structs.link import Link
from mani_skill.utils.structs.pose import Pose

_poses: dict[int, Any] | None = None
"""While poses are frozen: id of an actor or link to its pose. None: every read asks the simulator."""


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


def _freeze(cls: Any) -> None:
    stock = cls.pose

    def read(self: Any) -> Any:
        if _poses is None:
            return stock.fget(self)
        known = _poses.get(id(self))
        if known is None:
            known = stock.fget(self)
            _poses[id(self)] = known
        # A copy, because a task may write into the tensor it was given.
        return Pose(raw_pose=known.raw_pose.clone())

    def write(self: Any, pose: Any) -> None:
        global _poses
        if _poses is not None:
            _poses = None
        stock.fset(self, pose)

    cls.pose = property(read, write, doc=stock.__doc__)


_freeze(Actor)
_freeze(Link)


def _set_joint_drive_targets(self: Any, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
    """`Articulation.set_joint_drive_targets` on the CPU, without a tensor per joint."""
    row = targets[0].numpy()
    for i, joint in enumerate(joints):
        joint._objs[0].drive_target = row[i : i + 1]


def speed_up(env: Any) -> None:
    """Install the quicker equivalents on one environment's articulations; again after each reconfiguration."""
    for articulation in env.scene.articulations.values():
        articulation.set_joint_drive_targets = MethodType(_set_joint_drive_targets, articulation)
