"""Reads demonstrations ahead of the learner: rows become batches, in threads or in processes.

What is read depends on the rows that are asked for alone: neither the number of processes nor their speed changes a
batch or the order of batches. Each learner rank asks for its own rows (docs/decisions/0196).
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TypeVar

import torch

from embodied.demonstrations.augmentation import Augmentation
from embodied.demonstrations.data_files import read_ahead
from embodied.demonstrations.mixture import Demonstrations, Index
from embodied.demonstrations.reader import ALONE, Batch, History
from embodied.errors import UserError
from embodied.reporting.live import quiet

THREADS = 2
"""Threads that read where no processes do. Decoders release Python's lock while they work."""
AHEAD = 4
"""Smallest number of requests that are read ahead."""


@dataclass(frozen=True)
class Request:
    """Rows that are read together. What else a caller keeps beside them belongs into a subclass."""

    rows: Index
    """[B] rows of one dataset, as `Demonstrations` counts them."""
    epoch: int | None
    """Epoch whose random augmentation is applied to pictures. None: no augmentation."""


R = TypeVar("R", bound=Request)


class Loader:
    """Reads rows ahead in `workers` processes; 0: in threads of this process.

    Each process opens the datasets anew; they share neither encoded pictures nor open videos. The processes end with
    `close` or the `with` block, and also when this process is killed.
    """

    def __init__(
        self,
        demonstrations: Demonstrations,
        *,
        chunk: int,
        cameras: Sequence[str],
        history: History = ALONE,
        augmentation: Augmentation | None = None,
        workers: int = 0,
    ) -> None:
        """`chunk` actions of each row are read, and the frames of `cameras`, which `augmentation` changes; `history`
        says what of earlier rows is read with each."""
        self._reader = _Reader(replace(demonstrations), chunk, tuple(cameras), history, augmentation)
        self._processes = [_Process(self._reader) for _ in range(workers)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def read(self, requests: Iterable[R]) -> Generator[tuple[R, Batch], None, None]:
        """Each request and its batch, in the order of the requests. Several are read ahead of the caller.

        Close the iterator before the loader. Raises `DatasetError` where a row cannot be read, and `UserError` where
        a process was killed.
        """
        at_once = len(self._processes) or THREADS
        return read_ahead(self._read, requests, workers=at_once, depth=max(AHEAD, 2 * at_once))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, request: R) -> tuple[R, Batch]:
        if not self._processes:
            return request, self._reader.read(request.rows, request.epoch)
        process = self._idle.get()
        try:
            return request, process.read(request.rows, request.epoch)
        finally:
            self._idle.put(process)


@dataclass(frozen=True)
class _Reader:
    """Reads rows. Pickled, it has the datasets as the names of their folders."""

    demonstrations: Demonstrations
    chunk: int
    cameras: tuple[str, ...]
    history: History
    augmentation: Augmentation | None

    def read(self, rows: Index, epoch: int | None) -> Batch:
        ((_, batch),) = self.demonstrations.batches(rows, self.chunk, self.cameras, self.history)
        if self.augmentation is None or epoch is None:
            return batch
        return replace(batch, frames=self.augmentation.applied(batch.frames, rows, epoch))


class _Process:
    """A process that reads one request after the other."""

    def __init__(self, reader: _Reader) -> None:
        # Spawned: a fork of a process with threads hangs on a lock that one of them held.
        context = multiprocessing.get_context("spawn")
        self._reader: _Reader | None = reader
        """The reader to send to the process; None once it is sent."""
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def read(self, rows: Index, epoch: int | None) -> Batch:
        try:
            self._ours.send((self._reader, rows, epoch))
            found: Batch | Exception = self._ours.recv()
        except (EOFError, OSError) as error:
            raise UserError(self._end()) from error
        if isinstance(found, Exception):
            raise found
        self._reader = None
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def _end(self) -> str:
        """A text that names the exit status or signal of the process, which has closed its end of the pipe."""
        self._process.join(60)  # it is ending: a busy machine may take a while
        code = self._process.exitcode
        if code is None or code >= 0:
            how = f"ended with exit status {code}; its output says why"
        else:
            how = (
                f"was killed by signal {-code}{f' ({name})' if (name := signal.strsignal(-code)) else ''}; where the "
                "system ended it for want of memory, fewer such processes need less (--sft.loader-workers)"
            )
        return (
            f"a process that reads demonstrations ahead (pid {self._process.pid}) {how}. What was learned is kept: "
            "resume the run"
        )


def _serve(requests: Connection) -> None:
    """Answer requests until the other end of the pipe is closed, as it is when that process was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes: the other one ends this one
    torch.set_num_threads(1)
    reader: _Reader | None = None
    with quiet(), suppress(EOFError, OSError):
        while requests.poll(None):
            try:
                new, rows, epoch = requests.recv()
                reader = new or reader
                assert reader is not None
                found: Batch | Exception = reader.read(rows, epoch)
            except EOFError:
                return
            except Exception as error:  # raised again where the result is waited for
                found = error
            requests.send(found)
