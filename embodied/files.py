"""Files that a crash leaves whole: written aside and renamed. Records of lines: a crash costs at most the last line."""

from __future__ import annotations

import errno
import json
import os
import re
from datetime import datetime
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from embodied.errors import UserError, shown

MOST_JSON = 64 * 2**20
"""Bytes of a JSON file that is read: so large a one is nothing that this project has written."""


def write_whole(path: Path, text: str) -> None:
    """Write the file aside, have it on the disk and rename it: a reader, also after a crash, finds the old file or the
    new one. Raises `OSError`; then the old one stays, and nothing is left of the new one."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def new_folder(root: Path, stem: str, otherwise: str) -> Path:
    """Make a folder below `root`, named by the stem and the time; processes that do so in the same second get different
    folders. Raises `UserError`, which ends with `otherwise`, if none can be made."""
    name = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not folder.is_dir():
                raise UserError(f"{folder} cannot be made ({error.strerror}); {otherwise}") from error
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); {otherwise}") from error
    raise AssertionError("there are numbers without end")


def is_full(error: BaseException) -> bool:
    """True for the error of a full disk or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, most_bytes: int = MOST_JSON) -> Any:
    """Content of a JSON file. Raises `OSError`, or `ValueError` for text that is no JSON, too large, or nested too
    deeply."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class Lines:
    """A record of lines: each is appended as a whole, or not at all.

    What a crash has left of a last line is taken away when the record is opened, lest the next one be glued to it.
    """

    def __init__(self, path: Path) -> None:
        """The file is made where there is none. Raises `OSError`."""
        self._file = path.open("ab", buffering=0)
        content = path.read_bytes()
        self._end = content.rfind(b"\n") + 1
        if self._end < len(content):
            self._file.truncate(self._end)

    def append(self, line: str) -> None:
        """Raises `OSError`, as of a full disk; then the record is as it was."""
        data = memoryview(line.encode() + b"\n")
        try:
            left = data
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)

    def sync(self) -> None:
        """Have the lines on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> list[bytes]:
    """The complete lines of a record.

    A last line without its end is left out. So are zeros, which some file systems leave after a write that a crash cut
    off: at the end, or before a later line.
    """
    *lines, _torn = path.read_bytes().split(b"\n")
    return [line.strip(b"\0") for line in lines if line.strip(b"\0")]


# --- YAML that a person or a stranger wrote, as plain data of bounded size: whatever it says, it is read or
# refused.


LARGEST_FILE = 2**20
"""Bytes; a second or two to read."""
MOST_VALUES = 100_000
"""Limit of values in a document: a few lines of aliases can expand to more than a machine's memory."""


def read_yaml(path: Path) -> Any:
    """Content of a YAML file. Raises `UserError`, which names the file."""
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
    """Content of YAML text. Raises `UserError`, which names the `source`."""
    try:
        data = _Loader(text).get_single_data()
    except RecursionError:
        raise UserError(f"{source} is not valid YAML: it is nested too deeply") from None
    # PyYAML's constructors let errors through of what they are made with: of dates, numbers, base 64, ...
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise UserError(f"{source} is not valid YAML: {str(error)[:1000]}") from error
    _check_values(data, source)
    return data


def yaml_text(data: Any, *, flow: bool = False) -> str:
    """YAML that `parse_yaml` reads back as the same data; `flow`: in one line."""
    width = 2**16 if flow else None
    text: str = yaml.dump(data, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, width=width)
    return text


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where PyYAML takes the last: the first would be read over."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {shown(key.value)} stands there twice", key.start_mark
                    )
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Puts what `_Loader` would read as a number in quotes."""


for _side in (_Loader, _Dumper):
    # YAML 1.1 takes these for text, for want of a dot or a sign: 6e-1, 1e3, 80.0e9.
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    # And 2:20 for a number to the base of 60, which is 140.
    for _first in "-+0123456789":
        _base_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?$")
        _side.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _base_60))


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
    """True for text that files, paths and terminals accept: no lone surrogate and no null."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


# --- A command's result as a JSON file.


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result; a file that cannot be written is the user's mistake, and the result is shown instead."""
    try:
        path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    except OSError as error:
        shown = json.dumps(result, default=str)
        raise UserError(f"cannot write {path} ({error.strerror}); the result is: {shown}") from error
