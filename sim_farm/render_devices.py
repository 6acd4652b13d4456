"""The device on which this process draws: which was asked for, and whether it is what draws.

A process draws on one device, because MuJoCo's OpenGL display and SAPIEN's renderer are made once in each. A worker
asks before it builds anything; a backend looks here when it makes its display, and checks what it got. Where nobody
asks, the driver chooses: a GPU where one draws, else software.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim_farm.contract import FarmError

RenderDevice = int | Literal["cpu"]
"""A GPU by CUDA's number, as this process counts (CUDA_VISIBLE_DEVICES), or `cpu`: drawn in software."""
SOFTWARE = re.compile(r"llvmpipe|lavapipe|softpipe|swrast|swiftshader|software rasterizer", re.IGNORECASE)
"""In the names that software renderers give themselves to OpenGL (GL_RENDERER) and to Vulkan (deviceName)."""
GPU_REMEDY = (
    "install the GPU driver's own OpenGL and Vulkan with their loaders (libegl1, libvulkan1) and the files that name "
    "them (10_nvidia.json in /usr/share/glvnd/egl_vendor.d, nvidia_icd.json in /usr/share/vulkan/icd.d); in a "
    "container give it NVIDIA's `graphics` capability (docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all). "
    "`embodied doctor` says what draws. Where no device is asked for (farm.devices), frames are drawn on what there "
    "is, in software where that is all"
)
CPU_REMEDY = (
    "install Mesa's software renderers (libegl-mesa0, libosmesa6, mesa-vulkan-drivers; `make system`), or draw on a GPU"
)


@dataclass
class _Process:
    """Device that this process draws on."""

    requested: RenderDevice | None = None
    drawing: bool = False
    """True if a display has been made: no other device can be asked for."""


_process = _Process()


def name_of(device: RenderDevice | None) -> str:
    """`cuda:1` or `cpu`; `auto` where the driver chooses."""
    return "auto" if device is None else f"cuda:{device}" if isinstance(device, int) else device


def ask(device: RenderDevice | None) -> None:
    """Have this process draw on the device; None: on the device in use, or the driver's default. Raises `FarmError` if
    it already draws on another device."""
    if device == _process.requested or (device is None and _process.drawing):
        return
    if _process.drawing:
        raise FarmError(
            f"{name_of(device)} was asked to draw in a process that has drawn on {name_of(_process.requested)}: a "
            "process draws on one device; let workers be processes of their own (runtime.mode: ray)"
        )
    _process.requested = device


def requested() -> RenderDevice | None:
    """Requested device of this process; None: the driver chooses."""
    return _process.requested


def drawing() -> None:
    """Note that a display has been made on what `requested` says."""
    _process.drawing = True


def is_software(name: str) -> bool:
    """True if a renderer of that name draws on the CPU."""
    return SOFTWARE.search(name) is not None


def check_drawn(device: RenderDevice | None, name: str, by: str) -> None:
    """Raise `FarmError` where a renderer of that name (GL_RENDERER, a Vulkan device's) is not what was asked for. `by`
    says in words where it came from."""
    if device is not None and is_software(name) != (device == "cpu"):
        raise refused(device, f"{by} gives {name}" + (", which draws in software" if device != "cpu" else ""))


def refused(device: RenderDevice, instead: str) -> FarmError:
    """The error of a device that does not draw: which was asked for, what there is instead, and what to do."""
    remedy = CPU_REMEDY if device == "cpu" else GPU_REMEDY
    return FarmError(f"{name_of(device)} was asked to draw, and {instead}: {remedy}")


# --- OpenGL's devices


@dataclass(frozen=True)
class EglDevice:
    """One of the devices that EGL offers, in EGL's order, which is not CUDA's."""

    cuda: int | None
    """Its number by EGL_NV_device_cuda; None: no CUDA device of this process."""
    software: bool
    """True if EGL_MESA_device_software says so."""

    def __str__(self) -> str:
        return "software" if self.software else "no CUDA device" if self.cuda is None else f"cuda:{self.cuda}"


def egl_index(devices: Sequence[EglDevice], wanted: RenderDevice, visible: str | None) -> int:
    """Number of the EGL device that draws for `wanted`; `visible` is CUDA_VISIBLE_DEVICES. Raises `FarmError` if none
    does.

    EGL answers with CUDA's numbers. Where one of them is larger than the process has CUDA devices, the driver counts
    all GPUs of the machine, and `wanted` is looked up in `visible`.
    """
    if wanted == "cpu":
        found = [i for i, device in enumerate(devices) if device.software]
    else:
        number = _machine_wide(devices, wanted, visible)
        found = [i for i, device in enumerate(devices) if device.cuda is not None and device.cuda == number]
    if not found:
        there = ", ".join(f"{i} ({device})" for i, device in enumerate(devices)) or "none"
        raise refused(wanted, f"none of EGL's devices is that (EGL has: {there})")
    return found[0]


def _machine_wide(devices: Sequence[EglDevice], wanted: int, visible: str | None) -> int | None:
    """The number by which EGL knows the process's CUDA device `wanted`; None where that is not visible."""
    if visible is None:
        return wanted
    numbers = [part.strip() for part in visible.split(",") if part.strip()]
    if wanted >= len(numbers):
        return None
    counts_all = max((device.cuda for device in devices if device.cuda is not None), default=0) >= len(numbers)
    if not counts_all:
        return wanted
    if not numbers[wanted].isdecimal():
        raise FarmError(
            f"CUDA_VISIBLE_DEVICES is {visible!r} and EGL counts all GPUs of the machine, so that cuda:{wanted} cannot "
            "be found among them: name GPUs by their numbers there"
        )
    return int(numbers[wanted])
