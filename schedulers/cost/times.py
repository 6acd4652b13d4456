"""Time and memory of one placement as a function of its number of devices, and of a context switch."""

from __future__ import annotations

import math

import numpy as np

from schedulers.cost.communication import exchange_seconds, fewest_nodes, takes_time
from schedulers.cost.phase import PhaseModel
from schedulers.cost.problem import Problem

# --- time


def visit_seconds(problem: Problem, model: PhaseModel, index: int, counts: np.ndarray) -> np.ndarray:
    """Seconds of one visit of one group for each number of devices: as measured together, else the sum of its
    components."""
    visit = model.visits[index]
    loop, batch = model.loops[visit.loop], problem.environments[visit.loop]
    total = np.zeros(len(counts))
    for name in visit.components:
        total += component_seconds(problem, model, name, batch / loop.groups, counts)
    if loop.simple and len(visit.components) > 1:
        factor = max(_contention(problem, model, name) for name in visit.components)
        for entry in problem.profile.together:
            if set(entry.components) == set(visit.components) and entry.groups == loop.groups:
                for i in np.flatnonzero(counts == entry.devices):
                    measured = problem.profile.together_seconds(visit.components, batch, entry.devices, loop.groups)
                    assert measured is not None
                    total[i] = measured / loop.groups * factor
    return total


def stage_seconds(problem: Problem, model: PhaseModel, index: int, counts: np.ndarray) -> np.ndarray:
    """Seconds of one micro-batch on one stage, for each number of devices."""
    return sum(
        (
            component_seconds(problem, model, name, items_at_once(problem, model, name), counts)
            for name in model.stages[index].components
        ),
        start=np.zeros(len(counts)),
    )


def items_at_once(problem: Problem, model: PhaseModel, name: str) -> int:
    """Items in each call of a component outside the loop."""
    return model.micro_batch if name in problem.graph.micro_batched else problem.workflow.items


def component_seconds(problem: Problem, model: PhaseModel, name: str, batch: float, counts: np.ndarray) -> np.ndarray:
    """Seconds of `batch` items for each number of devices in `counts`, with the instances' communication."""
    grid = problem.counts[problem.pools[name]]
    if len(grid) == len(counts) and np.array_equal(grid, counts):
        found = problem.times(name, batch)
    else:
        found = problem.profile.components[name].seconds_on(batch, counts)
    found = found * _contention(problem, model, name)
    exchanged = _exchange_seconds(problem, model, name, counts)
    return found if exchanged is None else found + exchanged * (batch / problem.workflow.items)


def communication_seconds(problem: Problem, model: PhaseModel, name: str, count: int) -> float:
    """Seconds per iteration of the communication among a component's instances on `count` devices."""
    found = _exchange_seconds(problem, model, name, np.array([count]))
    return 0.0 if found is None else float(found[0])


def _exchange_seconds(problem: Problem, model: PhaseModel, name: str, counts: np.ndarray) -> np.ndarray | None:
    """Seconds per iteration, or None without communication. Where the nodes are not decided, on as few as have so many
    devices: no layout takes less."""
    exchanges, pool = problem.profile.components[name].exchanges, problem.pools[name]
    if not exchanges or name in problem.graph.loop or not takes_time(problem.cluster):
        return None
    if model.node_counts:
        (on,) = (n for n, names in zip(model.node_counts, model.placements, strict=True) if name in names)
        nodes = np.full(len(counts), on)
    else:
        nodes = fewest_nodes(problem.cluster, pool, counts)
    return exchange_seconds(problem.cluster, pool, exchanges, counts, nodes)


def _contention(problem: Problem, model: PhaseModel, name: str) -> float:
    return problem.profile.components[name].contention if name in model.contended else 1.0


def usable_devices(problem: Problem, model: PhaseModel, names: tuple[str, ...], counts: np.ndarray) -> np.ndarray:
    """Number of so many devices that a placement can use: at most `max_devices` of each component, and for a loop's
    first component a divisor of a group's environments."""
    counts = np.minimum(counts, min(problem.profile.components[name].max_devices for name in names))
    sizes = [
        problem.environments[i] // model.loops[i].groups
        for i, loop in enumerate(problem.graph.loops)
        if loop[0] in names
    ]
    if not sizes:
        return counts
    items = math.gcd(*sizes)
    even = np.array([n for n in range(1, min(items, int(counts[-1])) + 1) if items % n == 0])
    return even[even.searchsorted(counts, side="right") - 1]


# --- memory


def resident_bytes(problem: Problem, names: tuple[str, ...], *, weights_elsewhere: bool = False) -> float:
    """Bytes per device of components that share devices, while they are loaded.

    `weights_elsewhere`: without the policy's weights, of which a learner of another phase, which stays loaded, has the
    copy.
    """
    total = sum(problem.profile.components[name].resident_bytes for name in names)
    shared = problem.shared_weights
    if shared is not None and shared.policy in names and (weights_elsewhere or shared.learner in names):
        total -= shared.bytes
    return total


def working_bytes(problem: Problem, model: PhaseModel, names: tuple[str, ...], counts: np.ndarray) -> np.ndarray:
    """Additional bytes per device while one of the components works: the most of any, for the items it has at once.

    A loop's first component always has all of the loop's environments, which live there; those of several loops add up.
    """
    most, living = np.zeros(len(counts)), np.zeros(len(counts))
    for name in names:
        items: float = items_at_once(problem, model, name) if name not in problem.graph.loop else 0.0
        for i, loop in enumerate(problem.graph.loops):
            if name in loop:
                items = max(items, problem.environments[i] / (1 if name == loop[0] else model.loops[i].groups))
        size = problem.profile.components[name].bytes_per_item * np.ceil(items / counts)
        most = np.maximum(most, size)
        living += size if any(name == loop[0] for loop in problem.graph.loops) else 0.0
    return np.maximum(most, living)


def peak_bytes(problem: Problem, model: PhaseModel, names: tuple[str, ...], count: int) -> float:
    """Most bytes per device of a placement on `count` devices."""
    return resident_bytes(problem, names) + float(working_bytes(problem, model, names, np.array([count]))[0])


# --- context switches


def switch_seconds(
    problem: Problem, placements: tuple[tuple[str, ...], ...], kept: frozenset[str] | None = None
) -> float:
    """Seconds to load a phase's components before it and unload them after it; placements do so at the same time.

    `kept`: components whose shared weights stay loaded; None: as many as can be.
    """
    shared = problem.shared_weights
    if shared is not None and kept is None:
        kept = shared.kept(placements)

    def whole(name: str) -> float:
        component = problem.profile.components[name]
        return component.unload_s + component.load_s

    def seconds(name: str) -> float:
        if shared is None or name not in (kept or ()):
            return whole(name)
        return 0.0 if name == shared.policy else max(whole(name) - whole(shared.policy), 0.0)

    return max(sum(seconds(name) for name in names) for names in placements)
