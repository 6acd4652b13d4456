"""Several rollout loops that share servers: a closed queueing network, played event by event, and what bounds it.

Groups of environments go round their own loop; every server (a placement, or a way between nodes) serves first come,
first served, whatever the task; who comes at the same time is served in the order of tasks, then of groups. One loop
has a closed law (`laws.arrival`); several that share a server have none.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedulers.laws import Times, arrival, largest


@dataclass(frozen=True)
class Circuit:
    """One loop: the servers that a group visits in each round, in order."""

    servers: tuple[int, ...]
    groups: int
    rounds: int

    @cached_property
    def simple(self) -> bool:
        """Each server is visited once a round, so that the loop by itself has a closed form."""
        return len(set(self.servers)) == len(self.servers)


Call = tuple[float, float, int, int, int]
"""A server at work for one group: start and end, number of the loop, round and group."""


def play(circuits: Sequence[Circuit], seconds: Callable[[int, int, int, int], float]) -> Iterator[Call]:
    """All calls, in the order in which groups come to servers; `seconds` of (loop, visit, round, group).

    Taking groups in the order of their coming is first come, first served at every server: what a call leads to comes
    no earlier than the call did.
    """
    free = dict.fromkeys((server for circuit in circuits for server in circuit.servers), 0.0)
    visits = [len(circuit.servers) for circuit in circuits]
    coming = [(0.0, i, group, 0, 0) for i, circuit in enumerate(circuits) for group in range(circuit.groups)]
    while coming:
        ready, i, group, turn, visit = coming[0]
        server = circuits[i].servers[visit]
        start = free[server]
        if start < ready:
            start = ready
        end = free[server] = start + seconds(i, visit, turn, group)
        yield start, end, i, turn, group
        visit += 1
        if visit == visits[i]:
            turn, visit = turn + 1, 0
        if turn < circuits[i].rounds:
            heapq.heapreplace(coming, (end, i, group, turn, visit))
        else:
            heapq.heappop(coming)


def completions(circuits: Sequence[Circuit], times: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """When each loop's each round of each group is complete, where visits take constant `times[loop][visit]`."""
    result = [[[0.0] * circuit.groups for _ in range(circuit.rounds)] for circuit in circuits]
    for _, done, loop, turn, group in play(circuits, lambda loop, visit, turn, group: times[loop][visit]):
        result[loop][turn][group] = done  # The last of the round's visits stays.
    return result


def end(circuits: Sequence[Circuit], times: Sequence[Sequence[float]]) -> float:
    """When all groups of all loops have gone round as often as they do."""
    return max(done for rounds in completions(circuits, times) for done in rounds[-1])


def alone(circuit: Circuit, times: Sequence[Times]) -> Times:
    """End of one loop that has all its servers to itself; a lower bound where it is not `simple`."""
    loads: dict[int, Times] = {}
    for server, time in zip(circuit.servers, times, strict=True):
        loads[server] = loads.get(server, 0.0) + time
    total, bottleneck = sum(loads.values()), largest(list(loads.values()))
    if not circuit.simple:
        return circuit.rounds * np.maximum(total, circuit.groups * bottleneck)
    return arrival(total, bottleneck, circuit.groups, circuit.rounds, circuit.groups - 1)


def loads(circuits: Sequence[Circuit], times: Sequence[Sequence[Times]]) -> dict[int, Times]:
    """Seconds that each server works in all."""
    result: dict[int, Times] = {}
    for circuit, own in zip(circuits, times, strict=True):
        for server, time in zip(circuit.servers, own, strict=True):
            result[server] = result.get(server, 0.0) + circuit.rounds * circuit.groups * time
    return result


def bound(circuits: Sequence[Circuit], times: Sequence[Sequence[Times]]) -> Times:
    """What no order of serving undercuts. Times may be arrays: many allocations at once.

    Each loop takes what it takes alone. Each server does all its work after the shortest way that leads to it, and
    before the shortest that leads from it to a round's end.
    """
    least = [alone(circuit, own) for circuit, own in zip(circuits, times, strict=True)]
    for server, load in loads(circuits, times).items():
        heads, tails = [], []
        for circuit, own in zip(circuits, times, strict=True):
            if server in circuit.servers:
                first = circuit.servers.index(server)
                last = len(own) - circuit.servers[::-1].index(server)
                heads.append(sum(own[:first]) + 0.0 * load)
                tails.append(sum(own[last:]) + 0.0 * load)
        least.append(load - largest([-head for head in heads]) - largest([-tail for tail in tails]))
    return largest(least)
