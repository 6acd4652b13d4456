"""Rollouts of a run: started on the rollout worker, awaited, and sent to the learner.

    rollout worker --trajectories--> scorers --trajectories--> learner, which estimates advantages

`Rollouts` collects a whole rollout before it is sent. `RolloutsInParts` collects whole episodes: each part is sent when
it is complete, and the learner works on it while the next is collected. `TrajectoryDelivery` sends to every rank, on
this machine or another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.config.schema import Config
from embodied.execution.assignment import Assignment
from embodied.execution.learner_ranks import received_by_ranks
from embodied.execution.roles import LearnerRole, RolloutRole, ScorerRole
from embodied.execution.session import Session
from embodied.learning.learner import ReceivedPart
from embodied.metric import Metric
from embodied.rollout.rollout_summary import EpisodePart, RolloutSummary
from embodied.run.trace import Span
from embodied.runtime.handles import Caller, WorkerGroup
from embodied.trajectories.memory import TrajectoryMemory
from embodied.workflows.sizes import streams
from sim_farm.client.farm import Farm

PARTS_AHEAD = 2
"""Parts of an iteration that may wait for the learner; the rollout then waits too, so that memory is bounded."""


METRICS = (
    Metric("time/<component>_s", "s", "Time in which a scorer (reward worker, reference policy) judged trajectories."),
    Metric("learner/informative_groups", "groups", "Episode groups that the estimator keeps: outcomes differ (grpo)."),
)


@dataclass
class SpanRecorder:
    """Collects the driver's spans of one iteration."""

    _spans: list[Span] = field(default_factory=list)

    def mark(self, track: str, name: str, begin_ns: int, end_ns: int | None = None, **args: Any) -> None:
        """Add a span that ends at `end_ns`, or now."""
        self._spans.append(Span(track, name, begin_ns, end_ns or time.monotonic_ns(), args))

    def add(self, spans: list[Span]) -> None:
        self._spans += spans

    def take(self) -> list[Span]:
        """Return the spans that were collected since the last call."""
        taken, self._spans = self._spans, []
        return taken


@dataclass(frozen=True)
class SentTrajectories:
    """Trajectories on their way to the learner: references to the results of its calls."""

    begin_ns: int
    scoring: tuple[tuple[str, list[Any]], ...] = ()
    """Scorers that the trajectories pass through, in this order."""
    receiving: Any = None
    """The learner's; None: it has received all parts during the rollout."""


