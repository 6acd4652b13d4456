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
    """The components that go round, in order; the last one's result is what the first one needs for its next step."""

    components: tuple[str, ...]
    steps: int
    """Rounds per item: chunk steps of a rollout."""


@dataclass(frozen=True)
class Workflow:
    """One iteration. Edges of the loop are listed too, without the one that closes it."""

    name: str
    components: tuple[Component, ...]
    edges: tuple[Edge, ...]
    loop: Loop | None
    items: int
    """Items per iteration that pass through every component (environments, or episodes)."""
    waves: int = 1
    """The loop makes the items in so many equal parts, one after the other (episodes per environment)."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components)

    @property
    def travelling(self) -> frozenset[str]:
        return frozenset(component.name for component in self.components if component.travels)
