"""Any plan played event by event, with constant or random times: a second opinion on the laws, and a timeline."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedulers.cluster import Cluster
from schedulers.layout import ranges_text
from schedulers.network import play
from schedulers.plan import Placement, Plan
from schedulers.prediction import Costs, phase_costs, problem_of, switches, switches_of
from schedulers.profile import Profile
from schedulers.shape import Shape
from schedulers.times import Problem, component_seconds, part_items
from schedulers.workflow import Workflow

DRAWS = 16
"""Simulated iterations whose mean is an expected time: their standard error is far below the profile's own."""


@dataclass(frozen=True)
class Event:
    """A component at work on the devices of `track`, from `start_s` to `end_s` after the iteration's beginning."""

    track: str
    component: str
    start_s: float
    end_s: float
    phase: int
    round: int
    """Of the loop, from 0; -1 outside it."""
    group: int
    """Of the loop's groups; -1 outside it."""
    part: int
    """Micro-batch, from 0; -1 in the loop."""
    task: int = -1
    """Number of the loop where there are several; -1 outside them."""


@dataclass(frozen=True)
class Simulation:
    seconds: float
    """Of one iteration."""
    events: tuple[Event, ...]


@dataclass
class _Job:
    """One call: a group on one placement in one round, or a part on one segment."""

    server: int
    pieces: tuple[tuple[str, float], ...]
    """Components and their seconds, in turn."""
    needs: list[int] = field(default_factory=list)
    release: float = 0.0
    round: int = -1
    group: int = -1
    part: int = -1
    loop: int = -1


def simulate(
    plan: Plan,
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster | None = None,
    seed: int | None = None,
    variation: float | None = None,
) -> Simulation:
    """One iteration. Without a seed times are constant and the result equals `predict`'s; with one, every call
    draws its time from a gamma distribution with the profiled mean and coefficient of variation (`variation`, if
    given, replaces the profile's).

    Raises `PlanError` for a plan that cannot run.
    """
    problem = problem_of(plan, workflow, profile, cluster)
    draw = _Draw(problem.profile, seed, variation)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    unloading = switches_of(plan, costs, problem)
    now, events = 0.0, []
    for number, (phase, cost, switch) in enumerate(zip(plan.phases, costs, unloading, strict=True)):
        tracks = [track_name(placement) for placement in phase.placements]
        if any(unloading):
            events += [Event(track, "switch", now, now + switch, number, -1, -1, -1) for track in tracks]
            now += switch
        end, played = _play_phase(problem, cost, draw)
        for job, start in played:
            for name, seconds in job.pieces:
                begin, start = now + start, start + seconds
                events.append(
                    Event(
                        tracks[job.server], name, begin, now + start, number, job.round, job.group, job.part, job.loop
                    )
                )
        now += end
    return Simulation(now, tuple(sorted(events, key=lambda event: (event.start_s, event.track))))


def expected_seconds(
    plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None, draws: int = DRAWS
) -> float:
    """Mean time of an iteration with the profiled variation; the predicted one where none was measured."""
    if not any(component.variation for component in profile.placed(plan.pools).components.values()):
        return simulate_seconds(plan, workflow, profile, cluster)
    seeds = range(draws)
    return float(np.mean([simulate(plan, workflow, profile, cluster, seed).seconds for seed in seeds]))


def simulate_seconds(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None) -> float:
    """What `predict` says, without making a prediction of the parts."""
    problem = problem_of(plan, workflow, profile, cluster)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    return sum(cost.seconds for cost in costs) + switches(plan, costs, problem)


def track_name(placement: Placement) -> str:
    """Of a placement's devices, the same for all that ever use them."""
    return ranges_text(placement.devices)


def chrome_trace(simulation: Simulation, name: str = "predicted") -> dict[str, Any]:
    """The timeline in the JSON trace format that Perfetto and Chrome open: a track per component on its devices, times
    in microseconds."""
    names = dict.fromkeys((event.track, event.component) for event in simulation.events)
    tracks = {place: i for i, place in enumerate(sorted(names), start=1)}
    trace: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}]
    for (track, component), number in tracks.items():
        label = f"{component} on {track}"
        trace.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": label}})
    for event in simulation.events:
        places = {"phase": event.phase, "round": event.round, "group": event.group, "part": event.part}
        places["task"] = event.task
        trace.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[event.track, event.component],
                "name": event.component,
                "cat": "predicted",
                "ts": event.start_s * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
                "args": {key: value for key, value in places.items() if value >= 0},
            }
        )
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


