"""Summary of a rollout for the driver: counts, clocks and spans. The trajectories go to the learner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

import numpy as np

from embodied.run.trace import Span
from embodied.trajectories.batch import EndedEpisode
from embodied.trajectories.memory import FrameCounts
from sim_farm.client.observations import Observations
from sim_farm.shared_memory.slot_layout import FarmSpec


@dataclass(frozen=True)
class EpisodePart:
    """Episodes that are sent to the learner together: the items `start` to `stop - 1` of an iteration. Item i of B
    environments is episode i // B of environment i % B."""

    start: int
    stop: int

    def pieces(self, environments: int) -> list[tuple[int, int, int]]:
        """(episode, first environment, environment after the last) of each episode number in it."""
        found = []
        for episode in range(self.start // environments, -(-self.stop // environments)):
            first = max(self.start - episode * environments, 0)
            found.append((episode, first, min(self.stop - episode * environments, environments)))
        return found


@dataclass
class Clock:
    """Seconds of a rollout by what the rollout worker did; they add up to its wall time.

    With replicas `policy` is their sum, and `acting` takes its place in the wall time.
    """

    policy: float = 0.0
    """Inference: requests, noise, forward passes."""
    waiting: float = 0.0
    """Waiting for the farm; with replicas the mean over them, for the farm, requests and messages."""
    transport: float = 0.0
    """Reading slots, writing decisions, assembling trajectories."""
    assembly: float = 0.0
    """Part of the transport: assembling trajectories at a rollout's end."""
    stepping: tuple[float, ...] = ()
    """Physics of each task, summed over its workers; more than the wall time where they work in parallel."""
    drawing: tuple[float, ...] = ()
    """Rendering, likewise."""
    replicas: int = 1
    """Policy workers that shared the inference."""

    @contextmanager
    def timing(self, part: Literal["waiting", "transport"]) -> Iterator[None]:
        """Add the seconds of the block to this part."""
        begin = time.monotonic_ns()
        yield
        setattr(self, part, getattr(self, part) + (time.monotonic_ns() - begin) / 1e9)

    @property
    def acting(self) -> float:
        """Mean inference of one replica."""
        return self.policy / self.replicas

    @property
    def physics_busy(self) -> float:
        """Physics of all tasks."""
        return sum(self.stepping)

    @property
    def render_busy(self) -> float:
        """Rendering of all tasks."""
        return sum(self.drawing)

    def __add__(self, other: Clock) -> Clock:
        return Clock(
            self.policy + other.policy,
            self.waiting + other.waiting,
            self.transport + other.transport,
            self.assembly + other.assembly,
            _sum(self.stepping, other.stepping),
            _sum(self.drawing, other.drawing),
            max(self.replicas, other.replicas),
        )

    def count_workers(self, task: int, times_ns: np.ndarray) -> None:
        """Add the times of a task's workers: [B, 4] as in `Observations.times_ns`."""
        before = (0.0,) * task
        stepped = float((times_ns[:, 1] - times_ns[:, 0]).sum()) / 1e9
        drawn = float(np.maximum(times_ns[:, 3] - times_ns[:, 2], 0).sum()) / 1e9
        self.stepping = _sum(self.stepping, (*before, stepped))
        self.drawing = _sum(self.drawing, (*before, drawn))


@dataclass(frozen=True)
class RolloutSummary:
    """Counts and times of one rollout, or of a part of one."""

    env_steps: int
    version: int
    """Number of updates in the acting weights."""
    episodes: tuple[EndedEpisode, ...]
    """Episodes that ended in this rollout, in the order (decision, environment); for a part its own episodes, by
    environment."""
    clock: Clock
    wall_s: float
    spans: tuple[Span, ...]
    wire_bytes: int = 0
    """Bytes to and from physics workers on other machines."""
    frames: FrameCounts = FrameCounts()
    """Frames that were read back from the trajectory memory, and copies of frames."""

    def __add__(self, later: RolloutSummary) -> RolloutSummary:
        """The summary of both parts."""
        return replace(
            later,
            version=min(self.version, later.version),
            env_steps=self.env_steps + later.env_steps,
            episodes=self.episodes + later.episodes,
            clock=self.clock + later.clock,
            wall_s=self.wall_s + later.wall_s,
            spans=self.spans + later.spans,
            wire_bytes=self.wire_bytes + later.wire_bytes,
            frames=self.frames + later.frames,
        )


def workers_spans(spec: FarmSpec, task: int, seen: Observations, arrow: int) -> list[Span]:
    """Spans of the farm's workers for one step of one group, by their own clocks. `arrow` is the number of the trace's
    arrow from the last of them."""
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


def _sum(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    """The sums, task by task."""
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0.0))
