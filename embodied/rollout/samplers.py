"""Samplers draw the decisions of a rollout: the policy itself from the run's noise, or another program from its own
noise, by weights that it is given (`SampledElsewhere`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from embodied.devices import action_to_host, decide, device_of
from embodied.rollout.environment_groups import DecisionRequest
from embodied.trajectories.random_streams import SamplingNoise
from policies.capabilities import PublishedWeights, SampledElsewhere
from policies.contract import Action, Policy


class Sampler(Protocol):
    """Draws decisions by the present weights of a policy."""

    def sample(self, request: DecisionRequest) -> Action:
        """A decision for each of the request's n rows."""
        ...

    def at_version(self, version: int) -> None:
        """Draw by the policy's weights as they are now, those after `version` updates."""
        ...


class OwnNoise:
    """The policy's `act`, with noise that is keyed by environment, episode and env step."""

    def __init__(self, policy: Policy, seeds: Sequence[int]) -> None:
        self._policy = policy
        self._noise = [SamplingNoise(seed, policy.noise_dim) for seed in seeds]

    def sample(self, request: DecisionRequest) -> Action:
        noise = self._noise[request.task].draw(request.envs, request.episode, request.step)
        return decide(self._policy, request.inputs, torch.from_numpy(noise))

    def at_version(self, version: int) -> None:
        pass


class OtherProgram:
    """The program behind a policy that is `SampledElsewhere`."""

    def __init__(self, policy: Policy, folder: Path, publishes: bool) -> None:
        """`publishes`: this process gives the program each version of the weights, for all others too."""
        self._policy, self._folder, self._publishes = policy, folder, publishes
        self._weights = self._version(0)

    def sample(self, request: DecisionRequest) -> Action:
        return action_to_host(self._policy.sample(request.inputs.to(device_of(self._policy)), self._weights))

    def at_version(self, version: int) -> None:
        self._weights = self._version(version)
        if self._publishes:
            self._folder.mkdir(exist_ok=True)
            self._policy.publish(self._weights)

    def _version(self, version: int) -> PublishedWeights:
        return PublishedWeights(self._folder / f"{version:06d}", version)


def sampler_of(policy: Policy, seeds: Sequence[int], folder: Path, publishes: bool) -> Sampler:
    """The sampler of a policy's rollouts. `seeds` of the tasks key its noise; `folder` and `publishes` are of weights
    for another program."""
    if isinstance(policy, SampledElsewhere):
        return OtherProgram(policy, folder, publishes)
    return OwnNoise(policy, seeds)
