"""The trial of an environment, before anything rests on it: one episode with random actions.

It shows whether success is reported, which may be at an episode's end alone, and whether an episode is what its seed
and its actions make of it, which everything that replays episodes, or says that two policies saw the same, goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from sim_farm.backends.gymnasium.instance import Instance, Seen
from sim_farm.backends.gymnasium.observation import read_space
from sim_farm.contract import FarmError, Float32

SEED = 0
STEPS, STEPS_OF_PICTURES = 1000, 100
"""Most env steps of the episode that looks for a success; fewer where each draws a picture."""
COMPARED = 5
"""Env steps of the beginnings that are compared."""

Numbers = Mapping[str, np.ndarray]
"""Each part of an answer as one row."""


@dataclass(frozen=True)
class Trial:
    """What the trial has shown."""

    reports_success: bool
    inexact: str
    """`TaskInfo.inexact`"""


def try_out(make: Callable[[], Instance]) -> Trial:
    """Try an environment: one episode, and its beginning again in the used environment, and in a new one beside that.
    Raises `FarmError` where an episode's first numbers are not finite."""
    with closing(make()) as used:
        action = _random_actions(used)
        most = STEPS_OF_PICTURES if read_space(used.env.observation_space).pictures else STEPS
        seen = used.reset(SEED)
        first, step, reports = [_numbers(used, seen)], 0, False
        while not reports or step < COMPARED:
            if step == most or seen.terminated or seen.truncated:
                break
            seen = used.step(action(step))
            step, reports = step + 1, reports or seen.solved is not None
            if step <= COMPARED:
                first.append(_numbers(used, seen))
        _require_finite(used.name, first[:2])
        if differs := _difference(first, _together([used], action, len(first))[0]):
            return Trial(reports, f"reset twice with seed {SEED}, {differs}")
        with closing(make()) as new:
            differs = _difference(first, _together([used, new], action, len(first))[1])
        return Trial(reports, differs and f"reset with seed {SEED} beside another of its kind, {differs}")


def _together(instances: Sequence[Instance], action: Callable[[int], Float32], count: int) -> list[list[Numbers]]:
    """The first answers of the episode in each environment, which are stepped in turn; fewer of one that ends."""
    found = [[_numbers(each, each.reset(SEED))] for each in instances]
    for step in range(count - 1):
        for each, rows in zip(instances, found, strict=True):
            if not rows[-1]["its end"].any():
                rows.append(_numbers(each, each.step(action(step))))
    return found


def _random_actions(instance: Instance) -> Callable[[int], Float32]:
    """The action of each env step, [A] within the bounds, from a stream of its own."""
    space = instance.env.action_space
    choices = getattr(space, "n", None)
    low = 0.0 if choices is not None else np.ravel(getattr(space, "low", 0.0))
    high = np.array([choices - 1]) if choices is not None else np.ravel(getattr(space, "high", 0.0))

    def action(step: int) -> Float32:
        return np.random.default_rng(step).uniform(low, high).astype(np.float32)

    return action


def _require_finite(name: str, beginning: Sequence[Numbers]) -> None:
    for step, numbers in enumerate(beginning):
        for part, values in numbers.items():
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                when = f"after step {step}" if step else f"after reset(seed={SEED})"
                raise FarmError(
                    f"{name} gives {part}[{at}] as {values[at]} {when}: every episode would be left out as a broken "
                    "one. Let it give finite numbers"
                )


def _difference(first: Sequence[Numbers], again: Sequence[Numbers]) -> str:
    """The first difference between two beginnings, in words; empty if there is none."""
    for step, (one, two) in enumerate(zip(first, again, strict=False)):
        for part in one:
            differ = np.flatnonzero(one[part] != two[part])
            if len(differ):
                at, values = int(differ[0]), (one[part], two[part])
                when = f"after {step} equal actions" if step else "at once"
                return (
                    f"it gives {part}[{at}] as {values[0][at]:g} and as {values[1][at]:g} {when} (it may draw from "
                    "numpy.random or random, which reset does not seed, in place of self.np_random)"
                )
    return ""


def _numbers(instance: Instance, seen: Seen) -> Numbers:
    parts = read_space(instance.env.observation_space)
    return {
        "the state": parts.state_of(seen.observation),
        **{f"the picture {name}": frame.ravel() for name, frame in parts.frames_of(seen.observation).items()},
        "the reward": np.array([seen.reward]),
        "its end": np.array([seen.terminated, seen.truncated]),
    }
