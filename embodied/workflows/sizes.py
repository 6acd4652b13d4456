"""A run's workflow with its sizes: components and edges of each task, as plans take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.workflows.recipes import Recipe, WorkflowComponent
from embodied.workflows.run_spec import RunSpec
from schedulers.workflow import Component, Edge, Loop, Workflow


def workflow_of(run: RunSpec, max_episode_steps: Sequence[int]) -> Workflow:
    """The run's workflow with its sizes; `max_episode_steps` of each task. Raises `UserError` for episode groups that
    the environments do not fill."""
    config, recipe, tasks = run.config, run.recipe, run.tasks
    run.check_episode_groups()
    present = [c for c in recipe.components if run.images or c.name != "render"]
    episodes = config.rollout.episodes_per_env if run.by_episodes else 1
    edges = _sized(_without(recipe.edges, present), run)
    names = [c.name for c in present]
    loop = [name for name in recipe.loop if name in names]
    loops = tuple(
        Loop(
            tuple(_of_task(name, number, recipe) for name in loop),
            math.ceil(steps / config.policy.chunk) if run.by_episodes else config.rollout.decisions,
            task.env.num_envs * episodes if len(tasks) > 1 else 0,
            task.env.task if len(tasks) > 1 else "",
        )
        for number, (task, steps) in enumerate(zip(tasks, max_episode_steps, strict=True))
    )
    items = run.environments * episodes
    components = _of_tasks(present, len(tasks))
    every = tuple(edge for number in range(len(tasks)) for edge in _edges_of_task(edges, number, recipe))
    return Workflow(recipe.name, components, tuple(dict.fromkeys(every)), loops, items, episodes)


def physics_workers_of(config: Config, cores: int) -> int:
    """Number of processes that step the environments of each task on `cores` cores, without a plan."""
    return config.farm.physics_workers or (1 if config.runtime.mode == "inline" else cores)


def check_instances(config: Config, ranks: int, replicas: int, groups: int) -> None:
    """Raise `UserError` for more ranks than rows of a minibatch, and where one of the policy workers would never have a
    group of environments to decide for."""
    rows = config.optim.minibatch
    if rows and ranks > rows:
        raise UserError(
            f"the learner has {ranks} ranks, and a minibatch {rows} rows: each rank takes one or more; set optim.ranks "
            f"to {rows} or less, or optim.minibatch to {ranks} or more"
        )
    if replicas > groups:
        raise UserError(
            f"{replicas} policy replicas would share {groups} groups of environments, and {replicas - groups} of them "
            f"would never act: set policy.replicas to {groups} or less, or farm.groups to more (better twice as many "
            "groups as replicas: one is simulated while another is inferred)"
        )


def _sized(edges: Sequence[Edge], run: RunSpec) -> list[Edge]:
    """Edges with their sizes: components after the rollout receive whole episode groups, or everything at once."""
    unit = run.config.rollout.episode_group if run.by_episodes else 1
    after = {component.name for component in run.recipe.after_rollout}
    return [
        replace(edge, unit=unit, flow=edge.flow if run.streams else "barrier") if edge.target in after else edge
        for edge in edges
    ]


def name_in_task(name: str, number: int) -> str:
    """Name in plans of the simulators of a task: `physics`, `render`, `physics-1`, ..."""
    return f"{name}-{number}" if number else name


def holds_shards(config: Config, trained: float, whole: float, accelerated: bool) -> bool:
    """True if several ranks have shards of a policy of so many parameters (or bytes), of which so many are trained.

    `optim.sharding: auto` has shards where they save what is worth saving: gradients, moments and masters of most of
    the policy, on GPUs. What is quantised has none.
    """
    if config.optim.sharding == "auto":
        return accelerated and 2 * trained > whole and config.policy.base is config.optim.moments is None
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
