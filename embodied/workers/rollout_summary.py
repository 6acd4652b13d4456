"""What the driver learns of a rollout: counts, clocks and spans; the trajectories themselves go to the learner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from embodied.data.assembly import EndedEpisode
from embodied.tracing import Span
from sim_farm.layout import FarmSpec
from sim_farm.observations import Observations


@dataclass
class Clock:
    """Where the policy worker's own time went, in seconds; they add up to the rollout's wall time."""

    policy: float = 0.0
    """Inference: noise, forward passes."""
    waiting: float = 0.0
    """For the farm."""
    transport: float = 0.0
    """Reading slots, writing decisions, assembling trajectories."""
    physics_busy: float = 0.0
    """Summed over the workers' own clocks; more than the wall time where they work side by side."""
    render_busy: float = 0.0

    def __add__(self, other: Clock) -> Clock:
        return Clock(*(getattr(self, key) + getattr(other, key) for key in self.__dataclass_fields__))

    def count_workers(self, times_ns: np.ndarray) -> None:
        """Add what the farm's workers say of themselves: [B, 4] as in `Observations.times_ns`."""
        self.physics_busy += float((times_ns[:, 1] - times_ns[:, 0]).sum()) / 1e9
        self.render_busy += float(np.maximum(times_ns[:, 3] - times_ns[:, 2], 0).sum()) / 1e9


@dataclass(frozen=True)
class RolloutSummary:
    """One rollout, or a part of one."""

    env_steps: int
    version: int
    """Updates that the acting policy had seen."""
    episodes: tuple[EndedEpisode, ...]
    """Those that ended in this rollout, in the order (decision, environment); of whole episodes, its own, by
    environment."""
    clock: Clock
    wall_s: float
    spans: tuple[Span, ...]
    """None where nothing is traced."""
    wire_bytes: int = 0
    """To and from physics workers on other machines."""

    def __add__(self, later: RolloutSummary) -> RolloutSummary:
        """Both parts as one."""
        return replace(
            later,
            version=min(self.version, later.version),
            env_steps=self.env_steps + later.env_steps,
            episodes=self.episodes + later.episodes,
            clock=self.clock + later.clock,
            wall_s=self.wall_s + later.wall_s,
            spans=self.spans + later.spans,
            wire_bytes=self.wire_bytes + later.wire_bytes,
        )


def workers_spans(spec: FarmSpec, task: int, seen: Observations, arrow: int) -> list[Span]:
    """The farm's workers' spans for one round of one group, from the clocks that travel in the slots. `arrow` is the
    number of the trace's arrow from the last of them."""
    times, found = seen.times_ns, []
    suffix = f"-{task}" if task else ""
    last = int(np.argmax(times[:, [1, 3]].max(1)))
    for i, env in enumerate(seen.envs.tolist()):
        start, end, draw_start, draw_end = times[i].tolist()
        to = (arrow,) if i == last else ()
        drawn = draw_end > start
        physics = f"physics{suffix} {spec.worker_of(env)}"
        found.append(Span(physics, f"step env {env}", start, end, flow_to=() if drawn else to))
        if drawn:
            track = f"render{suffix} {spec.renderer_of(env)}" if spec.render_workers else physics
            found.append(Span(track, f"draw env {env}", draw_start, draw_end, flow_to=to))
    return found
