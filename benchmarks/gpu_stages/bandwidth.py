"""What moves bytes at the most: the limits that hand-overs and offloads are put beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from embodied_bench.machine import seconds_of

COPIES = 4
"""Of which the fastest counts: a limit is what the machine can do."""


def between_host_and_device(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes per second from a GPU to pinned memory of the host, and back."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(nbytes, dtype=torch.uint8, device=device)
    out = _fastest(lambda: host.copy_(far, non_blocking=True), device)
    back = _fastest(lambda: far.copy_(host, non_blocking=True), device)
    return nbytes / out, nbytes / back


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    return min(seconds_of(call, device) for _ in range(COPIES))


def through_file(path: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second into a file, and out of it, as the operating system caches it."""
    data = bytes(nbytes)
    out, back = [], []
    for _ in range(COPIES):
        begin = time.perf_counter()
        path.write_bytes(data)
        middle = time.perf_counter()
        path.read_bytes()
        out.append(middle - begin)
        back.append(time.perf_counter() - middle)
    path.unlink()
    return nbytes / min(out), nbytes / min(back)
