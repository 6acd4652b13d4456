"""Ways from the learner's weights to who acts, and which of them is taken: the shortest between where both ends are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """By what weights are handed over."""

    REFERENCE = "by reference"
    MEMORY = "shared memory"
    """The host's: written once, read by all."""
    GPU_MEMORY = "GPU memory"
    """The learner's tensors themselves, which the other process maps (CUDA IPC) and copies on the GPU."""
    BROADCAST = "broadcast"
    """From GPU to GPU, to all at once (NCCL)."""
    RAY = "Ray, between machines"


@dataclass(frozen=True)
class End:
    """Where a policy is."""

    process: int
    """The system's number."""
    device: str = ""
    """Which GPU holds its tensors, by a name that is the same in every process; '' is the host's memory."""
    node: str = ""
    """Id of the cluster's node; '' is the one where the command was typed."""


def way_between(source: End, target: End) -> Way:
    """The way from a learner to one who acts."""
    if source.node != target.node:
        return Way.RAY
    if source.process == target.process:
        return Way.REFERENCE
    if not source.device or not target.device:
        return Way.MEMORY
    return Way.GPU_MEMORY if source.device == target.device else Way.BROADCAST


def ways_to(source: End, targets: Sequence[End]) -> tuple[Way, ...]:
    """The way to each of several that act. What has to go through the host's memory for one goes there for all: the
    copy is then there anyway, and one way is waited for instead of two."""
    ways = tuple(way_between(source, target) for target in targets)
    if Way.RAY in ways:
        return tuple(Way.MEMORY if way in ON_GPUS else way for way in ways)
    return (Way.MEMORY,) * len(ways) if Way.MEMORY in ways else ways


ON_GPUS = (Way.GPU_MEMORY, Way.BROADCAST)
"""Those that never pass through the host's memory."""
