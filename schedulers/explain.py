"""A plan in words: why this mode, what limits it, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from schedulers.cluster import Cluster, Node
from schedulers.errors import PlanError
from schedulers.explain_tasks import in_words, tasks_explained
from schedulers.layout import ranges_text
from schedulers.memory import devices_of, share_bytes
from schedulers.plan import MODES, Mode, Plan
from schedulers.prediction import phase_costs, problem_of
from schedulers.profile import Pool, Profile
from schedulers.times import POOLS, Problem, held_bytes
from schedulers.workflow import Workflow

WORTH_A_SENTENCE = 0.01
"""Relative gain below which more hardware is not worth mentioning."""


def explained(
    plan: Plan,
    found: Mapping[Mode, Plan],
    others: Sequence[Plan],
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    units: Mapping[Pool, int],
    again: Callable[[Cluster], Plan],
) -> tuple[str, ...]:
    """Sentences for `Plan.why`. `found` holds the best plan of each mode, whose devices come in `units`; `others` all
    that were considered; `again` plans for another cluster."""
    problem = problem_of(plan, workflow, profile, cluster)
    return (
        _seconds(plan),
        *_phases(plan),
        *tasks_explained(plan, problem),
        *_modes(plan, found),
        *_pools(plan, others, profile),
        *_nodes(plan, others, workflow, cluster),
        *_memory(plan, problem),
        *_weights(plan, problem),
        _bottleneck(plan, problem),
        _switches(plan),
        *_communication(plan),
        *_gap(plan, units),
        _help(plan, cluster, problem, again),
    )


def _seconds(plan: Plan) -> str:
    assert plan.prediction is not None
    groups = ""
    if len(plan.groups) == 1 and plan.groups[0] > 1:
        groups = f", {plan.groups[0]} groups of environments in the loop"
    ahead = ", one step ahead" if plan.ahead else ""
    return f"{plan.mode.capitalize()}: {in_words(plan.prediction.iteration_s)} per iteration{groups}{ahead}."


def _phases(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    result = []
    for number, (phase, seconds) in enumerate(zip(plan.phases, plan.prediction.phases_s, strict=True), start=1):
        places = "; ".join(f"{', '.join(p.components)} on {ranges_text(p.devices)}" for p in phase.placements)
        result.append(f"Phase {number} ({in_words(seconds)}): {places}.")
    return result


def _modes(plan: Plan, found: Mapping[Mode, Plan]) -> list[str]:
    assert plan.prediction is not None
    result = []
    for mode in MODES:
        other = found.get(mode)
        if mode == plan.mode:
            continue
        if other is None or other.prediction is None:
            result.append(f"There is no {mode} plan on these devices.")
            continue
        result.append(f"The best {mode} plan would take {_compared(_predicted(other), plan)}.")
    return result


def _pools(plan: Plan, others: Sequence[Plan], profile: Profile) -> list[str]:
    """Of components that were measured on both pools, what the other one would cost."""
    result = []
    for name, pool in plan.pools.items():
        component = profile.components[name].on(pool)
        if component.elsewhere is None:
            continue
        other = component.elsewhere.pool
        seconds = min((_predicted(each) for each in others if each.pools.get(name) == other), default=math.inf)
        if math.isinf(seconds):
            result.append(f"No plan was found with {name} on {other}.")
        else:
            result.append(f"With {name} on {other} the best plan found would take {_compared(seconds, plan)}.")
    return result


def _nodes(plan: Plan, others: Sequence[Plan], workflow: Workflow, cluster: Cluster) -> list[str]:
    """What the nodes away from home are used for, or why they are not."""
    away = [node.name for node in cluster.nodes if node.name != cluster.home]
    if cluster.home is None or not away:
        return []
    names = _listed(away)
    if _leaves(plan, cluster):
        stay = min((_predicted(other) for other in others if not _leaves(other, cluster)), default=math.inf)
        if math.isinf(stay):
            return [f"On {cluster.home} alone there is no such plan."]
        return [f"On {cluster.home} alone an iteration would take {_compared(stay, plan)}."]
    travelling = ", ".join(name for name in workflow.names if name in workflow.travelling)
    if not travelling:
        return [f"Nothing is on {names}: no component may leave {cluster.home}."]
    only = f"Nothing is on {names}. Only {travelling} may leave {cluster.home}, and "
    leave = min((_predicted(other) for other in others if _leaves(other, cluster)), default=math.inf)
    if math.isinf(leave):
        messages = f": a message to another node takes {in_words(cluster.link_s)}" if cluster.link_s else ""
        return [only + f"no plan is faster for it{messages}."]
    return [only + f"the best plan in which it does would take {_compared(leave, plan)}."]


def _memory(plan: Plan, problem: Problem) -> list[str]:
    """Which nodes are idle although there is what could be there, had they more memory."""
    used = {part.node for phase in plan.phases for placement in phase.placements for part in placement.devices}
    result = []
    for phase in plan.phases:
        cost = phase_costs(plan, phase, problem)
        for names, count in zip(cost.shape.placements, cost.counts, strict=True):
            pool = problem.pools[names[0]]
            idle = [node for node in problem.cluster.nodes if node.name not in used and devices_of(node, pool)]
            need = held_bytes(problem, cost.shape, names, count)
            poor = [node for node in idle if share_bytes(node, pool) < need]
            if poor and not problem.bound(names):
                most = max(share_bytes(node, pool) for node in poor)
                result.append(
                    f"For want of memory {', '.join(names)} cannot be on {_listed([node.name for node in poor])}: "
                    f"{need / 1e9:.3g} GB for each of its {pool}, where there are {most / 1e9:.3g} GB."
                )
    return result


def _weights(plan: Plan, problem: Problem) -> list[str]:
    """On how many accelerators what decides computes with the weights of what is trained."""
    shared = problem.shared
    hosts = shared.hosts(plan) if shared else ()
    guests = len(hosts) - hosts.count(None)
    if shared is None or not guests:
        return []
    return [
        f"On {guests} of {shared.decider}'s {len(hosts)} accelerators it works in the processes of {shared.trainer}, "
        "which wait then, with one copy of the weights."
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


def _leaves(plan: Plan, cluster: Cluster) -> bool:
    return any(placement.nodes != {cluster.home} for phase in plan.phases for placement in phase.placements)


def _predicted(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s


def _compared(seconds: float, plan: Plan) -> str:
    ratio = seconds / _predicted(plan) if _predicted(plan) else math.inf
    # The choice counts on calls that vary; predictions are of constant times.
    but = ", but longer when single calls vary as measured" if ratio < 0.995 else ""
    times = f"{ratio:.2f} times as long" if abs(ratio - 1) >= 0.005 else "as long"
    return f"{times} ({in_words(seconds)}){but}"


def _bottleneck(plan: Plan, problem: Problem) -> str:
    """The component that devices spend most of the iteration on, and whether its phase waits for it alone."""
    assert plan.prediction is not None
    busy = plan.prediction.components_s
    name = max(busy, key=lambda name: busy[name])
    share = busy[name] / plan.prediction.iteration_s if plan.prediction.iteration_s else 0.0
    text = f"The most time goes to {name}: its devices work on it {share:.0%} of the iteration"
    for phase in plan.phases:
        cost = phase_costs(plan, phase, problem)
        if len(cost.shape.loops) != 1:
            continue
        loads: dict[int, float] = {}
        for visit, seconds in zip(cost.shape.visits, cost.visits, strict=True):
            loads[visit.placement] = loads.get(visit.placement, 0.0) + seconds
        if len(loads) < 2:
            continue
        groups, ways = plan.groups_of(0), cost.shape.loops[0].ways
        total = sum(loads.values()) + sum(ways)
        slowest = max(loads, key=lambda i: loads[i])
        if max(ways, default=0.0) > loads[slowest] and max(ways) * groups >= total:
            text += "; the loop waits for the link between nodes"
        elif loads[slowest] * groups >= total:
            text += f"; the loop waits for {', '.join(cost.shape.placements[slowest])}"
        else:
            text += "; the loop is as long as a group's own way round"
            if ways:
                text += f", {sum(ways) / total:.0%} of it between nodes"
    return text + "."


def _switches(plan: Plan) -> str:
    assert plan.prediction is not None
    if plan.prediction.switch_s > 0:
        return f"Components do not fit together: unloading and loading costs {in_words(plan.prediction.switch_s)}."
    if plan.unload:
        return "Components do not fit together and are unloaded between phases; no time was measured for that."
    return "Everything stays loaded: switches cost nothing."


def _communication(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    seconds = plan.prediction.communication_s or 0.0
    share = seconds / plan.prediction.iteration_s if plan.prediction.iteration_s else 0.0
    return [f"What instances send one another takes {in_words(seconds)} ({share:.1%})."] if seconds else []


def _gap(plan: Plan, units: Mapping[Pool, int]) -> list[str]:
    assert plan.prediction is not None
    pools = {placement.pool for phase in plan.phases for placement in phase.placements}
    coarse = " and ".join(f"{units[pool]} {pool}" for pool in POOLS if pool in pools and units[pool] > 1)
    whole = f" with devices in units of {coarse}" if coarse else ""
    gap = 1 - plan.prediction.lower_bound_s / plan.prediction.iteration_s if plan.prediction.iteration_s else 0.0
    if gap < 1e-9:
        return [f"No plan{whole} is faster (certified)."]
    most = f"at most {gap:.1%}" if gap >= 0.0005 else "less than 0.1%"
    return [f"A faster plan{whole} could exist, by {most}."]


def _help(plan: Plan, cluster: Cluster, problem: Problem, again: Callable[[Cluster], Plan]) -> str:
    """What one more device of each pool would gain, found by planning with it."""
    assert plan.prediction is not None
    gains: dict[str, float] = {}
    for what, larger in _larger(cluster, set(problem.pools.values())).items():
        try:
            better = again(larger).prediction
        except PlanError:
            continue
        assert better is not None
        gains[what] = 1 - better.iteration_s / plan.prediction.iteration_s
    if not gains or max(gains.values()) < WORTH_A_SENTENCE:
        tried = " or ".join(gains) or "more devices"
        return f"{tried[:1].upper()}{tried[1:]} would gain less than {WORTH_A_SENTENCE:.0%}."
    best = max(gains, key=lambda what: gains[what])
    others = "".join(f", {what} {max(gain, 0.0):.0%}" for what, gain in gains.items() if what != best)
    return f"{best[:1].upper()}{best[1:]} would help most: an iteration would take {gains[best]:.0%} less{others}."


def _larger(cluster: Cluster, pools: set[Pool]) -> dict[str, Cluster]:
    """One more device of each pool used; in larger units than devices, one more node."""
    if len(cluster.nodes) > 1:
        extra = replace(cluster.nodes[-1], name=f"{cluster.nodes[-1].name}+1")
        return {"one more node": replace(cluster, nodes=(*cluster.nodes, extra))}
    node: Node = cluster.nodes[0]
    names = {"cores": "one more core", "accelerators": "one more accelerator"}
    result = {}
    for pool in POOLS:
        if pool in pools and devices_of(node, pool):
            grown = replace(node, **{pool: devices_of(node, pool) + 1})  # type: ignore[arg-type]
            result[names[pool]] = replace(cluster, nodes=(grown,))
    return result
