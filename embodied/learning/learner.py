"""The learner: updates the policy from trajectories.

    receive     take a part of the rollout; estimate its advantages, if its episode groups suffice for that
    finish      estimate what needs all parts (GAE), then update the policy on the samples (`update`)

Decisions that are masked, or that carry no gradient, never reach the policy. Where the update is one optimiser step
over all samples, its gradient is a sum over parts, and each part's is added up when it is received.

A learner may be several ranks (`parallel`). Each has all trajectories, whose frames stay where they are, and so
computes the same advantages, permutations and denominators. Each evaluates its share of a minibatch's samples;
gradients and statistics are summed once per optimiser step. All ranks take the step that one rank alone would take.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from embodied.algorithms.controls import UpdateControls
from embodied.algorithms.samples import Samples, join_samples, samples_of
from embodied.config.schema import Config
from embodied.devices import (
    Affinity,
    available_threads,
    await_devices,
    device_of,
    forget_peak,
    peak_bytes,
    useful_threads,
)
from embodied.errors import UserError
from embodied.learning.offload import Offload, Switch
from embodied.learning.optimizer import make_optimizer
from embodied.learning.parallel import ReplicatedPolicy, values_of
from embodied.learning.trained_policy import TrainedPolicy
from embodied.learning.update import LossFunction, Update, metrics_of
from embodied.learning.weight_sync import WeightsPublisher
from embodied.metric import Metric
from embodied.run import checkpoint
from embodied.runtime.ranks import Ranks
from embodied.trajectories.batch import StoredDecisions, Trajectories, join_columns, without_broken_episodes
from embodied.trajectories.memory import FrameCounts, TrajectoryMemory
from embodied.workflows.context import WorkerContext
from embodied.workflows.run_spec import RunSpec
from policies.capabilities import Observes
from policies.contract import Policy

METRICS = (
    Metric("learner/policy_lr", "rate", "Learning rate of the policy."),
    Metric("learner/frames_read", "frames", "Frames that were read back from the trajectory memory."),
    Metric("learner/frame_copies", "copies", "Copies of frames that this took."),
    Metric("learner/broken_episodes", "episodes", "Episodes left out, since a reward or observation was not finite."),
    Metric("learner/update_s", "s", "Time of the update, advantages included."),
)


@dataclass(frozen=True)
class ReceivedPart:
    """Counts of a part of an iteration's trajectories that the learner has received."""

    samples: int
    """Number of decisions to learn from."""
    groups: int
    """Number of informative episode groups: groups in which at least one decision carries a gradient."""
    learn_s: float
    """Seconds that the learner spent on this part of the batch."""


@dataclass(frozen=True)
class TrainedBytes:
    """Size of a learner's policy."""

    parameters: int
    """Bytes of all parameters."""
    trained: int
    """Bytes of the trained parameters, and of one gradient. With adapters, theirs alone."""
    weights: int
    """Bytes that are published."""


@dataclass
class _Received:
    """Trajectories and samples of the present iteration."""

    batches: list[Trajectories] = field(default_factory=list)
    """Parts whose advantages are estimated together."""
    samples: list[Samples] = field(default_factory=list)
    """Samples of each part that was estimated alone."""
    to_accumulate: list[Samples] = field(default_factory=list)
    """Samples of parts whose gradient is not added up yet."""
    lag: int = 0
    """Updates by which the oldest part's policy is behind the present one."""
    broken_episodes: int = 0
    """Episodes whose rewards were not finite."""
    frames: FrameCounts = field(default_factory=FrameCounts)
    seconds: float = 0.0


