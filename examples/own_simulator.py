"""Your own simulator: a point in the plane that is to reach a goal, learned by PPO.

    python examples/own_simulator.py

The contract is `sim_farm.contract`; the laws that a simulator keeps are in sim_farm/conformance/.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import embodied
from embodied.config.schema import Config
from sim_farm.contract import Backend, EpisodeOver, EpisodeSpec, FarmError, Float32, PhysicsResult, TaskInfo, TaskSpec

LIMIT = 20


class PointPhysics:
    """Steps one environment and never draws. An episode is a function of its seed and its actions."""

    def __init__(self, spec: TaskSpec) -> None:
        if spec.control_mode not in (None, "delta") or spec.cameras not in (0, ()):
            raise FarmError(f"{spec.name} has the control mode delta and no camera, got {spec}")
        self.limit = spec.max_episode_steps or LIMIT
        self.info = TaskInfo(
            replace(spec, control_mode="delta", max_episode_steps=self.limit, cameras=()), control_hz=10.0,
            action_dim=2, action_low=(-1.0, -1.0), action_high=(1.0, 1.0), proprio_dim=2, state_dim=4,
            scene_bytes=32, cameras=(), max_episode_steps=self.limit,
        )  # fmt: skip
        self.left = 0

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        self.at, self.goal = np.random.default_rng(episode.seed).uniform(-1, 1, (2, 2))
        self.left = self.limit
        return self._result([], [])

    def step(self, actions: Float32) -> PhysicsResult:
        if not self.left:
            raise EpisodeOver("the episode is over: call reset")
        rewards, solved = list[float](), list[bool]()
        while self.left and len(rewards) < len(actions):
            before = np.linalg.norm(self.goal - self.at)
            self.at = self.at + 0.3 * np.clip(actions[len(rewards)], -1, 1).astype(np.float64)
            distance = np.linalg.norm(self.goal - self.at)
            solved.append(bool(distance < 0.15))
            progress = 0.0 if self.info.spec.reward == "sparse" else float(before - distance)
            rewards.append(1.0 if solved[-1] else progress)
            self.left = 0 if solved[-1] and not self.info.spec.ignore_terminations else self.left - 1
        return self._result(rewards, solved)

    def close(self) -> None:
        pass

    def _result(self, rewards: list[float], solved: list[bool]) -> PhysicsResult:
        ends = np.zeros((2, len(rewards)), bool)
        if rewards and not self.left:  # the task's own end, or the limit
            ends[0 if solved[-1] and not self.info.spec.ignore_terminations else 1, -1] = True
        scene = np.concatenate((self.at, self.goal))
        return PhysicsResult(
            np.array(rewards, np.float32), np.array(solved, bool), ends[0], ends[1], self.at.astype(np.float32),
            scene.astype(np.float32), scene.view(np.uint8), "reach the goal",
        )  # fmt: skip


# A renderer would draw `scene`; this task has no cameras.
BACKEND = Backend("point", make_physics=PointPhysics, make_renderer=None, tasks=lambda: ["reach"])
CONFIG = Config.model_validate(
    {"name": "example-simulator", "iterations": 8, "env": {"task": "own_simulator:BACKEND/reach"},
     "policy": {"options": {"widths": [32, 32]}}, "optim": {"policy_lr": 3e-3},
     "eval": {"episodes": 20, "videos": 0}}
)  # fmt: skip

if __name__ == "__main__":
    embodied.train(CONFIG, runs_dir="runs")
