"""SmolVLA as a policy, from LeRobot's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from policies.contract import PolicyError, PolicySpec
from policies.flow_vla.policy import FlowVLA, LearnedTimes, with_relative
from policies.lerobot.features import check_numbers, ordered_cameras
from policies.smolvla.adapters import attach, attach_saved
from policies.smolvla.checkpoint import find_sources, load_network
from policies.smolvla.config import with_horizon
from policies.smolvla.inputs import Prompts, pixel_values
from policies.smolvla.network import OF_THE_VLM
from policies.smolvla.options import SmolVLAOptions
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS, StoredUnits, first_of, identity

PARTS = {
    "expert": ("mixture.expert.",),
    "projections": ("state_proj.", "action_"),
    "language": ("embedding.", "projector.", "mixture.vlm.layers."),
    "vision": ("vision.",),
}
"""Beginnings of the names of each part's tensors."""


class SmolVLA(FlowVLA):
    """Reads frames, the instruction and proprioception."""

    kind = "smolvla"

    def __init__(self, spec: PolicySpec, options: SmolVLAOptions) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        super().__init__()
        self.source = source = find_sources(options.checkpoint, options.adapter, options.backbone, options.weights)
        self.options = options = options.with_checkpoint(source)
        self.transforms = with_relative(source, Transforms(options.transforms), spec.action_dim)
        if options.asset == DEMONSTRATIONS:
            self.transforms.check_demonstrated_units()
        self.spec, self.shown = spec, self.transforms.spec(spec)
        self.network = load_network(source, options.dtype)
        self.config = dict(source.config)
        if spec.horizon:  # no weight depends on it
            self.network.sizes = replace(self.network.sizes, horizon=spec.horizon)
            self.config = with_horizon(self.config, spec.horizon)
        self.sizes = self.network.sizes
        self.state_width = self.sizes.state_dim
        self._check_spec()
        self.cameras = ordered_cameras(source, spec.cameras)
        if options.asset != DEMONSTRATIONS:
            check_numbers(source, self.shown.action_dim, self.shown.proprio_dim)
        self.spec = replace(spec, horizon=self.sizes.horizon)
        self.prompts = Prompts(source.backbone, self.sizes.prompt_len, self.sizes.vocab_size)
        self.units = self._read_units()
        self.times = LearnedTimes()
        self.trains_prefix = self._choose_trained()
        self.build_sampler(self.sizes.expert.width, self.sizes.vlm.width)

    @property
    def network_image_size(self) -> int:
        return max(self.sizes.image)

    def shards(self) -> Sequence[Sequence[nn.Module]]:
        """Each block of the vision transformer, the words, and of each layer of either stack what comes before the
        attention and what comes after it."""
        halves = [half for layer in self.network.mixture.layers for half in layer.halves]
        return [*([block] for block in self.network.vision.encoder.layers), [self.network.embedding], *halves]

    def pixels(self, frames: Tensor) -> Tensor:
        return pixel_values(self.transforms.frames(frames), self.sizes.image)

    def words(self, instructions: tuple[str, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        return self.prompts.batch(instructions)

    def description(self) -> dict[str, Any]:
        """config.json of the policy as it is: LeRobot is to integrate in as many steps as here, and to execute as many
        actions of a chunk. Features are those of the checkpoint or of the demonstrations."""
        config: dict[str, Any] = {**self.config, "n_action_steps": self.spec.chunk, "num_steps": self.options.steps}
        if self.options.asset != DEMONSTRATIONS:
            return config
        size = self.network_image_size
        picture = {"type": "VISUAL", "shape": [3, size, size]}
        images = {f"observation.images.{camera}": picture for camera in self.cameras}
        state = {"type": "STATE", "shape": [self.shown.proprio_dim]}
        action = {"type": "ACTION", "shape": [self.shown.action_dim]}
        features = {"input_features": {"observation.state": state, **images}, "output_features": {"action": action}}
        if config.get("normalization_mapping"):  # the processors that are written change no picture
            config["normalization_mapping"] = {**config["normalization_mapping"], "VISUAL": "IDENTITY"}
        return {**config, **features}

    # --- what is built

    def _check_spec(self) -> None:
        spec, sizes, where = self.shown, self.sizes, self.source.described
        if not spec.cameras:
            raise PolicyError("smolvla takes one camera or more, the task gives none: set env.cameras")
        if spec.chunk > sizes.horizon:
            raise PolicyError(
                f"{where}: the checkpoint predicts {sizes.horizon} actions, and policy.chunk is {spec.chunk}: at most "
                "that, or set policy.horizon for a policy that learns from demonstrations to predict so many"
            )
        if spec.action_dim > sizes.action_dim or spec.proprio_dim > sizes.state_dim:
            raise PolicyError(
                f"{where}: the checkpoint has {sizes.action_dim} numbers for actions and {sizes.state_dim} for states, "
                f"the task has {spec.action_dim} and {spec.proprio_dim}: set env.control_mode to one of fewer, or "
                "choose numbers of the state with policy.options.transforms"
            )
        if not spec.proprio_dim:
            raise PolicyError("smolvla reads the robot's state: add 'proprio' to policy.reads")

    def _choose_trained(self) -> bool:
        """Hang adapters on the network or freeze what is not trained; True if the prefix's part is trained."""
        options, network = self.options, self.network
        if self.source.adapter is not None:
            attach_saved(network, self.source.adapter, any_base=options.any_base)
            trained = (name for name, parameter in network.named_parameters() if parameter.requires_grad)
            return any(name.startswith(OF_THE_VLM) for name in trained)
        if options.lora_rank:
            attach(network, options.lora_rank, float(options.lora_alpha) or options.lora_rank, options.lora_parts)
            return bool({"language", "vision"} & set(options.lora_parts))
        # Of the last layer, and of the norm after it, most reaches no action: LeRobot trains neither.
        last = f"mixture.vlm.layers.{self.sizes.vlm.depth - 1}."
        beginnings = tuple(beginning for part in options.train for beginning in PARTS[part])
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith(beginnings) and not name.startswith(last))
        return bool({"language", "vision"} & set(options.train))

    def _read_units(self) -> StoredUnits:
        spec, source = self.shown, self.source
        if self.options.asset == DEMONSTRATIONS:
            source.check_pictures()
            return StoredUnits(identity(spec.proprio_dim, spec.action_dim))
        units = source.units()
        for what, of, size in (("state", units.state, spec.proprio_dim), ("action", units.action, spec.action_dim)):
            if of.centre.dim() and len(of.centre) != size:
                raise PolicyError(
                    f"{source.described}: the statistics of the {what} are of {len(of.centre)} numbers, the task's has "
                    f"{size}: take a checkpoint of this robot, choose numbers with policy.options.transforms, or set "
                    f"policy.options.asset to {DEMONSTRATIONS}"
                )
        return StoredUnits(first_of(units, source.described, spec.proprio_dim, spec.action_dim))
