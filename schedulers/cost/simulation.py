"""Event simulation of any plan, with constant or random times: a second opinion on the cost laws, and a timeline."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedulers.cluster import Cluster
from schedulers.cost.laws import serve
from schedulers.cost.phase import PhaseModel
from schedulers.cost.prediction import PhaseCosts, phase_costs, problem_of, switches
from schedulers.cost.problem import Problem
from schedulers.cost.times import component_seconds, items_at_once
from schedulers.plan import Placement, Plan, ranges_text
from schedulers.profile import Profile
from schedulers.workflow import Workflow

DRAWS = 16
"""Simulated iterations of which an expected time is the mean: its standard error is far below the profile's own."""


@dataclass(frozen=True)
class Event:
    """A component at work on the devices of `track`, from `start_s` to `end_s` after the iteration's beginning."""

    track: str
    component: str
    start_s: float
    end_s: float
    phase: int
    step: int
    """Step of the loop, from 0; -1 outside it."""
    group: int
    """Group of environments, from 0; -1 outside the loop."""
    micro_batch: int
    """Number of the micro-batch, from 0; -1 in the loop."""
    task: int = -1
    """Number of the loop where there are several; -1 outside them."""


@dataclass(frozen=True)
class Simulation:
    seconds: float
    """Makespan of one iteration."""
    events: tuple[Event, ...]


@dataclass
class _Job:
    """One call: a step of a group on one placement, or a micro-batch on one stage."""

    server: int
    pieces: tuple[tuple[str, float], ...]
    """Components and their seconds, in turn."""
    needs: list[int] = field(default_factory=list)
    """Jobs that have to end before this one begins."""
    release: float = 0.0
    """Time before which it does not begin."""
    step: int = -1
    group: int = -1
    micro_batch: int = -1
    loop: int = -1


def simulate(
    plan: Plan,
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster | None = None,
    seed: int | None = None,
    variation: float | None = None,
) -> Simulation:
    """Simulate one iteration.

    Without a seed times are constant and the result equals `predict`'s. With one, every call draws its time from a gamma
    distribution with the profiled mean and coefficient of variation; `variation` replaces the profile's.

    Raises `PlanError` for a plan that cannot run.
    """
    problem = problem_of(plan, workflow, profile, cluster)
    draw = _Draw(problem.profile, seed, variation)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    switch_s = switches(plan, costs, problem)
    now, events = 0.0, []
    for number, (phase, cost, switch) in enumerate(zip(plan.phases, costs, switch_s, strict=True)):
        tracks = [track_name(placement) for placement in phase.placements]
        if any(switch_s):
            events += [Event(track, "switch", now, now + switch, number, -1, -1, -1) for track in tracks]
            now += switch
        end, played = _play_phase(problem, cost, draw)
        for job, start in played:
            for name, seconds in job.pieces:
                begin, start = now + start, start + seconds
                where = (number, job.step, job.group, job.micro_batch, job.loop)
                events.append(Event(tracks[job.server], name, begin, now + start, *where))
        now += end
    return Simulation(now, tuple(sorted(events, key=lambda event: (event.start_s, event.track))))


def expected_seconds(
    plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None, draws: int = DRAWS
) -> float:
    """Mean makespan with the profiled variation; the predicted one where no variation was measured."""
    if not any(component.variation for component in profile.on_pools(plan.pools).components.values()):
        problem = problem_of(plan, workflow, profile, cluster)
        costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
        return sum(cost.seconds for cost in costs) + sum(switches(plan, costs, problem))
    seeds = range(draws)
    return float(np.mean([simulate(plan, workflow, profile, cluster, seed).seconds for seed in seeds]))


def track_name(placement: Placement) -> str:
    """Name of a placement's devices, the same in every phase."""
    return ranges_text(placement.devices)


def chrome_trace(simulation: Simulation, name: str = "predicted") -> dict[str, Any]:
    """Timeline in the JSON trace format that Perfetto and Chrome open: a track per component on its devices, times in
    microseconds."""
    names = dict.fromkeys((event.track, event.component) for event in simulation.events)
    tracks = {place: i for i, place in enumerate(sorted(names), start=1)}
    trace: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}]
    for (track, component), number in tracks.items():
        label = f"{component} on {track}"
        trace.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": label}})
    for event in simulation.events:
        places = {"phase": event.phase, "step": event.step, "group": event.group, "micro_batch": event.micro_batch}
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
            variation = self.variation.get(name, 0.0)  # that of links was not measured
            shape = variation**-2 if variation else 0.0
            result.append((name, seconds * (self.random.gamma(shape) / shape if shape else 1.0)))
        return tuple(result)


def _play_phase(problem: Problem, cost: PhaseCosts, draw: _Draw) -> tuple[float, list[tuple[_Job, float]]]:
    """The phase's end, and every call with its beginning. Loops do not depend on the stages, so they are played first;
    the stages then begin when the loops have delivered what they need."""
    model = cost.model
    if model.several_loops:
        jobs, starts, ends = _play_loops(problem, cost, draw)
    else:
        jobs, order = _loop_jobs(problem, cost, draw)
        starts, ends = _play(jobs, order)
    loop_end = max(ends, default=0.0)
    delivered = _delivered(model, jobs, ends, loop_end)
    played = [(job, start) for job, start in zip(jobs, starts, strict=True) if job.server >= 0]
    last = set(problem.graph.closing)
    closing = [i for i, s in enumerate(model.stages) if model.closing_paths and set(s.components) <= last]
    end = loop_end
    for members, release in (([i for i in range(len(model.stages)) if i not in closing], 0.0), (closing, None)):
        if not members:
            continue
        more, sequence = _stage_jobs(
            problem, cost, draw, members, end if release is None else release, loop_end, delivered
        )
        begun, done = _play(more, sequence)
        played += list(zip(more, begun, strict=True))
        end = max(end, *done)
    return end + cost.transfer_s, played


