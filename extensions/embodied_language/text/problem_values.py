"""What a row of a problem file holds, as text: statements and expected answers in the shapes that datasets have.

A statement is a text, or a list of messages (`role`, `content`) of which one is the user's. An answer is a text, a
number, which becomes plain decimals, a message, or a struct with `ground_truth`. Either may be the JSON text of such a
list or struct. What is none of these is refused: Python's text of it is no problem.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

Value = Any
"""What JSON or parquet has in a column."""
GROUND_TRUTH = "ground_truth"
PICTURES = ("images", "image", "videos", "video", "audios", "audio")
"""Columns that datasets have beside a statement, of what words do not tell."""


class Wrong(Exception):
    """The value is no problem's; the message says what it is, and what it may be."""


def column(row: Value, name: str, setting: str) -> Value:
    """The value of the column `name`, or of `outer.inner` within a struct. `setting` is the `ProblemFile`'s field that
    names it. Raises `Wrong` where there is none."""
    if not isinstance(row, Mapping):
        raise Wrong(f"{_shown(row)} is no object with columns")
    if name in row:
        return row[name]
    found: Value = row
    for part in name.split("."):
        found = _decoded(found)
        if not isinstance(found, Mapping) or part not in found:
            there = ", ".join(map(str, row))
            raise Wrong(f"no column {name!r}; it has {there}. Set {setting} of the ProblemFile to one of these")
        found = found[part]
    return found


def check_no_pictures(row: Value) -> None:
    """Raise `Wrong` for a row with pictures: a problem is told in words alone."""
    for name in PICTURES if isinstance(row, Mapping) else ():
        if _holds(row.get(name)):
            raise Wrong(
                f"the column {name!r} is not empty, and a problem is told in words alone: leave such rows out, or the "
                "column if the words are enough"
            )


def _holds(value: Value) -> bool:
    """False for null, and for what is empty or holds nulls alone."""
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    return any(map(_holds, value)) if _is_list(value) else value not in (None, "", b"")


def prompt_text(value: Value) -> str:
    """The statement: the user's message, after the system's if there is one."""
    value = _decoded(value)
    if not _is_list(value):
        return _text(value, "the statement")
    messages = [_message(one) for one in value]
    roles = [role for role, _ in messages]
    if roles not in (["user"], ["system", "user"]):
        raise Wrong(
            f"the statement has messages of {', '.join(map(repr, roles)) or 'nobody'}: a problem has one of 'user', "
            "and may have one of 'system' before it"
        )
    _text(messages[-1][1], "the statement")
    return "\n\n".join(text for _, text in messages if text.strip())


def answer_text(value: Value) -> str:
    """The expected answer; what follows `####` in it."""
    value = _decoded(value)
    if isinstance(value, Mapping) and GROUND_TRUTH in value:
        value = value[GROUND_TRUTH]
    if _is_list(value) and len(value) == 1 and isinstance(value[0], Mapping):
        role, text = _message(value[0])
        if role != "assistant":
            raise Wrong(f"the answer is a message of {role!r}, not of 'assistant'")
        value = text
    return _text(_text(value, "the answer").rpartition("####")[2].strip(), "the answer")


def _message(value: Value) -> tuple[str, str]:
    """Role and text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str) or "content" not in value:
        raise Wrong(f"{_shown(value)} is no message with role and content")
    content = value["content"]
    if _is_list(content):  # parts, as some interfaces have them
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise Wrong(f"a message has the part {_shown(part)}, and only parts with a text can be told")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Wrong(f"a message has the content {_shown(content)}, which is no text")
    return value["role"], content


def _text(value: Value, what: str) -> str:
    """A text or number as text. Raises `Wrong` for anything else, for none, and for an empty text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise Wrong(f"{what} is null: leave the row out")
    if isinstance(value, str):
        if not value.strip():
            raise Wrong(f"{what} is empty: leave the row out")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Wrong(f"{what} has half of a character ({value[error.start]!r}), which is no text") from error
        return value
    if isinstance(value, bool):
        raise Wrong(f"{what} is {value}: write it as the text that is meant")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))  # the shortest text that is this number
    if isinstance(value, Decimal) and value.is_finite():
        plain = f"{value:f}"
        plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
        return "0" if plain == "-0" else plain
    if isinstance(value, Mapping):
        inner = ", ".join(map(str, value))
        raise Wrong(f"{what} is a struct with {inner}: name one of these as COLUMN.{next(iter(value), 'NAME')}")
    raise Wrong(f"{what} is {_shown(value)}, and has to be a text or a number")


def _decoded(value: Value) -> Value:
    """The list or struct whose JSON the text is; else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        messages = _is_list(found) and found and all(isinstance(one, Mapping) and "role" in one for one in found)
        if messages or (isinstance(found, Mapping) and GROUND_TRUTH in found):
            return found
    return value


def _is_list(value: Value) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _shown(value: Value) -> str:
    kind = "a list" if _is_list(value) else f"a {type(value).__name__}"
    return f"{kind} ({repr(value)[:80]})"
