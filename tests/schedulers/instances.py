"""Small planning problems, the same for the same seed, and figures of the plans that are found for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedulers import (
    Cluster,
    Component,
    ComponentProfile,
    Edge,
    Loop,
    Node,
    Plan,
    Point,
    Pool,
    Profile,
    Together,
    Workflow,
)
from schedulers.workflow import Flow

LEARNER_SIDE = ("value", "advantage", "learner", "sync")

NEAR = 1.006
"""Of a plan's time to the least: the planner says by how much it may be off, and stops looking at 0.5%."""


def seconds(found: Plan) -> float:
    """The predicted time of an iteration."""
    assert found.prediction is not None
    return found.prediction.iteration_s


def lowest(found: Plan) -> float:
    """Of any plan's time, as the planner has proved."""
    assert found.prediction is not None
    return found.prediction.lower_bound_s


def some(first: int, of: int) -> list[Any]:
    """The first seeds of so many; the slow run has them all."""
    return [seed if seed < first else pytest.param(seed, marks=pytest.mark.slow) for seed in range(of)]


def measured(pool: Pool, times: dict[tuple[int, int], float], **more: Any) -> ComponentProfile:
    """A component's profile from seconds keyed (batch, devices)."""
    return ComponentProfile(pool, tuple(Point(b, n, t, t, t) for (b, n), t in times.items()), **more)


def random_component(random: np.random.Generator, pool: Pool, items: int, devices: int) -> ComponentProfile:
    """Fixed cost, cost per item, and measured numbers of devices that gain less than they should."""
    fixed, each, loss = random.uniform(0.0, 1.0), random.uniform(0.05, 0.5), random.uniform(0.0, 0.6)
    known = [n for n in range(1, devices + 1) if n == 1 or random.random() < 0.4]
    times = {(b, n): (fixed + each * b) * (loss + (1 - loss) / n) for n in known for b in (1, max(2, items))}
    return measured(pool, times, contention=float(random.choice([1.0, 1.1])))


def random_workflow(random: np.random.Generator, count: int, loop: int, items: int = 8) -> Workflow:
    """`count` components in a random graph (chains, forks, joins), the first `loop` of them in a loop."""
    names = tuple(f"c{i}" for i in range(count))
    edges = []
    for i in range(1, count):
        sources = {int(random.integers(0, i))} if random.random() < 0.7 else {0, i - 1}
        for source in sorted(sources):
            if i >= loop:
                source = max(source, loop - 1)
                flow = random.choice(["micro_batch", "barrier"])
                edges.append((names[source], names[i], flow))
    unique = {(source, target): flow for source, target, flow in edges}
    return Workflow(
        "random",
        tuple(Component(name) for name in names),
        tuple(Edge(s, t, "data", "barrier" if f == "barrier" else "micro_batch") for (s, t), f in unique.items()),
        (Loop(names[:loop], int(random.integers(1, 5))),) if loop else (),
        items,
        episodes_per_env=int(random.choice([1, 2])) if loop else 1,
    )


def random_problem(
    seed: int, count: int | None = None, pools: int = 1, memory: bool = False
) -> tuple[Workflow, Profile, Cluster]:
    random = np.random.default_rng(seed)
    count = count or int(random.integers(2, 5))
    loop = int(random.choice([0, min(2, count), min(3, count)]))
    workflow = random_workflow(random, count, loop)
    cores, accelerators = int(random.integers(2, 6)), int(random.integers(1, 4))
    kinds: list[Pool] = ["cores", "accelerators"]
    components = {}
    for name in workflow.names:
        pool = kinds[int(random.integers(0, pools))]
        size = cores if pool == "cores" else accelerators
        components[name] = random_component(random, pool, workflow.items, size)
    together: tuple[Together, ...] = ()
    if loop > 1 and random.random() < 0.5 and len({components[name].pool for name in workflow.names[:loop]}) == 1:
        seconds = 0.8 * sum(components[name].seconds(workflow.items, 2) for name in workflow.names[:loop])
        together = (Together(workflow.names[:loop], workflow.items, 2, 2, seconds, seconds, seconds),)
    node = Node("node0", cores, accelerators if pools > 1 else 0)
    if memory:
        node = replace(node, memory_bytes=float(random.uniform(3, 9)) * cores, accelerator_bytes=random.uniform(3, 9))
        components = {
            name: replace(
                component,
                resident_bytes=float(random.uniform(0, 3)),
                bytes_per_item=float(random.uniform(0, 0.5)),
                unload_s=float(random.uniform(0, 0.5)),
                load_s=float(random.uniform(0, 0.5)),
            )
            for name, component in components.items()
        }
    return workflow, Profile("random", {}, components, together), Cluster((node,))


