"""Workflows, profiles, clusters and plans as JSON: readable, editable, checked when read.

Devices are text, `node0:cores:0-3`. A node of a cluster may have a `count`: that many equal nodes. Unlimited amounts
(memory, links) are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from schedulers.cluster import MAX_NODES, Cluster, check_cluster
from schedulers.errors import PlanError, nearest
from schedulers.plan import DeviceRange, Plan, range_from, range_text
from schedulers.profile import Profile, check_numbers
from schedulers.workflow import Workflow, graph_of

FORMAT = 1
"""Version of the files; files of another are refused."""
MAX_FILE_BYTES = 2**26
MAX_INTEGER = 2**31 - 1
SHOWN = 100
"""Characters of a wrong value in a message."""
MAX_MESSAGE = 2000
"""Characters of a message; names in a file have any length."""

T = TypeVar("T", Workflow, Profile, Cluster, Plan)
KINDS: dict[type, str] = {Workflow: "workflow", Profile: "profile", Cluster: "cluster", Plan: "plan"}


def to_data(value: Workflow | Profile | Cluster | Plan) -> dict[str, Any]:
    """The value as plain data for JSON; `from_data` gives back an equal value."""
    data = {"format": FORMAT, "kind": KINDS[type(value)], **_plain(value)}
    if isinstance(value, Plan) and len(value.groups) == 1:
        data["groups"] = value.groups[0]
    return data


def from_data(kind: type[T], data: Any) -> T:
    """The value of plain data that `to_data` or a person wrote.

    Raises `PlanError` that says what is wrong and where: another kind or format, unknown or missing keys (with the
    nearest valid one), values of a wrong type, numbers that cannot be.
    """
    what = KINDS[kind]
    if not isinstance(data, Mapping):
        raise PlanError(f"a {what} is a mapping of keys to values, not {_type(data)}")
    data = dict(data)
    found = data.pop("kind", what)
    if found != what:
        raise PlanError(f"a {what} is expected here, not a {found if found in KINDS.values() else _shown(found)}")
    version = data.pop("format", FORMAT)
    if version != FORMAT:
        raise PlanError(f"this {what} has format {_shown(version)}; this version reads format {FORMAT}")
    if kind is Cluster:
        data = _with_equal_nodes(data)
    if kind is Plan and isinstance(data.get("groups"), int):
        data["groups"] = [data["groups"]]
    try:
        value = _read(kind, data, what)
    except RecursionError:
        raise PlanError(f"the {what} is nested too deeply") from None
    assert isinstance(value, kind)
    _check(value)
    return value


def text_of(value: Workflow | Profile | Cluster | Plan) -> str:
    """The value as JSON text, the content of a file for `load`."""
    return json.dumps(to_data(value), indent=1, ensure_ascii=False) + "\n"


def save(value: Workflow | Profile | Cluster | Plan, path: str | Path) -> None:
    """Write the value as JSON."""
    Path(path).write_text(text_of(value))


def load(kind: type[T], path: str | Path) -> T:
    """Read a file that `save` or a person wrote; raises `PlanError` that names the file."""
    what = KINDS[kind]
    try:
        data = json.loads(_text(Path(path)), object_pairs_hook=_once_each)
    except FileNotFoundError:
        raise PlanError(f"there is no {what} file {str(path)!r}") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{str(path)!r} cannot be read as JSON: {str(error)[:MAX_MESSAGE]}") from None
    except RecursionError:
        raise PlanError(f"{str(path)!r} cannot be read as JSON: it is nested too deeply") from None
    try:
        return from_data(kind, data)
    except PlanError as error:
        raise PlanError(f"{path}: {str(error)[:MAX_MESSAGE]}") from None


def _text(path: Path) -> str:
    """Text of the file. Raises `OSError`, also for a folder or too large a file, or `ValueError`."""
    size = path.stat().st_size
    if not path.is_file() or size > MAX_FILE_BYTES:
        what = f"{size} bytes are more than the {MAX_FILE_BYTES} that are read" if path.is_file() else "it is no file"
        raise OSError(what)
    return path.read_text(encoding="utf-8")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object of JSON. Raises `ValueError` for a key that occurs twice, because one of the two would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {_shown(twice)} stands there twice")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, DeviceRange):
        return range_text(value)
    if is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _plain(item) for field, item in pairs if not _left_out(field, item)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _left_out(field: Field[Any], item: Any) -> bool:
    """True for unlimited amounts, and for values that are None or empty by default."""
    if field.default is not MISSING:
        return bool(item == field.default and (item in (None, (), "") or item == math.inf))
    return field.default_factory is not MISSING and item == field.default_factory()


def _with_equal_nodes(data: dict[str, Any]) -> dict[str, Any]:
    """A node with a `count` as that many nodes: `node0`, `node1`, ... or its name and a number."""
    nodes = data.get("nodes")
    if not isinstance(nodes, (list, tuple)):
        return data
    result: list[Any] = []
    for node in nodes:
        if not isinstance(node, Mapping):
            result.append(node)
            continue
        node = dict(node)
        count = node.pop("count", None)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise PlanError(f"cluster: the count of nodes is a whole number of at least 1, not {_shown(count)}")
        if count is not None and len(result) + count > MAX_NODES:
            raise PlanError(f"cluster: {_shown(len(result) + count)} nodes are more than the {MAX_NODES} that can be")
        name = node.pop("name", None)
        if count is None:
            result.append({"name": f"node{len(result)}" if name is None else name, **node})
        else:
            first = len(result) if name is None else 0
            begins = "node" if name is None else _read(str, name, "cluster: the name of equal nodes")
            result += [{"name": f"{begins or 'node'}{first + i}", **node} for i in range(count)]
    return {**data, "nodes": result}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is DeviceRange:
        return range_from(value)
    if is_dataclass(hint):
        return _read_fields(hint, value, where)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return _read(next(argument for argument in arguments if argument is not NoneType), value, where)
    if origin is Literal:
        if value not in arguments:
            raise PlanError(f"{where} is {_shown(value)}{nearest(_shown(value), map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise PlanError(f"{where} is a list, not {_type(value)}")
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None:  # a mapping
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} is a mapping of keys to values, not {_type(value)}")
        return {
            _read(str, key, f"a key of {where}"): _read(arguments[1], value[key], f"{where}.{key}") for key in value
        }
    return _read_plain(hint, value, where)


def _read_plain(hint: type, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1023 else math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        words = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
        raise PlanError(f"{where} is {words[hint]}, not {_type(value)} {_shown(value)}")
    if isinstance(value, (int, float)) and not value >= 0:
        raise PlanError(f"{where} is {_shown(value)}; it cannot be less than 0")
    if isinstance(value, int) and value > MAX_INTEGER:
        raise PlanError(f"{where} is {_shown(value)}; it can be at most {MAX_INTEGER}")
    if isinstance(value, str) and not _is_text(value):
        raise PlanError(f"{where} is {_shown(value)}, which is no text: it has half a character")
    return value


def _read_fields(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} is a mapping of keys to values, not {_type(value)}")
    known = {field.name: field for field in fields(kind)}
    for key in value:
        if key not in known:
            raise PlanError(f"{where} has an unknown key {_shown(key)}{nearest(str(key)[:SHOWN], known)}")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise PlanError(f"{where} lacks {name!r}")
    read = {name: _read(_hints(kind)[name], item, f"{where}.{name}") for name, item in value.items()}
    for name, item in read.items():
        if item == math.inf and known[name].default != math.inf:
            raise PlanError(f"{where}.{name} is infinite, or nearly; it is a finite number")
    return kind(**read)


def _check(value: Any) -> None:
    if isinstance(value, Workflow):
        graph_of(value)
    elif isinstance(value, Cluster):
        check_cluster(value)
    elif isinstance(value, Profile):
        check_numbers(value)


def _is_text(text: str) -> bool:
    """True without half a pair of surrogates, which JSON can write, but no file or terminal takes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _shown(value: Any) -> str:
    """A value in a message, shortened; a number may have too many digits to be written at all."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _type(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "the text", bool: "the value", NoneType: "nothing"}
    return names.get(type(value), "the number" if isinstance(value, (int, float)) else type(value).__name__)
