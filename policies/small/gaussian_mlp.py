"""A normal distribution around what a small network says: the policy of state-based benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from policies.action_range import ActionRange
from policies.capabilities import Normalised
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.layers import (
    checked_noise,
    checked_widths,
    counted_mean,
    gaussian_entropy,
    gaussian_log_prob,
    mlp,
    only_counted,
)
from policies.policy_kind import PolicyKind
from policies.small.encoders import HistoryFormat, Normalizer, present, vector


class GaussianMLP(Policy):
    """Chunk ~ N(mean(state), exp(log_std)^2), element by element. Reads `state` alone.

    Actor and critic are separate tanh networks on the normalised state (of several observations: on all, joined):
    `value_head` is the whole critic. The
    actor's last layer is small, so that the first mean is near zero; log_std is a parameter [C, A] that does
    not depend on the state. `noise` [B, C * A] is the z of mean + std z. `trace["action"]` is the chunk as the network
    says it, whose -1 and 1 are the bounds of the environment's actions; densities are of these numbers.
    """

    kind = "gaussian_mlp"

    def __init__(
        self,
        spec: PolicySpec,
        *,
        widths: Sequence[int] = (256, 256, 256),
        critic_widths: Sequence[int] | None = None,
        initial_log_std: float = -1.0,
        observations: int = 1,
        distance: int = 1,
    ) -> None:
        """`critic_widths` None: as the actor's. A decision is made on `observations` K, `distance` env steps from each
        to the next."""
        super().__init__()
        if spec.state_dim < 1:
            raise PolicyError("gaussian_mlp reads the state: spec.state_dim must be at least 1, got 0")
        self.spec = spec = replace(spec, observations=observations, distance=distance)
        self.noise_dim = spec.chunk * spec.action_dim
        self.range = ActionRange(spec)
        self.widths = checked_widths("widths", widths)
        critic_widths = self.widths if critic_widths is None else critic_widths
        self.critic_widths = checked_widths("critic_widths", critic_widths)
        self.initial_log_std = float(initial_log_std)
        self.normalizer = Normalizer(spec.state_dim)
        self.actor = mlp(observations * spec.state_dim, self.widths, self.noise_dim, last_gain=0.01)
        self.log_std = nn.Parameter(torch.full((spec.chunk, spec.action_dim), self.initial_log_std))
        self.value_head = mlp(observations * spec.state_dim, self.critic_widths, 1, last_gain=1.0)

    @torch.no_grad()  # as fast as inference_mode here, and what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        state = self._state(inputs)
        mean = self._mean(state)
        said = mean
        if noise is not None:
            z = checked_noise(noise, self.noise_dim).view_as(mean)
            said = torch.addcmul(mean, z, self.log_std.exp())
        log_prob = gaussian_log_prob(said, mean, self.log_std)
        return Action(self.range.to_environment(said), log_prob, self.value_head(state).squeeze(-1), {"action": said})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        state = self._state(inputs)
        log_prob = gaussian_log_prob(trace["action"], self._mean(state), self.log_std)
        entropy = gaussian_entropy(self.log_std).expand_as(log_prob)
        return Evaluation(log_prob, entropy, self.value_head(state).squeeze(-1))

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """Minus the log-likelihood under the present spread, which stays: reinforcement learning explores with it."""
        mean, said = self._mean(self._state(inputs)), self.range.to_network(only_counted(actions, counted))
        return counted_mean(-gaussian_log_prob(said, mean, self.log_std.detach()), counted)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self.value_head(self._state(inputs)).squeeze(-1)

    def observe(self, inputs: Inputs) -> None:
        self.normalizer.observe(present(inputs, "state", self.spec.state_dim, self.spec.observations))

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        return [self.normalizer.beside("state", vector(inputs, "state", self.spec.state_dim))]

    def architecture(self) -> dict[str, Any]:
        return {
            "widths": list(self.widths),
            "critic_widths": list(self.critic_widths),
            "initial_log_std": self.initial_log_std,
            "observations": self.spec.observations,
            "distance": self.spec.distance,
        }

    def _state(self, inputs: Inputs) -> Tensor:
        """[B, K S] the normalised state of each observation."""
        return self.normalizer(vector(inputs, "state", self.spec.state_dim, self.spec.observations)).flatten(1)

    def _mean(self, state: Tensor) -> Tensor:
        return self.actor(state).view(-1, self.spec.chunk, self.spec.action_dim)


GAUSSIAN_MLP = PolicyKind(GaussianMLP, format=HistoryFormat(), scales_to_bounds=True)
