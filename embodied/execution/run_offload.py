"""Offload in a run: policy workers and learner take turns in a device's memory. Renderers leave it for the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from embodied.execution.roles import LearnerRole, PolicyRole, RolloutRole
from embodied.execution.run_workers import RunWorkers
from embodied.learning.offload import Switch
from embodied.runtime.handles import WorkerGroup


@dataclass
class RunOffload:
    """Moves a run's workers into and out of a device's memory. Each move is a span `switch` of the driver's trace."""

    run: RunWorkers
    seconds: float = 0.0
    """Seconds of the switches since it was last set to 0."""
    _renderers_away: bool = field(default=False, init=False)

    def to_learner(self) -> None:
        """Policy workers and renderers leave the device's memory, the learner returns to it."""
        if self._separate.size:
            self._switch(self.run.acting.name, partial(self._separate.call_all, PolicyRole.unload, self._spill))
        if self._draws:
            self._renderers_away = True
            self._switch_renderers(RolloutRole.unload_renderers)
        self._switch(self.run.learner.name, partial(self.run.learner.call_all, LearnerRole.load_back))

    def acting_back(self) -> None:
        """Policy workers that share no learner's policy return."""
        if self._separate.size:
            self._switch(self.run.acting.name, partial(self._separate.call_all, PolicyRole.load_back))

    def learner_leaves(self) -> None:
        self._switch(self.run.learner.name, self.unload_learner)

    def unload_learner(self) -> list[Switch]:
        """The learner leaves. Ranks whose policy a policy worker shares keep the weights."""
        learner, hosts = self.run.learner, set(self.run.assignment.hosts)
        return learner.scatter(LearnerRole.unload, [(rank not in hosts,) for rank in range(learner.size)])

    def draw_again(self) -> None:
        """The renderers return, before the rollout: until then a checkpoint may need the memory."""
        if self._renderers_away:
            self._renderers_away = False
            self._switch_renderers(RolloutRole.load_renderers)

    def measured(self) -> dict[str, tuple[Switch, Switch]]:
        """One switch out and one back of the learner with its weights, the policy workers, and the renderers."""
        run = self.run
        switches = {
            run.learner.name: (
                _together(run.learner.call_all(LearnerRole.unload, True)),
                _together(run.learner.call_all(LearnerRole.load_back)),
            ),
            run.acting.name: (
                _together(run.acting.call_all(PolicyRole.unload, self._spill)),
                _together(run.acting.call_all(PolicyRole.load_back)),
            ),
        }
        if self._draws:
            switches["render"] = (
                run.rollout_worker.call(RolloutRole.unload_renderers, run.farm_deadline_s),
                run.rollout_worker.call(RolloutRole.load_renderers, run.farm_deadline_s),
            )
        return switches

    @property
    def _separate(self) -> WorkerGroup[Any]:
        """Policy workers that share no learner's policy."""
        return self.run.acting.some(self.run.assignment.apart(self.run.acting.size))

    @property
    def _spill(self) -> Path:
        return self.run.run_dir / f"unloaded-{self.run.acting.name}.safetensors"

    @property
    def _draws(self) -> bool:
        return bool(self.run.farm.infos[0].cameras)

    def _switch_renderers(self, method: Any) -> None:
        tasks = ", ".join(dict.fromkeys(spec.task.name for spec in self.run.farm.specs))
        self._switch(f"renderers of {tasks}", lambda: [self.run.rollout_worker.call(method, self.run.farm_deadline_s)])

    def _switch(self, worker: str, make: Callable[[], list[Switch]]) -> None:
        begin = time.monotonic_ns()
        switched = _together(make())
        end = time.monotonic_ns()
        self.seconds += (end - begin) / 1e9
        self.run.spans.mark("driver", "switch", begin, end, worker=worker, bytes=switched.bytes)


def _together(switches: Sequence[Switch]) -> Switch:
    """One switch of workers that leave, or return, at the same time."""
    return Switch(sum(one.bytes for one in switches), max(one.seconds for one in switches))
