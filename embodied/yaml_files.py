"""YAML that a person or a stranger wrote, as plain data of bounded size: whatever it says, it is read or refused."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from embodied.errors import UserError, shown

LARGEST_FILE = 2**20
"""Bytes; a second or two to read."""
MOST_VALUES = 100_000
"""That it says: a few lines of aliases can say more than a machine holds."""


def read_yaml(path: Path) -> Any:
    """What the file says. Raises `UserError`, which names it."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size > LARGEST_FILE:
            what = f"{size} bytes, and at most {LARGEST_FILE} are read" if path.is_file() else "no file"
            raise UserError(f"{path} cannot be read: it is {what}")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: it is not UTF-8 ({error})") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """What the text says. Raises `UserError`, which names the `source`."""
    try:
        data = _Loader(text).get_single_data()
    except RecursionError:
        raise UserError(f"{source} is not valid YAML: it is nested too deeply") from None
    # PyYAML's constructors let errors through of what they are made with: of dates, numbers, base 64, ...
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise UserError(f"{source} is not valid YAML: {str(error)[:1000]}") from error
    _check_values(data, source)
    return data


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where PyYAML takes the last: the first would be read over."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)  # type: ignore[misc]
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {shown(key.value)} stands there twice", key.start_mark
                    )
                seen.add(key.value)
        return node


def _check_values(data: Any, source: str) -> None:
    """Raise `UserError` unless there are not too many, all of types that JSON has too, and texts plain."""
    open_, count = [data], 0
    while open_:
        value = open_.pop()
        count += 1
        if count > MOST_VALUES:
            raise UserError(
                f"{source} says more than {MOST_VALUES} values, or contains itself: what is it meant to be?"
            )
        if isinstance(value, dict):
            open_ += [*value, *value.values()]
        elif isinstance(value, list):
            open_ += value
        elif not isinstance(value, (str, int, float, NoneType)):
            raise UserError(f"{source}: {shown(value)} is a {type(value).__name__} to YAML: put it in quotes")
        elif isinstance(value, str) and not is_plain(value):
            raise UserError(f"{source}: {shown(value)} is no text: it has half a character, or an end in its midst")


def is_plain(text: str) -> bool:
    """Whether files, paths and terminals take it: no lone surrogate and no null."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
