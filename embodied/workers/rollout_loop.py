"""The rollout loop: groups of environments go round between the farm and the policy.

    until every group is done:  the group that is ready first -> act -> submit

With several groups of environments one is simulated while the policy decides for another; a light task's groups
are served while a heavy one's are simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embodied import progress
from embodied.data.assembly import Decision, EndedEpisode, EpisodeSums
from embodied.data.random_streams import SamplingNoise
from embodied.data.trajectories import to_inputs
from embodied.data.trajectory_memory import FrameCounts, TrajectoryMemory
from embodied.tracing import Span
from embodied.workers.devices import decide
from embodied.workers.final_values import FinalObservationsKept
from embodied.workers.rollout_summary import Clock, workers_spans
from policies.contract import Inputs, Policy
from sim_farm.farm import Farm
from sim_farm.observations import Observations


@dataclass(frozen=True)
class RolloutSettings:
    """What of a configuration decides what a policy worker computes."""

    reads: tuple[str, ...]
    """What of an observation the policy is shown."""
    seeds: tuple[int, ...]
    """Of each task: noise is keyed by it."""
    bootstrap: str
    """Ends of episodes whose own final observation is valued: `never`, `truncated` or `always`."""
    rounds: int
    """Decisions of each environment that the trajectory memory must hold at once."""
    trace: bool = True
    """Whether spans are made."""


class EnvironmentGroup:
    """One group of environments: where it is in the memory, and what it has decided."""

    def __init__(self, number: int, task: int, columns: np.ndarray, place: int) -> None:
        self.number, self.task = number, task
        self.columns = columns
        """Of the run's environments."""
        self.places = np.arange(place, place + len(columns))
        """Columns of the trajectory memory."""
        self.row = 0
        """Of the memory: where its present observation is, or will be."""
        self.seen: Observations | None = None
        self.pending: Decision | None = None
        """The decision whose outcome is not known yet."""
        self.decisions: list[Decision] = []
        self.arrow = 0
        """Number of the trace's arrow from its observation to the next decision."""

    def flat(self, row: int, width: int) -> np.ndarray:
        """[n] flat rows of its environments at a row of the memory."""
        return row * width + self.places


