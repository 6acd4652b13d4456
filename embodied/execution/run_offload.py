"""Offload in a run: policy workers and learner take turns in a device's memory. Renderers leave it for the update."""

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
from embodied.runtime.handles import WorkerGroup
from sim_farm.client.farm import Farm


@dataclass
class RunOffload:
    """Moves a run's workers into and out of a device's memory. Each move is a span `switch` of the driver's trace."""

    farm: Farm
    rollout_worker: WorkerGroup[Any]
    acting: WorkerGroup[Any]
    """The policy workers: one, which is the rollout worker too, or the replicas."""
    assignment: Assignment
    learner: WorkerGroup[Any]
    run_dir: Path
    """Folder of files for weights that leave the host's memory."""
    farm_deadline_s: float
    seconds: float = 0.0
    """Seconds of the switches since it was last set to 0."""
    _renderers_away: bool = field(default=False, init=False)

    def to_learner(self) -> list[Span]:
        """Policy workers and renderers leave the device's memory, the learner returns to it."""
        spans: list[Span] = []
        if self._separate.size:
            spans += self._switch(self.acting.name, partial(self._separate.call_all, PolicyRole.unload, self._spill))
        if self._draws:
            self._renderers_away = True
            spans += self._switch_renderers(RolloutRole.unload_renderers)
        return [*spans, *self._switch(self.learner.name, partial(self.learner.call_all, LearnerRole.load_back))]

    def acting_back(self) -> list[Span]:
        """Policy workers with a policy of their own return."""
        if not self._separate.size:
            return []
        return self._switch(self.acting.name, partial(self._separate.call_all, PolicyRole.load_back))

    def learner_leaves(self) -> list[Span]:
        return self._switch(self.learner.name, self.unload_learner)

    def unload_learner(self) -> list[Switch]:
        """The learner leaves. Ranks whose policy a policy worker shares keep the weights."""
        hosts = set(self.assignment.hosts)
        return self.learner.scatter(LearnerRole.unload, [(rank not in hosts,) for rank in range(self.learner.size)])

    def draw_again(self) -> list[Span]:
        """The renderers return, before the rollout: until then a checkpoint may need the memory."""
        if not self._renderers_away:
            return []
        self._renderers_away = False
        return self._switch_renderers(RolloutRole.load_renderers)

    def measured(self) -> dict[str, tuple[Switch, Switch]]:
        """One switch out and one back of the learner with its weights, the policy workers, and the renderers."""
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
    def _separate(self) -> WorkerGroup[Any]:
        """Policy workers with a policy of their own."""
        return self.acting.some(self.assignment.apart)

    @property
    def _spill(self) -> Path:
        return self.run_dir / f"unloaded-{self.acting.name}.safetensors"

    @property
    def _draws(self) -> bool:
        return bool(self.farm.infos[0].cameras)

    def _switch_renderers(self, method: Any) -> list[Span]:
        tasks = ", ".join(dict.fromkeys(spec.task.name for spec in self.farm.specs))
        move = partial(self.rollout_worker.call_all, method, self.farm_deadline_s)
        return self._switch(f"renderers of {tasks}", move)

    def _switch(self, worker: str, make: Callable[[], list[Switch]]) -> list[Span]:
        """Make a switch. Returns its span."""
        begin = time.monotonic_ns()
        switched = switch_of_ranks(make())
        end = time.monotonic_ns()
        self.seconds += (end - begin) / 1e9
        args = {"worker": worker, "bytes": switched.bytes}
        return [Span("driver", "switch", begin, end, args)]
