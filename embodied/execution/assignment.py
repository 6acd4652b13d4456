"""An assignment: a plan on this machine. It says how many processes of each kind run, on which cores, and which
components share a process.

A plan names devices. An assignment names physics workers, render workers, and the affinity of each other component. It
changes when and where they work, never what they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from embodied.config.schema import Config
from embodied.devices import Affinity, accelerators, available_threads
from embodied.errors import UserError, nearest
from embodied.rollout.rollout_loop import rows_for_finals
from embodied.runtime.api import NodeInfo
from embodied.workflows.run_spec import RunSpec, task_spec
from embodied.workflows.sizes import name_in_task, physics_workers_of
from policies.registry import observations_of
from schedulers.plan import HERE as HOME
from schedulers.plan import DeviceRange, Phase, Placement, Plan
from sim_farm.contract import TaskInfo
from sim_farm.episodes import Episodes
from sim_farm.observation_history import FrameRows, ObservationHistory
from sim_farm.render_devices import RenderDevice
from sim_farm.shared_memory.slot_layout import FarmSpec

HERE = ""
"""The id in assignments of the node that plans call `HOME`: they need none for it."""


@dataclass(frozen=True)
class FarmAssignment:
    """Placement of the simulator's workers of one task."""

    groups: int
    """Groups of environments: one is simulated while another is inferred."""
    physics: tuple[int | None, ...]
    """Core of each physics worker; None: it is not pinned."""
    physics_nodes: tuple[str, ...]
    """Id of the node of each physics worker; '' is this one."""
    render: tuple[int | None, ...] = ()
    """Core of each render worker; empty: physics workers draw their own frames (fused)."""
    devices: tuple[RenderDevice, ...] = ()
    """Render devices, dealt out in turn to the workers that draw: GPUs by CUDA's numbers, or `cpu` (software); none:
    what the driver gives first."""

    @property
    def cores(self) -> tuple[int | None, ...]:
        """Cores of the farm's workers, physics first."""
        return self.physics + self.render


@dataclass(frozen=True)
class Assignment:
    """Placement of all workers of a run.

    A plan has `Placement`s of components on ranges of devices. An assignment has a `FarmAssignment` for each task and
    an `Affinity` (cores, threads, device, node) for each other process.
    """

    mode: str
    farms: tuple[FarmAssignment, ...]
    """One for each task."""
    components: Mapping[str, tuple[Affinity, ...]]
    """Affinities of the instances (policy replicas, learner ranks) of each component that is no simulator, by name: one
    of each where a run is inline."""
    hosts: tuple[int | None, ...] = ()
    """Rank of the learner whose process and policy each policy worker shares; None, or none named: the worker has both
    of its own."""
    ahead: int = 0
    """1: a rollout begins before the update that should precede it has ended."""
    unload: bool = False
    """Policy worker with renderers, and learner, leave the device's memory while the other works."""
    part: int = 0
    """Items (episodes) that are handed on together where they may flow in parts; 0: an episode of every environment."""

    def __post_init__(self) -> None:
        if self.ahead and self.guests:
            raise ValueError("a rollout that is ahead of the update needs a policy of its own, not the learner's")

    @property
    def guests(self) -> tuple[int, ...]:
        """Policy workers that share a rank's process."""
        return tuple(replica for replica, host in enumerate(self.hosts) if host is not None)

    def apart(self, replicas: int) -> tuple[int, ...]:
        """Policy workers that run in their own process, out of `replicas`."""
        return tuple(replica for replica in range(replicas) if self.host(replica) is None)

    def host(self, replica: int) -> int | None:
        """Rank of the learner whose process and policy that policy worker shares; None: it has both of its own."""
        return self.hosts[replica] if self.hosts else None

    def first_of(self, component: str) -> Affinity:
        """Affinity of the component's first instance."""
        return self.components[component][0]


