"""What crosses between nodes, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from schedulers.cluster import Cluster
from schedulers.plan import Phase
from schedulers.shape import LoopShape, Shape
from schedulers.times import Problem
from schedulers.workflow import Workflow

Nodes = frozenset[str]


def cost(problem: Problem, source: Nodes, target: Nodes, size: float) -> float:
    """Seconds of a message of so many bytes between placements on these nodes.

    On the same nodes it stays on them and costs nothing here (what it costs there is in the profile); else its bytes
    go through the links of the smaller number of nodes at once.
    """
    if source == target:
        return 0.0
    return problem.cluster.link_s + size / problem.cluster.link_bytes_per_s / min(len(source), len(target))


def with_ways(problem: Problem, shape: Shape, nodes: Sequence[Nodes]) -> Shape:
    """The shape with what messages cost where each placement is on these nodes."""
    loops = tuple(replace(loop, ways=_loop_ways(problem, loop, nodes)) for loop in shape.loops)
    return replace(shape, loops=loops) if loops != shape.loops else shape


def _loop_ways(problem: Problem, loop: LoopShape, nodes: Sequence[Nodes]) -> tuple[float, ...]:
    """`LoopShape.ways`: one message a group and visit, with all that is sent."""
    if free(problem.cluster) or len({nodes[visit.placement] for visit in loop.visits}) < 2:
        return ()
    where = {name: nodes[visit.placement] for visit in loop.visits for name in visit.components}
    items = problem.environments[loop.visits[0].loop] / loop.groups
    result = []
    for i, visit in enumerate(loop.visits):
        before = loop.visits[i - 1]
        size = _sent(problem.profile.transfers, before.components, where)
        result.append(cost(problem, nodes[before.placement], nodes[visit.placement], size * items))
    return tuple(result)


def one_travels(workflow: Workflow) -> bool:
    """Whether no more than one component of a task travels: then what leaves home is what has a price."""
    names = [name for name in workflow.names if name in workflow.travelling]
    own = [[name for name in names if name in loop.components] for loop in workflow.loops] or [names]
    return len(names) == len({name for mine in own for name in mine}) and max(map(len, own)) <= 1


def travelled(problem: Problem, shape: Shape) -> Shape:
    """The shape where all placements that can travel do: what it costs to have anything elsewhere, where no more than
    one component of a task travels. Where some of several could stay while others leave, without the price of messages,
    which no plan undercuts."""
    home = problem.cluster.home
    if home is None or len(problem.cluster.nodes) < 2 or not one_travels(problem.workflow):
        return shape
    away = "away from " + home
    return with_ways(
        problem, shape, [frozenset({home if problem.bound(names) else away}) for names in shape.placements]
    )


def rest_seconds(problem: Problem, phase: Phase) -> float:
    """Between nodes, on the longest way of one part through the components outside the loop."""
    if free(problem.cluster):
        return 0.0
    nodes = {name: placement.nodes for placement in phase.placements for name in placement.components}
    total = 0.0
    for edge in problem.graph.edges:
        if edge.source in nodes and edge.target in nodes:
            items = phase.micro_batch if edge.source in problem.graph.divisible else problem.workflow.items
            size = problem.profile.transfers.get(f"{edge.source}>{edge.target}", 0.0)
            total += cost(problem, nodes[edge.source], nodes[edge.target], size * items)
    return total


def free(cluster: Cluster) -> bool:
    """Whether messages between nodes take no time."""
    return math.isinf(cluster.link_bytes_per_s) and not cluster.link_s


def _sent(transfers: Mapping[str, float], sources: Sequence[str], where: Mapping[str, Nodes]) -> float:
    """Bytes per item that these components send to others of the loop on other nodes."""
    pairs = [(key.partition(">")[::2], size) for key, size in transfers.items()]
    return sum(
        size
        for (source, target), size in pairs
        if source in sources and target in where and where[source] != where[target]
    )
