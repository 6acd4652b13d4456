"""What the planner chooses for each task of a run on a machine of 16 cores and one GPU, from written profiles."""

from __future__ import annotations

import re

import pytest

from benchmarks.planner import PUBLISHED_BATCH, PUBLISHED_INFERENCE_S
from schedulers import MODES, Cluster, Component, Edge, Loop, Node, Profile, Workflow, plan, simulate, validate
from tests.schedulers.baselines import SMALL, Exhaustive
from tests.schedulers.instances import measured, seconds, tasks
from tests.variants import often

NEAR = 1.03
MACHINE = Cluster((Node("node0", 16, 1),))
LARGE = {(batch, 1): seconds for batch, seconds in zip(PUBLISHED_BATCH, PUBLISHED_INFERENCE_S, strict=True)}
"""A call of a 7B policy, as published."""
SMALL_POLICY = {(1, 1): 0.002, (32, 1): 0.01}
PHYSICS_S, LIBERO_PHYSICS_S, LIBERO_RENDER_S = 0.54e-3, 6.5e-3, 100e-3
"""Of an environment on a core, as in `benchmarks.tasks_together`."""


def on_core(each_s: float) -> dict[tuple[int, int], float]:
    return {(1, 1): each_s, (64, 1): 64 * each_s}


def one_of_each() -> tuple[Workflow, Profile]:
    """A task with light physics and a 7B policy on the GPU, and one of LIBERO with a small policy on cores."""
    large, small = ("physics", "policy"), ("physics-1", "render-1", "policy-1")
    names = (*large, *small, "learner")
    edges = [Edge("policy", "learner", "trajectories"), Edge("policy-1", "learner", "trajectories")]
    edges += [Edge(a, b, "data") for a, b in ((*large,), small[:2], small[1:])]
    workflow = Workflow(
        "one of each",
        tuple(Component(name, task=int(name in small)) for name in names),
        tuple(edges),
        (Loop(large, 3, 32, "light"), Loop(small, 27, 8, "libero")),
        40,
    )
    times = {"physics": PHYSICS_S, "physics-1": LIBERO_PHYSICS_S, "render-1": LIBERO_RENDER_S}
    components = {name: measured("cores", on_core(each)) for name, each in times.items()}
    components["policy-1"] = measured("cores", SMALL_POLICY)
    gpu = {"policy": LARGE, "learner": {(40, 1): 5.0}}
    components |= {name: measured("accelerators", points, data_parallel=False) for name, points in gpu.items()}
    return workflow, Profile("one of each", {}, components)


def test_a_task_bound_by_the_gpu_and_one_bound_by_cores_are_placed_differently() -> None:
    workflow, profile = one_of_each()
    best = plan(workflow, profile, MACHINE, search=SMALL)
    validate(best, workflow, MACHINE, profile)
    assert simulate(best, workflow, profile, MACHINE).seconds == pytest.approx(seconds(best))
    # LIBERO keeps cores of its own busy, beside which the light task's physics waits for the GPU.
    beside = {name: set(p.components) for phase in best.phases for p in phase.placements for name in p.components}
    assert beside["physics-1"] == beside["render-1"] == {"physics-1", "render-1", "policy-1"}
    assert beside["physics"] == {"physics"}
    light, libero = (next(line for line in best.why if line.startswith(f"Task {i}")) for i in (0, 1))
    assert re.search("bottleneck is .*accelerator 0 of node0, busy", light), light
    assert re.search("bottleneck is .*core.* of node0, busy", libero), libero


@pytest.mark.slow
def test_what_is_chosen_for_one_of_each_is_near_the_best_there_is() -> None:
    workflow, profile = one_of_each()
    everything = Exhaustive(workflow, profile, MACHINE)
    least = min(everything.best(mode) for mode in MODES)
    chosen = seconds(plan(workflow, profile, MACHINE, search=SMALL))
    assert least * (1 - 1e-9) <= chosen <= least * NEAR


EACH_SIZE = [(LARGE, "policy on accelerator 0 of node0"), (SMALL_POLICY, "core")]


@pytest.mark.slow
@pytest.mark.parametrize(("inference", "resource"), often(EACH_SIZE[:1], EACH_SIZE))
def test_with_one_policy_its_size_decides_the_bottleneck_of_both_tasks(
    inference: dict[tuple[int, int], float], resource: str
) -> None:
    workflow = tasks(2, [16, 16], [6, 6], draws=[False, True])
    times = {"physics": PHYSICS_S, "physics-1": LIBERO_PHYSICS_S, "render-1": LIBERO_RENDER_S}
    components = {name: measured("cores", on_core(each)) for name, each in times.items()}
    components["policy"] = measured("accelerators", inference, data_parallel=False)
    components["learner"] = measured("accelerators", {(32, 1): 5.0}, data_parallel=False)
    profile = Profile("tasks", {}, components)
    best = plan(workflow, profile, MACHINE, search=SMALL)
    least = min(Exhaustive(workflow, profile, MACHINE).best(mode) for mode in MODES)
    assert least * (1 - 1e-9) <= seconds(best) <= least * NEAR
    libero = next(line for line in best.why if line.startswith("Task 1"))
    assert f"its bottleneck is {resource}" in libero, libero
