"""One iteration of training, in the orders in which a plan may have it done.

    collect a rollout -> estimate advantages and update the policy -> publish its weights

`OnPolicy` is the plain case. `OneAhead` collects the next rollout during the update; `Offloaded` moves policy workers
and learner into and out of a device's memory between the steps. A variation changes when a step begins, never what it
computes. `Rollouts` collects a whole rollout before it is sent to the learner. `RolloutsInParts` collects whole
episodes: each part is sent when it is complete, and the learner works on it while the next is collected.

    rollout worker --trajectories--> scorers --trajectories--> learner, which estimates advantages
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied.execution.assignment import Assignment
from embodied.execution.roles import LearnerRole, RolloutRole, ScorerRole
from embodied.execution.run_offload import RunOffload
from embodied.execution.run_workers import RunWorkers, start_workers
from embodied.execution.session import Session
from embodied.learning.learner import ReceivedPart
from embodied.metric import Metric
from embodied.rollout.rollout_summary import EpisodePart, RolloutSummary
from embodied.run import checkpoint
from embodied.run.background_writer import Written
from embodied.run.trace import Span
from embodied.runtime.handles import WorkerGroup
from embodied.workflows.run_spec import RunSpec

PARTS_AHEAD = 2
"""Parts of an iteration that may wait for the learner; the rollout then waits too, so that memory is bounded."""
ANSWER_S = 5.0
"""Longest wait, after a loss, for a rank to answer whether it still writes a checkpoint."""
METRICS = (
    Metric("time/switch_s", "s", "Time in which roles changed places in a device's memory; 0 where none do."),
    Metric("time/<component>_s", "s", "Time in which a scorer (reward worker, reference policy) judged trajectories."),
    Metric("learner/informative_groups", "groups", "Episode groups that the estimator keeps: outcomes differ (grpo)."),
    Metric("learner/ranks", "ranks", "Learner processes that shared the update."),
)

Environments = dict[str, np.ndarray]
"""A snapshot of the environments after a rollout."""


@dataclass(frozen=True)
class Iteration:
    """Result of one iteration."""

    summary: RolloutSummary
    learned: dict[str, float]
    """Metrics of the update."""
    environments: Environments
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(kw_only=True)
class OnPolicy(RunWorkers):
    """The plain iteration: each step begins when the one before is complete."""

    rollouts: Rollouts = field(init=False)
    offload: RunOffload = field(init=False)

    def __post_init__(self) -> None:
        self.rollouts = RolloutsInParts(self) if self.spec.by_episodes else Rollouts(self)
        self.offload = RunOffload(self)

    def begin(self, environments: Environments | None, version: int) -> None:
        """Publish the learner's weights, which have seen `version` updates, and start the environments, or continue
        from the snapshot `environments`."""
        self.publish(version)
        self.spans.take()
        self.rollout_worker.call(RolloutRole.begin, environments, self.spec.by_episodes)

    def iterate(
        self, iteration: int, *, drain: bool = False, before_update: Callable[[], None] = lambda: None
    ) -> Iteration:
        """Collect a rollout, update the policy from it, publish its weights.

        `drain`: no rollout may be ahead after this iteration. `before_update` is called between rollout and update: an
        iteration that has come so far changes the policy, and has to be completed.
        """
        begin = time.monotonic_ns()
        summary = self.rollout(iteration)
        before_update()
        sent = self.rollouts.send_remaining(iteration)
        environments = self.rollout_worker.call(RolloutRole.snapshot)
        self.prepare_update(iteration, drain)
        scoring = self.rollouts.await_received(sent)
        learned = merged_update(self.learner.call_all(LearnerRole.finish, iteration))
        self._mark_update(sent.begin_ns, learned)
        self.finish_update(iteration, drain)
        learned |= {"time/switch_s": self.offload.seconds} | scoring
        spans = (*summary.spans, *self.spans.take())
        return Iteration(summary, learned, environments, begin, time.monotonic_ns(), spans)

    def rollout(self, iteration: int) -> RolloutSummary:
        """Collect a rollout with the weights that were published last."""
        return self.rollouts.collect(iteration)

    def prepare_update(self, iteration: int, drain: bool) -> None:
        """The step after the trajectories are on their way to the learner: in the plain order there is none."""

    def finish_update(self, iteration: int, drain: bool) -> None:
        """Publish the weights that the learner has updated."""
        self.publish(iteration + 1)

    def publish(self, version: int) -> None:
        """Bring the learner's weights, which have seen `version` updates, to all policy workers."""
        begin = time.monotonic_ns()
        self.weight_sync.publish(version)
        self.spans.mark("driver", "publish weights", begin, path=self.weight_sync.path)

    def _mark_update(self, begin_ns: int, learned: dict[str, float]) -> None:
        end_ns, update_ns = time.monotonic_ns(), int(learned["learner/update_s"] * 1e9)
        self.spans.mark("driver", "update", begin_ns, end_ns, trajectories=self.delivery.path)
        self.spans.mark(self.learner.name, "update", end_ns - update_ns, end_ns)

    # --- checkpoints

    def load(self, folder: Path) -> None:
        """Load a verified checkpoint into the learner."""
        self.learner.call_all(LearnerRole.load, folder)

    def save(self, root: Path, state: checkpoint.RunState, environments: Environments) -> None:
        """Begin to write a checkpoint of the current state, once the one before is complete.

        Raises `CheckpointError` if it cannot be begun, or if the one before could not be written and `saved` has not
        raised that yet.
        """
        self.learner.call_all(LearnerRole.save, root, state, environments)

    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return any(self.learner.call_all(LearnerRole.saving))

    def saves_on(self) -> bool:
        """True if, after a loss, the learner's ranks answer, so that a checkpoint that they write will be complete. A
        rank whose peer has failed waits for that one and does not answer. Raises the failure of a rank that is gone."""
        return self.learner.answers(self.learner.submit_all(LearnerRole.saving), ANSWER_S)

    def saved(self) -> Written | None:
        """Wait until the last checkpoint is complete; when it was written, None without one. Raises `CheckpointError`
        if it could not be."""
        writes = [written for written in self.learner.call_all(LearnerRole.saved) if written is not None]
        return Written(min(one.begin_ns for one in writes), max(one.end_ns for one in writes)) if writes else None


