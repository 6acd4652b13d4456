"""PPO in one file, to be read from top to bottom: what the stack must compute, written without the stack.

One environment after another, one env step at a time, on states, one action per decision. It shares with the
stack only the simulator and the initial weights; everything else (seeds, noise, normalisation, advantages,
losses, minibatches) is written out here a second time, from the formulas, as plainly as possible.

    python -m tests.reference_ppo        # learns tabletop/reach in half a minute, with one line per iteration
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import policies
import sim_farm
from sim_farm.contract import EpisodeSpec, TaskSpec

# What a seed's numbers are for: the last word of Philox' counter, and the first of an episode's seed sequence.
SAMPLING, PERMUTATION, TRAINING = 0, 1, 0
DRAWN_AT_ONCE = 16  # steps of an episode whose noise comes from one generator
HUBER_DELTA = 10.0


@dataclass(frozen=True)
class Settings:
    task: str = "tabletop/reach"
    max_episode_steps: int | None = None
    seed: int = 0
    iterations: int = 30
    num_envs: int = 16
    steps: int = 64  # per environment and iteration
    widths: tuple[int, ...] = (64, 64)
    initial_log_std: float = -1.0
    gamma: float = 0.99
    lam: float = 0.95
    bootstrap_terminations: bool = False
    clip: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    epochs: int = 8
    minibatch: int = 256
    policy_lr: float = 1e-3
    value_lr: float = 1e-3
    max_grad_norm: float = 0.5


@dataclass
class Episode:
    env: int
    solved: bool = False
    total: float = 0.0
    length: int = 0


@dataclass
class Transition:
    """One step of one environment."""

    state: Tensor  # raw, before normalisation
    action: Tensor
    log_prob: float
    value: float
    reward: float
    terminated: bool
    truncated: bool
    final_value: float  # V of the ended episode's own last observation, where its value is bootstrapped


class Agent(nn.Module):
    """N(actor(s), exp(log_std)^2) and a critic of its own, both on the normalised state s."""

    def __init__(self, state_dim: int, action_dim: int, settings: Settings) -> None:
        super().__init__()
        self.actor = tanh_network(state_dim, settings.widths, action_dim)
        self.log_std = nn.Parameter(torch.zeros(1, action_dim))
        self.value_head = tanh_network(state_dim, settings.widths, 1)
        # Not parameters: statistics of all states that were learned from so far.
        self.seen: list[Tensor] = []
        self.mean, self.var = torch.zeros(state_dim).double(), torch.ones(state_dim).double()
        spec = policies.PolicySpec(action_dim=action_dim, state_dim=state_dim)
        options = {"widths": list(settings.widths), "initial_log_std": settings.initial_log_std}
        initial = policies.build("gaussian_mlp", spec, settings.seed, **options).state_dict()
        self.load_state_dict({name: t for name, t in initial.items() if not name.startswith("normalizer.")})

    def normalised(self, state: Tensor) -> Tensor:
        return ((state - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def value(self, state: Tensor) -> Tensor:
        return self.value_head(self.normalised(state)).squeeze(-1)

    def distribution(self, state: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.actor(self.normalised(state)), self.log_std.exp())

    def learn_statistics(self, states: Tensor) -> None:
        """Mean and population variance over everything seen, the slow way: keep it all and compute it anew."""
        self.seen.append(states.double())
        everything = torch.cat(self.seen)
        self.mean = everything.mean(0)
        self.var = (everything - self.mean).square().mean(0)


def tanh_network(inputs: int, widths: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def generator(purpose: int, seed: int, key: int, major: int, minor: int) -> np.random.Generator:
    """A counter-based generator: what it draws is a function of these five numbers."""
    counter = np.array([0, minor, major, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64), counter=counter))


class Environment:
    """Environment number `index`: its episodes follow one another for ever."""

    def __init__(self, index: int, settings: Settings) -> None:
        task = TaskSpec(settings.task, max_episode_steps=settings.max_episode_steps)
        self.physics: Any = sim_farm.make_physics(task)
        self.index, self.seed = index, settings.seed
        self.number = -1  # of the present episode
        self.begin()

    def begin(self) -> None:
        self.number += 1
        words = np.random.SeedSequence((TRAINING, self.seed, self.index, self.number)).generate_state(1)
        self.state = torch.from_numpy(self.physics.reset(EpisodeSpec(int(words[0]) // 2)).state)
        self.episode = Episode(self.index)

    def noise(self, size: int) -> Tensor:
        """Standard normal numbers for the present step: keyed by run, environment, episode and step."""
        block, row = divmod(self.episode.length, DRAWN_AT_ONCE)
        numbers = generator(SAMPLING, self.seed, self.index, self.number, block)
        return torch.from_numpy(numbers.standard_normal((DRAWN_AT_ONCE, size), np.float32)[row])

    @torch.no_grad()
    def step(self, agent: Agent, bootstrap_terminations: bool) -> tuple[Transition, Episode | None]:
        """One decision and what became of it, with the episode if that ended it (then the next one has begun)."""
        state = self.state[None]
        dist = agent.distribution(state)
        action = dist.mean + dist.stddev * self.noise(dist.mean.shape[1])
        log_prob, value = float(dist.log_prob(action).sum()), float(agent.value(state))

        result = self.physics.step(action.numpy())
        reward, terminated, truncated = float(result.reward[0]), bool(result.terminated[0]), bool(result.truncated[0])
        self.state = torch.from_numpy(result.state)
        episode, final_value = self.episode, 0.0
        episode.solved |= bool(result.success[0])
        episode.total += reward
        episode.length += 1
        if truncated or (terminated and bootstrap_terminations):
            final_value = float(agent.value(self.state[None]))  # before the next episode's first state is here
        if terminated or truncated:
            self.begin()
        transition = Transition(state[0], action[0], log_prob, value, reward, terminated, truncated, final_value)
        return transition, episode if terminated or truncated else None


def advantages(steps: list[Transition], next_value: float, settings: Settings) -> list[float]:
    """Generalised advantages of one environment's steps, from the last to the first."""
    found, later = [], 0.0
    for step in reversed(steps):
        ended = step.terminated or step.truncated
        delta = step.reward + settings.gamma * (step.final_value if ended else next_value) - step.value
        later = delta + (0.0 if ended else settings.gamma * settings.lam * later)
        found.append(later)
        next_value = step.value
    return found[::-1]


