"""Problems from files: JSONL or parquet, a row a problem, with a named verifier.

# my_problems.py; then env.task my_problems:BACKEND/gsm8k
from embodied_language.text.problem_files import ProblemFile, problem_backend

BACKEND = problem_backend(gsm8k=ProblemFile("gsm8k.jsonl", prompt="question", answer="answer", verifier="math"))
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from embodied_language.text.math_answers import check_package, math_equal
from embodied_language.text.physics import text_backend
from embodied_language.text.problem_values import (
    Value,
    Wrong,
    answer_text,
    check_no_pictures,
    column,
    prompt_text,
)
from embodied_language.text.problems import Problem, TextTask
from embodied_language.text.verifying import NoScore, VerifierFailed, VerifierProcess
from sim_farm.contract import Backend, FarmError, TaskFiles

_log = logging.getLogger(__name__)
PROMPT = "{prompt}"
PROBED = 8
"""Rows whose expected answers are scored before a run, until one is worth something."""


@dataclass(frozen=True)
class ProblemFile:
    """A file of problems. An episode's seed, modulo the number of rows, is the problem's row."""

    path: str
    """`.jsonl` or `.parquet`."""
    prompt: str = "prompt"
    """Column of the problem's statement: a text, or messages of which the user's is one. A system's message comes
    before it. `outer.inner` names what lies in a column of structs."""
    answer: str = "answer"
    """Column of the expected answer: a text, a number (read as plain decimals: 1e-05 is `0.00001`), or a struct with
    `ground_truth` (verl's `reward_model`). In GSM8K's form it may be a whole solution: what follows `####` counts."""
    verifier: str = "exact"
    """`exact`: equal texts, but for blanks at the ends and the commas between a number's thousands; `math`: equal by
    the package math-verify (`math_answers`); or `package.module:NAME`, a function (answer, expected) -> score in
    [0, 1]."""
    instruction: str = PROMPT
    """What the policy is told, with `{prompt}` for the statement. Other braces stay as they are."""
    answer_tokens: int = 1024
    """Longest answer in tokens."""


@dataclass(frozen=True)
class Row:
    """One problem of a file."""

    text: str
    answer: str
    place: str
    """`row 3 of FILE`, from 1."""


def problem_backend(**files: ProblemFile) -> Backend:
    """A backend whose tasks are these files, by their names. A file is read when its task is asked for."""
    return text_backend("problems", lambda: _Tasks(files))


class _Tasks(Mapping[str, TextTask]):
    """The task of each file."""

    def __init__(self, files: Mapping[str, ProblemFile]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> TextTask:
        return _task(self._files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def exact(answer: str, expected: str) -> float:
    """1.0 if the texts are equal, but for blanks at their ends. A number's commas between thousands are left out."""
    return float(_plain(answer) == _plain(expected))


def _plain(text: str) -> str:
    text = text.strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
VERIFIERS = {"math": f"{math_equal.__module__}:{math_equal.__name__}"}
"""Verifiers that may not end, which run in a process of their own."""
BUILT_IN = ("exact", *VERIFIERS)


@cache
def _task(file: ProblemFile) -> TextTask:
    """Raises `FarmError` where the file cannot be read, a row is no problem, or the verifier cannot be used."""
    rows = _rows(file)
    verify = _verifier(file.verifier)
    _check_verifier(file.verifier, verify, rows)
    longest = max(len(row.text.encode()) for row in rows)
    said = json.dumps([[row.text, row.answer] for row in rows], ensure_ascii=False)
    digest = hashlib.sha256(f"{file.verifier}\n{said}".encode("utf-8", "surrogatepass")).hexdigest()
    files = TaskFiles(digest, instructions=tuple(row.text for row in rows), source=str(Path(file.path).expanduser()))
    return TextTask(partial(_problem, rows, verify), longest, file.answer_tokens, files=files)


def _check_verifier(name: str, verify: Callable[[str, str], float], rows: tuple[Row, ...]) -> None:
    """Score expected answers as answers, as code which always fails would fail on them. Raises `FarmError`.

    A verifier of this project that finds none of them right is refused. That of a user may expect what is no answer,
    such as the tests of a program, so that this is a warning."""
    probed = [rows[place * len(rows) // PROBED] for place in range(PROBED)] if len(rows) > PROBED else rows
    for row in probed:
        try:
            worth = verify(row.answer, row.answer)
        except VerifierFailed as error:
            advice = "A verifier scores every text from 0 to 1: have it return 0.0 for one that it cannot read"
            raise FarmError(
                f"{error}; so it did with the expected answer of {row.place}, {row.answer[:200]!r}, as the answer. "
                f"{'' if isinstance(error, NoScore) else advice}".rstrip()
            ) from error
        if worth > 0.0:
            break
    else:
        others = f", and so those of {len(probed) - 1} more rows" if len(probed) > 1 else ""
        said = (
            f"the verifier {name} scores the expected answer of {rows[0].place}, {rows[0].answer[:200]!r}, 0.0 as the "
            f"answer{others}"
        )
        if name in BUILT_IN:
            raise FarmError(
                f"{said}: it reads no answer in these. Name the column of the answers: answer of ProblemFile"
            )
        _log.warning(
            "%s. If what it expects is an answer, no answer is right: are its arguments swapped (they are answer, "
            "expected), or is the answer in another column?",
            said,
        )
    try:
        verify("", rows[0].answer)
    except NoScore as error:
        raise FarmError(f"{error}; so it did with the empty text as the answer to {rows[0].place}") from error
    except VerifierFailed:
        pass  # an answer that it fails on is a broken episode, which is said where it comes


def _problem(rows: tuple[Row, ...], verify: Callable[[str, str], float], seed: int) -> Problem:
    row = rows[seed % len(rows)]
    return Problem(row.text, lambda answer: verify(answer, row.answer), place=row.place)


def _verifier(name: str) -> Callable[[str, str], float]:
    """Raises `FarmError` where there is none of the name, or its code cannot be imported."""
    if name == "exact":
        return exact
    if name == "math":
        check_package()
    reference = VERIFIERS.get(name, name)
    if ":" not in reference:
        valid = ", ".join(BUILT_IN)
        raise FarmError(f"a verifier is {valid}, or a function of yours as package.module:NAME, got {name!r}")
    return VerifierProcess(reference)


def _rows(file: ProblemFile) -> tuple[Row, ...]:
    """Raises `FarmError`, which names the row, where one is no problem."""
    if PROMPT not in file.instruction:
        raise FarmError(
            f"the instruction of a ProblemFile has {PROMPT} where the problem stands, got {file.instruction!r}"
        )
    path = Path(file.path).expanduser()
    found = []
    for number, (at, row) in enumerate(_records(path), start=1):
        place = f"row {number} of {path}{at}"
        try:
            check_no_pictures(row)
            prompt = prompt_text(column(row, file.prompt, "prompt"))
            answer = answer_text(column(row, file.answer, "answer"))
        except Wrong as error:
            raise FarmError(f"{path}, row {number}{at}: {error}") from error
        found.append(Row(file.instruction.replace(PROMPT, prompt), answer, place))
    if not found:
        raise FarmError(f"{path} has no problems")
    return tuple(found)


def _records(path: Path) -> Iterator[tuple[str, Value]]:
    """The rows, each with the number of its line where that is another than its own: ` (line 7)`."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise FarmError(f"problems are read from .jsonl and .parquet files, got {path}")
    try:
        if path.suffix == ".parquet":
            yield from _of_parquet(path)
            return
        number = 0
        # Lines end with line feeds alone: JSON's texts may have other separators (U+2028) as they are.
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                number += 1
                at = f" (line {line_number})" if line_number != number else ""
                try:
                    yield at, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise FarmError(
                        f"the problems of {path} cannot be read: line {line_number} is no JSON ({error})"
                    ) from error
    except (OSError, ValueError) as error:
        raise FarmError(f"the problems of {path} cannot be read: {error}") from error


def _of_parquet(path: Path) -> Iterator[tuple[str, Value]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise FarmError(f"{path} needs the Python package pyarrow: pip install pyarrow") from error
    try:
        table: Any = parquet.ParquetFile(path).read()
    except pyarrow.ArrowException as error:
        raise FarmError(f"the problems of {path} cannot be read: {error}") from error
    rounded = [field for field in table.schema if "float" in str(field.type)]  # float64 is a "double"
    for row in table.to_pylist():
        yield "", row | {field.name: _as_written(row[field.name], field.type) for field in rounded}


def _as_written(value: Value, kind: Any) -> Value:
    """The value of an Arrow type with its numbers as they were written: 0.1, and not the float64 that is nearest to its
    float32 or float16, also in structs and lists."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str((np.float32 if types.is_float32(kind) else np.float16)(value)))
    if types.is_struct(kind):
        return value | {field.name: _as_written(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_written(one, kind.value_type) for one in value]
    return value
