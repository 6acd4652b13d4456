"""What results belong to: `python -m benchmarks.gpu_stages.machine` prints hardware and versions as JSON.

In a process of its own: importing torch takes seconds, a broken driver may end it, and whoever starts the parts must
hold no memory of the GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

PACKAGES = (
    "torch", "transformers", "tokenizers", "timm", "peft", "numpy", "ray", "mujoco", "mani-skill", "sapien",
    "hf-libero",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages that figures depend on; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def describe() -> dict[str, Any]:
    """Hardware in a line, whether torch computes on a GPU, versions; `error` where torch cannot be used."""
    found: dict[str, Any] = {"versions": versions(), "gpu": False, "error": ""}
    found["hardware"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    try:
        import torch

        from embodied.devices import hardware

        found["hardware"] = hardware()
        found["versions"]["cuda"] = torch.version.cuda or "none"
        if torch.cuda.is_available():
            found["gpu"] = torch.ones(2, device="cuda").sum().item() == 2.0
    except Exception as error:  # whatever a driver or a package in a bad state raises
        found["error"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    json.dump(describe(), sys.stdout)