class RolloutLoop:
    """The groups of a farm, and the policy that decides for them. Writes decisions and outcomes into the memory."""

    memory: TrajectoryMemory
    finals: FinalObservationsKept

    def __init__(self, farm: Farm, settings: RolloutSettings) -> None:
        self.farm, self._settings = farm, settings
        self.offsets = np.cumsum([0, *(spec.num_envs for spec in farm.specs)])
        """First column of the run's environments of each task, and their number."""
        self.width = int(self.offsets[-1])
        self.groups = self._all_groups()
        self.sums = EpisodeSums(self.width)
        self.ended: list[tuple[int, int, EndedEpisode]] = []
        """(number of the environment's episode, number of the decision, episode) that no summary has told yet."""
        self.clock, self.spans = Clock(), list[Span]()
        self._acting_copies = 0
        """Frames that were copied because other environments of their group rest."""
        self._arrows = 0

    def act_with(self, policy: Policy) -> None:
        """Decide with this policy from now on."""
        self.policy = policy
        self._noise = [SamplingNoise(seed, policy.noise_dim) for seed in self._settings.seeds]

    def use(self, memory: TrajectoryMemory) -> None:
        """Write into this memory from now on.

        Raises `ValueError` where final observations would be drawn over the trajectories' own.
        """
        spare = 0 if memory.frames is None else memory.frames.rows - memory.shape.rows * self.width
        if memory.frames is not None and self._settings.bootstrap != "never" and spare < self.width:
            raise ValueError(
                f"the frame memory has {spare} rows beyond the trajectories' for final observations of {self.width} "
                "environments: give it one for each, as `rows_for_finals` counts"
            )
        self.memory = memory
        self.finals = FinalObservationsKept(memory)

    def frames(self) -> FrameCounts:
        """Frames that were read back from the memory so far, and copies of frames, those made while acting too."""
        return self.memory.counts + FrameCounts(0, self.farm.frame_copies + self._acting_copies)

    def serve(
        self,
        done: Callable[[EnvironmentGroup, Observations], bool],
        may_decide: Callable[[EnvironmentGroup, Observations], bool],
        deadline_s: float,
    ) -> None:
        """Decide for the group that is ready first until all are done; afterwards all have been observed.

        A group that is done goes on deciding, where it may, while others are not done.
        """
        missing = {group.number for group in self.groups}
        resting: set[int] = set()
        while missing:
            group = self._next_group(resting, deadline_s)
            seen = self.observe(group, deadline_s)
            if done(group, seen):
                missing.discard(group.number)
            if missing and may_decide(group, seen):
                self._decide(group, seen)
            else:
                resting.add(group.number)
        for group in self.groups:
            self.observe(group, deadline_s)

    def wake(self, limit: int, deadline_s: float) -> None:
        """Begin the next episodes where all environments rest at an earlier limit."""
        seen = [self.observe(group, deadline_s) for group in self.groups]
        if not any(now.active.any() for now in seen):
            self.farm.hold(limit)
            for group in self.groups:
                self.reset(group)

    def reset(self, group: EnvironmentGroup) -> None:
        group.seen = None
        self.farm.reset(group.number, self._frame_rows(group))

    def observe(self, group: EnvironmentGroup, deadline_s: float) -> Observations:
        """The group's present observations; collects them unless that was done already."""
        if group.seen is not None:
            return group.seen
        mark = time.monotonic_ns()
        seen = self.farm.collect(group.number, deadline_s)
        self._waited(mark, f"group {group.number}")
        self._arrows += 1
        group.arrow = self._arrows
        spec = self.farm.specs[group.task]
        self.clock.count_workers(group.task, seen.times_ns)
        if self._settings.trace:
            self.spans += workers_spans(spec, group.task, seen, self._arrows)
        if group.pending is not None:
            mark = time.monotonic_ns()
            self._note_outcome(group, group.pending, seen)
            group.pending = None
            self.clock.transport += (time.monotonic_ns() - mark) / 1e9
        group.seen = seen
        progress.report()
        return seen

    def inputs(self, group: EnvironmentGroup, seen: Observations, reads: Sequence[str] | None = None) -> Inputs:
        episodes = self.farm.specs[group.task].episodes
        return to_inputs(seen, self._settings.reads if reads is None else reads, episodes, self.policy.spec.cameras)

    def span(
        self, track: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None, **flow: Any
    ) -> None:
        if self._settings.trace:
            self.spans.append(Span(track, name, start, end, dict(args or {}), **flow))

    def _next_group(self, resting: set[int], deadline_s: float) -> EnvironmentGroup:
        """Of the groups that are ready the one that has decided least; waits until one is."""
        ready = [group for group in self.groups if group.seen is not None and group.number not in resting]
        ready += [self.groups[number] for number in self.farm.ready()]
        if not ready:
            mark = time.monotonic_ns()
            ready = [self.groups[self.farm.wait_ready(deadline_s)]]
            self._waited(mark, "any group")
        return min(ready, key=lambda group: (len(group.decisions), group.number))

    def _note_outcome(self, group: EnvironmentGroup, decision: Decision, seen: Observations) -> None:
        """Write what came of the group's last decision beside it."""
        took, solved = decision.active, np.asarray(seen.success.any(1))
        self.memory.write_outcome(
            decision.flat[took],
            {
                "reward": seen.reward.sum(1)[took],
                "step_reward": seen.reward[took],
                "executed": seen.steps[took],
                "success": solved[took],
                "terminated": seen.terminated[took],
                "truncated": seen.truncated[took],
            },
        )
        if len(seen.final.rows) and self._settings.bootstrap != "never":
            self._keep_finals(group, decision, seen)
        number = dict(zip(decision.envs.tolist(), decision.episode.tolist(), strict=True))
        ended = self.sums.add(group.columns, seen, group.task)
        self.ended += [(number[episode.env], len(group.decisions), episode) for episode in ended]

    def _keep_finals(self, group: EnvironmentGroup, decision: Decision, seen: Observations) -> None:
        """Keep the final observations of the ended episodes whose value will be bootstrapped."""
        wanted = seen.truncated if self._settings.bootstrap == "truncated" else seen.truncated | seen.terminated
        reads = tuple(name for name in self._settings.reads if name != "images")
        inputs = to_inputs(seen.final, reads, self.farm.specs[group.task].episodes)
        for i, row in enumerate(seen.final.rows.tolist()):
            if wanted[row]:
                one = inputs.rows(torch.tensor([i]))
                self.finals.keep(int(decision.flat[row]), int(group.places[row]), one)

    def _decide(self, group: EnvironmentGroup, seen: Observations) -> None:
        """Act for the environments of the group that have an episode, and have the farm execute it."""
        start = time.monotonic_ns()
        rows = np.flatnonzero(seen.active)
        inputs = self.inputs(group, seen)
        if len(rows) < len(seen.envs):
            inputs = inputs.rows(torch.from_numpy(rows))
            self._acting_copies += len(rows) if inputs.frames else 0
        noise = self._noise[group.task].draw(seen.envs[rows], seen.episode[rows], seen.episode_step[rows])
        action = decide(self.policy, inputs, torch.from_numpy(noise))
        acted = time.monotonic_ns()
        self.span("policy", f"act for group {group.number}", start, acted, flow_from=(group.arrow,))
        flat = group.flat(group.row, self.width)
        self.memory.write_decision(flat[rows], inputs, action)
        chunks = action.chunk.numpy()
        if len(rows) < len(seen.envs):
            chunks = np.zeros((len(seen.envs), *chunks.shape[1:]), np.float32)
            chunks[rows] = action.chunk.numpy()
        written = time.monotonic_ns()
        group.row = (group.row + 1) % self.memory.shape.rows
        group.pending = Decision(flat, group.columns, seen.active, seen.episode)
        group.decisions.append(group.pending)
        group.seen = None
        self.farm.submit(group.number, chunks, self._frame_rows(group), self.finals.rows(group.places))
        self.clock.policy += (acted - start) / 1e9
        self.clock.transport += (written - acted) / 1e9
        submitted = (time.monotonic_ns() - written) / 1e9
        if self.farm.in_process:  # the ring has just run the workers
            self.clock.waiting += submitted
        else:
            self.clock.transport += submitted

    def _frame_rows(self, group: EnvironmentGroup) -> np.ndarray | None:
        """Rows of the frame memory at which the group's next observations are drawn."""
        return None if self.farm.frames is None else group.flat(group.row, self.width)

    def _waited(self, mark: int, whom: str) -> None:
        now = time.monotonic_ns()
        self.clock.waiting += (now - mark) / 1e9
        self.span("policy", "idle", mark, now, {"waiting for": whom})

    def _all_groups(self) -> tuple[EnvironmentGroup, ...]:
        """The farm's groups; in the memory their environments lie next to each other."""
        found, place = [], 0
        for number in range(self.farm.groups):
            task, envs = self.farm.task_of(number), self.farm.envs_of(number)
            found.append(EnvironmentGroup(number, task, envs + self.offsets[task], place))
            place += len(envs)
        return tuple(found)
