"""How much memory a device has, where nodes differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from schedulers.cluster import Cluster, Node
from schedulers.profile import Pool

MOST_LEVELS = 3
"""Of memory per device that are told apart, by pool: each is a search."""

ROUNDING = 1e-12
"""Relative; sizes that differ by less are equal."""


def devices_of(node: Node, pool: Pool) -> int:
    return node.cores if pool == "cores" else node.accelerators


def share_bytes(node: Node, pool: Pool) -> float:
    """Memory of each of a node's devices: an accelerator's own, a core's even share of its node's."""
    return node.accelerator_bytes if pool == "accelerators" else node.memory_bytes / node.cores


def levels(cluster: Cluster, pool: Pool) -> list[float]:
    """The different amounts of memory that the pool's devices have, the least first."""
    return sorted({share_bytes(node, pool) for node in cluster.nodes if devices_of(node, pool)}) or [math.inf]


def devices_with(cluster: Cluster, pool: Pool, size: float) -> int:
    """How many have at least so many bytes."""
    mine = [node for node in cluster.nodes if devices_of(node, pool)]
    return sum(devices_of(node, pool) for node in mine if share_bytes(node, pool) >= size)


def uneven(cluster: Cluster) -> bool:
    return any(len(levels(cluster, pool)) > 1 for pool in ("cores", "accelerators"))


def thinned(cluster: Cluster) -> list[Cluster]:
    """The cluster, and what is left of it without the devices that have less memory than others.

    What a node of little memory adds can be less than what it takes away where every device has to hold the same. The
    home keeps its devices.
    """
    result = [
        _of_at_least(cluster, cores, accelerators)
        for cores, accelerators in product(*(_some(levels(cluster, pool)) for pool in ("cores", "accelerators")))
    ]
    return list(dict.fromkeys(result))


def _of_at_least(cluster: Cluster, cores: float, accelerators: float) -> Cluster:
    nodes = []
    for node in cluster.nodes:
        if node.name != cluster.home and node.cores and share_bytes(node, "cores") < cores:
            node = replace(node, cores=0)
        if node.name != cluster.home and node.accelerator_bytes < accelerators:
            node = replace(node, accelerators=0)
        if node.cores + node.accelerators:
            nodes.append(node)
    return replace(cluster, nodes=tuple(nodes))


def _some(found: Sequence[float]) -> list[float]:
    """At most so many of them, evenly, with the first and the last."""
    last = len(found) - 1
    return [found[i] for i in sorted({round(last * i / (MOST_LEVELS - 1)) for i in range(MOST_LEVELS)})]
