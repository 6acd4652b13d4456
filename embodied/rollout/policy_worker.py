"""The policy worker: turns observations into decisions, and takes the learner's weights.

One policy worker also steps the environments: `PolicyWorker`. Where there are several, or the one is on another machine
than the farm, each is a `PolicyReplica` in a separate process, which a rollout worker sends requests
(`embodied.rollout.replicas`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from embodied.devices import Affinity, decide, value_of
from embodied.learning.offload import Offload, Switch
from embodied.learning.weight_sync import WeightsLoader, check_weights, map_weights
from embodied.rollout.environment_groups import DecisionRequest, EnvironmentGroup
from embodied.rollout.replicas import Message, ReplicaAddress, Replicas, Reply
from embodied.rollout.rollout_loop import Decided, RolloutSettings
from embodied.rollout.rollout_worker import RolloutWorker
from embodied.rollout.samplers import sampler_of
from embodied.run.trace import Span
from embodied.runtime.shared_tensors import SharedTensors
from embodied.trajectories.memory import (
    FrameCounts,
    MemoryLayout,
    MemoryShape,
    TrajectoryMemory,
)
from embodied.workflows.context import WorkerContext
from policies.contract import Action, Inputs, Policy
from policies.registry import policy_kind
from sim_farm.client.farm import Farm, FarmAddress
from sim_farm.client.observations import Observations
from sim_farm.contract import TaskInfo

FarmTasks: TypeAlias = Farm | FarmAddress
"""Tasks of a farm that is attached, or of one that may be out of reach."""
TRACK = "rollout loop"
"""Name of the rollout worker of replicas, and its track of the trace."""


class ActingPolicy(WeightsLoader):
    """A policy that decides for a farm's tasks, and whose weights change."""

    version: int = 0
    """Number of updates in the weights."""
    rank: int = 0
    """Number among the policy workers."""

    def __init__(
        self, policy: Policy | None, tasks: FarmTasks, settings: RolloutSettings, affinity: Affinity | None = None
    ) -> None:
        """`policy` None: `share` brings one."""
        self._tasks, self._settings = tasks, settings
        self._affinity = affinity or Affinity()
        self._offload: Offload | None = None
        if policy is not None:
            self.share(policy)

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        return self._policy

    # --- decisions

    def decide(self, request: DecisionRequest) -> Action:
        """A decision for each of the request's n rows."""
        return self._sampler.sample(request)

    def value(self, inputs: Inputs) -> Tensor:
        """[B] value of each observation, before an action is executed."""
        value = value_of(self.policy, inputs)
        return value if value.ndim == 1 else value[:, 0]

    def layout(self) -> MemoryLayout:
        """The memory that trajectories are written into, for decisions as the policy takes them."""
        cameras = self.policy.spec.cameras if self._tasks.frames is not None else ()
        columns = sum(spec.num_envs for spec in self._tasks.specs)
        history = self._tasks.specs[0].history
        shape = MemoryShape.of(self._settings.rounds, columns, cameras, self._tasks.infos, history)
        inputs = blank_inputs(self.policy, self._tasks.infos[0], self._settings.reads)
        return MemoryLayout.of(shape, inputs, decide(self.policy, inputs, torch.zeros(1, self.policy.noise_dim)))

    # --- weights

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load what the learner has trained: parameters and statistics.

        Raises `WrongWeights`, and keeps its own, unless they are exactly the policy's.
        """
        check_weights(self.policy, state)
        self._load(state)
        if isinstance(state, SharedTensors):
            state.require_unchanged()
        self.at_version(version)

    def share(self, policy: Policy) -> None:
        """Decide with this policy from now on: in the learner's process its own, so that no weights are copied."""
        self._policy = policy
        self._sampler = sampler_of(policy, self._settings.seeds, self._settings.published, publishes=self.rank == 0)

    def at_version(self, version: int) -> None:
        """Decide with the current weights, which contain `version` updates."""
        self.version = version
        self._sampler.at_version(version)

    def unload(self, spill: Path) -> Switch:
        """Move the policy out of the device's memory; `load_back` before the next rollout."""
        self._offload = Offload(spill, self.policy, None)
        return self._offload.unload()

    def load_back(self) -> Switch:
        """Move the policy into the device's memory again."""
        return self._offload.load() if self._offload is not None else Switch(0, 0.0)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Load weights that were checked."""
        self.policy.load_state_dict(dict(state), strict=False)


def blank_inputs(policy: Policy, info: TaskInfo, reads: Sequence[str]) -> Inputs:
    """One decision's observations of the task without content, as the policy reads them."""
    spec = policy.spec
    size, seen = spec.image_size, (1, spec.observations) if spec.observations > 1 else (1,)
    return Inputs(
        state=torch.zeros(*seen, info.state_dim) if "state" in reads else None,
        proprio=torch.zeros(*seen, info.proprio_dim) if "proprio" in reads else None,
        frames={name: torch.zeros(*seen, size, size, 3, dtype=torch.uint8) for name in spec.cameras},
        instruction=(policy_kind(policy.kind).blank_instruction,) if "instruction" in reads else (),
        episode=torch.zeros(1, 3, dtype=torch.int64) if "episode" in reads else None,
    )


