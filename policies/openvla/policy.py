"""OpenVLA as a policy, and what it shares with OpenVLA-OFT: inputs, units of actions, loss, files on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies import lora
from policies.capabilities import Normalised
from policies.contract import Action, Evaluation, Inputs, PolicyError, PolicySpec
from policies.cuda_graphs import replaying
from policies.files import ADAPTER_CONFIG
from policies.layers import checked_noise, counted_mean, only_counted
from policies.openvla import adapters
from policies.openvla.action_tokens import action_of, decode, score, token_of
from policies.openvla.config import TOWERS
from policies.openvla.costs import OpenVLACosts
from policies.openvla.film import load_film
from policies.openvla.heads import ValueHead
from policies.openvla.images import read_preprocessing
from policies.openvla.model import Sequence as Tokens
from policies.openvla.model import load_model
from policies.openvla.normalisation import (
    DEMONSTRATIONS,
    choose_statistics,
    identity,
    read_datasets,
    with_adapters,
)
from policies.openvla.options import TokenOptions
from policies.openvla.prompts import Prompts
from policies.openvla.side_files import FILM, adapter_home, refuse_side_files, side_folders
from policies.small.encoders import camera_frames, vector
from policies.transforms import Gripper, Transforms

BFLOAT16_TOLERANCE = 1e-1
"""Largest mean |ratio - 1| of unchanged weights in 16-bit arithmetic. Tokens decoded one by one are rounded differently
from tokens in one pass: 3.2e-2 for 7B parameters on an H200 (benchmarks/results/gpu.json)."""
FEATURES = "features"
"""Entry of a trace: the result of `precompute`."""


class TokenPolicy(lora.AdaptedPolicy):
    """A policy whose actions are tokens of OpenVLA's network. Reads frames and the instruction.

    Each token is drawn from the action tokens alone, at `temperature`, with one number of the noise; the mode is
    the likeliest token. The log-prob of a token is under that same distribution. The value head reads the state that
    predicts the first action token; its gradient reaches the network, as the actor's does.

    `trace["tokens"]` int64 [B, K] are the token ids. Imitation raises their probability among the whole vocabulary.
    """

    range_eps: float
    """Added to the range of the statistics: 0 in OpenVLA, 1e-8 in OpenVLA-OFT."""

    @classmethod
    def side_files(cls, architecture: Mapping[str, Any]) -> dict[str, Path]:
        """Files beside the weights that the arguments use, by component. Raises `PolicyError`, which names them, for
        those that nothing uses."""
        for folder in side_folders(architecture):
            refuse_side_files(folder, cls.kind)
        return {}

    def __init__(self, spec: PolicySpec, options: TokenOptions) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        super().__init__()
        self.check_spec(spec)
        if not options.checkpoint:
            raise PolicyError(f"{self.kind} needs a checkpoint: set policy.options.checkpoint to its directory")
        self.files = self.side_files(vars(options))
        """Files beside the weights that are used, by component."""
        self.options = options = options.resolved()
        self.transforms = Transforms(options.transforms)
        self.shown = self.transforms.spec(spec)  # to the network
        if options.unnorm_key == DEMONSTRATIONS:
            self.transforms.check_demonstrated_units()
        weights, adapter = options.weights, options.adapter
        saved_adapter = bool(weights) and (Path(weights) / ADAPTER_CONFIG).exists()
        self.source = source = Path(options.checkpoint if saved_adapter or not weights else weights).resolve()
        self.spec = spec
        self.temperature = float(options.temperature)
        self.noise_dim = spec.chunk * spec.action_dim
        self.model = load_model(source, options.dtype)
        self.film = load_film(self.model, self.files[FILM]) if FILM in self.files else None
        self.prompts = Prompts(source, self.model.config, options.prompt)
        saved = Path(weights if saved_adapter else adapter) if saved_adapter or adapter else None
        if self.model.shards is not None:
            adapters.check_other_files(self.model.shards, [adapter, weights])
        self.datasets = read_datasets(source, self.model.config.raw)
        if saved is not None:
            self.datasets = with_adapters(self.datasets, adapter_home(saved))
        self.statistics = (
            identity(spec.action_dim, self.shown.proprio_dim)
            if options.unnorm_key == DEMONSTRATIONS and DEMONSTRATIONS not in self.datasets
            else choose_statistics(source, self.datasets, options.unnorm_key, options.bounds)
        )
        self.preprocessing = read_preprocessing(
            source, environment_jpeg=options.environment_jpeg, environment_resize=options.environment_resize,
            center_crop=options.center_crop, backend=options.image_backend,
        )  # fmt: skip
        if len(self.statistics.low) != spec.action_dim:
            raise PolicyError(
                f"the checkpoint's actions ({self.statistics.key}) have {len(self.statistics.low)} dimensions, the "
                f"task takes {spec.action_dim}: set env.task or env.control_mode to what it was trained on, or "
                f"policy.options.unnorm_key to a dataset of as many (to learn from demonstrations: {DEMONSTRATIONS})"
            )
        if saved is not None:
            adapters.attach_saved(self.model, saved, any_base=options.any_base)
        else:
            adapters.check_saved_beside(self.model)
            if options.lora_rank:
                alpha = float(options.lora_alpha) or options.lora_rank
                adapters.attach(self.model, options.lora_rank, alpha, options.lora_parts)
        # What `precompute` covers stays the same while gradients are switched off for a pass.
        self._trains_towers = _is_trained(self.model.vision_backbone)
        self._trains_projector = _is_trained(self.model.projector)
        values = spec.chunk if options.value_per_action else None
        self.value_head = ValueHead(self.model.width, options.value_widths, values)
        if self.model.dtype != torch.float32:
            self.ratio_tolerance = BFLOAT16_TOLERANCE

    def check_spec(self, spec: PolicySpec) -> None:
        """Raise `PolicyError` unless the policy can be of these sizes."""
        raise NotImplementedError

    def states(self, inputs: Inputs, tokens: Tensor, features: Tensor | None = None) -> Tensor:
        """[B, K, D]: the states that predict the tokens int64 [B, K], from one pass; `features` of `precompute`."""
        raise NotImplementedError

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        tokens = trace["tokens"]
        states = self.states(inputs, tokens, trace.get(FEATURES))
        choice = tokens - self.model.config.first_action_token
        log_prob, entropy = score(self.model.action_logits(states), choice, self.temperature)
        return Evaluation(self._shaped(log_prob), self._shaped(entropy), self.value_head(states[:, 0]))

    @torch.no_grad()
    def precompute(self, inputs: Inputs) -> dict[str, Tensor]:
        """`features` [B, I * patches, ..] in the model's dtype: what the towers see, projected where the projector is
        not trained either. Nothing, where the towers are trained."""
        if self._trains_towers:
            return {}
        features = self.vision_features(inputs)
        return {FEATURES: features if self._trains_projector else self.model.projector(features)}

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        config = self.model.config
        wanted = self.normalised(actions, counted, self.given_state(inputs))
        tokens = token_of(wanted, config.action_vocab, config.bins).flatten(1)
        losses = self.model.negative_log_probs(self.states(inputs, tokens), tokens)
        return counted_mean(self._shaped(losses), counted)

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        # Where the checkpoint has them, it has learned in them.
        if self.statistics.key == DEMONSTRATIONS and DEMONSTRATIONS not in self.datasets:
            said = self.transforms.demonstrated(actions[:, None], proprio)[:, 0]
            state = None if proprio is None else self.transforms.state(proprio)
            self.statistics.adopt(said, state, gripper=self.transforms.has(Gripper))

    own_units = f"unnorm_key {DEMONSTRATIONS}"

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        given, statistics = self.given_state(inputs), self.statistics
        said = self.transforms.demonstrated(actions[:, None], given)[:, 0]
        low, high = (torch.where(statistics.mask, end, torch.nan) for end in (statistics.low, statistics.high))
        found = [Normalised("action", said, low, high)]
        if given is not None and len(statistics.proprio_low):
            state = self.transforms.state(given)
            found.append(Normalised("proprio", state, statistics.proprio_low, statistics.proprio_high))
        return found

    @property
    def network_image_size(self) -> int:
        return self.model.config.image_size

    @property
    def normalised_by(self) -> str:
        own = self.statistics.key == DEMONSTRATIONS and DEMONSTRATIONS not in self.datasets
        return "the rows learned from" if own else f"the checkpoint's own of {self.statistics.key!r}"

    @property
    def adaptable(self) -> lora.AdaptedModel:
        return self.model

    def shards(self) -> Sequence[Sequence[nn.Module]]:
        """Each block of the towers, and each layer of the language model but the last. `OpenVLAModel.states` calls the
        parts of the last layer. Embedding, projector, last layer, final norm and head stay together, tied or not."""
        towers = [getattr(self.model.vision_backbone, tower) for tower in TOWERS]
        layers = self.model.language_model.model.layers
        return [[module] for module in (*(block for tower in towers for block in tower.blocks), *layers[:-1])]

    def costs(self, instruction: str) -> OpenVLACosts:
        return OpenVLACosts(self, len(self.prompts.tokens(instruction)))

    def architecture(self) -> dict[str, Any]:
        return self.options.as_data()

    def prepare(self, inputs: Inputs, tokens: int, features: Tensor | None = None) -> Tokens:
        """The embedded sequence before the actions, for which it leaves room in the context."""
        images = self._images(inputs, features)
        room = self.model.config.max_tokens - images.shape[1] - tokens
        ids, lengths = self.prompts.batch(self.instructions(inputs, len(images)), room, images.device)
        return self.model.sequence(images, ids, lengths)

    def instructions(self, inputs: Inputs, rows: int) -> tuple[str, ...]:
        """The instruction of each row. Raises `PolicyError` unless there is one."""
        if len(inputs.instruction) != rows:
            raise PolicyError(
                f"{self.kind} reads an instruction for each row: got {len(inputs.instruction)} for {rows}; add "
                "'instruction' to policy.reads"
            )
        return inputs.instruction

    def chunk_of(self, tokens: Tensor, state: Tensor | None) -> Tensor:
        """int64 [B, K] token ids to actions float32 [B, C, A] in the environment's units, in states [B, P]."""
        return self.in_units(action_of(tokens, self.model.config.action_vocab, self.model.config.bins), state)

    def in_units(self, normalised: Tensor, state: Tensor | None) -> Tensor:
        """[B, K] or [B, C, A] in -1..1 to float32 [B, C, A] in the environment's units."""
        actions = self.statistics.unnormalise(self._shaped(normalised), self.range_eps)
        return self.transforms.executed(actions, state).float()

    def normalised(self, actions: Tensor, counted: Tensor, state: Tensor | None) -> Tensor:
        """The inverse: demonstrated actions [B, C, A] to float64 in -1..1; those not counted [B, C] to anything."""
        said = self.transforms.demonstrated(only_counted(actions, counted), state)
        return self.statistics.normalise(said, self.range_eps)

    def given_state(self, inputs: Inputs) -> Tensor | None:
        """[B, P] as the environment gives it, where it is read."""
        return vector(inputs, "proprio", self.spec.proprio_dim) if self.spec.proprio_dim else None

    def _pixels(self, inputs: Inputs) -> Tensor:
        """[B, I, 6, S, S]: the cameras' pictures, in the order of the spec."""
        frames = (camera_frames(inputs, name) for name in self.spec.cameras)
        return torch.stack([self.pixels(each, inputs.cropped) for each in frames], 1)

    def pixels(self, frames: Tensor, cropped: bool = False) -> Tensor:
        """A camera's uint8 [B, H, W, 3] to float32 [B, 6, S, S]; `cropped` as in `Inputs`."""
        return self.preprocessing(self.transforms.frames(frames), cropped)

    def _images(self, inputs: Inputs, features: Tensor | None) -> Tensor:
        """[B, I * patches, D]: the cameras' patches, from the features of `precompute` if there are any."""
        if features is None:
            return self.model.projector(self.vision_features(inputs))
        return self.model.projector(features) if self._trains_projector else features

    def vision_features(self, inputs: Inputs) -> Tensor:
        """[B, I * patches, E]: what the towers see of the cameras' pictures."""
        return self.model.vision_features(self._pixels(inputs))

    def _shaped(self, x: Tensor) -> Tensor:
        return x.view(-1, self.spec.chunk, self.spec.action_dim)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


class OpenVLA(TokenPolicy):
    """OpenVLA (arXiv 2406.09246): A action tokens; each sees the tokens before it.

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
    @replaying()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        if noise is not None:
            noise = checked_noise(noise, self.noise_dim)
        sequence = self.prepare(inputs, self.spec.action_dim)
        said = decode(self.model, sequence, self.spec.action_dim, noise, self.temperature)
        value = self.value_head(said.state)
        chunk = self.chunk_of(said.tokens, self.given_state(inputs))
        return Action(chunk, self._shaped(said.log_prob), value, {"tokens": said.tokens})

    def states(self, inputs: Inputs, tokens: Tensor, features: Tensor | None = None) -> Tensor:
        sequence = self.prepare(inputs, self.spec.action_dim, features)
        hidden = self.model.hidden(sequence.extended(self.model.embed_tokens(tokens[:, :-1])))
        return self.model.predicting(hidden, sequence, self.spec.action_dim)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        sequence = self.prepare(inputs, self.spec.action_dim)
        return self.value_head(self.model.predicting(self.model.hidden(sequence), sequence, 1)[:, 0])
