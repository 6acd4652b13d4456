"""What the instances of a component send one another, and how long that takes.

Instances form one ring (`laws.ring_seconds`), which passes through every node once. Nothing is taken to overlap with
computing, and there are no trees: with small messages on very many devices this is more than a library takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedulers.cluster import Cluster
from schedulers.laws import broadcast_seconds, ring_seconds
from schedulers.memory import devices_of
from schedulers.plan import Placement
from schedulers.profile import Exchange, Pool

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often a collective operation goes round the ring."""


def priced(cluster: Cluster) -> bool:
    """Whether anything that instances send one another takes time."""
    finite = np.isfinite([cluster.link_bytes_per_s, cluster.device_link_bytes_per_s]).any()
    return bool(finite or cluster.link_s)


def fewest_nodes(cluster: Cluster, pool: Pool, counts: np.ndarray) -> np.ndarray:
    """On how many nodes so many devices of a pool are at least."""
    sizes = sorted((devices_of(node, pool) for node in cluster.nodes), reverse=True)
    return np.cumsum(sizes).searchsorted(counts) + 1


def exchange_seconds(
    cluster: Cluster, pool: Pool, exchanges: Sequence[Exchange], counts: np.ndarray, nodes: np.ndarray
) -> np.ndarray:
    """Per iteration, of a component on so many devices of so many nodes each.

    Rises with the number of nodes. With the number of devices it may rise or fall.
    """
    members = counts if pool == "accelerators" else nodes
    across, inside = nodes > 1, cluster.device_link_bytes_per_s if pool == "accelerators" else np.inf
    speed = np.where(across, min(inside, cluster.link_bytes_per_s), inside)
    message_s = np.where(across, cluster.link_s, 0.0)
    total = np.zeros(len(counts))
    for exchange in exchanges:
        once = ring_seconds(exchange.bytes, members, speed, message_s, ROUNDS[exchange.collective])
        total += _times(exchange, members) * once
    return total


def publishing_seconds(cluster: Cluster, size: float, source: Placement, target: Placement) -> float:
    """Weights of so many bytes from the instances of one placement to those of another.

    Instances on the same devices share them. All others get them along a chain from one that has them: through the
    links between nodes where it has none on theirs, else through those between the node's accelerators; on cores of one
    node they share memory.
    """
    if not size or not priced(cluster):
        return 0.0
    pairs = zip(target.instances, target.hosts(source), strict=True)
    others = [instance for instance, host in pairs if host is None]
    if not others:
        return 0.0
    away = {instance[0].node for instance in others} - source.nodes
    near = cluster.device_link_bytes_per_s if "accelerators" in (source.pool, target.pool) else np.inf
    speed = min(near, cluster.link_bytes_per_s) if away else near
    return broadcast_seconds(size, float(speed), len(away), cluster.link_s)


def _times(exchange: Exchange, members: np.ndarray) -> np.ndarray | float:
    if exchange.fewest is None:
        return exchange.times
    return np.maximum(exchange.times / members, exchange.fewest)
