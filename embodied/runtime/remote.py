"""Other machines: calls of bounded size, equal software, and physics workers behind relays.

Data crosses machines in calls of the worker that has it: frames (`trajectories.memory`) and weights
(`shared_tensors`) in parts of at most `CALL_BYTES`, physics in answers of at most `ANSWER_BYTES`. A call is late after
the inner deadline of its caller, and each part is progress of its receiver. `ray.actors` and `ray.far_physics` make the
calls.

A relay runs on the client's machine, and an ordinary physics worker at the far end:

    client --slots--> relay --request--> far end        environments, and their actions
    render <--slots-- relay <--answer--- (PhysicsWorker) rewards, states and scenes: kilobytes, never frames

For client and render workers a relay is a physics worker like any other: it watches the same slots and listens to
the same bell. The far end is a `PhysicsWorker` with slots on its machine. Executed actions are recorded here, in the
slots, so a lost far end can be replaced: the new one replays. The transport is a `FarEnd`.

Messages are raw rows of the slots, and lengths; both ends know the layout.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import platform
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import sim_farm
from embodied.runtime.deadlines import Deadline, Wait
from sim_farm.client.farm import WorkerTimeout
from sim_farm.contract import FarmError, TaskInfo
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.memory import Field
from sim_farm.shared_memory.slot_layout import FarmSpec, WorkerMemory, slot_fields
from sim_farm.workers.physics_worker import PhysicsWorker
from sim_farm.workers.worker import Worker, WorkerSetup

CALL_BYTES = 32 * 2**20
"""Largest payload of one call between machines: it passes through object stores of a few hundred MB."""


def slices(count: int, item_bytes: int, call_bytes: int) -> Iterator[slice]:
    """Consecutive slices of `count` items, each of at most `call_bytes` but at least one item."""
    size = max(call_bytes // item_bytes, 1)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


# --- equal software

DECIDING = ("numpy", "torch", "mujoco", "robosuite", "hf-libero", "sapien", "mani-skill")
"""Packages whose version decides the results of a physics step."""


@cache
def software() -> dict[str, str]:
    """Software that decides the trajectories of this machine's simulators, by name: versions, and a digest of
    `sim_farm`."""
    versions = {"python": platform.python_version()}
    for package in DECIDING:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {**versions, "sim_farm": _digest(Path(sim_farm.__file__).parent)}


def require_software(expected: Mapping[str, str]) -> None:
    """Raise `FarmError` naming this machine and each difference, if its software is not the `expected`."""
    mine = software()
    wrong = [f"{name} {mine.get(name)} instead of {value}" for name, value in expected.items() if mine[name] != value]
    if wrong:
        raise FarmError(
            f"{socket.gethostname()} has {', '.join(wrong)}: the same trajectories need the same software on every "
            "machine; install there what the machine has where training was started"
        )


def _digest(folder: Path) -> str:
    """Twelve hexadecimal digits of the folder's sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".xml"):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


# --- physics behind a relay

Slots = dict[str, np.ndarray]
Int = np.ndarray

REQUEST = ("requested", "op", "limit", "next_start", "base_episode", "base_step", "base_start", "action")
STANDING = ("simulated", "episode", "episode_step", "start", "active", "instruction")
"""Fields beyond the request: the state of the environments of a lost far end."""
OUTCOME = (
    "steps", "reward", "success", "terminated", "truncated", "draw_final",
    "active", "episode", "episode_step", "start", "retold", "times_ns",
)  # fmt: skip
OBSERVED = ("state", "proprio", "past_state", "past_proprio")
SHOWN = ("scene", "past_scene")
REDRAWN = ("redrawn_scene",)
TOLD = ("instruction",)
ENDED = ("final_state", "final_proprio", "final_past_state", "final_past_proprio", "fault")
DRAWN = ("final_scene", "final_past_scene")
ANSWER_BYTES = 64 * 2**10
"""Largest answer: a group whose answer would be longer is requested in parts. Ray carries up to 100 KB in the reply
itself and more through object stores, which is slower; and the first part is drawn while the next is simulated."""


class FarLost(Exception):
    """The far end's process is gone, cannot be reached, or hangs: the message names which."""


