"""The rollout loop: requests decisions of the policy, and has the farm execute them, one environment group at a time.

    until every group is done:  the group that is ready first -> policy -> trajectory memory -> farm

With several groups one is simulated while the policy decides for another; a light task's groups are served while a
heavy one's are simulated. The policy is in the loop's own process (`policy_worker.LocalPolicy`), or replicas in
processes of theirs (`replicas.Replicas`). A decision is a function of the policy, the group's observations and the
noise of their (environment, episode, env step): neither the order of serving nor the replica that decides changes it.
Where another program draws it (`samplers`), its own noise takes that one's place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.rollout.decision_outcomes import ended_before, outcome_before, own_outcome
from embodied.rollout.environment_groups import DecisionRequest, EnvironmentGroup, groups_of, next_group
from embodied.rollout.executed_chunks import Delayed, ExecutedChunks
from embodied.rollout.rollout_summary import Clock, workers_spans
from embodied.run.trace import Span
from embodied.trajectories.batch import EndedEpisode, EpisodeSums, GroupDecision, join_inputs, to_inputs
from embodied.trajectories.memory import FrameCounts, TrajectoryMemory
from embodied.workflows.context import WorkerContext
from policies.contract import Action, Inputs
from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations
from sim_farm.contract import Float32
from sim_farm.observation_history import ObservationHistory


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a run that decide what a rollout computes."""

    reads: tuple[str, ...]
    """Parts of an observation that the policy reads."""
    seeds: tuple[int, ...]
    """Seed of each task, which keys the noise of its decisions."""
    bootstrap: str
    """Ends of episodes whose own final observation is valued: `never`, `truncated` or `always`."""
    rounds: int
    """Decisions of each environment that the trajectory memory keeps at once."""
    published: Path = Path("engine")
    """Folder of weights for another program that samples."""
    delayed: Delayed | None = None
    """Delays of decisions; None: the simulator waits for them."""

    @classmethod
    def of(cls, context: WorkerContext) -> RolloutSettings:
        """The settings of a run."""
        config = context.config
        return cls(
            reads=config.policy.reads,
            seeds=context.run.seeds,
            bootstrap=context.run.bootstrap,
            rounds=context.rounds,
            published=(context.run_dir / "engine").resolve(),
            delayed=Delayed("naive", config.env.delay, config.policy.chunk) if config.env.most_delay else None,
        )


@dataclass(frozen=True)
class Decided:
    """A policy's answer to the request of an environment group."""

    group: EnvironmentGroup
    request: DecisionRequest
    action: Action
    """n rows."""
    begin_ns: int
    end_ns: int
    replica: str | None = None
    """Name of the replica that decided; None: the loop's own process."""


