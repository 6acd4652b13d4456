"""Adapters of a PEFT directory on a flow-matching network, whose modules have other names in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from policies import lora
from policies.contract import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG

LAYER = r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
"""Linear layers of a layer of words or of actions, as a regular expression."""
VISION_LAYER = r"encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])"
"""The same of a vision transformer."""


def attach(
    network: Any,
    rank: int,
    alpha: float,
    parts: Sequence[str],
    *,
    known: Sequence[str],
    targets: Callable[[Any, Sequence[str], Callable[[str], str]], str],
) -> None:
    """Freeze the network and hang new adapters on the linear layers of its parts, some of those `known`. `targets`
    gives PEFT's regular expression for the layers of the parts, their names as a function says. Raises `PolicyError`.
    """
    if not parts or not set(parts) <= set(known):
        raise PolicyError(f"lora_parts must be some of {', '.join(known)}, got {list(parts)}")
    lora.attach(network, {"r": rank, "lora_alpha": alpha, "target_modules": targets(network, parts, str)})
    # What PEFT's own readers look for are the checkpoint's names.
    network.adapter_config["target_modules"] = targets(network, parts, network.checkpoint_name)


def attach_saved(
    network: Any,
    folder: Path,
    *,
    own_name: Callable[[str], str],
    stored_name: Callable[[str], str],
    unused: str = "",
    any_base: bool = False,
) -> None:
    """Freeze the network and hang the adapter of a PEFT directory on it, each layer with its rank and scale.

    `own_name` gives the network's name of a tensor of the file, `stored_name` the other way round; `unused` is the
    module of the file on which no output depends. Raises `PolicyError` where the adapter has tensors of no layer here,
    and, unless `any_base` is given, if it is of another base, or was merged into this one already.
    """

    def module_of(name: str) -> str:
        return own_name(name.rsplit(".lora_", 1)[0] + ".").removesuffix(".")

    def stored(module: str) -> str:
        return stored_name(f"{module}.weight").removesuffix(".weight")

    config, tensors = lora.read_adapter_config(folder), lora.read_adapter_file(folder)
    modules = {module_of(name): name.rsplit(".lora_", 1)[0] for name in tensors}
    if 2 * len(modules) != len(tensors):
        raise PolicyError(f"{folder / ADAPTER} has half an adapter, or one twice under names of several layouts")
    known = {name: module for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    strange = sorted(modules.keys() - known.keys() - {unused})
    if strange or not modules.keys() & known.keys():
        what = f"it adapts {modules[strange[0]]!r}, which this model has not" if strange else "it adapts nothing of it"
        raise PolicyError(f"{folder} is an adapter of another base: {what}")
    linear = {name: stored(name) for name, module in known.items() if isinstance(module, nn.Linear)}
    lora.check_whole(folder, config, map(stored, modules), linear.values())
    adapted = sorted(modules.keys() & known.keys())
    ranks, alphas = (
        {name: _setting(config, modules[name], *keys) for name in adapted}
        for keys in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    shared: dict[str, Any] = {n: config[n] for n in ("r", "lora_alpha", "use_rslora", "peft_type") if n in config}
    named = {name: network.checkpoint_name(f"{name}.weight").removesuffix(".weight") for name in adapted}
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
    network.unused_adapter = {network.adapter_name(n): t for n, t in tensors.items() if module_of(n) == unused}
    network.adapter_config = renamed
    lora.load_adapter(network, folder, any_base=any_base)


def _setting(config: Mapping[str, Any], module: str, pattern: str, otherwise: str) -> Any:
    """Rank or alpha of a layer, by the name under which it was trained."""
    from peft.utils.other import get_pattern_key

    said = config.get(pattern) or {}
    return said.get(get_pattern_key(list(said), module), config.get(otherwise, 8))
