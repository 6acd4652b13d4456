"""The generators of the package reasoning-gym as text tasks, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from embodied_language.text.problems import Problem, TextTask

PROMPT_BYTES, ANSWER_TOKENS = 8192, 1024
UNREPEATABLE = frozenset({"isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"})
"""Generators of reasoning-gym 0.1.25 whose problem of a seed is another one in another process: they draw from sets of
texts, or from Python's global generator."""
COMPOSED = frozenset({"composite"})
"""Generators that have no problems of their own."""
SEEDS = 2**32
"""Seeds beyond these some generators refuse."""


@cache
def tasks() -> Mapping[str, TextTask]:
    """`reasoning_gym/<name>` to its task; empty where the package is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return {}
    factory: Any = importlib.import_module("reasoning_gym.factory")
    return {
        f"reasoning_gym/{name}": TextTask(partial(_problem, name), PROMPT_BYTES, ANSWER_TOKENS)
        for name in sorted(factory.DATASETS.keys() - UNREPEATABLE - COMPOSED)
    }


def _problem(name: str, seed: int) -> Problem:
    """The first entry of the generator's dataset of this seed; the generator scores an answer itself, in [0, 1]."""
    dataset: Any = importlib.import_module("reasoning_gym").create_dataset(name, size=1, seed=seed % SEEDS)
    entry = dataset[0]
    return Problem(entry["question"], partial(_score, dataset, entry))


def _score(dataset: Any, entry: Mapping[str, Any], answer: str) -> float:
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except (ValueError, TypeError, AttributeError, LookupError):  # some scorers take its form for granted
        return 0.0
