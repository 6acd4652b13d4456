"""How long messages take between machines: a few small calls of the kind that a relay makes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import ray

from embodied.runtime.nodes import Link, NodeInfo
from embodied.runtime.relay import ANSWER_BYTES

if TYPE_CHECKING:
    from embodied.runtime.ray_runtime import RayRuntime

CALLS = 25
"""Of each size; the median counts, since now and then a machine does something else."""
SMALL = 256
ANSWER_S = 60.0
"""Longest wait for a process on another machine, and for each of its answers."""


@ray.remote(num_cpus=0, max_restarts=0)
class _Echo:
    def echo(self, message: bytes) -> bytes:
        return message


def slowest_link(runtime: RayRuntime, nodes: Sequence[NodeInfo]) -> Link:
    """The largest figures of the ways to these machines, from calls that carry as much there as back.

    Takes a process on each, which is the most of it, and some tens of milliseconds a machine. Raises what
    `RayRuntime.wait` does.
    """
    actors = [runtime.actor(_Echo, {}, node.id) for node in nodes]
    try:
        started = [actor.echo.remote(b"") for actor in actors]
        for node, reference in zip(nodes, started, strict=True):
            runtime.wait(reference, f"a process on {node}", "start", ANSWER_S)
        reached = list(zip(actors, nodes, strict=True))
        small, large = (max(_call_s(runtime, *one, bytes(size)) for one in reached) for size in (SMALL, ANSWER_BYTES))
    finally:
        for actor in actors:
            runtime.kill(actor)
    return Link(small / 2, 2 * (ANSWER_BYTES - SMALL) / max(large - small, 1e-6))


def _call_s(runtime: RayRuntime, actor: Any, node: NodeInfo, message: bytes) -> float:
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        runtime.wait(actor.echo.remote(message), f"a process on {node}", "answer", ANSWER_S)
        times.append(time.perf_counter() - begin)
    return median(times)