@dataclass(kw_only=True)
class Rollouts:
    """Rollouts of a fixed number of decisions per environment."""

    config: Config
    assignment: Assignment
    rollout_worker: WorkerGroup[RolloutRole]
    scorers: Mapping[str, WorkerGroup[ScorerRole]]
    """By name, in the order in which trajectories pass through them."""
    learner: WorkerGroup[LearnerRole]
    delivery: TrajectoryDelivery
    environments: int
    """Number of environments of all tasks."""
    farm_deadline_s: float
    """Deadline of the rollout worker for its farm. It is shorter than the deadline of the call, whose message could not
    name the farm's worker that is late."""
    spans: SpanRecorder
    scoring_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each scorer has worked on this iteration's trajectories."""
    _ahead: Any = None
    """Reference to the summary of the rollout that runs ahead of the update, if there is one."""

    def start_ahead(self) -> None:
        """Start the next iteration's rollout with the weights that were published last."""
        self._ahead = self.start()

    def start(self) -> Any:
        """Start a rollout with the weights that were published last; a reference to its summary."""
        return self.rollout_worker.submit(RolloutRole.rollout, self.config.rollout.decisions, self.farm_deadline_s)

    def wait(self, started: Any) -> RolloutSummary:
        """Wait until the rollout is complete. Raises a replica's failure, which names the replica."""
        summary: RolloutSummary = self.rollout_worker.get_one(0, started)
        return summary

    def collect(self, iteration: int) -> RolloutSummary:
        """Collect the iteration's rollout: the one that runs ahead, or a new one."""
        self.scoring_s = {}
        begin = time.monotonic_ns()
        summary = self.wait(self._take_ahead() or self.start())
        self.spans.mark("driver", "rollout", begin)
        return summary

    def send_remaining(self, iteration: int) -> SentTrajectories:
        """Send the trajectories that `collect` has not sent: here all, through the scorers to the learner."""
        begin = time.monotonic_ns()
        source: WorkerGroup[Any] = self.rollout_worker
        produce: Any = RolloutRole.trajectories
        scoring = []
        for name, scorer in self.scorers.items():
            scoring.append((name, scorer.pipe(ScorerRole.receive, source, produce, iteration)))
            source, produce = scorer, ScorerRole.trajectories
        return SentTrajectories(begin, tuple(scoring), self.delivery.send(source, produce, iteration))

    def await_received(self, sent: SentTrajectories) -> dict[str, float]:
        """Wait until the learner has received the trajectories; metrics of the iteration. A scorer's failure is raised
        before those that follow from it."""
        self._await_received(sent)
        return self._scoring_metrics()

    def _await_received(self, sent: SentTrajectories) -> ReceivedPart:
        for name, references in sent.scoring:
            self.scoring_s[name] = self.scoring_s.get(name, 0.0) + sum(self.scorers[name].get(references))
        return received_by_ranks(self.learner.get(sent.receiving))

    def _scoring_metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self.scoring_s.items()}

    def _take_ahead(self) -> Any:
        started, self._ahead = self._ahead, None
        return started


