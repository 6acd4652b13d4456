"""Writes `pushcube.h5` and `pushcube.json` here, by ManiSkill's own `RecordEpisode`: python make_maniskill.py

Episode 0 pushes the cube to its goal, waiting five env steps on the way; episode 1 moves at random. Both go on after
their outcome is known, as recordings of ManiSkill do.
"""

from pathlib import Path
from typing import Any

import gymnasium as gym
import mani_skill.envs  # noqa: F401  (registers the tasks)
import numpy as np
from mani_skill.utils.wrappers import RecordEpisode

IDLE = np.array([0, 0, 0, -1], np.float32)


def push(env: gym.Env) -> None:
    """Lower the closed gripper behind the cube, wait, and push."""
    for step in range(22):
        if 8 <= step < 13:
            env.step(IDLE)
            continue
        inner: Any = env.unwrapped
        cube, hand = inner.obj.pose.p[0].numpy(), inner.agent.tcp.pose.p[0].numpy()
        target = cube + np.array([-0.07 if step < 8 else 0.2, 0, 0])
        move = np.clip((target - hand) / 0.1, -1, 1) * (1, 1, step < 8)
        env.step(np.append(move, -1).astype(np.float32))


def main() -> None:
    env = gym.make(
        "PushCube-v1", obs_mode="none", control_mode="pd_ee_delta_pos", sim_backend="physx_cpu", render_backend="none"
    )
    env = RecordEpisode(
        env, str(Path(__file__).parent), save_video=False, trajectory_name="pushcube", source_type="scripted"
    )
    env.reset(seed=7)
    push(env)
    env.reset(seed=8)
    for action in np.random.default_rng(0).uniform(-1, 1, (10, 4)).astype(np.float32):
        env.step(action)
    env.close()


if __name__ == "__main__":
    main()
