"""Verifiers that may fail: their scores, bounded in value and, where the code is somebody else's, in time.

A failure makes the reward NaN, an episode that counts as broken, and says which verifier failed, on what, and where in
its code.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import subprocess
import sys
import sysconfig
import traceback
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from embodied_language.text.problems import Problem
from sim_farm.contract import FarmError
from sim_farm.named_code import named

LIMIT_S = 5.0
"""Time that a verifier in a process of its own may take for one answer."""
START_S = 120.0
"""Time that such a process may take to start."""
PROGRAM = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from embodied_language.text.verifying import serve
serve(sys.argv[2], pipe)
"""
"""What the process runs. multiprocessing would import the caller's script again, and with it what the script does."""
SHOWN = 200
"""Characters of an answer in a message."""


class VerifierFailed(Exception):
    """A verifier gave no score; the message says which, and why."""


class NoScore(VerifierFailed):
    """A verifier returned something else than a number from 0 to 1."""


@dataclass(frozen=True)
class Score:
    value: float
    """In [0, 1]; NaN where the verifier failed."""
    fault: str = ""
    """How it failed."""


def score(problem: Problem, answer: str) -> Score:
    """The answer's score; a fault where the verifier raises, or says something else than a number from 0 to 1."""
    try:
        found = bounded(problem.verify(answer))
    except Exception as error:  # whatever a verifier's author did not think of
        said = str(error) if isinstance(error, VerifierFailed) else f"the verifier failed: {described(error)}"
        on = f" (on {problem.place})" if problem.place else ""
        return Score(math.nan, f"{said}{on}; the answer was {answer[:SHOWN]!r}")
    return Score(found)


def bounded(found: Any, verifier: str = "the verifier") -> float:
    """The score that a verifier returned, from 0 to 1; `found` may be an array of one number. Raises `NoScore`."""
    try:
        value = float(found.item() if hasattr(found, "item") else found)
    except Exception as error:  # of whatever type the verifier returned
        given = "None" if found is None else f"a {type(found).__name__} ({repr(found)[:SHOWN]})"
        raise NoScore(f"{verifier} gave {given}, and a score is a number from 0 to 1: {_advice(found)}") from error
    if not 0.0 <= value <= 1.0:
        raise NoScore(f"{verifier} gave {value}, and a score is from 0 to 1")
    return value


def _advice(found: Any) -> str:
    """Advice to the author of a verifier that returned `found`, which is no score."""
    if found is None:
        return "write `return 0.0` where the answer is wrong"
    if inspect.iscoroutine(found):
        found.close()
        return "write `def` in place of `async def`"
    if isinstance(found, dict) and found:
        return f"write `return result[{'score' if 'score' in found else next(iter(found))!r}]`"
    if isinstance(found, (tuple, list)) and found:
        return "write `return result[0]`"
    return "write `return float(...)`"


class VerifierProcess:
    """A function (answer, expected) -> score, in a process of its own that is killed when an answer takes too long."""

    def __init__(self, function: str, limit_s: float = LIMIT_S) -> None:
        """`function` is `package.module:NAME`; it is imported in that process alone."""
        self.function, self._limit_s = function, limit_s
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, answer: str, expected: str) -> float:
        """Raises `VerifierFailed` where the function fails or does not end, after which another process is started, and
        `FarmError` where it cannot be imported."""
        pipe = self._connection()
        try:
            pipe.send((answer, expected))
            if not pipe.poll(self._limit_s):
                self.close()
                raise VerifierFailed(f"the verifier {self.function} did not end within {self._limit_s:g} s")
            found = pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise VerifierFailed(f"the process of the verifier {self.function} died") from error
        if isinstance(found, VerifierFailed):
            raise found
        return found

    def close(self) -> None:
        """End the process. A further call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = self._pipe = None

    def _connection(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), self.function]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            weakref.finalize(self, self._process.kill)
            self._pipe.send(sys.path)
            if not self._pipe.poll(START_S):
                self.close()
                raise VerifierFailed(f"the process of the verifier {self.function} did not start within {START_S:g} s")
            try:
                refusal = self._pipe.recv()
            except (EOFError, OSError) as error:
                self.close()
                raise FarmError(f"the verifier {self.function} ended its process as it was imported") from error
            if refusal is not None:
                self.close()
                raise FarmError(f"the verifier {refusal}")
        assert self._pipe is not None
        return self._pipe


def serve(reference: str, pipe: Connection) -> None:
    """Answer (answer, expected) with a score, or with the `VerifierFailed`, until the other end is closed."""
    try:
        function = named(reference, FarmError)
        if not callable(function):
            raise FarmError(f"{reference} is a {type(function).__name__}, not a function (answer, expected) -> score")
        _check_signature(function, reference)
    except FarmError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    while True:
        try:
            answer, expected = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(bounded(function(answer, expected), f"the verifier {reference}"))
        except VerifierFailed as error:
            pipe.send(error)
        except Exception as error:  # whatever the author did not think of
            pipe.send(VerifierFailed(f"the verifier {reference} failed: {described(error)}"))


def _check_signature(function: Any, reference: str) -> None:
    """Raise `FarmError` for a function that cannot be called with an answer and an expected one."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of those that are no Python have none
        return
    try:
        signature.bind("", "")
    except TypeError as error:
        name = reference.rpartition(":")[2]
        said = f"{reference} takes {signature}, and a verifier takes (answer, expected)"
        if isinstance(function, type):
            raise FarmError(f"{said}: {name} is a class; name an instance of it") from error
        raise FarmError(
            f"{said}: write a function of these two that calls it, `def verify(answer, expected): return {name}(...)`"
        ) from error


def described(error: BaseException) -> str:
    """The error with the file and line of the user's code that raised it."""
    ours, libraries = str(Path(__file__).parent), sysconfig.get_paths()
    places = traceback.extract_tb(error.__traceback__)
    theirs = [
        place
        for place in places
        if not place.filename.startswith((ours, libraries["stdlib"], libraries["purelib"], libraries["platlib"], "<"))
    ]
    where = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
