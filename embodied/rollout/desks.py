"""Desks: how a rollout loop hands work to policy replicas, which are other processes of the machine.

Each replica has a desk: its rows of one block of shared memory. Like a farm's slots, a desk has tickets and bells:

    loop      what is asked, observations to value     then `requested`, and rings the replica
    replica   chunks or values, times, counts          then `done`, and rings the loop: the client of the farm

A request belongs to one rollout (or part of one), which all replicas serve in one call. So a replica that begins late
never takes a later rollout's request with the weights of an earlier one. What a group observes is in the farm's slots
and frames, what is decided in the trajectory memory: neither passes over a desk.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.trajectories.memory import INPUT, FrameCounts, MemoryLayout
from policies.contract import Inputs
from sim_farm.client.farm import Farm
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.layout import texts
from sim_farm.shared_memory.memory import Block, Field

LOOK_S = 0.5
"""How long a replica waits for work before it says that it is not late."""
_ROLLOUT, _WORK, _GROUP, _ROW, _COUNT = range(5)


class Work(enum.IntEnum):
    ACT, VALUE = range(2)


@dataclass(frozen=True)
class Request:
    """What is asked of a replica."""

    ticket: int
    work: Work
    group: int
    """Of the farm, to act for."""
    row: int
    """Of the trajectory memory, at which the group's observation is and its decision will be."""
    count: int
    """Observations on the desk, to value."""


