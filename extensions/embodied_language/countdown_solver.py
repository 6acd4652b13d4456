"""Answers `text/countdown_<n>` by trying every expression, in the tokens of a language model's tokenizer."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_language.prompts import Prompts
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.policy_kind import PolicyKind

PROBLEM = re.compile(r"Make (?P<target>[0-9]+) from (?P<numbers>[0-9, ]+)\.", re.ASCII)
MOST_MADE = 400
"""The largest number that two numbers of a problem make: 20 * 20."""
MOST_KNOWN = 2000
"""Sets of numbers whose expressions are kept: three numbers from 1 to 20 make 1,540."""


class CountdownSolver(Policy):
    """Says an expression of all the numbers with the target's value, between `<answer>` and `</answer>`.

    Reads `instruction`.
    The tokens are those of the tokenizer in the directory `tokenizer`. Of several expressions one is drawn; without
    noise it is the first. To a share `worked` of the instructions with three numbers, by a checksum, the answer says
    first how its expression is found (`working`). An instruction that is no countdown is answered by nothing. Every
    log-prob and value is zero: there is nothing to train.
    """

    kind = "countdown_solver"

    def __init__(self, spec: PolicySpec, *, tokenizer: str = "", worked: float = 0.0) -> None:
        """Raises `PolicyError` where `tokenizer` is no directory with a tokenizer, or `worked` is no share."""
        super().__init__()
        if not 0 <= worked <= 1:
            raise PolicyError(f"policy.options.worked is a share from 0 to 1, got {worked}")
        if not Path(tokenizer, "tokenizer.json").is_file():
            raise PolicyError(
                f"countdown_solver says tokens: set policy.options.tokenizer to a language model's directory, got "
                f"{tokenizer!r}"
            )
        self.spec, self._tokenizer, self._worked = spec, tokenizer, worked
        self._prompts = Prompts(Path(tokenizer), chat=False, system="", template="{}")
        self.noise_dim = 1
        self.value_head = nn.Identity()

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        uniform = torch.zeros(len(inputs.instruction)) if noise is None else torch.special.ndtr(noise[:, 0].double())
        tokens = torch.full((len(inputs.instruction), self.spec.chunk), float(self._prompts.end))
        for row, (text, share) in enumerate(zip(inputs.instruction, uniform.tolist(), strict=True)):
            said = self._prompts.tokens(_answer(text, self._worked, share))[: self.spec.chunk]
            tokens[row, : len(said)] = torch.tensor(said, dtype=torch.float32)
        chunk = tokens[..., None]
        return Action(chunk, torch.zeros_like(chunk), torch.zeros(len(chunk)), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, zeros[:, 0, 0])

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros(len(inputs.instruction))

    def architecture(self) -> dict[str, Any]:
        return {"tokenizer": self._tokenizer, "worked": self._worked}


def _answer(instruction: str, worked: float, share: float) -> str:
    """An answer; `share`, from 0 to 1, says which expression it is where its working is not shown."""
    found = PROBLEM.fullmatch(instruction)
    if found is None:
        return ""
    target, numbers = int(found["target"]), tuple(map(int, found["numbers"].split(",")))
    if len(numbers) == 3 and zlib.crc32(instruction.encode()) < worked * 2**32:
        said = working(target, numbers)
        if said:
            return said
    right = solutions(target, tuple(sorted(numbers)))
    return _tagged(right[min(int(share * len(right)), len(right) - 1)]) if right else ""


def _tagged(expression: str) -> str:
    return f"<answer>{expression}</answer>"


def working(target: int, numbers: tuple[int, ...]) -> str:
    """The answer that shows how its expression of three numbers is found; empty where no expression is.

    One number after the other, in the given order: `13+16-42/377:14, 2+16` says that 16 + 13, 42 - 13 and 377 / 13 are
    the target, and then what the other two make, 14 + 2 = 16, up to the first that stands before the colon too. A full
    stop follows where none does. Intermediate results are whole and not below 0: no problem of the task needs others.
    """
    said = ""
    for place, last in enumerate(numbers):
        small, large = sorted(numbers[:place] + numbers[place + 1 :])
        wanted = _wanted(target, last)
        said += f"{last}{''.join(f'{sign}{value}' for sign, value in wanted.items())}:{large}, {small}"
        made = {"+": large + small, "-": large - small, "*": large * small}
        if small and large % small == 0:
            made["/"] = large // small
        for inner, value in made.items():
            said += f"{inner}{value}"
            for outer, other in wanted.items():
                if value == other:
                    pair = f"({large}{inner}{small})"
                    return said + _tagged(f"{pair}{outer}{last}" if len(outer) == 1 else f"{last}{outer[0]}{pair}")
        said += "."
    return ""


def _wanted(target: int, last: int) -> dict[str, int]:
    """By its sign, the first part of what makes the target with `last`; the second part, where the sign is doubled.
    Nothing above `MOST_MADE`, which no two numbers make."""
    wanted = {"+": target - last, "-": target + last, "--": last - target}
    if last and target % last == 0:
        wanted["*"] = target // last
    wanted["/"] = target * last
    if target and last % target == 0:
        wanted["//"] = last // target
    return {sign: value for sign, value in wanted.items() if 0 <= value <= MOST_MADE}


def solutions(target: int, numbers: tuple[int, ...]) -> tuple[str, ...]:
    """Expressions of all the numbers with this value, in the order of their texts.

    Of two that differ by the order of a sum's or a product's parts there is the one that says the larger part first:
    one way to say a thing is learned sooner than all of them.
    """
    return _solved(numbers).get(target, ())


@lru_cache(MOST_KNOWN)
def _solved(numbers: tuple[int, ...]) -> Mapping[int, tuple[str, ...]]:
    """Every whole value of an expression of all the numbers, with these expressions."""
    found: dict[int, set[str]] = {}
    for text, value in _expressions([(str(number), Fraction(number)) for number in numbers]):
        if value.denominator == 1:
            found.setdefault(int(value), set()).add(_plain(text))
    return {value: tuple(sorted(texts)) for value, texts in found.items()}


def _expressions(parts: list[tuple[str, Fraction]]) -> Iterator[tuple[str, Fraction]]:
    """Every expression of all the parts, with its value."""
    if len(parts) == 1:
        yield parts[0]
        return
    for i, j in combinations(range(len(parts)), 2):
        rest = [part for place, part in enumerate(parts) if place not in (i, j)]
        for joined in _joined(parts[i], parts[j]):
            yield from _expressions([joined, *rest])


def _joined(one: tuple[str, Fraction], two: tuple[str, Fraction]) -> Iterator[tuple[str, Fraction]]:
    (a, x), (b, y) = sorted((one, two), key=lambda part: (-part[1], part[0]))
    yield f"({a}+{b})", x + y
    yield f"({a}*{b})", x * y
    for left, first, right, second in {(a, x, b, y), (b, y, a, x)}:
        yield f"({left}-{right})", first - second
        if second:
            yield f"({left}/{right})", first / second


def _plain(text: str) -> str:
    """The expression without the brackets around all of it."""
    return text[1:-1] if text.startswith("(") else text


COUNTDOWN_SOLVER = PolicyKind(CountdownSolver, trainable=False, chooses=True)
