"""What flows: components, the data between them, the loop. Written by a person, free of hardware and of times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Flow = Literal["micro_batch", "barrier"]


@dataclass(frozen=True)
class Component:
    """One kind of work. Its times and memory are the profile's, its place is the plan's."""

    name: str
    does: str = ""
    """In a few words, for explanations."""
    travels: bool = False
    """May work on other nodes than the home of a cluster that has one."""
    task: int = 0
    """Of a run of several tasks, the one that it belongs to. Components of task i > 0 are called `physics-i`,
    `render-i`; what all tasks share (policy, learner) is of task 0."""


@dataclass(frozen=True)
class Edge:
    """Data that `source` makes and `target` needs."""

    source: str
    target: str
    carries: str
    flow: Flow = "barrier"
    """`micro_batch`: the target may begin as soon as a part is there; `barrier`: only when the source is done."""
    unit: int = 1
    """Parts are multiples of so many items (complete groups, an optimiser's minibatch)."""


@dataclass(frozen=True)
class Loop:
    """The components that go round, in order; the last one's result is what the first one needs for its next step.

    A run of several tasks has a loop for each. Loops share the components that they have in common (the policy).
    """

    components: tuple[str, ...]
    steps: int
    """Rounds per item: chunk steps of a rollout."""
    items: int = 0
    """Items per iteration that go round here: the task's environments, times episodes per environment. 0: all of the
    workflow's, where this is its only loop. Those of several loops add up to the workflow's."""
    name: str = ""
    """Of the task, for messages and explanations."""


@dataclass(frozen=True)
class Workflow:
    """One iteration. Edges of the loops are listed too, without the ones that close them."""

    name: str
    components: tuple[Component, ...]
    edges: tuple[Edge, ...]
    loops: tuple[Loop, ...]
    """One per task, in the order of tasks; none: the workflow is a graph without a rollout."""
    items: int
    """Items per iteration of all tasks (environments, or episodes) that pass through the components they share."""
    episodes_per_env: int = 1
    """Each environment makes so many items an iteration, one after the other."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components)

    @property
    def travelling(self) -> frozenset[str]:
        return frozenset(component.name for component in self.components if component.travels)

    def environments(self, loop: int) -> int:
        """Environments of one loop: the items that go round at the same time."""
        return (self.loops[loop].items or self.items) // self.episodes_per_env

    def task(self, loop: int) -> str:
        """What messages call a loop's task; empty where there is only one."""
        if len(self.loops) == 1:
            return ""
        name = self.loops[loop].name
        return f"task {loop} ({name})" if name else f"task {loop}"
