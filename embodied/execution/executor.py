"""The executor: runs iterations of any workflow by any assignment.

    rollout, in parts -> each part to the learner -> update -> weights to the policy

What an assignment changes is who waits for whom: the learner works on a part while the next is rolled out, or
afterwards; the next rollout begins after the update, or one update ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from embodied import checkpoint
from embodied.config import Config
from embodied.errors import UserError
from embodied.execution.assignment import Assignment
from embodied.execution.farm_specs import farm_spec
from embodied.execution.session import Session
from embodied.runtime.handles import Handle
from embodied.tracing import Span
from embodied.workers.learner import CollectStatistics, Learner
from embodied.workers.makers import check_same_sizes, make_learner, make_policy_worker, policy_spec
from embodied.workers.offload import Switch
from embodied.workers.policy_worker import PolicyWorker, RolloutSummary
from embodied.workflows.recipes import configs_of_tasks, episodes_of, recipe_of
from sim_farm.farm import Farm

PARTS_AHEAD = 2
"""Parts of an iteration that may wait for the learner; the rollout then waits too, so that memory is bounded."""


@dataclass(frozen=True)
class Iteration:
    """What one iteration was."""

    rollouts: tuple[RolloutSummary, ...]
    """Of each task, one after the other."""
    learned: dict[str, float]
    environments: dict[str, np.ndarray]
    """Where the environments were when the rollout had ended."""
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]

    @property
    def summary(self) -> RolloutSummary:
        """Of all tasks together."""
        return reduce(add, self.rollouts)

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def of_task(self, number: int, share: float) -> Iteration:
        """As if it had been of that task alone: its rollout, and its share of all that was not rollout."""
        mine = self.rollouts[number]
        rest_s = self.wall_s - self.summary.wall_s
        end_ns = self.begin_ns + round(1e9 * (mine.wall_s + share * rest_s))
        learned = {**self.learned, "time/switch_s": share * self.learned["time/switch_s"]}
        return replace(self, rollouts=(mine,), learned=learned, end_ns=end_ns, spans=())


@dataclass
class Executor:
    """A run's workers, placed by an assignment. Use `executor` to make one."""

    config: Config
    assignment: Assignment
    farm: Farm
    policy: Handle[PolicyWorker]
    learner: Handle[Learner]
    run_dir: Path
    others: tuple[Executor, ...] = ()
    """Of the run's further tasks: farms and policy workers of their own, and the same learner."""
    _next: Any = None
    """The rollout that runs ahead of the update, where there is one."""
    _published: int = -1
    """Updates that the policy worker's weights have seen."""
    _renderers_away: bool = False
    _returns: tuple[Span, ...] = ()
    """The switches with which the iteration began: of renderers that came back."""

    def begin(self, environments: dict[str, np.ndarray] | None, version: int) -> None:
        """Start the environments, or continue where `environments` say they were; the weights have seen `version`
        updates."""
        for number, lane in enumerate(self._lanes):
            if lane.assignment.one_process:
                lane.policy.fetch(lane.policy.feed(PolicyWorker.share, self.learner, Learner.own_policy))
            lane._publish(version)
            mine = None if environments is None else _of_task(environments, number)
            lane.policy.call(PolicyWorker.begin, mine, self._by_episodes)

    def load(self, folder: Path) -> None:
        """Give the learner a verified checkpoint."""
        self.learner.call(Learner.load, folder)

    def save(self, root: Path, state: checkpoint.RunState, environments: dict[str, np.ndarray]) -> None:
        if self._unloads:
            self.learner.call(Learner.load_back)
        self.learner.call(Learner.save, root, state, environments)
        if self._unloads:
            self.learner.call(Learner.unload, self._weights_leave)

    def rollout(self, iteration: int) -> tuple[tuple[RolloutSummary, ...], list[Span]]:
        """The iteration's rollouts, task after task, on their way to the learner. May be interrupted."""
        self._returns = tuple(span for lane in self._lanes for span in lane._draw_again())
        # What runs ahead is under way: it ends before others begin, so that nobody competes for cores.
        order = sorted(range(len(self._lanes)), key=lambda number: self._lanes[number]._next is None)
        rolled = {number: self._lanes[number]._rollout(iteration) for number in order}
        summaries, spans = zip(*(rolled[number] for number in sorted(rolled)), strict=True)
        return summaries, [*self._returns, *chain(*spans)]

    def _rollout(self, iteration: int) -> tuple[RolloutSummary, list[Span]]:
        spans: list[Span] = []
        if not self._by_episodes:
            begin = time.monotonic_ns()
            summary = self.policy.fetch(self._begun())
            spans.append(Span("driver", "rollout", begin, time.monotonic_ns()))
            return summary, spans
        return self._waves_of(iteration, spans)

    def learn(self, iteration: int, drain: bool) -> tuple[dict[str, float], dict[str, np.ndarray], list[Span]]:
        """Update the policy from the rollout and publish it; with `drain`, no rollout begins before that."""
        begin = time.monotonic_ns()
        ahead = [] if drain else [lane for lane in self._lanes if lane.assignment.ahead]
        fed = [] if self._by_episodes else [lane._feed(iteration) for lane in self._lanes]
        environments = _join_tasks([lane.policy.call(PolicyWorker.snapshot) for lane in self._lanes])
        switches = self._to_learner() if self._unloads else []
        self._start_ahead(ahead, iteration)
        for reference in fed:
            self._collected(reference)
        learned = self.learner.call(Learner.finish, iteration)
        updated = time.monotonic_ns()
        update_ns = int(learned["learner/update_s"] * 1e9)
        spans = [
            Span("driver", "update", begin, updated, {"trajectories": self.trajectories_path}),
            Span("learner", "update", updated - update_ns, updated),
        ]
        switches += [self._switch(lane.policy, PolicyWorker.load_back) for lane in self._lanes if lane._policy_leaves]
        behind = [lane for lane in self._lanes if drain or not lane.assignment.ahead]
        if behind:
            begin = time.monotonic_ns()
            for lane in behind:
                lane._publish(iteration + 1)
            spans.append(Span("driver", "publish weights", begin, time.monotonic_ns(), {"path": self.weights_path}))
        if self._unloads:
            switches.append(self._switch(self.learner, Learner.unload, self._weights_leave))
        learned["time/switch_s"] = sum(span.end_ns - span.start_ns for span in (*self._returns, *switches)) / 1e9
        return learned, environments, spans + switches

    def iterate(self, iteration: int, drain: bool = False) -> Iteration:
        """One whole iteration."""
        begin = time.monotonic_ns()
        rollouts, spans = self.rollout(iteration)
        learned, environments, more = self.learn(iteration, drain)
        seen = [span for rollout in rollouts for span in rollout.spans]
        return Iteration(rollouts, learned, environments, begin, time.monotonic_ns(), (*seen, *spans, *more))

    def switches(self) -> dict[str, tuple[Switch, Switch]]:
        """Let the learner with its weights, the policy, and the renderers leave the memory and come back, once each."""
        found = {
            "learner": (self.learner.call(Learner.unload, True), self.learner.call(Learner.load_back)),
            "policy": (self.policy.call(PolicyWorker.unload, self._spill), self.policy.call(PolicyWorker.load_back)),
        }
        if self.farm.info.cameras:
            found["render"] = (
                self.policy.call(PolicyWorker.unload_renderers, self._farm_deadline_s),
                self.policy.call(PolicyWorker.load_renderers, self._farm_deadline_s),
            )
        return found

    @property
    def _lanes(self) -> tuple[Executor, ...]:
        return (self, *self.others)

    @property
    def weights_path(self) -> str:
        """The way that weights take from learner to policy worker."""
        return "the same policy" if self.assignment.one_process else self.policy.path_from(self.learner)

    @property
    def trajectories_path(self) -> str:
        return self.learner.path_from(self.policy)

    @property
    def _unloads(self) -> bool:
        """Whether the learner takes turns with any of the tasks."""
        return any(lane.assignment.unload for lane in self._lanes)

    @property
    def _weights_leave(self) -> bool:
        """Whether the learner's weights leave with its optimiser: not where a policy worker acts with them."""
        return not any(lane.assignment.one_process for lane in self._lanes)

    @property
    def _policy_leaves(self) -> bool:
        return self.assignment.unload and not self.assignment.one_process

    @property
    def _spill(self) -> Path:
        return self.run_dir / f"unloaded-{self.policy.name.replace(' ', '-')}.safetensors"

    @property
    def _farm_deadline_s(self) -> float:
        """Of what a policy worker asks of its farm: sooner than the call's own, whose message could not name who in the
        farm is late."""
        return self.config.runtime.deadline_s / 2

    @property
    def _by_episodes(self) -> bool:
        return recipe_of(self.config).rollout == "episodes"

    @staticmethod
    def _start_ahead(lanes: Sequence[Executor], iteration: int) -> None:
        """Begin the tasks' next rollouts, one after the other, with the weights that have seen `iteration` updates."""
        before = None
        for lane in lanes:
            if lane._published < iteration:
                lane._publish(iteration)
            before = lane._next = lane._start(after=before)

    def _start(self, wave: int = 0, after: Any = None) -> Any:
        """Begin a rollout, or the wave of that number of one, with the weights that were published last; `after`
        another task's."""
        deadline_s = self.config.runtime.deadline_s
        if not self._by_episodes:
            return self.policy.refer(PolicyWorker.rollout, self.config.rollout.decisions, deadline_s, after)
        group = self.config.rollout
        # Where a wave's groups decide whether there is another, nobody may begin it before that is known.
        ahead = 1 if group.max_episodes_per_env else group.episodes_per_env - wave
        return self.policy.refer(PolicyWorker.rollout_wave, ahead, deadline_s, after)

    def _begun(self) -> Any:
        """The rollout that runs ahead, or a new one."""
        begun, self._next = self._next, None
        return self._start() if begun is None else begun

    def _feed(self, iteration: int) -> Any:
        return self.learner.feed(Learner.collect, self.policy, PolicyWorker.trajectories, iteration)

    def _waves_of(self, iteration: int, spans: list[Span]) -> tuple[RolloutSummary, list[Span]]:
        """Wave after wave, each handed to the learner when it is complete."""
        group = self.config.rollout
        wanted = self.config.env.num_envs * group.episodes_per_env // group.episode_group
        total: RolloutSummary | None = None
        waiting: list[Any] = []
        taught = 0
        for number in range(group.max_episodes_per_env or group.episodes_per_env):
            begin = time.monotonic_ns()
            summary = self.policy.fetch(self._start(number) if number else self._begun())
            spans.append(Span("driver", f"roll out wave {number}", begin, time.monotonic_ns()))
            total = summary if total is None else total + summary
            waiting.append(self._feed(iteration))
            while len(waiting) > (0 if group.max_episodes_per_env else PARTS_AHEAD):
                taught += self._collected(waiting.pop(0)).groups
            if group.max_episodes_per_env and taught >= wanted:
                break
        for reference in waiting:
            self._collected(reference)
        assert total is not None
        return total, spans

    def _to_learner(self) -> list[Span]:
        """Policy workers and renderers leave the device's memory, and the learner comes back to it."""
        left = [span for lane in self._lanes for span in lane._leave()]
        return [*left, self._switch(self.learner, Learner.load_back)]

    def _leave(self) -> list[Span]:
        """The task's policy worker and renderers leave."""
        spans = [self._switch(self.policy, PolicyWorker.unload, self._spill)] if self._policy_leaves else []
        if self.assignment.unload and self.farm.info.cameras:
            self._renderers_away = True
            spans.append(self._switch_renderers(PolicyWorker.unload_renderers))
        return spans

    def _draw_again(self) -> list[Span]:
        """The task's renderers come back. Only before the rollout: until then a checkpoint may need the room."""
        if not self._renderers_away:
            return []
        self._renderers_away = False
        return [self._switch_renderers(PolicyWorker.load_renderers)]

    def _switch_renderers(self, method: Any) -> Span:
        span = self._switch(self.policy, method, self._farm_deadline_s)
        return replace(span, args={**span.args, "worker": f"renderers of {self.config.env.task}"})

    def _switch(self, worker: Handle[Any], method: Any, *args: Any) -> Span:
        begin = time.monotonic_ns()
        switched: Switch = worker.call(method, *args)
        return Span("driver", "switch", begin, time.monotonic_ns(), {"worker": worker.name, "bytes": switched.bytes})

    def _collected(self, reference: Any) -> CollectStatistics:
        found: CollectStatistics = self.learner.fetch(reference)
        return found

    def _publish(self, version: int) -> None:
        """Bring the learner's weights, which have seen `version` updates, to the policy worker."""
        self._published = version
        if self.assignment.one_process:
            self.policy.call(PolicyWorker.at_version, version)
        else:
            self.policy.fetch(self.policy.feed(PolicyWorker.load_weights, self.learner, Learner.weights, version))


