"""Low-rank adapters of OpenVLA: the parts that new ones are hung on, and those of a PEFT directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from policies import lora
from policies.contract import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG, Shards, check_no_other_weights
from policies.openvla.config import TOWERS
from policies.openvla.film import FilmedBlock
from policies.openvla.model import FILM_LAYER, OpenVLAModel, to_checkpoint
from policies.openvla.side_files import LORA_ADAPTER, names_of

FILMED_BACKBONE = "vision_backbone.vision_backbone."
"""Prefix of the towers' tensor names in an adapter that was trained with FiLM."""
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
            every.append(rf"vision_backbone\.{tower}\.blocks\.({blocks})\.(block\.)?(attn\.(qkv|proj)|mlp\.fc[12])")
    return "|".join(every)


def attach(model: OpenVLAModel, rank: int, alpha: float, parts: Sequence[str]) -> None:
    """Freeze the model and hang new adapters on it: A drawn from a normal distribution, B zero, both float32."""
    lora.attach(model, {"r": rank, "lora_alpha": alpha, "target_modules": targets(model, parts)})


def attach_saved(model: OpenVLAModel, folder: Path, *, any_base: bool = False) -> None:
    """Freeze the model and hang the adapter of a PEFT directory on it.

    Raises `PolicyError` for one that does not fit and, unless `any_base` is given, for one that is of another base or
    was merged into this one already.
    """
    config = lora.read_adapter_config(folder)
    tensors = lora.read_adapter_file(folder)
    filmed = any(isinstance(module, FilmedBlock) for module in model.modules())
    if filmed:  # the towers' adapters are in the file of the backbone too, which was read
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(FILMED_BACKBONE)}
    modules = {name.rsplit(".lora_", 1)[0] for name in tensors}
    known = {
        to_checkpoint(f"{name}.weight").removesuffix(".weight"): name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not FILM_LAYER.fullmatch(f"{name}.weight")
    }
    unused = {to_checkpoint(name).removesuffix(".weight") for name in model.unused}
    strange = sorted(modules - known.keys() - unused)
    if strange or not modules & known.keys():
        what = f"it adapts {strange[0]!r}, which this model has not" if strange else "it adapts nothing of this model"
        if strange and strange[0].startswith(FILMED_BACKBONE):
            what += "; it was trained with FiLM: set policy.options.film to true"
        raise PolicyError(f"{folder} is an adapter of another base: {what}")
    linear = [name for name, own in known.items() if isinstance(model.get_submodule(own), nn.Linear)]
    lora.check_whole(folder, config, modules, (name for name in linear if not (filmed and _of_towers(name))))
    beside = model.shards is not None and folder.resolve() == (model.shards.folder / LORA_ADAPTER).resolve()
    if beside and lora.is_merged(lora.plain_state(model), tensors, config) is not False:
        raise PolicyError(
            f"{folder} lies beside the weights, where OpenVLA-OFT saves an adapter that it has merged into them, and "
            "the tensors do not tell otherwise: it would count twice. Leave policy.options.adapter out"
        )
    if not any_base:
        lora.check_not_merged(model, folder, config, tensors)
        lora.check_base(model, folder, config)
    saved = {key: value for key, value in config.items() if key not in {"base_model_name_or_path", lora.BASE}}
    targeted = sorted(known[name] for name in modules & known.keys())
    adapting = saved | {"target_modules": targeted, "inference_mode": False}
    lora.attach(model, adapting, folder / ADAPTER_CONFIG)
    # What the reference's lists of suffixes also hit: no output depends on it, it is kept to be saved again.
    model.unused_adapter = {name: t for name, t in tensors.items() if name.rsplit(".lora_", 1)[0] not in known}
    model.adapter_config = saved
    lora.load_adapter(model, folder, any_base=any_base)


def check_other_files(shards: Shards, adapters: Iterable[str | Path | None]) -> None:
    """Raise `PolicyError` for weight files in the model's folder that no option uses: an adapter that is not loaded,
    or an unknown file."""
    folder = shards.folder.resolve()
    known = names_of(folder)
    if (folder / ADAPTER).exists():
        if folder not in {Path(adapter).resolve() for adapter in adapters if adapter}:
            raise PolicyError(
                f"{folder / ADAPTER} lies beside the weights, and is not used: set policy.options.adapter to {folder} "
                "to act with both, or move it away if it is merged into them"
            )
        known.append(ADAPTER)
    check_no_other_weights(shards, known)


def check_saved_beside(model: OpenVLAModel) -> None:
    """Raise `PolicyError` if an adapter lies in a folder beside the model's weights, as OpenVLA-OFT leaves it, and
    these are its base alone. Mostly it is merged into them."""
    if model.shards is None or not (model.shards.folder / LORA_ADAPTER / ADAPTER_CONFIG).exists():
        return
    folder = model.shards.folder / LORA_ADAPTER
    try:
        config, tensors = lora.read_adapter_config(folder), lora.read_adapter_file(folder)
    except PolicyError:  # of a kind that is not read: nothing says that it is not merged
        return
    if lora.is_merged(lora.plain_state(model), tensors, config) is False:
        raise PolicyError(
            f"{folder} is not merged into the weights beside it, and is not used: set policy.options.adapter to that "
            "folder"
        )


def _of_towers(name: str) -> bool:
    return name.startswith("vision_backbone.")
