"""Trajectories: the decisions of a rollout [T, B], their outcomes, and the rows of memory with their inputs and traces.

`assemble` makes them at the end of a rollout. A `GroupDecision` has the flat rows of an environment group's decisions
in the trajectory memory, the environments that took them, and the numbers of their episodes. From these records a table
of flat rows is made, which does not depend on the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied.trajectories.memory import CPU, FrameReader, RemoteFrames, TrajectoryMemory
from policies.contract import Inputs
from sim_farm.client.observations import FinalObservations, Observations
from sim_farm.episodes import Episodes


class Decisions(Protocol):
    """N decisions, each with the observation it was taken on and its trace, wherever they are kept."""

    def __len__(self) -> int: ...

    def select(self, index: Tensor) -> Decisions:
        """The decisions at `index` (int64 [K]); nothing is copied."""
        ...

    def inputs(self, device: torch.device | None = None, frames: bool = True) -> Inputs:
        """The observations, on the device (None: where they are kept); without their frames if so wanted."""
        ...

    def trace(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """The trace that `Policy.evaluate` needs with the observations, on the device (None: where it is kept)."""
        ...


@dataclass(frozen=True)
class StoredDecisions:
    """Decisions in the trajectory memory, by their flat rows (int64 [N])."""

    memory: TrajectoryMemory
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Tensor) -> StoredDecisions:
        return replace(self, rows=self.rows[index])

    def inputs(self, device: torch.device | None = None, frames: bool = True) -> Inputs:
        return self.memory.inputs(self.rows, device or CPU, frames)

    def trace(self, device: torch.device | None = None) -> dict[str, Tensor]:
        return self.memory.trace(self.rows, device or CPU)


@dataclass(frozen=True)
class TensorDecisions:
    """Decisions as tensors of N rows."""

    input_tensors: Inputs
    trace_tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.trace_tensors.values())))

    def select(self, index: Tensor) -> TensorDecisions:
        trace = {name: tensor[index] for name, tensor in self.trace_tensors.items()}
        return TensorDecisions(self.input_tensors.rows(index), trace)

    def inputs(self, device: torch.device | None = None, frames: bool = True) -> Inputs:
        found = self.input_tensors if device is None else self.input_tensors.to(device)
        return found if frames else replace(found, frames={})

    def trace(self, device: torch.device | None = None) -> dict[str, Tensor]:
        if device is None:
            return dict(self.trace_tensors)
        return {name: tensor.to(device) for name, tensor in self.trace_tensors.items()}


@dataclass(frozen=True)
class RemoteDecisions:
    """Decisions whose rows were copied out of a memory that is on another machine: N of them, some perhaps of one
    row. Their frames stayed there, and are fetched when they are asked for."""

    tensors: TensorDecisions
    """Without frames."""
    rows: Tensor
    """int64 [N] rows of `tensors`."""
    frames: RemoteFrames | None
    """Frames of the rows of `tensors`; None: there are none."""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Tensor) -> RemoteDecisions:
        return replace(self, rows=self.rows[index])

    def inputs(self, device: torch.device | None = None, frames: bool = True) -> Inputs:
        found = self.tensors.input_tensors.rows(self.rows)
        if frames and self.frames is not None:
            found = replace(found, frames=self.frames.at(self.rows))
        return found if device is None else found.to(device)

    def trace(self, device: torch.device | None = None) -> dict[str, Tensor]:
        trace = self.tensors.trace_tensors
        return {name: tensor[self.rows].to(device or tensor.device) for name, tensor in trace.items()}


def alive_actions(executed: Tensor, chunk: int, first: Tensor | None = None) -> Tensor:
    """bool [.., C]: True for the executed actions of each chunk; `executed` [..] is their number, and `first` [..] the
    place of the first of them in the chunk (None: 0)."""
    place = torch.arange(chunk, device=executed.device)
    if first is None:
        return place < executed[..., None]
    return (place >= first[..., None]) & (place < (first + executed)[..., None])


@dataclass(frozen=True)
class Trajectories:
    """T decisions of each of B environments. Row t * B + b of `decisions` is decision t of environment b.

    Nothing in here depends on how many workers or groups produced it.
    """

    decisions: Decisions
    """T * B of them."""
    log_prob: Tensor
    """[T, B, C, A] under the policy that acted, per element."""
    value: Tensor
    """[T, B], or [T, B, C] of a policy with a value for each action of a chunk."""
    reward: Tensor
    """[T, B] summed over the env steps that executed actions of the chunk."""
    success: Tensor
    """[T, B] bool, the task was solved at a step of the chunk."""
    executed: Tensor
    """[T, B] int64, number of the chunk's executed actions."""
    mask: Tensor
    """[T, B] bool, the decision was really taken."""
    terminated: Tensor
    truncated: Tensor
    """[T, B] bool, the decision ended its episode."""
    final_value: Tensor
    """[T, B] value of the ended episode's own final observation (of its first action); zero where no episode ended."""
    last_value: Tensor
    """[B] value of the observation after the last decision (of the first action there)."""
    version: int
    """Number of updates in the acting weights."""
    episode_group: Tensor | None = None
    """[B] int64, where row t is decision t of each environment's one episode: the episode group that it belongs to.
    None: rows are the decisions of a rollout, in which episodes end and others begin."""
    step_reward: Tensor | None = None
    """[T, B, C] of the env step that executed each action, zero for others; what credit for single actions needs."""
    task: Tensor | None = None
    """[B] int64, the number of each environment's task; None: all are of one."""
    reference_log_prob: Tensor | None = None
    """[T, B, C, A] under the frozen reference policy, where the workflow has one."""
    first: Tensor | None = None
    """[T, B] int64, place in the chunk of the first executed action: the delay of the decision. None: 0."""

    @property
    def alive(self) -> Tensor:
        """bool [T, B, C]: the actions that were executed."""
        return alive_actions(self.executed, self.log_prob.shape[2], self.first)

    @property
    def env_steps(self) -> int:
        return int(self.executed[self.mask].sum())

    @property
    def inputs(self) -> Inputs:
        """All T * B observations, copied out of memory."""
        return self.decisions.inputs()

    @property
    def trace(self) -> dict[str, Tensor]:
        """The traces of all T * B decisions, copied out of memory."""
        return self.decisions.trace()

    def without_memory(self, reader: FrameReader | None) -> Trajectories:
        """The same for a machine that has not the memory, with every decision that was taken copied out of it once, all
        but its frames. These are fetched by the reader; None: there are none."""
        assert isinstance(self.decisions, StoredDecisions), "what is in no memory can be sent as it is"
        taken = self.mask.flatten()
        chosen = self.decisions.select(taken.nonzero()[:, 0])
        # The others repeat a decision that was taken, and are not looked at.
        rows = (taken.cumsum(0) - 1).clamp(min=0)
        tensors = TensorDecisions(chosen.inputs(frames=False), chosen.trace())
        shown = chosen.memory.frame_rows_of(chosen.rows)
        frames = None if reader is None else RemoteFrames(reader, chosen.memory.frame_shape, shown)
        return replace(self, decisions=RemoteDecisions(tensors, rows, frames))

    def columns(self, first: int, last: int) -> Trajectories:
        """The environments `first` to `last - 1` alone."""
        decisions, envs = self.mask.shape
        chosen = torch.arange(decisions * envs).reshape(decisions, envs)[:, first:last]
        parts: dict[str, Any] = {name: _cut(getattr(self, name), 1, first, last) for name in PER_DECISION}
        parts |= {name: _cut(getattr(self, name), 0, first, last) for name in PER_COLUMN}
        return replace(self, decisions=self.decisions.select(chosen.flatten()), **parts)


