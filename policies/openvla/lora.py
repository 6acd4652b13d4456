"""Low-rank adapters, in PEFT's layout on disk.

FOLDER/adapter_config.json          rank, alpha, target modules
FOLDER/adapter_model.safetensors    base_model.model.<module>.lora_{A,B}.weight, names as in the checkpoint
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from policies.contract import PolicyError
from policies.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    check_shapes,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from policies.openvla.config import TOWERS
from policies.openvla.model import OpenVLAModel, to_checkpoint
from policies.torchvision_operators import import_torchvision

PREFIX = "base_model.model."
NAME = "default"
"""PEFT's name of the only adapter."""
PARTS = ("language", "projector", "vision")
UNSUPPORTED = ("modules_to_save", "use_dora", "layer_replication", "trainable_token_indices")
INITIALISATIONS = (True, False, "gaussian")
"""Those that leave the base as it is: the others (pissa, olora, ...) move part of it into the adapter."""
BASE = "base_digest"
"""Entry of adapter_config.json that says of which base the adapter is. PEFT's own reader passes over it."""

DIGESTED = (
    "projector.fc3.weight",
    "language_model.model.norm.weight",
    "language_model.model.layers.0.self_attn.q_proj.weight",
    "language_model.model.layers.0.mlp.down_proj.weight",
)


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
    _attach(model, {"r": rank, "lora_alpha": alpha, "target_modules": targets(model, parts)})


def attach_saved(model: OpenVLAModel, folder: Path) -> None:
    """The same with the adapter of a PEFT directory. Raises `PolicyError`, also if it is of another base."""
    config = _read_config(folder)
    tensors = _read_adapter(folder)
    modules = {name.rsplit(".lora_", 1)[0] for name in tensors}
    known = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    unused = {to_checkpoint(name).removesuffix(".weight") for name in model.unused}
    strange = sorted(modules - known - unused)
    if strange or not modules & known:
        what = f"it adapts {strange[0]!r}, which this model has not" if strange else "it adapts nothing of this model"
        raise PolicyError(f"{folder} is an adapter of another base: {what}")
    _check_base(model, folder, config)
    saved = {key: value for key, value in config.items() if key not in {"base_model_name_or_path", BASE}}
    _attach(model, saved | {"target_modules": sorted(modules & known), "inference_mode": False})
    # What the reference's lists of suffixes also hit: no output depends on it, it is kept to be saved again.
    model.unused_adapter = {name: t for name, t in tensors.items() if name.rsplit(".lora_", 1)[0] not in known}
    model.adapter_config = saved
    load_adapter(model, folder)


def load_adapter(model: OpenVLAModel, folder: Path) -> None:
    """Replace the adapter's tensors by the directory's. Raises `PolicyError` unless they fit."""
    state = read_adapter(model, folder)
    model.load_state_dict(state, strict=False)


def read_adapter(model: OpenVLAModel, folder: Path) -> dict[str, Tensor]:
    """The adapter's tensors under the names of the model's state dict, checked against it, which stays as it is."""
    _check_base(model, folder, _read_config(folder))
    found = {name: t for name, t in _read_adapter(folder).items() if name not in model.unused_adapter}
    own = {_plain(name): name for name in adapter_names(model)}
    state = model.state_dict()
    if found.keys() != own.keys():
        name = min(found.keys() ^ own.keys())
        raise PolicyError(f"{folder} is another adapter than this model's: they differ in {name!r}")
    check_shapes(folder, found, {name: state[full] for name, full in own.items()})
    return {own[name]: tensor.to(state[own[name]].dtype) for name, tensor in found.items()}


def adapter_names(model: OpenVLAModel) -> list[str]:
    """Names of the adapter's tensors in the state dict."""
    return [name for name in model.state_dict() if f".{NAME}.weight" in name and ".lora_" in name]


def adapter_parameters(model: OpenVLAModel) -> list[nn.Parameter]:
    """The adapter's matrices."""
    return [p for name, p in model.named_parameters() if f".{NAME}.weight" in name and ".lora_" in name]


def is_neutral(model: OpenVLAModel) -> bool:
    """Whether the adapter adds nothing to the model: B is zero everywhere, as in a new one."""
    return not any(bool(p.any()) for name, p in model.named_parameters() if f".lora_B.{NAME}." in name)


