"""Policies that act and are trained by reinforcement learning. Usable without the rest of the project.

`build` makes a new policy; `save`, `load`, `load_into` and `export` take it to and from disk. `policies.contract`
defines a policy, `policies.policy_kind` what else a kind of policies can have.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.checkpoint import export, load, load_into, save
    from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec
    from policies.errors import PolicyError
    from policies.policy_kind import PolicyFormat, PolicyKind
    from policies.registry import build

__all__ = [
    "Action",
    "Evaluation",
    "Inputs",
    "Policy",
    "PolicyError",
    "PolicyFormat",
    "PolicyKind",
    "PolicySpec",
    "build",
    "export",
    "load",
    "load_into",
    "save",
]
_HOMES = {
    "PolicyFormat": "policy_kind",
    "PolicyKind": "policy_kind",
    "build": "registry",
    "export": "checkpoint",
    "load": "checkpoint",
    "load_into": "checkpoint",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """The name, from its module, which imports torch: kinds and their errors are known without (`policies.kinds`)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'contract')}"), name)
