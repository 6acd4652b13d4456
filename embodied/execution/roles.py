"""Roles of workers in an iteration: rollout worker, policy worker, scorer, learner. A role is a protocol of methods.

A rollout worker steps the environments and collects trajectories. A scorer adds to trajectories on their way to the
learner, which updates the policy from them and publishes its weights. Policy workers load these: the rollout worker
itself, or several replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from embodied.learning.learner import ReceivedPart, TrainedBytes
from embodied.learning.offload import Switch
from embodied.rollout.rollout_summary import EpisodePart, RolloutSummary
from embodied.run.background_writer import Written
from embodied.run.checkpoint import RunState
from embodied.trajectories.batch import Trajectories
from embodied.trajectories.memory import FrameReader, MemoryLayout, TrajectoryMemory
from policies.contract import Policy


class PolicyRole(Protocol):
    """Infers actions with its policy. The `WeightsLoader` of weight sync."""

    def layout(self) -> MemoryLayout: ...

    def share(self, policy: Policy) -> None: ...

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None: ...

    def at_version(self, version: int) -> None: ...

    def unload(self, spill: Path) -> Switch: ...

    def load_back(self) -> Switch: ...


class ReplicaRole(PolicyRole, Protocol):
    """Decides for the groups of environments that a rollout worker sends. See `PolicyReplica`."""

    def map_frames(self, memory: TrajectoryMemory) -> None: ...


class RolloutRole(Protocol):
    """Holds the farm. A rollout worker that acts by itself is `PolicyRole` too."""

    makes: ClassVar[frozenset[str]]
    """Data of edges from the rollout worker."""

    def use(self, memory: TrajectoryMemory) -> None: ...

    def begin(self, snapshot: Mapping[str, np.ndarray] | None = None, rest: bool = False) -> None: ...

    def rollout(self, decisions: int, deadline_s: float) -> RolloutSummary: ...

    def rollout_episodes(self, part: EpisodePart, limit: int, deadline_s: float) -> RolloutSummary: ...

    def trajectories(self) -> Trajectories: ...

    def without_memory(self, batch: Trajectories, reader: FrameReader | None) -> Trajectories:
        """The trajectories for another machine, which does not have the memory that they are in; frames are fetched
        from there by the reader (None: there are none)."""
        ...

    def snapshot(self) -> dict[str, np.ndarray]: ...

    def unload_renderers(self, deadline_s: float) -> Switch: ...

    def load_renderers(self, deadline_s: float) -> Switch: ...


class ScorerRole(Protocol):
    """Adds to trajectories that pass through."""

    takes: ClassVar[frozenset[str]]
    """Data of edges to the scorer."""
    makes: ClassVar[frozenset[str]]

    def receive(self, batch: Trajectories, iteration: int) -> float:
        """Score a part of an iteration's trajectories. Returns the seconds that it took."""
        ...

    def trajectories(self) -> Trajectories:
        """The oldest scored part that was not returned yet."""
        ...

    def share(self, policy: Policy) -> None:
        """Use the policy of the learner, which is in this process."""
        ...


class LearnerRole(Protocol):
    """Updates the policy. The `WeightsPublisher` of weight sync. All ranks receive the same calls in the same order."""

    takes: ClassVar[frozenset[str]]

    def listen(self, host: str) -> str:
        """On rank 0: accept the other ranks at this machine's address. Returns HOST:PORT for `join`."""
        ...

    def join(self, address: str, timeout_s: float) -> None:
        """Connect to the other ranks at the address."""
        ...

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        ...

    def receive(self, batch: Trajectories, iteration: int) -> ReceivedPart: ...

    def finish(self, iteration: int) -> dict[str, float]: ...

    def weights(self) -> dict[str, Tensor]:
        """Trained tensors by name; empty on ranks other than 0."""
        ...

    def shares_policy(self) -> bool:
        """True if other workers of the process can compute with the policy."""
        ...

    def own_policy(self) -> Policy: ...

    def load(self, folder: Path) -> None: ...

    def save(self, root: Path, state: RunState, environments: dict[str, np.ndarray]) -> None:
        """Begin to write a checkpoint of the present state."""
        ...

    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        ...

    def saved(self) -> Written | None:
        """Wait until the checkpoint is complete."""
        ...

    def unload(self, weights: bool) -> Switch: ...

    def load_back(self) -> Switch: ...

    def peak_bytes(self) -> int: ...

    def trained_bytes(self) -> TrainedBytes: ...
