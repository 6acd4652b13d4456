"""Workflows: components, the data between them, and the rollout loop; free of hardware and of times.

A `Workflow` is written by a person or made from a configuration. Its `Graph` is what follows from it without times: the
order of components, what depends on what, and how the workflow can be cut into phases and placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from schedulers.errors import PlanError, nearest

Flow = Literal["micro_batch", "barrier"]


@dataclass(frozen=True)
class Component:
    """One kind of work: physics, rendering, policy, advantages, learner. Its times and memory are in the profile."""

    name: str
    does: str = ""
    """Task of the component in a few words, for explanations."""
    movable: bool = False
    """True if it may be on other nodes than a cluster's head node."""
    task: int = 0
    """Task of a run of several that it belongs to. Components of task i > 0 are called `physics-i`, `render-i`; those
    that all tasks share (policy, learner) are of task 0."""


@dataclass(frozen=True)
class Edge:
    """Data that `source` makes and `target` needs."""

    source: str
    target: str
    carries: str
    flow: Flow = "barrier"
    """`micro_batch`: the target begins as soon as a micro-batch is complete; `barrier`: when the source is done."""
    unit: int = 1
    """Micro-batches are multiples of this number of items (complete groups, an optimiser's minibatch)."""


@dataclass(frozen=True)
class Loop:
    """The rollout loop of a task: components in the order in which an environment step visits them.

    The last one's result is what the first one needs for its next step. A run of several tasks has a loop for each;
    loops share the components that they have in common (the policy).
    """

    components: tuple[str, ...]
    steps: int
    """Chunk steps per episode."""
    items: int = 0
    """The task's items per iteration: its environments times the episodes of each. 0: all of the workflow's, where this
    is its only loop. Those of several loops add up to the workflow's."""
    name: str = ""
    """Name of the task, for messages and explanations."""


@dataclass(frozen=True)
class Workflow:
    """One iteration. Edges inside the loops are listed too, without those that close the loops."""

    name: str
    components: tuple[Component, ...]
    edges: tuple[Edge, ...]
    loops: tuple[Loop, ...]
    """One per task, in the order of tasks; empty: a graph without a rollout."""
    items: int
    """Items per iteration (environments, or episodes) of all tasks."""
    episodes_per_env: int = 1
    """Items that each environment makes in an iteration, one after the other."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components)

    @property
    def movable(self) -> frozenset[str]:
        """Components that may be on other nodes than the head node."""
        return frozenset(component.name for component in self.components if component.movable)

    def environments(self, loop: int) -> int:
        """Number of environments of a loop: its items that are in the loop at the same time."""
        return (self.loops[loop].items or self.items) // self.episodes_per_env

    def task(self, loop: int) -> str:
        """Name of a loop's task in messages; empty where there is only one."""
        if len(self.loops) == 1:
            return ""
        name = self.loops[loop].name
        return f"task {loop} ({name})" if name else f"task {loop}"


