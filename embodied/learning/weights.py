"""Weights on arrival at a policy: none is taken unless names, shapes and dtypes of all are exactly the policy's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from embodied.devices import CPU, await_devices
from embodied.errors import UserError
from policies.contract import Policy

TOLD = 3
"""Names that a message lists of each kind."""


class WrongWeights(UserError):
    """Weights of another policy."""


def trained(policy: Policy) -> dict[str, Tensor]:
    """What a learner hands out of such a policy: parameters that are trained, and buffers. The tensors themselves."""
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in policy.state_dict(keep_vars=True).items() if name not in frozen}


def check_weights(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Raise `WrongWeights`, which names them, unless these are all of the policy's that are trained, and no others."""
    own = trained(policy)
    wrong = [
        *_told("missing", sorted(own.keys() - state.keys())),
        *_told("unknown", sorted(state.keys() - own.keys())),
        *(
            f"{name} is {_kind(state[name])} instead of {_kind(tensor)}"
            for name, tensor in own.items()
            if name in state and _kind(state[name]) != _kind(tensor)
        ),
    ]
    if wrong:
        raise WrongWeights(
            f"the weights that were handed out are not the acting policy's: {'; '.join(wrong[: 2 * TOLD])}. The old "
            "ones are kept; make both policies from the same configuration, with the same version of the software"
        )


def map_weights(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Have the policy compute with these very tensors, where it computes on the CPU; else copy them to its device."""
    own = trained(policy)
    for name, tensor in own.items():
        if tensor.device == CPU:
            tensor.data = state[name]
        else:
            tensor.data.copy_(state[name], non_blocking=True)
    await_devices(own.values())


def _told(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return [f"{what} {', '.join(names[:TOLD])}{more}"] if names else []


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