class FarEnd(Protocol):
    """Calls of a far end. Its futures raise `FarLost`, or the far worker's own exception."""

    def open(self, opening: bytes) -> Future[None]:
        """Build the worker there, from `pack_opening`."""
        ...

    def exchange(self, request: bytes) -> Future[bytes]:
        """Execute a request of `pack_request`, in the order of calls; see `FarPhysics.exchange`."""
        ...

    def restart(self, why: str) -> None:
        """Start another process in the place of one that was lost because of `why`. Raises `WorkerFailed` with the
        reason where that is hopeless."""
        ...


def row_bytes(spec: FarmSpec, info: TaskInfo) -> tuple[int, int]:
    """Bytes of one environment's request and answer for a chunk in the middle of an episode."""
    fields = slot_fields(spec, info)
    env, length = 4, 4  # the environment's number, and the length of its history
    return env + _row(fields, REQUEST) + length, _row(fields, (*OUTCOME, *OBSERVED, *(SHOWN if info.cameras else ())))


# --- the far end


class FarPhysics:
    """A physics worker over slots of its own, which executes requests. Builds its environments when made."""

    def __init__(self, setup: WorkerSetup, opening: bytes) -> None:
        memory = WorkerMemory.private(setup.spec, setup.info)  # without frames: none can be sent by mistake
        self._slots = memory.slots.arrays
        _read_rows(_Reader(opening), self._slots, (*REQUEST, *STANDING))
        self._worker = PhysicsWorker(setup, memory)
        self._worker.build()
        self._draws = bool(setup.info.cameras)

    def exchange(self, request: bytes) -> bytes:
        """Simulate the requested tickets and return their results. A repeated request has the same answer."""
        envs = _read_rows(_Reader(request), self._slots, REQUEST)
        self._worker.run_pending()
        return pack_answer(self._slots, envs, self._draws)

    def close(self) -> None:
        self._worker.close()


# --- the near end


@dataclass(frozen=True)
class _Request:
    """A request in flight."""

    envs: Int
    ticket: int
    answer: Future[bytes]


