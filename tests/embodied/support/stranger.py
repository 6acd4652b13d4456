"""A stranger's package: a simulator, a policy, a workflow and a ManiSkill task that nobody here knows, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIMULATOR = """
from dataclasses import replace

import numpy as np

from sim_farm.contract import Backend, EpisodeOver, FarmError, PhysicsResult, TaskInfo


class Point:
    def __init__(self, spec):
        if spec.control_mode not in (None, "delta") or spec.cameras not in (0, ()):
            raise FarmError(f"{spec.name} has the control mode delta and no camera, got {spec}")
        limit = spec.max_episode_steps or 20
        spec = replace(spec, cameras=(), control_mode="delta", max_episode_steps=limit)
        self.info, self.left = TaskInfo(spec, 2, (-1, -1), (1, 1), 2, 4, 32, (), limit, 10.0), 0

    def reset(self, episode):
        self.pose, self.left = np.random.default_rng(episode.seed).uniform(-1, 1, (2, 2)), self.info.max_episode_steps
        return self.result([], [])

    def step(self, actions):
        if not self.left:
            raise EpisodeOver("the episode is over: call reset")
        progress, solved = [], []
        while self.left and len(solved) < len(actions):
            before = np.linalg.norm(self.pose[1] - self.pose[0])
            self.pose[0] += 0.3 * actions[len(solved)].clip(-1, 1)
            progress.append(before - np.linalg.norm(self.pose[1] - self.pose[0]))
            solved.append(before - progress[-1] < 0.15)
            self.left = 0 if solved[-1] and not self.info.spec.ignore_terminations else self.left - 1
        return self.result(progress, solved)

    def result(self, progress, solved):
        solved, ends, spec = np.array(solved, bool), np.zeros((2, len(solved)), bool), self.info.spec
        if len(solved) and not self.left:
            ends[0 if solved[-1] and not spec.ignore_terminations else 1, -1] = True
        reward, state = np.where(solved, 1, 0 if spec.reward == "sparse" else progress), self.pose.flatten()
        seen = np.float32(state[:2]), np.float32(state), state.view("u1")
        return PhysicsResult(np.float32(reward), solved, *ends, *seen, "go")

    def close(self):
        pass


BACKEND = Backend("point", Point, None, tasks=lambda: ["reach", "reach_again"])
"""
POLICY = """
from torch import nn
from torch.distributions import Normal

import policies


class Linear(policies.Policy):
    def __init__(self, spec, *, std: float = 0.5):
        super().__init__()
        self.spec, self.noise_dim, self.std = spec, spec.action_dim, std
        self.mean, self.value_head = nn.Linear(spec.state_dim, spec.action_dim), nn.Linear(spec.state_dim, 1)

    def act(self, inputs, noise):
        mean = self.mean(inputs.state)[:, None].detach()
        trace = {"action": mean if noise is None else mean + self.std * noise[:, None]}
        log_prob = Normal(mean, self.std, validate_args=False).log_prob(trace["action"])
        return policies.Action(trace["action"], log_prob, self.value(inputs), trace)

    def evaluate(self, inputs, trace):
        density = Normal(self.mean(inputs.state)[:, None], self.std, validate_args=False)
        value = self.value_head(inputs.state)[:, 0]
        return policies.Evaluation(density.log_prob(trace["action"]), density.entropy(), value)

    def value(self, inputs):
        return self.value_head(inputs.state)[:, 0].detach()

    def architecture(self):
        return {"std": self.std}


class Deaf(policies.Policy):
    def act(self, inputs, noise): ...


class Stranger:
    def act(self, inputs, noise): ...
"""
WORKFLOW = """
from dataclasses import replace

from embodied.algorithms.estimators import gae
from embodied.workflows import PPO


def halved(batch, config):
    found = gae(batch, config)
    return replace(found, advantage=found.advantage / 2)


MINE = replace(PPO, name="mine", estimator=halved)
"""
TASKS = """
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import register_env


@register_env("PushGently-v1", max_episode_steps=12)
class PushGently(PushCubeEnv):
    instruction = "push the cube gently"

    def compute_normalized_dense_reward(self, obs, action, info):
        return super().compute_normalized_dense_reward(obs, action, info) - 0.1 * action.square().mean(-1)
"""
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "stranger"
version = "1.2"

[project.entry-points."embodied_farm.simulators"]
point = "stranger.sim:BACKEND"

[project.entry-points."embodied_farm.policies"]
linear = "stranger.policy:Linear"

[project.entry-points."embodied_farm.workflows"]
halved = "stranger.flow:MINE"
"""
NAMES = {"env.task": "stranger.sim:BACKEND", "policy.kind": "stranger.policy:Linear", "workflow": "stranger.flow:MINE"}
"""By key, the code that `settings` names."""


def write(folder: Path) -> None:
    """Write the package `stranger` into the folder."""
    (folder / "stranger").mkdir(parents=True)
    texts = {"__init__": "", "sim": SIMULATOR, "policy": POLICY, "flow": WORKFLOW, "tasks": TASKS}
    for name, text in texts.items():
        (folder / "stranger" / f"{name}.py").write_text(text)


def write_project(folder: Path) -> None:
    """Write the package with what `pip` builds it by, and entry points that offer its parts."""
    write(folder)
    (folder / "pyproject.toml").write_text(PROJECT)


def settings(mode: str = "inline", **more: Any) -> dict[str, Any]:
    """A short run of the package's parts."""
    return {
        "workflow": NAMES["workflow"],
        "iterations": 3,
        "checkpoint_every": 1,
        "env": {"task": f"{NAMES['env.task']}/reach", "num_envs": 4},
        "policy": {"kind": NAMES["policy.kind"], "options": {"std": 0.4}},
        "farm": {"physics_workers": 2},
        "rollout": {"decisions": 16},
        "eval": {"episodes": 4, "videos": 0},
        "runtime": {"mode": mode},
        **more,
    }
