"""Everything that can be read of a simulator, to compare a reused one with a new one.

`readable` walks over attributes, items, closures and the properties of compiled objects, and notes numbers, words and
arrays by the path on which they were found. What may differ is named by the caller, with a reason.
"""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

COMPILED = ("sapien", "mujoco")
"""Packages whose objects have properties in place of a `__dict__`."""
GETTERS = ("get_contacts",)
"""Their methods that list what no property tells, in no order: PhysX lists contacts by where they lie in memory."""
CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, property)
"""What no episode changes."""


def readable(root: Any, ignore: Mapping[str, str]) -> dict[str, bytes | str]:
    """The values by their paths from `root`; of what was met before, the path on which it was. Left out are paths that
    a pattern of `ignore` is found in, each of which has its reason."""
    left_out = re.compile("|".join(ignore) or "(?!)")
    values: dict[str, bytes | str] = {}
    seen: dict[int, str] = {}
    kept: list[Any] = []  # so that no `id` is given twice
    ahead: deque[tuple[str, Any]] = deque([("", root)])
    while ahead:
        path, value = ahead.popleft()
        if left_out.search(path) or isinstance(value, CODE):
            continue
        plain = _plain(value)
        if plain is not None:
            values[path] = plain
        elif id(value) in seen:
            values[path] = f"is {seen[id(value)]}"
        else:
            seen[id(value)] = path
            kept.append(value)
            ahead.extend((f"{path}{name}", part) for name, part in _parts(value))
    return values


def differences(one: Mapping[str, bytes | str], other: Mapping[str, bytes | str]) -> list[str]:
    """The paths on which two readings differ, with what is short enough to be shown."""
    different = []
    for path in sorted(one.keys() | other.keys()):
        left, right = one.get(path), other.get(path)
        if left != right:
            different.append(f"{path}: {str(left)[:60]} and {str(right)[:60]}")
    return different


def _plain(value: Any) -> bytes | str | None:
    """Of numbers, words and arrays: their bits. None for what has parts."""
    if value is None or isinstance(value, bool | int | str | bytes | Enum):
        return repr(value)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype == object else f"{value.dtype}{value.shape}".encode() + value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value) is np.random.RandomState:
        return repr(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.device | torch.dtype | np.dtype | complex | range | slice):
        return repr(value)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Named parts, each with the end of its path."""
    if isinstance(value, Mapping):
        # Keys that are objects have no name that is equal in two simulators; their order is.
        for i, (key, part) in enumerate(value.items()):
            yield f"[{key!r}]" if isinstance(key, str | int | float | tuple) else f"[{i}]", part
    elif isinstance(value, list | tuple | deque | np.ndarray):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield ".items", repr(sorted(map(repr, value)))
    elif isinstance(value, types.MethodType):
        yield from ((".self", value.__self__), (".function", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield ".defaults", value.__defaults__
        for i, cell in enumerate(value.__closure__ or ()):
            yield f".closure[{i}]", cell.cell_contents
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        if type(value).__module__.partition(".")[0] in COMPILED:
            yield from _properties(value)


def _properties(value: Any) -> Iterator[tuple[str, Any]]:
    """Of a compiled object: everything that is no method. A property that cannot be read has the error as its value."""
    for name in dir(type(value)):
        if name.startswith("_"):
            continue
        try:
            part = getattr(value, name)
            part = sorted(part(), key=_content) if name in GETTERS else part
        except Exception as error:  # the compiled packages raise many kinds
            part = type(error).__name__
        if not callable(part):
            yield f".{name}", part


def _content(contact: Any) -> str:
    """What orders contacts: the names of what touches, and where."""
    bodies = [body.entity.name for body in contact.bodies]
    return repr((bodies, [(point.position.tolist(), point.normal.tolist()) for point in contact.points]))