class Learner(TrainedPolicy, WeightsPublisher):
    """Owner of the policy that is trained, and of its optimiser. `receive` each part of a rollout, then `finish`."""

    takes: ClassVar[frozenset[str]] = frozenset({"trajectories", "episodes"})
    """Data of edges to the learner."""

    def __init__(
        self,
        policy: Policy,
        run: RunSpec,
        run_dir: Path,
        affinity: Affinity | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` are not connected yet (`join`); None: this learner is the only one."""
        config = run.config
        self._device = device_of(policy)
        self._run_dir = run_dir
        self._recipe = run.recipe
        self._estimate = self._recipe.estimator_function()
        self._controls = UpdateControls(config)
        most = affinity or Affinity((), available_threads())
        rows = config.optim.micro_batch or config.optim.minibatch or config.env.num_envs * config.rollout.decisions
        affinity = replace(most, threads=useful_threads(policy, rows, most.threads))
        super().__init__(policy, config, affinity, ranks)
        self._accumulates = run.streams
        """The update is one step, whose gradient is a sum over parts."""
        self._estimates_together = not run.groups_suffice
        """The estimator needs all parts of an iteration at once."""
        forget_peak(device_of(policy))
        self._offload: Offload | None = None
        self._memory: TrajectoryMemory | None = None
        """The trajectories' memory, kept so that it is mapped and pinned once."""
        self._received = _Received()

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` where the critic of `policy.init` predicts in other units than the run's."""
        UpdateControls(config)

    @classmethod
    def make(cls, context: WorkerContext) -> Learner:
        """The learner of a run."""
        policy = context.policy()
        assert policy is not None, "the learner's policy is the one that others share"
        ranks = Ranks("learner", context.rank, context.ranks, device_of(policy))
        return cls(policy, context.run, context.run_dir, context.affinity, ranks)

    def _use(self, parallel: ReplicatedPolicy) -> None:
        super()._use(parallel)
        optim = self._config.optim
        self.optimizer = make_optimizer(
            self.policy, optim, policy_lr=optim.policy_lr, value_lr=optim.value_lr, eps=optim.adam_eps
        )
        credit, critic = self._config.advantage.credit, self._recipe.critic
        self._update = Update(
            parallel,
            loss=LossFunction(self._config.loss, credit, critic, self._recipe.objective_function()),
            optimizer=self.optimizer,
            config=self._config,
            run_dir=self._run_dir,
        )

    # --- learning

    def update(self, batch: Trajectories, iteration: int) -> dict[str, float]:
        """`receive` and `finish`, for a rollout in one part."""
        self.receive(batch, iteration)
        return self.finish(iteration)

    def receive(self, batch: Trajectories, iteration: int) -> ReceivedPart:
        """Take a part of the iteration's trajectories.

        An estimator that needs the whole rollout (GAE) only has it kept for `finish`. Where the update is a sum over
        parts, the part's advantages are estimated and its gradient is added; raises `OffPolicy` then if the first
        part's ratios are not one.
        """
        begin = time.monotonic()
        found = self._received
        if isinstance(batch.decisions, StoredDecisions):
            self._memory = batch.decisions.memory
        with self._working(found):
            found.lag = max(found.lag, iteration - batch.version)
            batch, broken = without_broken_episodes(batch, sum(part.mask.shape[1] for part in found.batches))
            found.broken_episodes += broken
            samples, groups = self._add_part(batch, iteration)
        learn_s = time.monotonic() - begin
        found.seconds += learn_s
        return ReceivedPart(samples, groups, learn_s)

    def finish(self, iteration: int) -> dict[str, float]:
        """Update the policy on what was received. Returns metrics by name.

        Raises `OffPolicy` if the first minibatch's ratios are not one, `NonFinite` after several steps in a row that
        were skipped, `UserError` where a critic has nothing to learn from.
        """
        begin = time.monotonic()
        found, self._received = self._received, _Received()
        with self._working(found):
            samples = self._samples_of(found, iteration)
            scaled = self._controls.in_deviations(samples)
            self._controls.set_learning_rates(self.optimizer, iteration)
            if self._accumulates:
                self._accumulate(found)
                statistics = self._update.step_accumulated(scaled, iteration)
            else:
                statistics = self._update.run(scaled, iteration, found.lag > 0)
            # Weights that were learned elsewhere read what the statistics beside them make of an observation.
            if len(samples) and self._config.policy.init is None and isinstance(self.policy, Observes):
                self.policy.observe(samples.decisions.inputs(self._device, frames=False))
            await_devices(self.policy.parameters())  # else the last step would count as the next rollout's time
        metrics = metrics_of(samples, statistics, self._config.loss)
        metrics |= self._controls.metrics()
        metrics["learner/policy_lr"] = float(self.optimizer.param_groups[0]["lr"])
        if found.frames.read:
            metrics |= {"learner/frames_read": found.frames.read, "learner/frame_copies": found.frames.copied}
        if found.broken_episodes:
            metrics["learner/broken_episodes"] = float(found.broken_episodes)
        return {**metrics, "learner/update_s": found.seconds + time.monotonic() - begin}

    def _samples_of(self, found: _Received, iteration: int) -> Samples:
        """The samples of all parts, with advantages; parts that wait for each other are estimated now."""
        if found.batches:
            batch = self._in_rewards(join_columns(found.batches), iteration)
            found.samples, found.batches = [samples_of(batch, self._estimate(batch, self._config))], []
        samples, found.samples = join_samples(found.samples), []
        if len(samples) == 0 and self._recipe.critic:
            why = "it holds no decision that was executed"
            if found.broken_episodes:
                why = f"all its {found.broken_episodes} episodes have a reward or an observation that is not finite"
            raise UserError(f"nothing can be learned from the rollout: {why}")
        return samples

    def _add_part(self, batch: Trajectories, iteration: int) -> tuple[int, int]:
        """Keep a part for `finish`. Returns its numbers of samples and of informative episode groups, where known."""
        found = self._received
        if self._estimates_together:
            found.batches.append(batch)
            if batch.episode_group is None:
                return 0, 0
        else:
            batch = self._in_rewards(batch, iteration)
        estimate = self._estimate(batch, self._config)
        chosen = batch.mask & estimate.keep
        if not self._estimates_together:
            found.samples.append(samples_of(batch, estimate))
            if self._accumulates and bool(chosen.any()):
                found.to_accumulate.append(found.samples[-1])
                # Offloaded parameters cannot compute, and gradients would not survive their return.
                if self._offload is None or not self._offload.away:
                    self._accumulate(found)
        groups = 0 if batch.episode_group is None else len(batch.episode_group[chosen.any(0)].unique())
        return int(chosen.sum()), groups

    def _accumulate(self, found: _Received) -> None:
        for samples in found.to_accumulate:
            self._update.accumulate(samples, found.lag > 0)
        found.to_accumulate = []

    def _in_rewards(self, batch: Trajectories, iteration: int) -> Trajectories:
        """The trajectories with values in the unit of rewards: the recorded ones, or those of the present critic where
        the rollout's policy is an update behind."""
        now = None
        if self._recipe.critic and iteration > batch.version:
            now = values_of(self._parallel, batch, self._config.optim.micro_batch or self._config.optim.minibatch)
        return self._controls.in_rewards(batch, now)

    @contextmanager
    def _working(self, found: _Received) -> Iterator[None]:
        """In the block, compute on this learner's cores, wait for the other ranks no longer than their deadline, and
        count the frames that are read: other workers of this process may read the memory too."""
        before = FrameCounts() if self._memory is None else self._memory.counts
        with self._affinity.applied(), self.ranks.waiting("update"):
            yield
        if self._memory is not None:
            found.frames += self._memory.counts - before

    # --- weights

    def weights(self) -> dict[str, Tensor]:
        """The parameters and statistics that training changes, as a policy worker loads them; of a replicated policy on
        its device.

        Every rank must be called; ranks other than 0 return nothing. The caller must not change the tensors. The policy
        worker has the frozen ones already: it is made from the same configuration.
        """
        self.load_back()
        return self._parallel.weights()

    def shares_policy(self) -> bool:
        """True if other workers of this process can compute with the policy: not with a shard."""
        return not self._parallel.sharded

    def own_policy(self) -> Policy:
        """The policy itself, for a policy worker of the same process. Raises `UserError` for a shard of it."""
        if self._parallel.sharded:
            raise UserError(
                "the learner's ranks have shards of the policy, and no policy worker can act with a shard: set "
                "optim.sharding to whole, or take a plan whose policy worker has a process of its own"
            )
        return self.policy

    def trained_bytes(self) -> TrainedBytes:
        """Size of the policy, of its trained parameters, and of what is published."""
        self.load_back()
        parameters = list(self.policy.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return TrainedBytes(_bytes(parameters), _bytes(trained), _bytes(self.weights().values()))

    def leave(self) -> None:
        """Close the connections to other workers, once the checkpoint in progress is complete."""
        try:
            self.saved()
        finally:
            self.close_broadcast()
            super().leave()

    # --- device memory

    def unload(self, weights: bool) -> Switch:
        """Leave the device's memory: the optimiser's state, and the weights unless a policy worker shares them.

        Waits for a checkpoint whose writer reads weights from there: frozen ones are not copied for it.
        """
        if weights and self._parallel.stages_own_tensors:
            self._writer.settle()
        rank = f"-{self.ranks.rank}" if self.ranks.rank else ""
        self._offload = Offload(
            self._run_dir / f"unloaded-learner{rank}.safetensors", self.policy if weights else None, self.optimizer
        )
        return self._offload.unload()

    def load_back(self) -> Switch:
        """Return to the device's memory."""
        return self._offload.load() if self._offload is not None else Switch(0, 0.0)

    def peak_bytes(self) -> int:
        """Peak memory of this process on its GPU; 0 on a CPU."""
        return peak_bytes(device_of(self.policy))

    # --- checkpoints

    def save(self, root: Path, state: checkpoint.RunState, environments: dict[str, np.ndarray]) -> None:
        super().save(root, replace(state, controls=self._controls.numbers()), environments)

    def load(self, folder: Path) -> None:
        """Load policy, optimiser and controls from a verified checkpoint, of any number of ranks."""
        super().load(folder)
        self._controls.load(self._state_in(folder)["controls"])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
