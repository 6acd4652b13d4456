"""Options of the policy pi0: `policy.options` of a configuration, and `architecture` of a saved policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from policies.contract import PolicyError
from policies.files import CONFIG, shown
from policies.layers import checked_widths
from policies.pi0.checkpoint import DTYPES, Sources
from policies.pi0.inputs import Convention, Resize
from policies.pi0.normalisation import NORMALISATIONS
from policies.transforms import Transforms

AUTO, MOST_STEPS = "auto", 1000
CHOICES: Mapping[str, tuple[str, ...]] = {
    "resize": ("", *get_args(Resize)),
    "prompt": ("", *get_args(Convention)),
    "train": ("expert", "all"),
    "critic": ("prefix", "suffix"),
    "normalisation": (AUTO, *NORMALISATIONS),
    "dtype": tuple(DTYPES),
}
"""Texts that an option takes."""


@dataclass(frozen=True, kw_only=True)
class Pi0Options:
    """Options of pi0: the checkpoint, its numbers' meaning, how steps are drawn and scored, and the trained parts.

    Raises `PolicyError` for a value that an option does not take.
    """

    checkpoint: str = ""
    """Directory of openpi's or LeRobot's. An adapter's base, if the adapter names a folder that exists."""
    adapter: str = ""
    """PEFT directory of an adapter of the checkpoint, which is trained further."""
    any_base: bool = False
    """True: also an adapter that says it is of another base, or that seems to be merged into this one already."""
    weights: str = ""
    """Folder of a saved policy, which takes the place of the checkpoint or the adapter; `policies.load` sets it."""
    asset: str = ""
    """Name of openpi's statistics, where there are several. `demonstrations`: those of the rows learned from
    (`Pi0.adopt_units`)."""
    normalisation: str = AUTO
    """Normalisation of openpi's training: z-score, quantile, or auto, which is what the statistics allow, else openpi's
    default for the model."""
    prompt: str = ""
    """Project whose prompts these are: openpi, lerobot, lerobot-0.4; "": that of the checkpoint's layout."""
    state_in_prompt: bool = False
    """True: the prompt has the state in words. For pi0.5."""
    resize: str = ""
    """Resizing to squares: pillow, interpolate (`inputs.pixel_values`); "": as the checkpoint's layout does."""
    transforms: Sequence[Mapping[str, Any]] = ()
    """Entries of `policies.transforms` (delta_actions of 6 for openpi's pi0_libero). What LeRobot's processors say is
    added to them."""
    steps: int | None = None
    """Steps of the integration. None: as the checkpoint says, or 10."""
    noise_level: float = 0.5
    start_noise: float = 1.0
    scored: str = "one"
    step_reduction: str = "sum"
    """For the last four see `policies.denoising.Denoising`."""
    noise_bounds: Sequence[float] = (0.08, 0.16)
    """Least and greatest standard deviation that `scored: learned` may learn."""
    train: str = "expert"
    """expert: the vision-language model is frozen; all: every weight is trained. Without effect with an adapter."""
    cache_prefix: bool = True
    """True: where the vision-language model is frozen, an update takes its keys and values from `Pi0.precompute`."""
    dtype: str = "float32"
    lora_rank: int = 0
    """Rank of new adapters, which are then all of the network that is trained; 0: none."""
    lora_alpha: float = 0.0
    """0: as the rank."""
    lora_parts: Sequence[str] = ("vlm", "expert")
    """Parts that have new adapters: vlm, expert, vision."""
    critic: str = "prefix"
    """Input of the value head: prefix or suffix."""
    critic_trains_network: bool = False
    """True: the value loss's gradient reaches the network."""
    value_widths: Sequence[int] = (512, 128)
    """Widths of the value head's hidden layers."""

    def __post_init__(self) -> None:
        if self.adapter and self.lora_rank:
            given = f"{self.lora_rank}, {self.adapter}"
            raise PolicyError(f"lora_rank is for a new adapter or adapter for a saved one; got {given}")
        if type(self.steps) not in (int, type(None)):
            raise PolicyError(f"pi0's steps must be a whole number of integration steps, got {shown(self.steps)}")
        for name, valid in CHOICES.items():
            given = getattr(self, name)
            if given not in valid:
                named = ", ".join(value for value in valid if value)
                raise PolicyError(f"pi0's {name} must be one of {named}, got {given!r}")

    def with_checkpoint(self, source: Sources) -> Pi0Options:
        """Options completed from the checkpoint: absolute folders, steps, resize.

        Raises `PolicyError` for a config.json with impossible steps, and for transforms or widths that cannot be.
        """
        checkpoint, adapter = (_absolute(folder) for folder in (self.checkpoint, self.adapter))
        if source.adapter is not None and not adapter and not self.weights:
            # `checkpoint` is an adapter's folder, which names its base.
            checkpoint, adapter = str(source.weights), str(source.adapter)
        return replace(
            self,
            checkpoint=checkpoint,
            adapter=adapter,
            steps=_steps(source) if self.steps is None else self.steps,
            resize=self.resize or ("interpolate" if source.layout == "lerobot" else "pillow"),
            transforms=Transforms(self.transforms).as_data(),
            value_widths=checked_widths("value_widths", self.value_widths),
        )

    def as_data(self) -> dict[str, Any]:
        """All but `weights`, as JSON has them."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        numbers = {name: float(data[name]) for name in ("noise_level", "start_noise", "lora_alpha")}
        lists = {name: list(data[name]) for name in ("transforms", "noise_bounds", "lora_parts", "value_widths")}
        return data | numbers | lists


def _absolute(folder: str) -> str:
    return str(Path(folder).resolve()) if folder else ""


def _steps(source: Sources) -> int:
    """Steps of the integration, from LeRobot's config.json. Raises `PolicyError`."""
    for name in ("num_inference_steps", "num_steps"):
        given = source.config.get(name, 10)
        if type(given) is not int or not 1 <= given <= MOST_STEPS:
            raise PolicyError(f"{source.described / CONFIG}: {name} is {shown(given)}, and is of 1 to {MOST_STEPS}")
        if name in source.config:
            return given
    return 10
