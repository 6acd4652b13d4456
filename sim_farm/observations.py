"""What a group of the farm shows when it is collected, and reading it from the slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.contract import Bool, FarmError, Float32, TaskInfo, UInt8
from sim_farm.frame_writer import is_stamped

Int = npt.NDArray[np.int64]


class UnwrittenFrame(FarmError):
    """A frame that should have been drawn still carries the magic value."""


class StaleFrame(FarmError):
    """A frame shows another moment than the observation it belongs to."""


@dataclass(frozen=True)
class FinalObservations:
    """The last observations of the K episodes that ended in a chunk, for their bootstrapped values."""

    rows: Int
    """[K] rows of `Observations` they belong to."""
    state: Float32
    proprio: Float32
    frames: Mapping[str, UInt8]
    """Drawn only where `drawn`; other rows are unspecified."""
    instruction: tuple[str, ...]
    drawn: Bool


@dataclass(frozen=True)
class Observations:
    """What a group's B environments show now, and what became of the chunk before. Arrays are the caller's."""

    envs: Int
    """[B] index of each environment."""
    state: Float32
    proprio: Float32
    frames: Mapping[str, UInt8]
    instruction: tuple[str, ...]
    active: Bool
    """[B] False where an environment has no episode left; its row holds zeros and needs no action."""
    episode: Int
    """[B] the episode that the observation belongs to."""
    episode_step: Int
    """[B] env steps of that episode so far."""
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


def read(slots: Mapping[str, npt.NDArray[Any]], info: TaskInfo, envs: Int) -> Observations:
    """What the slots of `envs` hold. Raises `UnwrittenFrame` and `StaleFrame`."""
    active = slots["active"][envs].astype(np.bool_)
    frames = _frames(slots, info, "frames", envs, active)
    if info.cameras:
        _check_moments(slots, envs[active])
    ended = np.flatnonzero(slots["terminated"][envs] | slots["truncated"][envs])
    drawn = slots["draw_final"][envs[ended]].astype(np.bool_)
    final = FinalObservations(
        rows=ended,
        state=slots["final_state"][envs[ended]],
        proprio=slots["final_proprio"][envs[ended]],
        frames=_frames(slots, info, "final_frames", envs[ended], drawn),
        instruction=_texts(slots["final_instruction"][envs[ended]]),
        drawn=drawn,
    )
    return Observations(
        envs=envs,
        state=slots["state"][envs],
        proprio=slots["proprio"][envs],
        frames=frames,
        instruction=_texts(slots["instruction"][envs]),
        active=active,
        episode=slots["episode"][envs],
        episode_step=slots["episode_step"][envs].astype(np.int64),
        steps=slots["steps"][envs].astype(np.int64),
        reward=slots["reward"][envs],
        success=slots["success"][envs].astype(np.bool_),
        terminated=slots["terminated"][envs].astype(np.bool_),
        truncated=slots["truncated"][envs].astype(np.bool_),
        final=final,
        times_ns=slots["times_ns"][envs],
    )


def _check_moments(slots: Mapping[str, npt.NDArray[Any]], envs: Int) -> None:
    """That the frames of `envs` show the episode and env step of their observations."""
    shown = slots["frames_of"][envs]
    now = np.stack((slots["episode"][envs], slots["episode_step"][envs]), 1)
    wrong = np.flatnonzero((shown != now).any(1))
    if len(wrong):
        env = wrong[0]
        raise StaleFrame(
            f"environment {envs[env]} is at episode {now[env, 0]}, env step {now[env, 1]}; its frames show "
            f"episode {shown[env, 0]}, env step {shown[env, 1]}"
        )


def _frames(
    slots: Mapping[str, npt.NDArray[Any]], info: TaskInfo, key: str, envs: Int, drawn: Bool
) -> dict[str, UInt8]:
    frames = slots[key]
    for env in envs[drawn].tolist():
        if len(info.cameras) and is_stamped(frames[env]):
            raise UnwrittenFrame(f"environment {env}'s {key.replace('_', ' ')} were never drawn")
    pictures = {name: frames[envs, i] for i, name in enumerate(info.cameras)}
    for picture in pictures.values():
        picture[~drawn] = 0
    return pictures


def _texts(rows: UInt8) -> tuple[str, ...]:
    return tuple(bytes(row).rstrip(b"\0").decode() for row in rows)
