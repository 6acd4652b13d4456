"""Weights that are on a device once: those that one component trains, and with which another decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schedulers.graph import Graph
from schedulers.plan import Device, Placement, Plan, one_by_one
from schedulers.profile import ComponentProfile


@dataclass(frozen=True)
class Shared:
    """Where the two take turns on an accelerator, the decider acts in the trainer's process with its weights: there is
    one copy of them, and nobody unloads it for the other."""

    decider: str
    trainer: str
    bytes: float
    """On each device."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.decider, self.trainer))

    def light(self, placements: Sequence[Sequence[str]]) -> frozenset[str]:
        """Which of the two leave the weights where they are when a phase of these placements begins and ends: neither,
        where they are on devices of their own; else both, as if there were as many replicas as ranks."""
        apart = sum(not self.names.isdisjoint(names) for names in placements) > 1
        return frozenset() if apart else self.names

    def hosts(self, plan: Plan) -> tuple[int | None, ...]:
        """Of each of the decider's instances in the plan the trainer's that it is one process with."""
        return self._placement(plan, self.decider).hosts(self._placement(plan, self.trainer))

    def devices(self, plan: Plan) -> frozenset[Device]:
        """Those on which one copy of the weights serves both."""
        both = [one_by_one(self._placement(plan, name).devices) for name in (self.decider, self.trainer)]
        return frozenset(both[0]) & frozenset(both[1])

    def light_in(self, plan: Plan) -> frozenset[str]:
        """Which of the two have no instance in the plan that unloads the weights."""
        hosts, ranks = self.hosts(plan), len(self._placement(plan, self.trainer).instances)
        every = {self.decider: None not in hosts, self.trainer: len(set(hosts) - {None}) == ranks}
        return frozenset(name for name in self.names if every[name])

    @staticmethod
    def _placement(plan: Plan, name: str) -> Placement:
        return next(p for phase in plan.phases for p in phase.placements if name in p.components)


def shared_weights(graph: Graph, components: Mapping[str, ComponentProfile]) -> Shared | None:
    """Of a workflow in which one component decides in all loops, on accelerators, and one lends it weights."""
    deciders = {loop[-1] for loop in graph.loops}
    trainers = [name for name in graph.names if components[name].lends and name not in graph.loop]
    if len(deciders) != 1 or len(trainers) != 1:
        return None
    (decider,), (trainer,) = deciders, trainers
    if {components[decider].pool, components[trainer].pool} != {"accelerators"}:
        return None
    return Shared(decider, trainer, min(components[decider].resident_bytes, components[trainer].resident_bytes))
