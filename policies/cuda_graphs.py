"""CUDA graphs: all kernels of a decision are launched at once.

A decision of a vision-language-action model is thousands of small kernels. Python launches them one by one, for small
batches many times more slowly than a GPU computes them. A CUDA graph records them once and replays them: the same
kernels on tensors of the same shapes, so the same numbers, without Python in between.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

MOST = 32
"""Recordings of one module that are kept, the latest used ones: each keeps the memory of what it takes and returns."""
Function = TypeVar("Function", bound=Callable[..., Any])


def replayed(function: Function) -> Function:
    """A decorator: on a GPU, without gradients, `function(module, ...)` is recorded and replayed as a CUDA graph.

    The first call with arguments of some shapes runs the function, records it and replays the recording, as later calls
    do: what a call returns does not depend on the calls before it. Tensors in the arguments and in what is returned may
    be in tuples, dictionaries and dataclasses; all else in the arguments belongs to the shape. The function computes
    from its arguments and the module's tensors alone, never waits for the device, and changes nothing. A recording is
    dropped when the module's tensors have moved (an offload), and none is made of a module whose tensors are shards.
    What is returned is the caller's own.
    """

    @functools.wraps(function)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors, shape = taken_apart((args, kwargs))
        recorded = tensors and all(tensor.is_cuda for tensor in tensors) and not torch.is_grad_enabled()
        if not recorded or _one_by_one or torch.cuda.is_current_stream_capturing():
            return function(module, *args, **kwargs)
        if module not in _RECORDINGS:
            _RECORDINGS[module] = Recordings(module)
        return _RECORDINGS[module].call(function, module, tensors, shape)

    return cast(Function, call)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within it all kernels are launched one by one, to measure what recordings are worth."""
    global _one_by_one
    _one_by_one = True
    try:
        yield
    finally:
        _one_by_one = False


def forget(module: nn.Module) -> None:
    """Free the memory of the recordings of the module and of those in it."""
    for part in module.modules():
        _RECORDINGS.pop(part, None)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    given: list[Tensor]
    returned: list[Tensor]
    shape: Hashable
    """Of what is returned."""


class Recordings:
    """The graphs of one module, which share their memory: they never run at the same time."""

    def __init__(self, module: nn.Module) -> None:
        # The dictionaries that modules keep their tensors in: walking the modules anew takes milliseconds.
        self._held = [held for part in module.modules() for held in (part._parameters, part._buffers) if held]
        self._addresses: list[int] = []
        self._found: OrderedDict[Hashable, Recording] = OrderedDict()
        self._pool: Any = None
        self._lock = threading.Lock()

    def call(self, function: Callable[..., Any], module: nn.Module, tensors: list[Tensor], shape: Hashable) -> Any:
        """What the function returns."""
        with self._lock:
            if not self._look_at_tensors():
                return _called(function, module, tensors, shape)
            key = (function, shape, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors))
            if key not in self._found:
                self._found[key] = self._record(function, module, tensors, shape)
                while len(self._found) > MOST:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
            recording = self._found[key]
            for own, given in zip(recording.given, tensors, strict=True):
                own.copy_(given)
            recording.graph.replay()
            return put_together([tensor.clone() for tensor in recording.returned], recording.shape)

    def _look_at_tensors(self) -> bool:
        """Drop all recordings if a tensor has moved. False if some are shards, which are gathered anew each time."""
        every = [tensor for held in self._held for tensor in held.values() if tensor is not None]
        if any(type(tensor) not in (nn.Parameter, Tensor) for tensor in every):
            return False
        addresses = [tensor.data_ptr() for tensor in every]
        if addresses != self._addresses:
            self._addresses, self._pool = addresses, None
            self._found.clear()
        return True

    def _record(
        self, function: Callable[..., Any], module: nn.Module, tensors: list[Tensor], shape: Hashable
    ) -> Recording:
        given = [tensor.clone() for tensor in tensors]
        _called(function, module, given, shape)  # libraries make on first use what cannot be made in a recording
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(tensors[0].device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            returned, returned_shape = taken_apart(_called(function, module, given, shape))
        self._pool = graph.pool()
        return Recording(graph, given, returned, returned_shape)


_one_by_one = False
_RECORDINGS: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()
"""Beside the modules, not in them: a copy of a module has none."""


def _called(function: Callable[..., Any], module: nn.Module, tensors: list[Tensor], shape: Hashable) -> Any:
    args, kwargs = put_together(tensors, shape)
    return function(module, *args, **kwargs)


# --- nested values


@dataclasses.dataclass(frozen=True)
class Nest:
    """A tuple, list, dictionary or dataclass, of which tensors are left out."""

    kind: type
    names: tuple[str, ...]
    """Keys or fields; empty for tuples and lists."""
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor belongs."""

    number: int


def taken_apart(value: Any) -> tuple[list[Tensor], Hashable]:
    """The tensors in the value, and the rest of it, which is hashable."""
    tensors: list[Tensor] = []

    def shape_of(part: Any) -> Hashable:
        if isinstance(part, Tensor):
            tensors.append(part)
            return Place(len(tensors) - 1)
        if isinstance(part, (tuple, list)):
            return Nest(type(part), (), tuple(map(shape_of, part)))
        if isinstance(part, dict):
            return Nest(dict, tuple(part), tuple(map(shape_of, part.values())))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = tuple(field.name for field in dataclasses.fields(part))
            return Nest(type(part), names, tuple(shape_of(getattr(part, name)) for name in names))
        return part

    shape = shape_of(value)
    return tensors, shape


def put_together(tensors: list[Tensor], shape: Any) -> Any:
    """The value of which `taken_apart` made these."""
    if isinstance(shape, Place):
        return tensors[shape.number]
    if not isinstance(shape, Nest):
        return shape
    values = [put_together(tensors, part) for part in shape.values]
    if not shape.names and issubclass(shape.kind, (tuple, list)):
        return shape.kind(values)
    return shape.kind(**dict(zip(shape.names, values, strict=True)))
