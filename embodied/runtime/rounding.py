"""Kernels that round differently: one computation of each kind, compared between the machines of a cluster.

NumPy and PyTorch choose their kernels by the processor that they find. Kernels add in another order or use other
polynomials, so the same computation differs in its last bits. Results are as good on one machine as on the other; what
is lost is that work repeats bit for bit when it moves to the other one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import numpy as np

KERNELS = {
    "NumPy's matrix products": "OPENBLAS_CORETYPE=Haswell",
    "NumPy's functions": "NPY_DISABLE_CPU_FEATURES=X86_V4",
    "PyTorch's matrix products": "MKL_CBWR=COMPATIBLE",
    "PyTorch's functions": "ATEN_CPU_CAPABILITY=avx2",
    "PyTorch's convolutions": "ONEDNN_MAX_CPU_ISA=AVX2",
}
"""Kinds of kernels, and the setting that has every x86-64 processor since 2013 (Haswell, Zen) use the same ones."""
ROWS, COLUMNS = 48, 96  # small: one thread computes it, whatever the process may use


def kernels() -> dict[str, str]:
    """A digest of one computation by kind of kernel (`KERNELS`), 12 hexadecimal digits each. PyTorch's are left out
    if this process did not import it. Takes a few milliseconds."""
    found = {"NumPy's matrix products": _digest(_products()), "NumPy's functions": _digest(_functions())}
    return {**found, **_torch()} if "torch" in sys.modules else found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """The kinds of kernels, of those that both processes have, that round differently."""
    return [name for name in KERNELS if name in here and name in there and here[name] != there[name]]


def warning(found: Mapping[str, list[str]]) -> str:
    """The message for machines whose kernels round differently from this one's: kinds of kernels by machine."""
    named = "; ".join(f"{machine}: {', '.join(kinds)}" for machine, kinds in found.items())
    settings = " ".join(KERNELS[name] for name in KERNELS if any(name in kinds for kinds in found.values()))
    return (
        f"other machines round differently from this one in the last bits ({named}). The run's results are valid, but "
        "it repeats bit for bit only while every worker stays on its machine: another plan, or a run resumed on other "
        f"machines, gives other last bits. For equal bits set {settings} on every machine, before `ray start` and this "
        "command; a processor without AVX2 cannot be made equal"
    )


def _numbers(kind: type[np.floating]) -> np.ndarray:
    """[ROWS, COLUMNS] in [-1, 1), of quotients: division is rounded alike everywhere."""
    counted = np.arange(ROWS * COLUMNS) * 7919 % 1009
    return (counted.astype(kind) / kind(1009) * kind(2) - kind(1)).reshape(ROWS, COLUMNS)


def _products() -> list[np.ndarray]:
    found = []
    for kind in (np.float32, np.float64):
        numbers = _numbers(kind)
        # Small matrices, a vector and a scalar product have kernels of their own.
        found += [numbers @ numbers.reshape(COLUMNS, ROWS), numbers @ numbers[0], np.dot(numbers[0], numbers[1])]
        found += [numbers[:size, :size] @ numbers[size : 2 * size, :size] for size in (3, 4, 6, 7)]
    return found


def _functions() -> list[np.ndarray]:
    found = []
    for kind in (np.float32, np.float64):
        numbers = _numbers(kind).reshape(-1)
        of_any = [function(numbers) for function in (np.exp, np.sin, np.cos, np.tanh, np.arctan, np.sum)]
        found += [*of_any, np.log(numbers + 3), np.power(numbers + 3, kind(1.7)), np.arctan2(numbers, numbers[::-1])]
    return found


def _torch() -> dict[str, str]:
    import torch

    numbers = torch.from_numpy(_numbers(np.float32))
    with torch.no_grad():
        products = [numbers @ numbers.reshape(COLUMNS, ROWS), numbers @ numbers[0], torch.dot(numbers[0], numbers[1])]
        functions = [function(numbers) for function in (torch.exp, torch.sin, torch.tanh, torch.erf, torch.sum)]
        functions += [torch.log(numbers + 3), torch.softmax(numbers, -1)]
        functions += [torch.nn.functional.layer_norm(numbers, (COLUMNS,))]
        filters = numbers.reshape(-1)[: 8 * 3 * 9].reshape(8, 3, 3, 3)
        convolved = torch.nn.functional.conv2d(numbers.reshape(2, 3, 24, 32), filters)
    return {
        "PyTorch's matrix products": _digest([one.numpy() for one in products]),
        "PyTorch's functions": _digest([one.numpy() for one in functions]),
        "PyTorch's convolutions": _digest([convolved.numpy()]),
    }


def _digest(arrays: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]
