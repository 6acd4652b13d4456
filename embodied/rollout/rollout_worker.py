"""The rollout worker: steps a farm's environments and gathers trajectories.

    rollout loop, until every group has decided often enough -> trajectories

Trajectories are in the order (decision, environment), and noise is keyed by (environment, episode, step), so that
neither the groups nor the order of serving changes them. With one policy worker this is a part of it; with replicas the
rollout worker is a separate process, without a policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.devices import Affinity
from embodied.errors import CheckpointError
from embodied.learning.offload import Switch
from embodied.rollout.environment_groups import EnvironmentGroup
from embodied.rollout.rollout_loop import PolicyClient, RolloutLoop, RolloutSettings
from embodied.rollout.rollout_summary import EpisodePart, RolloutSummary
from embodied.trajectories.batch import (
    EndedEpisode,
    Trajectories,
    assemble,
    join_columns,
    join_inputs,
    table_of_decisions,
    table_of_episodes,
    to_inputs,
)
from embodied.trajectories.memory import FrameCounts, FrameReader, TrajectoryMemory
from policies.contract import Inputs
from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations
from sim_farm.episodes import GroupedEpisodes

LEFT_OVER = "left_over"
"""Name in a snapshot of what is left of each environment's last decision."""
TASK_BITS = 44
"""Bits of an episode group's number within its task."""


