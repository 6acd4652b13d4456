"""Cost laws in closed form: pipelines of placements, the rollout loop, and what a long tail does to them.

All are exact for constant times and first-in-first-out servers; `simulate` plays the same plans event by event.
Times may be floats or arrays (many allocations at once), which are then combined element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Times = Any
"""A float or an array of floats; every operation here is element-wise."""


def largest(values: Sequence[Times]) -> Times:
    result = values[0]
    for value in values[1:]:
        result = np.maximum(result, value)
    return result


def run_seconds(total: Times, bottleneck: Times, parts: int) -> Times:
    """A chain of servers that pass on `parts` equal parts: T = sum of tau + (parts - 1) * max tau.

    `total` and `bottleneck` are sum and maximum of the servers' seconds per part.
    """
    return total + (parts - 1) * bottleneck


def pipeline_seconds(times: Mapping[str, float], edges: Sequence[tuple[str, str]], parts: int) -> float:
    """Seconds until `parts` equal parts have passed through a directed acyclic graph of servers.

    Server v takes times[v] seconds a part. From the recursion C_v(k) = max(max over u->v of C_u(k), C_v(k-1)) +
    tau_v follows T = max over paths P from a source to a sink of (sum over P of tau + (parts - 1) * max over P).
    """
    targets: dict[str, list[str]] = {name: [] for name in times}
    sources = set(times)
    for source, target in edges:
        targets[source].append(target)
        sources.discard(target)

    def walk(name: str, total: float, bottleneck: float) -> float:
        total, bottleneck = total + times[name], max(bottleneck, times[name])
        if not targets[name]:
            return float(run_seconds(total, bottleneck, parts))
        return max(walk(target, total, bottleneck) for target in targets[name])

    return max(walk(name, 0.0, 0.0) for name in sources)


def loop_seconds(times: Sequence[Times], groups: int, rounds: int) -> Times:
    """Seconds of a rollout loop: `groups` groups go `rounds` times round servers that take times[i] for one group.

    T = sum t + (groups - 1) max t + (rounds - 1) max(sum t, groups * max t): a round lasts as long as one group's
    way round or as the slowest server's work for all groups. With two servers this is simulation and inference.
    """
    return loop_arrival(times, groups, rounds, groups - 1)


def loop_arrival(times: Sequence[Times], groups: int, rounds: int, group: int) -> Times:
    """Time at which group number `group` (from 0) has gone `rounds` times round the loop."""
    total = sum(times[1:], start=times[0])
    return arrival(total, largest(times), groups, rounds, group)


def arrival(total: Times, bottleneck: Times, groups: int, rounds: int, group: int) -> Times:
    """`loop_arrival` from the sum and the maximum of the servers' times."""
    return total + group * bottleneck + (rounds - 1) * np.maximum(total, groups * bottleneck)


def shared_loop(times: Sequence[float], servers: Sequence[int], groups: int, rounds: int) -> list[list[float]]:
    """Completion of every round (outer) and group (inner) where a server is visited more than once a round.

    Visit i takes times[i] on server servers[i]. A server serves its visits in the order (round, visit, group).
    There is no closed form; this is the recursion C = max(C of the visit before, C of the server's last) + t.
    """
    free = dict.fromkeys(servers, 0.0)
    done = [0.0] * groups
    result = []
    for _ in range(rounds):
        for visit, server in enumerate(servers):
            for group in range(groups):
                done[group] = free[server] = max(done[group], free[server]) + times[visit]
        result.append(list(done))
    return result


def ring_seconds(size: Times, members: Times, bytes_per_s: Times, message_s: Times = 0.0, rounds: int = 1) -> Times:
    """A collective operation of `members` on `size` bytes, along a ring: T = rounds (n - 1) (size / (n B) + s).

    In each of rounds (n - 1) steps every member sends 1/n of the bytes to the next: once round for an all-gather or a
    reduce-scatter, twice for an all-reduce (Patarasuk and Yuan 2009). B and s are of the ring's slowest link; exact
    where links differ too, since a link that every step waits for sends in all of them.
    """
    return rounds * (members - 1) * (size / (members * bytes_per_s) + message_s)


def broadcast_seconds(size: float, bytes_per_s: float, links: int, message_s: float = 0.0) -> float:
    """`size` bytes along a chain of `links`, passed on in small pieces: all have them when the slowest link has passed
    them once, T = size / B + links s. The limit of (K + links - 1) (size / (K B)) for many pieces K."""
    return size / bytes_per_s + links * message_s


def tailed_seconds(arrivals: Sequence[Times], total: Times, bottleneck: Times) -> Times:
    """A chain of servers whose source delivers part k (from 1) at arrivals[k - 1].

    From C(k) = max(A(k), C(k-1)) + tau for each server: T = max over k of (A(k) + sum tau + (K - k) max tau).
    """
    count = len(arrivals)
    return largest([when + total + (count - k) * bottleneck for k, when in enumerate(arrivals, start=1)])
