"""Observations of a group of environments, read from the slots and the frame memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim_farm.contract import Bool, FarmError, Float32, TaskInfo, UInt8
from sim_farm.shared_memory.frame_memory import FrameMemory, is_stamped
from sim_farm.shared_memory.slot_layout import GroupSlots, Slots, texts

Int = npt.NDArray[np.int64]


class UnwrittenFrame(FarmError):
    """A frame that should have been drawn still carries the magic value."""


class StaleFrame(FarmError):
    """A frame shows another moment than the observation it belongs to."""


class RowFrames(Mapping[str, UInt8]):
    """Camera to its frames uint8 [K, H, W, 3] in K rows of a frame memory.

    A view of the memory where the rows follow each other: it shows what is drawn into them later. Else a copy, made
    when the first camera is asked for, and counted in `FrameMemory.copies`.
    """

    def __init__(self, memory: FrameMemory | None, cameras: tuple[str, ...], rows: Int) -> None:
        self._memory, self._cameras, self._rows = memory, cameras, rows
        self._frames = None if memory is None else memory.view(rows)

    def __getitem__(self, camera: str) -> UInt8:
        if camera not in self._cameras or self._memory is None:
            raise KeyError(camera)
        if self._frames is None:
            self._frames = self._memory.copy(self._rows)
        return self._frames[:, self._cameras.index(camera)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cameras)

    def __len__(self) -> int:
        return len(self._cameras)


@dataclass(frozen=True)
class FinalObservations:
    """The last observations of the K episodes that ended in a chunk, for their bootstrapped values."""

    rows: Int
    """[K] rows of `Observations` they belong to."""
    state: Float32
    proprio: Float32
    frames: Mapping[str, UInt8]
    """Drawn only where `drawn`; other rows are unspecified."""
    frame_rows: Int
    """[K] rows of the farm's frame memory; -1 without cameras."""
    instruction: tuple[str, ...]
    drawn: Bool


@dataclass(frozen=True)
class Observations:
    """Observations of a group's B environments, and the outcome of the chunk before.

    Arrays are the caller's, but for the frames, which stay in the farm's frame memory: they are valid until something
    else is drawn into their rows, which is at the group's next `submit` where no other rows are given.
    """

    envs: Int
    """[B] index of each environment within its task."""
    state: Float32
    proprio: Float32
    frames: Mapping[str, UInt8]
    """Camera to uint8 [B, H, W, 3]; see `RowFrames`."""
    frame_rows: Int
    """[B] rows of the farm's frame memory; -1 without cameras."""
    instruction: tuple[str, ...]
    active: Bool
    """[B] False where an environment has no episode left; its row holds zeros and needs no action."""
    episode: Int
    """[B] the episode that the observation belongs to."""
    episode_step: Int
    """[B] env steps of that episode so far."""
    start: Int
    """[B] the seed that the client gave that episode (`SeededEpisodes`), else -1. Unspecified where no episode is
    left."""
    steps: Int
    """[B] env steps executed of the last chunk."""
    reward: Float32
    """[B, C] zero beyond the executed steps."""
    success: Bool
    """[B, C]"""
    terminated: Bool
    """[B] the last chunk ended its episode: by the task."""
    truncated: Bool
    """[B] the last chunk ended its episode: by the step limit."""
    final: FinalObservations
    times_ns: Int
    """[B, 4] physics start and end, render start and end, on the machine's monotonic clock."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """By row: why the episode that ended with a reward that is not finite is broken, where that is known."""


def read(slots: Slots, group: GroupSlots, info: TaskInfo, memory: FrameMemory | None, fresh: Bool) -> Observations:
    """Content of the group's slots, before the client counts them as collected. Rows that are not `fresh` [B] were not
    requested, and have what they had.

    Raises `UnwrittenFrame` and `StaleFrame`.
    """
    envs, active, frame_rows = group.envs, group.get("active"), group.get("frame_row")
    episode, episode_step = group.get("episode"), group.get("episode_step")
    terminated, truncated, steps = group.get("terminated"), group.get("truncated"), group.get("steps")
    ended_rows = np.flatnonzero(terminated | truncated)
    final = _finals(slots, envs, ended_rows, info, memory)
    if memory is not None:
        _check_frames(memory, frame_rows[active], envs[active], "", episode[active], episode_step[active])
        drawn_now = final.drawn & fresh[final.rows]
        if drawn_now.any():
            ended = final.rows[drawn_now]
            last = group.get("base_step")[ended] + steps[ended]
            _check_frames(memory, final.frame_rows[drawn_now], envs[ended], "final ", episode[ended] - 1, last)
    reward = group.get("reward")
    broken = ended_rows[~np.isfinite(reward[ended_rows]).all(1)]
    said = texts(slots["fault"][envs[broken]]) if len(broken) else ()
    return Observations(
        envs=envs,
        state=group.get("state"),
        proprio=group.get("proprio"),
        frames=RowFrames(memory, info.cameras, frame_rows),
        frame_rows=frame_rows,
        instruction=group.instructions(),
        active=active,
        episode=episode,
        episode_step=episode_step,
        start=group.get("start"),
        steps=steps,
        reward=reward,
        success=group.get("success"),
        terminated=terminated,
        truncated=truncated,
        final=final,
        times_ns=group.get("times_ns"),
        faults={row: fault for row, fault in zip(broken.tolist(), said, strict=True) if fault},
    )


def _finals(slots: Slots, envs: Int, rows: Int, info: TaskInfo, memory: FrameMemory | None) -> FinalObservations:
    """Final observations of the episodes that ended in `rows` of the group."""
    ended = envs[rows]
    frame_rows = slots["final_row"][ended]
    return FinalObservations(
        rows=rows,
        state=slots["final_state"][ended],
        proprio=slots["final_proprio"][ended],
        frames=RowFrames(memory, info.cameras, frame_rows),
        frame_rows=frame_rows,
        instruction=texts(slots["final_instruction"][ended]) if len(ended) else (),
        drawn=slots["draw_final"][ended],
    )


def _check_frames(memory: FrameMemory, rows: Int, envs: Int, kind: str, episode: Int, step: Int) -> None:
    """Raise unless `rows` of the memory are drawn and show the episode and env step of the observations of `envs`."""
    for row, env in zip(rows.tolist(), envs.tolist(), strict=True):
        if is_stamped(memory.frames[row]):
            raise UnwrittenFrame(f"environment {env}'s {kind}frames were never drawn into row {row}")
    shown = memory.frames_of[rows]
    wrong = np.flatnonzero((shown[:, 0] != episode) | (shown[:, 1] != step))
    if len(wrong):
        k = wrong[0]
        raise StaleFrame(
            f"environment {envs[k]} is at episode {episode[k]}, env step {step[k]}; its {kind}frames show "
            f"episode {shown[k, 0]}, env step {shown[k, 1]}"
        )
