"""Offload in a run: rollout_worker and learner take turns in a device's memory, and renderers leave it for the update."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from embodied.execution.assignment import Assignment
from embodied.execution.learner_ranks import switch_of_ranks
from embodied.execution.roles import LearnerRole, PolicyRole, RolloutRole
from embodied.learning.offload import Switch
from embodied.run.trace import Span
from embodied.runtime.groups import WorkerGroup
from sim_farm.client.farm import Farm


@dataclass
class RunOffload:
    """Moves a run's workers into and out of memory. Each move of an iteration is a span of the driver, `switch`."""

    farm: Farm
    rollout_worker: WorkerGroup[Any]
    acting: WorkerGroup[Any]
    """The rollout_worker itself, or the replicas."""
    assignment: Assignment
    learner: WorkerGroup[Any]
    run_dir: Path
    """Weights that do not stay in memory go into a file of this folder."""
    farm_deadline_s: float
    traced: bool
    seconds: float = 0.0
    """Of the switches since it was last set to 0."""
    _renderers_away: bool = field(default=False, init=False)

    def to_learner(self) -> list[Span]:
        """The rollout_worker and the renderers leave the device's memory, and the learner comes back to it."""
        spans: list[Span] = []
        if self._apart.size:
            spans += self._switch(self.acting.name, partial(self._apart.call_all, PolicyRole.unload, self._spill))
        if self._draws:
            self._renderers_away = True
            spans += self._switch_renderers(RolloutRole.unload_renderers)
        return [*spans, *self._switch(self.learner.name, partial(self.learner.call_all, LearnerRole.load_back))]

    def acting_back(self) -> list[Span]:
        """Those who act with a policy of their own come back."""
        if not self._apart.size:
            return []
        return self._switch(self.acting.name, partial(self._apart.call_all, PolicyRole.load_back))

    def learner_leaves(self) -> list[Span]:
        return self._switch(self.learner.name, self.unload_learner)

    def unload_learner(self) -> list[Switch]:
        """The learner leaves: of ranks that somebody acts beside the optimiser alone, without the weights."""
        hosts = set(self.assignment.hosts)
        return self.learner.scatter(LearnerRole.unload, [(rank not in hosts,) for rank in range(self.learner.size)])

    def draw_again(self) -> list[Span]:
        """The renderers come back. Only before the rollout: until then a checkpoint may need the room."""
        if not self._renderers_away:
            return []
        self._renderers_away = False
        return self._switch_renderers(RolloutRole.load_renderers)

    def measured(self) -> dict[str, tuple[Switch, Switch]]:
        """Let the learner with its weights, the rollout_worker, and the renderers leave the memory and come back, once."""
        found = {
            self.learner.name: (
                switch_of_ranks(self.learner.call_all(LearnerRole.unload, True)),
                switch_of_ranks(self.learner.call_all(LearnerRole.load_back)),
            ),
            self.acting.name: (
                switch_of_ranks(self.acting.call_all(PolicyRole.unload, self._spill)),
                switch_of_ranks(self.acting.call_all(PolicyRole.load_back)),
            ),
        }
        if self._draws:
            found["render"] = (
                self.rollout_worker.call(RolloutRole.unload_renderers, self.farm_deadline_s),
                self.rollout_worker.call(RolloutRole.load_renderers, self.farm_deadline_s),
            )
        return found

    @property
    def _apart(self) -> WorkerGroup[Any]:
        """Those who act with a policy of their own."""
        return self.acting.some(self.assignment.apart)

    @property
    def _spill(self) -> Path:
        return self.run_dir / f"unloaded-{self.acting.name}.safetensors"

    @property
    def _draws(self) -> bool:
        return bool(self.farm.infos[0].cameras)

    def _switch_renderers(self, method: Any) -> list[Span]:
        tasks = ", ".join(dict.fromkeys(spec.task.name for spec in self.farm.specs))
        return self._switch(f"renderers of {tasks}", partial(self.rollout_worker.call_all, method, self.farm_deadline_s))

    def _switch(self, who: str, make: Callable[[], list[Switch]]) -> list[Span]:
        """Have a switch made; its span, where the run is traced."""
        begin = time.monotonic_ns()
        switched = switch_of_ranks(make())
        end = time.monotonic_ns()
        self.seconds += (end - begin) / 1e9
        args = {"worker": who, "bytes": switched.bytes}
        return [Span("driver", "switch", begin, end, args)] if self.traced else []
