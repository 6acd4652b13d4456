"""The trajectory memory of a run: decisions are written into it and learned from where they are.

    rows        a ring of R rounds of decisions
    columns     the run's environments: those of one group lie next to each other
    flat row    row * columns + column: the address of one decision

The frame writer draws an observation at the flat row of the decision that it leads to; a decision on several
observations refers to the rows where the others are (`sim_farm.observation_history`), mostly of earlier decisions. The
rollout worker writes the rest of the observation, the decision and its outcome beside it. The learner maps the same
memory, selects flat rows and copies them to its device. Trajectories are a table of flat rows, with log-probs, values
and outcomes copied beside it; observations, frames and traces have no other copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from embodied.runtime.remote import CALL_BYTES, slices
from policies.contract import Action, Inputs
from sim_farm.contract import INSTRUCTION_BYTES, TaskInfo
from sim_farm.observation_history import FrameRows, ObservationHistory
from sim_farm.shared_memory.frame_memory import FrameAddress, FrameMemory
from sim_farm.shared_memory.memory import FOLDER, Block, Field

CPU = torch.device("cpu")
TRACE, INPUT, FRAME_ROWS = "trace.", "input.", "frame_rows"
_OPEN: WeakValueDictionary[str, TrajectoryMemory] = WeakValueDictionary()
"""The memories that this process has mapped, by the name of their block."""


@dataclass(frozen=True)
class MemoryShape:
    """Sizes of a memory, without its frames."""

    rows: int
    """R: decisions of each environment that are kept at once, and the observation that follows them."""
    columns: int
    """Environments of all tasks."""
    cameras: tuple[str, ...]
    """The policy's names of the cameras, in the order of the frames."""
    instruction_bytes: int = INSTRUCTION_BYTES
    """Longest instruction of a task, in UTF-8 bytes."""
    history: ObservationHistory = ObservationHistory()
    """Observations that a decision is made on."""

    @classmethod
    def of(
        cls,
        rounds: int,
        columns: int,
        cameras: tuple[str, ...],
        infos: Sequence[TaskInfo],
        history: ObservationHistory,
    ) -> MemoryShape:
        """For `rounds` decisions of each environment, the observation after them and, where there are cameras, the
        decisions before them to whose pictures the first ones refer."""
        before = history.rounds if cameras else 0
        return cls(rounds + 1 + before, columns, cameras, longest_instruction(infos), history)

    @property
    def frame_rows(self) -> FrameRows:
        """Rows of the frame memory for the decisions' observations."""
        return FrameRows(self.history, self.rows, self.columns)


def longest_instruction(infos: Sequence[TaskInfo]) -> int:
    """Bytes of the longest instruction that one of the tasks may have."""
    return max(info.instruction_bytes for info in infos)


@dataclass(frozen=True)
class MemoryLayout:
    """The arrays of a memory."""

    shape: MemoryShape
    fields: Mapping[str, Field]
    brain_floats: tuple[str, ...]
    """Fields that hold the bits of bfloat16, which NumPy lacks."""

    @classmethod
    def of(cls, shape: MemoryShape, inputs: Inputs, action: Action) -> MemoryLayout:
        """For decisions like `action` on observations like `inputs`, both of one row or more."""
        like: dict[str, Tensor] = {f"{TRACE}{name}": tensor for name, tensor in action.trace.items()}
        like |= {"log_prob": action.log_prob, "value": action.value}
        for name in ("state", "proprio", "episode"):
            tensor = getattr(inputs, name)
            if tensor is not None:
                like[f"{INPUT}{name}"] = tensor
        count, chunk = shape.rows * shape.columns, action.chunk.shape[1]
        brain_floats = tuple(name for name, tensor in like.items() if tensor.dtype == torch.bfloat16)
        fields = {name: Field((count, *tensor.shape[1:]), _dtype(tensor)) for name, tensor in like.items()}
        if inputs.instruction:
            fields[f"{INPUT}instruction"] = Field((count, shape.instruction_bytes), "uint8", 0)
        if shape.cameras and shape.history.observations > 1:
            fields[FRAME_ROWS] = Field((count, shape.history.observations), "int64", -1)
        fields |= {
            "reward": Field((count,), "float32"),
            "step_reward": Field((count, chunk), "float32"),
            "executed": Field((count,), "int64"),
            "first": Field((count,), "int64", 0),
            **{name: Field((count,), "bool", 0) for name in ("success", "terminated", "truncated")},
        }
        return cls(shape, fields, brain_floats)


