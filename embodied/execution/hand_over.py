"""Handing weights over: the way to each who acts, chosen by where both ends are, and what it takes to go there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodied.errors import PeerFailed
from embodied.execution.assignment import Assignment
from embodied.execution.roles import LearnerRole, PolicyRole
from embodied.learning.gpu_memory import GpuTensors
from embodied.learning.weight_ways import ON_GPUS, Way, ways_to
from embodied.runtime.groups import WorkerGroup


@dataclass(frozen=True)
class HandOver:
    """From a learner to all who act."""

    learner: WorkerGroup[LearnerRole]
    guests: WorkerGroup[PolicyRole]
    """Who act in a rank's process, with its policy."""
    apart: WorkerGroup[PolicyRole]
    """Who act with policies of their own."""
    ways: tuple[Way, ...]
    """To each of these."""
    nodes: int
    """That these are on."""

    @property
    def path(self) -> str:
        """How weights travel, in words."""
        same = "the same policy"
        if not self.ways:
            return same
        if self.ways[0] in ON_GPUS:
            path = " and ".join(f"{way.value} to {count}" for way, count in Counter(self.ways).items())
        else:
            path = self.apart.path_from(self.learner.first())
            if self.apart.size > 1:
                path += f", one copy {'on each node ' if self.nodes > 1 else ''}for {self.apart.size} replicas"
        return f"{path}; {same} for {self.guests.size}" if self.guests.size else path

    def publish(self, version: int) -> None:
        """Bring the learner's weights, which have seen `version` updates, to all who act. It is asked for them once."""
        if self.ways:
            self._send(version)
        self.guests.call_all(PolicyRole.at_version, version)

    def _send(self, version: int) -> None:
        # The other ranks take part, and hand out nothing.
        others = [self.learner.submit_one(rank, LearnerRole.weights) for rank in range(1, self.learner.size)]
        if self.ways[0] not in ON_GPUS:
            sent = self.apart.pipe(PolicyRole.load_weights, self.learner.first(), LearnerRole.weights, version)
            for rank, reference in enumerate(others, 1):
                self.learner.get_one(rank, reference)
            self.apart.get(sent)
            return
        first: Any = self.learner.submit_one(0, LearnerRole.hand_out, Way.GPU_MEMORY in self.ways)
        shown: list[GpuTensors | None] = [first if way is Way.GPU_MEMORY else None for way in self.ways]
        taken = self.apart.submit_scattered(PolicyRole.take_weights, [(each, version) for each in shown])
        self._await([first, *others], taken)
        if Way.GPU_MEMORY in self.ways:
            self.learner.call_one(0, LearnerRole.withdraw)

    def connect(self, timeout_s: float) -> None:
        """Let learner and those that it broadcasts to find each other; later waits end after `timeout_s`.

        Raises `PeerFailed`, which names both ends, where they do not.
        """
        joined = [rank for rank, way in enumerate(self.ways) if way is Way.BROADCAST]
        if not joined:
            return
        names = (self.learner.handles[0].name, *(self.apart.handles[rank].name for rank in joined))
        address = self.learner.call_one(0, LearnerRole.listen_for_weights, names)
        joining: Any = self.learner.submit_one(0, LearnerRole.join_for_weights, address, timeout_s)
        places = [joined.index(rank) + 1 if rank in joined else 0 for rank in range(self.apart.size)]
        each = [(address, place, names, timeout_s) for place in places]
        self._await([joining], self.apart.submit_scattered(PolicyRole.join_for_weights, each))

    def _await(self, sent: list[Any], taken: list[Any]) -> None:
        """Wait for both ends. Whoever failed by himself is named, not who lost him."""
        lost: PeerFailed | None = None
        try:
            self.apart.get(taken)
        except PeerFailed as error:
            lost = error
        for rank, reference in enumerate(sent):
            try:
                self.learner.get_one(rank, reference)
            except PeerFailed as error:
                lost = lost or error
        if lost is not None:
            raise lost


def hand_over_of(
    learner: WorkerGroup[LearnerRole], acting: WorkerGroup[PolicyRole], assignment: Assignment, timeout_s: float
) -> HandOver:
    """The ways of a run, connected."""
    guests, apart = acting.some(assignment.guests), acting.some(assignment.apart)
    places = [assignment.components[acting.name][rank] for rank in assignment.apart]
    nodes = len({place.node for place in places})
    if not places:
        return HandOver(learner, guests, apart, (), nodes)
    source = replace(learner.call_one(0, LearnerRole.whereabouts), node=assignment.first_of(learner.name).node)
    found = apart.call_all(PolicyRole.whereabouts)
    targets = [replace(end, node=place.node) for end, place in zip(found, places, strict=True)]
    ways = ways_to(source, targets)
    if Way.GPU_MEMORY in ways and not _reaches(learner, apart, ways):
        ways = (Way.MEMORY,) * len(ways)
    made = HandOver(learner, guests, apart, ways, nodes)
    made.connect(timeout_s)
    return made


def _reaches(learner: WorkerGroup[LearnerRole], apart: WorkerGroup[PolicyRole], ways: Sequence[Way]) -> bool:
    """Whether those on the learner's GPU can map what it shows there: containers and allocators may forbid it."""
    sample = learner.call_one(0, LearnerRole.show_sample)
    try:
        return all(apart.scatter(PolicyRole.can_map, [(sample if way is Way.GPU_MEMORY else None,) for way in ways]))
    finally:
        learner.call_one(0, LearnerRole.withdraw)