class RolloutWorker:
    """A farm, and the trajectory memory that it fills."""

    makes: ClassVar[frozenset[str]] = frozenset({"trajectories", "episodes"})
    """Contents that an edge from here may carry."""

    def __init__(
        self,
        farm: Farm,
        settings: RolloutSettings,
        policy: PolicyClient,
        track: str,
        affinity: Affinity | None = None,
    ) -> None:
        """`track`: the trace's track of this process."""
        self.farm, self._settings = farm, settings
        self._affinity = affinity or Affinity()
        self._loop = RolloutLoop(farm, settings, policy, track)
        self._task = None
        """[B] the number of each environment's task, where there are several."""
        if len(farm.specs) > 1:
            self._task = torch.from_numpy(np.repeat(np.arange(len(farm.specs)), [s.num_envs for s in farm.specs]))
        self._trajectories: Trajectories | None = None
        self._episode = 0
        """The number of the iteration's first episodes, where rollouts are of whole episodes."""
        self._rolled = 0
        """Episodes of each environment that the iteration has returned, the last perhaps in part."""
        self._wired = 0
        self._counted = FrameCounts()

    # --- before a rollout, and between two

    def use(self, memory: TrajectoryMemory) -> None:
        """Write into this memory from now on. Raises `ValueError` for a memory without room for final observations."""
        self._loop.use(memory)

    @property
    def memory(self) -> TrajectoryMemory:
        """The memory that trajectories are written into."""
        return self._loop.memory

    def begin(self, snapshot: Mapping[str, np.ndarray] | None = None, rest: bool = False) -> None:
        """Start every environment's first episode, or continue from a snapshot; with `rest`, at the next episode.

        Raises `FarmError` for a snapshot of another farm, `CheckpointError` for numbers that no run has.
        """
        if snapshot is not None:
            self.farm.restore(snapshot)  # which looks at it first
        if rest:
            self._episode = 0 if snapshot is None else int(snapshot["base_episode"].min())
            self.farm.hold(self._episode)
        if snapshot is not None:
            sums = self._loop.sums
            sums.total[:] = _of_all_tasks(snapshot, "episode_return", sums.total)
            sums.solved[:] = _of_all_tasks(snapshot, "episode_solved", sums.solved)
            sums.length[:] = _of_all_tasks(snapshot, "base_step", sums.length)
            for task, first in enumerate(self._loop.offsets[:-1]):
                if self.farm.infos[task].inexact:  # the next episodes begin
                    mine = slice(first, self._loop.offsets[task + 1])
                    sums.total[mine], sums.solved[mine], sums.length[mine] = 0, False, 0
            if self._settings.delayed is not None:
                self._loop.continue_chunks(_of_all_tasks(snapshot, LEFT_OVER, self._loop.left_over()))
        for group in self._loop.groups:
            self._loop.reset(group)

    def snapshot(self) -> dict[str, np.ndarray]:
        """State of the environments, for `begin` of a later worker."""
        found = self.farm.snapshot()
        for task, first in enumerate(self._loop.offsets[:-1]):
            mine, prefix = slice(first, self._loop.offsets[task + 1]), _prefix(task)
            found[f"{prefix}episode_return"] = self._loop.sums.total[mine].copy()
            found[f"{prefix}episode_solved"] = self._loop.sums.solved[mine].copy()
            if self._settings.delayed is not None:
                found[f"{prefix}{LEFT_OVER}"] = self._loop.left_over()[mine]
        return found

    def unload_renderers(self, deadline_s: float) -> Switch:
        """Free the memory of the farm's renderers and scene replicas; `load_renderers` before the next rollout."""
        left = self.farm.unload_renderers(deadline_s)
        return Switch(left.bytes, left.seconds)

    def load_renderers(self, deadline_s: float) -> Switch:
        """Load the farm's renderers again."""
        back = self.farm.load_renderers(deadline_s)
        return Switch(back.bytes, back.seconds)

    # --- rollouts

    def rollout(self, decisions: int, deadline_s: float = 600.0) -> RolloutSummary:
        """Roll out `decisions` decisions of every environment; `trajectories` returns them.

        Raises what `Farm.collect` raises. The observations that follow the last decision are kept: the next
        rollout begins with them. Under a delay each environment takes one decision more: its first env steps belong to
        the decision before, its value is that of what follows that one, and it is not learned from.
        """
        taken = decisions + (self._settings.delayed is not None)
        with self._affinity.applied():
            begin = self._begin_rollout()
            for group in self._loop.groups:
                group.decisions, group.decided = [], 0
            self._loop.serve(
                lambda group, seen: len(group.decisions) >= taken,
                lambda group, seen: len(group.decisions) < taken,
                deadline_s,
            )
            mark = time.monotonic_ns()
            groups = [group.decisions[:decisions] for group in self._loop.groups]
            table, mask = table_of_decisions(groups, self._loop.width)
            last = self._last_values(deadline_s)
            self._trajectories = self._assembled(table, mask, last, self._task, deadline_s)
            self._loop.finals.forget()
            ended = [episode for *_, episode in sorted(self._loop.ended, key=lambda place: (place[1], place[2].env))]
            self._loop.ended = []
            return self._summary(begin, mark, ended)

    def rollout_episodes(self, part: EpisodePart, limit: int, deadline_s: float = 600.0) -> RolloutSummary:
        """Roll out until every environment has ended its episodes of the part; `trajectories` returns these.

        Episodes are counted from the iteration's beginning, which is the part that starts at 0. Environments that are
        done early continue until they have ended `limit` episodes, and then rest. Their decisions beyond this part are
        kept for the next calls. Raises what `Farm.collect` raises.
        """
        with self._affinity.applied():
            begin = self._begin_rollout()
            if part.start == 0:
                self._episode += self._rolled
                for group in self._loop.groups:
                    group.decisions = [d for d in group.decisions if (d.episode[d.active] >= self._episode).any()]
                    group.decided = len(group.decisions)
            pieces = [(self._episode + number, first, last) for number, first, last in part.pieces(self._loop.width)]
            self._rolled = -(-part.stop // self._loop.width)
            self._loop.wake(self._episode + limit, deadline_s)
            self._loop.serve(
                lambda group, seen: all(_ended(group, seen, *piece) for piece in pieces),
                lambda group, seen: bool(seen.active.any()),
                deadline_s,
            )
            mark = time.monotonic_ns()
            self._trajectories = join_columns([self._episodes_of(*piece, deadline_s) for piece in pieces])
            # How far environments go beyond the part depends on the plan: those episodes are for their own part.
            mine = [p for p in self._loop.ended if any(p[0] == n and a <= p[2].env < z for n, a, z in pieces)]
            self._loop.ended = [place for place in self._loop.ended if place not in mine]
            ended = [episode for *_, episode in sorted(mine, key=lambda place: (place[0], place[2].env))]
            return self._summary(begin, mark, ended)

    def trajectories(self) -> Trajectories:
        """The trajectories of the last rollout, which are returned once."""
        gathered, self._trajectories = self._trajectories, None
        assert gathered is not None, "trajectories are returned once per rollout"
        return gathered

    # --- after a rollout

    def without_memory(self, batch: Trajectories, reader: FrameReader | None) -> Trajectories:
        """The trajectories for another machine, which does not have the memory that they are in; frames are fetched
        from there by the reader."""
        return batch.without_memory(reader)

    def _assembled(
        self,
        table: np.ndarray,
        mask: np.ndarray,
        last: Tensor,
        task: Tensor | None,
        deadline_s: float,
        group: Tensor | None = None,
    ) -> Trajectories:
        values = self._loop.finals.values(table[mask], lambda inputs: self._loop.policy.values(inputs, deadline_s))
        return assemble(self.memory, table, mask, values, last, self._loop.policy.version, task, group)

    def _episodes_of(self, number: int, first: int, last: int, deadline_s: float) -> Trajectories:
        """Episode `number` of the environments `first` to `last - 1`."""
        table, mask = table_of_episodes([group.decisions for group in self._loop.groups], number, first, last)
        names = torch.tensor([self._episode_group(column, number) for column in range(first, last)])
        task = None if self._task is None else self._task[first:last]
        return self._assembled(table, mask, torch.zeros(last - first), task, deadline_s, names)

    def _episode_group(self, column: int, number: int) -> int:
        """Number of the episode group that an environment's episode belongs to; no two tasks share one."""
        task = int(np.searchsorted(self._loop.offsets, column, side="right")) - 1
        episodes = self.farm.specs[task].episodes
        assert isinstance(episodes, GroupedEpisodes), "rollouts of whole episodes are of episodes that come in groups"
        return episodes.episode_group(column - int(self._loop.offsets[task]), number) + (task << TASK_BITS)

    def _last_values(self, deadline_s: float) -> Tensor:
        """[B] value of what follows the last decision of a rollout: of the observations after it, or under a delay of
        the further decision's first action."""
        if self._settings.delayed is None:
            return self._loop.policy.values(self._last_inputs(), deadline_s)
        further = [group.decisions[-1] for group in self._loop.groups]
        order = np.argsort(np.concatenate([decision.envs for decision in further]))
        value = self.memory.column("value")[np.concatenate([decision.flat for decision in further])[order]]
        late = torch.from_numpy(np.concatenate([decision.late for decision in further])[order])
        return value if value.ndim == 1 else value.gather(1, late[:, None])[:, 0]

    def _last_inputs(self) -> Inputs:
        """The observations after the last decision, [B], in the order of the run's environments."""
        order = np.argsort(np.concatenate([group.envs for group in self._loop.groups]))
        reads = tuple(name for name in self._settings.reads if name != "images")
        specs, groups = self.farm.specs, self._loop.groups
        seen = [(g.task, g.observations) for g in groups if g.observations is not None]
        parts = [to_inputs(observations, reads, specs[task].episodes) for task, observations in seen]
        inputs = join_inputs(parts, torch.from_numpy(order))
        if self.memory.frames is None:
            return inputs
        rows = np.concatenate([observations.frame_rows for _, observations in seen])[order]
        return replace(inputs, frames=self.memory.frames_at(torch.from_numpy(rows)))

    def _begin_rollout(self) -> int:
        self._loop.begin()
        self._counted = self._loop.frames()
        return time.monotonic_ns()

    def _summary(self, begin: int, mark: int, ended: Sequence[EndedEpisode]) -> RolloutSummary:
        end, clock = time.monotonic_ns(), self._loop.clock
        clock.assembly += (end - mark) / 1e9
        clock.transport += (end - mark) / 1e9
        clock.waiting = max(clock.waiting, 0.0)
        self._loop.span(None, "transport", mark, end)
        assert self._trajectories is not None
        wired, self._wired = self.farm.wire_bytes - self._wired, self.farm.wire_bytes
        steps, wall_s = self._trajectories.env_steps, (end - begin) / 1e9
        spans, frames = (*self._loop.spans, *self._loop.policy.spans), self._loop.frames() - self._counted
        return RolloutSummary(steps, self._loop.policy.version, tuple(ended), clock, wall_s, spans, wired, frames)


def _ended(group: EnvironmentGroup, seen: Observations, episode: int, first: int, last: int) -> bool:
    """True if those of the group's environments that are among `first` to `last - 1` have ended that episode."""
    mine = (group.envs >= first) & (group.envs < last)
    return bool((seen.episode[mine] > episode).all())


def _prefix(task: int) -> str:
    """Prefix of a task's arrays in a snapshot, as in `Farm.snapshot`."""
    return f"{task}." if task else ""


def _of_all_tasks(snapshot: Mapping[str, np.ndarray], key: str, like: np.ndarray) -> np.ndarray:
    """An array of the run's environments; of several tasks it may be kept in parts, the second's as `1.KEY`.

    Raises `CheckpointError` unless it has the shape of `like` and finite numbers.
    """
    names = [key]
    while f"{len(names)}.{key}" in snapshot:
        names.append(f"{len(names)}.{key}")
    parts = [snapshot[name] for name in names if name in snapshot]
    shapes = [part.shape for part in parts]
    alike = all(shape[1:] == like.shape[1:] and len(shape) == like.ndim for shape in shapes)
    if not parts or not alike or sum(shape[0] for shape in shapes) != len(like):
        raise CheckpointError(
            f"the checkpoint's {key} has shapes {shapes}, this run has {len(like)} environments: use an earlier one"
        )
    found = np.concatenate(parts)
    if found.dtype.kind not in "fiub" or not np.isfinite(found).all():
        raise CheckpointError(f"the checkpoint's {key} has numbers that are not finite: use an earlier one")
    return found
