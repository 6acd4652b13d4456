"""The request queue of a run's policy replicas, which are workers in other processes, on this machine or on others.

    rollout loop -> request: states, texts, keys of the noise, frames or their rows -> a replica that is free
    rollout loop <- decision: chunks, log-probs, values, traces                     <- replica

A request is a call on the replica's handle, wherever the replica is. One on this machine maps the trajectory memory and
reads the frames where they were drawn; one on another machine is sent them. The group that is ready first goes to the
replica that has been free for longest: a batch is a group's rows, whichever replica decides for them, so that a slow
replica delays the group that it decides for, and no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.rollout.environment_groups import DecisionRequest, EnvironmentGroup
from embodied.rollout.rollout_loop import Decided, RolloutSettings
from embodied.run.trace import Span
from embodied.runtime.handles import Caller, naming
from embodied.trajectories.memory import FrameCounts, TrajectoryMemory
from policies.contract import Action, Inputs
from sim_farm.client.farm import Farm, WorkerFailed, WorkerTimeout
from sim_farm.client.observations import Observations

T = TypeVar("T")


# --- Messages


class Message(Generic[T]):
    """A dataclass of tensors that crosses processes: they travel as NumPy arrays, which Ray sends as they lie."""

    def __init__(self, content: T) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return _arrived, (_mapped(self.content, Tensor, _Array.of),)


@dataclass(frozen=True)
class _Array:
    numbers: np.ndarray
    dtype: torch.dtype
    """The tensor's; of bfloat16, which NumPy lacks, `numbers` are the bits."""

    @classmethod
    def of(cls, tensor: Tensor) -> _Array:
        whole = tensor.contiguous()
        return cls((whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy(), tensor.dtype)

    def tensor(self) -> Tensor:
        # A copy: what has arrived cannot be written and lies anywhere, and matrix products round by alignment.
        return torch.tensor(self.numbers).view(self.dtype)


def _arrived(packed: Any) -> Message[Any]:
    return Message(_mapped(packed, _Array, _Array.tensor))


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of dataclasses and dictionaries in which each value of the kind is changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(each, kind, change) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), kind, change) for f in fields(value)})
    return value


@dataclass(frozen=True)
class Reply(Generic[T]):
    """A replica's answer."""

    answer: T
    version: int
    """Number of updates in the acting weights."""
    spent_ns: int


class Replica(Protocol):
    """The methods of a replica that the queue calls."""

    def decide_request(self, request: Message[DecisionRequest]) -> Message[Reply[Action]]: ...

    def value_request(self, request: Message[Inputs]) -> Message[Reply[Tensor]]: ...


# --- The queue


@dataclass(frozen=True)
class ReplicaAddress:
    """A replica as the rollout worker reaches it."""

    caller: Caller
    maps_memory: bool
    """True on the machine of the trajectory memory: frames are not sent."""


@dataclass(frozen=True)
class _Call:
    """A request that a replica is working on."""

    future: Future[Message[Reply[Any]]]
    doing: str
    """For messages."""
    begin_ns: int
    finish: Callable[[str, Any, int, int], None]
    """Takes the replica's name, its answer, and when it began and ended."""


