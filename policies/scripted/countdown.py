"""Answers `text/countdown_<n>` by trying every expression, in the tokens of a language model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.language.prompts import Prompts

PROBLEM = re.compile(r"Make (?P<target>[0-9]+) from (?P<numbers>[0-9, ]+)\.", re.ASCII)


class CountdownSolver(Policy):
    """Says an expression with the target's value, drawn from all that there are. Reads `instruction`.

    The tokens are those of the tokenizer in the directory `tokenizer`. Without noise the first expression is said. An
    instruction that is no countdown is answered by nothing. Every log-prob and value is zero: there is nothing to
    train.
    """

    kind = "countdown_solver"
    chooses = True
    trainable = False

    def __init__(self, spec: PolicySpec, *, tokenizer: str = "") -> None:
        """Raises `PolicyError` where `tokenizer` is no directory with a tokenizer."""
        super().__init__()
        if not Path(tokenizer, "tokenizer.json").is_file():
            raise PolicyError(
                f"countdown_solver says tokens: set policy.options.tokenizer to a language model's directory, got "
                f"{tokenizer!r}"
            )
        self.spec, self._tokenizer = spec, tokenizer
        self._prompts = Prompts(Path(tokenizer), chat=False, system="", template="{}")
        self.noise_dim = 1
        self.value_head = nn.Identity()

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        uniform = torch.zeros(len(inputs.instruction)) if noise is None else torch.special.ndtr(noise[:, 0].double())
        tokens = torch.full((len(inputs.instruction), self.spec.chunk), float(self._prompts.end))
        for row, (text, share) in enumerate(zip(inputs.instruction, uniform.tolist(), strict=True)):
            found = self._solutions(text)
            said = self._prompts.tokens(found[min(int(share * len(found)), len(found) - 1)]) if found else []
            said = said[: self.spec.chunk]
            tokens[row, : len(said)] = torch.tensor(said, dtype=torch.float32)
        chunk = tokens[..., None]
        return Action(chunk, torch.zeros_like(chunk), torch.zeros(len(chunk)), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, zeros[:, 0, 0])

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros(len(inputs.instruction))

    def architecture(self) -> dict[str, Any]:
        return {"tokenizer": self._tokenizer}

    def _solutions(self, instruction: str) -> tuple[str, ...]:
        found = PROBLEM.fullmatch(instruction)
        if found is None:
            return ()
        return solutions(int(found["target"]), tuple(sorted(map(int, found["numbers"].split(",")))))


@cache
def solutions(target: int, numbers: tuple[int, ...]) -> tuple[str, ...]:
    """Expressions of all the numbers with this value, in the order of their texts."""
    return tuple(sorted({_plain(text) for text, value in _expressions([(str(n), Fraction(n)) for n in numbers])
                         if value == target}))  # fmt: skip


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
    (a, x), (b, y) = one, two
    yield f"({a}+{b})", x + y
    yield f"({a}*{b})", x * y
    for (left, first), (right, second) in ((one, two), (two, one)):
        yield f"({left}-{right})", first - second
        if second:
            yield f"({left}/{right})", first / second


def _plain(text: str) -> str:
    """The expression without the brackets around all of it."""
    return text[1:-1] if text.startswith("(") else text
