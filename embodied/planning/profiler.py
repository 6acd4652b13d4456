"""Measuring a workflow's components on this machine: what `embodied profile` does.

The configuration's own workers run a few iterations under a few assignments, chosen so that every component is seen
alone, on few and on all cores, with all and with half of the environments, and beside the others. Because a plan
never changes what is computed, these are the very iterations that a run begins with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from embodied.config import Config, parse_config
from embodied.doctor.hardware import fingerprint
from embodied.errors import UserError
from embodied.execution.assignment import Assignment
from embodied.execution.executor import Executor, Iteration, executor
from embodied.execution.session import Session
from embodied.migration import OLD_SECTIONS, migrate
from embodied.planning.probe_assignments import shapes_of
from embodied.statistics import typical
from embodied.workers.devices import accelerators
from embodied.workers.offload import Switch
from embodied.workers.roles import Trainer
from embodied.workflows.sizes import workflow_of
from schedulers.profile import ComponentProfile, Point, Profile, Together
from schedulers.workflow import Workflow
from sim_farm.contract import TaskInfo

LEAST, MOST, ENOUGH_S = 3, 10, 6.0
"""Iterations per assignment: at least so many, then until they have taken so long. The first warms up whatever is made
on first use, and does not count."""

Switches = Mapping[str, tuple[Switch, Switch]]
"""Of learner, policy and renderers: leaving the memory, and coming back."""


@dataclass(frozen=True)
class Measured:
    """Some iterations under one assignment."""

    num_envs: int
    assignment: Assignment
    iterations: tuple[Iteration, ...]
    rounds: int
    """Of the rollout loop, per iteration."""
    worker_bytes: float
    """In memory of one physics worker's process, the renderer that it draws with included."""

    def per_round(self, pick: str) -> list[float]:
        """Seconds per round of each iteration: `farm` (waiting for it), `policy`, or `loop` (all)."""
        clocks = [(it.summary.clock, it.summary.wall_s, gathering_s(it)) for it in self.iterations]
        values = {
            "farm": [clock.waiting for clock, _, _ in clocks],
            "policy": [clock.policy + clock.transport - gathered for clock, _, gathered in clocks],
            "loop": [wall - gathered for _, wall, gathered in clocks],
            "physics_busy": [clock.physics_busy for clock, _, _ in clocks],
            "render_busy": [clock.render_busy for clock, _, _ in clocks],
        }[pick]
        return [value / self.rounds for value in values]

    @property
    def drawing(self) -> float:
        """Share of rendering in what the farm's workers did."""
        physics, render = fmean(self.per_round("physics_busy")), fmean(self.per_round("render_busy"))
        return render / (physics + render) if render else 0.0


@dataclass(frozen=True)
class Seen:
    """All that was measured of one configuration."""

    taken: Mapping[str, Measured]
    """By the names of `shapes_of`."""
    cores: int
    accelerated: bool
    """Policy and learner were on a GPU."""
    switches: Switches
    peak_bytes: int
    """The most that policy and learner together, in one process, have held of a GPU's memory."""


def gathering_s(iteration: Iteration) -> float:
    """What arranging the trajectories took at the end of a rollout, or of each of its waves."""
    spans = [span for span in iteration.summary.spans if span.track == "policy" and span.name == "transport"]
    return sum(span.end_ns - span.start_ns for span in spans) / 1e9


