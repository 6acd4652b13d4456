"""Declared workflows: PPO, GRPO, REINFORCE++, StepNFT and their variants. Nothing that runs them knows their names or
those of their components.

A workflow says which components there are and which class of worker does each, what the edges between them carry and
in which portions, what a rollout is, which estimator gives decisions their advantages, and which loss an update
minimises. A new one is a `Recipe` (docs/workflows.md).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from embodied.config.schema import Config
from embodied.errors import UserError, nearest
from schedulers.workflow import Edge
from sim_farm.named_code import entry_point, entry_point_names, named

if TYPE_CHECKING:  # what computes imports torch: a declared workflow is known without
    from embodied.algorithms.estimators import Estimator
    from embodied.algorithms.losses import Objective


@dataclass(frozen=True)
class WorkflowComponent:
    """One kind of work, and the class of worker that does it."""

    name: str
    does: str
    """A few words, for explanations."""
    worker: str
    """The worker's class as `package.module:Class`. Classes of `sim_farm` live in the farm, one or several per task."""
    movable: bool = False
    """May work on other nodes than the one where the command is typed."""
    reads: tuple[str, ...] = ()
    """Sections of the configuration that are this component's: in a workflow without it they are refused."""
    adds: tuple[str, ...] = ()
    """Fields of `Trajectories` that are None before this component, and filled after."""

    @property
    def per_task(self) -> bool:
        """True if every task of a run has its own, as simulators are."""
        return self.worker.startswith("sim_farm.")

    def worker_class(self) -> Any:
        """The class. Raises `UserError` where it is not declared or cannot be imported."""
        if not self.worker:
            raise UserError(f"the component {self.name} names no class of worker; name one as package.module:Class")
        module, _, attribute = self.worker.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"the worker {self.worker!r} of {self.name} cannot be imported: {error}") from error

    def make(self, context: Any) -> Any:
        """The worker, from its `WorkerContext`: in the process that it works in."""
        return self.worker_class().make(context)


PHYSICS = WorkflowComponent(
    "physics", "steps the environments", "sim_farm.workers.physics_worker:PhysicsWorker", movable=True
)
RENDER = WorkflowComponent(
    "render", "draws the frames that the policy looks at", "sim_farm.workers.render_worker:RenderWorker"
)
POLICY = WorkflowComponent(
    "policy", "turns observations into action chunks", "embodied.rollout.policy_worker:PolicyWorker"
)
LEARNER = WorkflowComponent(
    "learner",
    "estimates advantages, updates the policy, publishes its weights",
    "embodied.learning.learner:Learner",
)
REFERENCE = WorkflowComponent(
    "reference",
    "evaluates decisions under the policy that training began with",
    "embodied.learning.scorers:ReferenceWorker",
    adds=("reference_log_prob",),
)
REWARD = WorkflowComponent(
    "reward",
    "computes rewards from frames and instructions, in place of the simulator",
    "embodied.learning.scorers:RewardWorker",
    reads=("reward",),
)