def random_home(
    seed: int, pools: int = 1, memory: bool = False, links: bool = False
) -> tuple[Workflow, Profile, Cluster]:
    """A random problem on two or three nodes of different sizes, of which the first is the home.

    `links`: messages take time; then one component of the loop that nothing outside it needs travels, or none, else
    any number of all.
    """
    workflow, profile, cluster = random_problem(seed, pools=pools, memory=memory)
    random = np.random.default_rng((seed, 1))
    node, per_core = cluster.nodes[0], cluster.nodes[0].memory_bytes / cluster.nodes[0].cores
    sizes = [(max(1, node.cores - 2), node.accelerators)]
    sizes += [(int(random.integers(1, 3)), int(random.integers(0, 2)) * (pools - 1)) for _ in range(1 + seed % 2)]
    nodes = tuple(
        replace(node, name=f"node{i}", cores=cores, accelerators=accelerators, memory_bytes=per_core * cores)
        for i, (cores, accelerators) in enumerate(sizes)
    )
    loop = workflow.loops[0].components if workflow.loops else ()
    if links:
        needed = {edge.source for edge in workflow.edges if edge.target not in loop}
        travelling = set([name for name in loop if name not in needed][:1])
        profile = replace(profile, transfers={f"{a}>{b}": float(random.uniform(0, 9)) for a in loop for b in loop})
    else:
        travelling = {name for name in workflow.names if random.random() < 0.5}
    components = tuple(replace(c, movable=c.name in travelling) for c in workflow.components)
    workflow = replace(workflow, components=components)
    speed, wait = (float(random.uniform(20, 400)), float(random.uniform(0, 0.3))) if links else (float("inf"), 0.0)
    return workflow, profile, Cluster(nodes, speed, wait, head_node="node0")


def ppo(items: int = 16, steps: int = 20, flow: str = "barrier") -> Workflow:
    """physics, render, policy in a loop; then advantage, learner, sync."""
    names = ("physics", "render", "policy", "advantage", "learner", "sync")
    streams: Flow = "micro_batch" if flow == "micro_batch" else "barrier"
    return Workflow(
        "ppo",
        tuple(Component(name) for name in names),
        (
            Edge("physics", "render", "scenes"),
            Edge("render", "policy", "frames"),
            Edge("policy", "advantage", "trajectories", streams),
            Edge("advantage", "learner", "samples", streams),
            Edge("learner", "sync", "weights"),
        ),
        (Loop(("physics", "render", "policy"), steps),),
        items,
    )


def ppo_profile(policy: float = 0.02, physics: float = 0.02, learner: float = 0.5, **more: float) -> Profile:
    """Profile of `ppo` on cores: physics scales with cores, the policy hardly, the learner a little."""
    times = {
        "physics": {(8, 1): physics / 2, (16, 1): physics, (16, 2): physics * 0.52},
        "render": {(8, 1): 0.001, (16, 1): 0.002, (16, 2): 0.001},
        "policy": {(8, 1): policy * 0.6, (16, 1): policy, (16, 2): policy * 0.8},
        "advantage": {(16, 1): 0.001},
        "learner": {(8, 1): learner / 2, (16, 1): learner, (16, 2): learner * 0.6},
        "sync": {(16, 1): 0.001},
    }
    components = {name: measured("cores", points, **more) for name, points in times.items()}
    return Profile("ppo", {"cpu": "test"}, components)


