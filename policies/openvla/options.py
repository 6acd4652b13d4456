"""Options of openvla and openvla_oft: `policy.options` of a configuration, and `architecture` of a saved policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.layers import checked_widths
from policies.openvla.normalisation import BOUNDS, DEMONSTRATIONS
from policies.transforms import Transforms

CONVENTIONS = {"official": True, "simplevla-rl": True, "rlinf": False}
"""True if a project's models see the token </s> after the action tokens. It is a key for every query: with another
convention than that of training most tokens change. Their padding differs too, but under a mask of valid keys and
position ids that count valid tokens all kinds of padding are the same."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of a token policy: the checkpoint, the meaning of its inputs and actions, and the trained parts.

    Raises `PolicyError` for a value that an option does not take.
    """

    checkpoint: str = ""
    """Hugging Face directory."""
    weights: str = ""
    """Folder of a saved policy, whose tensors replace those of `checkpoint` or `adapter`; `policies.load` sets it."""
    unnorm_key: str = ""
    """Dataset whose statistics give actions their unit, where there are several. `demonstrations`: the rows that the
    policy learns from (`TokenPolicy.adopt_units`)."""
    bounds: str = "percentiles"
    """Numbers of a dataset that are -1 and 1: its percentiles or its extremes."""
    prompt: str = "openvla"
    """Text around the instruction: a name in `prompts.TEMPLATES`."""
    temperature: float = 1.0
    """Logits are divided by it before a token is drawn and scored."""
    transforms: Sequence[Mapping[str, Any]] = ()
    """Entries of `policies.transforms`."""
    environment_jpeg: bool = False
    environment_resize: bool = False
    center_crop: bool = False
    """For the last three see `images.Preprocessing`."""
    image_backend: str = "device"
    """Place where frames are resized: device, or pillow on the CPU."""
    dtype: str = "float32"
    adapter: str = ""
    """PEFT directory of an adapter, which is trained further."""
    any_base: bool = False
    """True: also an adapter of another base."""
    lora_rank: int = 0
    """Rank of new adapters, which are then all of the network that is trained; 0: none."""
    lora_alpha: float = 0.0
    """0: as the rank."""
    lora_parts: Sequence[str] = ("language", "projector")
    """Parts that have new adapters: language, projector, vision."""
    value_widths: Sequence[int] = (512, 128)
    """Widths of the value head's hidden layers."""
    value_per_action: bool = False
    """True: a value for each action of the chunk."""

    def __post_init__(self) -> None:
        if self.bounds not in BOUNDS:
            raise PolicyError(f"bounds must be one of {', '.join(BOUNDS)}, got {self.bounds!r}")
        if self.unnorm_key == DEMONSTRATIONS and self.bounds != "percentiles":
            raise PolicyError(f"the demonstrations' own units are percentiles: leave bounds out, got {self.bounds!r}")
        if self.temperature <= 0:
            raise PolicyError(f"temperature must be greater than 0, got {self.temperature}")
        if self.lora_rank < 0 or (self.lora_rank and self.adapter):
            raise PolicyError(
                f"give lora_rank (1 or more) for a new adapter or adapter for a saved one, got {self.lora_rank}"
            )

    def resolved(self) -> TokenOptions:
        """Options with absolute folders. Raises `PolicyError` for transforms or widths that cannot be."""
        return replace(
            self,
            checkpoint=str(Path(self.checkpoint).resolve()),
            adapter=str(Path(self.adapter).resolve()) if self.adapter else "",
            transforms=Transforms(self.transforms).as_data(),
            value_widths=checked_widths("value_widths", self.value_widths),
        )

    def as_data(self) -> dict[str, Any]:
        """All but `weights`, as JSON has them."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        numbers = {name: float(data[name]) for name in ("temperature", "lora_alpha")}
        return data | numbers | {name: list(data[name]) for name in ("transforms", "lora_parts", "value_widths")}


@dataclass(frozen=True, kw_only=True)
class OFTOptions(TokenOptions):
    """Options of openvla_oft, which also name the checkpoint's side files that are used.

    A side file that no option mentions must not exist.
    """

    convention: str = "official"
    """Project that trained the checkpoint: a name in `CONVENTIONS`."""
    head: str | None = None
    """tokens, the default, or l1."""
    proprio: bool | None = None
    """True: proprioception is a token after the image patches."""
    film: bool | None = None
    """True: the instruction modulates the vision towers."""
    step: int | str | None = None
    """Chooses among side files of several steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convention not in CONVENTIONS:
            raise PolicyError(f"convention must be one of {', '.join(CONVENTIONS)}, got {self.convention!r}")

    def as_data(self) -> dict[str, Any]:
        data = super().as_data() | {"head": self.head or "tokens", "proprio": bool(self.proprio)}
        # What an older version did not write is the default.
        return {name: value for name, value in data.items() if name not in ("film", "step") or value is not None}
