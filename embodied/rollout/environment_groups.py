"""Environment groups: environments of one task that are stepped together and decided for in one batch.

The rollout loop and the evaluator serve them alike: the one that is ready and has decided least comes first. Why these
are two loops: docs/decisions/0208-evaluator-loop.md.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from embodied.trajectories.batch import GroupDecision, to_inputs
from policies.contract import Inputs
from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations


class EnvironmentGroup:
    """A group's environments, its place in the trajectory memory, and its decisions of the rollout."""

    def __init__(self, number: int, task: int, envs: np.ndarray, first_column: int) -> None:
        self.number, self.task = number, task
        self.envs = envs
        """[n] numbers of its environments in the run."""
        self.columns = np.arange(first_column, first_column + len(envs))
        """[n] their columns of the trajectory memory, which lie next to each other."""
        self.row = 0
        """Row of the trajectory memory where its present observation is, or will be."""
        self.observations: Observations | None = None
        self.pending: GroupDecision | None = None
        """The decision whose outcome is not known yet."""
        self.decisions: list[GroupDecision] = []
        self.decided = 0
        """Number of its decisions so far, by which groups take turns."""
        self.arrow = 0
        """Number of the trace's arrow from its observation to the next decision."""

    def flat(self, row: int, width: int) -> np.ndarray:
        """[n] flat rows of its environments at a row of the memory."""
        return row * width + self.columns


def groups_of(farm: Farm) -> tuple[EnvironmentGroup, ...]:
    """The environment groups of all tasks; in the memory the environments of a group lie next to each other."""
    offsets = np.cumsum([0, *(spec.num_envs for spec in farm.specs)])
    found, column = [], 0
    for number in range(farm.groups):
        task, envs = farm.task_of(number), farm.envs_of(number)
        found.append(EnvironmentGroup(number, task, envs + offsets[task], column))
        column += len(envs)
    return tuple(found)


def next_group(farm: Farm, groups: Sequence[EnvironmentGroup], resting: Container[int]) -> EnvironmentGroup | None:
    """The group with the fewest decisions among those whose observations are there: groups that the farm has stepped,
    and collected ones whose number is not in `resting`. None if the farm is still stepping all."""
    found = [group for group in groups if group.observations is not None and group.number not in resting]
    found += [groups[number] for number in farm.ready()]
    return min(found, key=lambda group: (group.decided, group.number), default=None)


@dataclass(frozen=True)
class DecisionRequest:
    """Observations of the n environments of a group that have an episode, and the keys of their noise."""

    task: int
    envs: np.ndarray
    """int64 [n] numbers of the environments within the task."""
    episode: np.ndarray
    """int64 [n]"""
    step: np.ndarray
    """int64 [n] env steps of the episode so far."""
    inputs: Inputs
    """n rows."""
    frame_rows: np.ndarray | None = None
    """int64 [n] rows of the frame memory with the frames, or [n, K], for a policy that maps it; None: `inputs` has
    them."""

    @classmethod
    def of(
        cls, farm: Farm, group: EnvironmentGroup, seen: Observations, reads: tuple[str, ...], cameras: tuple[str, ...]
    ) -> DecisionRequest:
        """The request of a group; `cameras` are the policy's names."""
        rows = np.flatnonzero(seen.active)
        inputs = to_inputs(seen, reads, farm.specs[group.task].episodes, cameras)
        if len(rows) < len(seen.envs):
            inputs = inputs.rows(torch.from_numpy(rows))
        return cls(group.task, seen.envs[rows], seen.episode[rows], seen.episode_step[rows], inputs)
