"""How long messages take between machines: a few small calls of the kind that a relay makes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import ray

from embodied.runtime.nodes import Link, NodeInfo
from embodied.runtime.ray.cluster import RayCluster
from embodied.runtime.relay import ANSWER_BYTES

CALLS = 25
"""Of each size; the median counts, since now and then a machine does something else."""
SMALL = 256


@ray.remote(num_cpus=0, max_restarts=0)
class _Echo:
    def echo(self, message: bytes) -> bytes:
        return message


def slowest_link(cluster: RayCluster, nodes: Sequence[NodeInfo]) -> Link:
    """The largest figures of the ways to these machines, from calls that carry as much there as back.

    Takes a process on each, which is the most of it, and some tens of milliseconds a machine. Raises what
    `RayCluster.wait` does.
    """
    actors = [cluster.actor(_Echo, {}, node.id) for node in nodes]
    try:
        started = [actor.echo.remote(b"") for actor in actors]
        for node, reference in zip(nodes, started, strict=True):
            cluster.wait(reference, f"a process on {node}", "start")
        reached = list(zip(actors, nodes, strict=True))
        small, large = (max(_call_s(cluster, *one, bytes(size)) for one in reached) for size in (SMALL, ANSWER_BYTES))
    finally:
        for actor in actors:
            cluster.kill(actor)
    return Link(small / 2, 2 * (ANSWER_BYTES - SMALL) / max(large - small, 1e-6))


def _call_s(cluster: RayCluster, actor: Any, node: NodeInfo, message: bytes) -> float:
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        cluster.wait(actor.echo.remote(message), f"a process on {node}", "answer")
        times.append(time.perf_counter() - begin)
    return median(times)
