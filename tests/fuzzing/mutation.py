"""Seeded damage: what people, disks and strangers do to a file. One `Random` says everything of a case."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

DEEP = 100_000
"""Brackets in brackets."""


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**30, -(10**30), 10**4000,
    0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"),
    "", " ", "x", "none", "nan", "1e400", "-1", "../../etc/passwd", "/etc/passwd", "..", ".", "a\0b", "\ud800", "é漢🤖",
    "{x}", "{0.__class__}", "%s", "x" * 5000, "node0:cores:0-99999999999", "package.module:NAME",
    [], {}, [[]], [None], [0, "x"], [1.5, 2.5], {"": {}}, {"x": None}, _nested(60), [0] * 1000,
)  # fmt: skip
"""What stands where something else should."""
SCALES = (-1, 0, 2, 10, 0.5, 1e9, 2**31, 1e300)


def data(rng: Random, original: Any) -> Any:
    """The plain data with one to three places changed, most often one."""
    holder = [copy.deepcopy(original)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(rng, holder)
    return holder[0]


def _change(rng: Random, holder: list[Any]) -> None:
    """Change one place of the tree, each as likely."""
    places = _places(holder)
    within, key = rng.choice(places)
    value = within[key]
    choices: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(rng.choice(VALUES)),
        lambda: copy.deepcopy(rng.choice(VALUES)),
        lambda: copy.deepcopy(_value(rng.choice(places))),
        lambda: [value],
        lambda: str(value),
    ]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        choices += [lambda: _scaled(value, rng.choice(SCALES)), lambda: value + rng.choice((-1, 1))]
    if isinstance(value, str):
        choices += [lambda: text(rng, value)]
    if isinstance(value, list) and value:
        choices += [lambda: value[:-1], lambda: [*value, copy.deepcopy(rng.choice(value))], lambda: value[::-1]]
    if isinstance(value, dict):
        choices += [lambda: {**value, rng.choice(("x", "", "é", "kind", "format")): copy.deepcopy(rng.choice(VALUES))}]
    if isinstance(value, dict) and value:
        choices += [lambda: _without(rng, value), lambda: _renamed(rng, value)]
    within[key] = rng.choice(choices)()


def _places(holder: list[Any]) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    open_: list[Any] = [holder]
    while open_:
        within = open_.pop()
        for key in within if isinstance(within, dict) else range(len(within)):
            found.append((within, key))
            if isinstance(within[key], (dict, list)):
                open_.append(within[key])
    return found


def _value(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]


def _scaled(value: float, factor: float) -> Any:
    try:
        return type(value)(value * factor)
    except (OverflowError, ValueError):
        return factor


def _without(rng: Random, value: dict[Any, Any]) -> dict[Any, Any]:
    gone = rng.choice(list(value))
    return {key: item for key, item in value.items() if key != gone}


def _renamed(rng: Random, value: dict[Any, Any]) -> dict[Any, Any]:
    old = rng.choice(list(value))
    new = rng.choice((text(rng, str(old)), str(old) + "x", "../x", "", "a\0b"))
    return {new if key == old else key: item for key, item in value.items()}


def text(rng: Random, original: str) -> str:
    """A letter lost, doubled or strange."""
    at = rng.randrange(len(original) + 1)
    middle = rng.choice(("", original[at : at + 1] * 2, "x", "\0", "/", "é", "-", "9"))
    return original[:at] + middle + original[at + 1 :]


def content(rng: Random, original: bytes) -> bytes:
    """The file's bytes cut, flipped, doubled, overwritten, of another encoding or of none."""
    at, end = sorted((rng.randrange(len(original) + 1), rng.randrange(len(original) + 1)))
    wrong = bytes(rng.randrange(256) for _ in range(8))
    choices: list[Callable[[], bytes]] = [
        lambda: original[:at],
        lambda: original[at:],
        lambda: original[:at] + original[min(end, at + 64) :],
        lambda: original[:at] + original[at:end] + original[at:],
        lambda: original[:at] + wrong + original[at + len(wrong) :],
        lambda: original[:at] + bytes(min(end - at, 64)) + original[min(end, at + 64) :],
        lambda: original[:at] + rng.choice((b"\xff", b"\0", b"\xed\xa0\x80", b"\xc3")) + original[at:],
        lambda: b"\xef\xbb\xbf" + original,
        lambda: b"",
    ]
    flips = [_flipped(rng, original)] * 4 if original else []
    return rng.choice([*choices, *[lambda flip=flip: flip for flip in flips]])()


