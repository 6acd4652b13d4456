"""The result of a benchmark: its figures, with time, hardware and command of the measurement."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from embodied.commands.arguments import Bounded
from embodied.devices import hardware
from embodied.files import write_json


def provenance() -> dict[str, str]:
    """When, on what and by which command the figures are measured: it stands before each of them."""
    program = Path(sys.argv[0])
    started = f"python {program}" if program.suffix == ".py" else program.name
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "command": " ".join([started, shlex.join(sys.argv[1:])]).rstrip(),
    }


def show_and_write(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures of the script that runs; write them to `path` too, if one is given."""
    result = provenance() | figures
    print(json.dumps(result, indent=1))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)


# --- Settings of the benchmarks. This module imports nothing heavy, so that `--help` does not load what they
# measure.


Positive, NotNegative = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class BenchFarm(Bounded):
    """Env steps per second of the farm, beside gymnasium's AsyncVectorEnv and the physical limit."""

    task: str = "maniskill/PushCube-v1"
    """ManiSkill's and LIBERO's are compared with AsyncVectorEnv over the simulator's own environment, LIBERO's
    also with its SubprocVectorEnv."""
    cameras: NotNegative = 0
    """Cameras observed; 0 observes states."""
    size: Positive = 128
    """Height and width of a frame."""
    chunk: Positive = 1
    """Actions per decision."""
    num_envs: Positive = 8
    """Environments of the farm."""
    groups: Positive = 2
    """Groups of environments; one is simulated while another is inferred."""
    render_workers: NotNegative = 0
    """Processes that draw; 0: physics workers draw (fused)."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Duration of each measurement; there are three of each, in turn."""
    peer: bool = True
    """Measure the vector environments, pinned (ManiSkill: 2 and 8 environments, LIBERO: 2)."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class BenchTransport(Bounded):
    """Frames from a worker to a consumer: through slots, pipe, queue and Ray's object store; memcpy is the limit."""

    frames: Positive = 2
    """Frames per message."""
    size: Positive = 256
    """Height and width of a frame."""
    messages: Positive = 2000
    """Messages per measurement."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class BenchPolicy(Bounded):
    """Actions (OpenVLA) or chunks (OpenVLA-OFT, pi0) per second by batch size, time to the first action, memory and
    model FLOPs utilisation, beside the hardware's limits and (OpenVLA) Hugging Face's loop, one row at a time, on the
    same weights."""

    model: str = "openvla-7b"
    """openvla- or openvla-oft-, and 7b, 100m, 100m-deep or tiny; pi0 or pi05, alone or with -small or -tiny. With
    --checkpoint only the first part counts."""
    random_weights: bool = False
    """Draw the weights instead of reading a checkpoint: no value of theirs changes speed or memory."""
    checkpoint: Path | None = None
    """A Hugging Face directory."""
    unnorm_key: str = ""
    """The checkpoint's dataset, where it has several."""
    batches: tuple[Positive, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Batch sizes; those that do not fit into memory are left out, with a note."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is the first GPU where there is one."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto is bfloat16 on a GPU and float32 on a CPU."""
    seconds: Annotated[float, Field(gt=0)] = 3.0
    """Duration of each measurement, a decision at least; there are three of each, in turn."""
    peer: bool = True
    """Measure Hugging Face's loop too."""
    seed: NotNegative = 0
    """Seed of random weights and frames."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class BenchLearner(Bounded):
    """Samples per second of a PPO update of low-rank adapters (evaluate, backward, optimiser step) by micro-batch,
    memory and model FLOPs utilisation, beside the hardware's limit; rollout and learner share the weights."""

    model: str = "openvla-7b"
    """openvla- or openvla-oft-, and 7b, 100m, 100m-deep or tiny; pi0 or pi05, alone or with -small or -tiny. With
    --checkpoint only the first part counts."""
    random_weights: bool = False
    """Draw the weights instead of reading a checkpoint: no value of theirs changes speed or memory."""
    checkpoint: Path | None = None
    """A Hugging Face directory."""
    unnorm_key: str = ""
    """The checkpoint's dataset, where it has several."""
    micro_batches: tuple[Positive, ...] = (4, 8, 16, 32)
    """Samples per forward and backward pass; those that do not fit into memory are left out, with a note."""
    minibatch: NotNegative = 0
    """Samples per optimiser step; 0: the largest micro-batch."""
    lora_rank: NotNegative = 32
    """Rank of the adapters, on language model and projector; 0 trains every weight. pi0's expert is trained instead."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is the first GPU where there is one."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto is bfloat16 on a GPU and float32 on a CPU."""
    seconds: Annotated[float, Field(gt=0)] = 3.0
    """Duration of each measurement, a step at least; there are three of each, in turn."""
    seed: NotNegative = 0
    """Seed of random weights and frames."""
    json: Path | None = None
    """Write the result to this file."""
