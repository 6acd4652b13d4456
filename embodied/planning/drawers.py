"""What frames can be drawn on where there are GPUs: found by drawing one of the task's own pictures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from embodied.config import Config
from embodied.errors import UserError
from embodied.execution.executor import Executor
from embodied.workers.devices import free_bytes
from embodied.workers.offload import Switch
from embodied.workers.roles import Decider
from sim_farm.render_devices import RenderDevice, name_of

SECONDS = 120.0
"""Longest wait for a picture: SAPIEN compiles its shaders at first use, an EGL driver that hangs never ends."""


@dataclass(frozen=True)
class GpuDrawing:
    """What a render worker on a GPU holds of it, and how long leaving and coming back take."""

    held_bytes: int
    switch: tuple[Switch, Switch]


def drawers_of(config: Config, gpus: Sequence[torch.device]) -> tuple[RenderDevice, ...]:
    """The devices that a profile of the task measures: software and the first GPU, as far as they draw and
    `farm.devices` leaves them. None where there is nothing to choose: no GPU, or nothing is drawn.

    Raises `UserError` with what each said where none draws.
    """
    if not gpus or "images" not in config.policy.reads:
        return ()
    wanted: list[RenderDevice] = ["cpu"]
    if config.farm.devices != "cpu":
        wanted.append(gpus[0].index)
    said = {device: _refusal(config.env.task, device) for device in wanted}
    found = tuple(device for device, words in said.items() if words is None)
    if not found:
        raise UserError(f"{config.env.task} is drawn on nothing: " + "; ".join(filter(None, said.values())))
    return found


def _refusal(task: str, device: RenderDevice) -> str | None:
    """Why the device does not draw the task; None where it does."""
    command = [sys.executable, "-m", "sim_farm.drawing", task, name_of(device)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{name_of(device)} drew nothing within {SECONDS:.0f} s"
    if result.returncode == 0:
        return None
    return (result.stderr.strip().splitlines() or [f"{name_of(device)} ended with status {result.returncode}"])[-1]


def gpu_drawing(workers: Executor, gpu: torch.device) -> GpuDrawing:
    """Let the renderers leave the GPU and come back, and see what becomes free. What the driver keeps of a process that
    has drawn is not among it."""
    before, deadline_s = free_bytes(gpu), workers.farm_deadline_s
    out = workers.decider.call(Decider.unload_renderers, deadline_s)
    held = max(free_bytes(gpu) - before, 0)
    return GpuDrawing(held, (out, workers.decider.call(Decider.load_renderers, deadline_s)))
