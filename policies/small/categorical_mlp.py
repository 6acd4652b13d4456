"""A choice among discrete actions, whose odds a small network says from the state or from pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from policies.capabilities import Normalised
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.layers import checked_noise, checked_widths, counted_mean, mlp, only_counted
from policies.policy_kind import PolicyKind
from policies.small.encoders import CHANNELS, ENCODERS, CnnEncoder, Normalizer, vector


class CategoricalMLP(Policy):
    """Each of the chunk's C actions is one of N choices, with probabilities softmax(logits(state)).

    Actor and critic are separate tanh networks on the normalised state: `value_head` is the whole critic. With the
    encoder "cnn" both are on the features of one small CNN, which reads `frames` and, where the spec has them,
    `proprio` and `state`; it belongs to the actor's parameters, and the value loss trains it too. The actor's last
    layer is small, so that at first all choices are about as likely. `noise` [B, C] becomes a uniform number by the
    normal's distribution function, and the cumulative probabilities turn that into a choice. The mode is the likeliest
    choice. `trace["action"]` is the chunk [B, C, 1]: the choices' numbers, as float32.
    """

    kind = "categorical_mlp"

    def __init__(
        self,
        spec: PolicySpec,
        *,
        widths: Sequence[int] = (64, 64),
        critic_widths: Sequence[int] | None = None,
        encoder: str = "state",
        features: int = 256,
        channels: Sequence[int] = CHANNELS,
    ) -> None:
        """`critic_widths` None: as the actor's. `features` and `channels` are the CNN's."""
        super().__init__()
        if encoder not in ENCODERS:
            raise PolicyError(f"encoder must be one of {', '.join(ENCODERS)}, got {encoder!r}")
        if encoder == "state" and spec.state_dim < 1:
            raise PolicyError(
                "categorical_mlp reads the state: spec.state_dim must be at least 1, got 0; it reads pictures with "
                "policy.options.encoder cnn"
            )
        if spec.action_dim != 1:
            raise PolicyError(f"categorical_mlp takes one choice per action, got spec.action_dim {spec.action_dim}")
        self.spec = spec
        self.noise_dim = spec.chunk
        self.widths = checked_widths("widths", widths)
        critic_widths = self.widths if critic_widths is None else critic_widths
        self.critic_widths = checked_widths("critic_widths", critic_widths)
        (self.features,), self.channels = checked_widths("[features]", [features]), tuple(channels)
        self.encoder = CnnEncoder(spec, self.features, self.channels) if encoder == "cnn" else None
        if self.encoder is None:
            self.normalizer = Normalizer(spec.state_dim)
        size = self.encoder.size if self.encoder is not None else spec.state_dim
        self.actor = mlp(size, self.widths, spec.chunk * spec.discrete_actions, last_gain=0.01)
        self.value_head = mlp(size, self.critic_widths, 1, last_gain=1.0)

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        seen = self._seen(inputs)
        choices = self._choices(seen)
        if noise is None:
            index = choices.logits.argmax(-1)
        else:
            # In float64, so that the sum's rounding does not depend on how rows are batched.
            rising = choices.logits.double().softmax(-1).cumsum(-1)
            uniform = torch.special.ndtr(checked_noise(noise, self.noise_dim).double())[..., None]
            index = (rising[..., :-1] <= uniform).sum(-1)
        chunk = index.float()[..., None]
        log_prob = choices.log_prob(index)[..., None]
        return Action(chunk, log_prob, self.value_head(seen).squeeze(-1), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        seen = self._seen(inputs)
        choices = self._choices(seen)
        log_prob = choices.log_prob(trace["action"].squeeze(-1).long())
        return Evaluation(log_prob[..., None], choices.entropy()[..., None], self.value_head(seen).squeeze(-1))

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """The cross-entropy of the demonstrated choices."""
        index = only_counted(actions, counted).squeeze(-1).round().long()
        log_prob = self._choices(self._seen(inputs)).log_prob(index.clamp(0, self.spec.discrete_actions - 1))
        return counted_mean(-log_prob[..., None], counted)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self.value_head(self._seen(inputs)).squeeze(-1)

    def observe(self, inputs: Inputs) -> None:
        if self.encoder is not None:
            self.encoder.observe(inputs)
        else:
            self.normalizer.observe(vector(inputs, "state", self.spec.state_dim))

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        if self.encoder is not None:
            return self.encoder.normalised_numbers(inputs)
        return [self.normalizer.beside("state", vector(inputs, "state", self.spec.state_dim))]

    def architecture(self) -> dict[str, Any]:
        return {
            "widths": list(self.widths),
            "critic_widths": list(self.critic_widths),
            "encoder": "state" if self.encoder is None else "cnn",
            "features": self.features,
            "channels": list(self.channels),
        }

    def _seen(self, inputs: Inputs) -> Tensor:
        """[B, F] what both networks read."""
        if self.encoder is not None:
            return self.encoder(inputs)
        return self.normalizer(vector(inputs, "state", self.spec.state_dim))

    def _choices(self, seen: Tensor) -> Categorical:
        """[B, C] choices among N."""
        logits = self.actor(seen).view(-1, self.spec.chunk, self.spec.discrete_actions)
        return Categorical(logits=logits, validate_args=False)  # validation reads numbers on the host


CATEGORICAL_MLP = PolicyKind(CategoricalMLP, chooses=True)
