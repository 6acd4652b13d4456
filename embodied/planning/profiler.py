"""Measuring a workflow's components on this machine: what `embodied profile` does.

The configuration's own workers run a few iterations under a few assignments, chosen so that every component is seen
alone, on few and on all cores, with all and with half of the environments, and beside the others. Because a plan
never changes what is computed, these are the very iterations that a run begins with. In a run of several tasks, each
task is rolled out alone, so that no task waits for another's simulators; scorers and learner are measured on all tasks
together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from embodied.config.schema import Config
from embodied.devices import accelerators, fingerprint
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, history_of
from embodied.execution.iteration import Iteration, OnPolicy, start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session
from embodied.learning.learner import TrainedBytes
from embodied.learning.offload import Switch
from embodied.other_programs import OtherPrograms
from embodied.planning.clusters import ComponentRoles, roles_of
from embodied.planning.probes import GpuDrawing, drawing_devices, exchanges_of, gpu_drawing, probes_of
from embodied.statistics import typical
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import holds_shards, workflow_of
from policies.registry import policy_kind
from schedulers.profile import ComponentProfile, Point, Profile, Together
from schedulers.turns import Turns, turns_of
from schedulers.workflow import Workflow
from sim_farm.contract import TaskInfo
from sim_farm.render_devices import RenderDevice

LEAST, MOST, ENOUGH_S = 3, 10, 6.0
"""Iterations per assignment: at least `LEAST`, then until they have taken `ENOUGH_S` seconds, at most `MOST`. The first
iteration is a warm-up and does not count."""

Switches = Mapping[str, tuple[Switch, Switch]]
"""Leaving the memory and coming back, for learner, rollout worker and renderers."""


@dataclass(frozen=True)
class Measured:
    """Some iterations under one assignment; the first, which warms up, is left out."""

    environments: int
    assignment: Assignment
    iterations: tuple[Iteration, ...]
    rounds: int
    """Rounds of the first task's rollout loop in an iteration."""
    worker_bytes: float
    """In memory of one physics worker's process of the first task, the renderer that it draws with included."""

    def per_round(self, seconds: Callable[[Iteration], float]) -> list[float]:
        """Seconds per round, for each iteration."""
        return [seconds(iteration) / self.rounds for iteration in self.iterations]

    @property
    def drawing(self) -> float:
        """Share of drawing in what the farm's workers did."""
        clocks = [iteration.summary.clock for iteration in self.iterations]
        drawn, stepped = sum(c.render_busy for c in clocks), sum(c.physics_busy for c in clocks)
        return drawn / (stepped + drawn) if drawn else 0.0


@dataclass(frozen=True)
class Probed:
    """All that was measured of one configuration, of one task or of several."""

    workflow: Workflow
    infos: tuple[TaskInfo, ...]
    taken: Mapping[str, Measured]
    """Measurements by the names of `probes_of`."""
    cores: int
    accelerated: bool
    """All that is no simulator was on a GPU."""
    switches: Switches
    peak_bytes: int
    """Peak GPU memory of the learner's process, which includes rollout worker and scorers."""
    trained: TrainedBytes
    draws_on: tuple[RenderDevice, ...] = ()
    """Devices that frames were drawn on; none: as configured."""
    drawn: GpuDrawing | None = None
    """Measurement of a render worker on a GPU, if there was one."""

    @property
    def roles(self) -> ComponentRoles:
        return roles_of(self.workflow)

    def alone(self, accelerated: bool) -> list[tuple[Measured, int]]:
        """Plans in which components took turns, and the devices that each of them had."""
        names = {"all cores": self.cores, "all cores, half": self.cores}
        if accelerated:
            names = dict.fromkeys(names, 1)
        elif self.cores > 1:
            names |= {"one core": 1, "one core, half": 1}
        return [(self.taken[name], devices) for name, devices in names.items()]


def profile_run(run: RunSpec, session: Session, scratch: Path) -> Profile:
    """Measure every component of the run. Takes about ten iterations' time of each task.

    Raises `UserError` where the environments of a task cannot be halved.
    """
    config, tasks, cores = run.config, run.tasks, len(session.cores)
    for task in tasks:
        envs = task.env.num_envs
        if envs % (2 * cores):
            raise UserError(
                f"{envs} environments do not divide by two groups on {cores} cores: change env.num_envs"
                + (f" of {task.env.task}" if len(tasks) > 1 else "")
            )
    others = OtherPrograms(session.cores)
    each = [_probe(run.of_task(task), session, scratch) for task in tasks]
    whole = _probe(run, session, scratch) if len(tasks) > 1 else each[0]
    return Profile(
        workflow=whole.workflow.name,
        fingerprint={**fingerprint(), **work_of(config)},
        components=_components(each, whole, config),
        # A policy on a GPU shares no cores.
        together=() if whole.accelerated else _together(each, whole.workflow),
        transfers=_transfers(whole, config),
        other_programs=others.share(),
    )


