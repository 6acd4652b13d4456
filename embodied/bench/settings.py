"""What the benchmarks can be asked for. Light, so that `--help` need not import what they measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchFarm:
    """Env steps per second of the farm, beside gymnasium's AsyncVectorEnv and the physical limit."""

    task: str = "maniskill/PushCube-v1"
    """ManiSkill's and LIBERO's are compared with AsyncVectorEnv over the simulator's own environment, LIBERO's
    also with its SubprocVectorEnv."""
    cameras: int = 0
    """Cameras observed; 0 observes states."""
    size: int = 128
    """Height and width of a frame."""
    chunk: int = 1
    """Actions per decision."""
    num_envs: int = 8
    """Environments of the farm."""
    stages: int = 2
    """Groups of environments; one is simulated while another is inferred."""
    render_workers: int = 0
    """Processes that draw; 0: physics workers draw (fused)."""
    seconds: float = 10.0
    """Duration of each measurement; there are three of each, in turn."""
    peer: bool = True
    """Measure the vector environments, pinned (ManiSkill: 2 and 8 environments, LIBERO: 2)."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class BenchTransport:
    """Frames from a worker to a consumer: through slots, pipe, queue and Ray's object store; memcpy is the limit."""

    frames: int = 2
    """Frames per message."""
    size: int = 256
    """Height and width of a frame."""
    messages: int = 2000
    """Messages per measurement."""
    json: Path | None = None
    """Write the result to this file."""
