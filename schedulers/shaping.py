"""From placements to a shape: which servers a phase has, what visits them, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedulers.graph import Graph
from schedulers.profile import Profile
from schedulers.shape import LoopShape, Path, Segment, Shape, Start, Visit
from schedulers.workflow import Workflow


def shape_of(
    graph: Graph,
    workflow: Workflow,
    profile: Profile,
    placements: Sequence[tuple[str, ...]],
    groups: Sequence[int],
    micro_batch: int,
    ahead: bool = False,
) -> Shape | None:
    """The shape of a phase; None where its placements would wait for each other in a circle. `groups`: of each loop."""
    placements = tuple(tuple(names) for names in placements)
    where = {name: i for i, names in enumerate(placements) for name in names}
    loop = tuple(name for name in graph.loop if name in where)
    loops = _loops(graph, workflow, where, groups) if loop else ()
    parts = -(-workflow.items // micro_batch)
    last = frozenset(graph.closing) if ahead else frozenset[str]()
    rest = [name for name in graph.names if name in where and name not in graph.loop]
    if any(graph.later[name] & set(loop) for name in rest):
        return None  # What the loop needs comes in a phase of its own.
    looped = {where[name] for name in loop}
    if ahead and any(where[name] in looped for name in rest if name not in last):
        return None
    segments, links, starts = _segments(graph, where, rest, parts, looped, ahead, last)
    if not _ordered(len(segments), links):
        return None
    tail = {i for i, segment in enumerate(segments) if set(segment.components) <= last}
    body = [i for i in range(len(segments)) if i not in tail]
    paths = _paths(body, links, starts)
    if loop:
        paths.append(Path("loop", ()))
    elif not paths:
        paths.append(Path("begin", ()))
    streams = any(path.start == "stream" for path in paths)
    deliveries, arrivals = _deliveries(workflow, profile, groups, micro_batch, parts) if streams else ((), ())
    several_parts = any(loop.groups > 1 for loop in loops) or workflow.episodes_per_env > 1 or bool(profile.arrivals)
    return Shape(
        placements=placements,
        micro_batch=micro_batch,
        loops=loops,
        segments=tuple(segments),
        links=tuple(links),
        starts=tuple(frozenset(start) for start in starts),
        paths=tuple(dict.fromkeys(paths)),
        tail=tuple(_paths(sorted(tail), links, [set() for _ in segments])),
        deliveries=deliveries,
        arrivals=arrivals,
        beside=_beside(graph, where, loops, parts, looped, ahead, early=several_parts or graph.several),
    )


def _loops(graph: Graph, workflow: Workflow, where: dict[str, int], groups: Sequence[int]) -> tuple[LoopShape, ...]:
    result = []
    for i, (names, loop) in enumerate(zip(graph.loops, workflow.loops, strict=True)):
        visits: list[Visit] = []
        for name in names:
            if visits and visits[-1].placement == where[name]:
                visits[-1] = Visit(where[name], (*visits[-1].components, name), i)
            else:
                visits.append(Visit(where[name], (name,), i))
        result.append(LoopShape(groups[i], loop.steps * workflow.episodes_per_env, tuple(visits)))
    return tuple(result)


def _segments(
    graph: Graph,
    where: dict[str, int],
    rest: list[str],
    parts: int,
    looped: set[int],
    ahead: bool,
    last: frozenset[str],
) -> tuple[list[Segment], list[tuple[int, int, bool]], list[set[Start]]]:
    """Segments, the links between them and how each begins. A level counts the barriers before a component."""
    level: dict[str, int] = {}
    inner = [edge for edge in graph.edges if edge.source in where and edge.target in where]
    for name in rest:
        level[name] = 0
        for edge in inner:
            if edge.target == name and not (ahead and edge.source in graph.loop):
                barrier = edge.flow == "barrier" or parts == 1
                level[name] = max(level[name], level.get(edge.source, 0) + barrier)
    keys: dict[tuple[int, int, bool, bool], list[str]] = {}
    for name in rest:
        keys.setdefault((where[name], level[name], name in last, name not in graph.divisible), []).append(name)
    order = sorted(keys, key=lambda key: (key[2], key[1], key[3], key[0]))
    mine = {name: i for i, key in enumerate(order) for name in keys[key]}
    segments = [Segment(key[0], tuple(keys[key]), 1 if key[3] else parts) for key in order]
    starts: list[set[Start]] = [set() for _ in segments]
    links: dict[tuple[int, int], bool] = {}
    for edge in inner:
        if edge.target not in mine:
            continue
        target, barrier = mine[edge.target], edge.flow == "barrier" or parts == 1
        if edge.source in mine:
            if mine[edge.source] != target:
                pair = (mine[edge.source], target)
                links[pair] = links.get(pair, False) or barrier
        elif not ahead:
            starts[target].add("loop" if barrier else "stream")
    for i, key in enumerate(order):
        for j in range(i):
            if order[j][0] == key[0]:
                links[(j, i)] = True
        if key[0] in looped and not ahead:
            starts[i].add("loop")
        if "loop" in starts[i]:
            starts[i].discard("stream")  # What waits for the whole loop waits for its parts.
    return segments, [(i, j, barrier) for (i, j), barrier in links.items()], starts


def _ordered(count: int, links: list[tuple[int, int, bool]]) -> bool:
    left = set(range(count))
    while left:
        free = {j for j in left if not any(target == j and source in left for source, target, _ in links)}
        if not free:
            return False
        left -= free
    return True


def _paths(members: list[int], links: list[tuple[int, int, bool]], starts: Sequence[set[Start]]) -> list[Path]:
    """All ways from a segment where work can begin to one that nothing follows."""
    inside = set(members)
    following: dict[int, list[tuple[int, bool]]] = {i: [] for i in members}
    fed = set()
    for source, target, barrier in links:
        if source in inside and target in inside:
            following[source].append((target, barrier))
            fed.add(target)
    found: list[Path] = []

    def walk(start: Start, runs: tuple[tuple[int, ...], ...], here: int) -> None:
        if not following[here]:
            found.append(Path(start, runs))
        for target, barrier in following[here]:
            grown = (*runs, (target,)) if barrier else (*runs[:-1], (*runs[-1], target))
            walk(start, grown, target)

    for i in members:
        for start in sorted(starts[i]):
            walk(start, ((i,),), i)
        if not starts[i] and i not in fed:
            walk("begin", ((i,),), i)
    # A path whose work is part of another's with the same beginning can never be the longest.
    flat = [(path, [i for run in path.runs for i in run]) for path in dict.fromkeys(found)]
    return [
        path
        for path, work in flat
        if not any(
            other is not path and other.start == path.start and len(theirs) > len(work) and _within(path, other)
            for other, theirs in flat
        )
    ]


def _within(path: Path, other: Path) -> bool:
    """Each run of `path` is, in order, part of a run of its own in `other`."""
    if path.start == "stream" and not set(path.runs[0]) <= set(other.runs[0]):
        return False
    rest = iter(other.runs)
    return all(any(set(run) <= set(candidate) for candidate in rest) for run in path.runs)


def _deliveries(
    workflow: Workflow, profile: Profile, groups: Sequence[int], micro_batch: int, parts: int
) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[float, ...]]:
    if profile.arrivals:
        known = np.arange(1, len(profile.arrivals) + 1) / len(profile.arrivals)
        shares = np.interp(np.arange(1, parts + 1) / parts, known, profile.arrivals)
        steps = workflow.loops[0].steps
        return tuple((k, steps, 0, 0) for k in range(1, parts + 1)), tuple(float(share) for share in shares)
    # Items are in the order of episodes, then of loops, then of groups. A part waits for the last of each loop.
    result: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    first = 0.0  # Item of the next group.
    for episode in range(workflow.episodes_per_env):
        for i, loop in enumerate(workflow.loops):
            size = workflow.environments(i) / groups[i]
            for group in range(groups[i]):
                rounds = (episode + 1) * loop.steps
                for k in range(int(first // micro_batch) + 1, -int(-(first + size) // micro_batch) + 1):
                    result[k, i] = (k, rounds, group, i)
                first += size
    return tuple(sorted(result.values())), ()


def _beside(
    graph: Graph,
    where: dict[str, int],
    loops: Sequence[LoopShape],
    parts: int,
    looped: set[int],
    ahead: bool,
    early: bool,
) -> frozenset[str]:
    """Components during whose work another placement can be busy: others of the loop where several groups go
    round, those of other loops, components that do not wait for each other, and neighbours that stream."""

    def together(a: str, b: str) -> bool:
        inside = (a in graph.loop) + (b in graph.loop)
        if inside == 2:
            mine = [i for i, names in enumerate(graph.loops) if a in names or b in names]
            return len(mine) > 1 or loops[mine[0]].groups > 1
        if ahead and (a in graph.closing or b in graph.closing):
            return inside == 0 and a not in graph.later[b] and b not in graph.later[a]
        if ahead and inside == 1:
            return True
        if a in graph.later[b]:
            a, b = b, a
        elif b not in graph.later[a]:
            return True
        if a in graph.loop and (where[b] in looped or not early):
            return False
        return parts > 1 and b not in graph.barred[a]

    return frozenset(a for a in where if any(where[b] != where[a] and together(a, b) for b in where))
