"""Reading ahead: threads compute the next results while the caller uses the last ones.

    for batch in read_ahead(lambda rows: dataset.batch(rows, chunk=8), minibatches):
        ...

Threads and no processes, since decoders of pictures and video work without the interpreter's lock, and a result need
not be copied from one process to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def read_ahead(read: Callable[[K], T], keys: Iterable[K], *, workers: int = 2, depth: int = 4) -> Iterator[T]:
    """`read(key)` of each key, in the order of the keys.

    `workers` threads run at most `depth` keys ahead of the caller, so that at most `depth` results wait at once. Keys
    are taken in the caller's thread. An exception of `read` is raised in the place of its result, and ends the
    iteration.
    Closing the iterator, or dropping it, starts no further key and waits for those that are being read.
    """
    if workers < 1 or depth < 1:
        raise ValueError(f"reading ahead takes at least one worker and one key, got {workers} and {depth}")
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read_ahead")
    waiting: deque[Future[T]] = deque()
    try:
        for key in keys:
            waiting.append(pool.submit(read, key))
            if len(waiting) >= depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
