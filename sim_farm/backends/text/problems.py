"""Text tasks: which problem a seed states, and which answers are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem, and the verifier of its answers."""

    text: str
    """What is asked, in words."""
    verify: Callable[[str], float]
    """Score in [0, 1] of an answer's text; 1.0 is solved. What it raises counts as 0 (`verifying`)."""


@dataclass(frozen=True)
class TextTask:
    """A family of problems, and the limits of its texts."""

    problem: Callable[[int], Problem]
    """The problem of an episode's seed: equal seeds state equal problems, in any process."""
    prompt_bytes: int
    """Longest statement of a problem, in UTF-8 bytes."""
    answer_tokens: int
    """Tokens of an answer, the end-of-sequence token included, after which it is cut off."""
