"""Policy replicas on other machines than the farm: a relay at home, which sits at their desks for them.

    rollout worker -> desk -> relay --observations--> replica        frames, states, texts; what keys the noise
    rollout worker <- desk <- relay <----decision---- replica        chunks, log-probs, values, traces

The relay is a worker of the farm's machine whom replicas call, several at once. A call brings the last answer and
returns with the next work, so that a decision costs one message there and one back. To the rollout worker a replica on
another machine is one like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.rollout.acting import Shown
from embodied.rollout.replica_desk import Answer, Asked, OwnDesk
from embodied.runtime.handles import Caller
from embodied.trajectories.memory import FrameCounts
from policies.contract import Action, Inputs
from sim_farm.contract import FarmError

R = TypeVar("R")

Array: TypeAlias = tuple[np.ndarray, torch.dtype]
"""A tensor on its way: NumPy's arrays are sent as they lie. Of bfloat16, which NumPy lacks, the bits."""
FRAMES, TRACE = "frames.", "trace."
KEYS = ("envs", "episode", "step")
DECIDED = ("chunk", "log_prob", "value")
OBSERVED = ("state", "proprio", "episode")


@dataclass(frozen=True)
class AskedMessage:
    """Work on its way to a replica."""

    inputs: Mapping[str, Array]
    instruction: tuple[str, ...]
    task: int = 0
    keys: Mapping[str, np.ndarray] | None = None
    """Of decisions, int64 [n] by name; None: the observations are to be valued."""

    @classmethod
    def of(cls, asked: Asked) -> AskedMessage:
        inputs = asked.inputs if isinstance(asked, Shown) else asked
        named = {name: getattr(inputs, name) for name in OBSERVED}
        named |= {f"{FRAMES}{name}": tensor for name, tensor in inputs.frames.items()}
        arrays = {name: _sent(tensor) for name, tensor in named.items() if tensor is not None}
        if not isinstance(asked, Shown):
            return cls(arrays, inputs.instruction)
        return cls(arrays, inputs.instruction, asked.task, {name: getattr(asked, name) for name in KEYS})

    @property
    def asked(self) -> Asked:
        """What it was made of, in memory of its own."""
        tensors = {name: _received(array) for name, array in self.inputs.items()}
        frames = {name.removeprefix(FRAMES): tensor for name, tensor in tensors.items() if name.startswith(FRAMES)}
        observed = {name: tensors.get(name) for name in OBSERVED}
        inputs = Inputs(**observed, frames=frames, instruction=self.instruction)
        return inputs if self.keys is None else Shown(self.task, **self.keys, inputs=inputs)

    @property
    def frames(self) -> int:
        """Observations in it that have frames; all cameras of one are one."""
        return max((len(array) for name, (array, _) in self.inputs.items() if name.startswith(FRAMES)), default=0)


@dataclass(frozen=True)
class AnswerMessage:
    """What a replica has done, on its way back."""

    tensors: Mapping[str, Array]
    spent_ns: int

    @classmethod
    def of(cls, answer: Answer, spent_ns: int) -> AnswerMessage:
        if isinstance(answer, Tensor):
            return cls({"": _sent(answer)}, spent_ns)
        named = {name: getattr(answer, name) for name in DECIDED}
        named |= {f"{TRACE}{name}": tensor for name, tensor in answer.trace.items()}
        return cls({name: _sent(tensor) for name, tensor in named.items()}, spent_ns)

    @property
    def answer(self) -> Answer:
        tensors = {name: _received(array) for name, array in self.tensors.items()}
        if "" in tensors:
            return tensors[""]
        trace = {name.removeprefix(TRACE): tensor for name, tensor in tensors.items() if name.startswith(TRACE)}
        return Action(tensors["chunk"], tensors["log_prob"], tensors["value"], trace)


@dataclass(frozen=True)
class Reply:
    """The relay's answer to a call: work, that the rollout is over, or neither: there was none for some time."""

    over: bool
    work: AskedMessage | None = None


class DeskRelay:
    """At home, for the replicas on other machines: each calls `exchange` again and again, and waits there for work."""

    def __init__(self) -> None:
        self._desks: dict[int, OwnDesk] = {}
        """By the replicas' ranks. Each is touched by its own replica's calls alone."""
        self._sent: dict[int, FrameCounts] = {}

    def use(self, desks: Mapping[int, OwnDesk]) -> None:
        """Sit at these desks from now on, by the ranks of their replicas."""
        self._desks = dict(desks)

    def exchange(self, rank: int, rollout: int, answer: AnswerMessage | None) -> Reply:
        """Take the replica's last answer, if it has one, and wait for its next work."""
        desk = self._desks[rank]
        if answer is not None:
            desk.answer(answer.answer, answer.spent_ns, self._sent.pop(rank))
        asked = desk.look(rollout)
        if asked is None:
            return Reply(desk.is_over(rollout))
        message = AskedMessage.of(asked)
        self._sent[rank] = FrameCounts(message.frames, message.frames)
        return Reply(False, message)

    def fail(self, rank: int) -> None:
        """As `Desk.fail`."""
        self._desks[rank].fail()

    def note_version(self, rank: int, version: int) -> None:
        """As `Desk.note_version`."""
        self._desks[rank].note_version(version)


class FarDesk:
    """A desk that is on another machine, reached through the relay there."""

    def __init__(self, rank: int, relay: Caller) -> None:
        self._rank, self._relay = rank, relay
        self._answer: AnswerMessage | None = None
        self._begin_ns = 0

    def next(self, rollout: int) -> Asked | None:
        while True:
            answer, self._answer = self._answer, None
            reply = self._relay.call(DeskRelay.exchange, self._rank, rollout, answer)
            progress.report()
            if reply.work is not None:
                self._begin_ns = time.monotonic_ns()
                return reply.work.asked
            if reply.over:
                return None

    def answer(self, answer: Answer) -> None:
        # It goes with the next call, which follows at once.
        self._answer = AnswerMessage.of(answer, time.monotonic_ns() - self._begin_ns)

    def fail(self) -> None:
        with suppress(FarmError):  # without a relay the rollout worker hears of it by the replica's call alone
            self._relay.call(DeskRelay.fail, self._rank)

    def note_version(self, version: int) -> None:
        self._relay.call(DeskRelay.note_version, self._rank, version)


def _sent(tensor: Tensor) -> Array:
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy(), tensor.dtype


def _received(array: Array) -> Tensor:
    # A copy: what has arrived cannot be written and lies anywhere, and matrix products round by alignment.
    numbers, dtype = array
    return torch.tensor(numbers).view(dtype)
