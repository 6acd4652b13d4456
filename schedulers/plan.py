"""Plans: the placement of every component and the order of work, as data to read, edit and run.

- A *placement* is a set of components on a set of devices, which they share by taking turns.
- A *phase* is a set of placements that work at the same time, each on separate devices, as a pipeline. Phases follow
  one another; between them a *context switch* unloads components and loads others, if not all fit in memory.
- *Collocated*: no pool of devices is split between placements. *Disaggregated*: one phase, with a pool split.
  *Hybrid*: several phases, some of them with a pool split.
- The pipelining granularity is the number of *groups* of environments that circulate in a rollout loop, and the
  *micro-batch* that flows from the rollout to advantages and learner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from schedulers.cluster import POOLS, Pool
from schedulers.errors import PlanError, nearest

Mode = Literal["collocated", "disaggregated", "hybrid"]
MODES: tuple[Mode, ...] = ("collocated", "disaggregated", "hybrid")

HERE = "here"
"""The name in plans of the node on which the command was typed."""
Device = tuple[str, Pool, int]
"""Node, pool and number."""


@dataclass(frozen=True)
class DeviceRange:
    """Devices `first` to `first + count - 1` of one pool of one node; as text `node0:cores:0-3`."""

    node: str
    pool: Pool
    first: int
    count: int


@dataclass(frozen=True)
class Placement:
    """Components that share devices and take turns on them.

    Physics and rendering of one task in one placement are fused. Components of several tasks in one placement have one
    worker per device each, and the tasks' groups take turns.

    Other components have *instances* (data-parallel): replicas of the policy, ranks of the learner. On `accelerators`
    each device is one. On `cores` each node is one: a process with a thread on every core of the placement.
    Components that share a placement have the same instances, which take turns one by one: rank i and replica i are on
    the same devices.
    """

    components: tuple[str, ...]
    devices: tuple[DeviceRange, ...]

    @property
    def count(self) -> int:
        """Number of devices."""
        return sum(part.count for part in self.devices)

    @property
    def pool(self) -> Pool:
        return self.devices[0].pool

    @property
    def instances(self) -> tuple[tuple[DeviceRange, ...], ...]:
        """Devices of each instance, in the placement's order: replica i of the policy, or rank i of the learner."""
        if self.pool == "accelerators":
            return tuple(
                (DeviceRange(part.node, part.pool, device, 1),)
                for part in self.devices
                for device in range(part.first, part.first + part.count)
            )
        nodes = dict.fromkeys(part.node for part in self.devices)
        return tuple(tuple(part for part in self.devices if part.node == node) for node in nodes)

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(part.node for part in self.devices)

    def hosts(self, owner: Placement) -> tuple[int | None, ...]:
        """For each instance, the instance of `owner` that has all of its devices, or None.

        Two components that take turns on the same devices can be in one process.
        """
        owners = {device: i for i, devices in enumerate(owner.instances) for device in one_by_one(devices)}
        found = [{owners.get(device) for device in one_by_one(devices)} for devices in self.instances]
        return tuple(its.pop() if len(its) == 1 else None for its in found)


def one_by_one(parts: Iterable[DeviceRange]) -> list[Device]:
    """Each device of them."""
    return [(p.node, p.pool, device) for p in parts for device in range(p.first, p.first + p.count)]


def first_of(devices: Sequence[DeviceRange], count: int, last: bool = False) -> tuple[DeviceRange, ...]:
    """`count` of these devices, from the first range on; `last`: from the end of each range."""
    result = []
    for part in devices:
        mine = min(part.count, count)
        if mine:
            result.append(replace(part, first=part.first + (part.count - mine if last else 0), count=mine))
            count -= mine
    return tuple(result)


@dataclass(frozen=True)
class Phase:
    """Placements that work at the same time, on different devices. Phases follow one another."""

    placements: tuple[Placement, ...]
    micro_batch: int
    """Items per micro-batch that flows along the phase's `micro_batch` edges.

    A component outside the loops that such an edge touches makes `items / micro_batch` calls an iteration, and passes
    each micro-batch on when it is done with it. Micro-batches contain the items in their order: by episode of the
    environments, then by task, then by environment. The number divides the workflow's items and is a multiple of the
    `unit` of every edge that it flows along. All items: one micro-batch.
    """

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(name for placement in self.placements for name in placement.components)


