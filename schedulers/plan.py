"""When and where: a plan is data that can be read, edited and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from schedulers.profile import Pool

Mode = Literal["collocated", "disaggregated", "hybrid"]
MODES: tuple[Mode, ...] = ("collocated", "disaggregated", "hybrid")


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

    Physics and render of one task in one placement are fused. Of several tasks in one placement, each has one worker
    per device, and the tasks' groups take turns.

    Of other components the placement has *instances*: replicas of the policy, ranks of the learner. On `accelerators`
    each device is one. On `cores` each node is one: a process with a thread on every core that the placement has there.
    Components that share a placement have the same instances, which take turns one by one: rank i and replica i are on
    the same devices.
    """

    components: tuple[str, ...]
    devices: tuple[DeviceRange, ...]

    @property
    def count(self) -> int:
        """Devices."""
        return sum(part.count for part in self.devices)

    @property
    def pool(self) -> Pool:
        return self.devices[0].pool

    @property
    def instances(self) -> tuple[tuple[DeviceRange, ...], ...]:
        """The devices of each instance, in the placement's order: replica i of the policy, or rank i of the learner."""
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
        """Of each instance, the instance of the other placement that has all of its devices; None: none has.

        Where the two take turns, what is on the same devices can be in one process.
        """
        owners = {device: i for i, devices in enumerate(owner.instances) for device in one_by_one(devices)}
        found = [{owners.get(device) for device in one_by_one(devices)} for devices in self.instances]
        return tuple(its.pop() if len(its) == 1 else None for its in found)


def one_by_one(parts: Iterable[DeviceRange]) -> list[Device]:
    """Each device of them."""
    return [(p.node, p.pool, device) for p in parts for device in range(p.first, p.first + p.count)]


@dataclass(frozen=True)
class Phase:
    """Placements that work at the same time, on devices of their own. Phases follow one another."""

    placements: tuple[Placement, ...]
    micro_batch: int
    """Items of the iteration in each part that flows along the phase's `micro_batch` edges.

    The executor hands a component that such an edge touches, outside the loops, so many items at a time: it makes
    `items / micro_batch` calls an iteration, and passes each part on when it is done with it. Parts hold the items in
    their order: by episode of the environments, then by task, then by environment. It divides the workflow's items, and
    is a multiple of the `unit` of every edge that it flows along. The number of items: one part.
    """

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(name for placement in self.placements for name in placement.components)


@dataclass(frozen=True)
class Prediction:
    iteration_s: float
    phases_s: tuple[float, ...]
    components_s: Mapping[str, float]
    """Busy time per iteration, of one of its devices."""
    switch_s: float
    lower_bound_s: float
    """No plan of this problem is faster; equal to `iteration_s`: the plan is certified optimal."""
    communication_s: float | None = None
    """Of the iteration: what the instances of a component exchange, weights on their way to those that decide, and
    messages between nodes outside the loops. None: nothing that is sent takes time."""


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
    """Components leave the device's memory between phases, because they do not fit together."""
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    """Sentences: why this mode, what the alternatives would cost, what would help most."""

    @property
    def pools(self) -> dict[str, Pool]:
        """Of each component, what it is placed on."""
        return {name: p.pool for phase in self.phases for p in phase.placements if p.devices for name in p.components}

    def groups_of(self, loop: int) -> int:
        """Groups of environments of one loop; 1 for loops that the plan says nothing of."""
        return self.groups[loop] if loop < len(self.groups) else 1

    @property
    def classified(self) -> Mode:
        """The mode that the phases amount to.

        Collocated: no pool is ever split between placements, components take turns on it. Disaggregated: one
        phase, with a pool split. Hybrid: several phases, at least one of them with a pool split.
        """
        split = any(
            len({placement.pool for placement in phase.placements}) < len(phase.placements) for phase in self.phases
        )
        if not split:
            return "collocated"
        return "disaggregated" if len(self.phases) == 1 else "hybrid"