def without_broken_episodes(batch: Trajectories, before: int = 0) -> tuple[Trajectories, int]:
    """The trajectories without episodes in which a reward is not finite, and how many these are. A physics worker makes
    the reward so where an observation is not.

    Their decisions are not marked, their rewards are zero, and they are of no episode group: one that lacks a member
    is not complete, and not learned from. `before` counts the environments of parts that came earlier, so that these do
    not meet in a group.
    """
    broken = ~batch.reward.isfinite() & batch.mask
    if not bool(broken.any()):
        return batch, 0
    ended = (batch.terminated | batch.truncated) & batch.mask
    number = ended.cumsum(0) - ended.long()  # of the episode within its column
    out, count = torch.zeros_like(broken), 0
    for column in broken.any(0).nonzero()[:, 0].tolist():
        for episode in number[:, column][broken[:, column]].unique().tolist():
            out[:, column] |= number[:, column] == episode
            count += 1
    group = batch.episode_group
    if group is not None:
        group = torch.where(out.any(0), -1 - before - torch.arange(len(group)), group)
    steps = batch.step_reward
    whole = replace(
        batch,
        mask=batch.mask & ~out,
        reward=batch.reward.masked_fill(out, 0.0),
        step_reward=None if steps is None else steps.masked_fill(out[..., None], 0.0),
        episode_group=group,
    )
    return whole, count


