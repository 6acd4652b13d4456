"""A planning problem: one workflow with its profile on one cluster, and look-ups that all costs use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedulers.cluster import POOLS, ROUNDING, Cluster, Pool, devices_with, memory_sizes, only_head, pool_size
from schedulers.errors import PlanError
from schedulers.plan import Device, Placement, Plan, one_by_one
from schedulers.profile import ComponentProfile, Profile, check_components
from schedulers.workflow import Graph, Workflow, graph_of


@dataclass(frozen=True)
class SharedWeights:
    """Weights that the learner trains and the policy computes with in the same process, where both take turns on an
    accelerator: the device has one copy, and neither component unloads it for the other."""

    policy: str
    learner: str
    bytes: float
    """Size of the weights on each device."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.policy, self.learner))

    def kept(self, placements: Sequence[Sequence[str]]) -> frozenset[str]:
        """Components that keep the weights loaded at the beginning and end of a phase of these placements: none if they
        are on devices of their own, else both, as if replicas and ranks were equal in number."""
        apart = sum(not self.names.isdisjoint(names) for names in placements) > 1
        return frozenset() if apart else self.names

    def kept_in(self, plan: Plan) -> frozenset[str]:
        """Components whose weights stay loaded on all of their instances in the plan."""
        hosts, ranks = self.hosts(plan), len(self._placement(plan, self.learner).instances)
        every = {self.policy: None not in hosts, self.learner: len(set(hosts) - {None}) == ranks}
        return frozenset(name for name in self.names if every[name])

    def hosts(self, plan: Plan) -> tuple[int | None, ...]:
        """For each replica of the policy in the plan, the learner's rank that it shares a process with, or None."""
        return self._placement(plan, self.policy).hosts(self._placement(plan, self.learner))

    def devices(self, plan: Plan) -> frozenset[Device]:
        """Devices on which one copy of the weights serves both."""
        both = [one_by_one(self._placement(plan, name).devices) for name in (self.policy, self.learner)]
        return frozenset(both[0]) & frozenset(both[1])

    @staticmethod
    def _placement(plan: Plan, name: str) -> Placement:
        return next(p for phase in plan.phases for p in phase.placements if name in p.components)


def shared_weights(graph: Graph, components: Mapping[str, ComponentProfile]) -> SharedWeights | None:
    """The weights of a workflow in which all loops have one policy, on accelerators, and one component shares its
    weights with it; else None."""
    policies = {loop[-1] for loop in graph.loops}
    learners = [name for name in graph.names if components[name].shares_weights and name not in graph.loop]
    if len(policies) != 1 or len(learners) != 1:
        return None
    (policy,), (learner,) = policies, learners
    if {components[policy].pool, components[learner].pool} != {"accelerators"}:
        return None
    size = min(components[policy].resident_bytes, components[learner].resident_bytes)
    return SharedWeights(policy, learner, size)


