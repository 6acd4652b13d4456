"""Observations of a group of environments, read from the slots and the frame memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim_farm.contract import Bool, FarmError, Float32, UInt8
from sim_farm.observation_history import ObservationHistory
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
    when the first camera is asked for, and counted in `FrameMemory.copies`. Rows [B, K] give frames [B, K, H, W, 3].
    """

    def __init__(self, memory: FrameMemory | None, cameras: tuple[str, ...], rows: Int) -> None:
        self._memory, self._cameras, self._rows = memory, cameras, rows
        self._frames = None if memory is None or rows.ndim > 1 else memory.view(rows)

    def __getitem__(self, camera: str) -> UInt8:
        if camera not in self._cameras or self._memory is None:
            raise KeyError(camera)
        if self._frames is None:
            self._frames = self._memory.copy(self._rows)
        return self._frames[..., self._cameras.index(camera), :, :, :]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cameras)

    def __len__(self) -> int:
        return len(self._cameras)


@dataclass(frozen=True)
class FramePlaces:
    """Where the pictures of a group's observations are, by the rows of the frame memory; -1 without cameras."""

    memory: FrameMemory | None
    cameras: tuple[str, ...]
    rows: Int
    """[B, K] of the observations that a decision is made on."""
    final_rows: Int
    """[B, K] of those of an episode that has ended, where they are drawn."""


@dataclass(frozen=True)
class FinalObservations:
    """The last observations of the N episodes that ended in a chunk, for their bootstrapped values."""

    rows: Int
    """[N] rows of `Observations` they belong to."""
    state: Float32
    proprio: Float32
    frames: Mapping[str, UInt8]
    """Drawn only where `drawn`; other rows are unspecified."""
    frame_rows: Int
    """[N] rows of the farm's frame memory; -1 without cameras."""
    instruction: tuple[str, ...]
    drawn: Bool


@dataclass(frozen=True)
class Observations:
    """Observations of a group's B environments, and the outcome of the chunk before.

    Where a decision is made on K > 1 observations (`FarmSpec.observations`), states, proprioception, frames and their
    rows, also the final ones', have an axis of K behind the first, the present observation last.

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


def read(
    slots: Slots, group: GroupSlots, history: ObservationHistory, places: FramePlaces, fresh: Bool
) -> Observations:
    """Content of the group's slots, before the client counts them as collected. Rows that are not `fresh` [B] were not
    requested, and have what they had.

    Raises `UnwrittenFrame` and `StaleFrame`.
    """
    envs, active, memory = group.envs, group.get("active"), places.memory
    episode, episode_step = group.get("episode"), group.get("episode_step")
    terminated, truncated, steps = group.get("terminated"), group.get("truncated"), group.get("steps")
    ended_rows = np.flatnonzero(terminated | truncated)
    final = _finals(slots, envs, ended_rows, places)
    if memory is not None:
        drawn_now = final.drawn & fresh[final.rows]
        ended = final.rows[drawn_now]
        last = group.get("base_step")[ended] + steps[ended]
        for place, back in enumerate((*history.back, 0)):
            shown = places.rows[active, place], envs[active]
            _check_frames(memory, *shown, "", episode[active], np.maximum(episode_step[active] - back, 0))
            if drawn_now.any():
                shown = places.final_rows[ended, place], envs[ended]
                _check_frames(memory, *shown, "final ", episode[ended] - 1, np.maximum(last - back, 0))
    reward = group.get("reward")
    broken = ended_rows[~np.isfinite(reward[ended_rows]).all(1)]
    said = texts(slots["fault"][envs[broken]]) if len(broken) else ()
    return Observations(
        envs=envs,
        state=_with_earlier(group.get("past_state"), group.get("state")),
        proprio=_with_earlier(group.get("past_proprio"), group.get("proprio")),
        frames=RowFrames(memory, places.cameras, _one_or_all(places.rows)),
        frame_rows=_one_or_all(places.rows),
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


def _with_earlier(earlier: Float32, present: Float32) -> Float32:
    """The present observation [B, S], or [B, K, S] with earlier ones [B, K - 1, S] where there are any."""
    return np.concatenate([earlier, present[:, None]], axis=1) if earlier.shape[1] else present


def _one_or_all(rows: Int) -> Int:
    """[B] of one observation each, or [B, K]."""
    return rows[:, 0] if rows.shape[1] == 1 else rows


def _finals(slots: Slots, envs: Int, rows: Int, places: FramePlaces) -> FinalObservations:
    """Final observations of the episodes that ended in `rows` of the group."""
    ended = envs[rows]
    frame_rows = _one_or_all(places.final_rows[rows])
    return FinalObservations(
        rows=rows,
        state=_with_earlier(slots["final_past_state"][ended], slots["final_state"][ended]),
        proprio=_with_earlier(slots["final_past_proprio"][ended], slots["final_proprio"][ended]),
        frames=RowFrames(places.memory, places.cameras, frame_rows),
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