def profile_config(config: Config, session: Session, scratch: Path) -> Profile:
    """Measure every component of the configuration's workflow. Takes about ten iterations' time.

    Raises `UserError` where the environments cannot be halved.
    """
    envs, cores = config.env.num_envs, session.cores
    if envs % (2 * len(cores)):
        raise UserError(f"{envs} environments do not divide by two groups on {len(cores)} cores: change env.num_envs")
    gpus = accelerators(config.policy.device)
    taken: dict[str, Measured] = {}
    info: TaskInfo | None = None
    switches: Switches = {}
    peak = 0
    for name, (changed, assignment) in shapes_of(config, cores, gpus).items():
        with executor(changed, scratch, session, assignment) as workers:
            info = workers.farm.infos[0]
            taken[name] = measure(changed, workers)
            switches = switches or workers.switches()
            peak = peak or workers.trainer.call(Trainer.peak_bytes)
    assert info is not None
    workflow = workflow_of(config, info.max_episode_steps)
    seen = Seen(taken, len(cores), bool(gpus), switches, peak)
    return Profile(
        workflow=workflow.name,
        fingerprint={**fingerprint(), **work_of(config)},
        components={name: _component(seen, name, workflow) for name in workflow.names},
        # A policy on a GPU shares no cores.
        together=() if gpus else _together(taken["shared"], workflow, envs, len(cores)),
        transfers=_transfers(info, config),
    )


def measure(config: Config, workers: Executor) -> Measured:
    """Run iterations from the beginning until they are enough."""
    workflow = workflow_of(config, workers.farm.infos[0].max_episode_steps)
    assert workflow.loop is not None
    rounds = workflow.loop.steps * workflow.waves
    iterations = tuple(run_iterations(workers))
    held = workers.farm.private_bytes()[: len(workers.assignment.physics)]
    return Measured(config.env.num_envs, workers.assignment, iterations, rounds, float(held.mean()))


def run_iterations(workers: Executor) -> list[Iteration]:
    """The first iterations of a run, the warming one among them."""
    workers.begin(None, 0)
    found: list[Iteration] = []
    while len(found) < LEAST or (len(found) < MOST and sum(i.wall_s for i in found[1:]) < ENOUGH_S):
        found.append(workers.iterate(len(found)))
    return found


def work_of(config: Config) -> dict[str, str]:
    """What of a configuration its times depend on, as the profile keeps it."""
    sections = config.model_dump(
        mode="json", include={"workflow", "env", "policy", "rollout", "advantage", "loss", "optim"}
    )
    return {f"work.{name}": json.dumps(section, sort_keys=True) for name, section in sections.items()}


