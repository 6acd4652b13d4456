"""Trajectory assembly: from decisions in the order in which they were taken to trajectories [T, B].

A decision record holds the flat rows of one group's decision in the trajectory memory, the environments that took it,
and the numbers of their episodes. Assembly makes a table of flat rows from the records. The table does not depend on
the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.trajectories.batch import StoredDecisions, Trajectories
from embodied.trajectories.memory import TrajectoryMemory
from sim_farm.client.observations import Observations
from sim_farm.episodes import ANY


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
    start: int = ANY
    """Which of its task's starts it began from; `ANY` where none was drawn."""


@dataclass(frozen=True)
class Decision:
    """One decision of one group of n environments."""

    flat: np.ndarray
    """[n] flat rows of the trajectory memory."""
    envs: np.ndarray
    """[n] columns of the run's environments."""
    active: np.ndarray
    """[n] bool, the environment took it: the others rest."""
    episode: np.ndarray
    """[n] the number of each environment's episode."""


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
        for env, start in sorted(zip(columns[over].tolist(), seen.last_start[over].tolist(), strict=True)):
            total, length = float(self.total[env]), int(self.length[env])
            solved = bool(self.solved[env]) and math.isfinite(total)
            ended.append(EndedEpisode(env, solved, total, length, task, start))
            self.total[env] = self.length[env] = 0
            self.solved[env] = False
        return ended


def table_of_decisions(groups: Sequence[Sequence[Decision]], num_envs: int) -> tuple[np.ndarray, np.ndarray]:
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
    groups: Sequence[Sequence[Decision]], episode: int, first: int, last: int
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
    )