def _join_tasks(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Positions of several tasks' environments in one record; the first task's keep their names."""
    return {f"{i}.{key}" if i else key: array for i, part in enumerate(parts) for key, array in part.items()}


def _of_task(environments: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """What `_join_tasks` recorded of one task."""
    if number == 0:
        return {key: array for key, array in environments.items() if "." not in key}
    return {k.partition(".")[2]: a for k, a in environments.items() if k.startswith(f"{number}.")}


def _check_turns(assignments: tuple[Assignment, ...]) -> None:
    if any(one.ahead and one.unload for one in assignments):
        raise UserError(
            "a plan that runs ahead has nobody to unload, since rollout and learner work at the same time: set ahead 0 "
            "or unload false"
        )


@contextmanager
def executor(config: Config, run_dir: Path, session: Session, *assignments: Assignment) -> Iterator[Executor]:
    """The run's workers, placed: for each of its tasks by an assignment of its own. They are gone when the block ends.

    Raises `UserError` for tasks that one policy cannot act in, and for assignments that contradict themselves.
    """
    tasks = configs_of_tasks(config)
    _check_turns(assignments)
    session.runtime.prepare(1 if assignments[0].one_process else 2)
    with ExitStack() as stack:
        farms = [
            stack.enter_context(session.farm(farm_spec(task, episodes_of(task, task.seed), assignment), assignment))
            for task, assignment in zip(tasks, assignments, strict=True)
        ]
        sizes = policy_spec(config, farms[0].info)
        for task, farm in zip(tasks, farms, strict=True):
            check_same_sizes(sizes, policy_spec(task, farm.info), task.env.task)
        learner = session.runtime.place("learner", make_learner, config, sizes, run_dir, assignments[0].learner)
        lanes: list[Executor] = []
        for number, (task, farm, assignment) in enumerate(zip(tasks, farms, assignments, strict=True)):
            policy = session.runtime.place(
                f"policy {number}" if number else "policy",
                make_policy_worker,
                task,
                sizes,
                session.reach(farm),
                assignment.policy,
                assignment.one_process,
                beside=learner if assignment.one_process else None,
            )
            lanes.append(Executor(task, assignment, farm, policy, learner, run_dir))
        lanes[0].others = tuple(lanes[1:])
        yield lanes[0]
        for lane in lanes:
            lane.policy.end()
        learner.end()
        for left in run_dir.glob("unloaded-*.safetensors"):
            left.unlink()
