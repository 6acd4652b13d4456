"""Profiles: measured times and memory of each component, and the hardware they belong to."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from schedulers.cluster import Pool
from schedulers.errors import PlanError, nearest
from schedulers.turns import Turns
from schedulers.workflow import Workflow

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Exchange:
    """Collective communication among the instances of a component (see `laws.ring_seconds`)."""

    collective: Collective
    bytes: float
    """Size of all that is reduced or gathered at once: an instance's data before a reduction or after a gathering."""
    times: float
    """Calls per iteration: one for each optimiser step, or for each pass over a micro-batch."""
    fewest: float | None = None
    """Least calls of each instance, where the instances divide the `times` among them (passes over micro-batches of
    their own). None: all instances take part in all calls."""


@dataclass(frozen=True)
class Point:
    """One measurement: `batch` items on `devices` devices of the component's pool took `seconds`."""

    batch: int
    devices: int
    seconds: float
    low: float
    high: float
    """95% interval."""


@dataclass(frozen=True)
class ComponentProfile:
    """Times and memory of one component."""

    pool: Pool
    """Kind of device that it computes on."""
    points: tuple[Point, ...]
    """Times alone on its devices. A loop's component: seconds per chunk step by number of environments; another:
    seconds per micro-batch by number of items."""
    contention: float = 1.0
    """Factor on its times while other components are busy on other devices of the node (memory bandwidth, caches)."""
    variation: float = 0.0
    """Coefficient of variation of one call."""
    data_parallel: bool = True
    """True if more devices than were measured help. False: a process that computes on one device, and gets no more."""
    resident_bytes: float = 0.0
    """Memory per device while it is loaded."""
    bytes_per_item: float = 0.0
    """Additional memory per device for every item that it processes at once."""
    process_bytes: float = 0.0
    """Host memory of all its processes while it is loaded. For the reader: the planner compares the devices' memory
    with `resident_bytes` and `bytes_per_item` alone."""
    unload_s: float = 0.0
    load_s: float = 0.0
    """Seconds to leave the device's memory, and to return: the two halves of a context switch."""
    exchanges: tuple[Exchange, ...] = ()
    """Communication among its instances (`Placement.instances`), outside the loops; not included in `points`."""
    published_bytes: float = 0.0
    """Size of the weights that it publishes, once an iteration, to all instances of the policies (the last component
    of each loop)."""
    shares_weights: bool = False
    """True if a policy in the same process computes with its weights, so that a device on which both take turns has one
    copy. False for sharded weights."""
    estimated: str = ""
    """Source of `points` that were computed and not measured, in words; empty: they were measured."""
    turns: Turns | None = None
    """Turns that its items take, where a call's items end at different times; None: they end together."""
    other_pool: ComponentProfile | None = None
    """Profile of the same component on the other pool, if it was measured there too: frames drawn on a GPU, or on
    cores. The planner chooses."""

    def on(self, pool: Pool) -> ComponentProfile:
        """Profile on that pool, with this one as its `other_pool`; itself if it was not measured on that pool."""
        other = self.other_pool
        if pool == self.pool or other is None or other.pool != pool:
            return self
        return replace(other, other_pool=replace(self, other_pool=None))

    @property
    def max_devices(self) -> int:
        """Most devices that it can use: unlimited if `data_parallel`, else the most that were measured."""
        return sys.maxsize if self.data_parallel else max(point.devices for point in self.points)

    def seconds(self, batch: float, devices: int) -> float:
        """Predicted time of `batch` items on `devices` devices.

        Between measured batches straight lines; above the largest and below the smallest the line through the nearest
        two, never falling as the batch grows and never negative. One measured batch alone: proportional. Numbers of
        devices that were not measured share the batch evenly (data parallel): with k the largest measured number of at
        most n devices (the smallest one if there is none), `seconds(b, n) = seconds(b k / n, k)`. No number counts as
        more than `max_devices`.

        With `turns` the line is a P(b) + c b in place of straight lines: a for each turn, c for each item, fitted to
        what was measured: a batch is done with its longest item, not in proportion to their number.
        """
        return float(self.seconds_on(batch, np.array([devices]))[0])

    def seconds_on(self, batch: float, devices: np.ndarray) -> np.ndarray:
        """`seconds` for each of many numbers of devices."""
        measured = np.array(sorted({point.devices for point in self.points}))
        devices = np.minimum(devices, self.max_devices)
        base = measured[np.maximum(np.searchsorted(measured, devices, side="right") - 1, 0)]
        result = np.empty(len(devices))
        for k in np.unique(base):
            mine = base == k
            # A device has one item at least: more devices than items do not help.
            batches = np.maximum(batch * k / devices[mine], min(batch, 1.0))
            result[mine] = self._curve(int(k), batches)
        return result

    def _curve(self, devices: int, batches: np.ndarray) -> np.ndarray:
        """Measured times on `devices` devices, continued to any batch."""
        x, y = _measured(self.points, devices)
        if self.turns is None:
            return _lines(x, y, batches)
        # Each accelerator is an instance, with slots of its own; cores are one.
        instances = devices if self.pool == "accelerators" else 1
        terms = [np.stack([self.turns.passes(each / instances), each], -1) for each in (x, np.asarray(batches))]
        per_turn_and_item = _not_negative(terms[0], y)
        law, other = terms[0] @ per_turn_and_item, terms[1] @ per_turn_and_item
        # What the law leaves unexplained, as a factor: measured batches take what was measured.
        return other * np.interp(batches, x, y / np.maximum(law, 1e-12)) if law.any() else other


