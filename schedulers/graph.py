"""What can be known of a workflow without times: order, loop, barriers, and how it can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from schedulers.errors import PlanError, nearest
from schedulers.workflow import Edge, Workflow


@dataclass(frozen=True)
class Graph:
    """A checked workflow, its components in an order in which each comes after all that it needs."""

    names: tuple[str, ...]
    loops: tuple[tuple[str, ...], ...]
    """The components of each loop, in its order."""
    loop: tuple[str, ...]
    """Those of all loops. They work in one phase."""
    edges: tuple[Edge, ...]
    """All but those inside the loops."""
    divisible: frozenset[str]
    """Components that a `micro_batch` edge touches: they work part by part. Others work once, on all items."""
    closing: tuple[str, ...]
    """Components that close an iteration, in order: nothing follows them, and they follow others outside the loop (the
    weights' way back follows the learner). One step ahead they wait for the loop too."""
    later: dict[str, frozenset[str]]
    """All that comes after a component, in the loop too."""
    barred: dict[str, frozenset[str]]
    """Of that, what cannot begin before the component is done with all items."""

    @cached_property
    def common(self) -> frozenset[str]:
        """Components of several loops."""
        return frozenset(name for name in self.loop if sum(name in loop for loop in self.loops) > 1)

    @property
    def several(self) -> bool:
        """Whether there is more than one loop."""
        return len(self.loops) > 1

    def position(self, name: str) -> int:
        return self.names.index(name)

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.position))

    @property
    def nodes(self) -> tuple[tuple[str, ...], ...]:
        """The graph's nodes with the loops collapsed into one, in order."""
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

    Raises `PlanError` for a workflow that contradicts itself: unknown or repeated names, a loop without components,
    an edge between the loops of two tasks, a cycle outside the loops, items that do not divide into episodes.
    """
    names = workflow.names
    _check_names(workflow)
    loops = tuple(loop.components for loop in workflow.loops)
    inside = {name for loop in loops for name in loop}
    outer = tuple(edge for edge in workflow.edges if not {edge.source, edge.target} <= inside)
    before = {name: set[str]() for name in names}
    for edge in outer:
        before[edge.target].add(edge.source)
    for loop in loops:
        for first, second in zip(loop, loop[1:], strict=False):
            before[second].add(first)
    needed = set[str]().union(*(before[name] - inside for name in inside))
    for loop in loops:  # What the loops need they need at their beginning.
        before[loop[0]] |= needed
    order = _topological(workflow.name, names, before, inside)
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
        for loop in loops:
            after[name] |= set(loop[loop.index(name) + 1 :]) if name in loop else set()
    follows = {edge.target for edge in edges if edge.source not in inside}
    closing = tuple(name for name in order if name in follows and not after[name] and name not in inside)
    return Graph(
        order,
        loops,
        tuple(name for name in order if name in inside),
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
    ends = [(edge, name) for edge in workflow.edges for name in (edge.source, edge.target)]
    used = [(name, f"edge {edge.source}>{edge.target}") for edge, name in ends]
    used += [(name, "its loop") for loop in workflow.loops for name in loop.components]
    for name, what in used:
        if name not in names:
            near = nearest(name, names)
            raise PlanError(f"{where} names a component {name!r} in {what}, but does not declare it{near}")
    if workflow.items < 1 or workflow.episodes_per_env < 1 or workflow.items % workflow.episodes_per_env:
        raise PlanError(
            f"{where}: {workflow.items} items do not divide into {workflow.episodes_per_env} episodes per environment"
        )
    _check_loops(workflow, where)
    for edge in workflow.edges:
        if edge.unit < 1 or workflow.items % edge.unit:
            raise PlanError(
                f"{where}: edge {edge.source}>{edge.target} carries units of {edge.unit} items, which do not divide "
                f"the {workflow.items} items of an iteration"
            )


def _check_loops(workflow: Workflow, where: str) -> None:
    loops = workflow.loops
    for number, loop in enumerate(loops):
        whose = f"the loop of {workflow.task(number)}" if len(loops) > 1 else "the loop"
        if not loop.components or loop.steps < 1:
            raise PlanError(f"{where}: {whose} needs components and at least one step")
        if len(set(loop.components)) < len(loop.components):
            raise PlanError(f"{where}: {whose} names a component twice: {', '.join(loop.components)}")
        if loop.items % workflow.episodes_per_env:
            raise PlanError(
                f"{where}: the {loop.items} items of {whose} do not divide into {workflow.episodes_per_env} episodes "
                "per environment"
            )
    given = [loop.items for loop in loops]
    if len(loops) > 1 and (sum(given) != workflow.items or min(given) < 1):
        raise PlanError(
            f"{where} has {workflow.items} items, but its loops have {' + '.join(map(str, given))}; give each loop its "
            "own, and the workflow their sum"
        )
    if len(loops) == 1 and given[0] not in (0, workflow.items):
        raise PlanError(f"{where} has {workflow.items} items, but its only loop {given[0]}; leave out the loop's")
    inside = {name for loop in loops for name in loop.components}
    for edge in workflow.edges:
        pair = {edge.source, edge.target}
        if pair <= inside and not any(pair <= set(loop.components) for loop in loops):
            raise PlanError(
                f"{where}: edge {edge.source}>{edge.target} joins the loops of two tasks; these meet in the "
                "components that they share, and outside the loops"
            )


def _topological(
    workflow: str, names: tuple[str, ...], before: dict[str, set[str]], inside: set[str]
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
        # The loops stay in one piece.
        begun = [name for name in ready if name in inside] if inside & set(order) else []
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
