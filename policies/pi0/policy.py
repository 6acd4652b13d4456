"""pi0 and pi0.5 as a policy, from openpi's and LeRobot's checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from policies.contract import PolicyError, PolicySpec
from policies.files import CONFIG, shown
from policies.flow_vla.network import OF_THE_VLM
from policies.flow_vla.options import steps_entry
from policies.flow_vla.policy import FlowVLA, LearnedTimes
from policies.lerobot.features import check_numbers, ordered_cameras
from policies.lerobot.statistics import check_pictures, read_lerobot
from policies.pi0 import adapters
from policies.pi0.checkpoint import find_sources, load_network
from policies.pi0.costs import Pi0Costs
from policies.pi0.inputs import BLACK, OF_LEROBOT_04, Prompts, pixel_values
from policies.pi0.normalisation import normalisations, openpi_default, openpi_statistics, read_openpi
from policies.pi0.options import AUTO, Pi0Options
from policies.units import DEMONSTRATIONS, StoredUnits, all_of, first_of, identity

SLOTS = 3
"""Images that every checkpoint was trained with. Those of absent cameras nothing sees: they are not computed."""


class Pi0(FlowVLA):
    """Reads frames, the instruction and proprioception. Which of the two it is its weights say."""

    kind = "pi0"

    def __init__(self, spec: PolicySpec, options: Pi0Options) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        source = find_sources(options.checkpoint, options.adapter, options.weights)
        super().__init__(spec, source, options)
        self.layout = source.layout
        options = self.options
        self.set_network(load_network(source.weights, options.dtype, source.described))
        self.state_width = self.sizes.action_dim
        self._check_spec(options.state_in_prompt)
        self.cameras = spec.cameras
        if self.layout == "lerobot":
            self.cameras = ordered_cameras(source, spec.cameras)
            if options.asset != DEMONSTRATIONS:
                check_numbers(source, self.shown.action_dim, self.shown.proprio_dim)
        convention: Any = options.prompt or self.layout
        if self.sizes.adaptive and not options.state_in_prompt and convention != "openpi":
            raise PolicyError(
                f"a pi0.5 with prompts of {convention} has the state in them: set state_in_prompt to true, or prompt "
                "to openpi"
            )
        filled = source.config.get("max_state_dim", self.sizes.action_dim)
        length = self.sizes.prompt_len if source.processors is None else source.processors.prompt_length
        self.prompts = Prompts(source.tokenizer, length, convention, filled)
        self.units = self._read_units()
        described = self.layout == "lerobot"
        self.times = LearnedTimes.read(source.described, source.config) if described else LearnedTimes()
        self.resize: Any = options.resize
        self.sides = OF_LEROBOT_04 if convention == "lerobot-0.4" else BLACK
        self.choose_trained(adapters, lambda name: options.train == "all" or not name.startswith(OF_THE_VLM))
        self.build_sampler(self.sizes.expert.width, self.sizes.vlm.width)

    @property
    def network_image_size(self) -> int:
        return self.sizes.vision.image_size

    def costs(self, instruction: str) -> Pi0Costs:
        return Pi0Costs(self)

    # --- what the network reads

    def pixels(self, frames: Tensor) -> Tensor:
        return pixel_values(self.transforms.frames(frames), self.sizes.vision.image_size, self.resize, self.sides)

    def words(self, instructions: tuple[str, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        said = state[:, : self.shown.proprio_dim].cpu() if self.options.state_in_prompt else None
        return self.prompts.batch(instructions, said)

    def description(self) -> dict[str, Any]:
        """config.json of the policy as it is: LeRobot is to integrate in as many steps as here, and to execute as many
        actions of a chunk. openpi's has neither."""
        if self.layout != "lerobot":
            return self.config
        named = steps_entry(self.config) or "num_inference_steps"
        return {**self.config, "n_action_steps": self.spec.chunk, named: self.options.steps}

    # --- what is built

    def _check_spec(self, state_in_prompt: bool) -> None:
        spec, sizes, where = self.shown, self.sizes, self.source.described
        if not 1 <= len(spec.cameras) <= SLOTS:
            raise PolicyError(f"pi0 takes one to {SLOTS} cameras, the task gives {len(spec.cameras)}: set env.cameras")
        if max(spec.action_dim, spec.proprio_dim) > sizes.action_dim:
            raise PolicyError(
                f"{where}: the checkpoint has {sizes.action_dim} numbers for actions and states, the task has "
                f"{spec.action_dim} and {spec.proprio_dim}: set env.control_mode to one of fewer, choose numbers of "
                "the state with policy.options.transforms, or leave proprio out of policy.reads"
            )
        reads_state = state_in_prompt or not sizes.adaptive
        if state_in_prompt and not sizes.adaptive:
            raise PolicyError(
                f"{where}: the checkpoint is a pi0, which has the state beside the prompt: set state_in_prompt to false"
            )
        said = self.config.get("discrete_state_input")
        if sizes.adaptive and said is not None and said != state_in_prompt:
            config = where / CONFIG
            raise PolicyError(f"{config}: discrete_state_input is {shown(said)}: set state_in_prompt to the same")
        if reads_state and not spec.proprio_dim:
            raise PolicyError("the policy reads the robot's state: add 'proprio' to policy.reads")

    def _read_units(self) -> StoredUnits:
        """The units of the checkpoint's statistics. Where `normalisation` is auto, the options say afterwards which."""
        source, asset, normalisation = self.source, self.options.asset, self.options.normalisation
        dims = self.shown.proprio_dim, self.shown.action_dim
        if self.layout == "lerobot" and (normalisation != AUTO or asset not in ("", DEMONSTRATIONS)):
            raise PolicyError(
                f"normalisation and asset are of openpi's checkpoints, and the processors of {source.described} say "
                f"both: leave them out; got {normalisation!r} and {asset!r}"
            )
        if asset == DEMONSTRATIONS:
            if source.processors is not None:
                check_pictures(source.processors, source.config)
            return StoredUnits(identity(*dims))
        if self.layout == "lerobot":
            return StoredUnits(all_of(read_lerobot(source.described), source.described, *dims))
        if normalisation == AUTO:
            possible = normalisations(openpi_statistics(source.described, asset)[1])
            normalisation = possible[0] if len(possible) == 1 else openpi_default(self.sizes.adaptive)
        self.options = replace(self.options, normalisation=normalisation)
        units = read_openpi(source.described, asset, quantile=normalisation == "quantile")
        return StoredUnits(first_of(units, source.described, *dims))