def _delivered(model: PhaseModel, jobs: Sequence[_Job], ends: Sequence[float], loop_end: float) -> list[float]:
    """Time at which the loops have delivered each micro-batch, with all micro-batches before it."""
    if model.arrivals:
        return [loop_end * share for share in model.arrivals]
    if not jobs:
        return [0.0] * len(model.deliveries)
    # The last of a step's visits stays.
    through = {(max(job.loop, 0), job.step, job.group): end for job, end in zip(jobs, ends, strict=True)}
    result: dict[int, float] = {}
    for part, steps, group, loop in model.deliveries:
        result[part] = max(result.get(part, 0.0), through[loop, steps - 1, group])
    return list(result.values())


def _pieces(problem: Problem, cost: PhaseCosts) -> list[list[tuple[int, dict[str, float]]]]:
    """For each loop, the servers that a group visits and the seconds of each component there."""
    seconds = iter(cost.visits)
    result = []
    for loop in cost.model.loops:
        calls = []
        for visit in loop.visits:
            batch = problem.environments[visit.loop] / loop.groups
            alone = {name: _alone(problem, cost, name, batch, visit.placement) for name in visit.components}
            # Where the components were measured together, each has its share of that.
            own, visited = sum(alone.values()), next(seconds)
            calls.append(
                {name: time * (visited / own) if own else visited / len(alone) for name, time in alone.items()}
            )
        if loop.transfers_s:
            links = [{"link": transfer} for transfer in loop.transfers_s]
            calls = [call for pair in zip(links, calls, strict=True) for call in pair]
        result.append(list(zip(loop.route.servers, calls, strict=True)))
    return result


def _loop_jobs(problem: Problem, cost: PhaseCosts, draw: _Draw) -> tuple[list[_Job], dict[int, list[int]]]:
    """Jobs of a phase with one loop, whose groups every server serves in turn."""
    jobs: list[_Job] = []
    order: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for loop, calls in zip(cost.model.loops, _pieces(problem, cost), strict=True):
        order = {server: [] for server, _ in calls}
        for step in range(loop.steps):
            for server, alone in calls:
                for group in range(loop.groups):
                    needs = [last[group]] if group in last else []
                    last[group] = len(jobs)
                    order[server].append(len(jobs))
                    jobs.append(_Job(server, draw(alone), needs, step=step, group=group))
    return jobs, order


def _play_loops(problem: Problem, cost: PhaseCosts, draw: _Draw) -> tuple[list[_Job], list[float], list[float]]:
    """Jobs of a phase with several loops, whose servers serve the group that is ready first, with starts and ends."""
    pieces, constant = _pieces(problem, cost), cost.model.by_loop(cost.visits)
    drawn: list[_Job] = []

    def seconds(loop: int, visit: int, step: int, group: int) -> float:
        server, alone = pieces[loop][visit]
        drawn.append(_Job(server, draw(alone), step=step, group=group, loop=loop))
        # Not the sum of the pieces where times are constant: rounding would change which group is ready first.
        return constant[loop][visit] if draw.random is None else sum(time for _, time in drawn[-1].pieces)

    calls = list(serve([loop.route for loop in cost.model.loops], seconds))
    return drawn, [start for start, *_ in calls], [end for _, end, *_ in calls]


def _alone(problem: Problem, cost: PhaseCosts, name: str, batch: float, placement: int) -> float:
    return float(component_seconds(problem, cost.model, name, batch, np.array([cost.counts[placement]]))[0])


def _stage_jobs(
    problem: Problem,
    cost: PhaseCosts,
    draw: _Draw,
    members: Sequence[int],
    begin: float,
    loop_end: float,
    delivered: Sequence[float],
) -> tuple[list[_Job], dict[int, list[int]]]:
    """Jobs of these stages, which begin at `begin`, and the order in which each placement takes them."""
    model = cost.model
    jobs: list[_Job] = []
    first: dict[int, int] = {}
    order: dict[int, list[int]] = {}
    for i in members:
        stage = model.stages[i]
        first[i] = len(jobs)
        times = {
            name: _alone(problem, cost, name, items_at_once(problem, model, name), stage.placement)
            for name in stage.components
        }
        for part in range(stage.parts):
            release = begin
            if "loop" in model.starts[i]:
                release = max(release, loop_end)
            if "stream" in model.starts[i]:
                release = max(release, delivered[part])
            order.setdefault(stage.placement, []).append(len(jobs))
            jobs.append(_Job(stage.placement, draw(times), [], release, micro_batch=part))
    for source, target, barrier in model.dependencies:
        if source in first and target in first:
            for part in range(model.stages[target].parts):
                behind = model.stages[source].parts - 1 if barrier else part
                jobs[first[target] + part].needs.append(first[source] + behind)
    return jobs, order


def _play(jobs: Sequence[_Job], order: Mapping[int, Sequence[int]]) -> tuple[list[float], list[float]]:
    """Start and end of every job: a server takes its jobs in the given order, each as soon as the jobs it needs ended."""
    waiting = [len(job.needs) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for i, job in enumerate(jobs):
        for need in job.needs:
            followers[need].append(i)
    starts, ends = [0.0] * len(jobs), [0.0] * len(jobs)
    turn, busy = dict.fromkeys(order, 0), dict.fromkeys(order, False)
    clock: list[tuple[float, int, int]] = []  # time; 0: a job ends, 1: a job is released; its number
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
