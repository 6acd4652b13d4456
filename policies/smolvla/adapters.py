"""Low-rank adapters of SmolVLA: the parts that new ones are hung on, and those of a PEFT directory.

Names in an adapter's file are those of LeRobot's policy, which PEFT wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from policies.flow_vla import adapters
from policies.flow_vla.adapters import LAYER, VISION_LAYER
from policies.smolvla.network import UNUSED, SmolVLANetwork, own_name, stored_name

PARTS = ("expert", "expert_qv", "projections", "language", "vision")
"""`expert_qv`: the expert's queries and values alone. With `projections` they are what LeRobot's `use_peft` adapts."""
PROJECTIONS = "(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)"


def attach(network: SmolVLANetwork, rank: int, alpha: float, parts: Sequence[str]) -> None:
    """Freeze the network and hang new adapters on the linear layers of its parts. Raises `PolicyError`."""
    adapters.attach(network, rank, alpha, parts, known=PARTS, targets=_targets)


def attach_saved(network: SmolVLANetwork, folder: Path, *, any_base: bool = False) -> None:
    """Freeze the network and hang the adapter of a PEFT directory on it.

    Raises `PolicyError` as `policies.flow_vla.adapters.attach_saved` does.
    """
    unused = own_name(UNUSED).removesuffix(".weight")
    adapters.attach_saved(network, folder, own_name=own_name, stored_name=stored_name, unused=unused, any_base=any_base)


def _targets(network: SmolVLANetwork, parts: Sequence[str], named: Callable[[str], str]) -> str:
    """PEFT's regular expression for the trained layers, with the adapter file's names. The last layer of the
    vision-language model is not trained, as in LeRobot: most of it reaches no action."""

    def prefix(name: str) -> str:
        return named(name).replace(".", r"\.")

    every, depth = [], network.sizes.vlm.depth
    if "expert" in parts:
        every.append(rf"{prefix('mixture.expert.')}layers\.\d+\.{LAYER}")
    if "expert_qv" in parts:
        every.append(rf"{prefix('mixture.expert.')}layers\.\d+\.self_attn\.[qv]_proj")
    if "projections" in parts:
        every.append(prefix("") + PROJECTIONS)
    if "language" in parts and depth > 1:
        first = "|".join(str(number) for number in range(depth - 1))
        every += [rf"{prefix('mixture.vlm.')}layers\.({first})\.{LAYER}", prefix("projector.").removesuffix(r"\.")]
    if "vision" in parts:
        every.append(rf"{prefix('vision.')}{VISION_LAYER}")
    return "|".join(every)
