"""`embodied bench transport`: frames from a worker to a consumer, by each transport.

Latency: the consumer asks, the worker hands the frames over; counted from the worker's first write to the
consumer having an array (by slot: a view addressed by index; elsewhere: the object that arrives). Rate: the
worker sends as fast as the consumer takes. The limit is `memcpy` between uncached buffers in one process.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from embodied.reporting.live import steps
from embodied_bench.settings import BenchTransport, provenance
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.memory import Block, Field

SLOTS = 8
"""Messages in flight when the rate is measured."""
REQUESTS, ANSWERS = 0, 1
Measured = dict[str, float]


def bench_transport(bench: BenchTransport) -> dict[str, Any]:
    """Measure every transport."""
    frames, size, messages = bench.frames, bench.size, bench.messages
    shape = (frames, size, size, 3)
    transports: dict[str, Callable[[tuple[int, ...], int], Measured]] = {
        "slots": _slots,
        "pipe": _pipe,
        "queue": _queue,
        "ray": _ray,
        "memcpy": _memcpy,
    }
    results: dict[str, Measured] = {}
    with steps("Measuring", len(transports)) as bar:
        for name, measure in transports.items():
            # Transports that copy through the kernel or Ray are ten times slower; fewer messages say as much.
            results[name] = measure(shape, messages if name in ("slots", "memcpy") else max(messages // 5, 50))
            bar.advance(text=name)
    _show(results, frames, size)
    slots, limit = results["slots"], results["memcpy"]
    return provenance() | {
        "frames": frames,
        "size": size,
        "bytes": int(np.prod(shape)),
        "latency_s": slots["latency_s"],
        "bytes_per_s": slots["bytes_per_s"],
        "limit_bytes_per_s": limit["bytes_per_s"],
        "share_of_limit": slots["bytes_per_s"] / limit["bytes_per_s"],
        "transports": results,
    }


def _frames(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Different pictures in different memory, more than the caches hold: 128 MiB."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, shape, np.uint8) for _ in range(max(2, 128 * 2**20 // int(np.prod(shape))))]


def _summary(latencies_ns: list[int], nbytes: int, count: int, wall_s: float) -> Measured:
    return {
        "latency_s": float(np.median(latencies_ns)) / 1e9,
        "latency_p95_s": float(np.percentile(latencies_ns, 95)) / 1e9,
        "bytes_per_s": nbytes * count / wall_s,
    }


def _core(index: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


class _Worker:
    """A worker process on a core of its own; the consumer takes the other."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._before = os.sched_getaffinity(0)
        self._process = mp.get_context("spawn").Process(target=target, args=args, daemon=True)
        self._process.start()
        _core(1)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join(timeout=10)
        self._process.kill()
        os.sched_setaffinity(0, self._before)


def _slot_fields(shape: tuple[int, ...]) -> dict[str, Field]:
    return {
        "bells": Field((2,), "int32", 0),
        "written": Field((1,), "int64", 0),
        "taken": Field((1,), "int64", 0),
        "began_ns": Field((SLOTS,), "int64", 0),
        "frames": Field((SLOTS, *shape), "uint8"),
    }


