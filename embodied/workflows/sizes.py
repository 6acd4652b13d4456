"""A configuration's workflow with its sizes: tasks, environments, episodes, and the parts that may flow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from embodied.config.files import parse_config
from embodied.config.schema import Config, EnvConfig
from embodied.errors import UserError
from embodied.workflows.recipes import Recipe, WorkflowComponent, recipe_of
from schedulers.workflow import Component, Edge, Loop, Workflow
from sim_farm.contract import TaskInfo
from sim_farm.episodes import EndlessEpisodes, Episodes, GroupedEpisodes, Starts
from sim_farm.graded_axes import graded
from sim_farm.perturbations import Perturbation

TASK_SEEDS = 1_000_003
"""Between the seeds of a run's tasks, so that environments of the same index do not draw the same noise."""


def streams(config: Config) -> bool:
    """True if the learner may work on a part of an iteration's rows while others are still rolled out.

    Only where the update is one optimiser step over all rows: then it is a sum over parts, in their order.
    """
    recipe, optim = recipe_of(config), config.optim
    one_step = not recipe.critic and optim.epochs == 1 and optim.minibatch == 0
    return recipe.rollout == "episodes" and one_step and groups_suffice(config)


def groups_suffice(config: Config) -> bool:
    """True if the estimator needs no more than complete episode groups: no edge after the rollout is a barrier. Else it
    is shown all of an iteration's episodes at once."""
    recipe = recipe_of(config)
    after = {component.name for component in recipe.after_rollout}
    flows = [edge.flow for edge in recipe.edges if edge.target in after]
    return "barrier" not in flows and config.advantage.scale != "batch"


def tasks_of(config: Config) -> tuple[Config, ...]:
    """The configuration of each task of the run, the main one first. Each has seeds of its own.

    Raises `UserError` for keys of `extra_tasks` that `env` does not have.
    """
    first = config.model_copy(update={"extra_tasks": ()})
    return (first, *_extra_tasks(config.model_dump_json())) if config.extra_tasks else (first,)


@lru_cache(maxsize=64)
def _extra_tasks(text: str) -> tuple[Config, ...]:
    """The configurations of the further tasks, from the run's as JSON: each configuration is validated once."""
    whole = json.loads(text)
    found = []
    for number, differs in enumerate(whole["extra_tasks"], start=1):
        seed = (whole["seed"] + number * TASK_SEEDS) % 2**31
        data = {**whole, "env": {**whole["env"], **differs}, "seed": seed, "extra_tasks": ()}
        found.append(parse_config(data, f"extra_tasks[{number - 1}]"))
    return tuple(found)


def workflow_of(config: Config, max_episode_steps: Sequence[int]) -> Workflow:
    """The configuration's workflow with its sizes; `max_episode_steps` of each task. Raises `UserError` for episode
    groups that the environments do not fill."""
    recipe, tasks = recipe_of(config), tasks_of(config)
    draws = "images" in config.policy.reads
    present = [c for c in recipe.components if draws or c.name != "render"]
    episodes, by_episodes = 1, recipe.rollout == "episodes"
    if by_episodes:
        check_episode_groups(config)
        episodes = config.rollout.episodes_per_env
    edges = _sized(_without(recipe.edges, present), config, by_episodes)
    names = [c.name for c in present]
    loop = [name for name in recipe.loop if name in names]
    loops = tuple(
        Loop(
            tuple(_of_task(name, number, recipe) for name in loop),
            math.ceil(steps / config.policy.chunk) if by_episodes else config.rollout.decisions,
            task.env.num_envs * episodes if len(tasks) > 1 else 0,
            task.env.task if len(tasks) > 1 else "",
        )
        for number, (task, steps) in enumerate(zip(tasks, max_episode_steps, strict=True))
    )
    items = sum(task.env.num_envs for task in tasks) * episodes
    components = _of_tasks(present, len(tasks))
    every = tuple(edge for number in range(len(tasks)) for edge in _edges_of_task(edges, number, recipe))
    return Workflow(recipe.name, components, tuple(dict.fromkeys(every)), loops, items, episodes)


def rounds_of(config: Config, infos: Sequence[TaskInfo]) -> int:
    """The most decisions that an environment takes in one iteration; `infos` of the tasks."""
    if recipe_of(config).rollout == "decisions":
        return config.rollout.decisions
    episodes = config.rollout.max_episodes_per_env or config.rollout.episodes_per_env
    # The end of a turn cuts a chunk short.
    return max(math.ceil(info.max_episode_steps / config.policy.chunk) + info.turns - 1 for info in infos) * episodes