class Desks:
    """The desks of all replicas. The driver makes them; who is sent them maps them."""

    def __init__(self, block: Block, cameras: tuple[str, ...]) -> None:
        self._block, self.cameras = block, cameras
        self._arrays = block.arrays
        self.replicas, self.rows = self._arrays["values"].shape
        """How many there are, and how many environments' worth of work a desk holds."""
        self._bells = [Doorbell(self._arrays["bells"], replica) for replica in range(self.replicas)]

    @classmethod
    def create(cls, replicas: int, farm: Farm, layout: MemoryLayout, values: bool) -> Desks:
        """For groups of the farm whose decisions are kept by the layout; `values`: observations will be valued too.

        Raises `FarmError` where shared memory does not suffice.
        """
        rows = max(len(farm.envs_of(group)) for group in range(farm.groups))
        info, each = farm.infos[0], (replicas, rows)
        fields = {
            "bells": Field((replicas,), "int32", 0),
            "ended": Field((1,), "int64", 0),
            "asked": Field((replicas, 5), "int64", 0),
            "requested": Field((replicas,), "int64", 0),
            "requested_ns": Field((replicas,), "int64", 0),
            "done": Field((replicas,), "int64", 0),
            "failed": Field((replicas,), "bool", 0),
            "version": Field((replicas,), "int64", 0),
            "times_ns": Field((replicas, 2), "int64", 0),
            "counts": Field((replicas, 2), "int64", 0),
            "chunks": Field((*each, farm.specs[0].chunk, info.action_dim), "float32"),
            "values": Field(each, "float32"),
        }
        cameras = layout.shape.cameras if values else ()
        if values:
            inputs = {name: field for name, field in layout.fields.items() if name.startswith(INPUT)}
            fields |= {name: Field((*each, *field.shape[1:]), field.dtype, 0) for name, field in inputs.items()}
        if cameras:
            size = info.spec.image_size
            fields["frames"] = Field((*each, len(cameras), size, size, 3), "uint8")
        return cls(Block.create(fields, True, f"what {replicas} policy replicas are handed"), cameras)

    def __reduce__(self) -> Any:
        return _attached, (self._block.fields, str(self._block.name), self.cameras)

    def close(self) -> None:
        """Forget the desks; in the process that made them they are removed."""
        self._arrays, self._bells = {}, []
        self._block.close()

    # --- the loop's side

    def versions(self) -> list[int]:
        """Of each replica, updates that its policy has seen."""
        found: list[int] = self._arrays["version"].tolist()
        return found

    def ask_to_act(self, replica: int, rollout: int, group: int, row: int) -> None:
        self._ask(replica, (rollout, Work.ACT, group, row, 0))

    def ask_to_value(self, replica: int, rollout: int, inputs: Inputs, count: int) -> None:
        """`count` observations, at most `rows`. They are copied."""
        for name in ("state", "proprio", "episode"):
            if f"{INPUT}{name}" in self._arrays:
                self._arrays[f"{INPUT}{name}"][replica, :count] = getattr(inputs, name).numpy()
        for row, text in enumerate(inputs.instruction):
            data = text.encode()
            kept = self._arrays[f"{INPUT}instruction"][replica, row]
            kept[...] = 0
            kept[: len(data)] = np.frombuffer(data, np.uint8)
        for number, name in enumerate(self.cameras):
            self._arrays["frames"][replica, :count, number] = inputs.frames[name].numpy()
        self._ask(replica, (rollout, Work.VALUE, 0, 0, count))

    def is_done(self, replica: int) -> bool:
        """Whether the replica has done what it was asked."""
        return bool(self._arrays["done"][replica] == self._arrays["requested"][replica])

    def failed(self) -> list[int]:
        """The replicas that met an error and serve no more."""
        return np.flatnonzero(self._arrays["failed"]).tolist()

    def requested_ns(self, replica: int) -> int:
        """When it was last asked for something, on the machine's monotonic clock."""
        return int(self._arrays["requested_ns"][replica])

    def chunks(self, replica: int, count: int) -> np.ndarray:
        """float32 [count, C, A] where they lie."""
        chunks: np.ndarray = self._arrays["chunks"][replica, :count]
        return chunks

    def values(self, replica: int, count: int) -> Tensor:
        """float32 [count] where they lie."""
        return torch.from_numpy(self._arrays["values"][replica, :count])

    def times_ns(self, replica: int) -> tuple[int, int]:
        """When the replica began and ended what it did last."""
        begin, end = self._arrays["times_ns"][replica].tolist()
        return begin, end

    def counts(self) -> FrameCounts:
        """Of all replicas so far."""
        return FrameCounts(*self._arrays["counts"].sum(0).tolist())

    def end_rollout(self, number: int) -> None:
        """The rollouts up to this number are over: who serves them returns."""
        self._arrays["ended"][0] = number
        for bell in self._bells:
            bell.ring()

    def _ask(self, replica: int, asked: tuple[int, int, int, int, int]) -> None:
        self._arrays["asked"][replica] = asked
        self._arrays["requested_ns"][replica] = time.monotonic_ns()
        self._arrays["requested"][replica] += 1
        self._bells[replica].ring()

    # --- a replica's side

    def note_version(self, replica: int, version: int) -> None:
        self._arrays["version"][replica] = version

    def is_over(self, rollout: int) -> bool:
        return bool(self._arrays["ended"][0] >= rollout)

    def await_request(self, replica: int, rollout: int) -> Request | None:
        """A request of this rollout; None where that is over, or where there is none for some time."""
        requested, done, asked = (self._arrays[name] for name in ("requested", "done", "asked"))
        bell = self._bells[replica]
        until = time.monotonic() + LOOK_S
        while True:
            seen = bell.value()
            if self.is_over(rollout):
                return None
            if requested[replica] != done[replica] and asked[replica, _ROLLOUT] == rollout:
                found = asked[replica].tolist()
                return Request(int(requested[replica]), Work(found[_WORK]), found[_GROUP], found[_ROW], found[_COUNT])
            if not bell.wait(seen, max(until - time.monotonic(), 0.0)):
                return None

    def inputs(self, replica: int, count: int) -> Inputs:
        """The observations to value, where they lie."""

        def at(name: str) -> Tensor | None:
            key = f"{INPUT}{name}"
            return torch.from_numpy(self._arrays[key][replica, :count]) if key in self._arrays else None

        instruction = self._arrays.get(f"{INPUT}instruction")
        frames = {
            name: torch.from_numpy(self._arrays["frames"][replica, :count, number])
            for number, name in enumerate(self.cameras)
        }
        return Inputs(
            at("state"),
            at("proprio"),
            frames,
            () if instruction is None else texts(instruction[replica, :count]),
            at("episode"),
        )

    def finish(self, replica: int, request: Request, begin_ns: int, frames: FrameCounts) -> None:
        """What was asked is on the desk; `frames` were read and copied for it."""
        self._arrays["counts"][replica] += (frames.read, frames.copied)
        self._arrays["times_ns"][replica] = begin_ns, time.monotonic_ns()
        self._arrays["done"][replica] = request.ticket

    def fail(self, replica: int) -> None:
        """The replica serves no more; its call says why."""
        self._arrays["failed"][replica] = True


def _attached(fields: Mapping[str, Field], name: str, cameras: tuple[str, ...]) -> Desks:
    return Desks(Block.attach(fields, name), cameras)