def _probe(run: RunSpec, session: Session, scratch: Path) -> Probed:
    gpus = accelerators(run.config.policy.device)
    draws_on = drawing_devices(run.config, gpus)
    drawn: GpuDrawing | None = None
    taken: dict[str, Measured] = {}
    infos: tuple[TaskInfo, ...] = ()
    switches: Switches = {}
    peak, trained = 0, TrainedBytes(0, 0, 0)
    for name, (changed, assignment) in probes_of(run, session.cores, gpus, draws_on).items():
        with start_run(changed, scratch, session, assignment) as workers:
            infos = workers.farm.infos
            taken[name] = measure(workers)
            switches = switches or workers.offload.measured()
            peak = peak or max(workers.learner.call_all(LearnerRole.peak_bytes))
            trained = workers.learner.call_one(0, LearnerRole.trained_bytes)
            if name == "drawn":
                drawn = gpu_drawing(workers, gpus[0])
    workflow = workflow_of(run, _lengths(infos))
    return Probed(workflow, infos, taken, len(session.cores), bool(gpus), switches, peak, trained, draws_on, drawn)


def measure(workers: OnPolicy) -> Measured:
    """Run iterations from the beginning until they are enough."""
    workflow = workflow_of(workers.spec, _lengths(workers.farm.infos))
    rounds = workflow.loops[0].steps * workflow.episodes_per_env
    iterations = tuple(run_iterations(workers)[1:])
    held = workers.farm.private_bytes()[0][: len(workers.assignment.farms[0].physics)]
    return Measured(workers.spec.environments, workers.assignment, iterations, rounds, float(held.mean()))


def run_iterations(workers: OnPolicy) -> list[Iteration]:
    """The first iterations of a run, the warming one among them."""
    workers.begin(None, 0)
    found: list[Iteration] = []
    while len(found) < LEAST or (len(found) < MOST and sum(i.wall_s for i in found[1:]) < ENOUGH_S):
        found.append(workers.iterate(len(found)))
    return found


def _lengths(infos: Sequence[TaskInfo]) -> list[int]:
    return [info.max_episode_steps for info in infos]


# --- what a profile belongs to


def work_of(config: Config) -> dict[str, str]:
    """Sections of the configuration that its times depend on, as entries of a profile's fingerprint."""
    names = {"workflow", "env", "extra_tasks", "policy", "rollout", "advantage", "loss", "optim"}
    sections = config.model_dump(mode="json", include=names)
    return {f"work.{name}": json.dumps(section, sort_keys=True) for name, section in sections.items()}


# --- seconds of each role in an iteration


def waited_s(iteration: Iteration) -> float:
    """Seconds in which the rollout waited for the farm."""
    return iteration.summary.clock.waiting


def decided_s(iteration: Iteration) -> float:
    """Seconds of the rollout worker: inference, and moving its inputs and outputs."""
    clock = iteration.summary.clock
    return clock.policy + clock.transport - clock.assembly


def looped_s(iteration: Iteration) -> float:
    """Seconds of the rollout's loop."""
    return iteration.summary.wall_s - iteration.summary.clock.assembly


def passed_s(iteration: Iteration, name: str) -> float:
    """Seconds of a scorer."""
    return iteration.learned[f"time/{name}_s"]


def trained_s(iteration: Iteration, scorers: Sequence[str]) -> float:
    """All of an iteration that is neither loop, nor scorers, nor switching: assembling trajectories, the update,
    weights, messages between processes. Where these overlap, what the learner's own clock says."""
    others = sum(passed_s(iteration, name) for name in scorers) + iteration.learned["time/switch_s"]
    return max(iteration.wall_s - looped_s(iteration) - others, iteration.learned["learner/update_s"])


# --- from measurements to components


def _components(each: Sequence[Probed], whole: Probed, config: Config) -> dict[str, ComponentProfile]:
    """Profiles of all components, in the workflow's order: simulators by each task's probes, components after the loop
    by the probes of the whole run."""
    roles = whole.roles
    found = {roles.policy: _rollout_worker(each, whole, config), roles.learner: _learner(whole, config)}
    found |= {name: _scorer(whole, name) for name in roles.scorers}
    for names, probed in zip(roles.simulators, each, strict=True):
        steps, *draws = names
        found[steps] = _stepping(probed, bool(draws))
        if draws:
            found[draws[0]] = _drawing(probed)
    return {name: found[name] for name in whole.workflow.names}