def episodes_of(config: Config, seed: int) -> Episodes:
    """The training episodes of the configuration's workflow."""
    if recipe_of(config).rollout == "episodes":
        check_episode_groups(config)
        return GroupedEpisodes(seed, config.rollout.episode_group, _starts(config))
    return EndlessEpisodes(seed, _starts(config))


def physics_workers_of(config: Config, cores: int) -> int:
    """Processes that step the environments of each task, without a plan, on so many cores."""
    return config.farm.physics_workers or (1 if config.runtime.mode == "inline" else cores)


def randomisation(config: Config) -> tuple[Perturbation, ...]:
    """The perturbations that training episodes draw from. Raises `FarmError` for an axis that the simulator has not or
    the policy cannot notice, and for a level out of range; `UserError` for levels without an axis."""
    env = config.env
    if env.randomise_levels != EnvConfig().randomise_levels and not env.randomise:
        raise UserError(
            f"env.randomise_levels is {env.randomise_levels}, and no axis is randomised: name some by env.randomise, "
            "or leave the levels away"
        )
    pairs = [(axis, level) for axis in env.perturbed_axes for level in env.perturbed_levels]
    return tuple(graded(env.task, axis, level, config.policy.reads) for axis, level in pairs)


def _starts(config: Config) -> Starts:
    return Starts(config.env.recorded_starts, config.env.start_seeds, len(randomisation(config)))


def check_episode_groups(config: Config) -> None:
    """Raise `UserError` where environments and episode groups do not match."""
    size = config.rollout.episode_group
    for task in tasks_of(config):
        envs = task.env.num_envs
        if envs % size:
            near = max(size, round(envs / size) * size)
            raise UserError(
                f"{envs} environments of {task.env.task} do not make episode groups of {size}; set env.num_envs to "
                f"{near}, for example"
            )


def _sized(edges: Sequence[Edge], config: Config, by_episodes: bool) -> list[Edge]:
    """Edges with their sizes: components after the rollout receive whole episode groups, or everything at once."""
    unit = config.rollout.episode_group if by_episodes else 1
    after = {component.name for component in recipe_of(config).after_rollout}
    flows = streams(config)
    return [
        replace(edge, unit=unit, flow=edge.flow if flows else "barrier") if edge.target in after else edge
        for edge in edges
    ]


def name_in_task(name: str, number: int) -> str:
    """Name in plans of the simulators of a task: `physics`, `render`, `physics-1`, ..."""
    return f"{name}-{number}" if number else name


def holds_shards(config: Config, trained: float, whole: float, accelerated: bool) -> bool:
    """True if several ranks have shards of a policy of so many parameters (or bytes), of which so many are trained.

    `optim.sharding: auto` has shards where they save what is worth saving: gradients, moments and masters of most of
    the policy, on GPUs.
    """
    if config.optim.sharding == "auto":
        return accelerated and 2 * trained > whole
    return config.optim.sharding == "sharded"


def _of_task(name: str, number: int, recipe: Recipe) -> str:
    """The name of a task's component; what all tasks share has one name."""
    return name_in_task(name, number) if recipe.component(name).per_task else name


def _of_tasks(present: Sequence[WorkflowComponent], tasks: int) -> tuple[Component, ...]:
    found = []
    for component in present:
        for number in range(tasks if component.per_task else 1):
            name = name_in_task(component.name, number)
            found.append(Component(name, component.does, component.movable, number))
    return tuple(found)


def _edges_of_task(edges: Sequence[Edge], number: int, recipe: Recipe) -> list[Edge]:
    return [
        replace(edge, source=_of_task(edge.source, number, recipe), target=_of_task(edge.target, number, recipe))
        for edge in edges
    ]


def _without(edges: Sequence[Edge], present: Sequence[WorkflowComponent]) -> list[Edge]:
    """The edges among the components that are present; what an absent one passed on goes straight."""
    names = {component.name for component in present}
    kept = [edge for edge in edges if edge.source in names and edge.target in names]
    into = {edge.target: edge for edge in edges if edge.target not in names}
    for edge in edges:
        if edge.source in into and edge.source not in names:
            kept.append(Edge(into[edge.source].source, edge.target, edge.carries, edge.flow, edge.unit))
    return kept
