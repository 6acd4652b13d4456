"""Communication: collectives among a component's instances, weight sync, and messages between nodes.

Instances form one ring (`laws.ring_seconds`), which passes through every node once. Nothing overlaps with computing,
and there are no trees: with small messages on very many devices this is more than a library takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from schedulers.cluster import Cluster, Pool, devices_of
from schedulers.cost.laws import broadcast_seconds, ring_seconds
from schedulers.cost.phase import LoopModel, PhaseModel
from schedulers.cost.problem import Problem
from schedulers.plan import Phase, Placement
from schedulers.profile import Exchange
from schedulers.workflow import Workflow

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Rounds of the ring that a collective takes."""

Nodes = frozenset[str]


def takes_time(cluster: Cluster) -> bool:
    """True if any communication on the cluster takes time."""
    finite = np.isfinite([cluster.link_bytes_per_s, cluster.device_link_bytes_per_s]).any()
    return bool(finite or cluster.link_s)


# --- among instances


def fewest_nodes(cluster: Cluster, pool: Pool, counts: np.ndarray) -> np.ndarray:
    """Least number of nodes that together have `counts` devices of a pool."""
    sizes = sorted((devices_of(node, pool) for node in cluster.nodes), reverse=True)
    return np.cumsum(sizes).searchsorted(counts) + 1


def exchange_seconds(
    cluster: Cluster, pool: Pool, exchanges: Sequence[Exchange], counts: np.ndarray, nodes: np.ndarray
) -> np.ndarray:
    """Seconds per iteration of a component's collectives, for each pair of `counts` (devices) and `nodes`.

    Rises with the number of nodes; with the number of devices it may rise or fall.
    """
    members = counts if pool == "accelerators" else nodes
    across, inside = nodes > 1, cluster.device_link_bytes_per_s if pool == "accelerators" else np.inf
    speed = np.where(across, min(inside, cluster.link_bytes_per_s), inside)
    message_s = np.where(across, cluster.link_s, 0.0)
    total = np.zeros(len(counts))
    for exchange in exchanges:
        calls: np.ndarray | float = exchange.times
        if exchange.fewest is not None:
            calls = np.maximum(exchange.times / members, exchange.fewest)
        total += calls * ring_seconds(exchange.bytes, members, speed, message_s, ROUNDS[exchange.collective])
    return total


def weight_sync_seconds(cluster: Cluster, size: float, source: Placement, target: Placement) -> float:
    """Seconds until the weights are at all instances of `target`.

    Instances on the source's devices share them. All others get them along a chain: through the links between nodes
    where the source has no instance on theirs, else through those between the node's accelerators; on cores of one node
    they share memory.
    """
    if not size or not takes_time(cluster):
        return 0.0
    pairs = zip(target.instances, target.hosts(source), strict=True)
    others = [instance for instance, host in pairs if host is None]
    if not others:
        return 0.0
    away = {instance[0].node for instance in others} - source.nodes
    near = cluster.device_link_bytes_per_s if "accelerators" in (source.pool, target.pool) else np.inf
    speed = min(near, cluster.link_bytes_per_s) if away else near
    return broadcast_seconds(size, float(speed), len(away), cluster.link_s)


# --- between placements on different nodes


def links_take_time(cluster: Cluster) -> bool:
    """True if messages between nodes take time."""
    return not math.isinf(cluster.link_bytes_per_s) or bool(cluster.link_s)


def message_seconds(cluster: Cluster, source: Nodes, target: Nodes, size: float) -> float:
    """Seconds of a message between placements on these nodes.

    Zero on the same nodes, where the profile includes it; else the bytes go through the links of the smaller number of
    nodes at once.
    """
    if source == target:
        return 0.0
    return cluster.link_s + size / cluster.link_bytes_per_s / min(len(source), len(target))


def with_transfers(problem: Problem, model: PhaseModel, nodes: Sequence[Nodes]) -> PhaseModel:
    """The phase with the messages of its loops where each placement is on these nodes."""
    loops = tuple(replace(loop, transfers_s=_transfers(problem, loop, nodes)) for loop in model.loops)
    return replace(model, loops=loops) if loops != model.loops else model


def _transfers(problem: Problem, loop: LoopModel, nodes: Sequence[Nodes]) -> tuple[float, ...]:
    """`LoopModel.transfers_s`: one message per group and visit, with all that is sent."""
    if not links_take_time(problem.cluster) or len({nodes[visit.placement] for visit in loop.visits}) < 2:
        return ()
    where = {name: nodes[visit.placement] for visit in loop.visits for name in visit.components}
    items = problem.environments[loop.visits[0].loop] / loop.groups
    result = []
    for i, visit in enumerate(loop.visits):
        before = loop.visits[i - 1]
        size = _sent(problem.profile.transfers, before.components, where)
        result.append(message_seconds(problem.cluster, nodes[before.placement], nodes[visit.placement], size * items))
    return tuple(result)


def _sent(transfers: Mapping[str, float], sources: Sequence[str], where: Mapping[str, Nodes]) -> float:
    """Bytes per item that these components send to others of the loop on other nodes."""
    pairs = [(key.partition(">")[::2], size) for key, size in transfers.items()]
    return sum(
        size
        for (source, target), size in pairs
        if source in sources and target in where and where[source] != where[target]
    )


def one_movable(workflow: Workflow) -> bool:
    """True if at most one component of each task is movable: the price of leaving the head node is then known."""
    names = [name for name in workflow.names if name in workflow.movable]
    own = [[name for name in names if name in loop.components] for loop in workflow.loops] or [names]
    return len(names) == len({name for mine in own for name in mine}) and max(map(len, own)) <= 1


def with_movable_away(problem: Problem, model: PhaseModel) -> PhaseModel:
    """The phase where all placements that can leave the head node do.

    With at most one movable component per task this is the price of any plan that uses other nodes. With several, of
    which some could stay while others leave, the phase without messages: a lower bound.
    """
    head = problem.cluster.head_node
    if head is None or len(problem.cluster.nodes) < 2 or not one_movable(problem.workflow):
        return model
    away = "away from " + head
    return with_transfers(
        problem, model, [frozenset({head if problem.pinned(names) else away}) for names in model.placements]
    )


def transfer_seconds(problem: Problem, phase: Phase) -> float:
    """Seconds between nodes of one micro-batch on its way through the components outside the loop."""
    if not links_take_time(problem.cluster):
        return 0.0
    nodes = {name: placement.nodes for placement in phase.placements for name in placement.components}
    total = 0.0
    for edge in problem.graph.edges:
        if edge.source in nodes and edge.target in nodes:
            items = phase.micro_batch if edge.source in problem.graph.micro_batched else problem.workflow.items
            size = problem.profile.transfers.get(f"{edge.source}>{edge.target}", 0.0)
            total += message_seconds(problem.cluster, nodes[edge.source], nodes[edge.target], size * items)
    return total
