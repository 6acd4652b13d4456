"""The memory that the workers of a task map: the task's slots, the client's bell and the frame memory. All tasks of a
farm share the bell and the frame memory."""

from __future__ import annotations

from dataclasses import dataclass

from sim_farm.contract import TaskInfo
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.frame_memory import FrameAddress, FrameMemory
from sim_farm.shared_memory.layout import FarmSpec, slot_fields
from sim_farm.shared_memory.memory import Block, Field

BELL = {"bell": Field((1,), "int32", 0)}
"""The block with the client's bell."""


@dataclass(frozen=True)
class MemoryAddress:
    """Address of the memory for another process of this machine: `WorkerMemory.attach`."""

    slots: str
    bell: str
    frames: FrameAddress | None


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of the workers of one task. `frames` is None if nothing is drawn."""

    slots: Block
    bell: Block
    frames: FrameMemory | None

    @classmethod
    def attach(cls, spec: FarmSpec, info: TaskInfo, address: MemoryAddress) -> WorkerMemory:
        frames = None if address.frames is None else FrameMemory.attach(address.frames)
        slots = Block.attach(slot_fields(spec, info), address.slots)
        return cls(slots, Block.attach(BELL, address.bell), frames)

    @classmethod
    def private(cls, spec: FarmSpec, info: TaskInfo) -> WorkerMemory:
        """Memory of this process alone, without frames: for a physics worker at the far end of a relay."""
        return cls(Block.create(slot_fields(spec, info), False), Block.create(BELL, False), None)

    @property
    def address(self) -> MemoryAddress | None:
        """None where it is this process's own."""
        if self.slots.name is None or self.bell.name is None:
            return None
        return MemoryAddress(self.slots.name, self.bell.name, None if self.frames is None else self.frames.address)

    @property
    def client(self) -> Doorbell:
        """The client's bell."""
        return Doorbell(self.bell.arrays["bell"], 0)