@dataclass
class Problem:
    """One workflow with its profile on one cluster, and what the planner may vary."""

    workflow: Workflow
    profile: Profile
    cluster: Cluster
    units: Mapping[Pool, int] = field(default_factory=dict)
    """Devices of each pool that are allocated together; default 1."""
    groups: tuple[int, ...] = (1,)
    """Numbers of groups that a loop may have."""
    micro_batches: tuple[int, ...] = (1,)
    """Numbers of micro-batches that the items may be divided into."""
    ahead: bool = False
    optimistic_memory: bool = False
    """True: memory per device is that of the node with the most, and a placement has at most as many devices as have
    enough. Where nodes differ in memory this leaves no plan out, but not every plan that is found fits."""
    options: dict[Any, Any] = field(default_factory=dict)
    """The search's work on single placements, which come back in many phases."""
    _times: dict[tuple[str, float], np.ndarray] = field(default_factory=dict)
    _room: dict[tuple[Pool, bool], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_components(self.workflow, self.profile)
        self.graph: Graph = graph_of(self.workflow)
        self.ahead = self.ahead and bool(self.graph.loops)
        self.environments = tuple(self.workflow.environments(i) for i in range(len(self.graph.loops)))
        """Environments of each loop."""
        self.shared_weights = shared_weights(self.graph, self.profile.components)
        self.pools: dict[str, Pool] = {name: self.profile.components[name].pool for name in self.graph.names}
        self.sizes: dict[Pool, int] = {pool: pool_size(self.cluster, pool) for pool in POOLS}
        self.memory_limits: dict[Pool, float] = {
            pool: memory_sizes(self._nodes(pool, pinned=False), pool)[-1 if self.optimistic_memory else 0]
            for pool in POOLS
        }
        """Bytes that every usable device of the pool has; if `optimistic_memory`, that some have."""
        head = only_head(self.cluster) if self.cluster.head_node is not None else self.cluster
        self.head_sizes: dict[Pool, int] = {pool: pool_size(head, pool) for pool in POOLS}
        """Devices for components that are not movable."""
        for name, pool in self.pools.items():
            if not self.sizes[pool]:
                raise PlanError(f"component {name!r} occupies {pool}, and the cluster has none")
            if self.pinned((name,)) and not self.head_sizes[pool]:
                raise PlanError(f"component {name!r} occupies {pool}, and its node {self.cluster.head_node!r} has none")
        self.counts: dict[Pool, np.ndarray] = {}
        """Numbers of devices that a placement may have: multiples of the unit."""
        for pool, size in self.sizes.items():
            unit = min(self.units.get(pool, 1), max(size, 1))
            self.counts[pool] = np.arange(unit, size + 1, unit)

    def group_options(self, loop: int, placements: Sequence[tuple[str, ...]]) -> list[int]:
        """Numbers of groups that a loop's environments may be divided into. A loop in one placement has one group,
        unless it was measured with more."""
        names = set(self.graph.loops[loop])
        alone = any(names <= set(placement) for placement in placements)
        measured = {entry.groups for entry in self.profile.together if set(entry.components) == names}
        return [
            groups
            for groups in self.groups
            if self.environments[loop] % groups == 0 and (groups == 1 or not alone or groups in measured)
        ]

    def micro_batch_sizes(self, components: frozenset[str]) -> list[int]:
        """Sizes that divide the items and respect units, where micro-batches can flow in a phase of these components or
        have to fit in memory."""
        items, flowing = self.workflow.items, [edge for edge in self.graph.edges if edge.flow == "micro_batch"]
        inside = any({edge.source, edge.target} <= components for edge in flowing)
        tight = any(
            self.profile.components[name].bytes_per_item
            and math.isfinite(memory_sizes(self.cluster, self.pools[name])[0])
            for name in components & self.graph.micro_batched
        )
        units = [edge.unit for edge in flowing if {edge.source, edge.target} & components]
        return [
            items // parts
            for parts in (self.micro_batches if inside or tight else (1,))
            if items % parts == 0 and all((items // parts) % unit == 0 for unit in units)
        ]

    def head_units(self, pool: Pool) -> int:
        """Number of units that the head node's devices make."""
        return int(np.searchsorted(self.counts[pool], self.head_sizes[pool], side="right"))

    def pinned(self, names: Iterable[str]) -> bool:
        """True if a placement of these components has to be on the cluster's head node."""
        return self.cluster.head_node is not None and not set(names) <= self.workflow.movable

    def devices_with(self, names: tuple[str, ...], sizes: np.ndarray) -> np.ndarray:
        """Number of devices with each of these amounts of memory that a placement of these components may have."""
        key = (self.pools[names[0]], self.pinned(names))
        if key not in self._room:
            nodes = self._nodes(*key)
            found = np.array(memory_sizes(nodes, key[0]))
            self._room[key] = found * (1 + ROUNDING), np.array([devices_with(nodes, key[0], size) for size in found])
        found, devices = self._room[key]
        return np.append(devices, 0)[found.searchsorted(sizes)]

    def _nodes(self, pool: Pool, pinned: bool) -> Cluster:
        """Nodes where placements on the pool can be; `pinned`: those of components that are not movable."""
        pinned = pinned or all(self.pinned((name,)) for name, its in self.pools.items() if its == pool)
        return only_head(self.cluster) if pinned and self.cluster.head_node is not None else self.cluster

    def times(self, name: str, batch: float) -> np.ndarray:
        """Seconds of `batch` items for each of `counts` devices."""
        key = (name, batch)
        if key not in self._times:
            counts = self.counts[self.pools[name]]
            self._times[key] = self.profile.components[name].seconds_on(batch, counts)
        return self._times[key]
