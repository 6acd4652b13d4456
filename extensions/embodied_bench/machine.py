"""The limits of a device, and how to time on it. They are measured in the same run as the figures that they bound.

An accelerator works asynchronously: every clock here is read after it has finished.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from embodied.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GROUPS = 5
"""Groups of repetitions of which the fastest counts: a limit is what the device can do, not what it does on average."""
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def choose_dtype(name: str, device: torch.device) -> str:
    """`auto` is what people run: bfloat16 on a GPU, float32 on a processor. Raises `UserError`."""
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise UserError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    return name


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    finish(device)
    begin = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - begin


def repeat(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Seconds of each call, for about so many seconds, once at least."""
    times = [seconds_of(call, device)]
    while sum(times) < seconds:
        times.append(seconds_of(call, device))
    return times


@dataclass(frozen=True)
class Machine:
    """Measured rates of the machine, from which limits follow."""

    flops_per_s: float
    """Rate of a large matrix product in the model's dtype."""
    bytes_per_s: float
    """The larger of two: a large copy (bytes read and written), and a matrix-vector product (bytes of the matrix),
    which does with weights what decoding does."""

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time for such work (the roofline: Williams et al. 2009, doi 10.1145/1498765.1498785)."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s)

    def best(self, other: Machine) -> Machine:
        """The higher rates of two measurements."""
        return Machine(max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s))


@torch.no_grad()
def measure_machine(device: torch.device, dtype: str) -> Machine:
    """Matrix rate and memory bandwidth of the device, in about a second."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    product = _fastest(lambda: a @ b, device)
    # Far more than the caches hold.
    count = (2**30 if device.type == "cuda" else 2**26) // a.element_size()
    source = torch.ones(count, device=device, dtype=DTYPES[dtype])
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source), device)
    matrix, vector = source.view(-1, 4096), source[:4096]
    read = _fastest(lambda: matrix @ vector, device)
    nbytes = count * a.element_size()
    return Machine(2 * size**3 / product, max(2 * nbytes / copy, nbytes / read))


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, of the fastest group of calls."""
    repeats = 20 if device.type == "cuda" else 1

    def group() -> None:
        for _ in range(repeats):
            call()

    group()
    return min(seconds_of(group, device) for _ in range(GROUPS)) / repeats


@dataclass
class Peak:
    """Memory at its highest."""

    nbytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The highest memory while the block runs: allocated on a GPU, else resident of this process, all it holds."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with _tolerant():
            _CLEAR_REFS.write_text("5")  # resets the peak (proc(5))
    yield peak
    finish(device)
    peak.nbytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident()


def _resident() -> int:
    with _tolerant():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _tolerant() -> Iterator[None]:
    """Not every system has /proc, or lets it be written: then the peak is the process's since it began."""
    try:
        yield
    except (OSError, StopIteration):
        pass