class PolicyReplica(ActingPolicy):
    """One of several policy workers: answers the requests of a rollout worker."""

    def __init__(
        self, policy: Policy | None, tasks: FarmTasks, settings: RolloutSettings, context: WorkerContext
    ) -> None:
        """`policy` None: `share` brings one."""
        self.rank = context.rank
        super().__init__(policy, tasks, settings, context.affinity)
        self._memory: TrajectoryMemory | None = None
        self._mapped: SharedTensors | None = None
        """The acting weights, where they are another process's."""

    def map_frames(self, memory: TrajectoryMemory) -> None:
        """Read the frames of requests in this memory."""
        self._memory = memory

    def decide_request(self, request: Message[DecisionRequest]) -> Message[Reply[Action]]:
        """A decision for each row. Raises what the policy raises."""
        begin_ns, asked = time.monotonic_ns(), request.content
        if asked.frame_rows is not None:
            assert self._memory is not None, "a request by rows is for a replica that maps the memory"
            asked = replace(asked, inputs=replace(asked.inputs, frames=self._memory.view_frames(asked.frame_rows)))
        with self._affinity.applied():
            self._require_weights()
            action = self.decide(asked)
        return Message(Reply(action, self.version, time.monotonic_ns() - begin_ns))

    def value_request(self, request: Message[Inputs]) -> Message[Reply[Tensor]]:
        """[B] the values of observations. Raises what the policy raises."""
        begin_ns = time.monotonic_ns()
        with self._affinity.applied():
            self._require_weights()
            values = self.value(request.content)
        return Message(Reply(values, self.version, time.monotonic_ns() - begin_ns))

    def unload(self, spill: Path) -> Switch:
        """Unload as a policy worker does; each replica has a separate file."""
        return super().unload(spill.with_stem(f"{spill.stem}-{self.rank}"))

    def _load(self, state: Mapping[str, Tensor]) -> None:
        # Where the learner's process has published them, all replicas of the machine act with the same copy.
        if isinstance(state, SharedTensors):
            map_weights(self.policy, state)
            self._mapped = state
        else:
            super()._load(state)

    def _require_weights(self) -> None:
        """Raise `Overwritten` where the weights that it maps have been written over."""
        if self._mapped is not None:
            self._mapped.require_unchanged()


class LocalPolicy:
    """The policy of the rollout loop's own process: a decision is there as soon as it is requested."""

    replicas = 1

    def __init__(self, farm: Farm, settings: RolloutSettings, policy: ActingPolicy) -> None:
        self._farm, self._settings, self._policy = farm, settings, policy
        self._decided: list[Decided] = []
        self.spans: list[Span] = []
        self.frames = FrameCounts()

    @property
    def version(self) -> int:
        return self._policy.version

    def begin(self) -> None:
        self._decided = []

    def is_free(self) -> bool:
        return True

    def is_busy(self) -> bool:
        return bool(self._decided)

    def submit(self, group: EnvironmentGroup, seen: Observations, memory: TrajectoryMemory) -> None:
        begin = time.monotonic_ns()
        request = DecisionRequest.of(self._farm, group, seen, self._settings.reads, memory.shape.cameras)
        if request.inputs.frames and len(request.envs) < len(seen.envs):
            self.frames += FrameCounts(0, seen.frame_rows[seen.active].size)
        action = self._policy.decide(request)
        self._decided.append(Decided(group, request, action, begin, time.monotonic_ns()))

    def arrived(self) -> list[Decided]:
        decided, self._decided = self._decided, []
        return decided

    def wait(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        farm = self._farm
        farm.wait(lambda: self.is_busy() or is_ready(), lambda: farm.late(deadline_s), deadline_s, farm.progress_ns)

    def values(self, inputs: Inputs, deadline_s: float) -> Tensor:
        return self._policy.value(inputs)


class PolicyWorker(ActingPolicy, RolloutWorker):
    """The only policy worker of a run: decides for the environments that it steps."""

    def __init__(
        self, policy: Policy | None, farm: Farm, settings: RolloutSettings, affinity: Affinity | None = None
    ) -> None:
        """`policy` None: `share` brings one."""
        ActingPolicy.__init__(self, policy, farm, settings, affinity)
        RolloutWorker.__init__(self, farm, settings, LocalPolicy(farm, settings, self), "policy", affinity)

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
    def make_rollout_worker(cls, context: WorkerContext, addresses: Sequence[ReplicaAddress]) -> RolloutWorker:
        """The rollout worker of a run with replicas, which are at these addresses."""
        farm, settings = context.reach(), RolloutSettings.of(context)
        return RolloutWorker(farm, settings, Replicas(farm, settings, addresses), TRACK, context.affinity)