def huber(error: Tensor) -> Tensor:
    size = error.abs()
    return torch.where(size < HUBER_DELTA, error.square() / 2, HUBER_DELTA * (size - HUBER_DELTA / 2))


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, rows: list[Transition], gains: list[float],
    iteration: int, settings: Settings,
) -> None:  # fmt: skip
    """Epochs over the rows in new orders, one optimiser step per minibatch."""
    states, actions = torch.stack([row.state for row in rows]), torch.stack([row.action for row in rows])
    old_log_prob, old_value = torch.tensor([row.log_prob for row in rows]), torch.tensor([row.value for row in rows])
    advantage = torch.tensor(gains)
    returns = advantage + old_value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for epoch in range(settings.epochs):
        order = generator(PERMUTATION, settings.seed, 0, iteration, epoch).permutation(len(rows))
        for start in range(0, len(rows), settings.minibatch):
            pick = torch.from_numpy(order[start : start + settings.minibatch])
            dist, value = agent.distribution(states[pick]), agent.value(states[pick])

            ratio = (dist.log_prob(actions[pick]).sum(1) - old_log_prob[pick]).exp()
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            policy_loss = -torch.minimum(advantage[pick] * ratio, advantage[pick] * clipped).mean()

            moved = (value - old_value[pick]).clamp(-settings.value_clip, settings.value_clip)
            near = old_value[pick] + moved
            value_loss = torch.maximum(huber(returns[pick] - value), huber(returns[pick] - near)).mean()

            entropy = dist.entropy().sum(1).mean()
            loss = policy_loss + settings.value_coef * value_loss - settings.entropy_coef * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
            optimizer.step()
    agent.learn_statistics(states)


def train(settings: Settings, tell: Any = None) -> tuple[Agent, list[list[Episode]]]:
    """The trained agent, and for every iteration the episodes that ended in it, by step and environment."""
    envs = [Environment(index, settings) for index in range(settings.num_envs)]
    info = envs[0].physics.info
    agent = Agent(info.state_dim, info.action_dim, settings)
    optimizer = torch.optim.Adam(
        [
            {"params": [*agent.actor.parameters(), agent.log_std], "lr": settings.policy_lr},
            {"params": agent.value_head.parameters(), "lr": settings.value_lr},
        ],
        eps=1e-5,
    )
    history: list[list[Episode]] = []
    for iteration in range(settings.iterations):
        steps: list[list[Transition]] = [[] for _ in envs]
        ended: list[Episode] = []
        for _ in range(settings.steps):
            for env, own in zip(envs, steps, strict=True):
                transition, episode = env.step(agent, settings.bootstrap_terminations)
                own.append(transition)
                ended += [episode] if episode else []
        gains = []
        for env, own in zip(envs, steps, strict=True):
            with torch.no_grad():
                next_value = float(agent.value(env.state[None]))
            gains.append(advantages(own, next_value, settings))
        # Rows by step, then environment: minibatches are drawn from this order.
        rows = [own[t] for t in range(settings.steps) for own in steps]
        update(agent, optimizer, rows, [own[t] for t in range(settings.steps) for own in gains], iteration, settings)
        history.append(ended)
        if tell is not None:
            tell(iteration, ended)
    return agent, history


def _print(iteration: int, ended: list[Episode]) -> None:
    solved = np.mean([episode.solved for episode in ended]) if ended else float("nan")
    print(f"iteration {iteration + 1}: {len(ended)} episodes ended, {solved:.0%} of them solved", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Settings(), _print)
