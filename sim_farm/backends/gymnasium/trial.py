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

SEED, OTHER = 0, 1
"""Seeds of the beginning that is compared, and of the episode between two such."""
STEPS, STEPS_OF_PICTURES = 1000, 100
"""Most env steps of that episode; fewer where each draws a picture."""
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
    leaves_traces: bool = False
    """An episode leaves something in the environment that the next reset does not clear: a new one is exact."""


def try_out(make: Callable[[], Instance]) -> Trial:
    """Try an environment: an episode's beginning, whose numbers must be finite; another episode to its end; then the
    first beginning again in the used environment, and in two new ones beside each other. Raises `FarmError`."""
    with closing(make()) as used:
        action = _random_actions(used)
        (first, said), *_ = _together([used], action)
        _require_finite(used.name, first[:2])
        reports = _reports_success(used, action) or said
        ((again, _),) = _together([used], action)
    with closing(make()) as one, closing(make()) as two:
        (new, _), (beside, _) = _together([one, two], action)
    if differs := _difference(first, new) or _difference(first, beside):
        alone = _difference(first, again)
        how = f"reset twice with seed {SEED}" if alone else f"made again and reset with seed {SEED}"
        return Trial(reports, f"{how}, {alone or differs}")
    return Trial(reports, "", leaves_traces=bool(_difference(first, again)))


def _reports_success(instance: Instance, action: Callable[[int], Float32]) -> bool:
    """True if the other episode does, to whose end it is run."""
    most = STEPS_OF_PICTURES if read_space(instance.env.observation_space).pictures else STEPS
    seen, reports = instance.reset(OTHER), False
    for step in range(most):
        seen = instance.step(action(step))
        reports = reports or seen.solved is not None
        if seen.terminated or seen.truncated or (reports and step >= COMPARED):
            break
    return reports


def _together(instances: Sequence[Instance], action: Callable[[int], Float32]) -> list[tuple[list[Numbers], bool]]:
    """The first answers of the episode in each environment, which are stepped in turn, and whether success is reported
    in them; fewer of one that ends."""
    found = [[_numbers(each, each.reset(SEED))] for each in instances]
    reports = [False] * len(instances)
    for step in range(COMPARED):
        for i, each in enumerate(instances):
            if not found[i][-1]["its end"].any():
                seen = each.step(action(step))
                found[i].append(_numbers(each, seen))
                reports[i] |= seen.solved is not None
    return list(zip(found, reports, strict=True))


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
