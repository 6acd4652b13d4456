"""What a placement takes and holds as a function of its number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schedulers.cluster import Cluster
from schedulers.collectives import exchange_seconds, fewest_nodes, priced
from schedulers.errors import PlanError, nearest
from schedulers.graph import Graph, graph_of
from schedulers.memory import ROUNDING, devices_of, devices_with, levels
from schedulers.profile import Pool, Profile
from schedulers.shape import Shape
from schedulers.weights import Shared, shared_weights
from schedulers.workflow import Workflow

POOLS: tuple[Pool, ...] = ("cores", "accelerators")


def pool_size(cluster: Cluster, pool: Pool) -> int:
    return sum(devices_of(node, pool) for node in cluster.nodes)


def alone(cluster: Cluster) -> Cluster:
    """The cluster's home without its other nodes."""
    return replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name == cluster.home))


@dataclass
class Problem:
    """One workflow with its times on one cluster; remembers what it has looked up."""

    workflow: Workflow
    profile: Profile
    cluster: Cluster
    units: dict[Pool, int] = field(default_factory=dict)
    """Devices are handed out in so many at a time, by pool; 1 where nothing is said."""
    groups: tuple[int, ...] = (1,)
    """Numbers of groups that a loop may have."""
    parts: tuple[int, ...] = (1,)
    """Into how many micro-batches the items may be cut."""
    ahead: bool = False
    generous: bool = False
    """Memory is limited by the node with the most, and by the number of devices that have enough: where nodes differ
    nothing is left out, but not every plan that is found fits."""
    remembered: dict[Any, Any] = field(default_factory=dict)
    """What the search has worked out for a placement."""
    _times: dict[tuple[str, float], np.ndarray] = field(default_factory=dict)
    _rooms: dict[tuple[Pool, bool], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_components(self.workflow, self.profile)
        self.graph: Graph = graph_of(self.workflow)
        self.ahead = self.ahead and bool(self.graph.loops)
        self.environments = tuple(self.workflow.environments(i) for i in range(len(self.graph.loops)))
        """Of each loop."""
        self.shared: Shared | None = shared_weights(self.graph, self.profile.components)
        self.pools: dict[str, Pool] = {name: self.profile.components[name].pool for name in self.graph.names}
        self.sizes: dict[Pool, int] = {pool: pool_size(self.cluster, pool) for pool in POOLS}
        self.limits: dict[Pool, float] = {
            pool: levels(self._nodes(pool, bound=False), pool)[-1 if self.generous else 0] for pool in POOLS
        }
        """Bytes that every device of the pool can count on, where it is of use; if `generous`, that some can."""
        home = alone(self.cluster) if self.cluster.home is not None else self.cluster
        self.home_sizes: dict[Pool, int] = {pool: pool_size(home, pool) for pool in POOLS}
        """Devices for components that do not travel."""
        for name, pool in self.pools.items():
            if not self.sizes[pool]:
                raise PlanError(f"component {name!r} occupies {pool}, and the cluster has none")
            if self.bound((name,)) and not self.home_sizes[pool]:
                raise PlanError(f"component {name!r} occupies {pool}, and its node {self.cluster.home!r} has none")
        self.counts: dict[Pool, np.ndarray] = {}
        for pool, size in self.sizes.items():
            unit = min(self.units.get(pool, 1), max(size, 1))
            self.counts[pool] = np.arange(unit, size + 1, unit)

    def home_units(self, pool: Pool) -> int:
        """How many of the units in which a pool's devices are handed out its devices at home make."""
        return int(np.searchsorted(self.counts[pool], self.home_sizes[pool], side="right"))

    def bound(self, names: Iterable[str]) -> bool:
        """Whether these components, in one placement, have to be on the cluster's home."""
        return self.cluster.home is not None and not set(names) <= self.workflow.travelling

    def roomy(self, names: tuple[str, ...], sizes: np.ndarray) -> np.ndarray:
        """How many devices, of those that these components in one placement may have, have so many bytes each."""
        key = (self.pools[names[0]], self.bound(names))
        if key not in self._rooms:
            nodes = self._nodes(*key)
            found = np.array(levels(nodes, key[0]))
            self._rooms[key] = found * (1 + ROUNDING), np.array([devices_with(nodes, key[0], size) for size in found])
        found, devices = self._rooms[key]
        return np.append(devices, 0)[found.searchsorted(sizes)]

    def _nodes(self, pool: Pool, bound: bool) -> Cluster:
        """Those where placements on the pool can be, or those that are bound."""
        bound = bound or all(self.bound((name,)) for name, its in self.pools.items() if its == pool)
        return alone(self.cluster) if bound and self.cluster.home is not None else self.cluster

    def times(self, name: str, batch: float) -> np.ndarray:
        """Seconds of `batch` items for every number of devices that can be handed out."""
        key = (name, batch)
        if key not in self._times:
            counts = self.counts[self.pools[name]]
            self._times[key] = self.profile.components[name].seconds_on(batch, counts)
        return self._times[key]


def check_components(workflow: Workflow, profile: Profile) -> None:
    """Every component has times; else `PlanError`."""
    for name in workflow.names:
        if name not in profile.components:
            known = nearest(name, profile.components)
            raise PlanError(f"the profile of {profile.workflow!r} has no times of component {name!r}{known}")
        if not profile.components[name].points:
            raise PlanError(f"the profile of {profile.workflow!r} has no measured point of component {name!r}")


def visit_seconds(problem: Problem, shape: Shape, index: int, counts: np.ndarray) -> np.ndarray:
    """Of one visit of one group, for each number of devices: measured together where that was done, else in turn."""
    visit = shape.visits[index]
    loop, batch = shape.loops[visit.loop], problem.environments[visit.loop]
    total = np.zeros(len(counts))
    for name in visit.components:
        total += component_seconds(problem, shape, name, batch / loop.groups, counts)
    if loop.simple and len(visit.components) > 1:
        factor = max(_factor(problem, shape, name) for name in visit.components)
        for entry in problem.profile.together:
            if set(entry.components) == set(visit.components) and entry.groups == loop.groups:
                for i in np.flatnonzero(counts == entry.devices):
                    measured = problem.profile.together_seconds(visit.components, batch, entry.devices, loop.groups)
                    assert measured is not None
                    total[i] = measured / loop.groups * factor
    return total


def segment_seconds(problem: Problem, shape: Shape, index: int, counts: np.ndarray) -> np.ndarray:
    """Of one part on one segment, for each number of devices."""
    segment = shape.segments[index]
    return sum(
        (
            component_seconds(problem, shape, name, part_items(problem, shape, name), counts)
            for name in segment.components
        ),
        start=np.zeros(len(counts)),
    )


def part_items(problem: Problem, shape: Shape, name: str) -> int:
    """Items that a component outside the loop gets at once."""
    return shape.micro_batch if name in problem.graph.divisible else problem.workflow.items


def component_seconds(problem: Problem, shape: Shape, name: str, batch: float, counts: np.ndarray) -> np.ndarray:
    """Of so many items on each number of devices, with what the component's instances exchange for them."""
    grid = problem.counts[problem.pools[name]]
    if len(grid) == len(counts) and np.array_equal(grid, counts):
        found = problem.times(name, batch)
    else:
        found = problem.profile.components[name].seconds_on(batch, counts)
    found = found * _factor(problem, shape, name)
    exchanged = _exchange_seconds(problem, shape, name, counts)
    return found if exchanged is None else found + exchanged * (batch / problem.workflow.items)


def communication_seconds(problem: Problem, shape: Shape, name: str, count: int) -> float:
    """Of one component, per iteration: what its instances on so many devices exchange."""
    found = _exchange_seconds(problem, shape, name, np.array([count]))
    return 0.0 if found is None else float(found[0])


def _exchange_seconds(problem: Problem, shape: Shape, name: str, counts: np.ndarray) -> np.ndarray | None:
    """Per iteration; None where nothing is exchanged. On as few nodes as hold the devices, unless it is known better:
    then no layout takes less."""
    exchanges, pool = problem.profile.components[name].exchanges, problem.pools[name]
    if not exchanges or name in problem.graph.loop or not priced(problem.cluster):
        return None
    if shape.nodes:
        (on,) = (n for n, names in zip(shape.nodes, shape.placements, strict=True) if name in names)
        nodes = np.full(len(counts), on)
    else:
        nodes = fewest_nodes(problem.cluster, pool, counts)
    return exchange_seconds(problem.cluster, pool, exchanges, counts, nodes)


def _factor(problem: Problem, shape: Shape, name: str) -> float:
    return problem.profile.components[name].beside if name in shape.beside else 1.0


def resident_bytes(problem: Problem, names: tuple[str, ...], lent: bool = False) -> float:
    """Of components that share devices, on each device, while they are loaded. `lent`: without the weights that what
    decides shares with a trainer of another phase, which stays loaded."""
    total = sum(problem.profile.components[name].resident_bytes for name in names)
    shared = problem.shared
    if shared is not None and shared.decider in names and (lent or shared.trainer in names):
        total -= shared.bytes
    return total


def working_bytes(problem: Problem, shape: Shape, names: tuple[str, ...], counts: np.ndarray) -> np.ndarray:
    """More, while one of them works: the most that any of them holds for the items that it has at once.

    A loop's first component holds all of the loop's items, since they live there between rounds; those of several
    loops add up.
    """
    most, living = np.zeros(len(counts)), np.zeros(len(counts))
    for name in names:
        items: float = part_items(problem, shape, name) if name not in problem.graph.loop else 0.0
        for i, loop in enumerate(problem.graph.loops):
            if name in loop:
                items = max(items, problem.environments[i] / (1 if name == loop[0] else shape.loops[i].groups))
        size = problem.profile.components[name].bytes_per_item * np.ceil(items / counts)
        most = np.maximum(most, size)
        living += size if any(name == loop[0] for loop in problem.graph.loops) else 0.0
    return np.maximum(most, living)


def held_bytes(problem: Problem, shape: Shape, names: tuple[str, ...], count: int) -> float:
    """Most that a placement has on each of so many devices."""
    return resident_bytes(problem, names) + float(working_bytes(problem, shape, names, np.array([count]))[0])


def usable(problem: Problem, shape: Shape, names: tuple[str, ...], counts: np.ndarray) -> np.ndarray:
    """How many of so many devices a placement can use: no more than those of its components that do not spread, and
    a loop's first component shares a group out evenly."""
    counts = np.minimum(counts, min(problem.profile.components[name].most_devices for name in names))
    sizes = [
        problem.environments[i] // shape.loops[i].groups
        for i, loop in enumerate(problem.graph.loops)
        if loop[0] in names
    ]
    if not sizes:
        return counts
    items = math.gcd(*sizes)
    even = np.array([n for n in range(1, min(items, int(counts[-1])) + 1) if items % n == 0])
    return even[even.searchsorted(counts, side="right") - 1]


def switch_seconds(
    problem: Problem, placements: tuple[tuple[str, ...], ...], light: frozenset[str] | None = None
) -> float:
    """To load a phase's components before it and unload them after it; placements do so side by side.

    `light`: components whose weights stay for another one to compute with; None: as many as can be.
    """
    shared = problem.shared
    if shared is not None and light is None:
        light = shared.light(placements)

    def seconds(name: str) -> float:
        component = problem.profile.components[name]
        return component.unload_s + component.load_s

    def rest(name: str) -> float:
        if shared is None or name not in (light or ()):
            return seconds(name)
        return 0.0 if name == shared.decider else max(seconds(name) - seconds(shared.decider), 0.0)

    return max(sum(rest(name) for name in names) for names in placements)