@dataclass(frozen=True)
class Together:
    """Time of loop components that share devices and run under the operating system's or driver's scheduling."""

    components: tuple[str, ...]
    batch: int
    """Environments of all groups."""
    devices: int
    groups: int
    seconds: float
    """Seconds per chunk step of all groups."""
    low: float
    high: float


@dataclass(frozen=True)
class Profile:
    """Profiles of all components of one workflow on one kind of hardware."""

    workflow: str
    fingerprint: Mapping[str, str]
    """Hardware and software that the times belong to."""
    components: Mapping[str, ComponentProfile]
    together: tuple[Together, ...] = ()
    transfers: Mapping[str, float] = field(default_factory=dict)
    """Bytes per item on each edge, keyed `source>target`."""
    arrivals: tuple[float, ...] = ()
    """Long tails of episode lengths: share of the rollout's time at which 1/n, 2/n, ... of the items were complete;
    empty: evenly."""
    other_programs: float | None = None
    """Share of the cores' time that other programs used while this was measured; None: nobody looked."""

    def on_pools(self, pools: Mapping[str, Pool]) -> Profile:
        """The profile with components on the given pools, by name, as far as they were measured on them."""
        changed = {name: self.components[name].on(pool) for name, pool in pools.items() if name in self.components}
        return replace(self, components={**self.components, **changed})

    def together_seconds(self, components: tuple[str, ...], batch: float, devices: int, groups: int) -> float | None:
        """Measured seconds of a chunk step of `batch` environments, scaled in proportion from the nearest measured
        batch; None where these components were not measured together on so many devices with so many groups."""
        found = [
            entry
            for entry in self.together
            if set(entry.components) == set(components) and entry.devices == devices and entry.groups == groups
        ]
        if not found:
            return None
        entry = min(found, key=lambda entry: abs(entry.batch - batch))
        return entry.seconds * batch / entry.batch