PER_DECISION = (
    "log_prob", "value", "reward", "success", "executed", "mask", "terminated", "truncated", "final_value",
    "step_reward", "reference_log_prob", "first",
)  # fmt: skip
"""Fields [T, B, ...] of `Trajectories`."""
PER_COLUMN = ("last_value", "episode_group", "task")
"""Fields [B]."""


def join_columns(parts: Sequence[Trajectories]) -> Trajectories:
    """Trajectories as one: their columns side by side, shorter ones masked at their end."""
    if len(parts) == 1:
        return parts[0]
    count = max(len(part.mask) for part in parts)
    order, begin = [], 0
    for part in parts:
        decisions, envs = part.mask.shape
        t = torch.arange(count)[:, None]
        order.append(begin + t.clamp(max=decisions - 1) * envs + torch.arange(envs))
        begin += decisions * envs
    found: dict[str, Any] = {
        name: _side_by_side([getattr(part, name) for part in parts], count) for name in PER_DECISION
    }
    for name in PER_COLUMN:
        columns = [getattr(part, name) for part in parts]
        found[name] = None if columns[0] is None else torch.cat(columns)
    decisions_of_all = join_decisions([part.decisions for part in parts]).select(torch.cat(order, 1).flatten())
    return replace(parts[0], decisions=decisions_of_all, version=min(part.version for part in parts), **found)


