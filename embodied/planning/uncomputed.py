"""The memory of a computation that is not computed: shapes are followed, and the bytes of every result are counted.

A result counts from when an operation makes it until nothing refers to it: activations, what the backward pass keeps,
and what a product takes for a moment. Tensors are ordinary ones of the CPU, so that operations choose the same ways as
when they compute. torch's own `FakeTensorMode` gives the same bytes and takes twice as long; where lengths depend
on whole numbers, as of answers in tokens, it gives none.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._local_scalar_dense.default}
"""Operations whose result has no memory of its own, though they do not declare it."""
MOST_COMPUTED = 2**22
"""Size of a tensor of whole numbers, beyond which it is not computed: a mask of a large batch."""


class Uncomputed(TorchDispatchMode):
    """Within, operations on real numbers are not computed, and the bytes of every result are counted while something
    refers to it.

    Results have a shape and no numbers (whole numbers are zero). They take no memory of this machine, since nothing is
    written to them. Views are made. What is computed of whole numbers alone, such as masks and lengths, is computed
    here too, since control flow depends on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Leave out the memory of these tensors, which were there before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _result(func, args, kwargs or {})
        for leaf in (found,) if isinstance(found, Tensor) else tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, pointer: int, size: int) -> None:
        self._known.discard(pointer)
        self.now -= size


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation's result, or tensors of its shapes. One that writes to its arguments returns them."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    real = any(_is_real(tensor) or tensor.numel() > MOST_COMPUTED for tensor in given)
    schema = func._schema
    if not real or not schema.returns or schema.returns[0].alias_info is not None or func in VIEWS:
        if real and schema.is_mutable:
            written = [arg for arg, of in zip(args, schema.arguments, strict=False) if of.is_write]
            return written[0] if len(schema.returns) == 1 else tuple(written) if schema.returns else None
        return func(*args, **kwargs)
    leaves, form = tree_flatten((args, kwargs))
    try:
        found = _shapes(func, form, *map(_described, leaves))
    except (RuntimeError, NotImplementedError):  # the shape of the result depends on numbers
        return func(*args, **kwargs)
    return tree_map(_unwritten, found)


class _Described(NamedTuple):
    """A tensor's shape, strides and type, on which the shapes of results depend."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=2**16, typed=True)
def _shapes(func: Any, form: Any, *leaves: Any) -> Any:
    """An operation's result on the meta device, where tensors have no memory. Kept, since layers of a network repeat
    their shapes: predicting a policy of 7 x 10^9 numbers takes two thirds of the time."""
    args, kwargs = tree_unflatten(map(_without_memory, leaves), form)
    return func(*args, **kwargs)


def _described(leaf: Any) -> Any:
    return _Described(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, _Described):
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _unwritten(leaf: Any) -> Any:
    """A tensor of that shape in memory that nothing has written to; of whole numbers zeros."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return found if _is_real(leaf) or leaf.numel() > MOST_COMPUTED else found.zero_()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