@dataclass(kw_only=True)
class OneAhead(OnPolicy):
    """The next rollout is collected during the update, with the weights before it."""

    _published: int = field(default=-1, init=False)

    def publish(self, version: int) -> None:
        super().publish(version)
        self._published = version

    def prepare_update(self, iteration: int, drain: bool) -> None:
        if drain:
            return
        if self._published < iteration:
            self.publish(iteration)
        self.rollouts.start_ahead()

    def finish_update(self, iteration: int, drain: bool) -> None:
        if drain:
            self.publish(iteration + 1)


@dataclass(kw_only=True)
class Offloaded(OnPolicy):
    """Policy workers with renderers, and the learner, take turns in a device's memory."""

    def rollout(self, iteration: int) -> RolloutSummary:
        self.offload.seconds = 0.0
        self.offload.draw_again()
        return super().rollout(iteration)

    def prepare_update(self, iteration: int, drain: bool) -> None:
        self.offload.to_learner()

    def finish_update(self, iteration: int, drain: bool) -> None:
        self.offload.acting_back()
        self.publish(iteration + 1)
        self.offload.learner_leaves()

    def save(self, root: Path, state: checkpoint.RunState, environments: Environments) -> None:
        self.learner.call_all(LearnerRole.load_back)
        try:
            super().save(root, state, environments)
        finally:
            self.offload.unload_learner()


