"""PPO in one file, as CleanRL's readers know it: it uses nothing of the farm but `gymnasium.vector`'s calls.

    python examples/cleanrl_ppo.py

Prints the success of the training episodes as they end.
"""

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

import sim_farm

STEPS, EPOCHS, MINIBATCH, GAMMA, LAMBDA, CLIP, RATE = 64, 8, 128, 0.9, 0.9, 0.2, 1e-3


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__()
        seen, acted = (int(np.prod(s.shape)) for s in (envs.single_observation_space, envs.single_action_space))
        self.actor, self.critic = network(seen, acted), network(seen, 1)
        self.log_std = nn.Parameter(torch.full((acted,), -1.0))

    def forward(self, seen: torch.Tensor) -> tuple[Normal, torch.Tensor]:
        return Normal(self.actor(seen), self.log_std.exp()), self.critic(seen)[..., 0]


def main(iterations: int = 30) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is small, and the workers need the cores
    envs = sim_farm.vector_env("tabletop/reach", 8, workers=2, autoreset_mode="SameStep")
    agent = Agent(envs)
    optimiser = torch.optim.Adam(agent.parameters(), lr=RATE)
    shape, solved = (STEPS, envs.num_envs), [0.0]
    seen, _ = envs.reset(seed=0)
    for iteration in range(iterations):
        obs = torch.zeros(*shape, *envs.single_observation_space.shape)
        actions = torch.zeros(*shape, *envs.single_action_space.shape)
        log_probs, rewards, dones, values, later = (torch.zeros(shape) for _ in range(5))
        for t in range(STEPS):
            obs[t] = torch.from_numpy(seen)
            with torch.no_grad():
                density, values[t] = agent(obs[t])
                actions[t] = density.sample()
                log_probs[t] = density.log_prob(actions[t]).sum(-1)
                seen, reward, terminations, truncations, infos = envs.step(actions[t].numpy())
                rewards[t], dones[t] = torch.from_numpy(reward), torch.from_numpy(terminations | truncations)
                following = seen.copy()
                for env in np.flatnonzero(dones[t]):
                    following[env] = infos["final_obs"][env]
                    solved.append(infos["final_info"]["success"][env])
                later[t] = agent(torch.from_numpy(following))[1] * ~torch.from_numpy(terminations)
        advantages, last = torch.zeros(shape), torch.zeros(envs.num_envs)
        for t in reversed(range(STEPS)):
            advantages[t] = last = rewards[t] + GAMMA * later[t] - values[t] + GAMMA * LAMBDA * (1 - dones[t]) * last
        batch = [each.flatten(0, 1) for each in (obs, actions, log_probs, advantages, advantages + values)]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(batch[0])).split(MINIBATCH):
                o, a, old, advantage, target = (each[rows] for each in batch)
                density, value = agent(o)
                ratio = (density.log_prob(a).sum(-1) - old).exp()
                scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.min(ratio * scaled, ratio.clamp(1 - CLIP, 1 + CLIP) * scaled).mean()
                optimiser.zero_grad()
                (0.5 * (value - target).square().mean() - gain).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimiser.step()
        print(f"iteration {iteration + 1}: success {np.mean(solved[-100:]):.0%} of the last episodes")
    envs.close()
    return float(np.mean(solved[-100:]))


if __name__ == "__main__":
    main()