def join_decisions(parts: Sequence[Decisions]) -> Decisions:
    """The decisions of all parts, one after the other; in one memory nothing is copied."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, StoredDecisions):
        stored = [part for part in parts if isinstance(part, StoredDecisions)]
        assert all(part.memory is first.memory for part in stored) and len(stored) == len(parts)
        return replace(first, rows=torch.cat([part.rows for part in stored]))
    if isinstance(first, RemoteDecisions):
        remote = [part for part in parts if isinstance(part, RemoteDecisions)]
        begins = torch.tensor([0, *(len(part.tensors) for part in remote[:-1])]).cumsum(0)
        whole = join_decisions([part.tensors for part in remote])
        assert isinstance(whole, TensorDecisions) and len(remote) == len(parts)
        moved = [part.rows + begin for part, begin in zip(remote, begins, strict=True)]
        fetched = [part.frames for part in remote if part.frames is not None]
        return RemoteDecisions(whole, torch.cat(moved), RemoteFrames.joined(fetched) if fetched else None)
    traces = [part.trace() for part in parts]
    total = sum(len(part) for part in parts)
    return TensorDecisions(
        join_inputs([part.inputs() for part in parts], torch.arange(total)),
        {name: torch.cat([trace[name] for trace in traces]) for name in traces[0]},
    )


def to_inputs(
    seen: Observations | FinalObservations,
    reads: Sequence[str],
    episodes: Episodes | None = None,
    cameras: Sequence[str] = (),
) -> Inputs:
    """The parts of observations that a policy reads; tensors share the observations' memory.

    `episodes` names the episodes of a farm, for policies that read them; `cameras` are the policy's names for the
    farm's cameras, in order, where they are not the farm's own.
    """
    names = cameras or tuple(seen.frames)
    return Inputs(
        state=torch.from_numpy(seen.state) if "state" in reads else None,
        proprio=torch.from_numpy(seen.proprio) if "proprio" in reads else None,
        frames={k: torch.from_numpy(v) for k, v in zip(names, seen.frames.values(), strict=True)}
        if "images" in reads
        else {},
        instruction=seen.instruction if "instruction" in reads else (),
        episode=_names(seen, episodes) if "episode" in reads and episodes is not None else None,
    )


def _names(seen: Observations | FinalObservations, episodes: Episodes) -> Tensor:
    """[B, 3] of `Inputs.episode`; zeros for the last observation of an episode, after which nothing is decided."""
    names = torch.zeros(len(seen.state), 3, dtype=torch.int64)
    if isinstance(seen, Observations):
        places = (seen.envs, seen.episode, seen.episode_step, seen.start)
        for row, (env, episode, step, start) in enumerate(zip(*(each.tolist() for each in places), strict=True)):
            spec = episodes.spec(env, episode, start)
            if spec is not None:
                initial = -1 if spec.init_state is None else spec.init_state
                names[row] = torch.tensor([spec.seed, initial, step])
    return names


def join_inputs(parts: Sequence[Inputs], order: Tensor) -> Inputs:
    """The rows of `parts`, one after the other, rearranged so that new row i is old row `order[i]`."""
    first = parts[0]
    whole = replace(
        first,
        state=None if first.state is None else torch.cat([p.state for p in parts if p.state is not None]),
        proprio=None if first.proprio is None else torch.cat([p.proprio for p in parts if p.proprio is not None]),
        frames={name: torch.cat([p.frames[name] for p in parts]) for name in first.frames},
        instruction=tuple(text for p in parts for text in p.instruction),
        episode=None if first.episode is None else torch.cat([p.episode for p in parts if p.episode is not None]),
    )
    return whole.rows(order)


def _cut(tensor: Tensor | None, axis: int, first: int, last: int) -> Tensor | None:
    return None if tensor is None else tensor.narrow(axis, first, last - first)


def _side_by_side(parts: Sequence[Tensor | None], count: int) -> Tensor | None:
    """[count, sum of columns, ...] from [T, columns, ...] each, zero beyond a part's end."""
    found = []
    for part in parts:
        if part is None:
            return None
        whole = part.new_zeros(count, *part.shape[1:])
        whole[: len(part)] = part
        found.append(whole)
    return torch.cat(found, 1)


# --- assembly: from decisions in the order in which they were taken to trajectories


FAULTY = 8
"""Episodes, all of them broken by a fault of the task's, after which a run or an evaluation ends with it. One that the
step limit ends counts neither way: an answer that is cut off is not judged."""


@dataclass(frozen=True)
class EndedEpisode:
    """One ended training episode."""

    env: int
    """Column of the run's environments: those of the first task come first."""
    success: bool
    """Solved at any env step; not where a number of the simulator's was not finite."""
    total_reward: float
    """Not finite where a reward was not, or an observation."""
    length: int
    """Env steps."""
    task: int = 0
    truncated: bool = False
    """The step limit ended it, before the task did."""
    fault: str = ""
    """Why its total reward is not finite, where that is known."""


@dataclass(frozen=True)
class GroupDecision:
    """One decision of one group of n environments."""

    flat: np.ndarray
    """[n] flat rows of the trajectory memory."""
    envs: np.ndarray
    """[n] columns of the run's environments."""
    active: np.ndarray
    """[n] bool, the environment took it: the others rest."""
    episode: np.ndarray
    """[n] the number of each environment's episode."""
    late: np.ndarray
    """int64 [n] its delay: the env steps after the observation that execute actions of the decision before."""


