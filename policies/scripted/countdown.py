"""Answers `text/countdown_<n>` by expressions that it tries, in the tokens of a language model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.language.prompts import Prompts

PROBLEM = re.compile(r"Make (?P<target>[0-9]+) from (?P<numbers>[0-9, ]+)\.", re.ASCII)
LARGEST_SAID = 100
"""Values of wrong expressions that are tried are whole, from 1 to this."""
MOST_KNOWN = 2000
"""Sets of numbers whose expressions are kept: three numbers from 1 to 20 make 1,540."""


class CountdownSolver(Policy):
    """Tries expressions of all the numbers, each with its value, until one has the target's. Reads `instruction`.

    With the chance `right` a try is the first expression with the target's value, and else one with another whole value
    up to 100; after a wrong one it gives up with the chance `give_up`, and after `tries` of them. So it can demonstrate
    what may be improved on. Without noise it says the right one. An instruction that is no countdown is answered by
    nothing. The tokens are those of the tokenizer in the directory `tokenizer`. Every log-prob and value is zero: there
    is nothing to train.
    """

    kind = "countdown_solver"
    chooses = True
    trainable = False

    def __init__(
        self, spec: PolicySpec, *, tokenizer: str = "", tries: int = 1, right: float = 1.0, give_up: float = 0.0
    ) -> None:
        """Raises `PolicyError` where `tokenizer` is no directory with a tokenizer, and for numbers out of range."""
        super().__init__()
        if not Path(tokenizer, "tokenizer.json").is_file():
            raise PolicyError(
                f"countdown_solver says tokens: set policy.options.tokenizer to a language model's directory, got "
                f"{tokenizer!r}"
            )
        if tries < 1 or not 0 <= right <= 1 or not 0 <= give_up <= 1:
            raise PolicyError(
                f"countdown_solver takes tries of at least 1, and right and give_up from 0 to 1, got {tries}, {right} "
                f"and {give_up}"
            )
        self.spec, self._tokenizer = spec, tokenizer
        self._tries, self._right, self._give_up = tries, right, give_up
        self._prompts = Prompts(Path(tokenizer), chat=False, system="", template="{}")
        self.noise_dim = 3 * tries
        self.value_head = nn.Identity()

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        shares = [None] * len(inputs.instruction) if noise is None else torch.special.ndtr(noise.double()).tolist()
        tokens = torch.full((len(inputs.instruction), self.spec.chunk), float(self._prompts.end))
        for row, (text, share) in enumerate(zip(inputs.instruction, shares, strict=True)):
            said = self._prompts.tokens(self._answer(text, share))[: self.spec.chunk]
            tokens[row, : len(said)] = torch.tensor(said, dtype=torch.float32)
        chunk = tokens[..., None]
        return Action(chunk, torch.zeros_like(chunk), torch.zeros(len(chunk)), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, zeros[:, 0, 0])

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros(len(inputs.instruction))

    def architecture(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer, "tries": self._tries, "right": self._right, "give_up": self._give_up
        }  # fmt: skip

    def _answer(self, instruction: str, shares: Sequence[float] | None) -> str:
        """The tries. `shares` are three uniform numbers for each: is it right, which one is it, is it the last."""
        found = PROBLEM.fullmatch(instruction)
        if found is None:
            return ""
        target, numbers = int(found["target"]), tuple(sorted(map(int, found["numbers"].split(","))))
        right = solutions(target, numbers)
        wrong = [
            f"{text}={value}"
            for value, texts in _solved(numbers).items()
            if value != target and 1 <= value <= LARGEST_SAID
            for text in texts
        ]
        said: list[str] = []
        for number in range(self._tries):
            is_right, which, last = (0.0, 0.0, 0.0) if shares is None else shares[3 * number : 3 * number + 3]
            if right and (is_right < self._right or shares is None or not wrong):
                said.append(f"{right[0]}={target}")
                break
            if wrong:
                said.append(wrong[int(which * len(wrong))])
            if last < self._give_up:
                break
        return ", ".join(said)


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
