"""Which GPU draws what: found by drawing. Standard library only; each picture is drawn in a process of its own.

CUDA, EGL and Vulkan number GPUs differently. Workers are told CUDA's numbers; here it is checked that the picture comes
from that GPU, by the identity that the drawing device gives of itself: its UUID to OpenGL, its PCI address to Vulkan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
APIS = {"OpenGL": "tabletop/reach", "Vulkan": "maniskill/PushCube-v1"}
"""A task that is drawn by each."""
SECONDS = 120.0
"""SAPIEN compiles its shaders at first use. Longer is a driver that hangs."""
LIST_GPUS = """
import json, torch
every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([[each.name, str(each.uuid)] for each in every]))
"""


@dataclass(frozen=True)
class Gpu:
    """One of CUDA's devices, as this process would count them."""

    number: int
    name: str
    uuid: str = ""
    pci: str = ""
    """As nvidia-smi writes it: 00000000:3B:00.0."""

    @property
    def device(self) -> str:
        return f"cuda:{self.number}"


@dataclass(frozen=True)
class Picture:
    """What came of drawing by one of `APIS`."""

    drawn: bool
    name: str
    """What the device calls itself, or why nothing was drawn."""
    identity: str | None = None
    picture_s: float = 0.0


def gpus() -> list[Gpu]:
    """In CUDA's order; none where torch sees none."""
    listing = _output([sys.executable, "-c", LIST_GPUS])
    table = _output(["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"])
    busses = {uuid.strip(): bus.strip() for uuid, _, bus in (line.partition(",") for line in table.splitlines())}
    found = json.loads(listing) if listing else []
    return [
        Gpu(number, name, uuid, busses.get(f"GPU-{uuid.removeprefix('GPU-')}", ""))
        for number, (name, uuid) in enumerate(found)
    ]


def draw(task: str, device: str) -> Picture:
    """Draw a picture of the task on `cuda:0`, `cpu` or `auto`, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "sim_farm.drawing", task, device]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | {"PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return Picture(False, f"no picture within {SECONDS:.0f} s")
    if result.returncode < 0:
        return Picture(False, f"crashed with signal {-result.returncode}")
    lines = (result.stderr if result.returncode else result.stdout).strip().splitlines()
    if result.returncode or not lines:
        return Picture(False, lines[-1] if lines else "no answer")
    found = json.loads(lines[-1])
    return Picture(True, found["name"], found["identity"], found["picture_s"])


def verdict(gpu: Gpu, api: str, picture: Picture) -> tuple[bool, str]:
    """Whether the picture that was asked of the GPU is that GPU's, and what there is to say of it."""
    if not picture.drawn:
        return False, f"{api}: {picture.name}"
    text = f"{api}: {picture.name}, {1e3 * picture.picture_s:.2f} ms a picture"
    known = gpu.uuid if api == "OpenGL" else gpu.pci
    if not picture.identity or not known:
        return True, f"{text} (which GPU that is it does not say)"
    if _same(picture.identity, known):
        return True, text
    return False, f"{text}, but that is GPU {picture.identity}, and CUDA's is {known}"


def _same(one: str, other: str) -> bool:
    """Equal UUIDs, or PCI addresses, in whichever way they are written."""
    plain = [text.lower().removeprefix("gpu-").replace("-", "").replace(":", "").lstrip("0") for text in (one, other)]
    return plain[0] == plain[1]


def _output(command: list[str]) -> str:
    """What the command prints, stripped; empty if it is not there, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