class Relay(Worker):
    """A physics worker whose simulators are at the far end. It runs like any worker: `serve` in a thread.

    `deadline` is that of waits for the farm. A far end that has work and does not answer for the inner deadline is
    lost, like one whose process died.
    """

    def __init__(self, setup: WorkerSetup, memory: WorkerMemory, far: FarEnd, deadline: Deadline) -> None:
        super().__init__(setup, memory)
        spec = setup.spec
        self._far = far
        self._deadline = deadline
        self._heard_ns = 0
        """Time of the far end's last answer, or of a request while it was idle."""
        self._envs = np.array([e for e in range(spec.num_envs) if spec.worker_of(e) == setup.index])
        self._sent = np.zeros(len(self._envs), np.int64)
        """Newest ticket of each environment for which a request is on its way or answered."""
        self._in_flight: deque[_Request] = deque()
        self._answer_bytes = row_bytes(spec, setup.info)[1]
        self._draws = bool(setup.info.cameras)
        bells, first = self.slots["bells"], spec.physics_workers
        drawers = range(spec.render_workers if self._draws else 0)
        self._renderers = [Doorbell(bells, first + drawer) for drawer in drawers]

    def build(self) -> None:
        """Build the far end; after a loss, bring its environments to the state that the slots record."""
        self._report(slot_layout.BUILDING)
        self._in_flight.clear()
        while True:
            opening = pack_opening(self.slots, self._envs)
            try:
                if not self._await(self._far.open(opening)):
                    return
                break
            except FarLost as lost:
                self._far.restart(str(lost))
        self._count(len(opening), 0)
        # What was in flight is requested again; what the far end has replayed or done since, it only reports.
        self._sent[...] = self.slots["simulated"][self._envs]
        self.slots["built"][self.setup.index] = len(self._envs)
        self._report(slot_layout.WAITING)
        self._client.ring()

    def run_pending(self) -> int:
        """Send new requests and write arrived answers into the slots; the number of environments in both."""
        try:
            return self._send() + self._receive()
        except FarLost as lost:
            self._far.restart(str(lost))
            self.build()
            return 1  # look again at once

    @property
    def waits(self) -> bool:
        """True if an answer of the far end is due."""
        return bool(self._in_flight)

    def close(self) -> None:
        """Nothing to release in this process; the host releases the far end."""

    def _send(self) -> int:
        requested = self.slots["requested"][self._envs]
        new = requested > self._sent
        if not new.any():
            return 0
        self._report(slot_layout.WORKING)
        for ticket in np.unique(requested[new]).tolist():  # a group each, the oldest first
            envs = self._envs[new & (requested == ticket)]
            for part in slices(len(envs), self._answer_bytes, ANSWER_BYTES):
                self._request(envs[part], ticket)
        self._sent[new] = requested[new]
        return int(new.sum())

    def _request(self, envs: Int, ticket: int) -> None:
        request = pack_request(self.slots, envs)
        if not self._in_flight:
            self._heard_ns = time.monotonic_ns()
        answer = self._far.exchange(request)
        self._in_flight.append(_Request(envs, ticket, answer))
        self._count(len(request), 0)
        answer.add_done_callback(lambda _: self._mine.ring())

    def _receive(self) -> int:
        served = 0
        while self._in_flight and self._in_flight[0].answer.done():
            sent = self._in_flight.popleft()
            answer = sent.answer.result()
            self._heard_ns = time.monotonic_ns()
            self._progress()
            self._count(0, len(answer))
            unpack_answer(answer, self.slots, sent.envs, self._draws)
            self._announce(sent)
            served += len(sent.envs)
            if not self._in_flight:
                self._report(slot_layout.WAITING)
        wait = Wait(self._deadline.inner(), begin_ns=self._heard_ns)
        if self._in_flight and wait.late():
            raise FarLost(f"it has not answered for {wait.silent_s():.1f} s")
        return served

    def _announce(self, sent: _Request) -> None:
        """Announce an answer that is in the slots: the data first, then the ticket, then the bell."""
        slots = self.slots
        if not self._draws:
            slots["drawn"][sent.envs] = sent.ticket
        slots["simulated"][sent.envs] = sent.ticket
        if not self._draws:
            self._client.ring()
        for drawer in sorted({self.setup.spec.renderer_of(env) for env in sent.envs.tolist()} if self._draws else ()):
            self._renderers[drawer].ring()

    def _await(self, answer: Future[None]) -> bool:
        """True once the far end was opened; False if the farm was stopped meanwhile."""
        wait = Wait(self._deadline)
        while not self.slots["stop"][0]:
            try:
                answer.result(timeout=0.5)
                return True
            except concurrent.futures.TimeoutError:
                if wait.late():
                    raise WorkerTimeout(
                        f"{self.setup.name} was not built on its machine within {self._deadline.seconds:g} s"
                    ) from None
        return False

    def _count(self, sent: int, received: int) -> None:
        self.slots["wire_bytes"][self.setup.index] += (sent, received)


# --- messages


def pack_request(slots: Slots, envs: Int) -> bytes:
    """The request for the tickets of `envs`. A reset carries the actions that it replays."""
    resets = slots["op"][envs] == slot_layout.RESET
    return b"".join(_rows(slots, envs, REQUEST, np.where(resets, slots["base_step"][envs], 0)))


def pack_opening(slots: Slots, envs: Int) -> bytes:
    """The state of `envs`, so that a new far end can replay them; nearly empty for episodes still to begin."""
    # `requested` first: a pending environment is not touched by the client any more, one that is not pending is
    # replayed from fields that only this side writes.
    requested = slots["requested"][envs]
    lengths = np.maximum(slots["base_step"][envs], slots["episode_step"][envs])
    parts = list(_rows(slots, envs, (*REQUEST, *STANDING), lengths))
    parts[1] = requested.tobytes()
    return b"".join(parts)


def pack_answer(slots: Slots, envs: Int, draws: bool) -> bytes:
    """The results of `envs`, and the far clock's time; scenes only where the farm draws."""
    clock = np.int64(time.monotonic_ns()).tobytes()
    rows = [_pack(slots, some, names) for names, some in _occasions(slots, envs, draws)]
    return b"".join((clock, _pack(slots, envs, OUTCOME), *rows))


