"""Ranks in processes of their own, connected as the runtime connects them, without Ray."""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch


class Rank(Protocol):
    def listen(self) -> str: ...

    def join(self, address: str, timeout_s: float) -> None: ...

    def leave(self) -> None: ...


def on_ranks(ranks: int, make: Callable[..., Rank], work: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `work(make(rank, ranks, *args), *args)` on every rank, in rank order. Both functions are of a
    module; one rank works in this process."""
    if ranks == 1:
        return [_worked(make, work, 0, 1, args, lambda own: None)]
    context = multiprocessing.get_context("forkserver")  # imports once, and has no threads
    context.set_forkserver_preload([__name__, make.__module__])
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=_serve, args=(pipe[1], make, work, rank, ranks, args)) for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        address = pipes[0][0].recv()
        for ours, _ in pipes[1:]:
            ours.send(address)
        found = [ours.recv() for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    failures = [str(error) for kind, error in found if kind == "failed"]
    assert not failures, "\n".join(failures)
    return [torch.load(io.BytesIO(result), weights_only=False) for _, result in found]


def _worked(make: Any, work: Any, rank: int, ranks: int, args: Any, connect: Callable[[Rank], None]) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        own = make(rank, ranks, *args)
        connect(own)
        result = work(own, *args)
        own.leave()
        return result
    finally:
        torch.set_num_threads(threads)


def _serve(pipe: Connection, make: Any, work: Any, rank: int, ranks: int, args: Any) -> None:
    def connect(own: Rank) -> None:
        if rank == 0:
            address = own.listen()
            pipe.send(address)
        else:
            address = pipe.recv()
        own.join(address, 60.0)

    try:
        pipe.send(("done", _packed(_worked(make, work, rank, ranks, args, connect))))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _packed(result: Any) -> bytes:
    """Tensors travel as bytes: those in shared memory are gone with the process."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()
