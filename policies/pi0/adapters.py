"""Low-rank adapters of pi0: the parts that new ones are hung on, and those of a PEFT directory.

Names in an adapter's file are those of the checkpoint's project: PEFT wraps LeRobot's policy, in which the network is
`model`, and openpi's network itself. Both are read; the layout's are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from policies import lora
from policies.flow_vla import adapters
from policies.flow_vla.adapters import LAYER, VISION_LAYER
from policies.pi0.config import Layout
from policies.pi0.network import UNUSED, Pi0Network, own_name, stored_name

PARTS = ("vlm", "expert", "vision")


def attach(network: Pi0Network, rank: int, alpha: float, parts: Sequence[str]) -> None:
    """Freeze the network and hang new adapters on the linear layers of its parts. Raises `PolicyError`."""
    adapters.attach(network, rank, alpha, parts, known=PARTS, targets=_targets)


def attach_saved(network: Pi0Network, folder: Path, *, any_base: bool = False) -> None:
    """Freeze the network and hang the adapter of a PEFT directory on it, of openpi's names or LeRobot's.

    Raises `PolicyError` as `policies.flow_vla.adapters.attach_saved` does.
    """
    lora.read_adapter_config(folder)
    of_lerobot = all(name.startswith("model.") for name in lora.read_adapter_file(folder))
    layout: Layout = "lerobot" if of_lerobot else "openpi"
    adapters.attach_saved(
        network,
        folder,
        own_name=own_name,
        stored_name=lambda name: stored_name(name, layout),
        unused=UNUSED.removesuffix(".weight"),
        any_base=any_base,
    )


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
        every.append(rf"{prefix('vision.')}{VISION_LAYER}")
    return "|".join(every)
