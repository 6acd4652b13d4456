"""Which parts of pi0 have low-rank adapters, and adapters that others have saved.

Names in an adapter's file are those of the checkpoint's project: PEFT wraps LeRobot's policy, in which the network is
`model`, and openpi's network itself. Both are read; the layout's are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from policies import lora
from policies.contract import PolicyError
from policies.files import ADAPTER
from policies.pi0.names import UNUSED, own_name
from policies.pi0.network import Pi0Network

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


def attach_saved(network: Pi0Network, folder: Path) -> None:
    """The same with the adapter of a PEFT directory, each layer with the rank and scale that it has there.

    Raises `PolicyError`, also if it is of another base, or has tensors of which no output depends on any.
    """
    config, tensors = lora.read_adapter_config(folder), lora.read_adapter_file(folder)
    modules = {_module(name): name.rsplit(".lora_", 1)[0] for name in tensors}
    if 2 * len(modules) != len(tensors):
        raise PolicyError(f"{folder / ADAPTER} has half an adapter, or one twice under names of several layouts")
    known = {name for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    unused = UNUSED.removesuffix(".weight")
    strange = sorted(modules.keys() - known - {unused})
    if strange or not modules.keys() & known:
        what = f"it adapts {modules[strange[0]]!r}, which this model has not" if strange else "it adapts nothing of it"
        raise PolicyError(f"{folder} is an adapter of another base: {what}")
    lora.check_base(network, folder, config)
    adapted = {name: _said(config, modules[name]) for name in sorted(modules.keys() & known)}
    ranks, alphas = ({name: said[i] for name, said in adapted.items()} for i in (0, 1))
    shared = {name: config[name] for name in ("r", "lora_alpha", "use_rslora", "peft_type") if name in config}
    lora.attach(
        network, {**shared, "target_modules": sorted(adapted), "rank_pattern": ranks, "alpha_pattern": alphas}
    )
    network.unused_adapter = {network.adapter_name(n): t for n, t in tensors.items() if _module(n) == unused}
    named = {name: network.checkpoint_name(name) for name in adapted}
    network.adapter_config = {
        **shared,
        "target_modules": sorted(named.values()),
        "rank_pattern": {named[name]: rank for name, rank in ranks.items()},
        "alpha_pattern": {named[name]: alpha for name, alpha in alphas.items()},
    }
    lora.load_adapter(network, folder)


def _module(name: str) -> str:
    """The network's module of an adapter's stored tensor."""
    return own_name(name.rsplit(".lora_", 1)[0] + ".").removesuffix(".")


def _said(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and alpha of a layer, by the name under which it was trained. PEFT's rule: the first pattern that is the
    name or an end of it."""
    found = []
    for pattern, name, default in (("rank_pattern", "r", 8), ("alpha_pattern", "lora_alpha", 8)):
        said = config.get(pattern) or {}
        key = next((key for key in said if re.match(rf"(.*\.)?({key})$", module)), None)
        found.append(config.get(name, default) if key is None else said[key])
    return found[0], found[1]


def _targets(network: Pi0Network, parts: Sequence[str], named: Callable[[str], str]) -> str:
    """PEFT's regular expression, by what the network's names are called there. Of the vision-language model's last
    layer only keys and values reach the expert: nothing else there could learn."""

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
