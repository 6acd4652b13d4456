"""Scaling of a plan: its speed-up over one accelerator, and its bottleneck."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schedulers.cluster import Cluster, Node, pool_size
from schedulers.cost.communication import takes_time
from schedulers.cost.prediction import predict
from schedulers.errors import PlanError
from schedulers.plan import Plan
from schedulers.profile import Profile
from schedulers.search.planner import plan as best_plan
from schedulers.workflow import Workflow

COMMUNICATION = "communication"
"""Name of communication among the components whose gains are compared."""


@dataclass(frozen=True)
class Scaling:
    """Prediction of a plan and of the best one for one accelerator with its share of the cluster's cores."""

    accelerators: int
    iteration_s: float
    one_iteration_s: float
    """Infinite where a component does not fit on one accelerator."""
    gains: Mapping[str, float]
    """For each component, and for communication, the relative gain of an iteration if that took half the time and all
    else stayed, the plan too. The largest gain is the bottleneck's."""
    pools: Mapping[str, str]

    @property
    def speed_up(self) -> float:
        return self.one_iteration_s / self.iteration_s

    @property
    def efficiency(self) -> float:
        """Speed-up per accelerator; 1: linear scaling."""
        return self.speed_up / self.accelerators

    @property
    def bottleneck(self) -> str:
        """`physics (cores)`, `policy (accelerators)`, `communication`."""
        name = max(self.gains, key=lambda name: self.gains[name])
        return f"{name} ({self.pools[name]})" if name in self.pools else name

    def __str__(self) -> str:
        if math.isinf(self.one_iteration_s):
            compared = f"{self.accelerators} accelerators; one has too little memory"
        else:
            compared = (
                f"{self.accelerators} accelerators are {self.speed_up:.3g} times as fast as one with its share of the "
                f"cores: an efficiency of {self.efficiency:.0%}"
            )
        most = sorted(self.gains, key=lambda name: -self.gains[name])[:2]
        halves = " and ".join(f"{self.gains[name]:.0%} with {name} in half the time" for name in most)
        return f"Predicted: {compared}. The bottleneck is {self.bottleneck}: an iteration would take less by {halves}."


def scaling(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster) -> Scaling:
    """Scaling of a plan; raises `PlanError` for a cluster without accelerators."""
    count = pool_size(cluster, "accelerators")
    if not count:
        raise PlanError("the cluster has no accelerators, so there is no speed-up over one of them")
    iteration_s = predict(plan, workflow, profile, cluster).iteration_s
    try:
        one = best_plan(workflow, profile, one_accelerator(cluster), ahead=plan.ahead > 0, explain=False)
    except PlanError:
        one_s = math.inf
    else:
        assert one.prediction is not None
        one_s = one.prediction.iteration_s
    pools = {name: profile.components[name].pool for name in workflow.names}
    return Scaling(count, iteration_s, one_s, gains(plan, workflow, profile, cluster), pools)


def one_accelerator(cluster: Cluster) -> Cluster:
    """One accelerator of the cluster with its share of the cores and of their memory."""
    count, cores = pool_size(cluster, "accelerators"), pool_size(cluster, "cores")
    node = min((node for node in cluster.nodes if node.accelerators), key=lambda node: node.accelerator_bytes)
    mine = max(cores // count, 1)
    memory = sum(node.memory_bytes for node in cluster.nodes) / cores * mine if cores else math.inf
    return Cluster((Node("node0", mine if cores else 0, 1, memory, node.accelerator_bytes),))


def gains(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster) -> dict[str, float]:
    """`Scaling.gains`; communication (also between nodes) only where it takes time."""
    known = predict(plan, workflow, profile, cluster)
    changed = {name: predict(plan, workflow, _halved(profile, name), cluster) for name in workflow.names}
    if takes_time(cluster):
        changed[COMMUNICATION] = predict(plan, workflow, profile, _doubled(cluster))
    whole = known.iteration_s or 1.0
    return {name: 1 - prediction.iteration_s / whole for name, prediction in changed.items()}


def _halved(profile: Profile, name: str) -> Profile:
    """The profile with one component in half the time, alone and as its share of times measured together."""
    component = profile.components[name]
    half = replace(component, points=tuple(replace(p, seconds=p.seconds / 2) for p in component.points))
    together = []
    for entry in profile.together:
        batch = entry.batch / entry.groups
        own = {other: profile.components[other].seconds(batch, entry.devices) for other in entry.components}
        share = own.get(name, 0.0) / (sum(own.values()) or 1.0)
        together.append(replace(entry, seconds=entry.seconds * (1 - share / 2)))
    return replace(profile, components={**profile.components, name: half}, together=tuple(together))


def _doubled(cluster: Cluster) -> Cluster:
    return replace(
        cluster,
        link_bytes_per_s=cluster.link_bytes_per_s * 2,
        device_link_bytes_per_s=cluster.device_link_bytes_per_s * 2,
        link_s=cluster.link_s / 2,
    )
