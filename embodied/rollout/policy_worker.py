"""The policy worker: turns a farm's observations into decisions.

One policy worker also goes round with the farm, and gathers trajectories. Of several, the replicas only act
(`policy_replica`), for groups that a rollout worker in a process of its own hands them (`shared_loop`).
"""

from __future__ import annotations

from collections.abc import Sequence

from embodied.devices import Affinity
from embodied.rollout.acting import ActingPolicy, RolloutSettings
from embodied.rollout.policy_replica import PolicyReplica
from embodied.rollout.rollout_loop import LocalLoop
from embodied.rollout.rollout_worker import RolloutWorker
from embodied.rollout.shared_loop import SharedLoop
from embodied.workflows.context import WorkerContext
from policies.contract import Policy
from sim_farm.client.farm import Farm


class PolicyWorker(ActingPolicy, RolloutWorker):
    """Holds a policy, a farm, and the trajectory memory that both write into."""

    def __init__(
        self, policy: Policy | None, farm: Farm, settings: RolloutSettings, affinity: Affinity | None = None
    ) -> None:
        """`policy` None: it will be given one by `share`."""
        ActingPolicy.__init__(self, policy, farm, settings, affinity)
        RolloutWorker.__init__(self, farm, settings, LocalLoop(farm, settings, self._actor), affinity)

    @classmethod
    def make(cls, context: WorkerContext) -> PolicyWorker:
        """The policy worker of a run that has one."""
        return cls(context.policy(), context.reach(), RolloutSettings.of(context), context.affinity)

    @classmethod
    def make_replica(cls, context: WorkerContext) -> PolicyReplica:
        """One of a run's several policy workers."""
        assert context.farm is not None, "it acts for a farm, which it need not reach"
        return PolicyReplica(context.policy(), context.farm, RolloutSettings.of(context), context)

    @classmethod
    def make_loop(cls, context: WorkerContext, names: Sequence[str]) -> RolloutWorker:
        """The rollout worker of a run that has several replicas, of these names."""
        farm, settings = context.reach(), RolloutSettings.of(context)
        return RolloutWorker(farm, settings, SharedLoop(farm, settings, names), context.affinity)
