"""Episodes replayed by several workers at once, for films and datasets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from embodied.execution.session import Session
from embodied.runtime.handles import Handle
from sim_farm.client.replay import Replayer
from sim_farm.contract import TaskSpec

Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = TypeVar("Worker")


def worker_count(session: Session, episodes: int) -> int:
    """Number of workers: one per core, at most one per episode; one if everything runs in this process."""
    return min(len(session.cores), episodes) if session.config.runtime.mode == "ray" else 1


def replayers_of(first: Handle[Replayer], task: TaskSpec, session: Session, episodes: int) -> list[Handle[Replayer]]:
    """Replayers, one per core, `first` among them."""
    count = worker_count(session, episodes)
    session.runtime.prepare(count - 1)
    return [first, *(session.runtime.start(f"replayer {i}", Replayer, task) for i in range(1, count))]


def in_order(
    workers: Sequence[Handle[Worker]], items: Sequence[Item], submit: Callable[[Handle[Worker], Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in order; every worker is at work while the caller deals with one.

    `submit` starts an item on a worker and returns the reference that its handle's `submit` does.
    """
    pending: deque[tuple[Handle[Worker], Item, Result]] = deque()
    for number, item in enumerate(items):
        worker = workers[number % len(workers)]
        pending.append((worker, item, submit(worker, item)))
        if len(pending) > len(workers):
            done, finished, reference = pending.popleft()
            yield finished, done.get(reference)
    for done, finished, reference in pending:
        yield finished, done.get(reference)
