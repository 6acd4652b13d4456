"""OpenVLA as a policy: seven action tokens, one after the other. Base of all policies on its network.

B rows, C actions of a chunk, A action dimensions, K = C * A tokens, D the language model's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.layers import checked_noise, checked_widths
from policies.openvla import lora
from policies.openvla.actions import action_of, check_gripper, convert_gripper, read_statistics
from policies.openvla.files import ADAPTER_CONFIG, Shards
from policies.openvla.heads import ValueHead
from policies.openvla.images import read_preprocessing
from policies.openvla.model import Sequence as Tokens
from policies.openvla.model import from_checkpoint, load_model, save_model
from policies.openvla.prompts import Prompts
from policies.openvla.sampling import decode, score

BFLOAT16_TOLERANCE = 2e-2
"""Largest mean |ratio - 1| of unchanged weights in 16-bit arithmetic."""


class TokenPolicy(Policy):
    """A policy that says its actions in tokens of OpenVLA's network. Reads frames and the instruction.

    Each token is drawn from the 256 action tokens alone, at `temperature`, with one number of the noise; the mode is
    the likeliest token. The log-prob of a token is under that same distribution. The value head reads the state that
    predicts the first action token; its gradient reaches the network, as the actor's does.

    `trace["tokens"]` int64 [B, K] are the token ids.
    """

    range_eps: float
    """Added to the range of the statistics: 0 in OpenVLA, 1e-8 in OpenVLA-OFT."""

    def __init__(
        self,
        spec: PolicySpec,
        *,
        checkpoint: str = "",
        weights: str = "",
        unnorm_key: str = "",
        temperature: float = 1.0,
        gripper: str = "raw",
        rotate_images: bool = False,
        environment_resize: bool = False,
        center_crop: bool = False,
        image_backend: str = "device",
        dtype: str = "float32",
        adapter: str = "",
        lora_rank: int = 0,
        lora_alpha: float = 0.0,
        lora_parts: Sequence[str] = ("language", "projector"),
        gradient_checkpointing: bool = False,
        value_widths: Sequence[int] = (512, 128),
    ) -> None:
        """`checkpoint` is a Hugging Face directory; `weights` is what such a policy was saved as, of which tensors are
        taken instead of those of `checkpoint` or `adapter` (`policies.load` sets it). `unnorm_key` names the dataset
        whose statistics give actions their unit, where there are several. `adapter` is a PEFT directory; with
        `lora_rank` a new adapter is made, on `lora_parts`; without either every weight is trained. `lora_alpha` 0: as
        the rank.
        """
        super().__init__()
        self.check_spec(spec)
        if not checkpoint:
            raise PolicyError(f"{self.kind} needs a checkpoint: set policy.options.checkpoint to its directory")
        if temperature <= 0:
            raise PolicyError(f"temperature must be greater than 0, got {temperature}")
        if lora_rank < 0 or (lora_rank and adapter):
            raise PolicyError(
                f"give lora_rank (1 or more) for a new adapter or adapter for a saved one, got {lora_rank}"
            )
        saved_adapter = bool(weights) and (Path(weights) / ADAPTER_CONFIG).exists()
        source = Path(checkpoint if saved_adapter or not weights else weights).resolve()
        self._architecture = dict(
            checkpoint=str(Path(checkpoint).resolve()), unnorm_key=unnorm_key, temperature=float(temperature),
            gripper=check_gripper(gripper), rotate_images=rotate_images, environment_resize=environment_resize,
            center_crop=center_crop, image_backend=image_backend, dtype=dtype,
            adapter=str(Path(adapter).resolve()) if adapter else "", lora_rank=lora_rank, lora_alpha=float(lora_alpha),
            lora_parts=list(lora_parts), gradient_checkpointing=gradient_checkpointing,
            value_widths=list(checked_widths("value_widths", value_widths)),
        )  # fmt: skip
        self.spec = spec
        self.source = source
        self.temperature = float(temperature)
        self.gripper = gripper
        self.gradient_checkpointing = gradient_checkpointing
        self.noise_dim = spec.chunk * spec.action_dim
        self.model = load_model(source, dtype)
        self.prompts = Prompts(source, self.model.config)
        self.statistics = read_statistics(source, self.model.config.raw, unnorm_key)
        self.preprocessing = read_preprocessing(
            source, rotate=rotate_images, environment_resize=environment_resize, center_crop=center_crop,
            backend=image_backend,
        )  # fmt: skip
        if len(self.statistics.low) != spec.action_dim:
            raise PolicyError(
                f"the checkpoint's actions ({self.statistics.key}) have {len(self.statistics.low)} dimensions, the "
                f"task takes {spec.action_dim}"
            )
        if adapter:
            lora.attach_saved(self.model, Path(weights if saved_adapter else adapter))
        elif lora_rank:
            lora.attach(self.model, lora_rank, float(lora_alpha) or lora_rank, lora_parts)
        if gradient_checkpointing:
            self.model.language_model.activation_checkpointing_enable({"use_reentrant": False})
        self.value_head = ValueHead(self.model.width, value_widths)
        if self.model.dtype != torch.float32:
            self.ratio_tolerance = BFLOAT16_TOLERANCE

    def check_spec(self, spec: PolicySpec) -> None:
        """Raise `PolicyError` unless the policy can be of these sizes."""
        raise NotImplementedError

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained, and the network frozen."""
        return bool(self.model.adapter_config)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in super().actor_parameters() if p.requires_grad)

    def architecture(self) -> dict[str, Any]:
        return dict(self._architecture)

    def write_actor(self, folder: Path) -> bool:
        """An adapter in PEFT's layout where one is trained, else the whole Hugging Face directory."""
        if self.adapted:
            lora.save_adapter(self.model, folder)
        else:
            save_model(self.model, folder)
        return True

    def read_actor(self, folder: Path) -> dict[str, Tensor]:
        if self.adapted:
            tensors = lora.read_adapter(self.model, folder)
        else:
            state = self.model.state_dict()
            found = Shards.find(folder).read(self.model.checkpoint_state())
            renamed = {from_checkpoint(name): tensor for name, tensor in found.items()}
            tensors = {name: renamed[name] for name in state}
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    @classmethod
    def restore_arguments(cls, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}

    def export(self, folder: str | Path) -> None:
        """Write a Hugging Face directory with the adapter, if there is one, merged into the weights."""
        save_model(self.model, folder, lora.merged_state(self.model))

    def prepare(self, inputs: Inputs, tokens: int) -> Tokens:
        """The embedded sequence before the actions, for which it leaves room in the context."""
        images = self._images(inputs)
        rows = len(images)
        if len(inputs.instruction) != rows:
            raise PolicyError(
                f"{self.kind} reads an instruction for each row: got {len(inputs.instruction)} for {rows}; add "
                "'instruction' to policy.reads"
            )
        room = self.model.config.max_tokens - images.shape[1] - tokens
        ids, lengths = self.prompts.batch(inputs.instruction, room, images.device)
        return self.model.sequence(images, ids, lengths)

    def chunk_of(self, tokens: Tensor) -> Tensor:
        """int64 [B, K] token ids to actions float32 [B, C, A] in the environment's units."""
        return self.in_units(action_of(tokens, self.model.config.action_vocab))

    def in_units(self, normalised: Tensor) -> Tensor:
        """[B, K] or [B, C, A] in -1..1 to float32 [B, C, A]."""
        shaped = normalised.view(-1, self.spec.chunk, self.spec.action_dim)
        return convert_gripper(self.statistics.unnormalise(shaped, self.range_eps), self.gripper).float()

    def _images(self, inputs: Inputs) -> Tensor:
        """[B, I * patches, D]: the cameras' patches, in the order of the spec."""
        pixels = []
        for name in self.spec.cameras:
            frame = inputs.frames.get(name)
            if frame is None:
                given = ", ".join(inputs.frames) or "none"
                raise PolicyError(f"the policy reads the camera {name!r}, the inputs have: {given}")
            pixels.append(self.preprocessing(frame))
        return self.model.embed_images(torch.stack(pixels, 1))

    def _checkpointing(self) -> None:
        """Recompute activations in the backward pass, if that is asked for: transformers does so in training mode,
        which changes nothing else in a network without dropout."""
        self.model.language_model.train(self.gradient_checkpointing and torch.is_grad_enabled())

    def _shaped(self, x: Tensor) -> Tensor:
        return x.view(-1, self.spec.chunk, self.spec.action_dim)

    def _indices(self, tokens: Tensor) -> Tensor:
        return tokens - self.model.config.first_action_token


class OpenVLA(TokenPolicy):
    """OpenVLA (arXiv 2406.09246): A tokens, each of which sees those before it.

    `act` decodes with a static key-value cache, `evaluate` scores all tokens in one pass. Noise [B, A].
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
        return Action(self.chunk_of(said.tokens), self._shaped(said.log_prob), value, {"tokens": said.tokens})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        tokens = trace["tokens"]
        sequence = self.prepare(inputs, self.spec.action_dim)
        self._checkpointing()
        hidden = self.model.hidden(sequence.extended(self.model.embed_tokens(tokens[:, :-1])))
        states = self.model.predicting(hidden, sequence, self.spec.action_dim)
        log_prob, entropy = score(self.model.action_logits(states), self._indices(tokens), self.temperature)
        return Evaluation(self._shaped(log_prob), self._shaped(entropy), self.value_head(states[:, 0]))

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        sequence = self.prepare(inputs, self.spec.action_dim)
        self._checkpointing()
        return self.value_head(self.model.predicting(self.model.hidden(sequence), sequence, 1)[:, 0])
