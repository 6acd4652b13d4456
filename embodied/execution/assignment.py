"""A plan on this machine: how many processes of each kind, on which cores, and who shares a process.

A plan speaks of devices; an assignment of physics workers, render workers, the policy worker and the learner. It
changes when and where they work, never what they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from embodied.config import Config
from embodied.errors import UserError, nearest
from embodied.workers.affinity import Affinity
from embodied.workers.devices import accelerators
from schedulers.plan import Phase, Placement, Plan

HOME = "here"
"""The name in plans of the node on which the command was typed."""
HERE = ""
"""Its id in assignments, which need none for it."""


@dataclass(frozen=True)
class Assignment:
    """Where the workers of one run, or of one of its tasks, are."""

    mode: str
    groups: int
    """Groups of environments that circulate (the farm's stages)."""
    physics: tuple[int | None, ...]
    """For each physics worker the core it is pinned to; None: wherever the system likes."""
    physics_nodes: tuple[str, ...]
    """For each physics worker the id of its node; '' is this one."""
    render: tuple[int | None, ...]
    """For each render worker its core; none: physics workers draw their own frames (fused)."""
    policy: Affinity
    learner: Affinity
    one_process: bool
    """Policy worker and learner share a process, and the policy itself."""
    ahead: int = 0
    """1: a rollout begins before the update that should precede it has ended."""
    unload: bool = False
    """Policy worker with renderers, and learner, leave the device's memory while the other works."""

    def __post_init__(self) -> None:
        if self.ahead and self.one_process:
            raise ValueError("a rollout that is ahead of the update needs a policy of its own, not the learner's")

    @property
    def cores(self) -> tuple[int | None, ...]:
        """Of the farm's workers, physics first."""
        return self.physics + self.render


def configured(config: Config, cores: tuple[int, ...], nodes: Mapping[str, str] | None = None) -> Assignment:
    """What `farm` and `learner` say when nothing is planned: everything shares all cores.

    `nodes` maps names and addresses of the cluster's nodes to their ids. Raises `UserError` for a node not in it.
    """
    inline = config.runtime.mode == "inline"
    farm = config.farm
    workers = farm.physics_workers or (1 if inline else len(cores))
    away = [_node(name, nodes or {}) for name in farm.nodes]
    homes = tuple(away[i % len(away)] if away else HERE for i in range(workers))
    pinned = farm.pin and not inline
    place = [cores[i % len(cores)] if pinned else None for i in range(workers + farm.render_workers)]
    return Assignment(
        mode="configured",
        groups=farm.groups,
        # Another machine's cores are dealt out there.
        physics=tuple(core if home == HERE else None for core, home in zip(place, homes, strict=False)),
        physics_nodes=homes,
        render=tuple(place[workers:]),
        policy=Affinity(),
        learner=Affinity((), config.optim.threads or len(cores)),
        one_process=False,
    )


def _node(name: str, nodes: Mapping[str, str]) -> str:
    if name not in nodes:
        known = nearest(name, sorted(nodes)) if nodes else "; there is no cluster: name it with --cluster HOST:PORT"
        raise UserError(f"farm.nodes: there is no node {name!r} in the cluster{known}")
    return nodes[name]


def assign(plan: Plan, config: Config, cores: tuple[int, ...], nodes: Mapping[str, str] | None = None) -> Assignment:
    """A valid plan on the given cores of this machine; `nodes` maps other nodes' names in the plan to their ids.

    A core that this machine lacks (a plan for a larger one, tried out here) falls on one that it has. Raises
    `UserError` for what the run's workers cannot do: a rollout in parts, simulating on accelerators, one policy on
    several of them or on another node, physics on a node that is no longer there.
    """
    others, gpus = nodes or {}, accelerators(config.policy.device)
    rolling = _phase(plan, "physics")
    physics, policy = _of(rolling, "physics"), _of(rolling, "policy")
    drawing = next((p for p in rolling.placements if "render" in p.components), physics)
    learning = _of(_phase(plan, "learner"), "learner")
    for component, placement in (("physics", physics), ("render", drawing)):
        if placement.pool != "cores":
            raise UserError(f"the plan puts {component} on {placement.pool}: its processes occupy cores")
    for component, placement in (("policy", policy), ("learner", learning), ("render", drawing)):
        away = sorted(placement.nodes - {HOME})
        if away and (component != "render" or drawing is not physics):
            raise UserError(f"the plan puts {component} on {away[0]}: it works on the node where the command is typed")
    places = [(_node_of(s.node, others), s.first + i) for s in physics.devices for i in range(s.count)]
    takes_turns = plan.groups == 1 or policy is not physics
    acting = _affinity("policy", policy, cores, gpus)
    threads = config.optim.threads
    updating = _affinity("learner", learning, cores, gpus, threads or len(cores))
    return Assignment(
        mode=plan.mode,
        groups=plan.groups,
        physics=tuple(cores[core % len(cores)] if not node else core for node, core in places),
        physics_nodes=tuple(node for node, _ in places),
        render=() if drawing is physics else tuple(_cores(drawing, cores)),
        # With several groups on the same cores the system deals out the time: one thread that may run anywhere.
        policy=acting if takes_turns else Affinity(device=acting.device),
        learner=replace(updating, threads=threads) if threads else updating,
        one_process=not plan.ahead and (learning is policy or _within(acting, updating)),
        ahead=plan.ahead,
        unload=plan.unload,
    )


def _affinity(
    name: str, placement: Placement, cores: tuple[int, ...], gpus: Sequence[torch.device], threads: int = 1
) -> Affinity:
    """A worker on the placement's cores, with a thread on each; or on its accelerator, with so many threads of the
    host wherever the system likes. Raises `UserError` for accelerators that it cannot compute on."""
    if placement.pool == "cores":
        own = _cores(placement, cores)
        return Affinity(own, len(own), "cpu" if gpus else None)
    first = placement.devices[0].first
    if placement.count > 1:
        raise UserError(f"the plan gives {name} {placement.count} accelerators: it is one process, and computes on one")
    if first >= len(gpus):
        there = ", ".join(map(str, gpus)) or "none"
        raise UserError(f"the plan puts {name} on accelerator {first}; policy.device leaves {there}")
    return Affinity((), threads, str(gpus[first]))


def _node_of(name: str, others: Mapping[str, str]) -> str:
    """The id of a node that a plan names. Its plan was valid: a node that is not known has left since."""
    if name != HOME and name not in others:
        raise UserError(
            f"the node {name} that the plan gives to physics has left the cluster: bring it back with `ray start "
            "--address HOST:PORT`, or start again without it"
        )
    return HERE if name == HOME else others[name]


def _within(one: Affinity, other: Affinity) -> bool:
    """Whether a worker's place is part of another's: then they take turns on it, and may share a process."""
    return one.device == other.device and set(one.cores) <= set(other.cores)


def _phase(plan: Plan, component: str) -> Phase:
    for phase in plan.phases:
        if any(component in placement.components for placement in phase.placements):
            return phase
    raise UserError(f"the plan places no {component}")


def _of(phase: Phase, component: str) -> Placement:
    for placement in phase.placements:
        if component in placement.components:
            return placement
    raise UserError(f"the plan places {component} in another phase than the rest of the rollout")


def _cores(placement: Placement, cores: tuple[int, ...]) -> tuple[int, ...]:
    """This machine's cores for a placement on cores."""
    wanted = [s.first + i for s in placement.devices for i in range(s.count)]
    return tuple(dict.fromkeys(cores[core % len(cores)] for core in wanted))
