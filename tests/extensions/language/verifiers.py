"""Verifiers of text tasks, right and wrong. Each runs in a process of its own, which imports this module: it imports
little, because tests start many."""

from __future__ import annotations

import time
from typing import Any

NUMBER = 1
"""Not a function."""


def hangs(answer: str, expected: str) -> float:
    while answer == "9":
        time.sleep(1)
    if answer == "8":
        raise ValueError("no eights")
    return 7.0 if answer == "7" else float(answer == expected)


def gives_a_dict(answer: str, expected: str) -> Any:
    return {"score": 1.0, "acc": True}


def gives_a_tuple(answer: str, expected: str) -> Any:
    return 1.0, "right"


def gives_none(answer: str, expected: str) -> Any:
    return None


def gives_none_for_a_wrong_answer(answer: str, expected: str) -> Any:
    if answer == expected:
        return 1.0


async def gives_a_coroutine(answer: str, expected: str) -> float:
    return 1.0


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0


def gives_an_array(answer: str, expected: str) -> Any:
    import numpy as np

    return np.array([answer == expected], np.float32)


def runs_a_program(answer: str, expected: str) -> float:
    """1.0 for a program that adds one."""
    return float(answer == "lambda n: n + 1")


class Verifying:
    def __call__(self, answer: str, expected: str) -> float:
        return 1.0


def often_fails(answer: str, expected: str) -> float:
    """Fails on every answer but the first problem's expected one."""
    if answer != "expected":
        raise KeyError("boxed")
    return 1.0


def fails_on_some(answer: str, expected: str) -> float:
    if len(answer) % 3 == 0:
        raise ValueError("three")
    return 0.0
