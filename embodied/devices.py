"""Devices: cores, threads and device of a worker, the device of a policy, and copies between device and host."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied.errors import UserError
from policies.capabilities import LeftOver
from policies.contract import Action, Inputs, Policy

THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class Affinity:
    """Cores, threads, device and node of one worker. Workers of one process may differ: they take turns."""

    cores: tuple[int, ...] = ()
    """Cores that the process is confined to while it works; none: no limit."""
    threads: int = 1
    """Number of PyTorch's threads."""
    device: str | None = None
    """Device of the policy's tensors, in a worker that has a policy; None: `policy.device` decides."""
    node: str = ""
    """Id of the cluster node that runs the worker's process; '' is the node where the command was typed."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the process has these cores and threads; afterwards it has its former ones."""
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
    if not THREADS.is_dir():  # not Linux: the system places threads
        return
    for thread in THREADS.iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it ended in between
            continue


THREAD_FLOPS = 1e8
"""Floating-point operations of a micro-batch from which another thread pays."""


def available_threads() -> int:
    """Number of cores that this process may use, or OMP_NUM_THREADS where that is less."""
    cores, asked = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdecimal() and int(asked) else cores


def useful_threads(policy: Policy, rows: int, most: int) -> int:
    """Number of threads, at most `most`, that an update of `policy` with micro-batches of `rows` samples can use.

    All threads meet after each operator: in a small network that costs more than they save, and many times more where
    another process has one of their cores. The number is a function of the configuration, and not measured, since
    sums are rounded by the number of threads.
    """
    if policy.spec.cameras or device_of(policy) != CPU:
        return most
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    return max(1, min(most, int(6 * rows * parameters / THREAD_FLOPS)))


# --- devices

CPU = torch.device("cpu")


def find_device(wanted: str) -> torch.device:
    """The device that `policy.device` names; `auto` is the first GPU, or the CPU where torch sees none.

    Raises `UserError`, which lists the present ones, for an absent device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return CPU
    index = (torch.device("cuda" if wanted == "auto" else wanted).index) or 0
    if index < count:
        return torch.device("cuda", index)
    if count == 0:
        raise UserError(
            f"policy.device is {wanted} and torch {torch.__version__} sees no GPU: set it to cpu or auto; "
            "`embodied doctor` says whether the machine has one"
        )
    there = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
    raise UserError(f"policy.device is {wanted}, and there is {there}")


def accelerators(wanted: str) -> tuple[torch.device, ...]:
    """The GPUs that `policy.device` leaves to choose from: all for `auto` and `cuda`, a numbered one alone, none for
    the CPU. Raises `UserError` as `find_device` does."""
    found = find_device(wanted)
    if found == CPU:
        return ()
    if wanted in ("auto", "cuda"):
        return tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    return (found,)


def memory_bytes(devices: Iterable[torch.device]) -> float:
    """Total memory of the smallest of these GPUs. Reading the free memory would cost a context of some hundred MB on
    each of them."""
    return min((float(torch.cuda.get_device_properties(d).total_memory) for d in devices), default=float("inf"))


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU's memory; other processes count too. Costs this process a CUDA context."""
    return torch.cuda.mem_get_info(device)[0]


def peak_bytes(device: torch.device) -> int:
    """Peak memory of a GPU that this process has reserved for tensors since `forget_peak`; 0 on a CPU, where it is not
    counted."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" and torch.cuda.is_initialized() else 0


def forget_peak(device: torch.device) -> None:
    """Reset `peak_bytes`: the process may have served other workers before."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def settle(policy: Policy, device: torch.device) -> Policy:
    """The policy with all its tensors on the device."""
    # Else cuDNN rounds the factors of convolutions to 10 bits, by algorithms that it chooses by the batch's size: `act`
    # and `evaluate` would not agree within the tolerance of float32 arithmetic.
    torch.backends.cudnn.allow_tf32 = False
    return policy.to(device)


def device_of(policy: Policy) -> torch.device:
    """Device of the policy's tensors; the CPU for a policy without tensors."""
    for tensor in (*_first(policy.parameters()), *_first(policy.buffers())):
        return tensor.device
    return CPU


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the host's memory, complete; those of a GPU in pinned memory, after one wait for the device.
    Tensors of a CPU are returned as they are, without a copy."""
    found = {name: tensor.to(CPU, non_blocking=True) for name, tensor in tensors.items()}
    await_devices(tensors.values())
    return found


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors in the host's memory, complete, which later changes of the tensors do not affect."""
    found = {name: tensor.detach().to(CPU, non_blocking=True, copy=True) for name, tensor in tensors.items()}
    await_devices(tensors.values())
    return found


def await_devices(tensors: Iterable[Tensor]) -> None:
    """Wait until the devices of the tensors have finished their work."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def decide(policy: Policy, inputs: Inputs, noise: Tensor | None) -> Action:
    """The policy's `act`, with inputs, noise and action in the host's memory."""
    device = device_of(policy)
    return action_to_host(policy.act(inputs.to(device), None if noise is None else noise.to(device)))


def predict(policy: Policy, inputs: Inputs, noise: Tensor | None) -> Tensor:
    """The policy's `predict`, with inputs, noise and predictions in the host's memory."""
    device = device_of(policy)
    return policy.predict(inputs.to(device), None if noise is None else noise.to(device)).cpu()


def continue_chunk(policy: Policy, inputs: Inputs, noise: Tensor | None, left: LeftOver) -> Tensor:
    """The policy's `continue_chunk`, with what it takes and returns in the host's memory."""
    device = device_of(policy)
    noise = None if noise is None else noise.to(device)
    return policy.continue_chunk(inputs.to(device), noise, left.to(device)).cpu()


def action_to_host(action: Action) -> Action:
    """The action in the host's memory."""
    found = to_host(
        {"chunk": action.chunk, "log_prob": action.log_prob, "value": action.value}
        | {f"trace.{name}": tensor for name, tensor in action.trace.items()}
    )
    trace = {name: found[f"trace.{name}"] for name in action.trace}
    return Action(found["chunk"], found["log_prob"], found["value"], trace)


def value_of(policy: Policy, inputs: Inputs) -> Tensor:
    """The policy's `value` of inputs in the host's memory, on the host."""
    return policy.value(inputs.to(device_of(policy))).to(CPU)


def release() -> None:
    """Return memory that no tensor uses to the device: other processes may need it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _first(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    for tensor in tensors:
        return (tensor,)
    return ()


# --- The hardware that figures are measured on; it is recorded beside each of them.


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
    """Hardware and software that measured times depend on, by name: where a value differs, times are measured again."""
    model, cores, gpu = hardware().rsplit(", ", 2)
    return {
        "hardware.processor": model,
        "hardware.cores": cores,
        "hardware.accelerator": gpu,
        "software.torch": torch.__version__,
        "software.python": platform.python_version(),
    }
