"""The policy worker: turns a farm's observations into decisions and writes them into the trajectory memory.

    until every group has decided often enough:  the group that is ready first -> act -> submit

With several groups of environments one is simulated while the policy decides for another; a light task's groups
are served while a heavy one's are simulated. Trajectories are in the order (decision, environment), and noise is keyed
by (environment, episode, step), so that neither the groups nor the order of serving changes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.data.assembly import (
    Decision,
    EndedEpisode,
    EpisodeSums,
    assemble,
    table_of_decisions,
    table_of_episodes,
)
from embodied.data.random_streams import SamplingNoise
from embodied.data.trajectories import Trajectories, join_columns, join_inputs, to_inputs
from embodied.data.trajectory_memory import FrameCounts, MemoryLayout, MemoryShape, TrajectoryMemory
from embodied.tracing import Span
from embodied.workers.affinity import Affinity
from embodied.workers.context import WorkerContext, bootstrap_of
from embodied.workers.devices import decide, value_of
from embodied.workers.final_values import FinalObservationsKept
from embodied.workers.offload import Offload, Switch
from embodied.workers.roles import EpisodePart
from embodied.workers.rollout_summary import Clock, RolloutSummary, workers_spans
from policies.contract import Inputs, Policy
from sim_farm.episodes import GroupedEpisodes
from sim_farm.farm import Farm
from sim_farm.observations import Observations

TASK_BITS = 44
"""Bits of an episode group's name within its task."""


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


class _Group:
    """One group of environments: where it is in the memory, and what it has decided."""

    def __init__(self, number: int, task: int, envs: np.ndarray, columns: np.ndarray, place: int) -> None:
        self.number, self.task, self.envs = number, task, envs
        self.columns = columns
        """Of the run's environments."""
        self.places = np.arange(place, place + len(envs))
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


