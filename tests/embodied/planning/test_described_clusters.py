"""Plans for clusters that are described, executed with as many workers: processes on CPUs stand in for accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import schedulers
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.assignment import assign
from embodied.execution.iteration import Iteration, OnPolicy
from embodied.execution.session import Session
from embodied.planning.clusters import leaving_home
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ray.actors import RayHandle
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import workflow_of
from schedulers import Cluster, ComponentProfile, DeviceRange, Node, Phase, Placement, Plan, Point, Profile
from sim_farm.shared_memory.slot_layout import FarmSpec
from tests.embodied.execution.test_instances import acting, assert_learned_alike, computed_here
from tests.embodied.learning.test_learner_ranks import STATES, run
from tests.embodied.support.ray_nodes import Machines, started
from tests.embodied.support.runs import CORES

NODES = ("here", "far1", "far2", "far3")
ENVS, DECISIONS = 64, 4
PHYSICS = Placement(("physics",), (DeviceRange("here", "cores", 0, 2),))
SETTINGS: dict[str, Any] = {
    **STATES,
    "env": {**STATES["env"], "num_envs": ENVS},
    "policy": {**STATES["policy"], "device": "cpu"},
    "rollout": {"decisions": DECISIONS},
    "optim": {**STATES["optim"], "epochs": 1, "minibatch": 64},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started(*NODES, patient=True) as found:
        yield found


def on(component: str, each: int) -> Placement:
    """On the first accelerators of every node."""
    return Placement((component,), tuple(DeviceRange(node, "accelerators", 0, each) for node in NODES))


def plan_of(replicas: int, ranks: int) -> Plan:
    """So many of each on every node, in turns."""
    rolling, learning = Phase((PHYSICS, on("policy", replicas)), ENVS // 2), Phase((on("learner", ranks),), ENVS)
    plan = Plan("ppo", "hybrid", (rolling, learning), (2,))
    return schedulers.from_data(Plan, {**schedulers.to_data(plan), "mode": plan.classified})


def made_up() -> Profile:
    """Times of which only the order counts."""
    seconds = {"physics": 1.0, "policy": 2.0, "learner": 8.0}
    pools: dict[str, Any] = {"physics": "cores", "policy": "accelerators", "learner": "accelerators"}
    return Profile("ppo", {}, {n: ComponentProfile(pools[n], (Point(ENVS, 1, s, s, s),)) for n, s in seconds.items()})


def predicted_orders(plan: Plan, config: Config, cluster: Cluster) -> tuple[set[tuple[str, ...]], bool]:
    """What each group goes through, from the timeline; and whether the learner begins when all have."""
    simulation = schedulers.simulate(plan, leaving_home(workflow_of(RunSpec.of(config), [9])), made_up(), cluster)
    events = sorted(simulation.events, key=lambda event: event.start_s)
    groups = {event.group for event in events if event.group >= 0}
    learning = min(event.start_s for event in events if event.component == "learner")
    done = max(event.end_s for event in events if event.component == "policy")
    return {tuple(e.component for e in events if e.group == group) for group in groups}, learning >= done


def measured_orders(one: Iteration, spec: FarmSpec) -> tuple[set[tuple[str, ...]], bool]:
    """The same of the first iteration's spans: what follows the last decision belongs to the next one."""
    steps = [(span.start_ns, int(span.name.split()[-1])) for span in one.spans if span.name.startswith("step env ")]
    acts = [(span.start_ns, int(span.name.split()[-1])) for span in one.spans if span.name.startswith("act for group ")]
    learning = min(span.start_ns for span in one.spans if (span.track, span.name) == ("learner", "update"))
    done = max(span.end_ns for span in one.spans if span.name.startswith("act for group "))
    orders = set()
    for env in range(spec.num_envs):
        mine = [(start, "physics") for start, other in steps if other == env]
        mine += [(start, "policy") for start, group in acts if group == spec.group_of(env)]
        orders.add(tuple(name for _, name in sorted(mine)[:-1]))
    return orders, learning >= done


@pytest.mark.parametrize(
    ("replicas", "ranks"), [pytest.param(1, 2, id="4 replicas, 8 ranks"), pytest.param(8, 8, id="32 of each")]
)
def test_a_plan_for_four_nodes_is_executed_where_it_says(
    replicas: int, ranks: int, machines: Machines, tmp_path: Path
) -> None:
    """A replica and the rank on its accelerator are one process."""
    config, plan = parse_config(SETTINGS, "test"), plan_of(replicas, ranks)
    cluster = Cluster(tuple(Node(name, 16, 8) for name in NODES), 1e10, 1e-5, "here")
    schedulers.validate(plan, leaving_home(workflow_of(RunSpec.of(config), [9])), cluster)
    session = Session(config, machines.runtime, tuple(CORES))
    placed = assign(plan, RunSpec.of(config), session.cores, session.nodes)
    assert placed.hosts == tuple(node * ranks + own for node in range(len(NODES)) for own in range(replicas))
    specs: list[FarmSpec] = []

    def look(workers: OnPolicy) -> None:
        specs.extend(workers.farm.specs)
        for name, raylet in machines.raylets.items():
            there = psutil.Process(raylet).children(recursive=True)
            assert sum("_FarActor" in "".join(one.cmdline()) for one in there) == ranks, name
        groups: list[tuple[WorkerGroup[Any], int]] = [(workers.acting, replicas), (workers.learner, ranks)]
        for group, count in groups:
            nodes = [handle.process.node for handle in group.handles if isinstance(handle, RayHandle)]
            assert nodes == [session.nodes[node] for node in NODES for _ in range(count)]

    found = run(SETTINGS, session, placed, tmp_path / "ray", look)
    assert_learned_alike(found, computed_here(SETTINGS, placed, tmp_path))
    for one in found.iterations:
        assert acting(one) == {f"policy {replica}" for replica in range(4 * replicas)}
        assert one.learned["learner/ranks"] == 4 * ranks
    expected = predicted_orders(plan, config, cluster)
    assert measured_orders(found.iterations[0], specs[0]) == expected == ({("physics", "policy") * DECISIONS}, True)
