"""Options of the policy as typed words, `--policy.options.NAME WORD ...`.

Each is read as the policy's kind declares it: a text is taken as it stands, without YAML's quotes.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from embodied.errors import UserError
from embodied.files import parse_yaml

Words = Mapping[str, Sequence[str]]
"""By the option's name the words that were typed after it: none, one or several."""
NO = "no_"
"""Begins the name of an option that is set to false, `--policy.options.no-film`."""


def guessed(typed: Words) -> dict[str, Any]:
    """The options as YAML has them: what can be known before the policy's kind is imported."""
    found: dict[str, Any] = {}
    for name, words in typed.items():
        read = [_yaml(word) for word in words]
        if read:
            found[name] = read[0] if len(read) == 1 else read
        else:
            found[name.removeprefix(NO)] = not name.startswith(NO)
    return found


def as_declared(typed: Words, declared: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the types that the policy's kind declares; those that it does not know as they were guessed.

    Raises `UserError` for several words where one value is wanted, and for none where there must be one."""
    found: dict[str, Any] = {}
    for name, words in typed.items():
        positive = name.removeprefix(NO)
        if name not in declared and not words and positive in declared:
            found[positive] = False
        elif name in declared:
            found[name] = _read(name, words, declared[name])
        else:
            found |= guessed({name: words})
    return found


def _read(name: str, words: Sequence[str], declared: Any) -> Any:
    kinds = _members(declared)
    if not words:
        if bool in kinds or Any in kinds:
            return True
        raise UserError(
            f"--policy.options.{name} has no value: type one after it (--policy.options.{name}= removes it)"
        )
    listed = next((kind for kind in kinds if _is_list(kind)), None)
    if listed is not None:
        whole = _yaml(words[0]) if len(words) == 1 else None
        if isinstance(whole, list):
            return whole
        items = [kind for kind in typing.get_args(listed) if kind is not Ellipsis] or [Any]
        return [_value(word, _members(items[0])) for word in words]
    if len(words) > 1 and Any not in kinds:
        raise UserError(f"--policy.options.{name} takes one value, got {len(words)}: put a text with blanks in quotes")
    values = [_value(word, kinds) for word in words]
    return values if len(values) > 1 else values[0]


def _value(word: str, kinds: Sequence[Any]) -> Any:
    """One word; where the option may be something else than a text too, a text is what is nothing else."""
    read = _yaml(word)
    others = tuple(kind for kind in kinds if kind in (bool, int, float, type(None)))
    if str in kinds and type(read) not in others:
        return word
    return read


def _members(declared: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    if typing.get_origin(declared) is typing.Annotated:
        return _members(typing.get_args(declared)[0])
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(declared) for member in _members(part))
    if typing.get_origin(declared) is typing.Literal:
        return tuple({type(value) for value in typing.get_args(declared)})
    return (declared,)


def _is_list(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, (str, bytes))


def _yaml(word: str) -> Any:
    """The word as YAML has it; itself where it is none."""
    try:
        return parse_yaml(word, "it")
    except UserError:
        return word
