"""The rollout loop: groups of environments go round between the farm and the policy.

    until every group is done:  the group that is ready first -> act -> submit

With several groups of environments one is simulated while the policy decides for another; a light task's groups
are served while a heavy one's are simulated. Here the policy is the loop's own; `shared_loop` has policy replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.rollout.acting import Actor, EnvironmentGroup, Observer, RolloutSettings, groups_of
from embodied.rollout.final_values import FinalObservationsKept
from embodied.rollout.rollout_summary import Clock, workers_spans
from embodied.run.trace import Span
from embodied.trajectories.assembly import Decision, EndedEpisode, EpisodeSums
from embodied.trajectories.batch import to_inputs
from embodied.trajectories.memory import FrameCounts, TrajectoryMemory
from policies.contract import Inputs
from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations


class RolloutLoop:
    """The groups of a farm, which go round. Writes outcomes into the memory. Who acts is the subclass's affair."""

    memory: TrajectoryMemory
    finals: FinalObservationsKept
    track = "policy"
    """The trace's track of the process that the loop is in."""

    def __init__(self, farm: Farm, settings: RolloutSettings) -> None:
        self.farm, self._settings = farm, settings
        self.offsets = np.cumsum([0, *(spec.num_envs for spec in farm.specs)])
        """First column of the run's environments of each task, and their number."""
        self.width = int(self.offsets[-1])
        self.groups = groups_of(farm)
        self.sums = EpisodeSums(self.width)
        self.ended: list[tuple[int, int, EndedEpisode]] = []
        """(number of the environment's episode, number of the decision, episode) that no summary has told yet."""
        self.clock, self.spans = Clock(), list[Span]()
        self._arrows = 0

    # --- who acts

    @property
    def version(self) -> int:
        """Updates that the acting policy has seen."""
        raise NotImplementedError

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """One rollout, or a part of one, in which `serve` and `values` are called."""
        yield

    def values(self, inputs: Inputs, deadline_s: float) -> Tensor:
        """[B] the values of observations in which nothing has been done."""
        raise NotImplementedError

    def frames(self) -> FrameCounts:
        """Frames that were read back from the memory so far, and copies of frames, those made while acting too."""
        raise NotImplementedError

    def _decide(self, group: EnvironmentGroup, seen: Observations) -> None:
        """Have the environments of the group that have an episode decided for, and the farm execute it."""
        raise NotImplementedError

    def _next_group(self, resting: set[int], deadline_s: float) -> EnvironmentGroup:
        """Of the groups that are ready, without the resting, the one that has decided least; waits until one is."""
        raise NotImplementedError

    def _settle(self, deadline_s: float) -> None:
        """Wait until every group that was decided for is submitted."""

    # --- going round

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
        self._settle(deadline_s)
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

    def span(
        self, track: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None, **flow: Any
    ) -> None:
        if self._settings.trace:
            self.spans.append(Span(track, name, start, end, dict(args or {}), **flow))

    def _ready(self, resting: set[int]) -> list[EnvironmentGroup]:
        """The groups that may be decided for now."""
        ready = [group for group in self.groups if group.seen is not None and group.number not in resting]
        return ready + [self.groups[number] for number in self.farm.ready()]

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

    def _decided(self, group: EnvironmentGroup, seen: Observations, flat: np.ndarray) -> None:
        """Note that the group decides at these flat rows."""
        group.row = (group.row + 1) % self.memory.shape.rows
        group.pending = Decision(flat, group.columns, seen.active, seen.episode)
        group.decisions.append(group.pending)
        group.seen = None

    def _submit(self, group: EnvironmentGroup, chunks: np.ndarray) -> None:
        self.farm.submit(group.number, chunks, self._frame_rows(group), self.finals.rows(group.places))

    def _frame_rows(self, group: EnvironmentGroup) -> np.ndarray | None:
        """Rows of the frame memory at which the group's next observations are drawn."""
        return None if self.farm.frames is None else group.flat(group.row, self.width)

    def _waited(self, mark: int, whom: str) -> None:
        now = time.monotonic_ns()
        self.clock.waiting += (now - mark) / 1e9
        self.span(self.track, "idle", mark, now, {"waiting for": whom})


class LocalLoop(RolloutLoop):
    """The loop with a policy of its own, which acts in this process."""

    def __init__(self, farm: Farm, settings: RolloutSettings, actor: Actor) -> None:
        super().__init__(farm, settings)
        self._actor, self._observer = actor, Observer(farm, settings)

    @property
    def version(self) -> int:
        return self._actor.version

    def values(self, inputs: Inputs, deadline_s: float) -> Tensor:
        return self._actor.values(inputs)

    def frames(self) -> FrameCounts:
        return self._observer.frames(self.memory)

    def _next_group(self, resting: set[int], deadline_s: float) -> EnvironmentGroup:
        ready = self._ready(resting)
        if not ready:
            mark = time.monotonic_ns()
            ready = [self.groups[self.farm.wait_ready(deadline_s)]]
            self._waited(mark, "any group")
        return min(ready, key=lambda group: (len(group.decisions), group.number))

    def _decide(self, group: EnvironmentGroup, seen: Observations) -> None:
        flat = group.flat(group.row, self.width)
        begin = time.monotonic_ns()
        shown = self._observer.show(group, seen, self._actor.policy.spec.cameras)
        action = self._actor.decide(shown)
        acted = time.monotonic_ns()
        chunks = self._observer.write(seen, shown, action, self.memory, flat)
        written = time.monotonic_ns()
        self.span(self.track, f"act for group {group.number}", begin, acted, flow_from=(group.arrow,))
        self._decided(group, seen, flat)
        self._submit(group, chunks)
        self.clock.policy += (acted - begin) / 1e9
        self.clock.transport += (written - acted) / 1e9
        submitted = (time.monotonic_ns() - written) / 1e9
        if self.farm.in_process:  # the ring has just run the workers
            self.clock.waiting += submitted
        else:
            self.clock.transport += submitted
