"""Acting: a policy decides for groups of environments, and values observations.

The rollout loop does it in its own process, or has policy replicas do it in theirs. Either way a group's decision is a
function of the policy, the group's observations and the noise of their (environment, episode, step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from embodied.devices import Affinity, decide, value_of
from embodied.learning.offload import Offload, Switch
from embodied.learning.weight_sync import WeightsLoader, check_weights
from embodied.runtime.lent_tensors import LentTensors
from embodied.trajectories.assembly import Decision
from embodied.trajectories.batch import to_inputs
from embodied.trajectories.memory import FrameCounts, MemoryLayout, MemoryShape, TrajectoryMemory
from embodied.trajectories.random_streams import SamplingNoise
from embodied.workflows.context import WorkerContext, bootstrap_of
from policies.contract import Action, Inputs, Policy
from sim_farm.farm import Farm, FarmAddress
from sim_farm.observations import Observations


@dataclass(frozen=True)
class RolloutSettings:
    """What of a configuration decides what a policy worker computes."""

    reads: tuple[str, ...]
    """What of an observation the policy is shown."""
    seeds: tuple[int, ...]
    """Of each task: noise is keyed by it."""
    bootstrap: str
    """Ends of episodes whose own final observation is valued: `never`, `truncated` or `always`."""
    rounds: int
    """Decisions of each environment that the trajectory memory must hold at once."""
    trace: bool = True
    """Whether spans are made."""
    curriculum: float = 0.0
    """Share of episodes whose start a curriculum draws."""
    task_curriculum: float = 0.0
    """Share of decisions that a curriculum gives to tasks."""

    @classmethod
    def of(cls, context: WorkerContext) -> RolloutSettings:
        """Of a run."""
        config = context.config
        return cls(
            config.policy.reads,
            context.seeds,
            bootstrap_of(config),
            context.rounds,
            config.runtime.trace,
            config.rollout.curriculum,
            config.rollout.task_curriculum,
        )


class EnvironmentGroup:
    """One group of environments: where it is in the memory, and what it has decided."""

    def __init__(self, number: int, task: int, columns: np.ndarray, place: int) -> None:
        self.number, self.task = number, task
        self.columns = columns
        """Of the run's environments."""
        self.places = np.arange(place, place + len(columns))
        """Columns of the trajectory memory."""
        self.row = 0
        """Of the memory: where its present observation is, or will be."""
        self.seen: Observations | None = None
        self.pending: Decision | None = None
        """The decision whose outcome is not known yet."""
        self.decisions: list[Decision] = []
        self.arrow = 0
        """Number of the trace's arrow from its observation to the next decision."""

    def flat(self, row: int, width: int) -> np.ndarray:
        """[n] flat rows of its environments at a row of the memory."""
        return row * width + self.places


def groups_of(farm: Farm) -> tuple[EnvironmentGroup, ...]:
    """The farm's groups; in the memory their environments lie next to each other."""
    offsets = np.cumsum([0, *(spec.num_envs for spec in farm.specs)])
    found, place = [], 0
    for number in range(farm.groups):
        task, envs = farm.task_of(number), farm.envs_of(number)
        found.append(EnvironmentGroup(number, task, envs + offsets[task], place))
        place += len(envs)
    return tuple(found)


@dataclass(frozen=True)
class Shown:
    """What a policy is shown of a group: those n of its environments that have an episode."""

    task: int
    envs: np.ndarray
    """int64 [n] of the task, as the next two: noise is keyed by them."""
    episode: np.ndarray
    step: np.ndarray
    """Env steps of the episode so far."""
    inputs: Inputs
    """n rows."""


class Actor:
    """A policy that acts, wherever what it is shown comes from."""

    policy: Policy
    version: int = 0
    """Updates that the policy has seen."""

    def __init__(self, seeds: tuple[int, ...]) -> None:
        self._seeds = seeds

    def act_with(self, policy: Policy) -> None:
        """Decide with this policy from now on."""
        self.policy = policy
        self._noise = [SamplingNoise(seed, policy.noise_dim) for seed in self._seeds]

    def decide(self, shown: Shown) -> Action:
        """A decision for each of its n rows."""
        noise = self._noise[shown.task].draw(shown.envs, shown.episode, shown.step)
        return decide(self.policy, shown.inputs, torch.from_numpy(noise))

    def values(self, inputs: Inputs) -> Tensor:
        """[B] the value of each observation before anything is done there."""
        value = value_of(self.policy, inputs)
        return value if value.ndim == 1 else value[:, 0]


