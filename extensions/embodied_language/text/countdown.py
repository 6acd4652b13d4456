"""Countdown: reach a target from given numbers by +, -, * and /, each number used at most once.

An answer is an expression such as `(3 + 5) * 7`; `= 56` may follow it, and if the text has `<answer>` tags, what stands
in the last pair counts, where tabs and line feeds are blanks too. It is read by the parser below: digits, the four
signs, brackets and blanks of ASCII, computed in fractions. Anything else is a wrong answer.
"""

from __future__ import annotations

import re
import zlib
from fractions import Fraction
from functools import partial

import numpy as np

from embodied_language.text.problems import Problem, TextTask

LARGEST = 20
"""Numbers are drawn from 1 to this."""
LARGEST_TARGET = 100
HELD_OUT = 8
"""One problem in so many is held out, by a checksum of its target and numbers."""
LONGEST = 200
"""Characters of an expression; a longer one is wrong. Bounds the parser's depth too."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
WHITE_SPACE = re.compile(r"[ \t\r\n\f\v]+")
TOKEN = re.compile(r"[0-9]+|[-+*/()]", re.ASCII)


def countdown(count: int, unseen: bool, seed: int) -> Problem:
    """The problem of the seed: `count` numbers, and a target from 1 to `LARGEST_TARGET` that all of them reach.
    `unseen`: one of the problems that are held out, which without it no seed states, in whatever order."""
    rng = np.random.default_rng([seed, count])
    while True:
        numbers = rng.integers(1, LARGEST + 1, count).tolist()
        target = _reached(rng, numbers)
        if target is None:
            continue
        held_out = zlib.crc32(f"{target} {sorted(numbers)}".encode()) % HELD_OUT == 0
        if held_out == unseen:
            text = f"Make {target} from {', '.join(map(str, numbers))}."
            return Problem(text, partial(verify, tuple(numbers), target), reply)


def mismatched(count: int, seed: int) -> Problem:
    """A held-out problem that is judged as another one: a control, in which reading does not help."""
    stated, judged = (countdown(count, True, one) for one in (seed, seed + 1))
    return Problem(stated.text, judged.verify)


def verify(numbers: tuple[int, ...], target: int, answer: str) -> float:
    """1.0 if the expression in the answer has the value `target` and takes each of the numbers at most once."""
    left, equals, right = _expression(answer).partition("=")
    if equals and right.strip(" ") != str(target):
        return 0.0
    try:
        value, used = _Parser(left).parse()
    except (_Wrong, ZeroDivisionError):
        return 0.0
    available = list(numbers)
    for number in used:
        if number not in available:
            return 0.0
        available.remove(number)
    return float(value == target)


def reply(answer: str) -> str:
    """Reply to a wrong answer: its value, where it has one."""
    try:
        value, _ = _Parser(_expression(answer).partition("=")[0]).parse()
    except (_Wrong, ZeroDivisionError):
        return "That is wrong. Again: "
    return f"That is {value}. Again: "


def _expression(answer: str) -> str:
    """What counts of an answer."""
    tagged = ANSWER.findall(answer)
    return (WHITE_SPACE.sub(" ", tagged[-1]) if tagged else answer).strip(" ")


def _reached(rng: np.random.Generator, numbers: list[int]) -> int | None:
    """The value of a random expression of all the numbers; None where it is no target."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        first, second = (values.pop(int(rng.integers(len(values)))) for _ in range(2))
        sign = "+-*/"[int(rng.integers(4))]
        if sign == "/" and not second:
            return None
        values.append(_combined(sign, first, second))
    (value,) = values
    whole = value.denominator == 1 and 1 <= value <= LARGEST_TARGET
    return int(value) if whole else None


def _combined(sign: str, left: Fraction, right: Fraction) -> Fraction:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right if sign == "*" else left / right


class _Wrong(Exception):
    """The text is no expression."""


class _Parser:
    """Recursive descent over sum := product (("+" | "-") product)*, product := factor (("*" | "/") factor)*,
    factor := number | "(" sum ")"."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise _Wrong
        self._tokens = TOKEN.findall(text)
        if "".join(self._tokens) != text.replace(" ", "") or re.search(r"[0-9] +[0-9]", text, re.ASCII):
            raise _Wrong  # characters that no expression has, or two numbers that would be read as one
        self._at = 0
        self._used: list[int] = []

    def parse(self) -> tuple[Fraction, list[int]]:
        """The value, and the numbers that the expression takes."""
        value = self._sum()
        if self._at < len(self._tokens):
            raise _Wrong
        return value, self._used

    def _sum(self) -> Fraction:
        value = self._product()
        while (sign := self._next()) in ("+", "-"):
            self._at += 1
            value = _combined(sign, value, self._product())
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while (sign := self._next()) in ("*", "/"):
            self._at += 1
            value = _combined(sign, value, self._factor())
        return value

    def _factor(self) -> Fraction:
        read = self._next()
        self._at += 1
        if read == "(":
            value = self._sum()
            if self._next() != ")":
                raise _Wrong
            self._at += 1
            return value
        if not read.isdigit() or (len(read) > 1 and read[0] == "0"):
            raise _Wrong
        self._used.append(int(read))
        return Fraction(self._used[-1])

    def _next(self) -> str:
        """The next token; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""


COUNTDOWN = {
    f"countdown_{count}{name}": TextTask(problem, prompt_bytes=64, answer_tokens=128)
    for count in (3, 4)
    for name, problem in (
        ("", partial(countdown, count, False)),
        ("_unseen", partial(countdown, count, True)),
        ("_mismatched", partial(mismatched, count)),
    )
} | {
    "countdown_3_two_tries": TextTask(
        partial(countdown, 3, False), prompt_bytes=64, answer_tokens=64, turns=2, reply_tokens=32
    )
}
"""`_unseen`: the held-out problems; `_mismatched`: these, each judged as another."""
