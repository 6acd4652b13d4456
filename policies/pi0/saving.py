"""Saving and loading a pi0 policy: a directory in its checkpoint's layout, or an adapter in PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from policies import lora
from policies.files import ADAPTER, ADAPTER_CONFIG, SINGLE, check_tensors, read_tensors, write_tensors
from policies.pi0.adapters import check_scaling
from policies.pi0.files import read_weights, save_description, save_directory
from policies.pi0.sources import EXTRAS
from policies.pi0.units import DEMONSTRATIONS, RobotUnits, identity, write_lerobot, write_openpi

if TYPE_CHECKING:
    from policies.pi0.policy import Pi0

def export(policy: Pi0, folder: Path) -> None:
    """A directory of the checkpoint's layout, adapter added, with its statistics or those of the demonstrations."""
    save_directory(policy.network, policy.source, folder, policy.config, ours=False)
    if policy.architecture()["asset"] == DEMONSTRATIONS:
        # Whoever reads the files wants statistics of a state, also where the policy reads none.
        state = policy.units.state if policy.spec.proprio_dim else identity(policy.sizes.action_dim, 0).state
        (write_lerobot if policy.layout == "lerobot" else write_openpi)(folder, RobotUnits(state, policy.units.action))


def write(policy: Pi0, folder: Path) -> None:
    """Such a directory, or an adapter alone, and the units to the last bit."""
    if policy.adapted:
        (folder / SINGLE).unlink(missing_ok=True)
        if policy.source.described == policy.source.adapter:  # it is not the base that says what the numbers are
            save_description(policy.source, folder, policy.config, ours=True)
        lora.save_adapter(policy.network, folder)
    else:
        for name in (ADAPTER_CONFIG, ADAPTER):  # of what was there before: the folder would be taken for an adapter
            (folder / name).unlink(missing_ok=True)
        save_directory(policy.network, policy.source, folder, policy.config, ours=True)
    write_tensors(folder / EXTRAS, _extras(policy))


def read(policy: Pi0, folder: Path) -> dict[str, Tensor]:
    """Tensors that `write` wrote, under the names of the policy's tensors. Raises `PolicyError`."""
    network = policy.network
    if policy.adapted:
        weights = lora.read_adapter(network, folder)
        check_scaling(network, folder)
    else:
        weights = read_weights(folder, network)
    extras, expected = read_tensors(folder / EXTRAS), _extras(policy)
    # How steps are drawn may differ, and with it whether a network for that was learned.
    if any(name.startswith("noise_net.") for name in extras) != (policy.noise_net is not None):
        extras, expected = ({n: t for n, t in of.items() if n.startswith("units.")} for of in (extras, expected))
    check_tensors(folder / EXTRAS, extras, expected)
    return {f"network.{name}": tensor for name, tensor in weights.items()} | extras


def _extras(policy: Pi0) -> dict[str, Tensor]:
    parts = {"units": policy.units, "noise_net": policy.noise_net}
    return {f"{n}.{k}": t for n, part in parts.items() if part is not None for k, t in part.state_dict().items()}
