"""From numbers of devices to ranges of devices, and back to text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

from schedulers.cluster import Cluster, Node
from schedulers.errors import PlanError, nearest
from schedulers.memory import ROUNDING, devices_of, share_bytes
from schedulers.plan import DeviceRange
from schedulers.profile import Pool
from schedulers.times import POOLS


def lay_out(
    cluster: Cluster,
    pool: Pool,
    counts: Sequence[int],
    bound: Sequence[bool],
    needs: Sequence[float],
    talks: Sequence[float] = (),
) -> list[tuple[DeviceRange, ...]]:
    """Devices for each of several placements that work at the same time.

    On a cluster with a home, that comes first: for those that are `bound` to it, then, with what is left there and
    then other nodes, for the rest. Without one, where all nodes are equal and every count divides by their number,
    each node is split the same way, so that what belongs together is on one node; else the placements follow one
    another through the nodes. A placement gets devices that have the memory it `needs` on each (bytes), and those
    that need most choose first. With `talks`, how much the instances of each exchange, placements always follow one
    another, those that exchange most first: each is on as few nodes as can be.

    Raises `PlanError` where these are too few.
    """
    nodes = [node for node in cluster.nodes if devices_of(node, pool)]
    nodes.sort(key=lambda node: cluster.home not in (None, node.name))
    even = cluster.home is None and all(count % len(nodes) == 0 for count in counts)
    if even and not talks and _alike(nodes, pool, needs):
        shares = [count // len(nodes) for count in counts]
        firsts = accumulate(shares, initial=0)
        return [
            tuple(DeviceRange(node.name, pool, first, share) for node in nodes)
            for first, share in zip(firsts, shares, strict=False)
        ]
    taken = {node.name: 0 for node in nodes}
    devices = {
        i: _take([node for node in nodes if _holds(node, pool, needs[i])], pool, counts[i], taken)
        for i in sorted(range(len(counts)), key=lambda i: (not bound[i], -needs[i], -talks[i] if talks else 0.0))
    }
    return [devices[i] for i in range(len(counts))]


def _alike(nodes: Sequence[Node], pool: Pool, needs: Sequence[float]) -> bool:
    return len({devices_of(node, pool) for node in nodes}) == 1 and all(
        _holds(node, pool, max(needs, default=0.0)) for node in nodes
    )


def _holds(node: Node, pool: Pool, need: float) -> bool:
    return need <= share_bytes(node, pool) * (1 + ROUNDING)


def _take(nodes: Sequence[Node], pool: Pool, count: int, taken: dict[str, int]) -> tuple[DeviceRange, ...]:
    """So many devices of these nodes, in order, after those that are taken; these are taken then too."""
    devices = []
    for node in nodes:
        mine = min(devices_of(node, pool) - taken[node.name], count)
        if mine > 0:
            devices.append(DeviceRange(node.name, pool, taken[node.name], mine))
            taken[node.name] += mine
            count -= mine
    if count:
        raise PlanError(f"too few {pool} have enough memory")
    return tuple(devices)


def range_text(part: DeviceRange) -> str:
    """`node0:cores:0-3`; of one device `node0:cores:2`."""
    last = part.first + part.count - 1
    return f"{part.node}:{part.pool}:{part.first}" + (f"-{last}" if part.count > 1 else "")


def range_from(text: object) -> DeviceRange:
    """The range that `range_text` wrote; raises `PlanError` for anything else."""
    found = re.fullmatch(r"(.+):([a-z]+):([0-9]{1,9})(?:-([0-9]{1,9}))?", text) if isinstance(text, str) else None
    if not found:
        raise PlanError(f"devices are given as node:pool:first-last, for example node0:cores:0-3, not {text!r:.100}")
    node, pool, first, last = found.groups()
    if pool not in POOLS:
        raise PlanError(f"{text!r} names a pool {pool!r} that does not exist{nearest(pool, POOLS)}")
    begin, end = int(first), int(last or first)
    if end < begin:
        raise PlanError(f"{text!r} ends before it begins")
    return DeviceRange(node, "cores" if pool == "cores" else "accelerators", begin, end - begin + 1)


def ranges_text(devices: Iterable[DeviceRange]) -> str:
    """In words for people: equal ranges of many nodes are put together."""
    devices = list(devices)
    ranges: dict[str, list[str]] = {}
    for part in devices:
        ranges.setdefault(range_text(part).removeprefix(part.node + ":"), []).append(part.node)
    parts = []
    for where, nodes in ranges.items():
        name = nodes[0] if len(nodes) == 1 else f"{nodes[0]}..{nodes[-1]} ({len(nodes)} nodes)"
        parts.append(f"{name}:{where}")
    return ", ".join(parts)
