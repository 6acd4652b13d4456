"""Cost laws: makespans of pipelines and rollout loops, and times of collective communication.

The laws of one loop and of pipelines are closed formulas, exact for constant times and first-in-first-out servers;
`simulate` plays the same plans event by event. Several loops that share servers have no formula: they are a closed
queueing network, which `serve` plays, and whose makespan `least_makespan` bounds from below.

Times may be floats or arrays (many allocations of devices at once), which are combined element by element.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Times = Any
"""A float or an array of floats; every operation here is element-wise."""


def largest(values: Sequence[Times]) -> Times:
    result = values[0]
    for value in values[1:]:
        result = np.maximum(result, value)
    return result


# --- pipelines


def pipeline_seconds(total: Times, bottleneck: Times, parts: int) -> Times:
    """A chain of servers that pass on `parts` equal micro-batches: T = sum of tau + (parts - 1) * max tau.

    `total` and `bottleneck` are sum and maximum of the servers' seconds per micro-batch. In a directed acyclic graph of
    servers the makespan is the largest of this over all paths from a source to a sink.
    """
    return total + (parts - 1) * bottleneck


def stream_seconds(deliveries: Sequence[tuple[int, Times]], total: Times, bottleneck: Times, parts: int) -> Times:
    """The same chain behind a source that has delivered micro-batch k (from 1) at time A(k), for (k, A(k)) given.

    From C(k) = max(A(k), C(k-1)) + tau for each server: T = max over k of (A(k) + sum tau + (parts - k) * max tau).
    """
    return largest([when + total + (parts - k) * bottleneck for k, when in deliveries])


# --- one rollout loop


def loop_seconds(times: Sequence[Times], groups: int, steps: int) -> Times:
    """Makespan of a rollout loop: `groups` groups of environments make `steps` steps through servers that take times[i]
    for one group.

    T = sum t + (groups - 1) max t + (steps - 1) max(sum t, groups * max t): a step lasts as long as one group takes
    through all servers, or as the slowest server takes for all groups. With two servers these are simulation and
    inference.
    """
    return loop_completion(sum(times[1:], start=times[0]), largest(times), groups, steps, groups - 1)


def loop_completion(total: Times, bottleneck: Times, groups: int, steps: int, group: int) -> Times:
    """Time at which group number `group` (from 0) has made `steps` steps, given the sum and the maximum of the servers'
    times."""
    return total + group * bottleneck + (steps - 1) * np.maximum(total, groups * bottleneck)


def revisiting_loop(times: Sequence[float], servers: Sequence[int], groups: int, steps: int) -> list[list[float]]:
    """Completion of every step (outer) and group (inner) where a server is visited more than once a step.

    Visit i takes times[i] on server servers[i]. A server serves its visits in the order (step, visit, group). There is
    no closed formula; this is the recursion C = max(C of the visit before, C of the server's last) + t.
    """
    free = dict.fromkeys(servers, 0.0)
    done = [0.0] * groups
    result = []
    for _ in range(steps):
        for visit, server in enumerate(servers):
            for group in range(groups):
                done[group] = free[server] = max(done[group], free[server]) + times[visit]
        result.append(list(done))
    return result


# --- several rollout loops that share servers


@dataclass(frozen=True)
class Route:
    """One loop: the servers that a group visits in each step, in order. A server is a placement, or a link between
    nodes."""

    servers: tuple[int, ...]
    groups: int
    steps: int

    @cached_property
    def simple(self) -> bool:
        """True if each server is visited once a step, so that the loop alone has a closed formula."""
        return len(set(self.servers)) == len(self.servers)


Call = tuple[float, float, int, int, int]
"""Service of one group: start and end, numbers of the loop, the step and the group."""


def serve(routes: Sequence[Route], seconds: Callable[[int, int, int, int], float]) -> Iterator[Call]:
    """All calls, in the order in which groups arrive at servers; `seconds` of (loop, visit, step, group).

    Every server serves first come, first served, whatever the loop; groups that arrive at the same time are served in
    the order of loops, then of groups. Taking groups in the order of their arrival plays that at every server, since a
    call leads to no earlier arrival than its own.
    """
    free = dict.fromkeys((server for route in routes for server in route.servers), 0.0)
    visits = [len(route.servers) for route in routes]
    arrivals = [(0.0, i, group, 0, 0) for i, route in enumerate(routes) for group in range(route.groups)]
    while arrivals:
        ready, i, group, step, visit = arrivals[0]
        server = routes[i].servers[visit]
        start = free[server]
        if start < ready:
            start = ready
        end = free[server] = start + seconds(i, visit, step, group)
        yield start, end, i, step, group
        visit += 1
        if visit == visits[i]:
            step, visit = step + 1, 0
        if step < routes[i].steps:
            heapq.heapreplace(arrivals, (end, i, group, step, visit))
        else:
            heapq.heappop(arrivals)


def completions(routes: Sequence[Route], times: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """Completion of each loop's every step of every group, where visits take constant `times[loop][visit]`."""
    result = [[[0.0] * route.groups for _ in range(route.steps)] for route in routes]
    for _, done, loop, step, group in serve(routes, lambda loop, visit, step, group: times[loop][visit]):
        result[loop][step][group] = done  # The last of the step's visits stays.
    return result


def makespan(routes: Sequence[Route], times: Sequence[Sequence[float]]) -> float:
    """Time at which all groups of all loops have made their steps."""
    return max(done for steps in completions(routes, times) for done in steps[-1])


def alone_seconds(route: Route, times: Sequence[Times]) -> Times:
    """Makespan of one loop that has all its servers to itself; a lower bound where it is not `simple`."""
    loads: dict[int, Times] = {}
    for server, time in zip(route.servers, times, strict=True):
        loads[server] = loads.get(server, 0.0) + time
    total, bottleneck = sum(loads.values()), largest(list(loads.values()))
    if not route.simple:
        return route.steps * np.maximum(total, route.groups * bottleneck)
    return loop_completion(total, bottleneck, route.groups, route.steps, route.groups - 1)


def server_loads(routes: Sequence[Route], times: Sequence[Sequence[Times]]) -> dict[int, Times]:
    """Busy seconds of each server."""
    result: dict[int, Times] = {}
    for route, own in zip(routes, times, strict=True):
        for server, time in zip(route.servers, own, strict=True):
            result[server] = result.get(server, 0.0) + route.steps * route.groups * time
    return result


def least_makespan(routes: Sequence[Route], times: Sequence[Sequence[Times]]) -> Times:
    """Lower bound of `makespan` for any order of service. Times may be arrays: many allocations at once.

    Each loop takes at least what it takes alone. Each server does all its work after the shortest way that leads to it,
    and before the shortest that leads from it to a step's end.
    """
    least = [alone_seconds(route, own) for route, own in zip(routes, times, strict=True)]
    for server, load in server_loads(routes, times).items():
        heads, tails = [], []
        for route, own in zip(routes, times, strict=True):
            if server in route.servers:
                first = route.servers.index(server)
                last = len(own) - route.servers[::-1].index(server)
                heads.append(sum(own[:first]) + 0.0 * load)
                tails.append(sum(own[last:]) + 0.0 * load)
        least.append(load - largest([-head for head in heads]) - largest([-tail for tail in tails]))
    return largest(least)


# --- communication


def ring_seconds(size: Times, members: Times, bytes_per_s: Times, message_s: Times = 0.0, rounds: int = 1) -> Times:
    """A collective operation of `members` on `size` bytes, along a ring: T = rounds (n - 1) (size / (n B) + s).

    In each of rounds (n - 1) steps every member sends 1/n of the bytes to the next: once round for an all-gather or a
    reduce-scatter, twice for an all-reduce (Patarasuk and Yuan 2009). B and s are of the ring's slowest link; exact
    where links differ too, since a link that every step waits for sends in all of them.
    """
    return rounds * (members - 1) * (size / (members * bytes_per_s) + message_s)


def broadcast_seconds(size: float, bytes_per_s: float, links: int, message_s: float = 0.0) -> float:
    """`size` bytes along a chain of `links`, passed on in small pieces: T = size / B + links s, the limit of
    (K + links - 1) (size / (K B)) for many pieces K."""
    return size / bytes_per_s + links * message_s
