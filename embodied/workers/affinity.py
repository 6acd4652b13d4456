"""Affinity: the CPU cores, the number of threads and the device that a worker computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class Affinity:
    """Where one worker computes. Several workers of a process may have different ones: they take turns."""

    cores: tuple[int, ...] = ()
    """Cores that the process is confined to while it works; none: wherever the system likes."""
    threads: int = 1
    """PyTorch's threads."""
    device: str | None = None
    """Where the policy's tensors are, of a worker that has one; None: where `policy.device` says."""
    node: str = ""
    """Id of the cluster's node that the worker's process is on; '' is the one where the command was typed."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the process computes here. Afterwards threads and cores are as they were."""
        before, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
        if self.cores:
            confine(self.cores)
        if before != self.threads:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            if before != self.threads:
                torch.set_num_threads(before)
            if self.cores and allowed != set(self.cores):
                confine(tuple(allowed))


def confine(cores: tuple[int, ...]) -> None:
    """Confine every thread of this process to the cores. PyTorch's pool inherits them only when it begins."""
    if not THREADS.is_dir():  # not Linux: the system places threads as it likes
        return
    for thread in THREADS.iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it ended in between
            continue