class PolicyClient(Protocol):
    """The policy as the rollout loop uses it: requests are submitted group by group, and decisions arrive later."""

    @property
    def version(self) -> int:
        """Number of updates in the acting weights."""
        ...

    @property
    def replicas(self) -> int: ...

    @property
    def frames(self) -> FrameCounts:
        """Frames that were read and copied for requests so far."""
        ...

    @property
    def spans(self) -> list[Span]:
        """Spans of replicas that valued observations in this rollout."""
        ...

    def begin(self) -> None:
        """Begin a rollout: the weights may have changed since the last one."""
        ...

    def is_free(self) -> bool:
        """True if a request would be worked on at once."""
        ...

    def is_busy(self) -> bool:
        """True if decisions have arrived, or will."""
        ...

    def submit(self, group: EnvironmentGroup, seen: Observations, memory: TrajectoryMemory) -> None:
        """Request a decision for the environments of the group that have an episode."""
        ...

    def arrived(self) -> list[Decided]:
        """Decisions that have arrived since the last call. Raises what a policy raises."""
        ...

    def wait(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until a decision has arrived or `is_ready`, at most `deadline_s` seconds without progress."""
        ...

    def values(self, inputs: Inputs, deadline_s: float) -> Tensor:
        """[B] value of each observation, before an action is executed."""
        ...


class RolloutLoop:
    """The environment groups of a farm, the policy that decides for them, and the memory that both write into."""

    memory: TrajectoryMemory
    finals: FinalObservationsKept

    def __init__(self, farm: Farm, settings: RolloutSettings, policy: PolicyClient, track: str) -> None:
        """`track`: the trace's track of this process."""
        self.farm, self._settings, self.policy, self._track = farm, settings, policy, track
        self.offsets = np.cumsum([0, *(spec.num_envs for spec in farm.specs)])
        """Number of the first environment of each task, and the number of all."""
        self.width = int(self.offsets[-1])
        self.groups = groups_of(farm)
        self.sums = EpisodeSums(self.width)
        self.ended: list[tuple[int, int, EndedEpisode]] = []
        """(number of the environment's episode, number of the decision, episode) that no summary has listed yet."""
        self.clock, self.spans = Clock(), list[Span]()
        self._arrows = 0
        self._chunks: dict[int, ExecutedChunks] = {}
        """Decisions of each environment's episode, where they are delayed."""

    def use(self, memory: TrajectoryMemory) -> None:
        """Write into this memory from now on.

        Raises `ValueError` where final observations would be drawn over the trajectories' own.
        """
        spare = 0 if memory.frames is None else memory.frames.rows - memory.shape.frame_rows.count
        needed = self.width * (1 + memory.shape.history.final)
        if memory.frames is not None and self._settings.bootstrap != "never" and spare < needed:
            raise ValueError(
                f"the frame memory has {spare} rows beyond the trajectories' for final observations of {self.width} "
                f"environments: give it {needed // self.width} for each, as `rows_for_finals` counts"
            )
        self.memory = memory
        self.finals = FinalObservationsKept(memory)

    def begin(self) -> None:
        """Begin a rollout, with clocks at zero."""
        self.clock, self.spans = Clock(replicas=self.policy.replicas), []
        self.policy.begin()

    def serve(
        self,
        done: Callable[[EnvironmentGroup, Observations], bool],
        may_decide: Callable[[EnvironmentGroup, Observations], bool],
        deadline_s: float,
    ) -> None:
        """Serve the group that is ready first until all are `done`; then wait until every group has been stepped, and
        has its observations.

        A group that is done continues to decide, if it `may_decide`, while others are not done.
        """
        unfinished = {group.number for group in self.groups}
        resting: set[int] = set()
        while unfinished:
            group = self._next_group(resting, deadline_s)
            seen = self.observe(group, deadline_s)
            if done(group, seen):
                unfinished.discard(group.number)
            if unfinished and may_decide(group, seen):
                self._request_decision(group, seen)
            else:
                resting.add(group.number)
        self._execute_decisions()
        while self.policy.is_busy():
            self._wait("replicas", lambda: False, deadline_s)
            self._execute_decisions()
        for group in self.groups:
            self.observe(group, deadline_s)

    def wake(self, limit: int, deadline_s: float) -> None:
        """Begin the next episodes where all environments rest at an earlier limit."""
        seen = [self.observe(group, deadline_s) for group in self.groups]
        if not any(now.active.any() for now in seen):
            self.farm.hold(limit)
            for group in self.groups:
                self.reset(group)

    def left_over(self) -> Float32:
        """[B, D, A] what is left of each environment's last decision, D being the largest delay; zeros where an
        environment has decided nothing."""
        delayed = self._settings.delayed
        assert delayed is not None
        found = np.zeros((self.width, delayed.most, self.farm.infos[0].action_dim), np.float32)
        for env, chunks in self._chunks.items():
            if chunks.left_over is not None:
                found[env] = chunks.left_over
        return found

    def continue_chunks(self, left_over: Float32) -> None:
        """Continue the episodes under way with what is left of their last decisions, [B, D, A]."""
        delayed = self._settings.delayed
        assert delayed is not None
        self._chunks = {env: ExecutedChunks(delayed.interval, left_over=one) for env, one in enumerate(left_over)}

    def reset(self, group: EnvironmentGroup) -> None:
        group.observations = None
        rows = self.memory.shape.frame_rows.at_reset(group.row, group.columns)
        self.farm.reset(group.number, None if self.farm.frames is None else rows)

    def observe(self, group: EnvironmentGroup, deadline_s: float) -> Observations:
        """The group's present observations, once the farm has stepped it; the outcome of its last decision is
        written."""
        if group.observations is not None:
            return group.observations
        mark = time.monotonic_ns()
        seen = self.farm.collect(group.number, deadline_s)
        self._waited(mark, f"group {group.number}")
        self._arrows += 1
        group.arrow = self._arrows
        self.clock.count_workers(group.task, seen.times_ns)
        self.spans += workers_spans(self.farm.specs[group.task], group.task, seen, self._arrows)
        if group.pending is not None:
            with self.clock.timing("transport"):
                self._write_outcome(group, group.pending, seen)
            group.pending = None
        group.observations = seen
        progress.report()
        return seen

    def frames(self) -> FrameCounts:
        """Frames that were read back from the memory so far, and copies of frames."""
        return self.memory.counts + FrameCounts(0, self.farm.frame_copies) + self.policy.frames

    def span(
        self, track: str | None, name: str, start: int, end: int, args: Mapping[str, Any] | None = None, **flow: Any
    ) -> None:
        """Record a span; on no other track, on this process's own."""
        self.spans.append(Span(track or self._track, name, start, end, dict(args or {}), **flow))

    # --- serving a group

    def _next_group(self, resting: set[int], deadline_s: float) -> EnvironmentGroup:
        """Wait until `next_group` finds one and the policy is free."""

        def find() -> EnvironmentGroup | None:
            return next_group(self.farm, self.groups, resting) if self.policy.is_free() else None

        while True:
            self._execute_decisions()
            if (group := find()) is not None:
                return group
            self._wait("any group or replica", lambda: find() is not None, deadline_s)

    def _request_decision(self, group: EnvironmentGroup, seen: Observations) -> None:
        self.policy.submit(group, seen, self.memory)
        flat, late = group.flat(group.row, self.width), self._delays(group, seen)
        group.pending = GroupDecision(flat, group.envs, seen.active, seen.episode, late)
        self.memory.write_frame_rows(group.pending.flat, seen.frame_rows)
        group.row = (group.row + 1) % self.memory.shape.rows
        group.decisions.append(group.pending)
        group.decided += 1
        group.observations = None

    def _execute_decisions(self) -> None:
        """Write decisions that have arrived into the memory, and have the farm execute them."""
        for decided in self.policy.arrived():
            group, decision = decided.group, decided.group.pending
            assert decision is not None
            self._count_decision(decided)
            with self.clock.timing("transport"):
                self.memory.write_decision(decision.flat[decision.active], decided.request.inputs, decided.action)
                chunks: np.ndarray = decided.action.chunk.numpy()
                if self._settings.delayed is not None:
                    chunks = self._executed(decision, decided.request, chunks, self._settings.delayed.interval)
                if not decision.active.all():  # resting environments execute nothing
                    active, chunks = chunks, np.zeros((len(decision.active), *chunks.shape[1:]), np.float32)
                    chunks[decision.active] = active
            with self.clock.timing("waiting" if self.farm.in_process else "transport"):  # in process, workers run now
                self.farm.submit(group.number, chunks, self._frame_rows(group), self.finals.rows(group.columns))
            progress.report()

    def _delays(self, group: EnvironmentGroup, seen: Observations) -> np.ndarray:
        """int64 [n] delays of the decisions on these observations. That of an episode's first is 0."""
        late, delayed = np.zeros(len(seen.envs), np.int64), self._settings.delayed
        if delayed is not None:
            for row in np.flatnonzero(seen.active & (seen.episode_step > 0)).tolist():
                env, episode, step = (int(of[row]) for of in (seen.envs, seen.episode, seen.episode_step))
                late[row] = delayed.drawn(self._settings.seeds[group.task], env, episode, step)
        return late

    def _executed(
        self, decision: GroupDecision, request: DecisionRequest, decided: np.ndarray, interval: int
    ) -> np.ndarray:
        """[n, C, A] actions of the next env steps, of the decisions [n, P, A] of environments that have an episode, and
        their earlier ones."""
        found, envs = decided[:, :interval].copy(), decision.envs[decision.active]
        for row, (env, late) in enumerate(zip(envs.tolist(), decision.late[decision.active].tolist(), strict=True)):
            if request.step[row] == 0:
                self._chunks[env] = ExecutedChunks(interval)
            found[row] = self._chunks[env].execute(decided[row], late)
        return found

    def _count_decision(self, decided: Decided) -> None:
        group, seconds = decided.group, (decided.end_ns - decided.begin_ns) / 1e9
        name = f"act for group {group.number}"
        self.span(decided.replica, name, decided.begin_ns, decided.end_ns, flow_from=(group.arrow,))
        self.clock.policy += seconds
        if decided.replica is not None:
            # The loop waits while replicas decide. On average a replica waits that much less.
            self.clock.waiting -= seconds / self.policy.replicas

    def _write_outcome(self, group: EnvironmentGroup, decision: GroupDecision, seen: Observations) -> None:
        """Write the outcome of the group's last decision beside it, and what it adds to that of the one before. A
        decision whose episode has ended before it arrived counts as not taken."""
        rows, late, chunk = decision.active, decision.late, self.memory.column("step_reward").shape[1]
        own = own_outcome(seen, late, chunk)
        self.memory.write_outcome(decision.flat[rows], {name: values[rows] for name, values in own.items()})
        ended_by = decision.flat
        if late.any():
            # What executes actions of a decision of the last rollout, from which is learned already, is nobody's.
            before = group.decisions[-2].flat if len(group.decisions) > 1 else np.full_like(decision.flat, -1)
            rows = rows & (late > 0) & (before >= 0)
            added = outcome_before(seen, late, chunk)
            self.memory.add_outcome(before[rows], {name: values[rows] for name, values in added.items()})
            missed = ended_before(seen, late)
            ended_by = np.where(missed, before, decision.flat)
            group.decisions[-1] = replace(decision, active=decision.active & ~missed)
        if len(seen.final.rows) and self._settings.bootstrap != "never":
            self._keep_finals(group, ended_by, seen)
        number = dict(zip(decision.envs.tolist(), decision.episode.tolist(), strict=True))
        ended = self.sums.add(group.envs, seen, group.task)
        self.ended += [(number[episode.env], len(group.decisions), episode) for episode in ended]

    def _keep_finals(self, group: EnvironmentGroup, ended_by: np.ndarray, seen: Observations) -> None:
        """Keep the final observations of the ended episodes whose value will be bootstrapped. `ended_by` [n] are the
        flat rows of the decisions that ended them; below 0: of one that is not learned from."""
        wanted = seen.truncated if self._settings.bootstrap == "truncated" else seen.truncated | seen.terminated
        reads = tuple(name for name in self._settings.reads if name != "images")
        inputs = to_inputs(seen.final, reads, self.farm.specs[group.task].episodes)
        for i, row in enumerate(seen.final.rows.tolist()):
            if wanted[row] and ended_by[row] >= 0:
                one = inputs.rows(torch.tensor([i]))
                self.finals.keep(int(ended_by[row]), int(group.columns[row]), one, seen.final.frame_rows[i])

    def _frame_rows(self, group: EnvironmentGroup) -> np.ndarray | None:
        """Rows of the frame memory at which the group's next observations are drawn."""
        return None if self.farm.frames is None else self.memory.shape.frame_rows.at(group.row, group.columns)

    def _wait(self, awaited: str, is_ready: Callable[[], bool], deadline_s: float) -> None:
        mark = time.monotonic_ns()
        self.policy.wait(is_ready, deadline_s)
        self._waited(mark, awaited)

    def _waited(self, mark: int, awaited: str) -> None:
        now = time.monotonic_ns()
        self.clock.waiting += (now - mark) / 1e9
        self.span(None, "idle", mark, now, {"waiting for": awaited})


# --- Final observations of episodes whose value is bootstrapped: kept until the rollout's end, and valued together.


def rows_for_finals(columns: int, decisions: int, history: ObservationHistory, max_episode_steps: int) -> int:
    """Rows of the frame memory beyond the trajectories' own: one per environment into which the next final observation
    may be drawn, and one for every episode that is truncated in a rollout; as many for each earlier observation that is
    drawn beside it. Should more episodes end, whose values are wanted, their frames are copied."""
    return columns * (1 + history.final) * (2 + decisions * history.chunk // max_episode_steps)


@dataclass(frozen=True)
class _Final:
    inputs: Inputs
    """One row, without frames, or with a copy of them."""
    shown: np.ndarray | None = None
    """Row of the frame memory with the frames, or [K] rows; None: they are in `inputs`, or there are none."""
    own: tuple[int, ...] = ()
    """Rows that are free again once it is valued."""


class FinalObservationsKept:
    """Final observations by the flat row of the decision that ended the episode."""

    def __init__(self, memory: TrajectoryMemory) -> None:
        self._memory, columns = memory, memory.shape.columns
        first, each = memory.shape.frame_rows.count, 1 + memory.shape.history.final
        rows = 0 if memory.frames is None else len(memory.frames.frames)
        self._free = deque(range(first, rows))
        self._draws = len(self._free) >= columns * each and memory.frames is not None
        self._next = np.array([self._take(each) for _ in range(columns)]) if self._draws else None
        self._kept: dict[int, _Final] = {}

    def rows(self, places: np.ndarray) -> np.ndarray | None:
        """[n, 1 + F] rows of the frame memory for final observations of the environments in these columns of the
        memory, and for the earlier ones that are drawn beside them (`ObservationHistory.final`)."""
        return None if self._next is None else self._next[places]

    def keep(self, flat: int, place: int, inputs: Inputs, shown: np.ndarray) -> None:
        """Keep the final observation that follows the decision at `flat`; `inputs` has one row and no frames, which are
        in the frame memory at the row `shown`, or the [K] rows."""
        if self._next is None:
            self._kept[flat] = _Final(inputs)
            return
        own = tuple(self._next[place].tolist())
        if len(self._free) >= len(own):
            self._next[place] = self._take(len(own))
            self._kept[flat] = _Final(inputs, shown, own)
        else:
            self._kept[flat] = _Final(self._with_frames(_Final(inputs, shown)))

    def forget(self) -> None:
        """Forget the observations that were not valued: what led to them is not learned from."""
        self._free.extend(row for final in self._kept.values() for row in final.own)
        self._kept = {}

    def _take(self, count: int) -> list[int]:
        return [self._free.popleft() for _ in range(count)]

    def values(self, flat: np.ndarray, value: Callable[[Inputs], Tensor]) -> dict[int, Tensor]:
        """Values of the observations kept for these flat rows, in one forward pass and in their order, by flat row."""
        chosen = [row for row in flat.tolist() if row in self._kept]
        if not chosen:
            return {}
        finals = [self._kept.pop(row) for row in chosen]
        found = value(self._joined(finals))
        self._free.extend(row for final in finals for row in final.own)
        return dict(zip(chosen, found, strict=True))

    def _joined(self, finals: list[_Final]) -> Inputs:
        drawn = [final.shown for final in finals if final.shown is not None]
        if len(drawn) == len(finals) and self._draws:
            inputs = join_inputs([final.inputs for final in finals], torch.arange(len(finals)))
            return replace(inputs, frames=self._memory.frames_at(torch.from_numpy(np.stack(drawn))))
        return join_inputs([self._with_frames(final) for final in finals], torch.arange(len(finals)))

    def _with_frames(self, final: _Final) -> Inputs:
        """The observation with a copy of its frames."""
        if final.shown is None:
            return final.inputs
        return replace(final.inputs, frames=self._memory.frames_at(torch.from_numpy(final.shown[None])))
