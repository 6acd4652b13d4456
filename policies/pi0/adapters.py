"""Which parts of pi0 have low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies import lora
from policies.contract import PolicyError
from policies.pi0.names import stored
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
    network.adapter_config["target_modules"] = _targets(network, parts, stored)


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
