"""Workers that call other workers, in other processes, by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

R = TypeVar("R")


class Caller(Protocol):
    """The way to a worker in another process, which workers can be sent.

    Raises what the worker raises, `WorkerFailed` where it is gone and `WorkerTimeout` where it does not answer.
    """

    def call(self, method: Callable[..., R], *args: Any) -> R: ...
