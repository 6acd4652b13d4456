"""The assignments that a profile is measured under: components alone, on few and on all cores, beside others.

On a GPU policy and learner are one process each and occupy one device, so that cores are varied for the farm only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from embodied.config import Config
from embodied.execution.assignment import HERE, Assignment, FarmAssignment, configured_devices
from embodied.workers.affinity import Affinity
from embodied.workflows.recipes import Recipe, recipe_of
from embodied.workflows.sizes import tasks_of
from sim_farm.render_devices import RenderDevice

Probes = dict[str, tuple[Config, Assignment]]


def probes_of(
    config: Config, cores: tuple[int, ...], gpus: Sequence[torch.device], drawers: Sequence[RenderDevice] = ()
) -> Probes:
    """What is run, by name: with how many environments, and who is where.

    `drawers` are the devices that frames are drawn on, in turn: the first by the physics workers, a GPU also by a
    render worker of its own; none: as configured. Of several tasks, whose simulators are measured one task at a time,
    only what their sum changes: all that is not in the loop, alone.
    """
    recipe, half, several = recipe_of(config), halved(config), bool(config.extra_tasks)
    whole, one = _turns(config, recipe, cores, cores), _turns(config, recipe, cores[:1], cores[:1])
    if drawers:
        whole, one = (_drawing_on(probe, drawers[0]) for probe in (whole, one))
    if gpus:
        whole, one = (_computing_on(probe, recipe, config, gpus[0], len(cores)) for probe in (whole, one))
    probes = {
        "all cores": (config, whole),
        "all cores, half": (half, whole),
        "one core": (config, one),
        "one core, half": (half, one),
    }
    for number in [drawer for drawer in drawers if drawer != "cpu" and not several]:
        drawn = _drawing_on(whole, number, apart=True)
        probes |= {"drawn": (config, drawn), "drawn, half": (half, drawn)}
    if not several:
        # On a GPU this shows the policy beside the simulator on all cores.
        probes["shared"] = (config, _sharing(whole, recipe))
    if not several and len(cores) > 1 and not gpus:
        probes["beside"] = (config, _beside(config, recipe, cores))
    if config.plan.ahead and len(gpus or cores) > 1:
        ahead = _ahead_on(gpus[1], recipe, whole) if gpus else _ahead(config, recipe, cores)
        probes["ahead"] = (config, ahead)
    return probes


def halved(config: Config) -> Config:
    """Half of the environments of every task."""
    first, *others = tasks_of(config)
    env = first.env.model_copy(update={"num_envs": first.env.num_envs // 2})
    extra = tuple(
        {**differs, "num_envs": task.env.num_envs // 2}
        for differs, task in zip(config.extra_tasks, others, strict=True)
    )
    return config.model_copy(update={"env": env, "extra_tasks": extra})


def _turns(config: Config, recipe: Recipe, physics: Sequence[int], compute: Sequence[int]) -> Assignment:
    """Everything on its cores, one after the other; every task has simulators on all of its."""
    affinity = Affinity(tuple(compute), len(compute))
    devices = configured_devices(config)
    farm = FarmAssignment(1, tuple(physics), (HERE,) * len(physics), devices=devices)
    names = (recipe.loop[-1], *(component.name for component in recipe.after_rollout))
    return Assignment(
        "collocated", (farm,) * (1 + len(config.extra_tasks)), dict.fromkeys(names, (affinity,)), hosts=(0,)
    )


def _drawing_on(like: Assignment, device: RenderDevice, apart: bool = False) -> Assignment:
    """Frames drawn on that device: by the physics workers, or `apart` by one render worker of each task."""
    render = (None,) if apart else ()
    return replace(like, farms=tuple(replace(farm, render=render, devices=(device,)) for farm in like.farms))


def _computing_on(like: Assignment, recipe: Recipe, config: Config, gpu: torch.device, cores: int) -> Assignment:
    """As `assign` has decider, passers and trainer compute on an accelerator."""
    trained = Affinity((), config.optim.threads or cores, str(gpu))
    components = {**dict.fromkeys(like.components, (trained,)), recipe.loop[-1]: (Affinity(device=str(gpu)),)}
    return replace(like, components=components)


def _sharing(like: Assignment, recipe: Recipe) -> Assignment:
    """Two groups, and the decider wherever the system finds time for it."""
    decider = recipe.loop[-1]
    free = replace(like.first_of(decider), cores=(), threads=1)
    return replace(_two_groups(like), components={**like.components, decider: (free,)})


def _beside(config: Config, recipe: Recipe, cores: Sequence[int]) -> Assignment:
    """The simulators on the first half of the cores, the policy on the rest, at the same time."""
    middle = max(1, len(cores) // 2)
    return replace(_two_groups(_turns(config, recipe, cores[:middle], cores[middle:])), mode="hybrid")


def _two_groups(like: Assignment) -> Assignment:
    return replace(like, farms=tuple(replace(farm, groups=2) for farm in like.farms))


def _ahead(config: Config, recipe: Recipe, cores: Sequence[int]) -> Assignment:
    """The rollout on the first half of the cores, one update ahead of what follows it on one other."""
    middle = max(1, len(cores) // 2)
    rolling = _turns(config, recipe, cores[:middle], cores[:middle])
    return _apart(rolling, recipe, Affinity((cores[middle],)))


def _ahead_on(gpu: torch.device, recipe: Recipe, rolling: Assignment) -> Assignment:
    """The rollout one update ahead of what follows it on another GPU."""
    trained = rolling.first_of(recipe.after_rollout[-1].name)
    return _apart(rolling, recipe, replace(trained, device=str(gpu)))


def _apart(rolling: Assignment, recipe: Recipe, trained: Affinity) -> Assignment:
    after = {component.name: (trained,) for component in recipe.after_rollout}
    components = {**rolling.components, **after}
    return replace(rolling, mode="disaggregated", components=components, hosts=(), ahead=1)