def _stepping(probed: Probed, draws: bool) -> ComponentProfile:
    """Profile of the physics of a task."""
    alone = probed.alone(accelerated=False)

    def rounds(measured: Measured) -> list[float]:
        share = 1 - measured.drawing if draws else 1.0
        return [value * share for value in measured.per_round(waited_s)]

    points = tuple(_point(m.environments, devices, rounds(m)) for m, devices in alone)
    beside = _beside_factor(probed, lambda iteration: iteration.summary.clock.physics_busy)
    resident, per_item = _worker_memory([measured for measured, _ in alone])
    found = ComponentProfile("cores", points, beside, _variation(probed, "idle"))
    return replace(found, resident_bytes=resident, bytes_per_item=per_item)


def _drawing(probed: Probed) -> ComponentProfile:
    """Profile of the renderer of a task."""

    def rounds(measured: Measured) -> list[float]:
        return [value * measured.drawing for value in measured.per_round(waited_s)]

    points = tuple(_point(m.environments, devices, rounds(m)) for m, devices in probed.alone(accelerated=False))
    beside = _beside_factor(probed, lambda iteration: iteration.summary.clock.render_busy)
    found = ComponentProfile("cores", points, beside, _variation(probed, "idle"))
    found = _switching(found, probed, probed.roles.simulators[0][1])
    if "drawn" not in probed.taken:
        return found
    gpu = _drawing_on_gpu(probed)
    return replace(found, other_pool=gpu) if "cpu" in probed.draws_on else gpu


def _drawing_on_gpu(probed: Probed) -> ComponentProfile:
    """The same by a render worker on a GPU: what it says itself. On more of them the environments are shared out."""
    taken = (probed.taken["drawn"], probed.taken["drawn, half"])
    points = tuple(_point(m.environments, 1, m.per_round(lambda it: it.summary.clock.render_busy)) for m in taken)
    found = ComponentProfile("accelerators", points)
    if probed.drawn is None:
        return found
    held, (out, back) = float(probed.drawn.held_bytes), probed.drawn.switch
    return replace(found, resident_bytes=held, process_bytes=held, unload_s=out.seconds, load_s=back.seconds)


def _rollout_worker(each: Sequence[Probed], whole: Probed, config: Config) -> ComponentProfile:
    """Profile of the policy: a call for all environments of each task, and a call for half of them."""
    calls: dict[tuple[int, int], list[float]] = {}
    for probed in each:
        for measured, devices in probed.alone(probed.accelerated):
            calls.setdefault((measured.environments, devices), []).extend(measured.per_round(decided_s))
    points = tuple(_point(batch, devices, values) for (batch, devices), values in calls.items())
    beside = fmean(_beside_factor(probed, decided_s) for probed in each)
    found = ComponentProfile("cores", points, beside, fmean(_variation(probed, "act") for probed in each))
    found = replace(found, turns=_turns(each, config))
    return _computing(_switching(found, whole, whole.roles.policy), whole, data_parallel=True)


def _turns(each: Sequence[Probed], config: Config) -> Turns | None:
    """Executed actions of the measured decisions, where the policy is done with a row after the last of them."""
    policy = config.policy
    slots, chunk = policy_kind(policy.kind).format.slots(policy.architecture), policy.chunk
    if not slots:
        return None
    iterations = [iteration for probed in each for iteration in probed.taken["all cores"].iterations]
    steps = [episode.length for iteration in iterations for episode in iteration.summary.episodes]
    decisions = [min(chunk, length - first) for length in steps for first in range(0, length, chunk)]
    return turns_of(decisions, slots) if decisions else None


def _scorer(whole: Probed, name: str) -> ComponentProfile:
    """Profile of a scorer."""
    points = _points_after(whole, lambda iteration: passed_s(iteration, name))
    return _computing(ComponentProfile("cores", points), whole)


def _learner(whole: Probed, config: Config) -> ComponentProfile:
    """Profile of the learner, with the messages between its ranks; on a GPU it occupies its process's peak."""
    points = _points_after(whole, lambda iteration: trained_s(iteration, whole.roles.scorers))
    beside = 1.0
    if "ahead" in whole.taken:
        with_rollout, without = (
            median(iteration.learned["learner/update_s"] for iteration in whole.taken[probe].iterations)
            for probe in ("ahead", "all cores" if whole.accelerated else "one core")
        )
        beside = max(1.0, with_rollout / without)
    found = _switching(ComponentProfile("cores", points, beside), whole, whole.roles.learner)
    iterations = whole.taken["all cores"].iterations
    exchanges = exchanges_of(config, whole.workflow, whole.trained, iterations, whole.accelerated)
    size = whole.trained
    whole_policy = not holds_shards(config, size.trained, size.parameters, whole.accelerated)
    found = replace(found, exchanges=exchanges, published_bytes=float(size.weights), shares_weights=whole_policy)
    # Gradients and activations come with the learner's own micro-batches, whatever the parts of a plan; a policy that
    # acts takes little beside them.
    return _computing(found, whole, whole.peak_bytes, data_parallel=True)


