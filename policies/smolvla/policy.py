"""SmolVLA as a policy, from LeRobot's checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from policies.contract import PolicyError, PolicySpec
from policies.flow_vla.policy import FlowVLA, LearnedTimes
from policies.lerobot.features import check_numbers, ordered_cameras
from policies.smolvla import adapters
from policies.smolvla.checkpoint import find_sources, load_network
from policies.smolvla.inputs import Prompts, pixel_values
from policies.smolvla.options import SmolVLAOptions
from policies.units import DEMONSTRATIONS, StoredUnits, all_of, identity

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
        source = find_sources(options.checkpoint, options.adapter, options.backbone, options.weights)
        super().__init__(spec, source, options)
        self.set_network(load_network(source, options.dtype))
        self.state_width = self.sizes.state_dim
        self._check_spec()
        self.cameras = ordered_cameras(source, spec.cameras)
        if options.asset != DEMONSTRATIONS:
            check_numbers(source, self.shown.action_dim, self.shown.proprio_dim)
        self.prompts = Prompts(source.backbone, self.sizes.prompt_len, self.sizes.vocab_size)
        self.units = self._read_units()
        self.times = LearnedTimes()
        self.choose_trained(adapters, self._trains)
        self.build_sampler(self.sizes.expert.width, self.sizes.vlm.width)

    @property
    def network_image_size(self) -> int:
        return max(self.sizes.image)

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
        if spec.action_dim > sizes.action_dim or spec.proprio_dim > sizes.state_dim:
            raise PolicyError(
                f"{where}: the checkpoint has {sizes.action_dim} numbers for actions and {sizes.state_dim} for states, "
                f"the task has {spec.action_dim} and {spec.proprio_dim}: set env.control_mode to one of fewer, or "
                "choose numbers of the state with policy.options.transforms"
            )
        if not spec.proprio_dim:
            raise PolicyError("smolvla reads the robot's state: add 'proprio' to policy.reads")

    def _trains(self, name: str) -> bool:
        """True for a tensor that is trained without adapters."""
        # Of the last layer, and of the norm after it, most reaches no action: LeRobot trains neither.
        last = f"mixture.vlm.layers.{self.sizes.vlm.depth - 1}."
        return any(name.startswith(PARTS[part]) for part in self.options.train) and not name.startswith(last)

    def _read_units(self) -> StoredUnits:
        spec, source = self.shown, self.source
        if self.options.asset == DEMONSTRATIONS:
            source.check_pictures()
            return StoredUnits(identity(spec.proprio_dim, spec.action_dim))
        return StoredUnits(all_of(source.units(), source.described, spec.proprio_dim, spec.action_dim))