def unpack_answer(answer: bytes, slots: Slots, envs: Int, draws: bool) -> None:
    """Write an answer into the slots of `envs`, and record the executed actions.

    Raises `FarmError` for a wrong length.
    """
    reader = _Reader(answer)
    sent_ns = int(reader.take(np.dtype("int64"), ())[()])
    reader.into(slots, envs, OUTCOME)
    ended = envs[_ended(slots, envs)]
    slots["final_instruction"][ended] = slots["instruction"][ended]
    for names, some in _occasions(slots, envs, draws):
        reader.into(slots, some, names)
    reader.end()
    for env in envs.tolist():
        base, steps = int(slots["base_step"][env]), int(slots["steps"][env])
        slots["history"][env, base : base + steps] = slots["action"][env, :steps]
    # Another machine's clock started at another time: count its answer as sent when it arrived here. That keeps
    # durations and order, and is late by the few hundred microseconds of the transfer.
    physics = slice(slot_layout.PHYSICS_START, slot_layout.PHYSICS_END + 1)
    slots["times_ns"][envs, physics] += time.monotonic_ns() - sent_ns


def _ended(slots: Slots, envs: Int) -> np.ndarray:
    return slots["terminated"][envs] | slots["truncated"][envs]


def _occasions(slots: Slots, envs: Int, draws: bool) -> list[tuple[tuple[str, ...], Int]]:
    """Fields that follow the outcome, each with those of `envs` that have them, as the outcome determines.

    They are exactly what a physics worker writes on that occasion: the row of an inactive environment stays as it was.
    """
    reset, ended = slots["op"][envs] == slot_layout.RESET, _ended(slots, envs)
    active = slots["active"][envs]
    return [
        (OBSERVED, envs[active | ended | reset]),
        (SHOWN, envs[active & draws]),
        (REDRAWN, envs[active & draws & reset]),
        (TOLD, envs[active & slots["retold"][envs]]),
        (ENDED, envs[ended]),
        (DRAWN, envs[slots["draw_final"][envs] & draws]),
    ]


def _rows(slots: Slots, envs: Int, names: tuple[str, ...], lengths: Int) -> Iterator[bytes]:
    """The environments' numbers, their rows, and the first `lengths` of their executed actions."""
    yield np.array([len(envs), *envs], np.int32).tobytes()
    for name in names:
        yield slots[name][envs].tobytes()
    yield lengths.astype(np.int32).tobytes()
    for env, length in zip(envs.tolist(), lengths.tolist(), strict=True):
        yield slots["history"][env, :length].tobytes()


def _read_rows(reader: _Reader, slots: Slots, names: tuple[str, ...]) -> Int:
    """Write rows of `_rows` into the slots; the environments' numbers."""
    count = int(reader.take(np.dtype("int32"), ())[()])
    envs = reader.take(np.dtype("int32"), (count,)).astype(np.int64)
    reader.into(slots, envs, names)
    lengths = reader.take(np.dtype("int32"), (count,))
    for env, length in zip(envs.tolist(), lengths.tolist(), strict=True):
        history = slots["history"]
        history[env, :length] = reader.take(history.dtype, (length, history.shape[2]))
    reader.end()
    return envs


def _pack(slots: Slots, envs: Int, names: tuple[str, ...]) -> bytes:
    return b"".join(slots[name][envs].tobytes() for name in names)


def _row(fields: dict[str, Field], names: tuple[str, ...]) -> int:
    return sum(fields[name].nbytes // fields[name].shape[0] for name in names)


class _Reader:
    """Takes arrays off the front of a message."""

    def __init__(self, message: bytes) -> None:
        self._message, self._at = message, 0

    def take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        end = self._at + count * dtype.itemsize
        if count < 0 or end > len(self._message):
            raise FarmError(f"a message between farm and far physics ended at {len(self._message)} bytes, not {end}")
        array = np.frombuffer(self._message[self._at : end], dtype, count).reshape(shape)
        self._at = end
        return array

    def into(self, slots: Slots, envs: Int, names: tuple[str, ...]) -> None:
        for name in names:
            slots[name][envs] = self.take(slots[name].dtype, (len(envs), *slots[name].shape[1:]))

    def end(self) -> None:
        if self._at != len(self._message):
            raise FarmError(f"a message between farm and far physics is {len(self._message)} bytes, not {self._at}")
