"""Stage `doctor`: what the machine is. What stands here explains what other stages find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.bandwidth import between_host_and_device
from benchmarks.gpu_stages.work import Figures, Work
from embodied_bench.machine import measure_machine

QUERY = (
    "name", "driver_version", "pci.bus_id", "memory.total", "memory.used", "pstate", "clocks.sm", "clocks.mem",
    "clocks.max.sm", "power.limit", "mig.mode.current", "ecc.mode.current",
)  # fmt: skip
LIBRARIES = ("libvulkan.", "libEGL", "libGLX", "libOpenGL", "libOSMesa", "libGL.", "libcuda.", "libnvidia-eglcore")
DRIVER_FILES = (
    "/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/share/glvnd/egl_vendor.d", "/etc/glvnd/egl_vendor.d",
    "/usr/local/nvidia/share/vulkan/icd.d", "/usr/local/nvidia/share/glvnd/egl_vendor.d",
)  # fmt: skip
VARIABLES = ("CUDA_", "NVIDIA_", "VK_", "MUJOCO_", "PYOPENGL_", "EGL_", "__EGL_", "LD_LIBRARY_PATH", "EMBODIED_")
PIECE = 2**30


def doctor(work: Work) -> Figures:
    """nvidia-smi's facts, what torch sees, graphics drivers, `embodied doctor`; rates of the GPU."""
    found: Figures = {"nvidia_smi": nvidia_smi(), "graphics": graphics(), "variables": variables()}
    work.keep(found)
    found["torch"] = torch_facts()
    work.keep(found)
    found |= embodied_doctor(work.scratch / "doctor.json")
    work.keep(found)
    device = torch.device(work.device)
    machine = measure_machine(device, "bfloat16" if work.device == "cuda" else "float32")
    found |= {"matmul_flops_per_s": machine.flops_per_s, "memory_bytes_per_s": machine.bytes_per_s}
    if work.device == "cuda":
        to_host, to_device = between_host_and_device(device, PIECE)
        found |= {"to_host_bytes_per_s": to_host, "to_device_bytes_per_s": to_device}
    return found


def nvidia_smi() -> list[dict[str, str]]:
    """A dictionary for each GPU; none where there is no such program."""
    listing = _output_of(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"])
    return [dict(zip(QUERY, (word.strip() for word in line.split(",")), strict=False)) for line in listing.splitlines()]


def torch_facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    if not torch.cuda.is_available():
        return found
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return found | {
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "compiled_for": torch.cuda.get_arch_list(),
        "multiprocessors": properties.multi_processor_count,
        "free_bytes": free,
        "total_bytes": total,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def graphics() -> dict[str, Any]:
    """Which loaders and drivers of Vulkan and OpenGL there are."""
    libraries = [line.strip() for line in _output_of(["ldconfig", "-p"]).splitlines()]
    return {
        "libraries": [line for line in libraries if line.startswith(LIBRARIES)],
        "drivers": [
            str(path) for folder in map(Path, DRIVER_FILES) if folder.is_dir() for path in sorted(folder.iterdir())
        ],
        "devices": sorted(str(p) for pattern in ("nvidia*", "dri/*") for p in Path("/dev").glob(pattern)),
    }


def variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def embodied_doctor(path: Path) -> Figures:
    """What `embodied doctor --json` says; what is missing is a finding, not a failure of this stage."""
    command = [sys.executable, "-m", "embodied.cli", "doctor", "--json", str(path)]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(printed.stdout, printed.stderr, flush=True)
    if not path.exists():
        raise RuntimeError(f"`embodied doctor` wrote nothing; it said: {(printed.stderr or printed.stdout)[-500:]}")
    report = json.loads(path.read_text())
    lacking = [f"{check['name']}: {check['found']}" for check in report["checks"] if check["status"] != "ok"]
    return {"complete": report["complete"], "lacking": lacking, "checks": report["checks"]}


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
