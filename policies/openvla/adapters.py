"""Which parts of OpenVLA have adapters, and adapters that others have saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from policies import lora
from policies.contract import PolicyError
from policies.openvla.config import TOWERS
from policies.openvla.model import OpenVLAModel, to_checkpoint

PARTS = ("language", "projector", "vision")


def targets(model: OpenVLAModel, parts: Sequence[str]) -> str:
    """PEFT's regular expression for the linear layers of the parts, named as in the whole checkpoint.

    Without the vision towers' last blocks and pooling, which no output depends on: PEFT's usual lists of suffixes hit
    those too. The head is left out: a full-rank matrix of 256 used rows gains nothing from a low rank.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise PolicyError(f"lora_parts must be some of {', '.join(PARTS)}, got {list(parts)}")
    every = []
    if "language" in parts:
        every.append(r"language_model\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")
    if "projector" in parts:
        every.append(r"projector\.fc[123]")
    if "vision" in parts:
        for tower in TOWERS:
            blocks = "|".join(str(i) for i in range(len(getattr(model.vision_backbone, tower).blocks)))
            every.append(rf"vision_backbone\.{tower}\.blocks\.({blocks})\.(attn\.(qkv|proj)|mlp\.fc[12])")
    return "|".join(every)


def attach(model: OpenVLAModel, rank: int, alpha: float, parts: Sequence[str]) -> None:
    """Freeze the model and hang new adapters on it: A drawn from a normal distribution, B zero, both float32."""
    lora.attach(model, {"r": rank, "lora_alpha": alpha, "target_modules": targets(model, parts)})


def attach_saved(model: OpenVLAModel, folder: Path) -> None:
    """The same with the adapter of a PEFT directory. Raises `PolicyError`, also if it is of another base."""
    config = lora.read_adapter_config(folder)
    tensors = lora.read_adapter_file(folder)
    modules = {name.rsplit(".lora_", 1)[0] for name in tensors}
    known = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    unused = {to_checkpoint(name).removesuffix(".weight") for name in model.unused}
    strange = sorted(modules - known - unused)
    if strange or not modules & known:
        what = f"it adapts {strange[0]!r}, which this model has not" if strange else "it adapts nothing of this model"
        raise PolicyError(f"{folder} is an adapter of another base: {what}")
    lora.check_base(model, folder, config)
    saved = {key: value for key, value in config.items() if key not in {"base_model_name_or_path", lora.BASE}}
    lora.attach(model, saved | {"target_modules": sorted(modules & known), "inference_mode": False})
    # What the reference's lists of suffixes also hit: no output depends on it, it is kept to be saved again.
    model.unused_adapter = {name: t for name, t in tensors.items() if name.rsplit(".lora_", 1)[0] not in known}
    model.adapter_config = saved
    lora.load_adapter(model, folder)