class Replicas:
    """See the module's docstring. A `PolicyClient`."""

    def __init__(self, farm: Farm, settings: RolloutSettings, addresses: Sequence[ReplicaAddress]) -> None:
        """`addresses` in the order of ranks."""
        self._farm, self._settings, self._addresses = farm, settings, tuple(addresses)
        self._most = max(len(farm.envs_of(group)) for group in range(farm.groups))
        """Rows of the largest group, and of a call that values observations."""
        self._free = deque(range(len(addresses)))
        """Ranks of replicas without a request, the one that has been free for longest first."""
        self._calls: dict[int, _Call] = {}
        """The request of each other replica, by rank."""
        self._decided: list[Decided] = []
        self._versions: dict[str, int] = {}
        """Number of updates in the weights of each replica that has answered in this rollout."""
        self.version = 0
        self.frames = FrameCounts()
        self.spans: list[Span] = []

    @property
    def replicas(self) -> int:
        return len(self._addresses)

    def begin(self) -> None:
        self._versions.clear()
        self.spans = []

    def is_free(self) -> bool:
        return bool(self._free)

    def is_busy(self) -> bool:
        return bool(self._calls or self._decided)

    def submit(self, group: EnvironmentGroup, seen: Observations, memory: TrajectoryMemory) -> None:
        rank = self._free.popleft()
        reads, cameras = self._settings.reads, memory.shape.cameras
        by_row = bool(cameras) and self._addresses[rank].maps_memory
        if by_row:
            reads = tuple(name for name in reads if name != "images")
        request = DecisionRequest.of(self._farm, group, seen, reads, cameras)
        if by_row:
            rows = seen.frame_rows[seen.active]
            request = replace(request, frame_rows=rows)
            if (np.diff(rows.ravel()) != 1).any():  # the replica copies them into one batch
                self.frames += FrameCounts(0, rows.size)
        elif request.inputs.frames:
            frames = seen.frame_rows[seen.active].size
            self.frames += FrameCounts(frames, frames)

        def finish(replica: str, action: Action, begin_ns: int, end_ns: int) -> None:
            self._decided.append(Decided(group, request, action, begin_ns, end_ns, replica))

        self._call(rank, Replica.decide_request, request, f"deciding for group {group.number}", finish)

    def arrived(self) -> list[Decided]:
        self._finish_calls()
        decided, self._decided = self._decided, []
        return decided

    def wait(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        """Raises `WorkerTimeout`, which names the replica or the worker of the farm that is late."""
        self._farm.wait(
            lambda: bool(self._decided) or any(call.future.done() for call in self._calls.values()) or is_ready(),
            lambda: self._late(deadline_s),
            deadline_s,
            lambda: max([self._farm.progress_ns(), *(call.begin_ns for call in self._calls.values())]),
        )

    def values(self, inputs: Inputs, deadline_s: float) -> Tensor:
        """Each replica values as many observations as the others, in calls of no more than the largest group has."""
        count = _count(inputs)
        pieces = min(count, max(self.replicas, -(-count // self._most)))
        waiting = deque(torch.from_numpy(piece) for piece in np.array_split(np.arange(count), pieces))
        values = torch.empty(count)

        def keep(piece: Tensor) -> Callable[[str, Tensor, int, int], None]:
            def finish(replica: str, answer: Tensor, begin_ns: int, end_ns: int) -> None:
                values[piece] = answer
                self.spans.append(Span(replica, f"value {len(piece)} observations", begin_ns, end_ns))

            return finish

        while waiting or self._calls:
            self._finish_calls()
            while waiting and self._free:
                piece, rank = waiting.popleft(), self._free.popleft()
                self.frames += FrameCounts(0, len(piece) if inputs.frames else 0)
                doing = f"valuing {len(piece)} observations"
                self._call(rank, Replica.value_request, inputs.rows(piece), doing, keep(piece))
            if self._calls:
                self.wait(lambda: False, deadline_s)
        return values

    def _call(
        self, rank: int, method: Callable[..., Any], content: Any, doing: str, finish: Callable[..., None]
    ) -> None:
        begin_ns = time.monotonic_ns()
        future = self._addresses[rank].caller.submit(method, Message(content))
        self._calls[rank] = _Call(future, doing, begin_ns, finish)
        future.add_done_callback(lambda done: self._farm.ring_client())

    def _finish_calls(self) -> None:
        """Take the answers that have arrived. Raises what a replica raises, with its name."""
        for rank in [rank for rank, call in self._calls.items() if call.future.done()]:
            call, name = self._calls.pop(rank), self._addresses[rank].caller.name
            with naming(name, "" if self.replicas > 1 else name):
                reply = call.future.result().content
            self._check_version(name, reply.version)
            end_ns = time.monotonic_ns()
            # The clocks of machines differ: only the duration is the replica's.
            call.finish(name, reply.answer, end_ns - reply.spent_ns, end_ns)
            self._free.append(rank)
            progress.report()

    def _check_version(self, name: str, version: int) -> None:
        """Raise `WorkerFailed` where replicas decide with different weights in one rollout."""
        self._versions[name] = self.version = version
        if len(set(self._versions.values())) > 1:
            each = ", ".join(f"{replica} with {version}" for replica, version in sorted(self._versions.items()))
            raise WorkerFailed(f"the replicas act with weights of different versions: {each}")

    def _late(self, deadline_s: float) -> WorkerTimeout:
        if not self._calls:
            return self._farm.late(deadline_s)
        rank = min(self._calls, key=lambda rank: self._calls[rank].begin_ns)
        call = self._calls[rank]
        return WorkerTimeout(
            f"{self._addresses[rank].caller.name} did not answer within {deadline_s:.0f} s: it has been {call.doing} "
            f"for {(time.monotonic_ns() - call.begin_ns) / 1e9:.1f} s"
        )


def _count(inputs: Inputs) -> int:
    """B."""
    tensors = (inputs.state, inputs.proprio, inputs.episode, *inputs.frames.values())
    return next((len(tensor) for tensor in tensors if tensor is not None), len(inputs.instruction))
