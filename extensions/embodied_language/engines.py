"""Generation engines: programs that write a language model's answers, in this process or behind an address.

An engine has weights, whose version it knows, and an answer names the version that wrote it. Weights reach an engine as
a folder that transformers would load, so that one on another machine needs no more than a file system in common.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from embodied_language.generation import Sampling, generate, up_to_end
from embodied_language.model import load_model
from embodied_language.prompts import Prompts
from policies.contract import PolicyError

FIRST = "default"
"""Version of the weights that an engine starts with; SGLang and vLLM have the same word."""


@dataclass(frozen=True)
class Drawing:
    """Length, end and distribution of the answers that are drawn."""

    count: int
    """Most tokens of an answer."""
    ends: tuple[int, ...]
    """Tokens that end one."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Share of the probability that the likeliest tokens, which alone are drawn, have together."""


@dataclass(frozen=True)
class Completion:
    """An answer."""

    tokens: tuple[int, ...]
    """Token ids, with the one that ended the answer; at most `Drawing.count`."""
    log_prob: tuple[float, ...]
    """Log-prob of each token, by the engine's arithmetic, at the temperature."""
    version: str
    """Version of the weights that wrote it."""


class Engine(Protocol):
    """A program that writes answers. Both methods may be called from several threads."""

    def generate(self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing, version: str) -> list[Completion]:
        """n answers to each prompt of token ids, prompt by prompt, each written by the weights of this version alone.

        Raises `PolicyError` where the engine has other weights, and for what it refuses.
        """
        ...

    def update_weights(self, folder: Path, version: str) -> None:
        """Write all answers that begin from now on by the weights of this model's directory. An answer that is under
        way is completed by the old ones, or begun again.

        Raises `PolicyError` where they cannot be read or are of another model.
        """
        ...


class InProcessEngine:
    """The engine of this process: the generation of `embodied_language.generation`, one batch after the other."""

    def __init__(self, folder: Path, *, rows: int = 64, seed: int = 0) -> None:
        """`rows`: answers that are written side by side; `seed`: of what is drawn. Raises `PolicyError` for a folder
        without a language model."""
        self.prompts = Prompts(folder, chat=False, system="", template="{}")
        self._rows = rows
        self._noise = torch.Generator().manual_seed(seed)
        self._model = load_model(folder)
        self._model.known = min(self.prompts.size, self._model.vocabulary)
        self._version = FIRST
        self._writing = threading.Lock()
        """Held while answers are written: an update waits for it."""

    @property
    def version(self) -> str:
        """Version of its weights."""
        return self._version

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self._model.context

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing, version: str | None = None
    ) -> list[Completion]:
        """`Engine.generate`; `version` None takes the weights as they are."""
        asked = [list(prompt) for prompt in prompts for _ in range(n)]
        self._check(asked, drawing)
        with self._writing:
            if version is not None and version != self._version:
                raise PolicyError(f"the engine has the weights {self._version}, and {version} was asked for")
            noise = None
            if drawing.temperature > 0:
                noise = torch.randn(len(asked), drawing.count, generator=self._noise)
            sampling = Sampling(drawing.temperature or 1.0, drawing.top_p, self._rows)
            found = generate(self._model, asked, drawing.count, drawing.ends, noise, sampling)
            wrote = self._version
        belongs = up_to_end(found.tokens, drawing.ends)
        return [
            Completion(tuple(tokens[said].tolist()), tuple(log_prob[said].tolist()), wrote)
            for tokens, log_prob, said in zip(found.tokens, found.log_prob, belongs, strict=True)
        ]

    def update_weights(self, folder: Path, version: str) -> None:
        model = load_model(folder)
        model.known = self._model.known
        if model.vocabulary != self._model.vocabulary:
            raise PolicyError(
                f"{folder} has a vocabulary of {model.vocabulary} tokens, and the engine's model of "
                f"{self._model.vocabulary}: start the engine with the model that is trained"
            )
        with self._writing:
            self._model, self._version = model, version

    def rename_weights(self, version: str) -> None:
        """Give the present weights this version."""
        with self._writing:
            self._version = version

    def await_written(self) -> None:
        """Wait until no answer is being written."""
        with self._writing:
            pass

    def _check(self, prompts: Sequence[Sequence[int]], drawing: Drawing) -> None:
        """Raise `PolicyError` for prompts that the model does not take."""
        if not prompts or not all(prompts) or drawing.count < 1:
            raise PolicyError("a prompt has at least one token, and an answer's limit is at least 1")
        largest, least = max(map(max, prompts)), min(map(min, prompts))
        if least < 0 or largest >= self._model.known:
            raise PolicyError(
                f"a prompt has the token {largest if least >= 0 else least}; known: 0 to {self._model.known - 1}"
            )
        longest = max(map(len, prompts))
        if longest + drawing.count > self.context:
            raise PolicyError(
                f"a prompt of {longest} tokens and an answer of {drawing.count} are more than the context of "
                f"{self.context}"
            )
