"""A stranger's package: a simulator, a policy, a workflow and a ManiSkill task that nobody here knows, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIMULATOR = """
from dataclasses import replace

import numpy as np

from sim_farm.contract import Backend, PhysicsResult, TaskInfo


class Point:
    def __init__(self, spec):
        spec = replace(spec, cameras=(), max_episode_steps=20)
        self.info = TaskInfo(spec, 2, (-1, -1), (1, 1), 2, 4, 32, (), 20, 10.0)

    def reset(self, episode):
        self.pose, self.steps = np.random.default_rng(episode.seed).uniform(-1, 1, (2, 2)), 0
        return self.result([], False)

    def step(self, actions):
        left = [np.linalg.norm(self.pose[1] - self.pose[0])]
        for action in actions[: 20 - self.steps]:
            self.pose[0] += 0.3 * action.clip(-1, 1)
            left.append(np.linalg.norm(self.pose[1] - self.pose[0]))
            if left[-1] < 0.15:
                break
        self.steps += len(left) - 1
        return self.result(-np.diff(left) + (np.array(left[1:]) < 0.15), left[-1] < 0.15)

    def result(self, reward, solved):
        last = np.arange(len(reward)) == len(reward) - 1
        success, limit, state = last & solved, last & (self.steps == 20 and not solved), self.pose.flatten()
        seen = np.float32(state[:2]), np.float32(state), state.view("u1")
        return PhysicsResult(np.float32(reward), success, success, limit, *seen, "go")

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
        log_prob = Normal(mean, self.std).log_prob(trace["action"])
        return policies.Action(trace["action"], log_prob, self.value(inputs), trace)

    def evaluate(self, inputs, trace):
        density = Normal(self.mean(inputs.state)[:, None], self.std)
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
NAMES = {"env.task": "stranger.sim:BACKEND", "policy.kind": "stranger.policy:Linear", "workflow": "stranger.flow:MINE"}
"""By key, the code that `settings` names."""


def write(folder: Path) -> None:
    """Write the package `stranger` into the folder."""
    (folder / "stranger").mkdir()
    texts = {"__init__": "", "sim": SIMULATOR, "policy": POLICY, "flow": WORKFLOW, "tasks": TASKS}
    for name, text in texts.items():
        (folder / "stranger" / f"{name}.py").write_text(text)


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
        "optim": {"threads": 1},
        "eval": {"episodes": 4, "videos": 0},
        "runtime": {"mode": mode, "trace": False},
        **more,
    }
