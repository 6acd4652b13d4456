"""When and where: a plan is data that can be read, edited and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedulers.profile import Pool

Mode = Literal["collocated", "disaggregated", "hybrid"]
MODES: tuple[Mode, ...] = ("collocated", "disaggregated", "hybrid")


@dataclass(frozen=True)
class Span:
    """Devices `first` to `first + count - 1` of one pool of one node; as text `node0:cores:0-3`."""

    node: str
    pool: Pool
    first: int
    count: int


@dataclass(frozen=True)
class Placement:
    """Components that share devices and take turns on them. Physics and render in one placement are fused."""

    components: tuple[str, ...]
    devices: tuple[Span, ...]

    @property
    def count(self) -> int:
        """Devices."""
        return sum(span.count for span in self.devices)

    @property
    def pool(self) -> Pool:
        return self.devices[0].pool

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(span.node for span in self.devices)


@dataclass(frozen=True)
class Phase:
    """Placements that work at the same time, on devices of their own. Phases follow one another."""

    placements: tuple[Placement, ...]
    micro_batch: int
    """Items per part that flows along the phase's `micro_batch` edges."""

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(name for placement in self.placements for name in placement.components)


@dataclass(frozen=True)
class Prediction:
    iteration_s: float
    phases_s: tuple[float, ...]
    components_s: Mapping[str, float]
    """Busy time per iteration, of one of its devices."""
    switch_s: float
    lower_bound_s: float
    """No plan of this problem is faster; equal to `iteration_s`: the plan is certified optimal."""


@dataclass(frozen=True)
class Plan:
    """Plan of one workflow (of one task, where a run mixes tasks)."""

    workflow: str
    mode: Mode
    phases: tuple[Phase, ...]
    groups: int = 1
    """Groups of environments that circulate in the loop (the farm's stages)."""
    ahead: int = 0
    """1: the rollout of the next iteration runs while the learner works on this one, one update behind."""
    unload: bool = False
    """Components leave the device's memory between phases, because they do not fit together."""
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    """Sentences: why this mode, what the alternatives would cost, what would help most."""

    @property
    def classified(self) -> Mode:
        """The mode that the phases amount to.

        Collocated: no pool is ever split between placements, components take turns on it. Disaggregated: one
        phase, with a pool split. Hybrid: several phases, at least one of them with a pool split.
        """
        split = any(
            len({placement.pool for placement in phase.placements}) < len(phase.placements) for phase in self.phases
        )
        if not split:
            return "collocated"
        return "disaggregated" if len(self.phases) == 1 else "hybrid"