@dataclass(frozen=True)
class Prediction:
    iteration_s: float
    """Makespan of an iteration."""
    phases_s: tuple[float, ...]
    components_s: Mapping[str, float]
    """Busy time of each component per iteration, on each of its devices."""
    switch_s: float
    """Context switches between the phases."""
    lower_bound_s: float
    """Time that no plan of this problem beats. Equal to `iteration_s`: the plan is certified optimal."""
    communication_s: float | None = None
    """Part of the iteration: collective communication of instances, weight sync to the policies, and messages between
    nodes outside the loops. None: no communication takes time."""


@dataclass(frozen=True)
class Plan:
    """Plan of one workflow, with all of its tasks."""

    workflow: str
    mode: Mode
    phases: tuple[Phase, ...]
    groups: tuple[int, ...] = (1,)
    """Groups of environments that circulate in each loop, in the order of `Workflow.loops`. A placement serves the
    group that is ready first, whatever its task. In JSON the number itself where there is one loop."""
    ahead: int = 0
    """1: the rollout of the next iteration runs while the learner works on this one, one update behind."""
    unload: bool = False
    """True if components leave the devices' memory between phases, because they do not fit together."""
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    """Explanation in sentences: why this mode, what the alternatives would cost, what would help most."""

    @property
    def pools(self) -> dict[str, Pool]:
        """Pool that each component is placed on."""
        return {name: p.pool for phase in self.phases for p in phase.placements if p.devices for name in p.components}

    def groups_of(self, loop: int) -> int:
        """Groups of environments of one loop; 1 for a loop without an entry."""
        return self.groups[loop] if loop < len(self.groups) else 1

    @property
    def classified(self) -> Mode:
        """Mode of the phases, whatever `mode` says."""
        split = any(
            len({placement.pool for placement in phase.placements}) < len(phase.placements) for phase in self.phases
        )
        if not split:
            return "collocated"
        return "disaggregated" if len(self.phases) == 1 else "hybrid"


def range_text(part: DeviceRange) -> str:
    """`node0:cores:0-3`; of one device `node0:cores:2`."""
    last = part.first + part.count - 1
    return f"{part.node}:{part.pool}:{part.first}" + (f"-{last}" if part.count > 1 else "")


def range_from(text: object) -> DeviceRange:
    """Range of a text that `range_text` wrote; raises `PlanError` for anything else."""
    found = re.fullmatch(r"(.+):([a-z]+):([0-9]{1,9})(?:-([0-9]{1,9}))?", text) if isinstance(text, str) else None
    if not found:
        raise PlanError(f"devices are given as node:pool:first-last, for example node0:cores:0-3, not {text!r:.100}")
    node, pool, first, last = found.groups()
    if pool not in POOLS:
        raise PlanError(f"{text!r} names a pool {pool!r} that does not exist{nearest(pool, POOLS)}")
    begin, end = int(first), int(last or first)
    if end < begin:
        raise PlanError(f"{text!r} ends before it begins")
    return DeviceRange(node, "cores" if pool == "cores" else "accelerators", begin, end - begin + 1)


def node_text(name: str) -> str:
    """A node's name as text for people: `this machine` where it is the one on which the command was typed."""
    return "this machine" if name == HERE else name


def ranges_text(devices: Iterable[DeviceRange]) -> str:
    """Ranges as text for people, `cores 0-3 of node0`: equal ranges of many nodes are combined."""
    ranges: dict[str, list[str]] = {}
    for part in devices:
        last = f"-{part.first + part.count - 1}" if part.count > 1 else ""
        pool = part.pool if part.count > 1 else part.pool.removesuffix("s")
        ranges.setdefault(f"{pool} {part.first}{last}", []).append(node_text(part.node))
    parts = []
    for where, nodes in ranges.items():
        name = nodes[0] if len(nodes) == 1 else f"{nodes[0]}..{nodes[-1]} ({len(nodes)} nodes)"
        parts.append(f"{where} of {name}")
    return ", ".join(parts)