@dataclass(frozen=True)
class Graph:
    """The workflow graph: what follows from a checked workflow without times."""

    names: tuple[str, ...]
    """Components, each after all that it needs; those of the loops without others between them."""
    loops: tuple[tuple[str, ...], ...]
    """Components of each loop, in its order."""
    loop: tuple[str, ...]
    """Components of all loops. They are in one phase of every plan."""
    edges: tuple[Edge, ...]
    """All edges but those inside the loops."""
    micro_batched: frozenset[str]
    """Components outside the loops that a `micro_batch` edge touches: they process one micro-batch after the other.
    Others process all items at once."""
    closing: tuple[str, ...]
    """Components that close an iteration, in order: nothing follows them, and they follow others outside the loop
    (weight sync follows the learner). One step ahead they wait for the loop too."""
    later: dict[str, frozenset[str]]
    """Everything after a component, in the loop too."""
    barred: dict[str, frozenset[str]]
    """Part of `later` that begins only when the component is done with all items."""

    @cached_property
    def shared(self) -> frozenset[str]:
        """Components of several loops."""
        return frozenset(name for name in self.loop if sum(name in loop for loop in self.loops) > 1)

    @property
    def several_loops(self) -> bool:
        """True if there is more than one loop."""
        return len(self.loops) > 1

    def position(self, name: str) -> int:
        return self.names.index(name)

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.position))

    @property
    def collapsed(self) -> tuple[tuple[str, ...], ...]:
        """Nodes of the graph with all loops collapsed into one node, in order."""
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
    _check(workflow)
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
    for loop in loops:  # Data that any loop needs has to be there when the loops begin.
        before[loop[0]] |= needed
    order = _topological(workflow.name, names, before, inside)
    edges = tuple(edge for edge in outer if edge.source != edge.target)
    micro_batched = frozenset(
        name
        for edge in edges
        for name in (edge.source, edge.target)
        if edge.flow == "micro_batch" and name not in inside
    )
    # Components that follow any component of the loops follow all of them.
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
        names=order,
        loops=loops,
        loop=tuple(name for name in order if name in inside),
        edges=edges,
        micro_batched=micro_batched,
        closing=closing,
        later={name: frozenset(found) for name, found in after.items()},
        barred={name: frozenset(found) for name, found in barred.items()},
    )


def _check(workflow: Workflow) -> None:
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
        # No other component comes between those of the loops.
        begun = [name for name in ready if name in inside] if inside & set(order) else []
        order.append((begun or ready)[0])
    return tuple(order)


def prefixes(graph: Graph) -> list[frozenset[str]]:
    """All sets of components that can be complete while the others have not begun, by size.

    Such a set contains, with each component, all that it needs (it is a down-set of the graph), and the loops as a
    whole or not at all. A phase of a plan is the difference between two of them.
    """
    found = {frozenset[str]()}
    for node in graph.collapsed:  # In topological order: a prefix is a shorter one and at most this node.
        before = {name for name in graph.names if graph.later[name] & set(node)} - set(node)
        found |= {prefix | set(node) for prefix in found if before <= prefix}
    return sorted(found, key=lambda prefix: (len(prefix), sorted(prefix)))


def partitions(
    graph: Graph, components: frozenset[str], pools: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to divide `components` into placements of one pool each that can work as a pipeline.

    Placements are convex (a component between two of a placement's components is in it too) and do not wait for each
    other in a circle. A loop counts as the chain of its components.
    """
    names, later = graph.ordered(components), graph.later

    def extend(index: int, blocks: list[list[str]]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if index == len(names):
            after = {
                i: [j for j, other in enumerate(blocks) if i != j and any(later[name] & set(other) for name in block)]
                for i, block in enumerate(blocks)
            }
            if acyclic(after):
                yield tuple(tuple(block) for block in blocks)
            return
        name = names[index]
        for block in blocks:
            if pools[block[0]] == pools[name] and _convex_with(name, block, names[:index], later):
                block.append(name)
                yield from extend(index + 1, blocks)
                block.pop()
        blocks.append([name])
        yield from extend(index + 1, blocks)
        blocks.pop()

    yield from extend(0, [])


def time_shared(graph: Graph, components: frozenset[str], pools: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """One placement per pool, whose components take turns."""
    names = graph.ordered(components)
    order = list(dict.fromkeys(pools[name] for name in names))
    return tuple(tuple(name for name in names if pools[name] == pool) for pool in order)


def acyclic(neighbours: Mapping[int, Iterable[int]]) -> bool:
    """True if a graph, given by the neighbours of each node, has no cycle."""
    try:
        TopologicalSorter(neighbours).prepare()
    except CycleError:
        return False
    return True


def _convex_with(name: str, block: list[str], earlier: tuple[str, ...], later: dict[str, frozenset[str]]) -> bool:
    return not any(
        name in later[other] and any(other in later[member] for member in block)
        for other in earlier
        if other not in block
    )