class _Draw:
    """Factors on the times of calls: 1, or gamma distributed with mean 1."""

    def __init__(self, profile: Profile, seed: int | None, variation: float | None) -> None:
        self.random = None if seed is None else np.random.default_rng(seed)
        self.variation = {
            name: component.variation if variation is None else variation
            for name, component in profile.components.items()
        }

    def __call__(self, times: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
        if self.random is None:
            return tuple(times.items())
        result = []
        for name, seconds in times.items():
            variation = self.variation.get(name, 0.0)  # none of links: it was not measured
            shape = variation**-2 if variation else 0.0
            result.append((name, seconds * (self.random.gamma(shape) / shape if shape else 1.0)))
        return tuple(result)


def _play_phase(problem: Problem, cost: Costs, draw: _Draw) -> tuple[float, list[tuple[_Job, float]]]:
    """The phase's end, and every call with its beginning. The loops do not depend on anything beside them, so they are
    played first; the rest then begins when what it needs has come out of them."""
    shape = cost.shape
    if shape.several:
        jobs, starts, ends = _play_loops(problem, cost, draw)
    else:
        jobs, order = _loop_jobs(problem, cost, draw)
        starts, ends = _play(jobs, order)
    loop_end = max(ends, default=0.0)
    delivered = _delivered(shape, jobs, ends, loop_end)
    played = [(job, start) for job, start in zip(jobs, starts, strict=True) if job.server >= 0]
    last = set(problem.graph.closing)
    tail = {i for i, segment in enumerate(shape.segments) if shape.tail and set(segment.components) <= last}
    body = [i for i in range(len(shape.segments)) if i not in tail]
    end = loop_end
    for members, begin in ((body, 0.0), (sorted(tail), None)):
        if not members:
            continue
        release = end if begin is None else begin
        more, sequence = _segment_jobs(problem, cost, draw, members, release, loop_end, delivered)
        begun, done = _play(more, sequence)
        played += list(zip(more, begun, strict=True))
        end = max(end, *done)
    return end + cost.transfer_s, played


def _delivered(shape: Shape, jobs: Sequence[_Job], ends: Sequence[float], loop_end: float) -> list[float]:
    """When each part has come out of the loops, with all parts before it."""
    if shape.arrivals:
        return [loop_end * share for share in shape.arrivals]
    if not jobs:
        return [0.0] * len(shape.deliveries)
    # The last of a round's visits stays.
    through = {(max(job.loop, 0), job.round, job.group): end for job, end in zip(jobs, ends, strict=True)}
    result: dict[int, float] = {}
    for part, rounds, group, loop in shape.deliveries:
        result[part] = max(result.get(part, 0.0), through[loop, rounds - 1, group])
    return list(result.values())


def _pieces(problem: Problem, cost: Costs) -> list[list[tuple[int, dict[str, float]]]]:
    """Of each loop, the servers that a group visits and the seconds of each component there."""
    shape = cost.shape
    seconds = iter(cost.visits)
    result = []
    for loop in shape.loops:
        calls = []
        for visit in loop.visits:
            batch = problem.environments[visit.loop] / loop.groups
            alone = {name: _alone(problem, cost, name, batch, visit.placement) for name in visit.components}
            # Where the components were measured together, each has its share of that.
            own, visited = sum(alone.values()), next(seconds)
            calls.append(
                {name: time * (visited / own) if own else visited / len(alone) for name, time in alone.items()}
            )
        if loop.ways:
            ways = [{"link": way} for way in loop.ways]
            calls = [call for pair in zip(ways, calls, strict=True) for call in pair]
        result.append(list(zip(loop.circuit.servers, calls, strict=True)))
    return result


def _loop_jobs(problem: Problem, cost: Costs, draw: _Draw) -> tuple[list[_Job], dict[int, list[int]]]:
    """Of one loop, whose groups every server takes in turn."""
    jobs: list[_Job] = []
    order: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for loop, calls in zip(cost.shape.loops, _pieces(problem, cost), strict=True):
        order = {server: [] for server, _ in calls}
        for turn in range(loop.rounds):
            for server, alone in calls:
                for group in range(loop.groups):
                    needs = [last[group]] if group in last else []
                    last[group] = len(jobs)
                    order[server].append(len(jobs))
                    jobs.append(_Job(server, draw(alone), needs, round=turn, group=group))
    return jobs, order


def _play_loops(problem: Problem, cost: Costs, draw: _Draw) -> tuple[list[_Job], list[float], list[float]]:
    """Of several loops, whose servers take the group that is ready first."""
    pieces, constant = _pieces(problem, cost), cost.shape.by_loop(cost.visits)
    drawn: list[_Job] = []

    def seconds(loop: int, visit: int, turn: int, group: int) -> float:
        server, alone = pieces[loop][visit]
        drawn.append(_Job(server, draw(alone), round=turn, group=group, loop=loop))
        # Not the sum of the pieces where times are constant: rounding would change who is ready first.
        return constant[loop][visit] if draw.random is None else sum(time for _, time in drawn[-1].pieces)

    calls = list(play([loop.circuit for loop in cost.shape.loops], seconds))
    return drawn, [start for start, *_ in calls], [end for _, end, *_ in calls]


def _alone(problem: Problem, cost: Costs, name: str, batch: float, placement: int) -> float:
    return float(component_seconds(problem, cost.shape, name, batch, np.array([cost.counts[placement]]))[0])


def _segment_jobs(
    problem: Problem,
    cost: Costs,
    draw: _Draw,
    members: Sequence[int],
    begin: float,
    loop_end: float,
    delivered: Sequence[float],
) -> tuple[list[_Job], dict[int, list[int]]]:
    shape = cost.shape
    jobs: list[_Job] = []
    first: dict[int, int] = {}
    order: dict[int, list[int]] = {}
    for i in members:
        segment = shape.segments[i]
        first[i] = len(jobs)
        times = {
            name: _alone(problem, cost, name, part_items(problem, shape, name), segment.placement)
            for name in segment.components
        }
        for part in range(segment.parts):
            release = begin
            if "loop" in shape.starts[i]:
                release = max(release, loop_end)
            if "stream" in shape.starts[i]:
                release = max(release, delivered[part])
            order.setdefault(segment.placement, []).append(len(jobs))
            jobs.append(_Job(segment.placement, draw(times), [], release, part=part))
    for source, target, barrier in shape.links:
        if source in first and target in first:
            for part in range(shape.segments[target].parts):
                behind = shape.segments[source].parts - 1 if barrier else part
                jobs[first[target] + part].needs.append(first[source] + behind)
    return jobs, order


def _play(jobs: Sequence[_Job], order: Mapping[int, Sequence[int]]) -> tuple[list[float], list[float]]:
    """Start and end of every job: a server takes its jobs in the given order, each as soon as its needs are met."""
    waiting = [len(job.needs) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for i, job in enumerate(jobs):
        for need in job.needs:
            followers[need].append(i)
    starts, ends = [0.0] * len(jobs), [0.0] * len(jobs)
    turn, busy = dict.fromkeys(order, 0), dict.fromkeys(order, False)
    clock: list[tuple[float, int, int]] = []  # Time, 0: a job ends, 1: a job is released; which.
    released = [job.release <= 0 for job in jobs]
    for i, job in enumerate(jobs):
        if not released[i]:
            heapq.heappush(clock, (job.release, 1, i))

    def begin(server: int, now: float) -> None:
        if busy[server] or turn[server] == len(order[server]):
            return
        i = order[server][turn[server]]
        if waiting[i] == 0 and released[i]:
            turn[server] += 1
            busy[server] = True
            starts[i], ends[i] = now, now + sum(seconds for _, seconds in jobs[i].pieces)
            heapq.heappush(clock, (ends[i], 0, i))

    for server in order:
        begin(server, 0.0)
    while clock:
        now, kind, i = heapq.heappop(clock)
        touched = {jobs[i].server}
        if kind:
            released[i] = True
        else:
            busy[jobs[i].server] = False
            for follower in followers[i]:
                waiting[follower] -= 1
                touched.add(jobs[follower].server)
        for server in touched:
            begin(server, now)
    return starts, ends
