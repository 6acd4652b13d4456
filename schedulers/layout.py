"""From numbers of devices to spans of devices, and back to text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

from schedulers.cluster import Cluster, Node
from schedulers.errors import PlanError, nearest
from schedulers.plan import Span
from schedulers.profile import Pool
from schedulers.times import POOLS


def devices_of(node: Node, pool: Pool) -> int:
    return node.cores if pool == "cores" else node.accelerators


def lay_out(cluster: Cluster, pool: Pool, counts: Sequence[int], bound: Sequence[bool]) -> list[tuple[Span, ...]]:
    """Devices for each of several placements that work at the same time.

    Those that are `bound` to the cluster's home, which has devices for all of them, come first on it; the others get
    what is left there, then other nodes. Where none is, all nodes are equal and every count divides by their number,
    each node is split the same way, so that what belongs together is on one node; else the placements follow one
    another through the nodes.
    """
    nodes = [node for node in cluster.nodes if devices_of(node, pool)]
    order = list(range(len(counts)))
    if any(bound):
        nodes.sort(key=lambda node: node.name != cluster.home)
        order.sort(key=lambda i: not bound[i])
    elif len(nodes) > 1 and _equal(nodes, pool) and all(count % len(nodes) == 0 for count in counts):
        shares = [count // len(nodes) for count in counts]
        firsts = accumulate(shares, initial=0)
        return [
            tuple(Span(node.name, pool, first, share) for node in nodes)
            for first, share in zip(firsts, shares, strict=False)
        ]
    starts = accumulate((counts[i] for i in order), initial=0)
    spans = {i: _stretch(nodes, pool, start, counts[i]) for i, start in zip(order, starts, strict=False)}
    return [spans[i] for i in range(len(counts))]


def _equal(nodes: Sequence[Node], pool: Pool) -> bool:
    return len({devices_of(node, pool) for node in nodes}) == 1


def _stretch(nodes: Sequence[Node], pool: Pool, start: int, count: int) -> tuple[Span, ...]:
    spans = []
    for node in nodes:
        size = devices_of(node, pool)
        first = max(start, 0)
        taken = min(size - first, count)
        if taken > 0:
            spans.append(Span(node.name, pool, first, taken))
            count -= taken
        start -= size
    return tuple(spans)


def span_text(span: Span) -> str:
    """`node0:cores:0-3`; of one device `node0:cores:2`."""
    last = span.first + span.count - 1
    return f"{span.node}:{span.pool}:{span.first}" + (f"-{last}" if span.count > 1 else "")


def span_from(text: object) -> Span:
    """The span that `span_text` wrote; raises `PlanError` for anything else."""
    found = re.fullmatch(r"(.+):([a-z]+):(\d+)(?:-(\d+))?", text) if isinstance(text, str) else None
    if not found:
        raise PlanError(f"devices are given as node:pool:first-last, for example node0:cores:0-3, not {text!r}")
    node, pool, first, last = found.groups()
    if pool not in POOLS:
        raise PlanError(f"{text!r} names a pool {pool!r} that does not exist{nearest(pool, POOLS)}")
    begin, end = int(first), int(last or first)
    if end < begin:
        raise PlanError(f"{text!r} ends before it begins")
    return Span(node, "cores" if pool == "cores" else "accelerators", begin, end - begin + 1)


def spans_text(spans: Iterable[Span]) -> str:
    """In words for people: equal ranges of many nodes are put together."""
    spans = list(spans)
    ranges: dict[str, list[str]] = {}
    for span in spans:
        ranges.setdefault(span_text(span).removeprefix(span.node + ":"), []).append(span.node)
    parts = []
    for where, nodes in ranges.items():
        name = nodes[0] if len(nodes) == 1 else f"{nodes[0]}..{nodes[-1]} ({len(nodes)} nodes)"
        parts.append(f"{name}:{where}")
    return ", ".join(parts)