def configured(run: RunSpec, cores: tuple[int, ...], nodes: Mapping[str, str] | None = None) -> Assignment:
    """The assignment of a run without a plan, by `farm` and `optim`: everything shares all cores.

    `nodes` maps names and addresses of the cluster's nodes to their ids. Raises `UserError` for a node not in it.
    """
    config, recipe = run.config, run.recipe
    shared = Affinity((), max(min(len(cores), available_threads()) // config.optim.ranks, 1))
    placed: dict[str, tuple[Affinity, ...]] = {component.name: (shared,) for component in recipe.after_rollout}
    # One process cannot be several ranks of torch's process groups, and one rank computes what several do.
    placed[recipe.learner.name] = _on_gpus(config, shared, 1 if run.inline else config.optim.ranks)
    placed[recipe.policy.name] = _on_gpus(config, Affinity(), 1 if run.inline else config.policy.replicas)
    farm = configured_farm(config, cores, nodes or {})
    return Assignment(mode="configured", farms=(farm,) * len(run.tasks), components=placed)


def imitation_places(config: Config, cores: tuple[int, ...], nodes: Sequence[NodeInfo]) -> tuple[Affinity, ...]:
    """Places of the ranks that learn from demonstrations: the GPUs of this machine, then those of the cluster's other
    machines, one rank each while they last. Without GPUs the machines, in turn.

    `nodes` are the cluster's machines, this one first; empty: there is this one alone.
    """
    others = [node for node in nodes if not node.is_here]
    gpus = accelerators(config.policy.device)
    if gpus:
        away = [(node.id, f"cuda:{number}") for node in others for number in range(node.accelerators)]
        places = [(HERE, str(gpu)) for gpu in gpus] + away
    else:
        places = [(HERE, "cpu"), *((node.id, "cpu") for node in others)]
    chosen = [places[rank % len(places)] for rank in range(config.optim.ranks)]
    sizes = {HERE: min(len(cores), available_threads()), **{node.id: node.cores for node in others}}
    on = [node for node, _ in chosen]
    return tuple(Affinity((), max(sizes[node] // on.count(node), 1), device, node) for node, device in chosen)


def _on_gpus(config: Config, place: Affinity, count: int) -> tuple[Affinity, ...]:
    """Places of the `count` instances. Several are dealt out over the GPUs that `policy.device` allows, if these are
    several."""
    gpus = accelerators(config.policy.device)
    if count == 1 or len(gpus) < 2:
        return (place,) * count
    return tuple(replace(place, device=str(gpus[number % len(gpus)])) for number in range(count))


def configured_farm(config: Config, cores: tuple[int, ...], nodes: Mapping[str, str]) -> FarmAssignment:
    """The simulator's workers of a task without a plan, by `farm`. Raises as `configured` does."""
    inline = config.runtime.mode == "inline"
    farm = config.farm
    workers = physics_workers_of(config, len(cores))
    away = [_node(name, nodes) for name in farm.nodes]
    homes = tuple(away[i % len(away)] if away else HERE for i in range(workers))
    place = [None if inline else cores[i % len(cores)] for i in range(workers + farm.render_workers)]
    # Another machine's cores are dealt out there.
    physics = tuple(core if home == HERE else None for core, home in zip(place, homes, strict=False))
    return FarmAssignment(farm.groups, physics, homes, tuple(place[workers:]), configured_devices(config))


def configured_devices(config: Config) -> tuple[RenderDevice, ...]:
    """Render devices by `farm.devices`."""
    return ("cpu",) if config.farm.devices == "cpu" else config.farm.devices


def _node(name: str, nodes: Mapping[str, str]) -> str:
    if name not in nodes:
        known = nearest(name, sorted(nodes)) if nodes else "; there is no cluster (--runtime.address HOST:PORT)"
        raise UserError(f"farm.nodes: there is no node {name!r} in the cluster{known}")
    return nodes[name]


def assign(plan: Plan, run: RunSpec, cores: tuple[int, ...], nodes: Mapping[str, str] | None = None) -> Assignment:
    """A valid plan on the given cores of this machine; `nodes` maps other nodes' names in the plan to their ids.

    Every instance of policy and learner that the plan names (`Placement.instances`), of whatever node, is one of the
    assignment, in the plan's order. Where `policy.device` is `cpu`, accelerators that the plan names are stood in for
    by processes on the CPU of their nodes, of one thread each: so a plan for machines with accelerators is tried out
    on some without. A core that this machine lacks (a plan for a larger one, tried out here) falls on one that it has.
    A group of the plan is cut into as many as the policy has replicas, as far as environments divide among the physics
    workers: each of them decides for a share. A replica that the plan has where a rank is, or on part of its cores,
    acts in that rank's process while the rank waits, unless the plan runs ahead.

    Raises `UserError` for what the run's workers cannot do (stepping on accelerators; a component that trajectories
    pass through on several accelerators or another node), and for nodes that are not in the cluster.
    """
    config, recipe, nodes = run.config, run.recipe, nodes or {}
    _check_nodes(plan, nodes)
    rolling = _phase(plan, recipe.loop[0])
    policy, learner = recipe.policy.name, recipe.learner.name
    placements = {policy: _of(rolling, policy)}
    placements |= {c.name: _of(_phase(plan, c.name), c.name) for c in recipe.after_rollout}
    for name in placements.keys() - {policy, learner}:
        _require_one(name, placements[name])
    machine = _Machine(config, cores, nodes)
    found = {name: machine.affinities(name, place, name == policy) for name, place in placements.items()}
    gpus, devices = accelerators(config.policy.device), configured_devices(config)
    farms = tuple(
        _shared_out(_farm_of(plan, rolling, number, cores, gpus, devices, nodes), task.env.num_envs, len(found[policy]))
        for number, task in enumerate(run.tasks)
    )
    simulating = {id(_of(rolling, name_in_task(recipe.loop[0], number))) for number in range(len(farms))}
    takes_turns = all(farm.groups == 1 for farm in farms) or id(placements[policy]) not in simulating
    if not takes_turns:
        # With several groups on the same cores the system deals out the time: one thread that may run anywhere.
        found[policy] = tuple(Affinity(device=one.device, node=one.node) for one in found[policy])
    hosts = () if plan.ahead else placements[policy].hosts(placements[learner])
    if run.inline:
        found = {name: places[:1] for name, places in found.items()}
        hosts = (0,) if any(host is not None for host in hosts) else hosts[:1]
    return Assignment(
        plan.mode,
        farms,
        found,
        hosts,
        plan.ahead,
        plan.unload,
        _phase(plan, learner).micro_batch,
    )


def _shared_out(farm: FarmAssignment, environments: int, replicas: int) -> FarmAssignment:
    """The farm with each group cut into one for each replica, or into as many as its workers can step evenly."""
    each = environments // (len(farm.physics) * farm.groups)
    return replace(farm, groups=farm.groups * max(n for n in range(1, replicas + 1) if each % n == 0))


def _farm_of(
    plan: Plan,
    rolling: Phase,
    number: int,
    cores: tuple[int, ...],
    gpus: Sequence[torch.device],
    devices: tuple[RenderDevice, ...],
    nodes: Mapping[str, str],
) -> FarmAssignment:
    """Assignment of one task's simulators by the plan. Without a GPU to choose from (`policy.device` is the CPU: a
    plan for a larger machine, tried out here) workers draw on `devices`, also those on accelerators."""
    physics = _of(rolling, name_in_task("physics", number))
    render = name_in_task("render", number)
    drawing = next((p for p in rolling.placements if render in p.components), physics)
    if physics.pool != "cores":
        raise UserError(f"the plan puts physics on {physics.pool}: its processes occupy cores")
    if drawing is not physics:
        _require_home("render", drawing)
    places = [(_node_of(s.node, nodes), s.first + i) for s in physics.devices for i in range(s.count)]
    return FarmAssignment(
        plan.groups_of(number),
        tuple(cores[core % len(cores)] if not node else core for node, core in places),
        tuple(node for node, _ in places),
        () if drawing is physics else _render_cores(drawing, cores),
        _render_devices(drawing, gpus) if gpus else devices,
    )


def _render_cores(drawing: Placement, cores: tuple[int, ...]) -> tuple[int | None, ...]:
    """A render worker on each of the placement's devices; beside an accelerator it runs wherever the system likes."""
    return _cores(drawing, cores) if drawing.pool == "cores" else (None,) * drawing.count


def _render_devices(drawing: Placement, gpus: Sequence[torch.device]) -> tuple[RenderDevice, ...]:
    """Devices of the workers that draw: the placement's accelerators, or on cores software.

    Raises `UserError` for missing accelerators.
    """
    if drawing.pool == "cores":
        return ("cpu",)
    wanted = [part.first + i for part in drawing.devices for i in range(part.count)]
    if max(wanted) >= len(gpus):
        there = ", ".join(map(str, gpus))
        raise UserError(f"the plan puts render on accelerator {max(wanted)}; policy.device leaves {there}")
    return tuple(gpus[number].index for number in wanted)


def _require_home(name: str, placement: Placement) -> None:
    away = sorted(placement.nodes - {HOME})
    if away:
        raise UserError(f"the plan puts {name} on {away[0]}: it works on the node where the command is typed")


def _require_one(name: str, placement: Placement) -> None:
    _require_home(name, placement)
    if len(placement.instances) > 1:
        raise UserError(f"the plan gives {name} {placement.count} accelerators: it is one process, and computes on one")


@dataclass(frozen=True)
class _Machine:
    """The cluster that a plan's instances are placed on."""

    config: Config
    cores: tuple[int, ...]
    """Cores of this machine."""
    nodes: Mapping[str, str]

    def affinities(self, name: str, placement: Placement, decides: bool) -> tuple[Affinity, ...]:
        """Affinities of the component's instances. On an accelerator the policy has one of the host's threads; others
        share them out."""
        on = [devices[0].node for devices in placement.instances]
        shares = [1 if decides else max(len(self.cores) // on.count(node), 1) for node in on]
        pairs = zip(placement.instances, shares, strict=True)
        return tuple(self._affinity(name, devices, share) for devices, share in pairs)

    def _affinity(self, name: str, devices: tuple[DeviceRange, ...], share: int) -> Affinity:
        """A worker on its cores, with a thread on each; or on its accelerator, or what stands in for that, with threads
        of the host wherever the system likes. Raises `UserError` for missing accelerators."""
        node, first = _node_of(devices[0].node, self.nodes), devices[0].first
        gpus = accelerators(self.config.policy.device)
        if devices[0].pool == "cores":
            numbers = [part.first + i for part in devices for i in range(part.count)]
            own = tuple(numbers) if node else _here(numbers, self.cores)
            return Affinity(own, len(own), "cpu" if gpus or node else None, node)
        if self.config.policy.device == "cpu":
            return Affinity((), 1, "cpu", node)
        if node:
            return Affinity((), share, f"cuda:{first}", node)
        if first >= len(gpus):
            there = ", ".join(map(str, gpus)) or "none"
            raise UserError(
                f"the plan puts {name} on accelerator {first}; policy.device leaves {there} (cpu would have processes "
                "on the CPU stand in for accelerators)"
            )
        return Affinity((), share, str(gpus[first]))


def _check_nodes(plan: Plan, nodes: Mapping[str, str]) -> None:
    """Raise `UserError` that names all nodes of a plan that the cluster does not have. The plan was valid: they have
    left since, or the plan is for another cluster."""
    named = {node for phase in plan.phases for placement in phase.placements for node in placement.nodes}
    gone = sorted(named - {HOME, *nodes})
    if gone:
        subject = f"nodes {', '.join(gone)} of the plan have" if len(gone) > 1 else f"node {gone[0]} of the plan has"
        raise UserError(
            f"the {subject} left the cluster, or never joined it: bring it there with `ray start --address HOST:PORT "
            "--node-name NAME`, or start again with a plan without it"
        )


def _node_of(name: str, others: Mapping[str, str]) -> str:
    """The id of a node that a plan names."""
    return HERE if name == HOME else others[name]


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
    return _here([s.first + i for s in placement.devices for i in range(s.count)], cores)


def _here(wanted: Sequence[int], cores: tuple[int, ...]) -> tuple[int, ...]:
    """This machine's cores for some that a plan numbers."""
    return tuple(dict.fromkeys(cores[core % len(cores)] for core in wanted))


# --- The specification of a run's farm under an assignment, and the number of rows of its trajectory memory.


def farm_spec(
    config: Config, episodes: Episodes, farm: FarmAssignment, num_envs: int | None = None, finals: str = "never"
) -> FarmSpec:
    """The farm of one task whose workers are assigned so. `finals` is `FarmSpec.final_frames`."""
    history = history_of(config)
    return FarmSpec(
        task=task_spec(config),
        episodes=episodes,
        num_envs=num_envs or config.env.num_envs,
        chunk=config.policy.chunk,
        groups=farm.groups,
        physics_workers=len(farm.physics),
        render_workers=len(farm.render),
        devices=farm.devices,
        final_frames=finals,
        observations=history.observations,
        distance=history.distance,
    )


def farm_specs(run: RunSpec, assignment: Assignment) -> tuple[FarmSpec, ...]:
    """The farms of a run's tasks."""
    pairs = zip(run.tasks, assignment.farms, strict=True)
    return tuple(farm_spec(task.config, run.episodes(task), farm, finals=run.finals) for task, farm in pairs)


def memory_rounds(run: RunSpec, ahead: int, infos: Sequence[TaskInfo]) -> int:
    """Decisions of each environment that the trajectory memory holds: an iteration's, and the next's where a rollout
    runs ahead. A rollout of decisions under a delay takes one more than it has (`RolloutWorker.rollout`)."""
    further = run.config.env.most_delay > 0 and not run.by_episodes
    return (1 + ahead) * (run.rounds(infos) + further)


def history_of(config: Config) -> ObservationHistory:
    """Observations that a decision of the configuration's policy is made on."""
    return ObservationHistory(*observations_of(config.policy.kind, config.policy.architecture), config.policy.chunk)


def observation_rows(run: RunSpec, rounds: int) -> int:
    """Rows of the frame memory for the rounds of decisions: their observations, those after them, and those before that
    the first ones refer to."""
    history = history_of(run.config)
    return FrameRows(history, rounds + 1 + history.rounds, run.environments).count


def frame_rows(run: RunSpec, ahead: int, infos: Sequence[TaskInfo]) -> int:
    """Rows of the frame memory: of the trajectories, the observations after them, and final observations."""
    rounds = memory_rounds(run, ahead, infos)
    finals = 0
    if run.bootstrap != "never":
        shortest = min(info.max_episode_steps for info in infos)
        finals = rows_for_finals(run.environments, rounds, history_of(run.config), shortest)
    return observation_rows(run, rounds) + finals
