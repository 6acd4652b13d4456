"""Verifiers that may fail: their scores, bounded in value and, where the code is somebody else's, in time.

A failure is an episode that counts as broken (the reward is NaN), and a warning that names the verifier.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import warnings
import weakref
from multiprocessing.connection import Connection
from typing import Any

from sim_farm.backends.text.problems import Problem

LIMIT_S = 5.0
"""Time that a verifier in a process of its own may take for one answer."""
START_S = 120.0
"""Time that such a process may take to start."""


def score(problem: Problem, answer: str) -> float:
    """The answer's score in [0, 1]; NaN where the verifier raises, or says something else."""
    try:
        found = float(problem.verify(answer))
    except Exception as error:  # whatever a verifier's author did not think of
        warnings.warn(f"the verifier failed on the answer {answer[:200]!r}: {_named(error)}", stacklevel=2)
        return math.nan
    if not 0.0 <= found <= 1.0:
        warnings.warn(f"the verifier gave {found}, and a score is from 0 to 1", stacklevel=2)
        return math.nan
    return found


class VerifierProcess:
    """A function (answer, expected) -> score, in a process of its own that is killed when an answer takes too long."""

    def __init__(self, function: str, limit_s: float = LIMIT_S) -> None:
        """`function` is `package.module:NAME`; it is imported in that process alone."""
        self.function, self._limit_s = function, limit_s
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, answer: str, expected: str) -> float:
        """Raises `RuntimeError` where the function fails or does not end, after which another process is started."""
        pipe = self._connection()
        try:
            pipe.send((answer, expected))
            if not pipe.poll(self._limit_s):
                self.close()
                raise RuntimeError(f"{self.function} did not end within {self._limit_s:g} s")
            found = pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError(f"the process of {self.function} died") from error
        if isinstance(found, str):
            raise RuntimeError(f"{self.function}: {found}")
        return found

    def close(self) -> None:
        """End the process. A further call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = self._pipe = None

    def _connection(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self.function, theirs), daemon=True)
            self._process.start()
            theirs.close()
            weakref.finalize(self, self._process.kill)
            if not self._pipe.poll(START_S):
                self.close()
                raise RuntimeError(f"the process of {self.function} did not start within {START_S:g} s")
            if (refusal := self._pipe.recv()) is not None:
                self.close()
                raise RuntimeError(f"{self.function} cannot be imported: {refusal}")
        assert self._pipe is not None
        return self._pipe


def _serve(reference: str, pipe: Connection) -> None:
    """Answer (answer, expected) with a score, or with the text of what went wrong, until the other end is closed."""
    module, _, name = reference.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        pipe.send(_named(error))
        return
    pipe.send(None)
    while True:
        try:
            answer, expected = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(float(function(answer, expected)))
        except Exception as error:
            pipe.send(_named(error))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
