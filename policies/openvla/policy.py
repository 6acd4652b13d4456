"""OpenVLA as a policy: seven action tokens, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.contract import Action, Inputs, PolicyError, PolicySpec
from policies.layers import checked_noise
from policies.openvla.base import TokenPolicy
from policies.openvla.sampling import decode


class OpenVLA(TokenPolicy):
    """OpenVLA (arXiv 2406.09246): A tokens, each of which sees those before it.

    `act` decodes with a static key-value cache; `evaluate` and `imitate` look at all tokens in one pass. Noise [B, A].
    """

    kind = "openvla"
    range_eps = 0.0

    def check_spec(self, spec: PolicySpec) -> None:
        if spec.chunk != 1 or len(spec.cameras) != 1:
            raise PolicyError(
                f"openvla takes one camera and gives one action, the task asks for {len(spec.cameras)} and "
                f"{spec.chunk}: name one camera and set policy.chunk to 1"
            )

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        if noise is not None:
            noise = checked_noise(noise, self.noise_dim)
        self._checkpointing()
        sequence = self.prepare(inputs, self.spec.action_dim)
        said = decode(self.model, sequence, self.spec.action_dim, noise, self.temperature)
        value = self.value_head(said.state)
        chunk = self.chunk_of(said.tokens, self.given_state(inputs))
        return Action(chunk, self._shaped(said.log_prob), value, {"tokens": said.tokens})

    def states(self, inputs: Inputs, tokens: Tensor, features: Tensor | None = None) -> Tensor:
        sequence = self.prepare(inputs, self.spec.action_dim, features)
        self._checkpointing()
        hidden = self.model.hidden(sequence.extended(self.model.embed_tokens(tokens[:, :-1])))
        return self.model.predicting(hidden, sequence, self.spec.action_dim)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        sequence = self.prepare(inputs, self.spec.action_dim)
        self._checkpointing()
        return self.value_head(self.model.predicting(self.model.hidden(sequence), sequence, 1)[:, 0])
