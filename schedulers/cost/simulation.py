"""Event simulation of any plan, with constant or random times: a second opinion on the cost laws, and a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
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
"""Number of simulated iterations whose mean is an expected time: its standard error is far below the profile's own."""


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


@dataclass(frozen=True)
class _Call:
    """A step of a group on one placement, or a micro-batch on one stage."""

    server: int
    """Number of the placement; below 0 a link between nodes."""
    pieces: tuple[tuple[str, float], ...]
    """Components and their seconds, in turn."""
    start: float
    end: float
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

    Without a seed times are constant and the result equals `predict`'s. With one, every call draws its time from a
    gamma distribution with the profiled mean and coefficient of variation; `variation` replaces the profile's.

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
        end, calls = _play_phase(problem, cost, draw)
        for call in calls:
            start = call.start
            for name, seconds in call.pieces:
                begin, start = now + start, start + seconds
                where = (number, call.step, call.group, call.micro_batch, call.loop)
                events.append(Event(tracks[call.server], name, begin, now + start, *where))
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


def _play_phase(problem: Problem, cost: PhaseCosts, draw: _Draw) -> tuple[float, list[_Call]]:
    """The phase's end, and all calls. Loops do not depend on the stages, so they are played first."""
    model = cost.model
    calls = _several_loops(problem, cost, draw) if model.several_loops else _one_loop(problem, cost, draw)
    end = loop_end = max((call.end for call in calls), default=0.0)
    delivered = _delivered(model, calls, loop_end)
    calls = [call for call in calls if call.server >= 0]
    last = set(problem.graph.closing)
    closing = [i for i, s in enumerate(model.stages) if model.closing_paths and set(s.components) <= last]
    for members in ([i for i in range(len(model.stages)) if i not in closing], closing):
        begin = end if members is closing else 0.0
        more = _stages(problem, cost, draw, members, begin, loop_end, delivered)
        end = max([end, *(call.end for call in more)])
        calls += more
    return end + cost.transfer_s, calls


def _delivered(model: PhaseModel, calls: Sequence[_Call], loop_end: float) -> list[float]:
    """Time at which the loops have delivered each micro-batch, with all micro-batches before it."""
    if model.arrivals:
        return [loop_end * share for share in model.arrivals]
    if not calls:
        return [0.0] * len(model.deliveries)
    through = {(max(call.loop, 0), call.step, call.group): call.end for call in calls}  # a step's last visit stays
    result: dict[int, float] = {}
    for part, steps, group, loop in model.deliveries:
        result[part] = max(result.get(part, 0.0), through[loop, steps - 1, group])
    return list(result.values())


def _pieces(problem: Problem, cost: PhaseCosts) -> list[list[tuple[int, dict[str, float]]]]:
    """For each loop, the servers that a group visits and the seconds of each component on them."""
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


def _one_loop(problem: Problem, cost: PhaseCosts, draw: _Draw) -> list[_Call]:
    """Calls of the loop of a phase with one or none. Every server serves the groups in turn."""
    calls: list[_Call] = []
    free: dict[int, float] = {}
    ready: dict[int, float] = {}
    for loop, visits in zip(cost.model.loops, _pieces(problem, cost), strict=True):
        for step in range(loop.steps):
            for server, alone in visits:
                for group in range(loop.groups):
                    start, pieces = max(free.get(server, 0.0), ready.get(group, 0.0)), draw(alone)
                    free[server] = ready[group] = start + sum(seconds for _, seconds in pieces)
                    calls.append(_Call(server, pieces, start, free[server], step=step, group=group))
    return calls


def _several_loops(problem: Problem, cost: PhaseCosts, draw: _Draw) -> list[_Call]:
    """Calls of the loops of a phase with several. Every server serves the group that is ready first."""
    visits, constant = _pieces(problem, cost), cost.model.by_loop(cost.visits)
    drawn: list[tuple[int, tuple[tuple[str, float], ...]]] = []

    def seconds(loop: int, visit: int, step: int, group: int) -> float:
        server, alone = visits[loop][visit]
        drawn.append((server, draw(alone)))
        # Not the sum of the pieces where times are constant: rounding would change which group is ready first.
        return constant[loop][visit] if draw.random is None else sum(time for _, time in drawn[-1][1])

    served = list(serve([loop.route for loop in cost.model.loops], seconds))
    return [
        _Call(server, pieces, start, end, step=step, group=group, loop=loop)
        for (server, pieces), (start, end, loop, step, group) in zip(drawn, served, strict=True)
    ]


def _alone(problem: Problem, cost: PhaseCosts, name: str, batch: float, placement: int) -> float:
    return float(component_seconds(problem, cost.model, name, batch, np.array([cost.counts[placement]]))[0])


def _stages(
    problem: Problem,
    cost: PhaseCosts,
    draw: _Draw,
    members: Sequence[int],
    begin: float,
    loop_end: float,
    delivered: Sequence[float],
) -> list[_Call]:
    """Calls of these stages, which begin at `begin`. A placement processes them in their order."""
    model, pieces = cost.model, {}
    for i in members:
        stage = model.stages[i]
        times = {
            name: _alone(problem, cost, name, items_at_once(problem, model, name), stage.placement)
            for name in stage.components
        }
        pieces[i] = [draw(times) for _ in range(stage.parts)]
    needs = {
        i: [(s, barrier) for s, target, barrier in model.dependencies if target == i and s in pieces] for i in pieces
    }
    calls: dict[int, list[_Call]] = {}
    free: dict[int, float] = {}
    for i in TopologicalSorter({i: [source for source, _ in needs[i]] for i in pieces}).static_order():
        placement, calls[i] = model.stages[i].placement, []
        for part, its in enumerate(pieces[i]):
            start = max(begin, free.get(placement, 0.0))
            if "loop" in model.starts[i]:
                start = max(start, loop_end)
            if "stream" in model.starts[i]:
                start = max(start, delivered[part])
            for source, barrier in needs[i]:
                start = max(start, calls[source][-1 if barrier else part].end)
            free[placement] = start + sum(seconds for _, seconds in its)
            calls[i].append(_Call(placement, its, start, free[placement], micro_batch=part))
    return [call for i in members for call in calls[i]]
