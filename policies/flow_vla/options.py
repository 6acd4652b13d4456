"""Options that every flow-matching vision-language-action model has: `policy.options` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from policies.checkpoint_folders import DescribedFolders
from policies.contract import PolicyError
from policies.files import CONFIG, shown
from policies.flow_vla.real_time import SCHEDULES
from policies.layers import checked_widths
from policies.transforms import Transforms

MOST_STEPS = 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class FlowVLAOptions:
    """The checkpoint, how steps are drawn and scored, adapters and the critic.

    Raises `PolicyError` for a value that an option does not take.
    """

    checkpoint: str = ""
    """Directory of the checkpoint. An adapter's base, if the adapter names a folder that exists."""
    adapter: str = ""
    """PEFT directory of an adapter of the checkpoint, which is trained further."""
    any_base: bool = False
    """True: also an adapter that says it is of another base, or that seems to be merged into this one already."""
    weights: str = ""
    """Folder of a saved policy, which takes the place of the checkpoint or the adapter; `policies.load` sets it."""
    asset: str = ""
    """Whose statistics give actions and states their units. `demonstrations`: the rows learned from
    (`RobotPolicy.adopt_units`)."""
    transforms: Sequence[Mapping[str, Any]] = ()
    """Entries of `policies.transforms`. What LeRobot's processors say is added to them."""
    steps: int | None = None
    """Steps of the integration. None: as the checkpoint says, or 10."""
    noise_level: float = 0.5
    start_noise: float = 1.0
    scored: str = "one"
    step_reduction: str = "sum"
    """For the last four see `policies.denoising.Denoising`."""
    noise_bounds: Sequence[float] = (0.08, 0.16)
    """Least and greatest standard deviation that `scored: learned` may learn."""
    rtc_schedule: str = "exp"
    """Real-time chunking's weights between the delay and the left-over's end: exp, linear, ones or zeros."""
    rtc_guidance: float = 5.0
    """Its largest guidance weight."""
    cache_prefix: bool = True
    """True: where the vision-language model is frozen, an update takes its keys and values from `precompute`."""
    dtype: str = "float32"
    lora_rank: int = 0
    """Rank of new adapters, which are then all of the network that is trained; 0: none."""
    lora_alpha: float = 0.0
    """0: as the rank."""
    critic: str = "prefix"
    """Input of the value head: prefix or suffix."""
    critic_trains_network: bool = False
    """True: the value loss's gradient reaches the network."""
    value_widths: Sequence[int] = (512, 128)
    """Widths of the value head's hidden layers."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "critic": ("prefix", "suffix"),
        "dtype": tuple(DTYPES),
        "rtc_schedule": SCHEDULES,
    }
    """Texts that an option takes."""
    name: ClassVar[str] = ""
    """The policy's, in messages."""

    def __post_init__(self) -> None:
        if self.adapter and self.lora_rank:
            given = f"{self.lora_rank}, {self.adapter}"
            raise PolicyError(f"lora_rank is for a new adapter or adapter for a saved one; got {given}")
        if type(self.steps) not in (int, type(None)):
            raise PolicyError(
                f"{self.name}'s steps must be a whole number of integration steps, got {shown(self.steps)}"
            )
        if not self.rtc_guidance > 0:
            raise PolicyError(f"{self.name}'s rtc_guidance must be above 0, got {self.rtc_guidance:g}")
        for option, valid in self.choices.items():
            given = getattr(self, option)
            if given not in valid:
                named = ", ".join(value for value in valid if value)
                raise PolicyError(f"{self.name}'s {option} must be one of {named}, got {given!r}")

    def with_checkpoint(self, source: DescribedFolders) -> Self:
        """Options completed from the checkpoint: absolute folders, steps.

        Raises `PolicyError` for a config.json with impossible steps, and for transforms or widths that cannot be.
        """
        checkpoint, adapter = (absolute(folder) for folder in (self.checkpoint, self.adapter))
        if source.adapter is not None and not adapter and not self.weights:
            # `checkpoint` is an adapter's folder, which names its base.
            checkpoint, adapter = str(source.weights), str(source.adapter)
        return replace(
            self,
            checkpoint=checkpoint,
            adapter=adapter,
            steps=steps_of(source.described, source.config) if self.steps is None else self.steps,
            transforms=Transforms(self.transforms).as_data(),
            value_widths=checked_widths("value_widths", self.value_widths),
        )

    def as_data(self) -> dict[str, Any]:
        """All but `weights`, as JSON has them."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        return {name: _plain(value, getattr(type(self), name)) for name, value in data.items()}


def _plain(value: Any, default: Any) -> Any:
    if isinstance(default, float):
        return float(value)
    return list(value) if isinstance(default, tuple) else value


def absolute(folder: str) -> str:
    """The folder's absolute path; empty where none is named."""
    return str(Path(folder).resolve()) if folder else ""


def steps_of(folder: Path, config: Mapping[str, Any]) -> int:
    """Steps of the integration, from LeRobot's config.json. Raises `PolicyError`."""
    name = steps_entry(config)
    given = 10 if name is None else config[name]
    if type(given) is not int or not 1 <= given <= MOST_STEPS:
        raise PolicyError(f"{folder / CONFIG}: {name} is {shown(given)}, and is of 1 to {MOST_STEPS}")
    return given


def with_horizon(config: Mapping[str, Any], horizon: int) -> dict[str, Any]:
    """The config.json of the same network that predicts `horizon` actions: no weight depends on their number."""
    if "action_horizon" in config:
        return {**config, "action_horizon": horizon}
    executed = min(config.get("n_action_steps", horizon), horizon)  # LeRobot refuses to execute more than it predicts
    return {**config, "chunk_size": horizon, "n_action_steps": executed}


def executed(folder: Path, raw: Mapping[str, Any]) -> int:
    """Actions of a chunk that LeRobot executes with this config.json (`n_action_steps`). Raises `PolicyError`."""
    predicted = raw.get("chunk_size", 50)
    found = raw.get("n_action_steps", 50)
    if type(found) is not int or type(predicted) is not int or not 1 <= found <= predicted:
        raise PolicyError(
            f"{folder / CONFIG}: n_action_steps is {shown(found)}, and is of 1 to chunk_size, {shown(predicted)}: a "
            "chunk has no more actions to execute"
        )
    return found


def predicted(raw: Mapping[str, Any]) -> int:
    """Actions that a decision of the network of this config.json predicts."""
    return raw.get("action_horizon", raw.get("chunk_size", 50))


def steps_entry(config: Mapping[str, Any]) -> str | None:
    """Name of the entry of LeRobot's config.json that has the steps of the integration, if it has one."""
    return next((name for name in ("num_inference_steps", "num_steps") if name in config), None)