def _slots(shape: tuple[int, ...], count: int) -> Measured:
    """Through the farm's own means: a block, slots by index, and two doorbells."""
    block = Block.create(_slot_fields(shape), shared=True)
    try:
        with _Worker(_slot_worker, block.name, shape, count):
            slots = block.arrays
            ask, answer = Doorbell(slots["bells"], REQUESTS), Doorbell(slots["bells"], ANSWERS)
            latencies = []
            for number in range(count):
                slots["taken"][0] = number
                ask.ring()
                _await(slots["written"], number + 1, answer)
                view = slots["frames"][number % SLOTS]
                latencies.append(time.monotonic_ns() - int(slots["began_ns"][number % SLOTS]))
                assert view.shape == shape
            begin = time.perf_counter()
            for number in range(count, 2 * count):
                slots["taken"][0] = number
                if number % (SLOTS // 2) == 0:
                    ask.ring()
                _await(slots["written"], number + 1, answer)
                view = slots["frames"][number % SLOTS]
            return _summary(latencies, slots["frames"][0].nbytes, count, time.perf_counter() - begin)
    finally:
        block.close()


def _slot_worker(name: str, shape: tuple[int, ...], count: int) -> None:
    _core(0)
    block = Block.attach(_slot_fields(shape), name)
    slots, source = block.arrays, _frames(shape)
    requests, answer = Doorbell(slots["bells"], REQUESTS), Doorbell(slots["bells"], ANSWERS)
    for number in range(2 * count):
        # First one at a time, then as far ahead as there are slots.
        _await(slots["taken"], number if number < count else number - SLOTS + 1, requests, first=number == 0)
        slots["began_ns"][number % SLOTS] = time.monotonic_ns()
        slots["frames"][number % SLOTS] = source[number % len(source)]
        slots["written"][0] = number + 1
        answer.ring()


def _await(counter: np.ndarray, value: int, bell: Doorbell, first: bool = False) -> None:
    """Until the counter has reached the value (`first`: and the other side has rung at all)."""
    while True:
        seen = bell.value()
        if counter[0] >= value and not (first and seen == 0):
            return
        if not bell.wait(seen, timeout_s=30.0):
            raise TimeoutError("the other side of the measurement did not answer within 30 s")


def _pipe(shape: tuple[int, ...], count: int) -> Measured:
    """multiprocessing.Pipe, arrays pickled, as vector environments send them."""
    here, there = mp.get_context("spawn").Pipe()
    with _Worker(_pipe_worker, there, shape, count):
        return _ask_and_stream(count, lambda: here.send(None), here.recv)


def _pipe_worker(pipe: Any, shape: tuple[int, ...], count: int) -> None:
    _core(0)
    source = _frames(shape)
    for number in range(2 * count):
        if number <= count:
            pipe.recv()
        pipe.send((time.monotonic_ns(), source[number % len(source)]))


def _queue(shape: tuple[int, ...], count: int) -> Measured:
    """multiprocessing.Queue."""
    context = mp.get_context("spawn")
    asks, answers = context.Queue(), context.Queue(SLOTS)
    with _Worker(_queue_worker, asks, answers, shape, count):
        return _ask_and_stream(count, lambda: asks.put(None), answers.get)


def _queue_worker(asks: Any, answers: Any, shape: tuple[int, ...], count: int) -> None:
    _core(0)
    source = _frames(shape)
    for number in range(2 * count):
        if number <= count:
            asks.get()
        answers.put((time.monotonic_ns(), source[number % len(source)]))


def _ask_and_stream(count: int, ask: Callable[[], Any], take: Callable[[], Any]) -> Measured:
    """`count` answers one at a time, then `count` as fast as they come."""
    latencies = []
    for _ in range(count):
        ask()
        began, frames = take()
        latencies.append(time.monotonic_ns() - began)
    ask()
    take()
    begin = time.perf_counter()
    for _ in range(count - 1):
        _, frames = take()
    return _summary(latencies, frames.nbytes, count - 1, time.perf_counter() - begin)


def _ray(shape: tuple[int, ...], count: int) -> Measured:
    """An actor's result through Ray's object store."""
    import ray

    from embodied.runtime.ray.runtime import RayRuntime

    runtime = RayRuntime("local", 60.0)
    try:
        actor = runtime.actor(ray.remote(num_cpus=0)(_RaySource), {}, args=(shape,))
        ray.get(actor.frames.remote(0))
        latencies = []
        for number in range(count):
            began, frames = ray.get(actor.frames.remote(number))
            latencies.append(time.monotonic_ns() - began)
        begin = time.perf_counter()
        pending = [actor.frames.remote(number) for number in range(SLOTS)]
        for number in range(count):
            _, frames = ray.get(pending.pop(0))
            pending.append(actor.frames.remote(number))
        return _summary(latencies, frames.nbytes, count, time.perf_counter() - begin)
    finally:
        runtime.close()


class _RaySource:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._source = _frames(shape)

    def frames(self, number: int) -> tuple[int, np.ndarray]:
        return time.monotonic_ns(), self._source[number % len(self._source)]


def _memcpy(shape: tuple[int, ...], count: int) -> Measured:
    """Copying between buffers that the caches do not hold."""
    source = _frames(shape)
    target = np.empty_like(source[0])[None].repeat(SLOTS, 0)
    latencies = []
    begin = time.perf_counter()
    for number in range(count):
        mark = time.monotonic_ns()
        target[number % SLOTS] = source[number % len(source)]
        latencies.append(time.monotonic_ns() - mark)
    return _summary(latencies, target[0].nbytes, count, time.perf_counter() - begin)


def _show(results: dict[str, Measured], frames: int, size: int) -> None:
    table = Table(title=f"{frames} frames of {size} x {size} from worker to consumer")
    for column in ("", "latency", "95th percentile", "rate", "share of memcpy"):
        table.add_column(column, justify="right" if column else "left")
    names = {
        "slots": "slots in shared memory",
        "pipe": "multiprocessing.Pipe",
        "queue": "multiprocessing.Queue",
        "ray": "Ray's object store",
        "memcpy": "memcpy (limit)",
    }
    limit = results["memcpy"]["bytes_per_s"]
    for name, found in results.items():
        table.add_row(
            names[name],
            f"{found['latency_s'] * 1e6:,.0f} us",
            f"{found['latency_p95_s'] * 1e6:,.0f} us",
            f"{found['bytes_per_s'] / 1e9:.2f} GB/s",
            f"{found['bytes_per_s'] / limit:.0%}",
        )
    Console().print(table)
