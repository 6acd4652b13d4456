"""Devices that a plan leaves unused, and the best plan found that uses more of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedulers.cluster import POOLS, Pool, devices_of, pool_size
from schedulers.cost.prediction import phase_costs, predict
from schedulers.cost.problem import Problem
from schedulers.cost.times import usable_devices
from schedulers.errors import PlanError
from schedulers.plan import Device, DeviceRange, Placement, Plan, first_of, one_by_one
from schedulers.validation import validate

MOST_COUNTS = 4
"""Numbers of additional devices that are tried for each placement: the smallest, the largest, some between."""


@dataclass(frozen=True)
class Unused:
    """Devices of one pool that a plan leaves unused in phases in which others of the pool work."""

    pool: Pool
    phases: tuple[int, ...]
    """Numbers (from 0) of the phases in which the devices are unused; empty if the plan uses nothing of this pool."""
    devices: tuple[DeviceRange, ...]
    total: int
    """Size of the pool."""
    better: Plan | None = None
    """The fastest plan found that uses more of the pool, with its prediction; None: none was found."""
    components: tuple[str, ...] = ()
    """Components that have more devices in `better`, which is else the same plan; empty: another plan altogether."""
    more: int = 0
    """Devices that these have more."""
    regrouped: bool = False
    """True if the environments of `better` are in one group, which more workers can share, not in the plan's."""

    @property
    def count(self) -> int:
        """Number of unused devices."""
        return sum(part.count for part in self.devices)


def unused_devices(plan: Plan, considered: Sequence[Plan], problem: Problem) -> list[Unused]:
    """Devices that the plan leaves unused, in the order of pools and phases.

    `considered`: other plans that were found, with predictions. For each placement, the plan itself with more devices
    for it is predicted too, if that is valid.
    """
    result = []
    for pool in POOLS:
        total = pool_size(problem.cluster, pool)
        phases = [i for i, phase in enumerate(plan.phases) if any(p.pool == pool for p in phase.placements)]
        idle: dict[tuple[DeviceRange, ...], tuple[int, ...]] = {}
        for number in phases:
            devices = _idle(plan.phases[number].placements, problem, pool)
            idle[devices] = (*idle.get(devices, ()), number)
        for devices, numbers in (idle or {_idle((), problem, pool): ()}).items():
            if devices:
                gap = Unused(pool, numbers, devices, total)
                found = [gap, *_larger(plan, gap, problem), *_others(plan, gap, considered)]
                result.append(min(found, key=_seconds))
    return result


def _seconds(gap: Unused) -> float:
    return gap.better.prediction.iteration_s if gap.better and gap.better.prediction else math.inf


def _idle(placements: Sequence[Placement], problem: Problem, pool: Pool) -> tuple[DeviceRange, ...]:
    """Devices of the pool without any of the placements, as ranges in the order of nodes."""
    busy = {device for placement in placements for device in one_by_one(placement.devices)}
    result: list[DeviceRange] = []
    for node in problem.cluster.nodes:
        for i in range(devices_of(node, pool)):
            device: Device = (node.name, pool, i)
            if device in busy:
                continue
            last = result[-1] if result else None
            if last is not None and last.node == node.name and last.first + last.count == i:
                result[-1] = replace(last, count=last.count + 1)
            else:
                result.append(DeviceRange(node.name, pool, i, 1))
    return tuple(result)


def _others(plan: Plan, gap: Unused, considered: Sequence[Plan]) -> Iterator[Unused]:
    """Plans of other phases or placements that use more of the pool's devices."""
    mine = _used(plan, gap.pool)
    for other in considered:
        if _used(other, gap.pool) > mine:
            yield replace(gap, better=other)


def _used(plan: Plan, pool: Pool) -> int:
    placements = (placement for phase in plan.phases for placement in phase.placements if placement.pool == pool)
    return len({device for placement in placements for device in one_by_one(placement.devices)})


def _larger(plan: Plan, gap: Unused, problem: Problem) -> Iterator[Unused]:
    """The plan with more devices for one placement of one of the phases, also with its loop in one group."""
    for number in gap.phases:
        for i, placement in enumerate(plan.phases[number].placements):
            if placement.pool == gap.pool:
                yield from _grown(plan, gap, problem, number, i)
                if plan.groups != (1,) and len(plan.groups) == 1 and problem.graph.loop[0] in placement.components:
                    whole = replace(plan, groups=(1,))
                    yield from _grown(whole, replace(gap, regrouped=True), problem, number, i)


def _grown(plan: Plan, gap: Unused, problem: Problem, number: int, i: int) -> Iterator[Unused]:
    """The plan with more devices for placement i of a phase."""
    phase = plan.phases[number]
    placement, model = phase.placements[i], phase_costs(plan, phase, problem).model
    free = [part for part in gap.devices if _may(placement.components, part, problem)]
    free.sort(key=lambda part: part.node not in placement.nodes)  # where it is already: fewer messages
    now = placement.count
    counts = np.arange(1, now + sum(part.count for part in free) + 1)
    usable = np.unique(usable_devices(problem, model, model.placements[i], counts))
    for count in _some([int(n) for n in usable if n > now]):
        grown = replace(placement, devices=(*placement.devices, *first_of(free, count - now)))
        placements = (*phase.placements[:i], grown, *phase.placements[i + 1 :])
        phases = (*plan.phases[:number], replace(phase, placements=placements), *plan.phases[number + 1 :])
        changed = _predicted(replace(plan, phases=phases, prediction=None), problem)
        if changed is not None:
            yield replace(gap, better=changed, components=placement.components, more=count - now)


def _may(names: tuple[str, ...], part: DeviceRange, problem: Problem) -> bool:
    return not problem.pinned(names) or part.node == problem.cluster.head_node


def _some(counts: Sequence[int]) -> list[int]:
    """At most `MOST_COUNTS` of them, the first and the last among them."""
    last = len(counts) - 1
    return (
        [counts[i] for i in sorted({round(last * i / (MOST_COUNTS - 1)) for i in range(MOST_COUNTS)})] if counts else []
    )


def _predicted(plan: Plan, problem: Problem) -> Plan | None:
    """The plan with its prediction; None where it is not valid."""
    try:
        validate(plan, problem.workflow, problem.cluster, problem.profile)
        prediction = predict(plan, problem.workflow, problem.profile, problem.cluster)
    except PlanError:
        return None
    return replace(plan, prediction=prediction)
