"""Text tasks: which problem a seed states, and which answers are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim_farm.contract import FarmError, TaskFiles


@dataclass(frozen=True)
class Problem:
    """One problem, and the verifier of its answers."""

    text: str
    """What is asked, in words."""
    verify: Callable[[str], float]
    """Score in [0, 1] of an answer's text; 1.0 is solved. What it raises makes the episode a broken one and is said
    (`verifying`)."""
    reply: Callable[[str], str] = lambda answer: ""
    """What is said to a wrong answer before the next turn."""
    place: str = ""
    """Where the problem is from, for messages: `row 3 of FILE`."""


@dataclass(frozen=True)
class TextTask:
    """A family of problems, and the limits of its texts."""

    problem: Callable[[int], Problem]
    """The problem of an episode's seed: equal seeds state equal problems, in any process."""
    prompt_bytes: int
    """Longest statement of a problem, in UTF-8 bytes."""
    answer_tokens: int
    """Tokens of an answer, of all its turns and with their end-of-sequence tokens, after which it is cut off."""
    turns: int = 1
    """Answers that may be given, until one is solved."""
    reply_tokens: int = 0
    """Longest reply between two turns; a longer one is cut off."""
    files: TaskFiles | None = None
    """The file of its problems: seed s states that of `files.instructions[s % len]`."""

    def __post_init__(self) -> None:
        """Raises `FarmError`."""
        for name, least in (("prompt_bytes", 1), ("answer_tokens", 1), ("turns", 1), ("reply_tokens", 0)):
            if getattr(self, name) < least:
                raise FarmError(f"{name} of a text task is at least {least}, got {getattr(self, name)}")