@dataclass(frozen=True)
class FrameCounts:
    """Frames (all cameras of one observation are one) that were read, and copies that this took."""

    read: int = 0
    copied: int = 0

    def __add__(self, other: FrameCounts) -> FrameCounts:
        return FrameCounts(self.read + other.read, self.copied + other.copied)

    def __sub__(self, earlier: FrameCounts) -> FrameCounts:
        return FrameCounts(self.read - earlier.read, self.copied - earlier.copied)


@dataclass(frozen=True)
class MemoryAddress:
    """Address of a memory for another process of this machine."""

    layout: MemoryLayout
    block: str
    frames: FrameAddress | None


class TrajectoryMemory:
    """Arrays [R * columns, ...] by name. Unwritten bytes hold the magic value of `sim_farm.shared_memory.memory`."""

    def __init__(self, layout: MemoryLayout, block: Block, frames: FrameMemory | None) -> None:
        self.shape, self.frames = layout.shape, frames
        self._layout, self._block = layout, block
        self._tensors = {
            name: torch.from_numpy(array).view(torch.bfloat16)
            if name in layout.brain_floats
            else torch.from_numpy(array)
            for name, array in block.arrays.items()
        }
        self.counts = FrameCounts()
        """Counts of this process so far."""
        self._pinned: finalize[[int], Any] | None = None

    @classmethod
    def create(cls, layout: MemoryLayout, frames: FrameMemory | None, shared: bool) -> TrajectoryMemory:
        """A new memory beside the farm's frames. Raises `FarmError` where shared memory does not suffice."""
        what = f"the trajectory memory ({layout.shape.rows:,} decisions of {layout.shape.columns:,} environments)"
        memory = cls(layout, Block.create(layout.fields, shared, what), frames)
        if memory._block.name is not None:
            _OPEN[memory._block.name] = memory
        return memory

    @classmethod
    def attach(cls, address: MemoryAddress) -> TrajectoryMemory:
        """The memory at the address; one object per process."""
        found = _OPEN.get(address.block)
        if found is None:
            frames = None if address.frames is None else FrameMemory.attach(address.frames)
            block = Block.attach(address.layout.fields, address.block)
            found = _OPEN[address.block] = cls(address.layout, block, frames)
        return found

    @property
    def address(self) -> MemoryAddress:
        assert self._block.name is not None, "a memory of one process has no address"
        frames = None if self.frames is None else self.frames.address
        return MemoryAddress(self._layout, self._block.name, frames)

    def __reduce__(self) -> Any:
        # A process that receives a memory, perhaps as a part of trajectories, maps it.
        return _attached, (self.address,)

    @property
    def nbytes(self) -> int:
        """Bytes of decisions and frames."""
        return sum(field.nbytes for field in self._block.fields.values()) + self.frames_nbytes

    @property
    def frames_nbytes(self) -> int:
        return 0 if self.frames is None else self.frames.frames.nbytes

    @property
    def frame_shape(self) -> FrameShape:
        assert self.frames is not None
        return FrameShape(self.shape.cameras, self.frames.frames.shape[2:])

    def describe(self) -> str:
        """One line for people: its size, and how much shared memory there is."""
        size = f"{self.nbytes / 1e6:,.1f} MB"
        frames = f" (frames {self.frames_nbytes / 1e6:,.1f} MB)" if self.frames_nbytes else ""
        if self._block.name is None:
            return f"Trajectory memory: {size}{frames} in this process"
        whole = os.statvfs(FOLDER)
        return f"Trajectory memory: {size}{frames} of {whole.f_blocks * whole.f_frsize / 1e9:,.1f} GB in {FOLDER}"

    def close(self) -> None:
        """Forget the arrays; the creator also removes the block. The frames are the farm's to close."""
        if self._block.name is not None:
            _OPEN.pop(self._block.name, None)
        if self._pinned is not None:
            self._pinned()
        self._tensors = {}
        self._block.close()

    def column(self, name: str) -> Tensor:
        """[R * columns, ...] of that name; shares the memory."""
        return self._tensors[name]

    def write_decision(self, rows: np.ndarray, inputs: Inputs, action: Action) -> None:
        """Write decisions at flat rows [n]: the observations without their frames, and the actions."""
        index = torch.from_numpy(rows)
        for name in ("state", "proprio", "episode"):
            if f"{INPUT}{name}" in self._tensors:
                self._tensors[f"{INPUT}{name}"][index] = getattr(inputs, name)
        if inputs.instruction:
            self._write_texts(rows, inputs.instruction)
        self._tensors["log_prob"][index] = action.log_prob
        self._tensors["value"][index] = action.value
        for name, tensor in action.trace.items():
            self._tensors[f"{TRACE}{name}"][index] = tensor

    def write_frame_rows(self, rows: np.ndarray, frame_rows: np.ndarray) -> None:
        """Write where the pictures of the decisions at flat rows [n] are: [n, K] rows of the frame memory. Of decisions
        on one observation these are the flat rows themselves, and nothing is written."""
        if FRAME_ROWS in self._tensors:
            self._block.arrays[FRAME_ROWS][rows] = frame_rows

    def frame_rows_of(self, rows: Tensor) -> Tensor:
        """Rows of the frame memory with the pictures of the decisions at flat rows [n]: [n], or [n, K]."""
        return self._tensors[FRAME_ROWS][rows] if FRAME_ROWS in self._tensors else rows

    def write_outcome(self, rows: np.ndarray, outcome: Mapping[str, np.ndarray]) -> None:
        """Write the outcomes of the decisions at flat rows [n]: reward, step_reward, executed, first, success,
        terminated, truncated."""
        for name, values in outcome.items():
            self._block.arrays[name][rows] = values

    def add_outcome(self, rows: np.ndarray, outcome: Mapping[str, np.ndarray]) -> None:
        """Add to the outcomes that are written at flat rows [n], all different; of marks either one holds."""
        for name, values in outcome.items():
            self._block.arrays[name][rows] += values

    def inputs(self, rows: Tensor, device: torch.device = CPU, frames: bool = True) -> Inputs:
        """The observations at flat rows [n] on the device; every frame is copied once."""
        state, proprio, episode = (self._at(f"{INPUT}{name}", rows, device) for name in ("state", "proprio", "episode"))
        pictures = {}
        if frames and self.frames is not None:
            pictures = self.frames_at(self.frame_rows_of(rows), device)
        return Inputs(state, proprio, pictures, self._texts(rows), episode)

    def trace(self, rows: Tensor, device: torch.device = CPU) -> dict[str, Tensor]:
        """The trace needed to re-evaluate the decisions at flat rows [n], on `device`."""
        names = [name for name in self._tensors if name.startswith(TRACE)]
        return {name.removeprefix(TRACE): self._tensors[name][rows].to(device) for name in names}

    def frames_at(self, rows: Tensor, device: torch.device = CPU) -> dict[str, Tensor]:
        """uint8 [n, H, W, 3] for each camera, at rows [n] of the frame memory, which begins with the flat rows. For
        rows [n, K] uint8 [n, K, H, W, 3]."""
        assert self.frames is not None
        every, shape, rows = torch.from_numpy(self.frames.frames), rows.shape, rows.flatten()
        self.counts += FrameCounts(len(rows), len(rows))
        if device.type != "cuda":
            found = {name: every[:, i].index_select(0, rows) for i, name in enumerate(self.shape.cameras)}
            return {name: frames.unflatten(0, shape) for name, frames in found.items()}
        self._pin(every)
        copied = torch.empty(len(rows), *every.shape[1:], dtype=torch.uint8, device=device)
        for place, row in enumerate(rows.tolist()):  # each straight from the shared memory, without a stop
            copied[place].copy_(every[row], non_blocking=True)
        return {name: copied[:, i].unflatten(0, shape) for i, name in enumerate(self.shape.cameras)}

    def view_frames(self, rows: np.ndarray) -> dict[str, Tensor]:
        """uint8 [n, H, W, 3] for each camera, at rows [n] of the frame memory: a view where rows follow each other,
        else a copy. For rows [n, K] a copy uint8 [n, K, H, W, 3]."""
        assert self.frames is not None
        found = self.frames.view(rows) if rows.ndim == 1 else None
        every = torch.from_numpy(self.frames.copy(rows) if found is None else found)
        return {name: every[..., i, :, :, :] for i, name in enumerate(self.shape.cameras)}

    def _pin(self, frames: Tensor) -> None:
        """Let the GPU read the frames where they are, until this object is gone: whatever is mapped there later has
        other pages."""
        if self._pinned is None:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostRegister(frames.data_ptr(), frames.nbytes, 0)
            self._pinned = finalize(self, _unpin, frames.data_ptr())

    def _at(self, name: str, rows: Tensor, device: torch.device) -> Tensor | None:
        return self._tensors[name][rows].to(device) if name in self._tensors else None

    def _write_texts(self, rows: np.ndarray, texts: Sequence[str]) -> None:
        kept = self._block.arrays[f"{INPUT}instruction"]
        known: dict[str, np.ndarray] = {}
        for row, text in zip(rows.tolist(), texts, strict=True):
            if text not in known:
                data = text.encode()
                known[text] = np.zeros(kept.shape[1], np.uint8)
                known[text][: len(data)] = np.frombuffer(data, np.uint8)
            kept[row] = known[text]

    def _texts(self, rows: Tensor) -> tuple[str, ...]:
        if f"{INPUT}instruction" not in self._tensors:
            return ()
        kept = self._block.arrays[f"{INPUT}instruction"]
        known: dict[bytes, str] = {}
        found = []
        for row in rows.tolist():
            data = kept[row].tobytes()
            if data not in known:
                known[data] = data.rstrip(b"\0").decode()
            found.append(known[data])
        return tuple(found)


