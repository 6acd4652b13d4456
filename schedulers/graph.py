"""What can be known of a workflow without times: order, loop, barriers, and how it can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from schedulers.errors import PlanError, nearest
from schedulers.workflow import Edge, Workflow


@dataclass(frozen=True)
class Graph:
    """A checked workflow, its components in an order in which each comes after all that it needs."""

    names: tuple[str, ...]
    loop: tuple[str, ...]
    edges: tuple[Edge, ...]
    """All but those inside the loop."""
    divisible: frozenset[str]
    """Components that a `micro_batch` edge touches: they work part by part. Others work once, on all items."""
    closing: tuple[str, ...]
    """Components that close an iteration, in order: nothing follows them, and they follow others outside the loop (the
    weights' way back follows the learner). One step ahead they wait for the loop too."""
    later: dict[str, frozenset[str]]
    """All that comes after a component, in the loop too."""
    barred: dict[str, frozenset[str]]
    """Of that, what cannot begin before the component is done with all items."""

    def position(self, name: str) -> int:
        return self.names.index(name)

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.position))

    @property
    def nodes(self) -> tuple[tuple[str, ...], ...]:
        """The graph's nodes with the loop collapsed into one, in order."""
        result: list[tuple[str, ...]] = []
        for name in self.names:
            if name not in self.loop:
                result.append((name,))
            elif name == self.loop[0]:
                result.append(self.loop)
        return tuple(result)


@lru_cache(maxsize=256)
def graph_of(workflow: Workflow) -> Graph:
    """The workflow's graph.

    Raises `PlanError` for a workflow that contradicts itself: unknown or repeated names, a cycle outside the
    loop, items that do not divide into waves.
    """
    names = workflow.names
    _check_names(workflow)
    loop = workflow.loop.components if workflow.loop else ()
    inside = set(loop)
    outer = tuple(edge for edge in workflow.edges if not {edge.source, edge.target} <= inside)
    before = {name: set[str]() for name in names}
    for edge in outer:
        before[edge.target].add(edge.source)
    for first, second in zip(loop, loop[1:], strict=False):
        before[second].add(first)
    for name in loop[1:]:  # What the loop needs it needs at its beginning.
        before[loop[0]] |= before[name] - inside
    order = _topological(workflow.name, names, before, loop)
    edges = tuple(edge for edge in outer if edge.source != edge.target)
    divisible = frozenset(
        name
        for edge in edges
        for name in (edge.source, edge.target)
        if edge.flow == "micro_batch" and name not in inside
    )
    # What follows any component of the loop follows the loop.
    after = {name: set[str]() for name in names}
    barred = {name: set[str]() for name in names}
    for name in reversed(order):
        for edge in edges:
            if edge.source == name or (name in inside and edge.source in inside):
                after[name] |= {edge.target} | after[edge.target]
                whole = edge.flow == "barrier" or edge.target in inside
                barred[name] |= {edge.target} | after[edge.target] if whole else barred[edge.target]
        for other in loop[loop.index(name) + 1 :] if name in inside else ():
            after[name].add(other)
    follows = {edge.target for edge in edges if edge.source not in inside}
    closing = tuple(name for name in order if name in follows and not after[name] and name not in inside)
    return Graph(
        order,
        loop,
        edges,
        divisible,
        closing,
        {name: frozenset(found) for name, found in after.items()},
        {name: frozenset(found) for name, found in barred.items()},
    )


def _check_names(workflow: Workflow) -> None:
    names, where = workflow.names, f"workflow {workflow.name!r}"
    if not names:
        raise PlanError(f"{where} has no components")
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{where} declares component {name!r} twice")
    used = [name for edge in workflow.edges for name in (edge.source, edge.target)]
    for name in [*used, *(workflow.loop.components if workflow.loop else ())]:
        if name not in names:
            raise PlanError(f"{where} names a component {name!r} that it does not declare{nearest(name, names)}")
    if workflow.items < 1 or workflow.waves < 1 or workflow.items % workflow.waves:
        raise PlanError(f"{where}: {workflow.items} items do not divide into {workflow.waves} waves")
    if workflow.loop and (workflow.loop.steps < 1 or not workflow.loop.components):
        raise PlanError(f"{where}: a loop needs components and at least one step")
    for edge in workflow.edges:
        if edge.unit < 1 or workflow.items % edge.unit:
            raise PlanError(
                f"{where}: edge {edge.source}>{edge.target} carries units of {edge.unit} items, which do not divide "
                f"the {workflow.items} items of an iteration"
            )


def _topological(
    workflow: str, names: tuple[str, ...], before: dict[str, set[str]], loop: tuple[str, ...]
) -> tuple[str, ...]:
    order: list[str] = []
    while len(order) < len(names):
        ready = [name for name in names if name not in order and before[name] <= set(order)]
        if not ready:
            stuck = sorted(set(names) - set(order))
            raise PlanError(
                f"workflow {workflow!r} has a cycle outside its loop, through some of {', '.join(stuck)}; "
                "edges that close the loop are not listed"
            )
        # The loop stays in one piece.
        begun = [name for name in ready if name in loop and name != loop[0]]
        order.append((begun or ready)[0])
    return tuple(order)


def ideals(graph: Graph) -> list[frozenset[str]]:
    """All sets of components that hold, with each component, all that it needs; the loop is in or out as a whole."""
    needs: list[tuple[tuple[str, ...], set[str]]] = []
    for node in graph.nodes:
        needs.append((node, {name for name in graph.names if graph.later[name] & set(node)} - set(node)))
    found = {frozenset[str]()}
    for node, before in needs:  # In topological order: each ideal is a smaller one and at most this node.
        found |= {ideal | set(node) for ideal in found if before <= ideal}
    return sorted(found, key=lambda ideal: (len(ideal), sorted(ideal)))


def partitions(
    graph: Graph, components: frozenset[str], pools: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to share `components` out to placements of one pool each that can work as a pipeline.

    Placements are convex (what lies between two of a placement's components is in it too) and do not wait for
    each other in a circle. The loop counts as the chain of its components.
    """
    names = graph.ordered(components)
    reach = graph.later

    def extend(index: int, blocks: list[list[str]]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if index == len(names):
            if _acyclic(blocks, reach):
                yield tuple(tuple(block) for block in blocks)
            return
        name = names[index]
        for block in blocks:
            if pools[block[0]] == pools[name] and _convex_with(name, block, names[:index], reach):
                block.append(name)
                yield from extend(index + 1, blocks)
                block.pop()
        blocks.append([name])
        yield from extend(index + 1, blocks)
        blocks.pop()

    yield from extend(0, [])


def turns(graph: Graph, components: frozenset[str], pools: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """One placement a pool: all components that occupy the same pool take turns."""
    names = graph.ordered(components)
    order = list(dict.fromkeys(pools[name] for name in names))
    return tuple(tuple(name for name in names if pools[name] == pool) for pool in order)


def _convex_with(name: str, block: list[str], earlier: tuple[str, ...], reach: dict[str, frozenset[str]]) -> bool:
    return not any(
        name in reach[other] and any(other in reach[member] for member in block)
        for other in earlier
        if other not in block
    )


def _acyclic(blocks: list[list[str]], reach: dict[str, frozenset[str]]) -> bool:
    follows = [
        {j for j, other in enumerate(blocks) if i != j and any(reach[name] & set(other) for name in block)}
        for i, block in enumerate(blocks)
    ]
    left = set(range(len(blocks)))
    while left:
        free = {i for i in left if not any(i in follows[j] for j in left)}
        if not free:
            return False
        left -= free
    return True
