"""The executor: runs iterations of any workflow by any assignment.

    rollout, in parts -> each part through the components after it -> update -> weights to the rollout_worker

It knows the roles of workers (`embodied.execution.roles`), not the components' names. The last component of the loop is
the rollout_worker, the last after the rollout the learner, and trajectories pass through the scorers between them. Where the
rollout_worker's component has several instances, or one on another machine, these act, and a worker beside them is the
rollout_worker. The assignment sets the order of their work: the learner works on a part while the next part is rolled out, or
afterwards; the next rollout begins after the update, or one update ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.acting_workers import check_replicas
from embodied.execution.assignment import Assignment
from embodied.execution.farm_specs import frame_rows, run_specs
from embodied.execution.hand_over import HandOver, hand_over_of
from embodied.execution.learner_ranks import (
    collected_by_ranks,
    ranks_of,
    saved_by_ranks,
    update_of_ranks,
)
from embodied.execution.placement import check_workflow, place_workers, processes_here
from embodied.execution.roles import LearnerRole, PolicyRole, RolloutRole, ScorerRole
from embodied.execution.row_delivery import RowDelivery, place_delivery
from embodied.execution.run_offload import RunOffload
from embodied.execution.session import Session
from embodied.learning.update_record import CollectStatistics
from embodied.rollout.rollout_summary import EpisodePart, RolloutSummary
from embodied.run import checkpoint
from embodied.run.background_writer import Written
from embodied.run.trace import Span
from embodied.runtime.groups import WorkerGroup
from embodied.trajectories.memory import TrajectoryMemory
from embodied.workflows.recipes import Recipe, recipe_of
from embodied.workflows.sizes import check_ranks, streams
from sim_farm.client.farm import Farm

PARTS_AHEAD = 2
"""Parts of an iteration that may wait for the learner; the rollout then waits too, so that memory is bounded."""
ANSWER_S = 5.0
"""Longest wait for a rank to say, after a loss, whether it still writes."""


@dataclass(frozen=True)
class Iteration:
    """What one iteration was."""

    summary: RolloutSummary
    learned: dict[str, float]
    environments: dict[str, np.ndarray]
    """Where the environments were when the rollout had ended."""
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class _Sent:
    """A part on its way to the learner."""

    passing: tuple[tuple[str, Any], ...]
    """Of each scorer its name, and references to the seconds that its ranks take."""
    collecting: Any
    """References to what the learner says."""


@dataclass
class Executor:
    """A run's workers, placed by an assignment. Use `executor` to make one."""

    config: Config
    recipe: Recipe
    assignment: Assignment
    farm: Farm
    workers: Mapping[str, WorkerGroup[Any]]
    """Of each component that is no simulator, by its name."""
    memory: TrajectoryMemory
    hand_over: HandOver
    delivery: RowDelivery
    offload: RunOffload
    farm_deadline_s: float
    """The rollout_worker's deadline for its farm. It is shorter than the deadline of the call, whose message could not name
    the late worker of the farm."""
    looping: WorkerGroup[RolloutRole] | None = None
    """The rollout_worker, where it does not act by itself."""
    _next: Any = None
    """Reference to the summary of the rollout that runs ahead of the update, where there is one."""
    _published: int = -1
    """Updates that the rollout_worker's weights have seen."""
    _returns: list[Span] = field(default_factory=list)
    """The switches with which the iteration began: of renderers that came back."""
    _passed_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each scorer has worked in this iteration."""
    _taught: int = 0
    """Episode groups of this iteration that the estimator keeps: of grpo those whose outcomes differ; of reinforce
    all."""

    @property
    def rollout_worker(self) -> WorkerGroup[RolloutRole]:
        return self.looping or self.workers[self.recipe.loop[-1]]

    @property
    def acting(self) -> WorkerGroup[PolicyRole]:
        """The rollout_worker itself, or the replicas."""
        return self.workers[self.recipe.loop[-1]]

    @property
    def learner(self) -> WorkerGroup[LearnerRole]:
        return self.workers[self.recipe.after_rollout[-1].name]

    def begin(self, environments: dict[str, np.ndarray] | None, version: int) -> None:
        """Start the environments, or continue where `environments` say they were; the weights have seen `version`
        updates."""
        self.publish(version)
        self.rollout_worker.call(RolloutRole.begin, environments, self._by_episodes)

    def load(self, folder: Path) -> None:
        """Give the learner a verified checkpoint."""
        self.learner.call_all(LearnerRole.load, folder)

    def save(self, root: Path, state: checkpoint.RunState, environments: dict[str, np.ndarray]) -> None:
        """Begin to write a checkpoint of what is now, once the one before is complete.

        Raises `CheckpointError` where it cannot be begun; or where the one before could not be written, which `saved`
        tells first if it is asked.
        """
        unloads = self.assignment.unload
        if unloads:
            self.learner.call_all(LearnerRole.load_back)
        try:
            self.learner.call_all(LearnerRole.save, root, state, environments)
        finally:
            if unloads:
                self.offload.unload_learner()

    def saving(self) -> bool:
        """Whether a checkpoint is being written at the moment."""
        return any(self.learner.call_all(LearnerRole.saving))

    def saves_on(self) -> bool:
        """After a loss: whether the learner's ranks answer, and a checkpoint that they write will be complete. A rank
        whose peer has failed waits for that one, and answers nobody. Raises the failure of one that is gone."""
        return self.learner.answers(self.learner.submit_all(LearnerRole.saving), ANSWER_S)

    def saved(self) -> Written | None:
        """Wait until the last checkpoint is complete; when it was written. Raises `CheckpointError` where it could not
        be."""
        return saved_by_ranks(self.learner)

    def rollout(self, iteration: int) -> tuple[RolloutSummary, list[Span]]:
        """The iteration's rollout, on its way to the learner. May be interrupted."""
        self.offload.seconds = 0.0
        self._returns = self.offload.draw_again()
        self._passed_s = {}
        spans: list[Span] = []
        if self._by_episodes:
            return self._rollout_parts(iteration, spans), [*self._returns, *spans]
        begin = time.monotonic_ns()
        summary = self._rolled(self._begun())
        self._mark(spans, "driver", "rollout", begin)
        return summary, [*self._returns, *spans]

    def learn(self, iteration: int, drain: bool) -> tuple[dict[str, float], dict[str, np.ndarray], list[Span]]:
        """Update the policy from the rollout and publish it; with `drain`, no rollout begins before that."""
        begin = time.monotonic_ns()
        ahead = self.assignment.ahead > 0 and not drain
        sent = None if self._by_episodes else self._send(iteration)
        environments = self.rollout_worker.call(RolloutRole.snapshot)
        switches = self.offload.to_learner() if self.assignment.unload else []
        spans: list[Span] = []
        if ahead:
            if self._published < iteration:
                self._hand_over_weights(iteration, spans)
            self._next = self._start()
        if sent is not None:
            self._collected(sent)
        learned = update_of_ranks(self.learner.call_all(LearnerRole.finish, iteration))
        updated = time.monotonic_ns()
        update_ns = int(learned["learner/update_s"] * 1e9)
        self._mark(spans, "driver", "update", begin, updated, trajectories=self.trajectories_path)
        self._mark(spans, self.learner.name, "update", updated - update_ns, updated)
        if self.assignment.unload:
            switches += self.offload.acting_back()
        if not ahead:
            self._hand_over_weights(iteration + 1, spans)
        if self.assignment.unload:
            switches += self.offload.learner_leaves()
        learned["time/switch_s"] = self.offload.seconds
        learned |= {f"time/{name}_s": seconds for name, seconds in self._passed_s.items()}
        if self._by_episodes:
            learned["learner/teaching_groups"] = float(self._taught)
        return learned, environments, spans + switches

    def iterate(self, iteration: int, drain: bool = False) -> Iteration:
        """One whole iteration."""
        begin = time.monotonic_ns()
        summary, spans = self.rollout(iteration)
        learned, environments, more = self.learn(iteration, drain)
        every = (*summary.spans, *spans, *more)
        return Iteration(summary, learned, environments, begin, time.monotonic_ns(), every)

    @property
    def weights_path(self) -> str:
        """How weights travel from learner to who acts."""
        return self.hand_over.path

    @property
    def trajectories_path(self) -> str:
        """How trajectories travel."""
        return self.delivery.path

    @property
    def _environments(self) -> int:
        """Of all tasks."""
        return sum(spec.num_envs for spec in self.farm.specs)

    @property
    def _by_episodes(self) -> bool:
        return self.recipe.rollout == "episodes"

    def _parts(self) -> Iterator[EpisodePart]:
        """An iteration's episodes in the parts that are handed on: the plan's, where they may flow."""
        settings = self.config.rollout
        environments = self._environments
        flows = streams(self.config) and not settings.max_episodes_per_env
        size = (self.assignment.part if flows else 0) or environments
        items = (settings.max_episodes_per_env or settings.episodes_per_env) * environments
        return (EpisodePart(start, min(start + size, items)) for start in range(0, items, size))

    def _start(self, part: EpisodePart | None = None) -> Any:
        """Begin a rollout, or a part of one, with the weights that were published last; a reference to its summary."""
        settings = self.config.rollout
        if not self._by_episodes:
            return self.rollout_worker.submit(RolloutRole.rollout, settings.decisions, self.farm_deadline_s)
        part = part or next(self._parts())
        # Where a part decides whether there is another, nobody may begin that before it is known.
        limit = -(-part.stop // self._environments) if settings.max_episodes_per_env else settings.episodes_per_env
        return self.rollout_worker.submit(RolloutRole.rollout_episodes, part, limit, self.farm_deadline_s)

    def _rolled(self, begun: Any) -> RolloutSummary:
        """Wait for a rollout. Raises a replica's failure with its name."""
        summary: RolloutSummary = self.rollout_worker.get_one(0, begun)
        return summary

    def _begun(self, part: EpisodePart | None = None) -> Any:
        """The rollout that runs ahead, or a new one."""
        begun, self._next = self._next, None
        return self._start(part) if begun is None else begun

    def _rollout_parts(self, iteration: int, spans: list[Span]) -> RolloutSummary:
        """Part after part, each handed on when it is complete."""
        settings = self.config.rollout
        wanted = self._environments * settings.episodes_per_env // settings.episode_group
        total: RolloutSummary | None = None
        waiting: list[_Sent] = []
        self._taught = 0
        for number, part in enumerate(self._parts()):
            begin = time.monotonic_ns()
            summary = self._rolled(self._begun(part))
            self._mark(spans, "driver", f"roll out part {number}", begin)
            total = summary if total is None else total + summary
            waiting.append(self._send(iteration))
            while len(waiting) > (0 if settings.max_episodes_per_env else PARTS_AHEAD):
                self._taught += self._collected(waiting.pop(0)).groups
            if settings.max_episodes_per_env and self._taught >= wanted:
                break
        for sent in waiting:
            self._taught += self._collected(sent).groups
        assert total is not None
        return total

    def _send(self, iteration: int) -> _Sent:
        """Send the rolled-out trajectories through the scorers to the learner; `_collected` waits for its answer."""
        source: WorkerGroup[Any] = self.rollout_worker
        produce: Any = RolloutRole.trajectories
        passing = []
        for component in self.recipe.after_rollout[:-1]:
            scorer: WorkerGroup[ScorerRole] = self.workers[component.name]
            passing.append((component.name, scorer.pipe(ScorerRole.receive, source, produce, iteration)))
            source, produce = scorer, ScorerRole.trajectories
        return _Sent(tuple(passing), self.delivery.send(source, produce, iteration))

    def _collected(self, sent: _Sent) -> CollectStatistics:
        """Wait until a part is collected. A scorer's failure is raised before those that follow from it."""
        for name, references in sent.passing:
            self._passed_s[name] = self._passed_s.get(name, 0.0) + sum(self.workers[name].get(references))
        return collected_by_ranks(self.learner.get(sent.collecting))

    def _mark(
        self, spans: list[Span], track: str, name: str, begin_ns: int, end_ns: int | None = None, **args: Any
    ) -> None:
        """Add a span, which ends now unless something else is said, where the run is traced."""
        if self.config.runtime.trace:
            spans.append(Span(track, name, begin_ns, end_ns or time.monotonic_ns(), args))

    def _hand_over_weights(self, version: int, spans: list[Span]) -> None:
        begin = time.monotonic_ns()
        self.publish(version)
        self._mark(spans, "driver", "publish weights", begin, path=self.weights_path)

    def publish(self, version: int) -> None:
        """Bring the learner's weights, which have seen `version` updates, to all who act."""
        self._published = version
        self.hand_over.publish(version)


@contextmanager
def executor(config: Config, run_dir: Path, session: Session, assignment: Assignment) -> Iterator[Executor]:
    """The run's workers, placed by the assignment. They are gone when the block ends.

    Raises `UserError` for tasks that one policy cannot act in, for edges that no worker serves, and for assignments
    that contradict themselves or have more ranks than a minibatch rows.
    """
    recipe = recipe_of(config)
    check_workflow(recipe)
    if assignment.ahead and assignment.unload:
        raise UserError(
            "a plan that runs ahead has nobody to unload, since rollout and learner work at the same time: set ahead 0 "
            "or unload false"
        )
    specs = run_specs(config, assignment)
    check_replicas(config, assignment, sum(spec.groups for spec in specs))
    check_ranks(config, ranks_of(config, assignment))
    session.runtime.prepare(processes_here(config, assignment))
    rows = partial(frame_rows, config, assignment.ahead)
    with session.farm(specs, assignment.farms, rows) as farm:
        placed = place_workers(config, run_dir, session, assignment, farm)
        workers, acts = placed.workers, placed.acting
        farm_deadline_s = session.runtime.deadline.inner().seconds
        layout = acts.workers.call_one(0, PolicyRole.layout)
        trained: WorkerGroup[Any] = workers[recipe.after_rollout[-1].name]
        delivery = place_delivery(session, placed.assignment, acts.loop or acts.workers, trained, farm)
        memory = TrajectoryMemory.create(layout, farm.frames, not farm.in_process)
        hand_over = hand_over_of(trained, acts.workers, placed.assignment, farm_deadline_s)
        offload = RunOffload(
            farm, acts.loop or acts.workers, acts.workers, placed.assignment, trained, run_dir, farm_deadline_s,
            config.runtime.trace,
        )  # fmt: skip
        run = Executor(
            config, recipe, placed.assignment, farm, workers, memory, hand_over, delivery, offload, farm_deadline_s,
            acts.loop,
        )  # fmt: skip
        try:
            delivery.use(memory)
            acts.use(memory)
            yield run
            run.learner.call_all(LearnerRole.leave)
            for group in (*workers.values(), *acts.helpers, *delivery.helpers):
                group.end()
        finally:
            memory.close()
        for left in run_dir.glob("unloaded-*.safetensors"):
            left.unlink()
