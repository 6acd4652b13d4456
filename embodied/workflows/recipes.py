"""Workflows: what flows, declared. Nothing that runs them knows their names.

A workflow says which components there are, what they hand to each other and in which portions, what a rollout is,
and which estimator turns trajectories into rows. A new one is a `Recipe` of your own (docs/workflows.md).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Literal

from embodied.algorithms.estimators import ESTIMATORS, Estimator
from embodied.config import Config, parse_config
from embodied.errors import UserError, nearest
from schedulers.workflow import Component, Edge, Loop, Workflow
from sim_farm.episodes import EndlessEpisodes, Episodes, GroupedEpisodes

PHYSICS = Component("physics", "steps the environments", travels=True)
RENDER = Component("render", "draws the frames that the policy looks at")
POLICY = Component("policy", "turns observations into action chunks")
LEARNER = Component("learner", "estimates advantages, updates the policy, hands out its weights")


TASK_SEEDS = 1_000_003
"""Between the seeds of a run's tasks, so that environments of the same index do not draw the same noise."""


@dataclass(frozen=True)
class Recipe:
    """A workflow before sizes are known."""

    name: str
    components: tuple[Component, ...]
    edges: tuple[Edge, ...]
    loop: tuple[str, ...]
    rollout: Literal["decisions", "episodes"]
    """A rollout is so many decisions of every environment, or whole episodes that come in groups."""
    estimator: str | Estimator
    """A name in `embodied.algorithms.estimators.ESTIMATORS`, or a function like those there."""
    critic: bool
    """Whether a value function is trained."""

    def estimate(self) -> Estimator:
        return ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator


_COMPONENTS = (PHYSICS, RENDER, POLICY, LEARNER)
_LOOP = ("physics", "render", "policy")
_ROLLING = (
    Edge("physics", "render", "scenes", "micro_batch"),
    Edge("render", "policy", "frames", "micro_batch"),
)

PPO = Recipe(
    "ppo",
    _COMPONENTS,
    # Advantages are normalised and minibatches drawn over the whole batch: the learner needs all of it.
    (*_ROLLING, Edge("policy", "learner", "trajectories", "barrier")),
    _LOOP,
    rollout="decisions",
    estimator="gae",
    critic=True,
)
GRPO = Recipe(
    "grpo",
    _COMPONENTS,
    # Complete groups are all that advantages need; `streams` says whether the learner may begin with them.
    (*_ROLLING, Edge("policy", "learner", "episodes", "micro_batch")),
    _LOOP,
    rollout="episodes",
    estimator="group_relative",
    critic=False,
)
RECIPES = {recipe.name: recipe for recipe in (PPO, GRPO)}


def recipe_of(config: Config) -> Recipe:
    """The recipe that the configuration names: `ppo`, `grpo`, or `package.module:NAME` for one of your own."""
    name = config.workflow
    if name in RECIPES:
        return RECIPES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(f"no workflow {name!r}{nearest(name, sorted(RECIPES))}; your own is named package.module:NAME")
    try:
        recipe = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the workflow {name!r} cannot be imported: {error}") from error
    if not isinstance(recipe, Recipe):
        raise UserError(f"{name} is a {type(recipe).__name__}, not an embodied.workflows.Recipe")
    return recipe


def streams(config: Config) -> bool:
    """Whether the learner may work on a part of an iteration's rows while others are still rolled out.

    Only where the update is one optimiser step over all rows: then it is a sum over parts, in their order.
    """
    recipe, optim = recipe_of(config), config.optim
    one_step = not recipe.critic and optim.epochs == 1 and optim.minibatch == 0
    return recipe.rollout == "episodes" and one_step and groups_suffice(config)


def groups_suffice(config: Config) -> bool:
    """Whether the estimator needs no more than complete groups: its edge to the learner says so. Else it is shown
    all of an iteration's episodes at once."""
    flows = [edge.flow for edge in recipe_of(config).edges if edge.target == "learner"]
    return "barrier" not in flows and config.advantage.scale != "batch"


def workflow_of(config: Config, max_episode_steps: int) -> Workflow:
    """The configuration's workflow with its sizes. Raises `UserError` for groups that the environments do not fill."""
    recipe, env = recipe_of(config), config.env
    draws = "images" in config.policy.reads
    present = tuple(c for c in recipe.components if draws or c.name != "render")
    waves, steps = 1, config.rollout.decisions
    if recipe.rollout == "episodes":
        check_groups(config)
        waves, steps = config.rollout.episodes_per_env, math.ceil(max_episode_steps / config.policy.chunk)
    unit = config.rollout.episode_group if recipe.rollout == "episodes" else 1
    edges = tuple(
        replace(edge, unit=unit, flow=edge.flow if streams(config) else "barrier") if edge.target == "learner" else edge
        for edge in _without(recipe.edges, present)
    )
    loop = tuple(name for name in recipe.loop if any(c.name == name for c in present))
    return Workflow(recipe.name, present, edges, Loop(loop, steps), env.num_envs * waves, waves)


def episodes_of(config: Config, seed: int) -> Episodes:
    """The training episodes of the configuration's workflow."""
    if recipe_of(config).rollout == "episodes":
        check_groups(config)
        return GroupedEpisodes(seed, config.rollout.episode_group, config.env.init_states)
    return EndlessEpisodes(seed, config.env.init_states)


def configs_of_tasks(config: Config) -> tuple[Config, ...]:
    """The configuration of each task of the run, the main one first. Each has seeds of its own.

    Raises `UserError` for keys of `also` that `env` does not have.
    """
    found = [config.model_copy(update={"also": ()})]
    for number, differs in enumerate(config.extra_tasks, start=1):
        data = config.model_dump(mode="json")
        data |= {"env": {**data["env"], **differs}, "seed": (config.seed + number * TASK_SEEDS) % 2**31, "also": ()}
        found.append(parse_config(data, f"also[{number - 1}]"))
    return tuple(found)


def check_credit(config: Config) -> None:
    """Raise `UserError` where single actions have credit and ratios are taken over more than that."""
    if config.advantage.credit == "action" and config.loss.ratio_unit == "chunk":
        raise UserError("advantage.credit is action, and loss.ratio_unit chunk: set it to action or element")


def check_groups(config: Config) -> None:
    """Raise `UserError` where environments and groups do not match."""
    size, envs = config.rollout.episode_group, config.env.num_envs
    if envs % size:
        near = max(size, round(envs / size) * size)
        raise UserError(f"{envs} environments do not make groups of {size}; set env.num_envs to {near}, for example")


def _without(edges: tuple[Edge, ...], present: tuple[Component, ...]) -> tuple[Edge, ...]:
    """The edges among the components that are present; what an absent one passed on goes straight."""
    names = {component.name for component in present}
    kept = [edge for edge in edges if edge.source in names and edge.target in names]
    into = {edge.target: edge for edge in edges if edge.target not in names}
    for edge in edges:
        if edge.source in into and edge.source not in names:
            kept.append(Edge(into[edge.source].source, edge.target, edge.carries, edge.flow, edge.unit))
    return tuple(kept)