class Observer:
    """Between a farm and whoever acts: shows what a group observes, and writes down what is decided for it."""

    def __init__(self, farm: Farm, settings: RolloutSettings) -> None:
        self._farm, self._settings = farm, settings
        self._copies = 0
        """Frames that were copied because other environments of their group rest."""

    def show(self, group: EnvironmentGroup, seen: Observations, cameras: tuple[str, ...]) -> Shown:
        """The environments of the group that have an episode; `cameras` are the policy's names."""
        rows = np.flatnonzero(seen.active)
        inputs = to_inputs(seen, self._settings.reads, self._farm.specs[group.task].episodes, cameras)
        if len(rows) < len(seen.envs):
            inputs = inputs.rows(torch.from_numpy(rows))
            self._copies += len(rows) if inputs.frames else 0
        return Shown(group.task, seen.envs[rows], seen.episode[rows], seen.episode_step[rows], inputs)

    def write(
        self, seen: Observations, shown: Shown, action: Action, memory: TrajectoryMemory, flat: np.ndarray
    ) -> np.ndarray:
        """Keep what was decided at the flat rows `flat` [n] of the group's environments. Their chunks float32
        [n, C, A]; zeros for environments that rest."""
        rows = np.flatnonzero(seen.active)
        memory.write_decision(flat[rows], shown.inputs, action)
        decided: np.ndarray = action.chunk.numpy()
        if len(rows) == len(seen.envs):
            return decided
        chunks = np.zeros((len(seen.envs), *decided.shape[1:]), np.float32)
        chunks[rows] = decided
        return chunks

    def frames(self, memory: TrajectoryMemory) -> FrameCounts:
        """Frames that this process has read back from the memory so far, and its copies of frames, those made to show
        them too."""
        return memory.counts + FrameCounts(0, self._farm.frame_copies + self._copies)


FarmTasks: TypeAlias = Farm | FarmAddress
"""A farm's tasks: of one that is attached, or of one that may be out of reach."""


class ActingPolicy(WeightsLoader):
    """What every worker that acts has: a policy for a farm's tasks, and how its weights change."""

    def __init__(
        self,
        policy: Policy | None,
        tasks: FarmTasks,
        settings: RolloutSettings,
        affinity: Affinity | None = None,
    ) -> None:
        """`policy` None: it will be given one by `share`."""
        self._tasks, self._settings = tasks, settings
        self._affinity = affinity or Affinity()
        self._offload: Offload | None = None
        self._actor = Actor(settings.seeds)
        if policy is not None:
            self.share(policy)

    @property
    def policy(self) -> Policy:
        """The policy that acts."""
        return self._actor.policy

    def layout(self) -> MemoryLayout:
        """The memory that trajectories are written into, for decisions as the policy takes them."""
        cameras = self.policy.spec.cameras if self._tasks.frames is not None else ()
        shape = MemoryShape(self._settings.rounds + 1, sum(spec.num_envs for spec in self._tasks.specs), cameras)
        inputs = self._blank_inputs()
        return MemoryLayout.of(shape, inputs, decide(self.policy, inputs, torch.zeros(1, self.policy.noise_dim)))

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take what the learner has trained: parameters and statistics.

        Raises `WrongWeights`, and goes on with those that it has, unless they are exactly the policy's.
        """
        check_weights(self.policy, state)
        self._take(state)
        if isinstance(state, LentTensors):
            state.require_unchanged()
        self.at_version(version)

    def share(self, policy: Policy) -> None:
        """Act with the learner's own policy, which is in this process: nothing is copied any more."""
        self._actor.act_with(policy)

    def at_version(self, version: int) -> None:
        """The policy has seen so many updates."""
        self._actor.version = version

    def unload(self, spill: Path) -> Switch:
        """Let the policy leave the device's memory; `load_back` before the next rollout."""
        self._offload = Offload(spill, self.policy, None)
        return self._offload.unload()

    def load_back(self) -> Switch:
        """Return to the device's memory."""
        return self._offload.load() if self._offload is not None else Switch(0, 0.0)

    def _take(self, state: Mapping[str, Tensor]) -> None:
        """Have the policy act with weights that were checked."""
        self.policy.load_state_dict(dict(state), strict=False)

    def _blank_inputs(self) -> Inputs:
        """One observation without content, as the policy reads them."""
        spec, reads, size = self.policy.spec, self._settings.reads, self.policy.spec.image_size
        info = self._tasks.infos[0]
        return Inputs(
            state=torch.zeros(1, info.state_dim) if "state" in reads else None,
            proprio=torch.zeros(1, info.proprio_dim) if "proprio" in reads else None,
            frames={name: torch.zeros(1, size, size, 3, dtype=torch.uint8) for name in spec.cameras},
            instruction=("do nothing",) if "instruction" in reads else (),
            episode=torch.zeros(1, 3, dtype=torch.int64) if "episode" in reads else None,
        )