class PolicyWorker:
    """Holds a policy, a farm, and the trajectory memory that both write into."""

    makes: ClassVar[frozenset[str]] = frozenset({"trajectories", "episodes"})
    """What an edge from here may carry."""
    policy: Policy
    memory: TrajectoryMemory

    def __init__(
        self, policy: Policy | None, farm: Farm, settings: RolloutSettings, affinity: Affinity | None = None
    ) -> None:
        """`policy` None: it will be given one by `share`."""
        self.farm, self._settings = farm, settings
        self._affinity = affinity or Affinity()
        self._offload: Offload | None = None
        self._version = 0
        self._offsets = np.cumsum([0, *(spec.num_envs for spec in farm.specs)])
        self._width = int(self._offsets[-1])
        self._groups = self._all_groups()
        self._task = None
        if len(farm.specs) > 1:
            self._task = torch.from_numpy(np.repeat(np.arange(len(farm.specs)), [s.num_envs for s in farm.specs]))
        self._sums = EpisodeSums(self._width)
        self._ended: list[tuple[int, int, EndedEpisode]] = []
        """(number of the environment's episode, number of the decision, episode) that no summary has told yet."""
        self._trajectories: Trajectories | None = None
        self._episode = 0
        """The number of the iteration's first episodes, where rollouts are of whole episodes."""
        self._rolled = 0
        """Episodes of each environment that the iteration has handed out, the last perhaps in part."""
        self._wired = 0
        self._acting_copies = 0
        """Frames that were copied because other environments of their group rest."""
        self._counted = FrameCounts()
        self._arrows = 0
        self._clock, self._spans = Clock(), list[Span]()
        self._noise: list[SamplingNoise] = []
        if policy is not None:
            self.share(policy)

    @classmethod
    def make(cls, context: WorkerContext) -> PolicyWorker:
        """The policy worker of a run."""
        config = context.config
        settings = RolloutSettings(
            config.policy.reads, context.seeds, bootstrap_of(config), context.rounds, config.runtime.trace
        )
        return cls(context.policy(), context.reach(), settings, context.affinity)

    # --- before a rollout, and between two

    def layout(self) -> MemoryLayout:
        """The memory that trajectories are written into, for decisions as the policy takes them."""
        cameras = self.policy.spec.cameras if self.farm.frames is not None else ()
        shape = MemoryShape(self._settings.rounds + 1, self._width, cameras)
        inputs = self._blank_inputs()
        return MemoryLayout.of(shape, inputs, decide(self.policy, inputs, torch.zeros(1, self.policy.noise_dim)))

    def use(self, memory: TrajectoryMemory) -> None:
        """Write into this memory from now on.

        Raises `ValueError` where final observations would be drawn over the trajectories' own.
        """
        spare = 0 if memory.frames is None else memory.frames.rows - memory.shape.rows * self._width
        if memory.frames is not None and self._settings.bootstrap != "never" and spare < self._width:
            raise ValueError(
                f"the frame memory has {spare} rows beyond the trajectories' for final observations of {self._width} "
                "environments: give it one for each, as `rows_for_finals` counts"
            )
        self.memory = memory
        self._finals = FinalObservationsKept(memory, self._width)

    def begin(self, snapshot: Mapping[str, np.ndarray] | None = None, rest: bool = False) -> None:
        """Start every environment's first episode, or continue from a snapshot; with `rest`, at the next episode.

        Raises `FarmError` for a snapshot of another farm.
        """
        if rest:
            self._episode = 0 if snapshot is None else int(snapshot["base_episode"].min())
            self.farm.hold(self._episode)
        if snapshot is not None:
            self.farm.restore(snapshot)
            self._sums.total[:] = _of_all_tasks(snapshot, "episode_return")
            self._sums.solved[:] = _of_all_tasks(snapshot, "episode_solved")
            self._sums.length[:] = _of_all_tasks(snapshot, "base_step")
        for group in self._groups:
            self._reset(group)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Where the environments are, to be given to `begin` of a later worker."""
        found = self.farm.snapshot()
        for task, first in enumerate(self._offsets[:-1]):
            mine, prefix = slice(first, self._offsets[task + 1]), f"{task}." if task else ""
            found[f"{prefix}episode_return"] = self._sums.total[mine].copy()
            found[f"{prefix}episode_solved"] = self._sums.solved[mine].copy()
        return found

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take what the learner has trained: parameters and statistics."""
        unknown = self.policy.load_state_dict(dict(state), strict=False).unexpected_keys
        assert not unknown, f"weights of another policy: {unknown}"
        self._version = version

    def share(self, policy: Policy) -> None:
        """Act with the learner's own policy, which is in this process: nothing is copied any more."""
        self.policy = policy
        self._noise = [SamplingNoise(seed, policy.noise_dim) for seed in self._settings.seeds]

    def at_version(self, version: int) -> None:
        """The shared policy has seen so many updates."""
        self._version = version

    def unload(self, spill: Path) -> Switch:
        """Let the policy leave the device's memory; `load_back` before the next rollout."""
        self._offload = Offload(spill, self.policy, None)
        return self._offload.unload()

    def load_back(self) -> Switch:
        """Return to the device's memory."""
        return self._offload.load() if self._offload is not None else Switch(0, 0.0)

    def unload_renderers(self, deadline_s: float) -> Switch:
        """Let the farm's renderers and scene replicas leave the memory; `load_renderers` before the next rollout."""
        left = self.farm.unload_renderers(deadline_s)
        return Switch(left.bytes, left.seconds)

    def load_renderers(self, deadline_s: float) -> Switch:
        """Have the farm's renderers back."""
        back = self.farm.load_renderers(deadline_s)
        return Switch(back.bytes, back.seconds)

    # --- rollouts

    def rollout(self, decisions: int, deadline_s: float = 600.0) -> RolloutSummary:
        """Let every environment take `decisions` decisions; `trajectories` then hands them out.

        Raises what `Farm.collect` raises. The observations that follow the last decision are kept: the next
        rollout begins with them.
        """
        with self._affinity.applied():
            begin = self._begin_rollout()
            for group in self._groups:
                group.decisions = []
            self._serve(
                lambda group, seen: len(group.decisions) >= decisions,
                lambda group, seen: len(group.decisions) < decisions,
                deadline_s,
            )
            mark = time.monotonic_ns()
            table, mask = table_of_decisions([group.decisions for group in self._groups], self._width)
            last = _first_value(value_of(self.policy, self._last_inputs()))
            self._trajectories = self._assembled(table, mask, last, self._task)
            ended = [episode for *_, episode in sorted(self._ended, key=lambda place: (place[1], place[2].env))]
            self._ended = []
            return self._summary(begin, mark, ended)

    def rollout_episodes(self, part: EpisodePart, limit: int, deadline_s: float = 600.0) -> RolloutSummary:
        """Go on until every environment has ended its episodes of the part; `trajectories` then hands these out.

        Episodes are counted from the iteration's beginning, which is the part that starts at 0. Environments that are
        done early go on, until they have ended `limit` episodes, and rest. What they did beyond this part is kept for
        the next calls. Raises what `Farm.collect` raises.
        """
        with self._affinity.applied():
            begin = self._begin_rollout()
            if part.start == 0:
                self._episode += self._rolled
                for group in self._groups:
                    group.decisions = [d for d in group.decisions if (d.episode[d.active] >= self._episode).any()]
            pieces = [(self._episode + number, first, last) for number, first, last in part.pieces(self._width)]
            self._rolled = -(-part.stop // self._width)
            self._wake(self._episode + limit, deadline_s)
            self._serve(
                lambda group, seen: all(_ended(group, seen, *piece) for piece in pieces),
                lambda group, seen: bool(seen.active.any()),
                deadline_s,
            )
            mark = time.monotonic_ns()
            self._trajectories = join_columns([self._episodes_of(*piece) for piece in pieces])
            # How far environments went beyond the part is the plan's affair: those are told with their own part.
            mine = [p for p in self._ended if any(p[0] == n and a <= p[2].env < z for n, a, z in pieces)]
            self._ended = [place for place in self._ended if place not in mine]
            ended = [episode for *_, episode in sorted(mine, key=lambda place: (place[0], place[2].env))]
            return self._summary(begin, mark, ended)

    def trajectories(self) -> Trajectories:
        """What the last rollout gathered, once."""
        gathered, self._trajectories = self._trajectories, None
        assert gathered is not None, "trajectories are handed out once per rollout"
        return gathered

    def _frames(self) -> FrameCounts:
        """Frames that were read back from the memory so far, and copies of frames, those made while acting too."""
        return self.memory.counts + FrameCounts(0, self.farm.frame_copies + self._acting_copies)

    # --- within a rollout

    def _serve(
        self,
        done: Callable[[_Group, Observations], bool],
        may_decide: Callable[[_Group, Observations], bool],
        deadline_s: float,
    ) -> None:
        """Decide for the group that is ready first until all are done; afterwards all have been observed.

        A group that is done goes on deciding, where it may, while others are not done.
        """
        missing = {group.number for group in self._groups}
        resting: set[int] = set()
        while missing:
            group = self._next_group(resting, deadline_s)
            seen = self._observe(group, deadline_s)
            if done(group, seen):
                missing.discard(group.number)
            if missing and may_decide(group, seen):
                self._decide(group, seen)
            else:
                resting.add(group.number)
        for group in self._groups:
            self._observe(group, deadline_s)

    def _next_group(self, resting: set[int], deadline_s: float) -> _Group:
        """Of the groups that are ready the one that has decided least; waits until one is."""
        ready = [group for group in self._groups if group.seen is not None and group.number not in resting]
        ready += [self._groups[number] for number in self.farm.ready()]
        if not ready:
            mark = time.monotonic_ns()
            ready = [self._groups[self.farm.wait_ready(deadline_s)]]
            self._waited(mark, "any group")
        return min(ready, key=lambda group: (len(group.decisions), group.number))

    def _observe(self, group: _Group, deadline_s: float) -> Observations:
        """The group's present observations; collects them unless that was done already."""
        if group.seen is not None:
            return group.seen
        mark = time.monotonic_ns()
        seen = self.farm.collect(group.number, deadline_s)
        self._waited(mark, f"group {group.number}")
        self._arrows += 1
        group.arrow = self._arrows
        spec = self.farm.specs[group.task]
        self._clock.count_workers(group.task, seen.times_ns)
        if self._settings.trace:
            self._spans += workers_spans(spec, group.task, seen, self._arrows)
        if group.pending is not None:
            mark = time.monotonic_ns()
            self._note_outcome(group, group.pending, seen)
            group.pending = None
            self._clock.transport += (time.monotonic_ns() - mark) / 1e9
        group.seen = seen
        progress.report()
        return seen

    def _note_outcome(self, group: _Group, decision: Decision, seen: Observations) -> None:
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
        ended = self._sums.add(group.columns, seen, group.task)
        self._ended += [(number[episode.env], len(group.decisions), episode) for episode in ended]

    def _keep_finals(self, group: _Group, decision: Decision, seen: Observations) -> None:
        """Keep the final observations of the ended episodes whose value will be bootstrapped."""
        wanted = seen.truncated if self._settings.bootstrap == "truncated" else seen.truncated | seen.terminated
        reads = tuple(name for name in self._settings.reads if name != "images")
        inputs = to_inputs(seen.final, reads, self.farm.specs[group.task].episodes)
        for i, row in enumerate(seen.final.rows.tolist()):
            if wanted[row]:
                one = inputs.rows(torch.tensor([i]))
                self._finals.keep(int(decision.flat[row]), int(group.places[row]), one)

    def _decide(self, group: _Group, seen: Observations) -> None:
        """Act for the environments of the group that have an episode, and have the farm execute it."""
        start = time.monotonic_ns()
        rows = np.flatnonzero(seen.active)
        inputs = self._inputs(group, seen)
        if len(rows) < len(seen.envs):
            inputs = inputs.rows(torch.from_numpy(rows))
            self._acting_copies += len(rows) if inputs.frames else 0
        noise = self._noise[group.task].draw(seen.envs[rows], seen.episode[rows], seen.episode_step[rows])
        action = decide(self.policy, inputs, torch.from_numpy(noise))
        acted = time.monotonic_ns()
        self._span("policy", f"act for group {group.number}", start, acted, flow_from=(group.arrow,))
        flat = group.flat(group.row, self._width)
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
        self.farm.submit(group.number, chunks, self._frame_rows(group), self._finals.rows(group.places))
        self._clock.policy += (acted - start) / 1e9
        self._clock.transport += (written - acted) / 1e9
        submitted = (time.monotonic_ns() - written) / 1e9
        if self.farm.in_process:  # the ring has just run the workers
            self._clock.waiting += submitted
        else:
            self._clock.transport += submitted

    def _wake(self, limit: int, deadline_s: float) -> None:
        """Begin the next episodes where all environments rest at an earlier limit."""
        seen = [self._observe(group, deadline_s) for group in self._groups]
        if not any(now.active.any() for now in seen):
            self.farm.hold(limit)
            for group in self._groups:
                self._reset(group)

    def _reset(self, group: _Group) -> None:
        group.seen = None
        self.farm.reset(group.number, self._frame_rows(group))

    # --- after a rollout

    def _assembled(
        self, table: np.ndarray, mask: np.ndarray, last: Tensor, task: Tensor | None, group: Tensor | None = None
    ) -> Trajectories:
        values = self._finals.values(table[mask], lambda inputs: _first_value(value_of(self.policy, inputs)))
        return assemble(self.memory, table, mask, values, last, self._version, task, group)

    def _episodes_of(self, number: int, first: int, last: int) -> Trajectories:
        """Episode `number` of the environments `first` to `last - 1`."""
        table, mask = table_of_episodes([group.decisions for group in self._groups], number, first, last)
        names = torch.tensor([self._episode_group(column, number) for column in range(first, last)])
        task = None if self._task is None else self._task[first:last]
        return self._assembled(table, mask, torch.zeros(last - first), task, names)

    def _episode_group(self, column: int, number: int) -> int:
        """The name of the episode group that an environment's episode belongs to; no two tasks share one."""
        task = int(np.searchsorted(self._offsets, column, side="right")) - 1
        episodes = self.farm.specs[task].episodes
        assert isinstance(episodes, GroupedEpisodes), "rollouts of whole episodes are of episodes that come in groups"
        return episodes.episode_group(column - int(self._offsets[task]), number) + (task << TASK_BITS)

    def _last_inputs(self) -> Inputs:
        """The observations after the last decision, [B], in the order of the run's environments."""
        order = np.argsort(np.concatenate([group.columns for group in self._groups]))
        reads = tuple(name for name in self._settings.reads if name != "images")
        parts = [self._inputs(group, group.seen, reads) for group in self._groups if group.seen is not None]
        inputs = join_inputs(parts, torch.from_numpy(order))
        if self.memory.frames is None:
            return inputs
        rows = np.concatenate([group.flat(group.row, self._width) for group in self._groups])[order]
        return replace(inputs, frames=self.memory.frames_at(torch.from_numpy(rows)))

    def _begin_rollout(self) -> int:
        self._clock, self._spans = Clock(), []
        self._counted = self._frames()
        return time.monotonic_ns()

    def _summary(self, begin: int, mark: int, ended: Sequence[EndedEpisode]) -> RolloutSummary:
        end = time.monotonic_ns()
        self._clock.assembly += (end - mark) / 1e9
        self._clock.transport += (end - mark) / 1e9
        self._span("policy", "transport", mark, end)
        assert self._trajectories is not None
        wired, self._wired = self.farm.wire_bytes - self._wired, self.farm.wire_bytes
        steps, wall_s = self._trajectories.env_steps, (end - begin) / 1e9
        spans, frames = tuple(self._spans), self._frames() - self._counted
        return RolloutSummary(steps, self._version, tuple(ended), self._clock, wall_s, spans, wired, frames)

    # --- small things

    def _all_groups(self) -> tuple[_Group, ...]:
        """The farm's groups; in the memory their environments lie next to each other."""
        found, place = [], 0
        for number in range(self.farm.groups):
            task, envs = self.farm.task_of(number), self.farm.envs_of(number)
            found.append(_Group(number, task, envs, envs + self._offsets[task], place))
            place += len(envs)
        return tuple(found)

    def _inputs(self, group: _Group, seen: Observations, reads: Sequence[str] | None = None) -> Inputs:
        episodes = self.farm.specs[group.task].episodes
        return to_inputs(seen, self._settings.reads if reads is None else reads, episodes, self.policy.spec.cameras)

    def _frame_rows(self, group: _Group) -> np.ndarray | None:
        """Rows of the frame memory at which the group's next observations are drawn."""
        return None if self.farm.frames is None else group.flat(group.row, self._width)

    def _blank_inputs(self) -> Inputs:
        """One observation without content, as the policy reads them."""
        spec, reads, size = self.policy.spec, self._settings.reads, self.policy.spec.image_size
        info = self.farm.infos[0]
        return Inputs(
            state=torch.zeros(1, info.state_dim) if "state" in reads else None,
            proprio=torch.zeros(1, info.proprio_dim) if "proprio" in reads else None,
            frames={name: torch.zeros(1, size, size, 3, dtype=torch.uint8) for name in spec.cameras},
            instruction=("do nothing",) if "instruction" in reads else (),
            episode=torch.zeros(1, 3, dtype=torch.int64) if "episode" in reads else None,
        )

    def _waited(self, mark: int, whom: str) -> None:
        now = time.monotonic_ns()
        self._clock.waiting += (now - mark) / 1e9
        self._span("policy", "idle", mark, now, {"waiting for": whom})

    def _span(
        self, track: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None, **flow: Any
    ) -> None:
        if self._settings.trace:
            self._spans.append(Span(track, name, start, end, dict(args or {}), **flow))


def _ended(group: _Group, seen: Observations, episode: int, first: int, last: int) -> bool:
    """Whether those of the group's environments that are among `first` to `last - 1` have ended that episode."""
    mine = (group.columns >= first) & (group.columns < last)
    return bool((seen.episode[mine] > episode).all())


def _first_value(value: Tensor) -> Tensor:
    """[B] of [B], or of the first action's [B, C]: the value of an observation before anything is done there."""
    return value if value.ndim == 1 else value[:, 0]


def _of_all_tasks(snapshot: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """An array of the run's environments; of several tasks it may be kept in parts, the second's as `1.KEY`."""
    parts = [snapshot[key]]
    while f"{len(parts)}.{key}" in snapshot:
        parts.append(snapshot[f"{len(parts)}.{key}"])
    return np.concatenate(parts)