class EpisodeSums:
    """Return, success and length of the episodes under way, by column of the run's environments."""

    def __init__(self, num_envs: int) -> None:
        self.total = np.zeros(num_envs)
        self.solved = np.zeros(num_envs, np.bool_)
        self.length = np.zeros(num_envs, np.int64)

    def add(self, columns: np.ndarray, seen: Observations, task: int = 0) -> list[EndedEpisode]:
        """Count one outcome; the episodes that ended with it, in the order of environments."""
        self.total[columns] += seen.reward.sum(1)
        self.solved[columns] |= seen.success.any(1)
        self.length[columns] += seen.steps
        ended = []
        over = seen.terminated | seen.truncated
        for row in sorted(np.flatnonzero(over).tolist(), key=lambda row: columns[row]):
            env = int(columns[row])
            total, length = float(self.total[env]), int(self.length[env])
            solved = bool(self.solved[env]) and math.isfinite(total)
            truncated, fault = bool(seen.truncated[row]), seen.faults.get(row, "")
            ended.append(EndedEpisode(env, solved, total, length, task, truncated, fault))
            self.total[env] = self.length[env] = 0
            self.solved[env] = False
        return ended


def table_of_decisions(groups: Sequence[Sequence[GroupDecision]], num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T, B] flat rows and bool [T, B]: every environment's last decision in row T - 1, those before it in the
    rows above. Where an environment rested, and above the first decision of one that took fewer than T, the row repeats
    a decision that was taken and is not marked."""
    count = max(map(len, groups))
    table = np.zeros((count, num_envs), np.int64)
    mask = np.zeros(table.shape, np.bool_)
    for decisions in groups:
        for t, decision in enumerate(decisions, start=count - len(decisions)):
            table[t, decision.envs] = decision.flat
            mask[t, decision.envs] = decision.active
    if mask.any():
        table[~mask] = table[mask][0]
    return table, mask


def table_of_episodes(
    groups: Sequence[Sequence[GroupDecision]], episode: int, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T, B] flat rows and bool [T, B]: the decisions of episode number `episode` of the environments `first` to
    `last - 1`, the t-th in row t. Where a column has fewer decisions than T, rows repeat another decision and are not
    marked."""
    taken: list[list[int]] = [[] for _ in range(first, last)]
    for decisions in groups:
        for decision in decisions:  # within a group they are in the order of time
            mine = decision.active & (decision.episode == episode) & (decision.envs >= first) & (decision.envs < last)
            for place in np.flatnonzero(mine).tolist():
                taken[int(decision.envs[place]) - first].append(int(decision.flat[place]))
    count = max(map(len, taken))
    some = next(rows[0] for rows in taken if rows)
    table, mask = np.full((count, last - first), some), np.zeros((count, last - first), np.bool_)
    for column, rows in enumerate(taken):
        table[: len(rows), column] = rows
        mask[: len(rows), column] = True
    return table, mask


def assemble(
    memory: TrajectoryMemory,
    table: np.ndarray,
    mask: np.ndarray,
    final_values: dict[int, Tensor],
    last_value: Tensor,
    version: int,
    task: Tensor | None,
    episode_group: Tensor | None,
) -> Trajectories:
    """Trajectories of the decisions in `table` [T, B]. `final_values` are by the flat row of the decision that ended
    the episode."""
    rows, taken = torch.from_numpy(table), torch.from_numpy(mask)

    def kept(name: str) -> Tensor:
        """[T, B, ...] as it is in the memory."""
        return memory.column(name)[rows]

    def happened(name: str) -> Tensor:
        """[T, B, ...], zero where no decision was taken."""
        values = kept(name)
        return (
            values
            if bool(taken.all())
            else values.masked_fill(~taken.reshape(*taken.shape, *(1,) * (values.ndim - 2)), 0)
        )

    finals = torch.zeros(table.size)
    for place, row in enumerate(table.flatten().tolist()):
        if row in final_values and mask.flat[place]:
            finals[place] = final_values[row]
    return Trajectories(
        decisions=StoredDecisions(memory, rows.flatten()),
        log_prob=kept("log_prob"),
        value=kept("value"),
        reward=happened("reward"),
        success=happened("success"),
        executed=happened("executed"),
        mask=taken,
        terminated=happened("terminated"),
        truncated=happened("truncated"),
        final_value=finals.view_as(taken),
        last_value=last_value,
        version=version,
        episode_group=episode_group,
        step_reward=happened("step_reward"),
        task=task,
        first=happened("first"),
    )
