"""Final observations of episodes whose value is bootstrapped. They are kept until the rollout's end and valued
together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embodied.trajectories.batch import join_inputs
from embodied.trajectories.memory import TrajectoryMemory
from policies.contract import Inputs


def rows_for_finals(columns: int, decisions: int, chunk: int, max_episode_steps: int) -> int:
    """Rows of the frame memory beyond the trajectories' own: one per environment into which the next final observation
    may be drawn, and one for every episode that is truncated in a rollout. Should more episodes end, whose values
    are wanted, their frames are copied."""
    return columns * (2 + decisions * chunk // max_episode_steps)


@dataclass(frozen=True)
class _Final:
    inputs: Inputs
    """Of one row, without frames, or with a copy of them."""
    row: int
    """Of the frame memory, where they are; -1: in `inputs`, or nowhere."""


class FinalObservationsKept:
    """Final observations by the flat row of the decision that ended the episode."""

    def __init__(self, memory: TrajectoryMemory) -> None:
        self._memory, columns = memory, memory.shape.columns
        first = memory.shape.rows * columns
        rows = 0 if memory.frames is None else len(memory.frames.frames)
        self._free = deque(range(first, rows))
        self._draws = len(self._free) >= columns and memory.frames is not None
        self._next = np.array([self._free.popleft() for _ in range(columns)]) if self._draws else None
        self._kept: dict[int, _Final] = {}

    def rows(self, places: np.ndarray) -> np.ndarray | None:
        """[n] rows of the frame memory for final observations of the environments in these columns of the memory."""
        return None if self._next is None else self._next[places]

    def keep(self, flat: int, place: int, inputs: Inputs) -> None:
        """Keep the final observation that follows the decision at `flat`; `inputs` has one row and no frames."""
        row = -1
        if self._next is not None:
            row = int(self._next[place])
            if self._free:
                self._next[place] = self._free.popleft()
            else:
                inputs, row = replace(inputs, frames=self._memory.frames_at(torch.tensor([row]))), -1
        self._kept[flat] = _Final(inputs, row)

    def values(self, flat: np.ndarray, value: Callable[[Inputs], Tensor]) -> dict[int, Tensor]:
        """The value of what was kept for these flat rows, in one forward pass and in their order, by flat row."""
        chosen = [row for row in flat.tolist() if row in self._kept]
        if not chosen:
            return {}
        finals = [self._kept.pop(row) for row in chosen]
        found = value(self._joined(finals))
        self._free.extend(final.row for final in finals if final.row >= 0)
        return dict(zip(chosen, found, strict=True))

    def _joined(self, finals: list[_Final]) -> Inputs:
        drawn = [final.row for final in finals if final.row >= 0]
        if len(drawn) == len(finals) and self._draws:
            inputs = join_inputs([final.inputs for final in finals], torch.arange(len(finals)))
            return replace(inputs, frames=self._memory.frames_at(torch.tensor(drawn)))
        whole = [
            f.inputs if f.row < 0 else replace(f.inputs, frames=self._memory.frames_at(torch.tensor([f.row])))
            for f in finals
        ]
        return join_inputs(whole, torch.arange(len(finals)))
