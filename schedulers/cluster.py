"""On what: nodes with cores, accelerators, memory and links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    name: str
    cores: int
    accelerators: int = 0
    memory_bytes: float = float("inf")
    """Of the node, shared by its cores."""
    accelerator_bytes: float = float("inf")
    """Of each accelerator."""


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Node, ...]
    link_bytes_per_s: float = float("inf")
    """Between two nodes, each way: of all that a node sends at a time."""
    link_s: float = 0.0
    """That a message takes from one node to another, however small it is."""
    home: str | None = None
    """The node where components work that do not travel; None: all of them may work anywhere."""
    fingerprint: str | None = None
    """Of the hardware, to be compared with a profile's; None: not known (a cluster one does not have)."""
    device_link_bytes_per_s: float = float("inf")
    """Between two accelerators of a node, each way."""