def in_todays_keys(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """A profile's fingerprint as `work_of` would write it now, where an earlier version measured the profile."""
    work = {key.removeprefix("work."): json.loads(value) for key, value in fingerprint.items() if _of_work(key)}
    if not work.keys() & set(OLD_SECTIONS):
        return dict(fingerprint)
    rest = {key: value for key, value in fingerprint.items() if not _of_work(key)}
    return rest | work_of(parse_config(migrate(work), "the profile"))


def _of_work(key: str) -> bool:
    return key.startswith("work.")


def _component(seen: Seen, name: str, flow: Workflow) -> ComponentProfile:
    """As it was measured alone, how much longer it takes beside the others, what it holds, what a switch takes."""
    taken, cores, accelerated = seen.taken, seen.cores, seen.accelerated and name in ("policy", "learner")
    alone = {"all cores": cores, "all cores, half": cores}
    if accelerated:
        alone = dict.fromkeys(alone, 1)
    elif cores > 1:
        alone |= {"one core": 1, "one core, half": 1}
    points = []
    for shape, devices in alone.items():
        items = taken[shape].num_envs * (1 if name in _LOOP else flow.waves)
        points.append(_point(items, devices, _values(taken[shape], name, flow)))
    found = ComponentProfile("cores", tuple(points), _beside_factor(seen, name), _variation(taken["all cores"], name))
    if name == "physics":
        resident, per_item = _worker_memory([taken[shape] for shape in alone])
        return replace(found, resident_bytes=resident, bytes_per_item=per_item)
    if name not in seen.switches:
        return found
    out, back = seen.switches[name]
    found = replace(found, process_bytes=float(out.bytes), unload_s=out.seconds, load_s=back.seconds)
    if not accelerated:
        return found
    # Gradients and activations come with the learner's own micro-batches, whatever the parts of a plan; a policy that
    # acts takes little beside them.
    held = max(seen.peak_bytes, out.bytes) if name == "learner" else out.bytes
    return replace(found, pool="accelerators", spreads=False, resident_bytes=float(held))


def _worker_memory(measured: Sequence[Measured]) -> tuple[float, float]:
    """Bytes of a physics worker without environments, and of each of its environments: a straight line."""
    envs = [m.num_envs / len(m.assignment.physics) for m in measured]
    slope, base = np.polyfit(envs, [m.worker_bytes for m in measured], 1)
    return (max(float(base), 0.0), float(slope)) if slope > 0 else (max(m.worker_bytes for m in measured), 0.0)


def _variation(measured: Measured, name: str) -> float:
    """Coefficient of variation of single calls; 0 for what is called once an iteration."""
    if name not in _LOOP:
        return 0.0
    kind = "act" if name == "policy" else "idle"
    spans = [s for it in measured.iterations[1:] for s in it.summary.spans if s.track == "policy"]
    calls = [float(s.end_ns - s.start_ns) for s in spans if s.name.startswith(kind)]
    return stdev(calls) / fmean(calls) if len(calls) > 1 else 0.0


_LOOP = ("physics", "render", "policy")


def _values(measured: Measured, component: str, flow: Workflow) -> list[float]:
    """Seconds of the component: of a round for the loop's, else of an iteration."""
    drawing = measured.drawing if "render" in flow.names else 0.0
    if component == "physics":
        return [value * (1 - drawing) for value in measured.per_round("farm")[1:]]
    if component == "render":
        return [value * drawing for value in measured.per_round("farm")[1:]]
    if component == "policy":
        return measured.per_round("policy")[1:]
    # All of an iteration but the loop: arranging trajectories, the update, weights, messages between processes.
    loop_s = measured.per_round("loop")
    return [it.wall_s - loop_s[i] * measured.rounds for i, it in enumerate(measured.iterations)][1:]


def _beside_factor(seen: Seen, component: str) -> float:
    """How much longer it takes for one item while other cores, or the cores beside the GPU, are busy."""
    taken = seen.taken
    if component == "learner" and "ahead" in taken:
        with_rollout, without = (
            median(it.learned["learner/update_s"] for it in taken[shape].iterations[1:])
            for shape in ("ahead", "all cores" if seen.accelerated else "one core")
        )
        return max(1.0, with_rollout / without)
    if seen.accelerated:
        beside, alone = taken["shared"], taken["all cores, half"]
    elif "beside" in taken:
        beside, alone = taken["beside"], taken["one core, half"]
    else:
        return 1.0
    picks = {"physics": "physics_busy", "render": "render_busy", "policy": "policy"}
    if component not in picks:
        return 1.0
    with_others, without = (median(m.per_round(picks[component])[1:]) for m in (beside, alone))
    # The policy decides once for each of two groups, and the simulator steps twice as many environments.
    return max(1.0, with_others / (2 * without)) if without else 1.0


def _together(shared: Measured, flow: Workflow, envs: int, cores: int) -> tuple[Together, ...]:
    point = _point(envs, cores, shared.per_round("loop")[1:])
    loop = tuple(name for name in _LOOP if name in flow.names)
    return (Together(loop, envs, cores, 2, point.seconds, point.low, point.high),)


def _point(batch: int, devices: int, values: Sequence[float]) -> Point:
    middle, low, high = typical(values)
    return Point(batch, devices, middle, low, high)


def _transfers(info: TaskInfo, config: Config) -> dict[str, float]:
    """Bytes per item and round, or per item and iteration, on each edge."""
    frames = float(len(info.cameras) * info.spec.image_size**2 * 3)
    seen = 4.0 * (info.state_dim * ("state" in config.policy.reads) + info.proprio_dim)
    action = 4.0 * config.policy.chunk * info.action_dim
    per_decision = frames + seen + 3 * action
    return {
        "physics>render": float(info.scene_bytes) + seen,
        "render>policy": frames + seen,
        "physics>policy": seen,
        "policy>physics": action,
        "policy>learner": per_decision * config.rollout.decisions,
    }