def _attached(address: MemoryAddress) -> TrajectoryMemory:
    return TrajectoryMemory.attach(address)


def _unpin(pointer: int) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(pointer)


def _dtype(tensor: Tensor) -> str:
    """NumPy's name of the tensor's dtype; a brain float, which NumPy lacks, is kept as its bits."""
    return "int16" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")


# --- frames for a process on another machine: each is fetched when it is needed first, once


class FrameReader(Protocol):
    """Reads frames of a memory on another machine."""

    def read(self, rows: Tensor) -> Tensor:
        """uint8 [n, cameras, H, W, 3] at rows int64 [n] of the frame memory, in memory of the caller's own."""
        ...


@dataclass(frozen=True)
class FrameShape:
    """Cameras and sizes of the frames of one observation."""

    cameras: tuple[str, ...]
    """The policy's names, in the order of the frames."""
    picture: tuple[int, ...]
    """(H, W, 3) of each."""

    @property
    def nbytes(self) -> int:
        return len(self.cameras) * torch.Size(self.picture).numel()


class RemoteFrames:
    """Frames of M decisions by rows of the frame memory, int64 [M], or [M, K] where each is made on K observations.
    Fetched frames are kept as long as this object is."""

    def __init__(self, reader: FrameReader, shape: FrameShape, rows: Tensor) -> None:
        self._reader, self._shape, self._rows = reader, shape, rows
        self._kept: dict[int, Tensor] = {}
        """[cameras, H, W, 3] by the flat row."""

    @classmethod
    def joined(cls, parts: Sequence[RemoteFrames]) -> RemoteFrames:
        """The frames of all parts of one iteration, one after the other, with those that each has fetched."""
        whole = cls(parts[0]._reader, parts[0]._shape, torch.cat([part._rows for part in parts]))
        for part in parts:
            whole._kept |= part._kept
        return whole

    def at(self, index: Tensor) -> dict[str, Tensor]:
        """uint8 [n, H, W, 3] of each camera, or [n, K, H, W, 3], of the decisions `index` (int64 [n])."""
        shape, rows = self._rows[index].shape, self._rows[index].flatten().tolist()
        self._fetch([row for row in dict.fromkeys(rows) if row not in self._kept])
        found = {}
        for number, name in enumerate(self._shape.cameras):
            found[name] = torch.empty(len(rows), *self._shape.picture, dtype=torch.uint8)
            for place, row in enumerate(rows):
                found[name][place] = self._kept[row][number]
        return {name: frames.unflatten(0, shape) for name, frames in found.items()}

    def _fetch(self, rows: Sequence[int]) -> None:
        """In one call, or in several where one would be too large."""
        for part in slices(len(rows), self._shape.nbytes, CALL_BYTES):
            piece = rows[part]
            self._kept.update(zip(piece, self._reader.read(torch.tensor(piece)), strict=True))
