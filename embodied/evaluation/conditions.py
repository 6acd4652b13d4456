"""Results of an evaluation under perturbations or delays: success by axis and level, paired with the episodes without.

A delay has the method in place of an axis, and its env steps in place of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from embodied.evaluation.attempts import summarised
from embodied.evaluation.protocol import Protocol
from embodied.rollout.evaluator import EpisodeOutcome
from embodied.statistics import paired_difference

Condition = tuple[str, int, int]
"""Axis, level, and the env step from which the condition holds."""
Pair = tuple[EpisodeOutcome, EpisodeOutcome]
"""An unperturbed episode, and the one that repeats it perturbed."""


def unperturbed(protocol: Protocol, outcomes: Sequence[EpisodeOutcome]) -> list[EpisodeOutcome]:
    return [outcome for outcome in outcomes if protocol.condition(outcome.task, outcome.trial) is None]


def by_condition(protocol: Protocol, outcomes: Sequence[EpisodeOutcome]) -> dict[Condition, list[EpisodeOutcome]]:
    """The perturbed episodes of all tasks by their perturbation, in the protocol's order."""
    found: dict[Condition, list[EpisodeOutcome]] = {}
    for outcome in outcomes:
        other = protocol.condition(outcome.task, outcome.trial)
        if other is not None:
            found.setdefault((other.axis, other.level, other.from_step), []).append(outcome)
    return found


def paired(protocol: Protocol, outcomes: Sequence[EpisodeOutcome]) -> dict[Condition, list[Pair]]:
    """The same, each episode with the unperturbed one that it repeats."""
    known = {(outcome.task, outcome.trial): outcome for outcome in outcomes}
    return {
        condition: [(known[one.task, one.trial % protocol.trials], one) for one in members]
        for condition, members in by_condition(protocol, outcomes).items()
    }


def conditions_data(protocol: Protocol, outcomes: Sequence[EpisodeOutcome]) -> list[dict[str, Any]]:
    """A row for each condition: success and return as an evaluation has them and, where the tasks have success, its
    difference from the unperturbed episodes."""
    rows = []
    for (axis, level, step), pairs in paired(protocol, outcomes).items():
        row = {
            "axis": axis,
            "level": level,
            "from_step": step,
            **({"kind": "delay"} if protocol.delays else {}),
            **summarised([other for _, other in pairs], protocol.attempts),
        }
        if all(one.success is not None for pair in pairs for one in pair):
            row |= difference([(other, plain) for plain, other in pairs])
        rows.append(row)
    return rows


def compared_conditions(
    protocol: Protocol, ours: Sequence[EpisodeOutcome], theirs: Sequence[EpisodeOutcome]
) -> list[dict[str, Any]]:
    """For each condition the difference of two evaluations of the same episodes."""
    mine, others = by_condition(protocol, ours), by_condition(protocol, theirs)
    return [
        {"axis": axis, "level": level, "from_step": step, **difference(list(zip(members, others[key], strict=True)))}
        for key, members in mine.items()
        for axis, level, step in [key]
    ]


def difference(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The first's success less the second's, over pairs of episodes that both have one."""
    first, second = zip(*((bool(one.success), bool(other.success)) for one, other in pairs), strict=True)
    data = asdict(paired_difference(first, second))
    low, high = data.pop("low"), data.pop("high")
    return {**data, "difference_low": low, "difference_high": high}


def differing_pairs(protocol: Protocol, outcomes: Sequence[EpisodeOutcome], count: int) -> list[Pair]:
    """At most `count` pairs of episodes with different outcomes: for each axis in turn the pair at the lowest level,
    with the pairs first that were solved unperturbed."""
    queues: dict[str, list[Pair]] = {}
    for (axis, *_), pairs in paired(protocol, outcomes).items():
        queues.setdefault(axis, []).extend(pair for pair in pairs if pair[0].success != pair[1].success)
    for queue in queues.values():
        queue.sort(key=lambda pair: not pair[0].success)
    longest = max(map(len, queues.values()), default=0)
    turns = [queue[turn] for turn in range(longest) for queue in queues.values() if turn < len(queue)]
    return turns[:count]
