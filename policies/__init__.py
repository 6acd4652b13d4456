"""Policies that act and are trained by reinforcement learning. Usable by itself.

`build` makes a new policy; `save`, `load` and `load_into` take it to and from disk. What a policy is says
`policies.contract`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.checkpoint import load, load_into, save
    from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec
    from policies.errors import PolicyError
    from policies.registry import build

__all__ = [
    "Action",
    "Evaluation",
    "Inputs",
    "Policy",
    "PolicyError",
    "PolicySpec",
    "build",
    "load",
    "load_into",
    "save",
]
_HOMES = {"build": "registry", "load": "checkpoint", "load_into": "checkpoint", "save": "checkpoint"}


def __getattr__(name: str) -> Any:
    """The name, from its module, which imports torch: kinds and their errors are known without (`policies.kinds`)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'contract')}"), name)
