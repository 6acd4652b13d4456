"""What must not change, or only in one direction, when a problem is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedulers import MODES, Cluster, Mode, Profile, Workflow, alternatives
from schedulers.profile import ComponentProfile, Point
from tests.schedulers.baselines import SMALL
from tests.schedulers.instances import random_problem, some

SEEDS = some(6, of=25)


def best(workflow: Workflow, profile: Profile, cluster: Cluster) -> dict[Mode, float]:
    found = alternatives(workflow, profile, cluster, search=SMALL)
    return {mode: plan.prediction.iteration_s for mode, plan in found.items() if plan.prediction}


def scaled(component: ComponentProfile, factor: float) -> ComponentProfile:
    points = tuple(Point(p.batch, p.devices, p.seconds * factor, 0, 0) for p in component.points)
    return replace(component, points=points, unload_s=component.unload_s * factor, load_s=component.load_s * factor)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_devices_never_hurt(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2)
    node = cluster.nodes[0]
    few = best(workflow, profile, cluster)
    for larger in (replace(node, cores=node.cores + 1), replace(node, accelerators=node.accelerators + 1)):
        many = best(workflow, profile, Cluster((larger,)))
        for mode in few:
            assert many[mode] <= few[mode] * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_never_hurts(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2, memory=True)
    node = cluster.nodes[0]
    tight = best(workflow, profile, cluster)
    roomy = replace(node, memory_bytes=node.memory_bytes * 1.5, accelerator_bytes=node.accelerator_bytes * 1.5)
    found = best(workflow, profile, Cluster((roomy,)))
    for mode in tight:
        assert found[mode] <= tight[mode] * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_times_scale_the_plan(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2, memory=True)
    slower = replace(
        profile,
        components={name: scaled(component, 3.0) for name, component in profile.components.items()},
        together=tuple(replace(entry, seconds=entry.seconds * 3.0) for entry in profile.together),
    )
    once, thrice = best(workflow, profile, cluster), best(workflow, slower, cluster)
    assert thrice == {mode: pytest.approx(3 * seconds) for mode, seconds in once.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_names_change_nothing(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2, memory=True)
    new = {name: f"z{len(workflow.names) - i}" for i, name in enumerate(workflow.names)}
    renamed = replace(
        workflow,
        components=tuple(replace(component, name=new[component.name]) for component in workflow.components),
        edges=tuple(replace(e, source=new[e.source], target=new[e.target]) for e in workflow.edges),
        loops=tuple(replace(loop, components=tuple(new[name] for name in loop.components)) for loop in workflow.loops),
    )
    other = replace(
        profile,
        components={new[name]: component for name, component in profile.components.items()},
        together=tuple(replace(e, components=tuple(new[name] for name in e.components)) for e in profile.together),
    )
    assert best(renamed, other, cluster) == pytest.approx(best(workflow, profile, cluster))


@pytest.mark.parametrize("seed", SEEDS)
def test_free_switches_never_make_collocated_worse(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, memory=True)
    free = replace(
        profile,
        components={name: replace(c, unload_s=0.0, load_s=0.0) for name, c in profile.components.items()},
    )
    paid, unpaid = best(workflow, profile, cluster), best(workflow, free, cluster)
    assert set(paid) == set(unpaid)
    for mode in MODES:
        if mode in paid:
            assert unpaid[mode] <= paid[mode] * (1 + 1e-9)
