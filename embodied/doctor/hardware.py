"""The hardware that figures are measured on; it is recorded beside each of them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def hardware() -> str:
    """Processor, cores that this process may use, and GPU, in a line."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {gpu}"


def fingerprint() -> dict[str, str]:
    """What measured times belong to, by name: another value of any of these, and they have to be measured again."""
    model, cores, gpu = hardware().rsplit(", ", 2)
    return {
        "hardware.processor": model,
        "hardware.cores": cores,
        "hardware.accelerator": gpu,
        "software.torch": torch.__version__,
        "software.python": platform.python_version(),
    }