def _flipped(rng: Random, original: bytes) -> bytes:
    found = bytearray(original)
    for _ in range(rng.choice((1, 1, 8))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def as_json(rng: Random, original: Any) -> bytes:
    """A JSON file with changed data, changed bytes, or both."""
    if rng.random() < 0.05:
        return rng.choice((b"[" * DEEP, b'{"x":' * DEEP, b"9" * 10_000, b'{"x": 1, "x": 2}', b"\xff\xfe{\0}\0"))
    whole = json.dumps(data(rng, original) if rng.random() < 0.8 else original).encode()
    if rng.random() < 0.05:
        whole = _doubled_key(rng, whole, b'"', b", ")
    return content(rng, whole) if rng.random() < 0.2 else whole


YAML_TRAPS = (
    "{x}: &a [*a]\n", "{x}: *none\n", "{x}: !!python/object/apply:os.system [echo]\n", "{x}: !unknown y\n",
    "{x}: 2001-99-99\n", "{x}: 2001-01-01\n", "{x}: !!int abc\n", "{x}: !!float abc\n", "{x}: !!binary abc\n",
    "{x}: !!set [a]\n", "{x}: !!omap {a: 1}\n", "{x}: !!timestamp no\n", "{x}: 1:99:99\n", "{x}: 0o9\n",
    "? [a, b]\n: {x}\n", "{a: 1}: {x}\n", "~: {x}\n", "1: {x}\n", "<<: {x}\n", "<<: [1, 2]\n", "{x}: \"\\ud800\"\n",
    "%YAML 9.9\n---\n{x}: 1\n", "--- {x}\n--- y\n", "\t{x}: 1\n", "{x}: |\n y\n  z\n", "{x}: 1_0.0e+999\n",
    "{x}: 0x_\n",
)  # fmt: skip


def bomb(levels: int) -> str:
    """A hundred characters a level that say ten times as much a level."""
    lines = ["b0: &b0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"b{level}: &b{level} [{', '.join([f'*b{level - 1}'] * 10)}]")
    return "\n".join(lines) + "\n"


def as_yaml(rng: Random, original: Any) -> bytes:
    """A YAML file with changed data, changed bytes, or what YAML alone can say."""
    if rng.random() < 0.03:
        return rng.choice((b"[" * DEEP, b"{x: " * DEEP, b"- " * DEEP, b"x: " + b"9" * 10_000, b"x: 1\nx: 2\n"))
    changed = data(rng, original) if rng.random() < 0.8 else original
    try:
        whole = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    except ValueError:  # a number of too many digits to be written
        return as_yaml(rng, original)
    if rng.random() < 0.15 and isinstance(changed, dict):
        key = rng.choice([str(key) for key in original] or ["x"])
        trap = rng.choice((*YAML_TRAPS, bomb(12), bomb(12) + f"{key}: *b11\n")).replace("{x}", key)
        whole = trap.encode("utf-8", "surrogatepass") + (whole if rng.random() < 0.5 else b"")
    if rng.random() < 0.05:
        whole = _doubled_key(rng, whole, b"\n", b"\n")
    return content(rng, whole) if rng.random() < 0.15 else whole


def _doubled_key(rng: Random, whole: bytes, begin: bytes, between: bytes) -> bytes:
    parts = whole.split(between)
    at = rng.randrange(len(parts))
    return between.join([*parts[:at], parts[at], *parts[at:]])


def as_safetensors(rng: Random, original: bytes) -> bytes:
    """A safetensors file with a changed header, other bytes, or numbers that are not finite."""
    (size,) = struct.unpack("<Q", original[:8])
    header, numbers = json.loads(original[8 : 8 + size]), original[8 + size :]
    way = rng.random()
    if way < 0.4:
        changed = json.dumps(data(rng, header)).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(changed)) + changed + numbers
    if way < 0.5:
        wrong = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + original[8:]
    if way < 0.6 and len(numbers) >= 4:
        at = rng.randrange(len(numbers) // 4) * 4
        return (
            original[: 8 + size + at] + rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\xff")) + original[8 + size + at + 4 :]
        )
    return content(rng, original)
