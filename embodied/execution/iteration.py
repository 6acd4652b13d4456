"""One iteration of training, in the orders in which a plan may have it done.

    collect a rollout -> estimate advantages and update the policy -> publish its weights

`OnPolicy` is the plain case. `OneAhead` collects the next rollout during the update; `Offloaded` moves policy workers
and learner into and out of a device's memory between the steps. A variation changes when a step begins, never what it
computes. The steps themselves are those of `RunWorkers`; rollouts of episodes in parts are `RolloutsInParts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodied.config.schema import Config
from embodied.execution.assignment import Assignment
from embodied.execution.roles import LearnerRole
from embodied.execution.run_workers import RunWorkers, start_workers
from embodied.execution.session import Session
from embodied.rollout.rollout_summary import RolloutSummary
from embodied.run import checkpoint
from embodied.run.trace import Span

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


class OnPolicy(RunWorkers):
    """The plain iteration: each step begins when the one before is complete."""

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
        metrics, environments = self.learn(iteration, drain)
        spans = (*summary.spans, *self.spans.take())
        return Iteration(summary, metrics, environments, begin, time.monotonic_ns(), spans)

    def rollout(self, iteration: int) -> RolloutSummary:
        """Collect a rollout with the weights that were published last."""
        return self.rollouts.collect(iteration)

    def learn(self, iteration: int, drain: bool = False) -> tuple[dict[str, float], Environments]:
        """Send the trajectories to the learner, take a snapshot of the environments, update the policy, publish."""
        sent = self.rollouts.send_remaining(iteration)
        environments = self.snapshot()
        metrics = self.update(iteration, sent)
        self.publish(iteration + 1)
        return metrics, environments


class OneAhead(OnPolicy):
    """The next rollout is collected during the update, with the weights before it."""

    def publish(self, version: int) -> None:
        super().publish(version)
        self._published = version

    def learn(self, iteration: int, drain: bool = False) -> tuple[dict[str, float], Environments]:
        if drain:
            return super().learn(iteration)
        sent = self.rollouts.send_remaining(iteration)
        environments = self.snapshot()
        if self._published < iteration:
            self.publish(iteration)
        self.rollouts.start_ahead()
        return self.update(iteration, sent), environments


class Offloaded(OnPolicy):
    """Policy workers with renderers, and the learner, take turns in a device's memory."""

    def rollout(self, iteration: int) -> RolloutSummary:
        self.offload.seconds = 0.0
        self.spans.add(self.offload.draw_again())
        return super().rollout(iteration)

    def learn(self, iteration: int, drain: bool = False) -> tuple[dict[str, float], Environments]:
        sent = self.rollouts.send_remaining(iteration)
        environments = self.snapshot()
        self.spans.add(self.offload.to_learner())
        metrics = self.update(iteration, sent)
        self.spans.add(self.offload.acting_back())
        self.publish(iteration + 1)
        self.spans.add(self.offload.learner_leaves())
        return {**metrics, "time/switch_s": self.offload.seconds}, environments

    def save(self, root: Path, state: checkpoint.RunState, environments: Environments) -> None:
        self.learner.call_all(LearnerRole.load_back)
        try:
            super().save(root, state, environments)
        finally:
            self.offload.unload_learner()


@contextmanager
def start_run(config: Config, run_dir: Path, session: Session, assignment: Assignment) -> Iterator[OnPolicy]:
    """Start the run's workers, which end with the block, and iterate in the order of the assignment.

    Raises as `start_workers` does.
    """
    order = OneAhead if assignment.ahead else Offloaded if assignment.unload else OnPolicy
    with start_workers(order, config, run_dir, session, assignment) as run:
        yield run
