"""Writes the ManiSkill fixtures beside this file with ManiSkill's own recorder, `RecordEpisode` (mani_skill 3.0.1).

    python tests/extensions/importers/recordings/make_pushes.py

`pushes`: PushCube-v1, `pd_ee_delta_pose`, three episodes in one environment: in two the gripper goes behind the cube
and pushes it onto the goal; in the third it pushes beside it. The second begins with contacts that ManiSkill's reset
leaves in PhysX from the first's end, and is reproduced only after that. The files are as the recorder wrote them.
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


def push(env: Any, seed: int, steps: int, lost: bool) -> None:
    """A push; `lost` pushes beside the cube."""
    env.reset(seed=seed)
    base = env.unwrapped
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


def main() -> None:
    env = recorder("pushes", "pd_ee_delta_pose")
    for number, seed in enumerate(SEEDS):
        push(env, seed, 12, lost=number == 2)
    env.close()


if __name__ == "__main__":
    main()
