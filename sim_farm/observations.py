"""What a stage of the farm shows when it is collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim_farm.contract import Bool, Float32, UInt8

Int = npt.NDArray[np.int64]


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
    """What a stage's B environments show now, and what became of the chunk before. Arrays are the caller's."""

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
