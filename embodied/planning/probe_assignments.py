"""The assignments that a profile is measured under: components alone, on few and on all cores, beside others.

On a GPU policy and learner are one process each and occupy one device, so that cores are varied for the farm only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from embodied.config import Config
from embodied.execution.assignment import HERE, Assignment
from embodied.workers.affinity import Affinity

Shapes = dict[str, tuple[Config, Assignment]]


def shapes_of(config: Config, cores: tuple[int, ...], gpus: Sequence[torch.device]) -> Shapes:
    """What is run, by name: with how many environments, and who is where."""
    half = config.model_copy(update={"env": config.env.model_copy(update={"num_envs": config.env.num_envs // 2})})
    whole, one = _turns(cores, cores), _turns(cores[:1], cores[:1])
    if gpus:
        whole, one = (_computing_on(shape, config, gpus[0], len(cores)) for shape in (whole, one))
    shapes = {
        "all cores": (config, whole),
        "all cores, half": (half, whole),
        "one core": (config, one),
        "one core, half": (half, one),
        # On a GPU this shows the policy beside the simulator on all cores.
        "shared": (config, replace(whole, groups=2, policy=replace(whole.policy, cores=(), threads=1))),
    }
    if len(cores) > 1 and not gpus:
        shapes["beside"] = (config, _beside(cores))
    if config.plan.ahead and len(gpus or cores) > 1:
        shapes["ahead"] = (config, _ahead_on(gpus[1], whole) if gpus else _ahead(cores))
    return shapes


def _turns(physics: Sequence[int], compute: Sequence[int]) -> Assignment:
    """Everything on its cores, one after the other."""
    affinity = Affinity(tuple(compute), len(compute))
    nodes = (HERE,) * len(physics)
    return Assignment("collocated", 1, tuple(physics), nodes, (), affinity, affinity, one_process=True)


def _computing_on(like: Assignment, config: Config, gpu: torch.device, cores: int) -> Assignment:
    """As `assign` affinities policy and learner on an accelerator."""
    learner = Affinity((), config.optim.threads or cores, str(gpu))
    return replace(like, policy=Affinity(device=str(gpu)), learner=learner)


def _beside(cores: Sequence[int]) -> Assignment:
    """Physics on the first half of the cores, the policy on the rest, at the same time."""
    middle = max(1, len(cores) // 2)
    return replace(_turns(cores[:middle], cores[middle:]), mode="hybrid", groups=2)


def _ahead(cores: Sequence[int]) -> Assignment:
    """The rollout on the first half of the cores, one update ahead of the learner on one other."""
    middle = max(1, len(cores) // 2)
    rolling, learner = _turns(cores[:middle], cores[:middle]), Affinity((cores[middle],))
    return replace(rolling, mode="disaggregated", learner=learner, one_process=False, ahead=1)


def _ahead_on(gpu: torch.device, rolling: Assignment) -> Assignment:
    """The rollout one update ahead of the learner on another GPU."""
    learner = replace(rolling.learner, device=str(gpu))
    return replace(rolling, mode="disaggregated", learner=learner, one_process=False, ahead=1)
