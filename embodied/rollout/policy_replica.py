"""A policy replica: one of several policy workers, each in a process of its own. It acts, and does nothing else.

rollout worker -> desk -> decide for the group -> desk -> rollout worker
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from embodied import progress
from embodied.learning.offload import Switch
from embodied.learning.weight_sync import map_weights
from embodied.rollout.acting import ActingPolicy, FarmTasks, RolloutSettings, Shown
from embodied.rollout.replica_desk import Answer, Asked, Desk
from embodied.runtime.lent_tensors import LentTensors
from embodied.workflows.context import WorkerContext
from policies.contract import Policy


class PolicyReplica(ActingPolicy):
    """Decides what a rollout worker asks at its desk."""

    def __init__(
        self, policy: Policy | None, tasks: FarmTasks, settings: RolloutSettings, context: WorkerContext
    ) -> None:
        """`policy` None: it will be given one by `share`."""
        super().__init__(policy, tasks, settings, context.affinity)
        self.rank = context.rank
        self._desk: Desk | None = None
        self._rollouts = 0
        self._mapped: LentTensors | None = None
        """The weights that it acts with, where they are another process's."""

    def use(self, desk: Desk) -> None:
        """Serve at this desk from now on."""
        self._desk = desk
        self.at_version(self._actor.version)

    def serve(self) -> None:
        """Do what is asked at the desk until the rollout is over. Each call is for one rollout, in their order.

        Raises what the policy raises; the rollout worker knows it from the desk.
        """
        desk = self._desk
        assert desk is not None, "use says where the desk is"
        self._rollouts += 1
        with self._affinity.applied():
            try:
                while (asked := desk.next(self._rollouts)) is not None:
                    desk.answer(self._answer(asked))
                    progress.report()
            except BaseException:
                desk.fail()
                raise

    def at_version(self, version: int) -> None:
        super().at_version(version)
        if self._desk is not None:
            self._desk.note_version(version)

    def unload(self, spill: Path) -> Switch:
        """As a policy worker does; each replica has a file of its own."""
        return super().unload(spill.with_stem(f"{spill.stem}-{self.rank}"))

    def _take(self, state: Mapping[str, Tensor]) -> None:
        # Where the learner's process has lent them, all replicas of the machine act with the same copy.
        if isinstance(state, LentTensors):
            map_weights(self.policy, state)
            self._mapped = state
        else:
            super()._take(state)

    def _answer(self, asked: Asked) -> Answer:
        if self._mapped is not None:
            self._mapped.require_unchanged()
        return self._actor.decide(asked) if isinstance(asked, Shown) else self._actor.values(asked)