def _measured(points: tuple[Point, ...], devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches on `devices` devices in rising order, and their mean seconds."""
    times: dict[int, list[float]] = {}
    for point in points:
        if point.devices == devices:
            times.setdefault(point.batch, []).append(point.seconds)
    return np.array(sorted(times), dtype=float), np.array([float(np.mean(times[batch])) for batch in sorted(times)])


def _not_negative(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[2]: the factors of two terms [n, 2] that come nearest to the values [n], neither below 0."""
    both = np.linalg.lstsq(terms, values, rcond=None)[0] if len(values) > 1 else -np.ones(2)
    if both.min() >= 0:
        return np.asarray(both)
    alone = [np.zeros(2), np.zeros(2)]
    for i, factors in enumerate(alone):
        factors[i] = terms[:, i] @ values / (terms[:, i] @ terms[:, i])
    return min(alone, key=lambda factors: float(np.square(terms @ factors - values).sum()))


def _lines(x: np.ndarray, y: np.ndarray, batches: Any) -> np.ndarray:
    """Straight lines through the points (x, y), continued to any batch."""
    if len(x) == 1:
        return y[0] * np.asarray(batches) / x[0]
    first, last = (max(0.0, (y[j] - y[i]) / (x[j] - x[i])) for i, j in ((0, 1), (-2, -1)))
    below = np.minimum(np.asarray(batches) - x[0], 0.0) * first
    above = np.maximum(np.asarray(batches) - x[-1], 0.0) * last
    return np.maximum(np.interp(batches, x, y) + below + above, 0.0)


def check_profile(
    profile: Profile, workflow: Workflow, fingerprint: Mapping[str, str] | None, any_hardware: bool = False
) -> None:
    """Raises `PlanError` for a profile of another workflow, or of other hardware unless `any_hardware`.

    `fingerprint`: identity of the hardware and software here, compared entry by entry; None: unknown.
    """
    if profile.workflow != workflow.name:
        raise PlanError(f"the profile is of workflow {profile.workflow!r}, not of {workflow.name!r}; measure that one")
    check_components(workflow, profile)
    if any_hardware or fingerprint is None:
        return
    differs = [
        f"{key}: {profile.fingerprint.get(key, 'not recorded')} in the profile, {fingerprint.get(key, 'unknown')} here"
        for key in sorted({*profile.fingerprint, *fingerprint})
        if profile.fingerprint.get(key) != fingerprint.get(key)
    ]
    if differs:
        raise PlanError(f"the profile was measured on other hardware ({'; '.join(differs)}): measure again")


def check_components(workflow: Workflow, profile: Profile) -> None:
    """Raises `PlanError` unless every component of the workflow has times."""
    for name in workflow.names:
        if name not in profile.components:
            known = nearest(name, profile.components)
            raise PlanError(f"the profile of {profile.workflow!r} has no times of component {name!r}{known}")
        if not profile.components[name].points:
            raise PlanError(f"the profile of {profile.workflow!r} has no measured point of component {name!r}")


def check_numbers(profile: Profile) -> None:
    """Raises `PlanError` for times, batches or factors that no measurement gives."""
    every = list(profile.components.items())
    every += [(name, component.other_pool) for name, component in every if component.other_pool is not None]
    for name, component in every:
        other = component.other_pool
        if other is not None and (other.pool == component.pool or other.other_pool is not None or not other.points):
            raise PlanError(f"profile: `other_pool` of {name!r} is its profile on the other pool than {component.pool}")
        for point in component.points:
            if point.batch < 1 or point.devices < 1 or not 0 <= point.seconds < math.inf:
                raise PlanError(
                    f"profile: {name!r} has a point of {point.batch} items on {point.devices} devices in "
                    f"{point.seconds} s; batch and devices are at least 1, seconds finite"
                )
        turns = component.turns
        if turns is not None:
            taken = turns.quantiles
            if turns.slots < 1 or not taken or list(taken) != sorted(taken) or not 0 < taken[0] <= taken[-1] < math.inf:
                raise PlanError(
                    f"profile: `turns` of {name!r} are one slot or more, and numbers above 0 in rising order"
                )
        if not 0 < component.contention < math.inf:
            raise PlanError(f"profile: `contention` of {name!r} is {component.contention}; it is more than 0")
    for entry in profile.together:
        if entry.batch < 1 or entry.devices < 1 or entry.groups < 1:
            raise PlanError(f"profile: {', '.join(entry.components)} together need a batch, devices and groups")
    shares = profile.arrivals
    if shares and (list(shares) != sorted(shares) or abs(shares[-1] - 1) > 1e-6):
        raise PlanError("profile: arrivals are shares of the loop's time in rising order, the last of them 1")
