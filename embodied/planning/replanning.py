"""Planning again during a run: noticed by persistent departure from the prediction, adopted only when it pays.

After every iteration the watch compares its time with the plan's prediction. When several in a row are off, the
profile's times are brought up to date by what the components took, and the planner is asked again. A new plan is
worth a switch when what it gains over the iterations that are left exceeds what the switch costs, twice over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import schedulers
from embodied.execution.iteration import Iteration
from embodied.planning.clusters import roles_of
from embodied.planning.profiler import decided_s, passed_s, trained_s
from schedulers import Cluster, ComponentProfile, Plan, Point, Profile, Workflow

PERSISTENT = 5
"""Iterations in a row that must be off before anything is asked: a longer one now and then is no change."""
OFF = 0.15
"""Relative departure of the median from the prediction that counts as off."""
PAYS = 2.0
"""A switch must gain so many times its cost over what is left of the run."""


@dataclass(frozen=True)
class Decision:
    """A plan to change to, and the reason."""

    plan: Plan
    profile: Profile
    gain_s: float
    """Predicted per iteration."""
    reason: str


@dataclass
class Watch:
    """Watches a run's plan. `ask` plans for a profile; `switch_s` is what changing over costs."""

    plan: Plan
    profile: Profile
    workflow: Workflow
    cluster: Cluster
    ask: Callable[[Profile], Plan]
    switch_s: float
    _recent: deque[Iteration] = field(default_factory=lambda: deque(maxlen=PERSISTENT))

    def see(self, iteration: Iteration, left: int) -> Decision | None:
        """Take note of an iteration; a decision where another plan pays for the `left` iterations that remain."""
        self._recent.append(iteration)
        if len(self._recent) < PERSISTENT:
            return None
        predicted = _seconds(self.plan)
        ratios = [it.wall_s / predicted for it in self._recent]
        if not (all(r > 1 + OFF for r in ratios) or all(r < 1 - OFF for r in ratios)):
            return None
        updated, words = self.updated()
        self._recent.clear()  # the next question needs as many new iterations
        found = self.ask(updated)
        # Both plans under the same times: what the times do not explain, another plan will not save.
        present = schedulers.predict(self.plan, self.workflow, updated, self.cluster).iteration_s
        gain = median(ratios) * predicted * (1 - _seconds(found) / present)
        if _same(found, self.plan) or gain * left <= PAYS * self.switch_s:
            return None
        reason = (
            f"iterations take {median(ratios):.3g} times the {predicted:.3g} s predicted ({words}); {found.mode} would "
            f"take {_seconds(found) / present:.0%} of that, which saves {gain * left:.0f} s of what is left for "
            f"{self.switch_s:.0f} s"
        )
        return Decision(found, updated, gain, reason)

    def updated(self) -> tuple[Profile, str]:
        """The profile with every component's times multiplied by measured over profiled, and that in words."""
        busy = [busy_seconds(iteration, self.workflow) for iteration in self._recent]
        factors = {
            name: _factor(expected, [seconds[name] for seconds in busy]) for name, expected in self._expected().items()
        }
        here = self.profile.on_pools(self.plan.pools).components  # what was measured elsewhere stays as it was
        components = {name: _scaled(p, factors.get(name, 1.0)) for name, p in here.items()}
        # What was measured together belongs to the times that are no more.
        together = tuple(
            replace(entry, seconds=entry.seconds * by, low=entry.low * by, high=entry.high * by)
            for entry in self.profile.together
            for by in [median(factors.get(name, 1.0) for name in entry.components)]
        )
        words = ", ".join(f"{name} x {factor:.3g}" for name, factor in factors.items())
        return replace(self.profile, components=components, together=together), words

    def _expected(self) -> dict[str, float]:
        """Busy seconds per iteration of each component by the profile, summed over devices of simulators."""
        roles, flow = roles_of(self.workflow), self.workflow
        times = self.profile.on_pools(self.plan.pools).components
        devices = {name: p.count for phase in self.plan.phases for p in phase.placements for name in p.components}
        found = dict.fromkeys(flow.names, 0.0)
        for number, loop in enumerate(flow.loops):
            groups = self.plan.groups_of(number)
            calls, batch = groups * loop.steps * flow.episodes_per_env, flow.environments(number) / groups
            for name in loop.components:
                # A farm's time is until its last worker is done: its workers' clocks add up to as many times that.
                workers = 1 if name == roles.rollout_worker else devices[name]
                found[name] += calls * workers * times[name].seconds(batch, devices[name])
        for name in (*roles.scorers, roles.learner):
            found[name] = times[name].seconds(flow.items, devices[name])
        # The learner's time is the rest: also messages between its ranks, and the publication of weights.
        found[roles.learner] += (self.plan.prediction.communication_s or 0.0) if self.plan.prediction else 0.0
        return found


def busy_seconds(iteration: Iteration, workflow: Workflow) -> dict[str, float]:
    """Busy seconds of each component in an iteration, summed over a farm's workers."""
    roles, clock = roles_of(workflow), iteration.summary.clock
    found = {roles.rollout_worker: decided_s(iteration), roles.learner: trained_s(iteration, roles.scorers)}
    found |= {name: passed_s(iteration, name) for name in roles.scorers}
    for task, names in enumerate(roles.simulators):
        found |= dict(zip(names, (clock.stepping[task], clock.drawing[task]), strict=False))
    return found


def _factor(expected: float, measured: list[float]) -> float:
    """Median of measured over expected seconds."""
    return max(1e-3, median(measured) / expected) if expected > 0 else 1.0


def _scaled(component: ComponentProfile, factor: float) -> ComponentProfile:
    points = tuple(
        Point(p.batch, p.devices, p.seconds * factor, p.low * factor, p.high * factor) for p in component.points
    )
    return replace(component, points=points)


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None, "a plan that is watched has a prediction"
    return plan.prediction.iteration_s


def _same(first: Plan, second: Plan) -> bool:
    return (first.phases, first.groups, first.ahead) == (second.phases, second.groups, second.ahead)