TWO_CORES = Cluster((Node("node0", 2),))


def tasks(
    count: int,
    items: Sequence[int],
    steps: Sequence[int],
    draws: Sequence[bool] | bool = True,
    learner: Flow = "barrier",
) -> Workflow:
    """A run of several tasks: physics, and where the task draws render, of their own; policy and learner for all."""
    drawn = [draws] * count if isinstance(draws, bool) else draws
    components, edges, loops = [], [], []
    for i in range(count):
        mine = [f"{name}-{i}" if i else name for name in ("physics", "render")[: 1 + drawn[i]]]
        components += [Component(name, task=i) for name in mine]
        edges += [Edge(a, b, "data") for a, b in zip(mine, (*mine[1:], "policy"), strict=True)]
        loops.append(Loop((*mine, "policy"), steps[i], items[i] if count > 1 else 0, f"task{i}"))
    components += [Component("policy"), Component("learner")]
    edges.append(Edge("policy", "learner", "trajectories", learner))
    return Workflow("tasks", tuple(components), tuple(edges), tuple(loops), sum(items))


def random_tasks(
    seed: int, count: int = 2, gpu: bool = False, memory: bool = False
) -> tuple[Workflow, Profile, Cluster]:
    """Tasks of random weight on a few cores; policy and learner on an accelerator, or on the cores too."""
    random = np.random.default_rng((seed, 2))
    items = [int(random.choice([2, 4])) for _ in range(count)]
    draws = [bool(random.random() < 0.5) for _ in range(count)]
    flow: Flow = "micro_batch" if seed % 3 == 0 else "barrier"
    workflow = tasks(count, items, [int(random.integers(1, 5)) for _ in range(count)], draws, flow)
    cores = int(random.integers(2, 5))
    components = {}
    for name in workflow.names:
        pool: Pool = "accelerators" if gpu and name in ("policy", "learner") else "cores"
        components[name] = random_component(random, pool, workflow.items, 1 if pool == "accelerators" else cores)
    node = Node("node0", cores, int(gpu))
    if memory:
        node = replace(node, memory_bytes=float(random.uniform(4, 10)) * cores, accelerator_bytes=random.uniform(4, 10))
        components = {
            name: replace(
                component,
                resident_bytes=float(random.uniform(0, 2)),
                bytes_per_item=float(random.uniform(0, 0.5)),
                unload_s=float(random.uniform(0, 0.5)),
                load_s=float(random.uniform(0, 0.5)),
            )
            for name, component in components.items()
        }
    return workflow, Profile("tasks", {}, components), Cluster((node,))


def libero_tasks(count: int, policy_s: float = 0.1, learner_s: float = 20.0) -> tuple[Workflow, Profile]:
    """So many tasks alike, of eight environments each, whose frames are drawn on cores; policy and learner on a GPU."""
    workflow = tasks(count, [8] * count, [28] * count)
    times: dict[str, tuple[Pool, dict[tuple[int, int], float]]] = {
        "physics": ("cores", {(1, 1): 0.05, (8, 1): 0.4}),
        "render": ("cores", {(1, 1): 0.1, (8, 1): 0.8}),
        "policy": ("accelerators", {(4, 1): policy_s / 10, (40, 1): policy_s}),
        "learner": ("accelerators", {(workflow.items, 1): learner_s}),
    }
    components = {}
    for name in workflow.names:
        pool, points = times[name.split("-")[0]]
        components[name] = measured(pool, points, data_parallel=pool == "cores")
    return workflow, Profile("tasks", {}, components)
