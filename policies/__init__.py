"""Policies that act and are trained by reinforcement learning. Usable by itself.

`build` makes a new policy; `save`, `load` and `load_into` take it to and from disk. What a policy is says
`policies.contract`.
"""

from policies.checkpoint import load, load_into, save
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
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
