"""Problems from files: JSONL or parquet, a row a problem, with a named verifier.

# my_problems.py; then env.task my_problems:BACKEND/gsm8k
from sim_farm.backends.text.problem_files import ProblemFile, problem_backend

BACKEND = problem_backend(gsm8k=ProblemFile("gsm8k.jsonl", prompt="question", answer="answer", verifier="math"))
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from sim_farm.backends.text.physics import text_backend
from sim_farm.backends.text.problems import Problem, TextTask
from sim_farm.backends.text.verifying import VerifierProcess
from sim_farm.contract import Backend, FarmError


@dataclass(frozen=True)
class ProblemFile:
    """A file of problems. An episode's seed, modulo the number of rows, is the problem's row."""

    path: str
    """`.jsonl` or `.parquet`."""
    prompt: str = "prompt"
    """Column of the problem's statement."""
    answer: str = "answer"
    """Column of the expected answer. In GSM8K's form it may be a whole solution: what follows `####` counts."""
    verifier: str = "exact"
    """`exact`: equal texts, but for blanks at the ends; `math`: equal by the package math-verify; or
    `package.module:NAME`, a function (answer, expected) -> score in [0, 1]."""
    instruction: str = "{prompt}"
    """What the policy is told, with `{prompt}` for the statement."""
    answer_tokens: int = 1024
    """Longest answer in tokens."""


@dataclass(frozen=True)
class Row:
    """One problem of a file."""

    text: str
    answer: str


def problem_backend(**files: ProblemFile) -> Backend:
    """A backend whose tasks are these files, by their names."""
    return text_backend("problems", lambda: {name: _task(file) for name, file in files.items()})


def exact(answer: str, expected: str) -> float:
    """1.0 if the texts are equal, but for blanks at their ends."""
    return float(answer.strip() == expected.strip())


def math_equal(answer: str, expected: str) -> float:
    """1.0 if math-verify finds the two equal; it reads LaTeX and plain expressions, and the last in a longer text."""
    library: Any = importlib.import_module("math_verify")

    # Its own time limits use signals of the main thread; this process has a limit of its own.
    gold, found = (library.parse(text, parsing_timeout=None) for text in (expected, answer))
    return float(library.verify(gold, found, timeout_seconds=None))


VERIFIERS = {"math": f"{__name__}:math_equal"}
"""Verifiers that may not end, which run in a process of their own."""


@cache
def _task(file: ProblemFile) -> TextTask:
    rows = _rows(file)
    longest = max(len(row.text.encode()) for row in rows)
    return TextTask(partial(_problem, rows, _verifier(file.verifier)), longest, file.answer_tokens)


def _problem(rows: tuple[Row, ...], verify: Callable[[str, str], float], seed: int) -> Problem:
    row = rows[seed % len(rows)]
    return Problem(row.text, lambda answer: verify(answer, row.answer))


def _verifier(name: str) -> Callable[[str, str], float]:
    if name == "exact":
        return exact
    reference = VERIFIERS.get(name, name)
    if ":" not in reference:
        valid = ", ".join(["exact", *VERIFIERS])
        raise FarmError(f"a verifier is {valid}, or a function of yours as package.module:NAME, got {name!r}")
    return VerifierProcess(reference)


def _rows(file: ProblemFile) -> tuple[Row, ...]:
    """Raises `FarmError`, which names the row, where one lacks a column."""
    path = Path(file.path).expanduser()
    found = []
    for number, row in enumerate(_records(path), start=1):
        for column in (file.prompt, file.answer):
            if column not in row:
                raise FarmError(f"{path}, row {number}: no column {column!r}; it has {', '.join(map(str, row))}")
        prompt, answer = str(row[file.prompt]), str(row[file.answer])
        found.append(Row(file.instruction.format(prompt=prompt), answer.rpartition("####")[2].strip()))
    if not found:
        raise FarmError(f"{path} has no problems")
    return tuple(found)


def _records(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise FarmError(f"the problems of {path} cannot be read: {error}") from error
    raise FarmError(f"problems are read from .jsonl and .parquet files, got {path}")
