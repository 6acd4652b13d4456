"""Results that threads read ahead come in order, with their errors, and the threads end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from embodied.demonstrations.data_files import read_ahead


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


@pytest.mark.parametrize(("workers", "depth"), [(1, 1), (2, 4), (3, 2), (4, 50)])
def test_results_come_in_the_order_of_the_keys(workers: int, depth: int) -> None:
    found = list(read_ahead(lambda key: key * key, range(20), workers=workers, depth=depth))
    assert found == [key * key for key in range(20)]
    assert not reading_threads()


def test_several_keys_are_read_at_once() -> None:
    meet = threading.Barrier(2, timeout=120)
    assert len(list(read_ahead(lambda _: meet.wait(), range(8)))) == 8


def test_no_more_than_depth_keys_are_taken_ahead() -> None:
    taken: list[int] = []

    def keys() -> Iterator[int]:
        for key in range(100):
            taken.append(key)
            yield key

    for done, _ in enumerate(read_ahead(lambda key: key, keys(), depth=3), 1):
        assert len(taken) <= done + 3


def test_an_error_is_raised_in_its_place_and_ends_the_threads() -> None:
    def read(key: int) -> int:
        if key == 3:
            raise ValueError("row 3")
        return key

    results = read_ahead(read, range(10))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="row 3"):
        next(results)
    assert next(results, None) is None and not reading_threads()


def test_closing_ends_the_threads() -> None:
    with closing(read_ahead(lambda key: key, range(10**6))) as results:  # type: ignore[type-var]
        assert next(results) == 0 and reading_threads()
    assert not reading_threads()


def test_without_workers_nothing_can_be_read() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        next(read_ahead(lambda key: key, [1], workers=0))