@dataclass(kw_only=True)
class RolloutsInParts(Rollouts):
    """Rollouts of whole episodes, in parts of complete episode groups."""

    informative_groups: int = 0
    """Episode groups of this iteration that the estimator keeps: for grpo those whose outcomes differ; for reinforce
    all."""

    def start(self, part: EpisodePart | None = None) -> Any:
        """Start a part of a rollout, by default its first, with the weights that were published last."""
        settings = self.config.rollout
        part = part or next(self.parts())
        # If the outcomes of a part decide whether there is another, no environment may begin that too early.
        limit = -(-part.stop // self.environments) if settings.max_episodes_per_env else settings.episodes_per_env
        return self.rollout_worker.submit(RolloutRole.rollout_episodes, part, limit, self.farm_deadline_s)

    def collect(self, iteration: int) -> RolloutSummary:
        """Collect the iteration's parts, and send each when it is complete."""
        settings = self.config.rollout
        wanted = self.environments * settings.episodes_per_env // settings.episode_group
        total: RolloutSummary | None = None
        waiting: list[SentTrajectories] = []
        self.scoring_s, self.informative_groups = {}, 0
        for number, part in enumerate(self.parts()):
            begin = time.monotonic_ns()
            summary = self.wait(self._take_ahead() or self.start(part))
            self.spans.mark("driver", f"roll out part {number}", begin)
            total = summary if total is None else total + summary
            waiting.append(super().send_remaining(iteration))
            while len(waiting) > (0 if settings.max_episodes_per_env else PARTS_AHEAD):
                self.informative_groups += self._await_received(waiting.pop(0)).groups
            if settings.max_episodes_per_env and self.informative_groups >= wanted:
                break
        for sent in waiting:
            self.informative_groups += self._await_received(sent).groups
        assert total is not None
        return total

    def send_remaining(self, iteration: int) -> SentTrajectories:
        """Send nothing more: `collect` has sent every part."""
        return SentTrajectories(time.monotonic_ns())

    def await_received(self, sent: SentTrajectories) -> dict[str, float]:
        return self._scoring_metrics() | {"learner/informative_groups": float(self.informative_groups)}

    def parts(self) -> Iterator[EpisodePart]:
        """The parts of an iteration's episodes: those of the plan, if the learner may work on parts."""
        settings = self.config.rollout
        flows = streams(self.config) and not settings.max_episodes_per_env
        size = (self.assignment.part if flows else 0) or self.environments
        items = (settings.max_episodes_per_env or settings.episodes_per_env) * self.environments
        return (EpisodePart(start, min(start + size, items)) for start in range(0, items, size))


# --- delivery: ranks on the rollout worker's machine map the trajectory memory and are sent flat rows; ranks on other
# machines are sent the trajectories, and call for the frames of each micro-batch


@dataclass(frozen=True)
class TrajectoryDelivery:
    """Delivery of trajectories from the rollout worker to the learner."""

    rollout_worker: WorkerGroup[RolloutRole]
    learner: WorkerGroup[LearnerRole]
    far: tuple[bool, ...]
    """For each rank, true if it is on another machine than the rollout worker."""
    source: WorkerGroup[FrameSource] | None = None
    """Worker from which such ranks fetch frames; None: there are no frames to fetch."""

    @property
    def helpers(self) -> tuple[WorkerGroup[Any], ...]:
        """Workers that it has for itself."""
        return () if self.source is None else (self.source,)

    @property
    def path(self) -> str:
        """Path of the trajectories, in words: ranks that map the memory are sent flat rows, numbers and outcomes."""
        path = f"trajectory memory, rows {self.learner.path_from(self.rollout_worker)}"
        return path if self.source is None else f"{path}; frames fetched where they are evaluated"

    def use(self, memory: TrajectoryMemory) -> None:
        """Fetch frames from this memory."""
        if self.source is not None:
            self.source.call(FrameSource.use, memory)

    def send(self, source: WorkerGroup[Any], produce: Any, iteration: int) -> Any:
        """Start `LearnerRole.receive` on every rank, of what `produce` makes on the source; references."""
        if not any(self.far):
            return self.learner.pipe(LearnerRole.receive, source, produce, iteration)
        made = source.submit(produce)
        reader = None if self.source is None else FrameSourceReader(self.source.handles[0].caller())
        remote = self.rollout_worker.submit(RolloutRole.without_memory, made, reader)
        each = [(remote if away else made, iteration) for away in self.far]
        return self.learner.submit_scattered(LearnerRole.receive, each)


def start_delivery(
    session: Session,
    assignment: Assignment,
    rollout_worker: WorkerGroup[RolloutRole],
    learner: WorkerGroup[LearnerRole],
    farm: Farm,
) -> TrajectoryDelivery:
    """The delivery of trajectories, with a worker if frames have to leave the machine."""
    far = tuple(bool(place.node) for place in assignment.components[learner.name][: learner.size])
    source = None
    if any(far) and farm.frames is not None:
        source = session.runtime.start_called(f"frame source of {learner.name}", FrameSource, sum(far))
    return TrajectoryDelivery(rollout_worker, learner, far, source)


class FrameSource:
    """Maps the trajectory memory. Its callers are served side by side."""

    def __init__(self) -> None:
        self._memory: TrajectoryMemory | None = None

    def use(self, memory: TrajectoryMemory) -> None:
        """Read this memory from now on."""
        self._memory = memory

    def frames(self, rows: np.ndarray) -> np.ndarray:
        """A copy of the frames uint8 [n, cameras, H, W, 3] at flat rows [n]."""
        assert self._memory is not None and self._memory.frames is not None, "it has no frames"
        found: np.ndarray = self._memory.frames.frames[rows]
        return found


@dataclass(frozen=True)
class FrameSourceReader:
    """`FrameReader` of a rank on another machine, through the frame source. Raises as `Caller` does."""

    source: Caller

    def read(self, rows: Tensor) -> Tensor:
        found = self.source.call(FrameSource.frames, rows.numpy())
        progress.report()
        return torch.tensor(found)  # a copy: what has arrived cannot be written, and fills Ray's store
