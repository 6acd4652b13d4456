"""An assignment: a plan on this machine. It says how many processes of each kind run, on which cores, and which
components share a process.

A plan names devices. An assignment names physics workers, render workers, and the affinity of each other component. It
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
from embodied.workflows.recipes import recipe_of
from embodied.workflows.sizes import name_in_task
from schedulers.plan import Phase, Placement, Plan

HOME = "here"
"""The name in plans of the node on which the command was typed."""
HERE = ""
"""Its id in assignments, which need none for it."""


@dataclass(frozen=True)
class FarmAssignment:
    """Where the simulator's workers of one task are."""

    groups: int
    """Groups of environments that circulate."""
    physics: tuple[int | None, ...]
    """For each physics worker the core it is pinned to; None: wherever the system likes."""
    physics_nodes: tuple[str, ...]
    """For each physics worker the id of its node; '' is this one."""
    render: tuple[int | None, ...] = ()
    """For each render worker its core; none: physics workers draw their own frames (fused)."""

    @property
    def cores(self) -> tuple[int | None, ...]:
        """Of the farm's workers, physics first."""
        return self.physics + self.render


@dataclass(frozen=True)
class Assignment:
    """Where the workers of a run are."""

    mode: str
    farms: tuple[FarmAssignment, ...]
    """Of each task."""
    components: Mapping[str, tuple[Affinity, ...]]
    """Where the instances of each component that is no simulator compute, by name: policy replicas, learner ranks."""
    one_process: bool
    """Policy workers and learner share processes, rank by rank, and the policy itself."""
    ahead: int = 0
    """1: a rollout begins before the update that should precede it has ended."""
    unload: bool = False
    """Policy worker with renderers, and learner, leave the device's memory while the other works."""
    part: int = 0
    """Items (episodes) that are handed on together where they may flow in parts; 0: an episode of every environment."""

    def __post_init__(self) -> None:
        if self.ahead and self.one_process:
            raise ValueError("a rollout that is ahead of the update needs a policy of its own, not the learner's")

    def first_of(self, component: str) -> Affinity:
        """Where the component's first instance computes."""
        return self.components[component][0]


def configured(config: Config, cores: tuple[int, ...], nodes: Mapping[str, str] | None = None) -> Assignment:
    """What `farm` and `optim` say when nothing is planned: everything shares all cores.

    `nodes` maps names and addresses of the cluster's nodes to their ids. Raises `UserError` for a node not in it.
    """
    recipe = recipe_of(config)
    learner = Affinity((), config.optim.threads or max(len(cores) // config.optim.ranks, 1))
    placed: dict[str, tuple[Affinity, ...]] = {component.name: (learner,) for component in recipe.after_rollout}
    # One process cannot be several ranks of torch's process groups, and one rank computes what several do.
    placed[recipe.after_rollout[-1].name] = (learner,) * (1 if config.runtime.mode == "inline" else config.optim.ranks)
    placed[recipe.loop[-1]] = (Affinity(),) * config.policy.replicas
    farm = _configured_farm(config, cores, nodes or {})
    return Assignment(
        mode="configured",
        farms=(farm,) * (1 + len(config.extra_tasks)),
        components=placed,
        one_process=False,
    )


def _configured_farm(config: Config, cores: tuple[int, ...], nodes: Mapping[str, str]) -> FarmAssignment:
    inline = config.runtime.mode == "inline"
    farm = config.farm
    workers = farm.physics_workers or (1 if inline else len(cores))
    away = [_node(name, nodes) for name in farm.nodes]
    homes = tuple(away[i % len(away)] if away else HERE for i in range(workers))
    pinned = farm.pin and not inline
    place = [cores[i % len(cores)] if pinned else None for i in range(workers + farm.render_workers)]
    # Another machine's cores are dealt out there.
    physics = tuple(core if home == HERE else None for core, home in zip(place, homes, strict=False))
    return FarmAssignment(farm.groups, physics, homes, tuple(place[workers:]))


def _node(name: str, nodes: Mapping[str, str]) -> str:
    if name not in nodes:
        known = nearest(name, sorted(nodes)) if nodes else "; there is no cluster: name it with --cluster HOST:PORT"
        raise UserError(f"farm.nodes: there is no node {name!r} in the cluster{known}")
    return nodes[name]


def assign(plan: Plan, config: Config, cores: tuple[int, ...], nodes: Mapping[str, str] | None = None) -> Assignment:
    """A valid plan on the given cores of this machine; `nodes` maps other nodes' names in the plan to their ids.

    A core that this machine lacks (a plan for a larger one, tried out here) falls on one that it has. Raises
    `UserError` for what the run's workers cannot do: simulating on accelerators, one policy on several of them or on
    another node, physics on a node that is no longer there.
    """
    recipe, gpus = recipe_of(config), accelerators(config.policy.device)
    rolling = _phase(plan, recipe.loop[0])
    decider, trainer = recipe.loop[-1], recipe.after_rollout[-1].name
    threads = config.optim.threads
    placements = {decider: _of(rolling, decider)}
    placements |= {c.name: _of(_phase(plan, c.name), c.name) for c in recipe.after_rollout}
    for name, placement in placements.items():
        _require_home(name, placement)
    found = {
        name: _affinity(name, placement, cores, gpus, 1 if name == decider else threads or len(cores))
        for name, placement in placements.items()
    }
    acting, updating = found[decider], found[trainer]
    farms = tuple(_farm_of(plan, rolling, number, cores, nodes or {}) for number in range(1 + len(config.extra_tasks)))
    simulating = {id(_of(rolling, name_in_task(recipe.loop[0], number))) for number in range(len(farms))}
    takes_turns = all(farm.groups == 1 for farm in farms) or id(placements[decider]) not in simulating
    # With several groups on the same cores the system deals out the time: one thread that may run anywhere.
    found[decider] = acting if takes_turns else Affinity(device=acting.device)
    if threads:
        found |= {name: replace(found[name], threads=threads) for name in found if name != decider}
    together = placements[trainer] is placements[decider] or _within(acting, updating)
    learning = _phase(plan, trainer)
    return Assignment(
        plan.mode,
        farms,
        {name: (affinity,) for name, affinity in found.items()},
        not plan.ahead and together,
        plan.ahead,
        plan.unload,
        learning.micro_batch,
    )


def _farm_of(
    plan: Plan, rolling: Phase, number: int, cores: tuple[int, ...], nodes: Mapping[str, str]
) -> FarmAssignment:
    """Where the plan has the simulators of one task."""
    physics = _of(rolling, name_in_task("physics", number))
    render = name_in_task("render", number)
    drawing = next((p for p in rolling.placements if render in p.components), physics)
    for component, placement in (("physics", physics), ("render", drawing)):
        if placement.pool != "cores":
            raise UserError(f"the plan puts {component} on {placement.pool}: its processes occupy cores")
    if drawing is not physics:
        _require_home("render", drawing)
    places = [(_node_of(s.node, nodes), s.first + i) for s in physics.devices for i in range(s.count)]
    return FarmAssignment(
        plan.groups_of(number),
        tuple(cores[core % len(cores)] if not node else core for node, core in places),
        tuple(node for node, _ in places),
        () if drawing is physics else tuple(_cores(drawing, cores)),
    )


def _require_home(name: str, placement: Placement) -> None:
    away = sorted(placement.nodes - {HOME})
    if away:
        raise UserError(f"the plan puts {name} on {away[0]}: it works on the node where the command is typed")


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
