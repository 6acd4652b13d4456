"""Writes the ManiSkill fixtures beside this file with ManiSkill's own recorder, `RecordEpisode` (mani_skill 3.0.1).

    python tests/embodied/demonstrations/recordings/make_maniskill.py

`push_ee`: PushCube-v1, `pd_ee_delta_pose`, three episodes: in two the gripper goes behind the cube and pushes it onto
the goal; in the third it pushes beside it. `push_joints`: the same task with `pd_joint_delta_pos`, whose targets are
the joints that the robot had in `push_ee`; each episode has some steps of zeros. Files are as the recorder wrote them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import mani_skill.envs  # noqa: F401  registers the tasks
import numpy as np
from mani_skill.utils.wrappers import RecordEpisode

HERE = Path(__file__).parent
SEEDS = (1000, 1001, 1002)


def recorder(name: str, mode: str) -> Any:
    env = gym.make("PushCube-v1", obs_mode="none", control_mode=mode, render_backend="none", sim_backend="physx_cpu")
    return RecordEpisode(env, str(HERE / name), save_video=False, trajectory_name="trajectory", source_type="scripted",
                         source_desc="a push")  # fmt: skip


def push(env: Any, seed: int, steps: int, lost: bool) -> np.ndarray:
    """[n, 7] positions of the arm's joints after each step of a push; `lost` pushes beside the cube."""
    env.reset(seed=seed)
    base, joints = env.unwrapped, []
    cube = base.obj.pose.p[0].numpy().copy()
    behind = cube + [-0.08, 0.15 if lost else 0.0, 0.0]
    ahead = cube + [0.12, 0.15 if lost else 0.0, 0.0]
    way = [behind, ahead]
    for _ in range(steps):
        at = base.agent.tcp.pose.p[0].numpy()
        if len(way) > 1 and np.linalg.norm(way[0] - at) < 0.03:
            way.pop(0)
        move = np.clip((way[0] - at) / 0.1, -1, 1)
        env.step(np.array([*move, 0, 0, 0, -1], np.float32))
        joints.append(base.agent.robot.get_qpos()[0, :7].numpy().copy())
    return np.stack(joints)


def main() -> None:
    env = recorder("push_ee", "pd_ee_delta_pose")
    ways = [push(env, seed, 12, lost=i == 2) for i, seed in enumerate(SEEDS)]
    env.close()
    env = recorder("push_joints", "pd_joint_delta_pos")
    for seed, way in zip(SEEDS, ways, strict=True):
        env.reset(seed=seed)
        for number, target in enumerate(way):
            for _ in range(3):
                joints = env.unwrapped.agent.robot.get_qpos()[0, :7].numpy()
                env.step(np.array([*np.clip((target - joints) / 0.06, -1, 1), -1], np.float32))
            if number == 5:
                for _ in range(3):
                    env.step(np.array([0, 0, 0, 0, 0, 0, 0, -1], np.float32))
        print(env.unwrapped.evaluate())
    env.close()


if __name__ == "__main__":
    main()
