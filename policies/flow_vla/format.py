"""Shared parts of the folder formats of flow-matching vision-language-action models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from policies import lora
from policies.checkpoint_folders import EXTRAS
from policies.denoising import PICKING
from policies.files import ADAPTER, ADAPTER_CONFIG, SINGLE, check_tensors, read_tensors, write_tensors
from policies.flow_vla.policy import FlowVLA
from policies.policy_kind import PolicyFormat
from policies.transforms import Transforms

INCIDENTAL = frozenset(
    {"checkpoint", "adapter", "any_base", "steps", "noise_level", "start_noise", "scored", "step_reduction",
     "noise_bounds", "rtc_schedule", "rtc_guidance", "train", "critic_trains_network", "cache_prefix", "spec.chunk",
     "spec.horizon"}
)  # fmt: skip
"""Options that no saved weight depends on."""

ADAPTER_NOTE = "the adapter's tensors have PEFT's layout, and no other program was tried with them"
"""Of an adapter alone (`PolicyFormat.loaded_by`)."""


class FlowVLAFormat(PolicyFormat):
    """A network's weights or an adapter's, and beside them `EXTRAS`: what no community's layout has a place for."""

    def read_network(self, policy: Any, folder: Path) -> dict[str, Tensor]:
        """Tensors of a folder with whole weights, by the network's names. Raises `PolicyError`."""
        raise NotImplementedError

    def describe(self, policy: Any, folder: Path) -> None:
        """Write the folder of an adapter without its tensors, if the adapter's folder is to describe the policy."""
        raise NotImplementedError

    def write_whole(self, policy: Any, folder: Path) -> None:
        """Write the folder of a policy without an adapter."""
        raise NotImplementedError

    def write(self, policy: Any, folder: Path) -> None:
        """Write a directory, or an adapter alone in PEFT's layout, and the units to the last bit. What was there before
        would make a reader take the folder for one of the other."""
        if policy.adapted:
            (folder / SINGLE).unlink(missing_ok=True)
            self.describe(policy, folder)
            lora.save_adapter(policy.network, folder)
        else:
            for name in (ADAPTER_CONFIG, ADAPTER):
                (folder / name).unlink(missing_ok=True)
            self.write_whole(policy, folder)
        write_tensors(folder / EXTRAS, extras(policy))

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        return Transforms(architecture.get("transforms", ())).conventions()

    def continues(self, architecture: Mapping[str, Any]) -> bool:
        return True

    def contrasts(self, architecture: Mapping[str, Any]) -> bool:
        return architecture.get("scored", "one") in PICKING

    def read(self, policy: Any, folder: Path) -> dict[str, Tensor]:
        network = policy.network
        if policy.adapted:
            weights = lora.read_adapter(network, folder)
            lora.check_scaling(network, folder)
        else:
            weights = self.read_network(policy, folder)
        found, expected = read_tensors(folder / EXTRAS), extras(policy)
        # How steps are drawn may differ, and with it whether a network for that was learned.
        if any(name.startswith("noise_net.") for name in found) != (policy.noise_net is not None):
            found, expected = ({n: t for n, t in of.items() if n.startswith("units.")} for of in (found, expected))
        check_tensors(folder / EXTRAS, found, expected)
        return {f"network.{name}": tensor for name, tensor in weights.items()} | found

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}


def extras(policy: FlowVLA) -> dict[str, Tensor]:
    """Tensors that no community's layout has a place for, by the policy's names."""
    parts = {"units": policy.units, "noise_net": policy.noise_net}
    return {f"{n}.{k}": t for n, part in parts.items() if part is not None for k, t in part.state_dict().items()}
