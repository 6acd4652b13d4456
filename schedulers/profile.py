"""How long things take and how much they hold: what was measured, on which hardware."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

Pool = Literal["cores", "accelerators"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Exchange:
    """What the instances of a component send one another in an iteration (see `laws.ring_seconds`)."""

    collective: Collective
    bytes: float
    """Of all that is reduced or gathered at once, as an instance has it before a reduction or after a gathering."""
    times: float
    """Per iteration: one for each optimiser step, or for each pass over a micro-batch."""
    fewest: float | None = None
    """Where the instances share the `times` out among them (passes over their own micro-batches): what each of them
    makes at least. None: all take part in all."""


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
    """What it keeps busy."""
    points: tuple[Point, ...]
    """Alone on its devices. Of a loop's component: seconds per round; else per iteration's part of so many items."""
    beside: float = 1.0
    """Factor on its times while others are busy on other devices of the same node (memory bandwidth, caches)."""
    variation: float = 0.0
    """Coefficient of variation of one call."""
    spreads: bool = True
    """More devices than the most that were measured help; not one process that computes on one of them, which is
    given no more."""
    resident_bytes: float = 0.0
    """Per device, while it is loaded."""
    bytes_per_item: float = 0.0
    """More per device, for every item that it works on at once."""
    process_bytes: float = 0.0
    """Of all its processes, while it is loaded: what leaves. For the reader: the planner compares devices' memory with
    `resident_bytes` and `bytes_per_item` alone."""
    unload_s: float = 0.0
    load_s: float = 0.0
    """To leave the device's memory, and to come back."""
    exchanges: tuple[Exchange, ...] = ()
    """Among its instances (`Placement.instances`), where it works outside the loops; not in `points`."""
    published_bytes: float = 0.0
    """Weights that it hands, once an iteration, to all instances of what decides (the last of a loop)."""
    lends: bool = False
    """What decides computes with its weights, of which there is one copy then, where both take turns on an accelerator;
    not where its instances hold shards."""
    elsewhere: ComponentProfile | None = None
    """The same component on the other pool, where it was measured there too: frames drawn on a GPU, or on cores. A plan
    chooses."""

    def on(self, pool: Pool) -> ComponentProfile:
        """The component on that pool, with this one as what is elsewhere; itself where it was not measured there."""
        other = self.elsewhere
        if pool == self.pool or other is None or other.pool != pool:
            return self
        return replace(other, elsewhere=replace(self, elsewhere=None))

    @property
    def most_devices(self) -> int:
        """That it can be given: where it does not spread, the most that were measured."""
        return sys.maxsize if self.spreads else max(point.devices for point in self.points)

    def seconds(self, batch: float, devices: int) -> float:
        """Predicted time of `batch` items on `devices` devices.

        Between measured batches straight lines; above the largest and below the smallest the line through the
        nearest two, never falling as the batch grows and never negative. One measured batch alone: proportional.
        Devices that were not measured share the batch evenly (data parallel): with k the largest measured number
        of at most n devices (the smallest one if there is none), `seconds(b, n) = seconds(b k / n, k)`. Where a
        component does not spread, no n counts as more than the largest measured number.
        """
        return float(self.seconds_on(batch, np.array([devices]))[0])

    def seconds_on(self, batch: float, devices: np.ndarray) -> np.ndarray:
        """`seconds` for each of many numbers of devices."""
        measured = np.array(sorted({point.devices for point in self.points}))
        devices = np.minimum(devices, self.most_devices)
        base = measured[np.maximum(np.searchsorted(measured, devices, side="right") - 1, 0)]
        result = np.empty(len(devices))
        for k in np.unique(base):
            mine = base == k
            # A device has one item at least: more devices than items help nobody.
            result[mine] = _curve(self.points, int(k), np.maximum(batch * k / devices[mine], min(batch, 1.0)))
        return result


@dataclass(frozen=True)
class Together:
    """Loop components that share devices under the operating system's or driver's own turns: one round's seconds."""

    components: tuple[str, ...]
    batch: int
    """Items of all groups."""
    devices: int
    groups: int
    seconds: float
    """Per round of all groups."""
    low: float
    high: float


@dataclass(frozen=True)
class Profile:
    """All components of one workflow on one kind of hardware."""

    workflow: str
    fingerprint: Mapping[str, str]
    """Hardware and software that the times belong to."""
    components: Mapping[str, ComponentProfile]
    together: tuple[Together, ...] = ()
    transfers: Mapping[str, float] = field(default_factory=dict)
    """Bytes per item on each edge, keyed `source>target`."""
    arrivals: tuple[float, ...] = ()
    """Long tails: share of the loop's time at which 1/n, 2/n, ... of the items were complete; none: evenly."""

    def placed(self, pools: Mapping[str, Pool]) -> Profile:
        """The profile with the components on these pools, by name, as far as they were measured there."""
        changed = {name: self.components[name].on(pool) for name, pool in pools.items() if name in self.components}
        return replace(self, components={**self.components, **changed})

    def together_seconds(self, components: tuple[str, ...], batch: float, devices: int, groups: int) -> float | None:
        """Measured seconds of one round of `batch` items, scaled in proportion from the nearest measured batch.

        None where these components were not measured together on so many devices with so many groups.
        """
        found = [
            entry
            for entry in self.together
            if set(entry.components) == set(components) and entry.devices == devices and entry.groups == groups
        ]
        if not found:
            return None
        entry = min(found, key=lambda entry: abs(entry.batch - batch))
        return entry.seconds * batch / entry.batch


def _curve(points: tuple[Point, ...], devices: int, batches: Any) -> np.ndarray:
    """The measured times on `devices` devices, continued to any batch."""
    times: dict[int, list[float]] = {}
    for point in points:
        if point.devices == devices:
            times.setdefault(point.batch, []).append(point.seconds)
    x = np.array(sorted(times), dtype=float)
    y = np.array([float(np.mean(times[batch])) for batch in sorted(times)])
    if len(x) == 1:
        return y[0] * np.asarray(batches) / x[0]
    first, last = (max(0.0, (y[j] - y[i]) / (x[j] - x[i])) for i, j in ((0, 1), (-2, -1)))
    below = np.minimum(np.asarray(batches) - x[0], 0.0) * first
    above = np.maximum(np.asarray(batches) - x[-1], 0.0) * last
    return np.maximum(np.interp(batches, x, y) + below + above, 0.0)
