"""Options of the policy smolvla: `policy.options` of a configuration, and `architecture` of a saved policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from policies.contract import PolicyError
from policies.flow_vla.options import FlowVLAOptions, absolute
from policies.units import DEMONSTRATIONS

TRAINED = ("expert", "projections", "language", "vision")


@dataclass(frozen=True, kw_only=True)
class SmolVLAOptions(FlowVLAOptions):
    """Options of SmolVLA: its backbone and the trained parts, beside those of every flow policy."""

    backbone: str = ""
    """Folder with `config.json` and `tokenizer.json` of the vision-language model, which no checkpoint of LeRobot's
    holds; "": found within the checkpoint or in Hugging Face's cache (`policies.smolvla.backbone`)."""
    train: Sequence[str] = ("expert", "projections")
    """Parts of the network that are trained: expert, projections (of state, action and time), language (with the
    connector), vision. Without effect with an adapter."""
    lora_parts: Sequence[str] = ("expert_qv", "projections")
    """Parts that have new adapters: those of `train`, or expert_qv, the expert's queries and values alone. The default
    is that of LeRobot's `use_peft`."""

    name: ClassVar[str] = "smolvla"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"asset": ("", DEMONSTRATIONS), **FlowVLAOptions.choices}

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [part for part in self.train if part not in TRAINED]
        if unknown or not self.train:
            raise PolicyError(f"smolvla's train must be some of {', '.join(TRAINED)}, got {list(self.train)}")

    def with_checkpoint(self, source: Any) -> Self:
        # A saved policy's own folder has the files of its backbone: the folder that the option named may be gone.
        inside = self.weights and Path(self.weights).resolve() in source.backbone.parents
        own = absolute(self.backbone) if inside else str(source.backbone)
        return replace(super().with_checkpoint(source), backbone=own)
