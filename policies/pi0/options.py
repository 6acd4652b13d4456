"""Options of the policy pi0: `policy.options` of a configuration, and `architecture` of a saved policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, get_args

from policies.flow_vla.options import FlowVLAOptions
from policies.pi0.inputs import Convention, Resize
from policies.pi0.normalisation import NORMALISATIONS

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Pi0Options(FlowVLAOptions):
    """Options of pi0: the checkpoint's numbers' meaning and the trained parts, beside those of every flow policy.

    `asset` names openpi's statistics, where there are several.
    """

    normalisation: str = AUTO
    """Normalisation of openpi's training: z-score, quantile, or auto, which is what the statistics allow, else openpi's
    default for the model."""
    prompt: str = ""
    """Project whose prompts these are: openpi, lerobot, lerobot-0.4; "": that of the checkpoint's layout."""
    state_in_prompt: bool = False
    """True: the prompt has the state in words. For pi0.5."""
    resize: str = ""
    """Resizing to squares: pillow, interpolate (`inputs.pixel_values`); "": as the checkpoint's layout does."""
    train: str = "expert"
    """expert: the vision-language model is frozen; all: every weight is trained. Without effect with an adapter."""
    lora_parts: Sequence[str] = ("vlm", "expert")
    """Parts that have new adapters: vlm, expert, vision."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "resize": ("", *get_args(Resize)),
        "prompt": ("", *get_args(Convention)),
        "train": ("expert", "all"),
        "normalisation": (AUTO, *NORMALISATIONS),
        **FlowVLAOptions.choices,
    }
    name: ClassVar[str] = "pi0"

    def with_checkpoint(self, source: Any) -> Self:
        own = self.resize or ("interpolate" if source.layout == "lerobot" else "pillow")
        return replace(super().with_checkpoint(source), resize=own)
