"""Results of an evaluation whose trials are attempted several times: pass@k, with intervals over trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from embodied.rollout.evaluator import EpisodeOutcome, summarise
from embodied.statistics import pass_at


def summarised(outcomes: Sequence[EpisodeOutcome], attempts: int) -> dict[str, float]:
    """`summarise`; with several attempts at a trial, and success, also `pass@k` with its 95% interval for k = 1, 2, 4,
    ... and `attempts`. The intervals of success are then over trials too: attempts at one trial are not
    independent."""
    found = summarise(outcomes)
    if attempts == 1 or "success_once" not in found:
        return found
    solved = _solved(outcomes, attempts, [bool(one.success) for one in outcomes])
    for k in counted(attempts):
        name = f"pass@{k}"
        found[name], found[f"{name}_low"], found[f"{name}_high"] = pass_at(k, attempts, solved)
    at_end = _solved(outcomes, attempts, [bool(one.success_at_end) for one in outcomes])
    for name, counts in (("success", solved), ("success_once", solved), ("success_at_end", at_end)):
        _, found[f"{name}_low"], found[f"{name}_high"] = pass_at(1, attempts, counts)
    return found


def _solved(outcomes: Sequence[EpisodeOutcome], attempts: int, flags: Sequence[bool]) -> list[int]:
    """For each trial how many of its attempts have the flag."""
    counts = Counter[tuple[str, int]]()
    for one, flag in zip(outcomes, flags, strict=True):
        counts[one.task, one.trial // attempts] += flag
    return list(counts.values())


def counted(attempts: int) -> list[int]:
    """The k of pass@k: the powers of two below `attempts`, and `attempts`."""
    return [*(1 << power for power in range((attempts - 1).bit_length())), attempts]
