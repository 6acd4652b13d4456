"""Clusters: nodes with cores, accelerators and memory, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from schedulers.cards import find_card
from schedulers.errors import PlanError, nearest

Pool = Literal["cores", "accelerators"]
"""Kind of device. A component occupies one pool: physics computes on cores, a VLA on accelerators."""
POOLS: tuple[Pool, ...] = ("cores", "accelerators")

MAX_NODES, MAX_DEVICES = 10_000, 1_000_000
"""Largest cluster, and largest pool of one, that is planned for: every node is looked at."""
MAX_MEMORY_SIZES = 3
"""Memory sizes per pool for which a separate search is made."""
ROUNDING = 1e-12
"""Relative difference below which two memory sizes are equal."""


@dataclass(frozen=True)
class Node:
    name: str
    cores: int
    accelerators: int = 0
    memory_bytes: float = float("inf")
    """Memory of the node, shared evenly by its cores."""
    accelerator_bytes: float = float("inf")
    """Memory of each accelerator."""
    card: str | None = None
    """Name of its accelerators among `schedulers.cards.CARDS`, from which times are estimated where none were
    measured."""


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Node, ...]
    link_bytes_per_s: float = float("inf")
    """Bandwidth between two nodes, each way, shared by all that a node sends at a time."""
    link_s: float = 0.0
    """Latency of a message between nodes."""
    head_node: str | None = None
    """Node of all components that are not `movable`. None: every component may be on any node."""
    fingerprint: str | None = None
    """Identity of the hardware, compared with a profile's. None: unknown, for a cluster that does not exist."""
    device_link_bytes_per_s: float = float("inf")
    """Bandwidth between two accelerators of a node, each way."""


def check_cluster(cluster: Cluster) -> None:
    """Raises `PlanError` for a cluster without nodes or devices, with two nodes of one name, or with impossible
    links."""
    if not cluster.nodes:
        raise PlanError("the cluster has no nodes; give at least one, with its cores")
    if len(cluster.nodes) > MAX_NODES:
        raise PlanError(f"the cluster has {len(cluster.nodes)} nodes; at most {MAX_NODES} can be planned for")
    for pool in POOLS:
        if pool_size(cluster, pool) > MAX_DEVICES:
            raise PlanError(
                f"the cluster has {pool_size(cluster, pool)} {pool}; at most {MAX_DEVICES} can be planned for"
            )
    names = set[str]()
    for node in cluster.nodes:
        if node.name in names:
            raise PlanError(f"the cluster has two nodes named {node.name!r}")
        names.add(node.name)
        if node.cores < 0 or node.accelerators < 0 or node.cores + node.accelerators < 1:
            raise PlanError(
                f"node {node.name!r} has {node.cores} cores and {node.accelerators} accelerators; it needs at least one"
            )
        if node.card is not None:
            find_card(node.card)
    for field in ("link_bytes_per_s", "device_link_bytes_per_s"):
        if not getattr(cluster, field) > 0:
            raise PlanError(f"the cluster's {field} is {getattr(cluster, field)}; it is more than 0")
    if not 0 <= cluster.link_s < math.inf:
        raise PlanError(f"the cluster's link_s is {cluster.link_s}; it is at least 0, and finite")
    if cluster.head_node is not None and cluster.head_node not in names:
        raise PlanError(
            f"the cluster's head_node {cluster.head_node!r} is none of its nodes{nearest(cluster.head_node, names)}"
        )


def devices_of(node: Node, pool: Pool) -> int:
    """Number of a node's devices."""
    return node.cores if pool == "cores" else node.accelerators


def pool_size(cluster: Cluster, pool: Pool) -> int:
    """Number of a cluster's devices."""
    return sum(devices_of(node, pool) for node in cluster.nodes)


def only_head(cluster: Cluster) -> Cluster:
    """The cluster's head node without its other nodes."""
    return replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name == cluster.head_node))


def bytes_per_device(node: Node, pool: Pool) -> float:
    """Memory of each of a node's devices: an accelerator's own, a core's even share of its node's."""
    return node.accelerator_bytes if pool == "accelerators" else node.memory_bytes / node.cores


def memory_sizes(cluster: Cluster, pool: Pool) -> list[float]:
    """The different amounts of memory that the pool's devices have, ascending."""
    return sorted({bytes_per_device(node, pool) for node in cluster.nodes if devices_of(node, pool)}) or [math.inf]


def devices_with(cluster: Cluster, pool: Pool, size: float) -> int:
    """Number of the pool's devices with at least `size` bytes."""
    mine = [node for node in cluster.nodes if devices_of(node, pool)]
    return sum(devices_of(node, pool) for node in mine if bytes_per_device(node, pool) >= size)


def memory_differs(cluster: Cluster) -> bool:
    """True if the devices of a pool differ in memory."""
    return any(len(memory_sizes(cluster, pool)) > 1 for pool in POOLS)


def by_memory(cluster: Cluster) -> list[Cluster]:
    """The cluster, and the same without the devices that have less memory than some size.

    A node of little memory can cost more than it adds where every device of a placement needs the same. The head node
    keeps its devices.
    """
    result = [
        _of_at_least(cluster, cores, accelerators)
        for cores, accelerators in product(*(_some(memory_sizes(cluster, pool)) for pool in POOLS))
    ]
    return list(dict.fromkeys(result))


def _of_at_least(cluster: Cluster, cores: float, accelerators: float) -> Cluster:
    nodes = []
    for node in cluster.nodes:
        if node.name != cluster.head_node and node.cores and bytes_per_device(node, "cores") < cores:
            node = replace(node, cores=0)
        if node.name != cluster.head_node and node.accelerator_bytes < accelerators:
            node = replace(node, accelerators=0)
        if node.cores + node.accelerators:
            nodes.append(node)
    return replace(cluster, nodes=tuple(nodes))


def _some(sizes: Sequence[float]) -> list[float]:
    """At most `MAX_MEMORY_SIZES` of them, evenly spaced, with the first and the last."""
    last = len(sizes) - 1
    return [sizes[i] for i in sorted({round(last * i / (MAX_MEMORY_SIZES - 1)) for i in range(MAX_MEMORY_SIZES)})]
