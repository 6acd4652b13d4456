"""OpenVLA-OFT as a policy: a whole chunk of actions from one forward pass.

B rows, C actions of a chunk, A action dimensions, K = C * A tokens, D the language model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, PolicyError, PolicySpec
from policies.encoders import vector
from policies.files import check_tensors, one_file, read_state
from policies.imitation import counted_mean
from policies.layers import checked_noise
from policies.openvla.base import TokenPolicy
from policies.openvla.heads import ACTION_HEAD, PROPRIO_PROJECTOR, ActionHead, ProprioProjector, write_side_file
from policies.openvla.model import OpenVLAModel, Sequence
from policies.openvla.sampling import choose, score
from policies.openvla.statistics import DEMONSTRATIONS

STOP = 2
"""The token </s>, which ends a training text."""
CONVENTIONS = {"official": True, "simplevla-rl": True, "rlinf": False}
"""Whether a project's models see STOP after the action tokens. It is a key for every query: with another convention
than that of training most tokens change. Their padding differs too, but under a mask of valid keys and position ids
that count valid tokens all kinds of padding are the same."""
HEADS = ("tokens", "l1")


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

    Reads one or more cameras and, with `proprio`, proprioception as one more token after the image patches. With head
    `tokens` it samples from noise [B, K]; `l1` regresses actions: it learns from demonstrations alone, since there is
    nothing to sample, to score or to reinforce.
    """

    kind = "openvla_oft"
    range_eps = 1e-8

    def __init__(
        self,
        spec: PolicySpec,
        *,
        convention: str = "official",
        head: str = "tokens",
        proprio: bool = False,
        **options: Any,
    ) -> None:
        """`convention` names the project that trained the checkpoint; for `options` see `TokenPolicy`."""
        for name, value, valid in (("convention", convention, tuple(CONVENTIONS)), ("head", head, HEADS)):
            if value not in valid:
                raise PolicyError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
        super().__init__(spec, **options)
        self._architecture |= {"convention": convention, "head": head, "proprio": proprio}
        self.stop = CONVENTIONS[convention]
        self.proprio_projector: ProprioProjector | None = None
        self.action_head: ActionHead | None = None
        dtype = self.model.dtype
        if proprio:
            self.statistics.normalise_proprio(torch.zeros(1, self.shown.proprio_dim))  # are they of this size?
            size = self.shown.proprio_dim
            self.proprio_projector = ProprioProjector.read(self.source, size, self.model.width).to(dtype)
        if head == "l1":
            self.noise_dim = 0
            self.action_head = ActionHead.read(self.source, spec.action_dim, self.model.width).to(dtype)

    def check_spec(self, spec: PolicySpec) -> None:
        if not spec.cameras:
            raise PolicyError("openvla_oft reads images: it needs at least one camera in spec.cameras")

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
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

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        if self.proprio_projector is not None and proprio is None and self.statistics.key == DEMONSTRATIONS:
            raise PolicyError("the policy reads proprioception, which the demonstrations lack: leave proprio off")
        super().adopt_units(actions, proprio)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self.value_head(self.states(inputs)[:, 0])

    def states(self, inputs: Inputs, tokens: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """[B, K, D]: the states that predict the chunk's tokens, of which they see none."""
        count = self.spec.chunk * self.spec.action_dim
        sequence = self.prepare(inputs, count + self.stop, features)
        self._checkpointing()
        return chunk_states(self.model, sequence, count, self.stop)

    def write_actor(self, folder: Path) -> bool:
        super().write_actor(folder)
        self._write_side(folder)
        return True

    def export(self, folder: str | Path) -> None:
        super().export(folder)
        self._write_side(Path(folder))

    def read_actor(self, folder: Path) -> dict[str, Tensor]:
        tensors = super().read_actor(folder)
        for name, module, pattern in self._side():
            path = one_file(folder, pattern)
            state = read_state(path)
            check_tensors(path, state, module.state_dict())
            tensors |= {f"{name}.{key}": tensor for key, tensor in state.items()}
        return tensors

    def _images(self, inputs: Inputs, features: Tensor | None) -> Tensor:
        images = super()._images(inputs, features)
        if self.proprio_projector is None:
            return images
        state = self.transforms.state(vector(inputs, "proprio", self.spec.proprio_dim))
        proprio = self.statistics.normalise_proprio(state)
        token = self.proprio_projector(proprio.to(images.dtype))
        return torch.cat([images, token[:, None]], 1)

    def _write_side(self, folder: Path) -> None:
        for _, module, pattern in self._side():
            write_side_file(module, folder, one_file(self.source, pattern))

    def _side(self) -> list[tuple[str, nn.Module, str]]:
        """Modules with a file of their own: attribute, module, the file's pattern."""
        every = [
            ("proprio_projector", self.proprio_projector, PROPRIO_PROJECTOR),
            ("action_head", self.action_head, ACTION_HEAD),
        ]
        return [(name, module, pattern) for name, module, pattern in every if module is not None]
