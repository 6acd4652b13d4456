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
from embodied.execution.executor import Iteration
from embodied.planning.profiler import gathering_s
from schedulers import Cluster, ComponentProfile, Plan, Point, Profile, Workflow

PERSISTENT = 5
"""Iterations in a row that must be off before anything is asked: a longer one now and then is no change."""
OFF = 0.15
"""Relative departure of the median from the prediction that counts as off."""
PAYS = 2.0
"""A switch must gain so many times its cost over what is left of the run."""


@dataclass(frozen=True)
class Decision:
    """What the watch found."""

    plan: Plan
    profile: Profile
    gain_s: float
    """Predicted per iteration."""
    reason: str


@dataclass
class Watch:
    """Watches one plan. `ask` plans for a profile; `switch_s` is what changing over costs."""

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
        factors = {name: self._factor(name) for name in self.profile.components}
        components = {name: _scaled(p, factors[name]) for name, p in self.profile.components.items()}
        # What was measured together belongs to the times that are no more.
        loop = median([factors[name] for name in self._loop()])
        together = tuple(
            replace(entry, seconds=entry.seconds * loop, low=entry.low * loop, high=entry.high * loop)
            for entry in self.profile.together
        )
        words = ", ".join(f"{name} x {factor:.3g}" for name, factor in factors.items())
        return replace(self.profile, components=components, together=together), words

    def _factor(self, name: str) -> float:
        """Median of measured over profiled busy time of a component per iteration."""
        expected = self._expected(name)
        if expected <= 0:
            return 1.0
        return max(1e-3, median([_busy(it, name) for it in self._recent]) / expected)

    def _expected(self, name: str) -> float:
        """Busy seconds per iteration that the profile says, summed over its devices for those of the farm."""
        component, devices = self.profile.components[name], self._devices(name)
        if name not in self._loop():
            return component.seconds(self.workflow.items, devices)
        assert self.workflow.loop is not None
        calls = self.plan.groups * self.workflow.loop.steps * self.workflow.waves
        batch = self.workflow.items / self.workflow.waves / self.plan.groups
        # A farm's time is until its last worker is done: its workers' clocks add up to as many times that.
        workers = devices if name in ("physics", "render") else 1
        return calls * workers * component.seconds(batch, devices)

    def _loop(self) -> tuple[str, ...]:
        return self.workflow.loop.components if self.workflow.loop is not None else ()

    def _devices(self, name: str) -> int:
        for phase in self.plan.phases:
            for placement in phase.placements:
                if name in placement.components:
                    return sum(span.count for span in placement.devices)
        raise ValueError(f"the plan places no {name}")


@dataclass(frozen=True)
class Watches:
    """Of a run's tasks, whose rollouts follow one another and whose update is one: each sees its own part."""

    tasks: tuple[Watch, ...]

    def see(self, iteration: Iteration, left: int) -> dict[int, Decision]:
        """Take note of an iteration; the decisions by task. Each pays for moving the run by itself."""
        # Nobody can see whose rows an update takes how long for: the plans say.
        updates = [_update_seconds(task.plan) for task in self.tasks]
        shares = [seconds / sum(updates) for seconds in updates]
        seen = [
            task.see(iteration.of_task(number, share), left)
            for number, (task, share) in enumerate(zip(self.tasks, shares, strict=True))
        ]
        # The learner's place is the first task's plan's: another's gains nothing by giving it one.
        return {
            number: decision
            for number, (decision, task) in enumerate(zip(seen, self.tasks, strict=True))
            if decision is not None and (number == 0 or _rollout(decision.plan) != _rollout(task.plan))
        }


def _rollout(plan: Plan) -> tuple[object, ...]:
    """Everything of a plan but the learner's place."""
    places = [placement for phase in plan.phases for placement in phase.placements]
    return plan.groups, *(placement for placement in places if placement.components != ("learner",))


def _update_seconds(plan: Plan) -> float:
    assert plan.prediction is not None, "a plan that is watched has a prediction"
    return plan.prediction.components_s["learner"]


def _busy(iteration: Iteration, name: str) -> float:
    clock = iteration.summary.clock
    gathered = gathering_s(iteration)
    return {
        "physics": clock.physics_busy,
        "render": clock.render_busy,
        "policy": clock.policy + clock.transport - gathered,
        # What a plan that unloads takes to switch is predicted apart.
        "learner": iteration.wall_s - iteration.summary.wall_s + gathered - iteration.learned["time/switch_s"],
    }[name]


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
