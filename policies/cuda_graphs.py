"""CUDA graphs: all kernels of a decision are launched at once.

A decision of a vision-language-action model is thousands of small kernels. Python launches them one by one, for small
batches many times more slowly than a GPU computes them. A CUDA graph records them once and replays the same kernels on
tensors of the same shapes, without Python in between.

A policy's `act` is `replaying()`: within it the functions that are `replayed` are. Learning is not, which fills the GPU
anyway and needs its memory.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

MOST = 16
"""Shapes of a module that are recorded: each keeps the memory of what it takes and returns. Others run as they are."""
Function = TypeVar("Function", bound=Callable[..., Any])
_replaying: ContextVar[bool] = ContextVar("replaying", default=False)
_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


def replayed(function: Function) -> Function:
    """A decorator: within `replaying`, on a GPU and without gradients `function(module, ...)` is recorded and replayed.

    The first call with arguments of some shapes runs the function, records it and replays the recording, as later calls
    do: what a call returns does not depend on the calls before it. Tensors in the arguments and in what is returned may
    be in tuples, lists, dictionaries and dataclasses; all else in the arguments is hashable and belongs to the shape.
    The function computes from its arguments and the module's tensors alone, never waits for the device, and changes
    nothing. A recording is dropped when the module's tensors have moved (an offload), and none is made of a module
    whose tensors are shards. What is returned is the caller's own. All calls are on one stream of the device.
    """

    @functools.wraps(function)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _replaying.get() or _forbidden.get() or torch.is_grad_enabled():
            return function(module, *args, **kwargs)
        tensors, shape = taken_apart((args, kwargs))
        hash(shape)  # raises on every machine for what could not be told apart on a GPU
        if not _recordable(tensors):
            return function(module, *args, **kwargs)
        with _LOCK:  # a process records one graph at a time
            if module not in _RECORDINGS:
                _RECORDINGS[module] = Recordings(module)
            return _RECORDINGS[module].call(function, module, tensors, shape)

    return cast(Function, call)


@contextmanager
def replaying() -> Iterator[None]:
    """Within it what is `replayed` is replayed."""
    before = _replaying.set(True)
    try:
        yield
    finally:
        _replaying.reset(before)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within it nothing is recorded or replayed, `replaying` or not: for measurements, and for a module in a state that
    no tensor shows."""
    before = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(before)


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
    """The returned value without its tensors (`taken_apart`)."""


class Recordings:
    """The graphs of one module, which share their memory: they never run at the same time."""

    def __init__(self, module: nn.Module) -> None:
        # The dictionaries that modules keep their tensors in: walking the modules anew takes milliseconds. A module
        # that is attached later is not watched.
        self._held = [held for part in module.modules() for held in (part._parameters, part._buffers)]
        self._addresses: list[int] = []
        self._found: dict[Hashable, Recording | None] = {}
        """None: there was no memory to record it."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def call(self, function: Callable[..., Any], module: nn.Module, tensors: list[Tensor], shape: Hashable) -> Any:
        """The function's result: of a replay where there is a recording, and else of the function itself."""
        whole = self._drop_if_moved()
        key = (function, shape, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors))
        if whole and key not in self._found and len(self._found) < MOST:
            try:
                self._found[key] = self._record(function, module, tensors, shape)
            except torch.OutOfMemoryError:
                self._found[key] = None
        recording = self._found.get(key)
        if recording is None:
            return _called(function, module, tensors, shape)
        for own, given in zip(recording.given, tensors, strict=True):
            own.copy_(given)
        recording.graph.replay()
        return put_together([tensor.clone() for tensor in recording.returned], recording.shape)

    def _drop_if_moved(self) -> bool:
        """Drop all recordings if a tensor has moved. False if some are shards, which are gathered anew each time."""
        every = [tensor for held in self._held for tensor in held.values() if tensor is not None]
        if any(type(tensor) not in (nn.Parameter, Tensor) for tensor in every):
            self._found.clear()
            return False
        addresses = [tensor.data_ptr() for tensor in every]
        if addresses != self._addresses:
            self._addresses, self._pool = addresses, None
            self._found.clear()
        return True

    def _record(
        self, function: Callable[..., Any], module: nn.Module, tensors: list[Tensor], shape: Hashable
    ) -> Recording:
        device = tensors[0].device
        given = [tensor.clone() for tensor in tensors]
        _called(function, module, given, shape)  # libraries make on first use what cannot be made in a recording
        graph = torch.cuda.CUDAGraph()
        self._stream = self._stream or torch.cuda.Stream(device)
        # torch leaves its stream current where a recording fails: the outer context takes it back.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                returned, returned_shape = taken_apart(_called(function, module, given, shape))
        self._pool = graph.pool()
        return Recording(graph, given, returned, returned_shape)


_LOCK = threading.RLock()
_RECORDINGS: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()
"""Beside the modules, not in them: a copy of a module has none."""


def _recordable(tensors: list[Tensor]) -> bool:
    on_gpu = bool(tensors) and all(tensor.is_cuda for tensor in tensors)
    return on_gpu and not torch.cuda.is_current_stream_capturing()


def _called(function: Callable[..., Any], module: nn.Module, tensors: list[Tensor], shape: Hashable) -> Any:
    args, kwargs = put_together(tensors, shape)
    return function(module, *args, **kwargs)


# --- nested values


@dataclasses.dataclass(frozen=True)
class Nest:
    """A tuple, list, dictionary or dataclass without its tensors."""

    kind: type
    names: tuple[Any, ...]
    """Keys or fields; empty for tuples and lists."""
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """A place that a tensor belongs to."""

    number: int


def taken_apart(value: Any) -> tuple[list[Tensor], Hashable]:
    """The tensors in the value, and the rest of it."""
    tensors: list[Tensor] = []

    def shape_of(part: Any) -> Hashable:
        if isinstance(part, Tensor):
            tensors.append(part)
            return Place(len(tensors) - 1)
        if type(part) in (tuple, list):
            return Nest(type(part), (), tuple(map(shape_of, part)))
        if type(part) is dict:
            return Nest(dict, tuple(part), tuple(map(shape_of, part.values())))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = tuple(field.name for field in dataclasses.fields(part))
            return Nest(type(part), names, tuple(shape_of(getattr(part, name)) for name in names))
        return part

    shape = shape_of(value)
    return tensors, shape


def put_together(tensors: list[Tensor], shape: Any) -> Any:
    """Rebuild the value that `taken_apart` took apart."""
    if isinstance(shape, Place):
        return tensors[shape.number]
    if not isinstance(shape, Nest):
        return shape
    values = [put_together(tensors, part) for part in shape.values]
    if shape.kind in (tuple, list):
        return shape.kind(values)
    named = dict(zip(shape.names, values, strict=True))
    return named if shape.kind is dict else shape.kind(**named)
