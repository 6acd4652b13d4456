"""The assignments that a profile is measured under: components alone, on few and on all cores, beside others.

On a GPU policy and learner are one process each and occupy one device, so that cores are varied for the farm only.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from embodied.config.schema import Config
from embodied.devices import Affinity, free_bytes
from embodied.errors import UserError
from embodied.execution.assignment import HERE, Assignment, FarmAssignment, configured_devices
from embodied.execution.iteration import Iteration, OnPolicy
from embodied.execution.roles import RolloutRole
from embodied.learning.learner import TrainedBytes
from embodied.learning.offload import Switch
from embodied.workflows.recipes import Recipe
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import holds_shards
from schedulers.profile import Exchange
from schedulers.workflow import Workflow
from sim_farm.render_devices import RenderDevice, name_of

Probes = dict[str, tuple[RunSpec, Assignment]]


def probes_of(
    run: RunSpec, cores: tuple[int, ...], gpus: Sequence[torch.device], draws_on: Sequence[RenderDevice] = ()
) -> Probes:
    """The measured runs by name: a run with its number of environments, and an assignment.

    `draws_on` are the devices that frames are drawn on, in turn: the first by the physics workers, a GPU also by a
    separate render worker; none: as configured. For several tasks, the simulators are measured one task at a time.
    Then only the runs that depend on the sum of the tasks are returned: components outside the loop, each alone.
    """
    config, recipe, half, several = run.config, run.recipe, halved(run), len(run.tasks) > 1
    whole, one = _turns(run, cores, cores), _turns(run, cores[:1], cores[:1])
    if draws_on:
        whole, one = (_drawing_on(probe, draws_on[0]) for probe in (whole, one))
    if gpus:
        whole, one = (_computing_on(probe, recipe, config, gpus[0], len(cores)) for probe in (whole, one))
    probes = {
        "all cores": (run, whole),
        "all cores, half": (half, whole),
        "one core": (run, one),
        "one core, half": (half, one),
    }
    for number in [device for device in draws_on if device != "cpu" and not several]:
        drawn = _drawing_on(whole, number, apart=True)
        probes |= {"drawn": (run, drawn), "drawn, half": (half, drawn)}
    if not several:
        # On a GPU this shows the policy beside the simulator on all cores.
        probes["shared"] = (run, _sharing(whole, recipe))
    if not several and len(cores) > 1 and not gpus:
        probes["beside"] = (run, _beside(run, cores))
    if config.plan.ahead and len(gpus or cores) > 1:
        ahead = _ahead_on(gpus[1], recipe, whole) if gpus else _ahead(run, cores)
        probes["ahead"] = (run, ahead)
    return probes


def halved(run: RunSpec) -> RunSpec:
    """The run with half of the environments of every task."""
    config, (first, *others) = run.config, run.tasks
    env = first.env.model_copy(update={"num_envs": first.env.num_envs // 2})
    extra = tuple(
        {**differs, "num_envs": task.env.num_envs // 2}
        for differs, task in zip(config.extra_tasks, others, strict=True)
    )
    return RunSpec.of(config.model_copy(update={"env": env, "extra_tasks": extra}))


def _turns(run: RunSpec, physics: Sequence[int], compute: Sequence[int]) -> Assignment:
    """Everything on its cores, one after the other; every task has simulators on all of its."""
    affinity = Affinity(tuple(compute), len(compute))
    recipe, devices = run.recipe, configured_devices(run.config)
    farm = FarmAssignment(1, tuple(physics), (HERE,) * len(physics), devices=devices)
    names = (recipe.policy.name, *(component.name for component in recipe.after_rollout))
    return Assignment("collocated", (farm,) * len(run.tasks), dict.fromkeys(names, (affinity,)), hosts=(0,))


def _drawing_on(like: Assignment, device: RenderDevice, apart: bool = False) -> Assignment:
    """Frames drawn on that device: by the physics workers, or `apart` by one render worker of each task."""
    render = (None,) if apart else ()
    return replace(like, farms=tuple(replace(farm, render=render, devices=(device,)) for farm in like.farms))


def _computing_on(like: Assignment, recipe: Recipe, config: Config, gpu: torch.device, cores: int) -> Assignment:
    """The probe with rollout worker, scorers and learner on an accelerator, as `assign` places them."""
    trained = Affinity((), cores, str(gpu))
    components = {**dict.fromkeys(like.components, (trained,)), recipe.policy.name: (Affinity(device=str(gpu)),)}
    return replace(like, components=components)


def _sharing(like: Assignment, recipe: Recipe) -> Assignment:
    """Two groups, and a rollout worker that is not pinned."""
    rollout_worker = recipe.policy.name
    free = replace(like.first_of(rollout_worker), cores=(), threads=1)
    return replace(_two_groups(like), components={**like.components, rollout_worker: (free,)})


def _beside(run: RunSpec, cores: Sequence[int]) -> Assignment:
    """The simulators on the first half of the cores, the policy on the rest, at the same time."""
    middle = max(1, len(cores) // 2)
    return replace(_two_groups(_turns(run, cores[:middle], cores[middle:])), mode="hybrid")


def _two_groups(like: Assignment) -> Assignment:
    return replace(like, farms=tuple(replace(farm, groups=2) for farm in like.farms))


def _ahead(run: RunSpec, cores: Sequence[int]) -> Assignment:
    """The rollout on the first half of the cores, one update ahead of what follows it on one other."""
    middle = max(1, len(cores) // 2)
    rolling = _turns(run, cores[:middle], cores[:middle])
    return _apart(rolling, run.recipe, Affinity((cores[middle],)))


def _ahead_on(gpu: torch.device, recipe: Recipe, rolling: Assignment) -> Assignment:
    """The rollout one update ahead of what follows it on another GPU."""
    trained = rolling.first_of(recipe.learner.name)
    return _apart(rolling, recipe, replace(trained, device=str(gpu)))


def _apart(rolling: Assignment, recipe: Recipe, trained: Affinity) -> Assignment:
    after = {component.name: (trained,) for component in recipe.after_rollout}
    components = {**rolling.components, **after}
    return replace(rolling, mode="disaggregated", components=components, hosts=(), ahead=1)


# --- What frames can be drawn on where there are GPUs: found by drawing one of the task's own pictures.


SECONDS = 120.0
"""Longest wait for a picture: SAPIEN compiles its shaders at first use, an EGL driver that hangs never ends."""


@dataclass(frozen=True)
class GpuDrawing:
    """GPU memory of a render worker, and the seconds for which leaving and coming back take."""

    held_bytes: int
    switch: tuple[Switch, Switch]


def drawing_devices(config: Config, gpus: Sequence[torch.device]) -> tuple[RenderDevice, ...]:
    """The devices that a profile of the task measures: software and the first GPU, as far as they draw and
    `farm.devices` leaves them. None where there is nothing to choose: no GPU, or nothing is drawn.

    Raises `UserError` with the reason of each if none draws.
    """
    if not gpus or "images" not in config.policy.reads:
        return ()
    wanted: list[RenderDevice] = ["cpu"]
    if config.farm.devices != "cpu":
        wanted.append(gpus[0].index)
    reasons = {device: _refusal(config.env.task, device) for device in wanted}
    found = tuple(device for device, words in reasons.items() if words is None)
    if not found:
        raise UserError(f"{config.env.task} is drawn on nothing: " + "; ".join(filter(None, reasons.values())))
    return found


def _refusal(task: str, device: RenderDevice) -> str | None:
    """Why the device does not draw the task; None where it does."""
    command = [sys.executable, "-m", "sim_farm.render_probe", task, name_of(device)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{name_of(device)} drew nothing within {SECONDS:.0f} s"
    if result.returncode == 0:
        return None
    return (result.stderr.strip().splitlines() or [f"{name_of(device)} ended with status {result.returncode}"])[-1]


def gpu_drawing(workers: OnPolicy, gpu: torch.device) -> GpuDrawing:
    """Let the renderers leave the GPU and come back, and see what becomes free. What the driver keeps of a process that
    has drawn is not among it."""
    before, deadline_s = free_bytes(gpu), workers.farm_deadline_s
    out = workers.rollout_worker.call(RolloutRole.unload_renderers, deadline_s)
    held = max(free_bytes(gpu) - before, 0)
    return GpuDrawing(held, (out, workers.rollout_worker.call(RolloutRole.load_renderers, deadline_s)))


# --- What the ranks of a learner will send one another: counted from its policy and the configuration, not
# measured.


def exchanges_of(
    config: Config, workflow: Workflow, size: TrainedBytes, iterations: tuple[Iteration, ...], accelerated: bool
) -> tuple[Exchange, ...]:
    """Messages between ranks in one iteration, with the number of optimiser steps of the measured iterations.

    Ranks that hold the whole policy add up their gradients: with adapters, those of the adapters alone. Ranks that hold
    shards gather the parameters for each micro-batch, forwards and backwards, and scatter the gradients at each step.
    """
    steps = median(iteration.learned.get("learner/steps", 1.0) for iteration in iterations)
    if not holds_shards(config, size.trained, size.parameters, accelerated):
        return (Exchange("all_reduce", float(size.trained), steps),)
    rows = config.optim.minibatch or sum((loop.items or workflow.items) * loop.steps for loop in workflow.loops)
    passes = math.ceil(rows / (config.optim.micro_batch or rows))
    return (
        Exchange("all_gather", float(size.parameters), 2 * steps * passes, fewest=2 * steps),
        Exchange("reduce_scatter", float(size.trained), steps),
    )
