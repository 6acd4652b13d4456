"""Rows that threads or processes read ahead arrive in order, with their errors; the threads and processes end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from embodied.demonstrations import Batch, Dataset, DatasetError
from embodied.demonstrations.augmentation import Augmentation
from embodied.demonstrations.data_files import read_ahead
from embodied.demonstrations.loader import Loader, Request
from embodied.demonstrations.mixture import Demonstrations, Source
from embodied.errors import UserError
from tests.variants import often


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


# --- In processes

HERE = Path(__file__).parent / "lerobot"
CAMERAS = ("front", "still")
"""A camera in videos, and one in pictures."""
ONE = f"""
if __name__ == "__main__":
    from pathlib import Path
    from tests.embodied.demonstrations.test_loader import demonstrations_of, loader_of, requests_of

    data = demonstrations_of(Path({str(HERE / "converted")!r}))
    with loader_of(data, 1) as loader:
        for number, _ in enumerate(loader.read(requests_of(data, 10**6, 4))):
            if number == 4:
                print("reading", flush=True)
"""
"""A program that reads until it is ended; its reader, which runs the file once more, imports what it needs alone."""


def demonstrations_of(*folders: Path) -> Demonstrations:
    datasets = [Dataset(folder) for folder in folders]
    return Demonstrations(tuple(Source(each, None, tuple(range(len(each.episodes))), ()) for each in datasets))


def loader_of(demonstrations: Demonstrations, workers: int) -> Loader:
    return Loader(
        demonstrations, chunk=3, cameras=CAMERAS, augmentation=Augmentation("openpi", seed=0), workers=workers
    )


def requests_of(demonstrations: Demonstrations, count: int, size: int, datasets: int = 1) -> Iterator[Request]:
    """Rows of each of the first datasets in turn, first as recorded, then of epochs in which pictures are changed."""
    draw, begins = np.random.default_rng(0), demonstrations.begins
    for number in range(count):
        dataset = number % datasets
        rows = draw.integers(begins[dataset], begins[dataset + 1], size)
        yield Request(rows, number // 4 if number >= 4 else None)


def content(found: Iterable[tuple[Request, Batch]]) -> list[Any]:
    """All that was read, to the last bit."""
    return [
        (request.rows.tolist(), batch.instruction)
        + tuple(part.tobytes() for part in (*batch.frames.values(), batch.actions, batch.padding))
        for request, batch in found
    ]


@dataclass(frozen=True)
class Reading:
    """What several tests read, by the same two processes."""

    demonstrations: Demonstrations
    """Of three datasets, the last of which lacks a file."""
    lacks: str
    loader: Loader


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    cut = shutil.copytree(HERE / "converted_tiny_files", tmp_path_factory.mktemp("cut") / "cut")
    demonstrations = demonstrations_of(HERE / "converted", HERE / "other", cut)
    video = sorted(cut.rglob("*.mp4"))[-1]
    video.unlink()
    with loader_of(demonstrations, 2) as loader:
        yield Reading(demonstrations, video.name, loader)


@pytest.mark.parametrize("workers", often((2,), (1, 2, 3)))
def test_the_number_of_processes_changes_neither_content_nor_order(workers: int, reading: Reading) -> None:
    demonstrations = reading.demonstrations

    def read_by(loader: Loader) -> list[Any]:  # two at once, as training and measurement are
        pairs = zip(*(loader.read(requests_of(demonstrations, 12, 16, 2)) for _ in range(2)), strict=True)
        return [content(found) for found in zip(*pairs, strict=True)]

    expected = read_by(loader_of(demonstrations, 0))
    assert [len(found) for found in expected] == [12, 12] and expected[0] == expected[1]
    if workers == 2:
        assert read_by(reading.loader) == expected
    else:
        with loader_of(demonstrations, workers) as loader:
            assert read_by(loader) == expected


def test_an_error_in_a_process_is_raised_in_its_place(reading: Reading) -> None:
    begin, end = reading.demonstrations.begins[2:4]
    found = reading.loader.read(Request(np.array([row]), None) for row in (begin, begin + 1, end - 1))
    assert [request.rows[0] for request, _ in (next(found), next(found))] == [begin, begin + 1]
    with pytest.raises(DatasetError, match=f"{reading.lacks} is missing"):
        next(found)


def test_a_killed_process_ends_the_reading_with_a_message_that_says_so(reading: Reading) -> None:
    """The last test that reads by these processes."""
    with closing(reading.loader.read(requests_of(reading.demonstrations, 10**6, 4))) as found:  # type: ignore[type-var]
        next(found)
        readers = [process for process in psutil.Process().children() if is_reader(process)]
        killed, other = sorted(process.pid for process in readers)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(UserError, match=rf"\(pid {killed}\) was killed by signal 9 \(Killed\).*loader-workers"):
            for _ in found:
                pass
    reading.loader.close()
    assert not any(process.is_running() for process in readers) and not psutil.pid_exists(other)


def is_reader(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_program_leaves_no_process_behind(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal; a kill the program alone."""
    script, errors = tmp_path / "read.py", tmp_path / "errors"
    script.write_text(ONE)
    with errors.open("w") as sink:
        program = subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.PIPE, stderr=sink, text=True, start_new_session=True,
        )  # fmt: skip
        assert program.stdout is not None and program.stdout.readline() == "reading\n", errors.read_text()
        readers = [each for each in psutil.Process(program.pid).children(recursive=True) if is_reader(each)]
        assert len(readers) == 1
        (os.killpg if how == signal.SIGINT else os.kill)(program.pid, how)
        assert program.wait(60) != 0
    _, alive = psutil.wait_procs(readers, timeout=60)
    assert not alive
    assert errors.read_text().count("Traceback") == (1 if how == signal.SIGINT else 0)  # the program's own
