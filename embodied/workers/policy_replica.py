"""A policy replica: one of several policy workers, each in a process of its own. It acts, and does nothing else.

rollout worker -> desk -> look at the group, act, write into the trajectory memory -> desk -> rollout worker
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from embodied import progress
from embodied.data.trajectory_memory import TrajectoryMemory
from embodied.workers.acting import ActingPolicy, RolloutSettings, groups_of
from embodied.workers.context import WorkerContext
from embodied.workers.desks import Desks, Request, Work
from embodied.workers.lent_tensors import LentTensors
from embodied.workers.offload import Switch
from embodied.workers.weights import map_weights
from policies.contract import Policy
from sim_farm.farm import Farm


class PolicyReplica(ActingPolicy):
    """Looks at a farm that the rollout worker drives."""

    def __init__(self, policy: Policy | None, farm: Farm, settings: RolloutSettings, context: WorkerContext) -> None:
        """`policy` None: it will be given one by `share`."""
        super().__init__(policy, farm, settings, context.affinity)
        self.rank = context.rank
        self._groups = groups_of(farm)
        self._width = sum(len(group.columns) for group in self._groups)
        self._desks: Desks | None = None
        self._rollouts = 0
        self._mapped: LentTensors | None = None
        """The weights that it acts with, where they are another process's."""

    def use(self, memory: TrajectoryMemory, desks: Desks) -> None:
        """Write into this memory from now on, and serve at this desk."""
        self._memory, self._desks = memory, desks
        self.at_version(self._actor.version)

    def serve(self) -> None:
        """Do what is asked at the desk until the rollout is over. Each call is for one rollout, in their order.

        Raises what the policy raises; the rollout worker knows it from the desk.
        """
        assert self._desks is not None, "use says where the desk is"
        self._rollouts += 1
        with self._affinity.applied():
            try:
                while (request := self._desks.next_request(self.rank, self._rollouts)) is not None:
                    self._do(request, self._desks)
                    self.farm.ring_client()
                    progress.report()
            except BaseException:
                self._desks.fail(self.rank)
                self.farm.ring_client()
                raise

    def at_version(self, version: int) -> None:
        super().at_version(version)
        if self._desks is not None:
            self._desks.note_version(self.rank, version)

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

    def _do(self, request: Request, desks: Desks) -> None:
        begin = time.monotonic_ns()
        if self._mapped is not None:
            self._mapped.require_unchanged()
        before = self._actor.frames(self._memory)
        if request.work is Work.ACT:
            group = self._groups[request.group]
            flat = group.flat(request.row, self._width)
            acted = self._actor.act(group, self.farm.look(group.number), self._memory, flat)
            desks.chunks(self.rank, len(flat))[...] = acted.chunks
        else:
            found = self._actor.values(desks.inputs(self.rank, request.count))
            desks.values(self.rank, request.count)[...] = found
        desks.finish(self.rank, request, begin, self._actor.frames(self._memory) - before)
