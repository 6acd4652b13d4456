"""Several loops that share servers: the network played, what bounds it, and what overlapping gains for certain."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from schedulers.cost.laws import (
    Route,
    alone_seconds,
    completions,
    least_makespan,
    loop_completion,
    loop_seconds,
    makespan,
    server_loads,
)
from tests.schedulers.instances import some

SEEDS = some(6, of=40)


def queued(routes: list[Route], times: list[list[float]]) -> list[list[list[float]]]:
    """A reference of its own: servers with queues, and a clock that goes from event to event."""
    servers = {server for route in routes for server in route.servers}
    queues: dict[int, deque[tuple[int, int]]] = {server: deque() for server in servers}
    serving: dict[int, tuple[float, int, int]] = {}
    place = {(i, g): (0, 0) for i, route in enumerate(routes) for g in range(route.groups)}
    done = [[[0.0] * route.groups for _ in range(route.steps)] for route in routes]
    for i, g in place:
        queues[routes[i].servers[0]].append((i, g))
    now = 0.0
    while True:
        for server, queue in queues.items():
            if server not in serving and queue:
                i, g = queue.popleft()
                serving[server] = (now + times[i][place[i, g][1]], i, g)
        if not serving:
            return done
        now = min(ends for ends, _, _ in serving.values())
        for server, (_, i, g) in sorted(
            ((s, c) for s, c in serving.items() if c[0] == now), key=lambda pair: pair[1][1:]
        ):
            del serving[server]
            turn, visit = place[i, g]
            turn, visit = (turn, visit + 1) if visit + 1 < len(times[i]) else (turn + 1, 0)
            if not visit:
                done[i][turn - 1][g] = now
            place[i, g] = turn, visit
            if turn < routes[i].steps:
                queues[routes[i].servers[visit]].append((i, g))


def random_network(seed: int, shared: bool) -> tuple[list[Route], list[list[float]]]:
    """Two or three loops. `shared`: any server may be any loop's; else each has its own, and all share the last."""
    random = np.random.default_rng((seed, shared))
    routes, times = [], []
    for i in range(int(random.integers(2, 4))):
        if shared:
            servers = tuple(int(s) for s in random.permutation(4)[: int(random.integers(1, 4))])
        else:
            servers = (*range(10 * (i + 1), 10 * (i + 1) + int(random.integers(1, 3))), 0)
        routes.append(Route(servers, int(random.integers(1, 4)), int(random.integers(1, 9))))
        times.append([float(random.uniform(0.05, 1)) for _ in servers])
    return routes, times


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_network_is_first_come_first_served(seed: int, shared: bool) -> None:
    routes, times = random_network(seed, shared)
    for mine, theirs in zip(completions(routes, times), queued(routes, times), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_loop_in_the_network_follows_its_closed_law(seed: int) -> None:
    random = np.random.default_rng(seed)
    times = [float(random.uniform(0.05, 1)) for _ in range(int(random.integers(1, 4)))]
    route = Route(tuple(range(len(times))), int(random.integers(1, 5)), int(random.integers(1, 12)))
    assert makespan([route], [times]) == pytest.approx(loop_seconds(times, route.groups, route.steps), rel=1e-12)
    assert alone_seconds(route, times) == pytest.approx(makespan([route], [times]), rel=1e-12)
    played = completions([route], [times])[0]
    for turn in range(route.steps):
        for group in range(route.groups):
            law = loop_completion(sum(times), max(times), route.groups, turn + 1, group)
            assert played[turn][group] == pytest.approx(law, rel=1e-12)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_network_ends_before_its_bound(seed: int, shared: bool) -> None:
    routes, times = random_network(seed, shared)
    assert least_makespan(routes, times) <= makespan(routes, times) * (1 + 1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_one_server_in_common_overlapping_is_never_slower_than_one_after_the_other(seed: int) -> None:
    """Proof in docs/planning.md: a loop is late by no more than the others' work on the common server, and that is no
    more than the time they take alone."""
    routes, times = random_network(seed, shared=False)
    own = [makespan([route], [mine]) for route, mine in zip(routes, times, strict=True)]
    work = [server_loads([route], [mine])[0] for route, mine in zip(routes, times, strict=True)]
    ends = [max(rounds[-1]) for rounds in completions(routes, times)]
    for i, done in enumerate(ends):
        assert done <= (own[i] + sum(work) - work[i]) * (1 + 1e-12)
    assert max(ends) <= sum(own) * (1 + 1e-12)


def test_with_several_servers_in_common_overlapping_can_be_slower() -> None:
    """Why the law asks for one: found among random networks, whose loops visit the common servers in other orders."""
    routes = [Route((1, 0, 2), 4, 2), Route((0, 1, 2), 3, 4)]
    times = [[0.42, 0.21, 0.89], [0.69, 0.2, 1.16]]
    own = [makespan([route], [mine]) for route, mine in zip(routes, times, strict=True)]
    assert 1.01 < makespan(routes, times) / sum(own) < 1.02


def test_a_light_task_is_served_while_a_heavy_one_is_simulated() -> None:
    light, heavy = Route((1, 0), 1, 40), Route((2, 0), 1, 4)
    times = [[0.05, 0.05], [0.9, 0.1]]
    assert makespan([light, heavy], times) < 1.1 * makespan([heavy], times[1:])
    assert makespan([light], times[:1]) + makespan([heavy], times[1:]) == pytest.approx(8.0)
