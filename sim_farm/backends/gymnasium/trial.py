"""The trial of an environment, before anything rests on it: two episodes with random actions.

It shows whether success is reported, which may be at an episode's end alone; whether what could be a picture is a grid
of codes; and whether an episode is what its seed and its actions make of it, which everything that replays episodes, or
says that two policies saw the same, goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from sim_farm.backends.gymnasium.instance import Instance, Seen
from sim_farm.backends.gymnasium.observation import CERTAIN, MOST_CODES, Observation, Path, read_space
from sim_farm.contract import FarmError, Float32

SEED, OTHER = 0, 1
"""Seeds of the episode that is compared, and of the one between two such."""
STEPS, STEPS_OF_PICTURES = 1000, 200
"""Most env steps of the other episode; fewer where each draws a picture."""
COMPARED, COMPARED_OF_PICTURES = 200, 50
"""Most env steps of the episode that is compared."""

Numbers = Mapping[str, np.ndarray]
"""Each part of an answer as one row."""


@dataclass(frozen=True)
class Trial:
    """Results of the trial."""

    reports_success: bool
    inexact: str
    """`TaskInfo.inexact`"""
    codes: frozenset[Path] = frozenset()
    """Parts of the observation that could be pictures by their space, and are grids of codes."""
    leaves_traces: bool = False
    """An episode leaves something in the environment that the next reset does not clear: a new one is exact."""


@dataclass
class _Watched:
    """Results of all episodes of a trial so far."""

    parts: Observation
    reports_success: bool = False
    highest: dict[Path, int] = field(default_factory=dict)
    """Greatest number of each part that may be a grid of codes."""

    def read(self, instance: Instance, seen: Seen) -> Numbers:
        """The answer's numbers, all of them finite. Raises `FarmError` for others."""
        self.reports_success |= seen.solved is not None
        with instance.reading(), np.errstate(over="ignore"):
            numbers = {
                "the state": self.parts.state_of(seen.observation),
                **{f"the picture {n}": frame.ravel() for n, frame in self.parts.frames_of(seen.observation).items()},
                "the reward": np.array([seen.reward]).astype(np.float32),
                "its end": np.array([seen.terminated, seen.truncated]),
            }
            for one in self.parts.pictures:
                if one.whole and min(one.size) < CERTAIN:
                    highest = int(one.part(seen.observation).max())
                    self.highest[one.path] = max(highest, self.highest.get(one.path, 0))
        for part, values in numbers.items():
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise FarmError(
                    f"{instance.name} gives {part}[{at}] as {values[at]} {instance.when}: such an episode would be "
                    "left out as a broken one. Let it give finite numbers"
                )
        return numbers

    @property
    def codes(self) -> frozenset[Path]:
        return frozenset(path for path, highest in self.highest.items() if highest <= MOST_CODES)


def try_out(make: Callable[[], Instance]) -> Trial:
    """Try an environment: an episode; another one to its end; then the first again in the used environment, and in two
    new ones beside each other. Raises `FarmError`, as for numbers that are not finite."""
    with closing(make()) as used:
        action, watched = _random_actions(used), _Watched(read_space(used.env.observation_space))
        (first,) = _together([used], action, watched)
        _watch_other(used, action, watched)
        (again,) = _together([used], action, watched)
    with closing(make()) as one, closing(make()) as two:
        new, beside = _together([one, two], action, watched)
    found = Trial(watched.reports_success, "", watched.codes)
    if differs := _difference(first, new) or _difference(first, beside):
        alone = _difference(first, again)
        how = f"reset twice with seed {SEED}" if alone else f"made again and reset with seed {SEED}"
        return replace(found, inexact=f"{how}, {alone or differs}")
    return replace(found, leaves_traces=bool(_difference(first, again)))


def _watch_other(instance: Instance, action: Callable[[int], Float32], watched: _Watched) -> None:
    """Run the other episode to its end, where success may be reported alone."""
    most = STEPS_OF_PICTURES if watched.parts.pictures else STEPS
    watched.read(instance, instance.reset(OTHER))
    for step in range(most):
        seen = instance.step(action(step))
        watched.read(instance, seen)
        if seen.terminated or seen.truncated or (watched.reports_success and step >= COMPARED):
            break


def _together(
    instances: Sequence[Instance], action: Callable[[int], Float32], watched: _Watched
) -> list[list[Numbers]]:
    """The answers of the episode in each environment, which are stepped in turn; fewer of one that ends."""
    found = [[watched.read(each, each.reset(SEED))] for each in instances]
    for step in range(COMPARED_OF_PICTURES if watched.parts.pictures else COMPARED):
        for i, each in enumerate(instances):
            if not found[i][-1]["its end"].any():
                found[i].append(watched.read(each, each.step(action(step))))
        if all(each[-1]["its end"].any() for each in found):
            break
    return found


def _random_actions(instance: Instance) -> Callable[[int], Float32]:
    """The action of each env step, [A] within the bounds, from a separate random stream."""
    space = instance.env.action_space
    choices = getattr(space, "n", None)
    low = 0.0 if choices is not None else np.ravel(getattr(space, "low", 0.0))
    high = np.array([choices - 1]) if choices is not None else np.ravel(getattr(space, "high", 0.0))

    def action(step: int) -> Float32:
        return np.random.default_rng(step).uniform(low, high).astype(np.float32)

    return action


def _difference(first: Sequence[Numbers], again: Sequence[Numbers]) -> str:
    """The first difference between two episodes, in words; empty if there is none."""
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
