"""Low-rank adapters of pi0: the parts that new ones are hung on, and those of a PEFT directory.

Names in an adapter's file are those of the checkpoint's project: PEFT wraps LeRobot's policy, in which the network is
`model`, and openpi's network itself. Both are read; the layout's are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from policies import lora
from policies.contract import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG
from policies.pi0.config import Layout
from policies.pi0.network import UNUSED, Pi0Network, own_name, stored_name

PARTS = ("vlm", "expert", "vision")
LAYER = r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


def attach(network: Pi0Network, rank: int, alpha: float, parts: Sequence[str]) -> None:
    """Freeze the network and hang new adapters on the linear layers of its parts. Raises `PolicyError`."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise PolicyError(f"lora_parts must be some of {', '.join(PARTS)}, got {list(parts)}")
    config = {"r": rank, "lora_alpha": alpha}
    lora.attach(network, config | {"target_modules": _targets(network, parts, str)})
    # What PEFT's own readers look for are the checkpoint's names.
    network.adapter_config["target_modules"] = _targets(network, parts, network.checkpoint_name)


def attach_saved(network: Pi0Network, folder: Path, *, any_base: bool = False) -> None:
    """Freeze the network and hang the adapter of a PEFT directory on it, each layer with its rank and scale.

    Raises `PolicyError` where it has tensors of no layer here, and, unless `any_base` is given, if it is of another
    base, or was merged into this one already.
    """
    config, tensors = lora.read_adapter_config(folder), lora.read_adapter_file(folder)
    modules = {_module(name): name.rsplit(".lora_", 1)[0] for name in tensors}
    if 2 * len(modules) != len(tensors):
        raise PolicyError(f"{folder / ADAPTER} has half an adapter, or one twice under names of several layouts")
    known = {name: module for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    unused = UNUSED.removesuffix(".weight")
    strange = sorted(modules.keys() - known.keys() - {unused})
    if strange or not modules.keys() & known.keys():
        what = f"it adapts {modules[strange[0]]!r}, which this model has not" if strange else "it adapts nothing of it"
        raise PolicyError(f"{folder} is an adapter of another base: {what}")
    layout: Layout = "lerobot" if all(name.startswith("model.") for name in modules.values()) else "openpi"
    linear = {name: _named(name, layout) for name, module in known.items() if isinstance(module, nn.Linear)}
    lora.check_whole(folder, config, (_named(name, layout) for name in modules), linear.values())
    adapted = sorted(modules.keys() & known.keys())
    ranks, alphas = (
        {name: _setting(config, modules[name], *keys) for name in adapted}
        for keys in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    shared: dict[str, Any] = {n: config[n] for n in ("r", "lora_alpha", "use_rslora", "peft_type") if n in config}
    named = {name: _named(name, network.layout) for name in adapted}
    renamed = {
        **shared,
        "target_modules": sorted(named.values()),
        "rank_pattern": {named[name]: rank for name, rank in ranks.items()},
        "alpha_pattern": {named[name]: alpha for name, alpha in alphas.items()},
    }
    if not any_base:
        lora.check_not_merged(network, folder, renamed, {network.adapter_name(n): t for n, t in tensors.items()})
        lora.check_base(network, folder, config)
    targets = {"target_modules": adapted, "rank_pattern": ranks, "alpha_pattern": alphas}
    try:
        lora.attach(network, shared | targets)
    except PolicyError as error:
        raise PolicyError(f"{folder / ADAPTER_CONFIG}: {error}") from error
    network.unused_adapter = {network.adapter_name(n): t for n, t in tensors.items() if _module(n) == unused}
    network.adapter_config = renamed
    lora.load_adapter(network, folder, any_base=any_base)


def _named(module: str, layout: Layout) -> str:
    """A module's name in a checkpoint."""
    return stored_name(f"{module}.weight", layout).removesuffix(".weight")


def _module(name: str) -> str:
    """The network's module of an adapter's stored tensor."""
    return own_name(name.rsplit(".lora_", 1)[0] + ".").removesuffix(".")


def _setting(config: Mapping[str, Any], module: str, pattern: str, otherwise: str) -> Any:
    """Rank or alpha of a layer, by the name under which it was trained."""
    from peft.utils.other import get_pattern_key

    said = config.get(pattern) or {}
    return said.get(get_pattern_key(list(said), module), config.get(otherwise, 8))


def _targets(network: Pi0Network, parts: Sequence[str], named: Callable[[str], str]) -> str:
    """PEFT's regular expression for the trained layers, with the adapter file's names. Only the keys and values of the
    vision-language model's last layer reach the expert, so nothing else in that layer could learn."""

    def prefix(name: str) -> str:
        return named(name).replace(".", r"\.")

    every, depth = [], network.sizes.vlm.depth
    if "vlm" in parts:
        first, vlm = "|".join(str(i) for i in range(depth - 1)), prefix("mixture.vlm.")
        every.append(rf"{vlm}layers\.{depth - 1}\.self_attn\.[kv]_proj")
        every += [rf"{vlm}layers\.({first})\.{LAYER}"] if first else []
    if "expert" in parts:
        every.append(rf"{prefix('mixture.expert.')}layers\.\d+\.{LAYER}")
    if "vision" in parts:
        every.append(rf"{prefix('vision.')}encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])")
    return "|".join(every)
