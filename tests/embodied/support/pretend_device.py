"""A GPU that is not there: tensors that say they are on it, hold real numbers, and refuse to be mixed with the CPU's.

    with PretendDevice() as device:
        policy.to("cuda:0")                  # real numbers, computed on the CPU
        device.waits                         # what would have made the host wait for the GPU

An operation on tensors of both devices raises `MixedDevices`, as CUDA would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
GPU_BYTES = 16 * 2**30
CROSSING = (aten._to_copy.default, aten.copy_.default)
"""What may read one device and write the other."""
LIKE = (
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.zeros_like.default,
    aten.empty_like.default,
)
"""What autograd makes beside a tensor, where it believes that to be."""
JOINING = (aten.cat.default, aten.stack.default)
"""What takes no number (a tensor without dimensions) of the other device."""


class MixedDevices(Exception):
    """Tensors of two devices in one operation."""


Base: Any = torch.Tensor
"""Of which type checkers know too much: here, what is read-only there is defined anew."""


class Far(Base):
    """A tensor that says to Python that it is on `DEVICE`, and to autograd, which has no streams there, on the CPU."""

    inner: Tensor
    """Its numbers."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        return Base._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device="cpu", requires_grad=False,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Far({self.inner!r})"

    @property
    def device(self) -> Any:
        return DEVICE

    @property
    def is_cuda(self) -> Any:
        return True

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """Off the device where that is asked for; C++, which believes to be there already, would return the tensor."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            return super().to(dtype=dtype or self.dtype, copy=copy)
        assert not (self.requires_grad and torch.is_grad_enabled()), "no gradient crosses"
        return aten._to_copy(self.detach(), dtype=dtype, device="cpu", non_blocking=non_blocking)

    def new_tensor(self, data: Any, **kwargs: Any) -> Any:
        return torch.tensor(data, dtype=self.dtype, **kwargs).to(DEVICE)

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.to("cpu")

    @property
    def data(self) -> Any:
        return Base.data.__get__(self)

    @data.setter
    def data(self, new: Far) -> None:
        Base.data.__set__(self, new)
        self.inner = new.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)


class PretendDevice(TorchDispatchMode):
    """Within the block there is a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """Operations that made the host wait for the device, by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self)


def _run(func: Any, args: Any, kwargs: dict[str, Any], device: PretendDevice | None) -> Any:
    found = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
    far = any(isinstance(tensor, Far) for tensor in found)
    target = kwargs.get("device")
    if far and func not in CROSSING:
        numbers = func not in JOINING
        wrong = [t for t in found if not isinstance(t, Far) and not (numbers and t.dim() == 0)]
        if wrong:
            raise MixedDevices(f"{func}: {[tuple(t.shape) for t in wrong]} on the CPU, others on {DEVICE}")
    to_far = torch.device(target).type == "cuda" if target is not None else far
    if far and func in LIKE:
        to_far = True
    if func is aten.copy_.default:
        to_far = isinstance(args[0], Far)
    if device is not None and far:
        _count(func, args, kwargs, to_far, device)
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner, inner_kwargs = tree_map(lambda a: a.inner if isinstance(a, Far) else a, (args, kwargs))
    if func is aten._to_copy.default:
        inner_kwargs.pop("non_blocking", None)  # which would pin
    out = func(*inner, **inner_kwargs)
    if not to_far:
        return out.clone() if func is aten._to_copy.default and far and out is inner[0] else out
    out = tree_map(lambda a: Far(a) if isinstance(a, Tensor) else a, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if far else out


def _count(func: Any, args: Any, kwargs: dict[str, Any], to_far: bool, device: PretendDevice) -> None:
    """Note what waits: numbers that are read, sizes that depend on numbers, copies that are waited for."""
    by_mask = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    )
    leaves = func in CROSSING and not to_far and not kwargs.get("non_blocking")
    if by_mask or leaves or func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default):
        device.waits.append(func.name())