def _points_after(whole: Probed, seconds: Callable[[Iteration], float]) -> tuple[Point, ...]:
    """Points of a component after the loop: seconds for an iteration's items."""
    episodes = whole.workflow.episodes_per_env
    return tuple(
        _point(measured.environments * episodes, devices, [seconds(iteration) for iteration in measured.iterations])
        for measured, devices in whole.alone(whole.accelerated)
    )


def _switching(found: ComponentProfile, probed: Probed, name: str) -> ComponentProfile:
    """With what leaves the memory, and how long leaving and coming back take."""
    out, back = probed.switches[name]
    return replace(found, process_bytes=float(out.bytes), unload_s=out.seconds, load_s=back.seconds)


def _computing(
    found: ComponentProfile, whole: Probed, peak_bytes: int = 0, data_parallel: bool = False
) -> ComponentProfile:
    """On the pool where it was measured, of a GPU's memory what it holds. More GPUs help what has replicas or ranks
    there (`data_parallel`), and not what is one process."""
    if not whole.accelerated:
        return found
    held = max(float(peak_bytes), found.process_bytes)
    return replace(found, pool="accelerators", data_parallel=data_parallel, resident_bytes=held)


def _worker_memory(measured: Sequence[Measured]) -> tuple[float, float]:
    """Bytes of a physics worker without environments, and of each of its environments: a straight line."""
    envs = [m.environments / len(m.assignment.farms[0].physics) for m in measured]
    slope, base = np.polyfit(envs, [m.worker_bytes for m in measured], 1)
    return (max(float(base), 0.0), float(slope)) if slope > 0 else (max(m.worker_bytes for m in measured), 0.0)


def _variation(probed: Probed, kind: str) -> float:
    """Coefficient of variation of traced calls: the rollout worker's spans whose names begin with `kind`."""
    spans = [span for it in probed.taken["all cores"].iterations for span in it.summary.spans]
    calls = [float(span.end_ns - span.start_ns) for span in spans if span.name.startswith(kind)]
    return stdev(calls) / fmean(calls) if len(calls) > 1 else 0.0


def _beside_factor(probed: Probed, seconds: Callable[[Iteration], float]) -> float:
    """Factor by which a component of the loop takes longer for one item while other cores, or those beside the GPU, are
    busy."""
    taken = probed.taken
    if probed.accelerated:
        beside, alone = taken["shared"], taken["all cores, half"]
    elif "beside" in taken:
        beside, alone = taken["beside"], taken["one core, half"]
    else:
        return 1.0
    with_others, without = (median(measured.per_round(seconds)) for measured in (beside, alone))
    # The policy decides once for each of two groups, and the simulator steps twice as many environments.
    return max(1.0, with_others / (2 * without)) if without else 1.0


def _together(each: Sequence[Probed], workflow: Workflow) -> tuple[Together, ...]:
    """A round of each task's loop while its components share all cores."""
    found = []
    for probed, loop in zip(each, workflow.loops, strict=True):
        shared = probed.taken["shared"]
        point = _point(shared.environments, probed.cores, shared.per_round(looped_s))
        found.append(Together(loop.components, point.batch, point.devices, 2, point.seconds, point.low, point.high))
    return tuple(found)


def _point(batch: int, devices: int, values: Sequence[float]) -> Point:
    middle, low, high = typical(values)
    return Point(batch, devices, middle, low, high)


def _transfers(whole: Probed, config: Config) -> dict[str, float]:
    """Bytes per item and round, or per item and iteration, on each edge."""
    workflow, roles = whole.workflow, whole.roles
    found: dict[str, float] = {}
    kept = 0.0
    for (steps, *draws), info, loop in zip(roles.simulators, whole.infos, workflow.loops, strict=True):
        history = history_of(config)
        picture = float(len(info.cameras) * info.spec.image_size**2 * 3)
        numbers = info.state_dim * ("state" in config.policy.reads) + info.proprio_dim
        seen = 4.0 * numbers * history.observations
        action = 4.0 * config.policy.chunk * info.action_dim
        for draw in draws:
            found[f"{steps}>{draw}"] = float(info.scene_bytes * (1 + history.new)) + seen
            found[f"{draw}>{roles.policy}"] = picture * history.observations + seen
        found |= {f"{steps}>{roles.policy}": seen, f"{roles.policy}>{steps}": action}
        kept += (picture * (1 + history.new) + seen + 3 * action) * loop.steps * (loop.items or workflow.items)
    after = (*roles.scorers, roles.learner)
    found |= {f"{e.source}>{e.target}": kept / workflow.items for e in workflow.edges if e.target in after}
    return found
