"""OpenVLA-OFT as a policy: a whole chunk of actions from one forward pass.

B rows, C actions of a chunk, A action dimensions, K = C * A tokens, D the language model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from policies.contract import Action, Evaluation, Inputs, PolicyError, PolicySpec
from policies.cuda_graphs import replayed, replaying
from policies.layers import checked_noise, counted_mean
from policies.openvla.action_tokens import choose, score
from policies.openvla.costs import OpenVLACosts
from policies.openvla.heads import ActionHead, ProprioProjector
from policies.openvla.model import OpenVLAModel, Sequence
from policies.openvla.normalisation import DEMONSTRATIONS
from policies.openvla.options import CONVENTIONS, OFTOptions
from policies.openvla.policy import TokenPolicy
from policies.openvla.side_files import (
    ACTION_HEAD,
    FILM,
    PROPRIO,
    choose_side_files,
    side_folders,
)
from policies.small.encoders import vector

STOP = 2
"""The token </s>, which ends a training text."""
HEADS = ("tokens", "l1")


@replayed
def chunk_states(model: OpenVLAModel, sequence: Sequence, count: int, stop: bool) -> Tensor:
    """[B, K, D]: the states that predict K = `count` tokens after the sequence, from one pass over everything."""
    rows, _, width = sequence.embeddings.shape
    whole = sequence.extended(sequence.embeddings.new_zeros(rows, count, width))
    if stop:
        whole = whole.extended(model.embed_tokens(torch.full((rows, 1), STOP, device=sequence.positions.device)))
    return model.predicting(model.hidden(whole, full=True), sequence, count)


class OpenVLAOFT(TokenPolicy):
    """OpenVLA-OFT (arXiv 2502.19645): K placeholders with zero embeddings stand for the chunk's tokens, and every
    token, text and images too, attends to every other (in the reference by a patch of one attention implementation,
    here by the mask). The state before a placeholder predicts its token.

    Reads one or more cameras and, with `proprio`, proprioception as one more token after the image patches. With
    `film` the instruction modulates the vision towers. With head `tokens` it samples from noise [B, K]; `l1` regresses
    actions: it learns from demonstrations alone, since there is nothing to sample, to score or to reinforce.
    """

    kind = "openvla_oft"
    range_eps = 1e-8

    def __init__(self, spec: PolicySpec, options: OFTOptions) -> None:
        super().__init__(spec, options)
        self.stop = CONVENTIONS[options.convention]
        self.proprio_projector: ProprioProjector | None = None
        self.action_head: ActionHead | None = None
        dtype = self.model.dtype
        if options.proprio:
            self.statistics.normalise_proprio(torch.zeros(1, self.shown.proprio_dim))  # are they of this size?
            size = self.shown.proprio_dim
            self.proprio_projector = ProprioProjector.read(self.files[PROPRIO], size, self.model.width).to(dtype)
        if options.head == "l1":
            self.noise_dim = 0
            self.action_head = ActionHead.read(self.files[ACTION_HEAD], spec.action_dim, self.model.width).to(dtype)

    @classmethod
    def side_files(cls, architecture: Mapping[str, Any]) -> dict[str, Path]:
        head, step = architecture.get("head"), architecture.get("step")
        if head not in (None, *HEADS):
            raise PolicyError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
        if type(step) not in (int, str, type(None)):
            raise PolicyError(f"step must be a number or a text, got {step!r}")
        for name in ("proprio", "film"):
            if architecture.get(name) not in (None, False, True):
                raise PolicyError(f"{name} must be true or false, got {architecture[name]!r}")
        wanted = {
            ACTION_HEAD: None if head is None else head == "l1",
            PROPRIO: architecture.get("proprio"),
            FILM: architecture.get("film"),
        }
        return choose_side_files(side_folders(architecture), wanted, step)

    def check_spec(self, spec: PolicySpec) -> None:
        if not spec.cameras:
            raise PolicyError("openvla_oft reads images: it needs at least one camera in spec.cameras")

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    @replaying()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        states = self.states(inputs)
        value = self.value_head(states[:, 0])
        if self.action_head is not None:
            chunk = self.in_units(self.action_head(states), self.given_state(inputs))
            return Action(chunk, torch.zeros_like(chunk), value, {"chunk": chunk})
        logits = self.model.action_logits(states)
        choice = choose(logits, noise if noise is None else checked_noise(noise, self.noise_dim), self.temperature)
        tokens = choice + self.model.config.first_action_token
        log_prob, _ = score(logits, choice, self.temperature)
        chunk = self.chunk_of(tokens, self.given_state(inputs))
        return Action(chunk, self._shaped(log_prob), value, {"tokens": tokens})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        if self.action_head is not None:
            raise PolicyError("the l1 head regresses actions, which have no probability: take head: tokens to train")
        return super().evaluate(inputs, trace)

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """With head `l1`: the mean absolute error of normalised actions."""
        if self.action_head is None:
            return super().imitate(inputs, actions, counted, noise)
        said = self.action_head(self.states(inputs)).float()
        wanted = self.normalised(actions, counted, self.given_state(inputs)).float()
        return counted_mean((said - wanted).abs(), counted)

    def costs(self, instruction: str) -> OpenVLACosts:
        return OpenVLACosts(
            self, len(self.prompts.tokens(instruction)) + int(self.proprio_projector is not None), self.stop
        )

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        if self.proprio_projector is not None and proprio is None and self.statistics.key == DEMONSTRATIONS:
            raise PolicyError("the policy reads proprioception, which the demonstrations lack: leave proprio off")
        super().adopt_units(actions, proprio)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self.value_head(self.states(inputs)[:, 0])

    def states(self, inputs: Inputs, tokens: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """[B, K, D]: the states that predict the chunk's tokens; they see none of these tokens."""
        count = self.spec.chunk * self.spec.action_dim
        sequence = self.prepare(inputs, count + self.stop, features)
        return chunk_states(self.model, sequence, count, self.stop)

    def vision_features(self, inputs: Inputs) -> Tensor:
        if self.film is None:
            return super().vision_features(inputs)
        pixels = self._pixels(inputs)
        return self.model.vision_features(pixels, self._language(self.instructions(inputs, len(pixels)), pixels.device))

    def _language(self, instructions: tuple[str, ...], device: torch.device) -> Tensor:
        """[B, D]: the mean embedding of the tokens that are no action's: BOS, the prompt and, if it is there, STOP."""
        ids, lengths = self.prompts.batch(instructions, self.model.config.max_tokens, device)
        if self.stop:
            ids = functional.pad(ids, (0, 1))
            ids = ids.scatter(1, lengths[:, None], STOP)
            lengths = lengths + 1
        counted = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        embedded = self.model.embed_tokens(ids).float() * counted[..., None]
        return (embedded.sum(1) / lengths[:, None]).to(self.model.dtype)

    def _images(self, inputs: Inputs, features: Tensor | None) -> Tensor:
        images = super()._images(inputs, features)
        if self.proprio_projector is None:
            return images
        state = self.transforms.state(vector(inputs, "proprio", self.spec.proprio_dim))
        proprio = self.statistics.normalise_proprio(state)
        token = self.proprio_projector(proprio.to(images.dtype))
        return torch.cat([images, token[:, None]], 1)