@dataclass(frozen=True)
class Recipe:
    """A workflow before sizes are known."""

    name: str
    components: tuple[WorkflowComponent, ...]
    edges: tuple[Edge, ...]
    loop: tuple[str, ...]
    """Components of the rollout loop, in order; the last one infers the actions."""
    rollout: Literal["decisions", "episodes"]
    """Unit of a rollout: a number of decisions of every environment, or whole episodes that come in episode groups."""
    estimator: str | Estimator
    """A name in `embodied.algorithms.estimators.ESTIMATORS`, or a function like its entries."""
    critic: bool
    """True if a value function is trained."""
    objective: str | Objective = "ratio"
    """The policy's term of the loss: a name in `embodied.algorithms.losses.OBJECTIVES`, or a function like those."""

    def estimator_function(self) -> Estimator:
        """The estimator itself."""
        from embodied.algorithms.estimators import ESTIMATORS

        return ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator

    def objective_function(self) -> Objective:
        """The objective itself."""
        from embodied.algorithms.losses import OBJECTIVES

        return OBJECTIVES[self.objective] if isinstance(self.objective, str) else self.objective

    @property
    def policy(self) -> WorkflowComponent:
        """The component that infers the actions."""
        return self.component(self.loop[-1])

    @property
    def learner(self) -> WorkflowComponent:
        """The component that updates the policy. Raises as `after_rollout` does."""
        return self.after_rollout[-1]

    @property
    def scorers(self) -> tuple[WorkflowComponent, ...]:
        """The components that trajectories pass through on their way to the learner. Raises as `after_rollout` does."""
        return self.after_rollout[:-1]

    def component(self, name: str) -> WorkflowComponent:
        return next(component for component in self.components if component.name == name)

    @property
    def after_rollout(self) -> tuple[WorkflowComponent, ...]:
        """The components that trajectories pass through, each after those that it hears from; the learner is the last.

        Raises `UserError` for edges that no component serves, or that form a cycle.
        """
        names = {component.name for component in self.components}
        for edge in self.edges:
            lost = {edge.source, edge.target} - names
            if lost:
                raise UserError(
                    f"the workflow {self.name} has an edge {edge.source} > {edge.target}, and no component {min(lost)}"
                )
        waiting = [component for component in self.components if component.name not in self.loop]
        known, found = set(self.loop), list[WorkflowComponent]()
        while waiting:
            ready = [c for c in waiting if all(e.source in known for e in self.edges if e.target == c.name)]
            if not ready:
                raise UserError(
                    f"in the workflow {self.name} {', '.join(c.name for c in waiting)} wait for each other: one of "
                    "their edges goes the wrong way"
                )
            found.append(ready[0])
            known.add(ready[0].name)
            waiting.remove(ready[0])
        return tuple(found)


def passing(recipe: Recipe, component: WorkflowComponent, name: str) -> Recipe:
    """The recipe with a component that trajectories pass through on their way to the learner."""
    into, rest = recipe.edges[-1], recipe.edges[:-1]
    edges = (*rest, replace(into, target=component.name), replace(into, source=component.name))
    components = (*recipe.components[:-1], component, recipe.components[-1])
    return replace(recipe, name=name, components=components, edges=edges)


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
    # Complete episode groups are all that advantages need; `streams` says whether the learner may begin with them.
    (*_ROLLING, Edge("policy", "learner", "episodes", "micro_batch")),
    _LOOP,
    rollout="episodes",
    estimator="group_relative",
    critic=False,
)
REINFORCE = replace(
    GRPO,
    name="reinforce",
    # Advantages are normalised over all episodes of an iteration.
    edges=(*_ROLLING, Edge("policy", "learner", "episodes", "barrier")),
    estimator="reinforce",
)
STEPNFT = replace(REINFORCE, name="stepnft", estimator="binary", objective="contrast")
PPO_REFERENCE = passing(PPO, REFERENCE, "ppo_reference")
GRPO_REFERENCE = passing(GRPO, REFERENCE, "grpo_reference")
REINFORCE_REFERENCE = passing(REINFORCE, REFERENCE, "reinforce_reference")
PPO_REWARD = passing(PPO, REWARD, "ppo_reward")
RECIPES = {
    recipe.name: recipe
    for recipe in (PPO, GRPO, REINFORCE, STEPNFT, PPO_REFERENCE, GRPO_REFERENCE, REINFORCE_REFERENCE, PPO_REWARD)
}


ENTRY_POINTS = "embodied_farm.workflows"
"""Group in which packages offer workflows, name to `module:NAME`. A name of `RECIPES` cannot be replaced."""


def recipe_of(config: Config) -> Recipe:
    """The recipe that the configuration names: one of `RECIPES`, your own as `package.module:NAME`, or an
    installed package's."""
    name = config.workflow
    if name in RECIPES:
        return RECIPES[name]
    recipe = named(name, UserError) if ":" in name else entry_point(ENTRY_POINTS, name, UserError)
    if recipe is None and ":" not in name:
        known = sorted({*RECIPES, *entry_point_names(ENTRY_POINTS)})
        raise UserError(f"no workflow {name!r}{nearest(name, known)}; your own is named package.module:NAME")
    if not isinstance(recipe, Recipe):
        raise UserError(f"{name} is a {type(recipe).__name__}, not an embodied.workflows.Recipe")
    return recipe