def merged_update(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of an update from those of each rank, which are equal except for times and frames read."""
    merged = dict(ranks[0])
    for name in ("learner/frames_read", "learner/frame_copies"):
        if name in merged:
            merged[name] = sum(rank.get(name, 0) for rank in ranks)
    merged["learner/update_s"] = max(rank["learner/update_s"] for rank in ranks)
    return merged | {"learner/ranks": float(len(ranks))}


# --- rollouts, and their way to the learner


@dataclass(frozen=True)
class SentTrajectories:
    """Trajectories on their way to the learner: references to the results of its calls."""

    begin_ns: int
    scoring: tuple[tuple[str, list[Any]], ...] = ()
    """Scorers that the trajectories pass through, in this order."""
    receiving: Any = None
    """The learner's; None: it has received all parts during the rollout."""


@dataclass
class Rollouts:
    """Rollouts of a fixed number of decisions per environment."""

    run: RunWorkers
    scoring_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each scorer has worked on this iteration's trajectories."""
    _ahead: Any = None
    """Reference to the summary of the rollout that runs ahead of the update, if there is one."""

    def start_ahead(self) -> None:
        """Start the next iteration's rollout with the weights that were published last."""
        self._ahead = self.start()

    def start(self) -> Any:
        """Start a rollout with the weights that were published last; a reference to its summary."""
        run = self.run
        return run.rollout_worker.submit(RolloutRole.rollout, run.spec.config.rollout.decisions, run.farm_deadline_s)

    def wait(self, started: Any) -> RolloutSummary:
        """Wait until the rollout is complete. Raises a replica's failure, which names the replica."""
        summary: RolloutSummary = self.run.rollout_worker.get_one(0, started)
        return summary

    def collect(self, iteration: int) -> RolloutSummary:
        """Collect the iteration's rollout: the one that runs ahead, or a new one."""
        self.scoring_s = {}
        begin = time.monotonic_ns()
        summary = self.wait(self._take_ahead() or self.start())
        self.run.spans.mark("driver", "rollout", begin)
        return summary

    def send_remaining(self, iteration: int) -> SentTrajectories:
        """Send the remaining trajectories after `collect`: in this class all, through the scorers to the learner."""
        begin = time.monotonic_ns()
        source: WorkerGroup[Any] = self.run.rollout_worker
        produce: Any = RolloutRole.trajectories
        scoring = []
        for name, scorer in self.run.scorers.items():
            scoring.append((name, scorer.pipe(ScorerRole.receive, source, produce, iteration)))
            source, produce = scorer, ScorerRole.trajectories
        return SentTrajectories(begin, tuple(scoring), self.run.delivery.send(source, produce, iteration))

    def await_received(self, sent: SentTrajectories) -> dict[str, float]:
        """Wait until the learner has received the trajectories; metrics of the iteration. A scorer's failure is raised
        before those that follow from it."""
        self._await_received(sent)
        return self._scoring_metrics()

    def _await_received(self, sent: SentTrajectories) -> ReceivedPart:
        for name, references in sent.scoring:
            self.scoring_s[name] = self.scoring_s.get(name, 0.0) + sum(self.run.scorers[name].get(references))
        ranks = self.run.learner.get(sent.receiving)
        return replace(ranks[0], learn_s=max(part.learn_s for part in ranks))

    def _scoring_metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self.scoring_s.items()}

    def _take_ahead(self) -> Any:
        started, self._ahead = self._ahead, None
        return started


@dataclass
class RolloutsInParts(Rollouts):
    """Rollouts of whole episodes, in parts of complete episode groups."""

    informative_groups: int = 0
    """Episode groups of this iteration that the estimator keeps: for grpo those whose outcomes differ; for reinforce
    all."""

    def start(self, part: EpisodePart | None = None) -> Any:
        """Start a part of a rollout, by default its first, with the weights that were published last."""
        run, settings = self.run, self.run.spec.config.rollout
        part = part or next(self.parts())
        # If the outcomes of a part decide whether there is another, no environment may begin that too early.
        limit = -(-part.stop // run.spec.environments) if settings.max_episodes_per_env else settings.episodes_per_env
        return run.rollout_worker.submit(RolloutRole.rollout_episodes, part, limit, run.farm_deadline_s)

    def collect(self, iteration: int) -> RolloutSummary:
        """Collect the iteration's parts, and send each when it is complete."""
        settings = self.run.spec.config.rollout
        wanted = self.run.spec.environments * settings.episodes_per_env // settings.episode_group
        total: RolloutSummary | None = None
        waiting: list[SentTrajectories] = []
        self.scoring_s, self.informative_groups = {}, 0
        for number, part in enumerate(self.parts()):
            begin = time.monotonic_ns()
            summary = self.wait(self._take_ahead() or self.start(part))
            self.run.spans.mark("driver", f"roll out part {number}", begin)
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
        settings, environments = self.run.spec.config.rollout, self.run.spec.environments
        flows = self.run.spec.streams and not settings.max_episodes_per_env
        size = (self.run.assignment.part if flows else 0) or environments
        items = (settings.max_episodes_per_env or settings.episodes_per_env) * environments
        return (EpisodePart(start, min(start + size, items)) for start in range(0, items, size))


@contextmanager
def start_run(spec: RunSpec, run_dir: Path, session: Session, assignment: Assignment) -> Iterator[OnPolicy]:
    """Start the run's workers, which end with the block, and iterate in the order of the assignment.

    Raises as `start_workers` does.
    """
    order = OneAhead if assignment.ahead else Offloaded if assignment.unload else OnPolicy
    with start_workers(order, spec, run_dir, session, assignment) as run:
        yield run