@contextmanager
def switched_off(model: OpenVLAModel) -> Iterator[None]:
    """Within, the model computes without its adapter. What is trained is the same afterwards as before."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trained = [(p, p.requires_grad) for p in adapter_parameters(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, wanted in trained:  # PEFT lets the gradients of all its layers go, and come back
            parameter.requires_grad_(wanted)


def save_adapter(model: OpenVLAModel, folder: Path) -> None:
    """Write a PEFT directory."""
    from peft import LoraConfig

    state = model.state_dict()
    tensors = {_plain(name): state[name] for name in adapter_names(model)} | model.unused_adapter
    ready = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(folder / ADAPTER, ready)
    config = LoraConfig(**_known(model.adapter_config))
    config.inference_mode = True
    config.base_model_name_or_path = str(model.shards.folder) if model.shards else None
    config.save_pretrained(str(folder))
    write_json(folder / ADAPTER_CONFIG, read_json(folder / ADAPTER_CONFIG) | {BASE: base_digest(model)})


def merged_state(model: OpenVLAModel) -> dict[str, Tensor]:
    """The checkpoint's tensors with the adapter added in, under the checkpoint's names. The model stays as it is.

    The sum is rounded once, to the base's dtype.
    """
    state = plain_state(model)
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            key = to_checkpoint(f"{name}.weight")
            state[key] = (state[key].float() + module.get_delta_weight(NAME).float()).to(state[key].dtype)
    return state


def plain_state(model: OpenVLAModel) -> dict[str, Tensor]:
    """The checkpoint's tensors without an adapter, under the checkpoint's names."""
    every = {name: tensor for name, tensor in model.checkpoint_state().items() if ".lora_" not in name}
    return {name.replace(".base_layer", ""): tensor for name, tensor in every.items()}


def base_digest(model: OpenVLAModel) -> str:
    """Tells one base from another: a hash over a few tensors that any fine-tuning changes at least one of."""
    state = plain_state(model)
    digest = hashlib.sha256()
    for name in DIGESTED:
        # Rounded, so that the same base has the same digest in float32 and in bfloat16.
        digest.update(state[name].detach().cpu().bfloat16().float().numpy().tobytes())
    return digest.hexdigest()


def _attach(model: OpenVLAModel, config: dict[str, Any]) -> None:
    import_torchvision()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    model.requires_grad_(False)
    try:
        # Dropout would make the second look at a decision differ from the first.
        ready = LoraConfig(**({"init_lora_weights": "gaussian"} | _known(config) | {"lora_dropout": 0.0}))
        inject_adapter_in_model(ready, model, adapter_name=NAME)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"an adapter of r={config.get('r')!r} cannot be made: {error}") from error
    # Small steps would be lost in bfloat16's eight bits.
    cast_adapter_dtype(model, NAME, autocast_adapter_dtype=True)
    model.adapter_config = dict(config)


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """The entries that this version of PEFT knows: others come from newer versions, and are switched off."""
    from peft import LoraConfig

    names = {field.name for field in fields(LoraConfig) if field.init}
    return {name: value for name, value in config.items() if name in names}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise PolicyError(f"{path}: only LORA adapters are supported, this one is {config.get('peft_type')!r}")
    for name in UNSUPPORTED:
        if config.get(name):
            raise PolicyError(f"{path}: {name} is not supported")
    if config.get("init_lora_weights", True) not in INITIALISATIONS:
        raise PolicyError(f"{path}: init_lora_weights {config['init_lora_weights']!r} changes the base: merge it first")
    if config.get("bias", "none") != "none":
        raise PolicyError(f"{path}: adapters with biases are not supported")
    return config


def _read_adapter(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTER
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise PolicyError(f"{folder / 'adapter_model.bin'} is a pickle, which is not read: convert it to safetensors")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(path).items()}
    for name in tensors:
        if not re.search(r"\.lora_[AB]\.weight$", name):
            raise PolicyError(f"{path} has a tensor that is no low-rank adapter's: {name!r}")
    return tensors


def _check_base(model: OpenVLAModel, folder: Path, config: dict[str, Any]) -> None:
    digest = config.get(BASE)
    if digest is not None and digest != base_digest(model):
        base = config.get("base_model_name_or_path")
        raise PolicyError(f"{folder} is an adapter of another base: it was trained on {base}, with other weights")


def _plain(name: str) -> str:
    """A name in the state dict as PEFT writes it."""
    return to_checkpoint(name.replace(f".{NAME}.weight", ".weight"))
