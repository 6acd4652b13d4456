"""The learner: turns trajectories into an updated policy.

    estimate advantages of decisions -> epochs of permuted minibatches -> loss sums / global denominators -> step

Rows that are masked, or that teach nothing, never reach the model: they are compacted away before batching. Where
the update is one step over all rows, its gradient is a sum over the parts in which they arrive, and each part is
worked on when it comes.

A learner may be several ranks. Each is given all trajectories, whose rows stay where they are, and so computes the same
advantages, permutations and denominators. Each evaluates its share of a minibatch's rows; gradients and statistics are
summed once per optimiser step. So all ranks decide alike, and take the step that one would take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from embodied.algorithms.estimators import Rows, join_rows, rows_of
from embodied.config.schema import Config
from embodied.devices import Affinity, await_devices, defines, device_of, forget_peak, peak_bytes
from embodied.errors import UserError
from embodied.learning.microbatch import LossSums
from embodied.learning.offload import Offload, Switch
from embodied.learning.shared_work import SharedWork
from embodied.learning.update_controls import UpdateControls
from embodied.learning.update_record import CollectStatistics, TrainedBytes, metrics_of
from embodied.learning.update_steps import UpdateSteps, make_optimizer
from embodied.learning.weight_ends import WeightsSource
from embodied.learning.whole_policy import WholePolicy
from embodied.run import checkpoint
from embodied.run.background_writer import BackgroundWriter, Written
from embodied.runtime.ranks import LOOPBACK, Ranks
from embodied.trajectories.batch import StoredDecisions, Trajectories, join_columns, without_broken_episodes
from embodied.trajectories.memory import FrameCounts, TrajectoryMemory
from embodied.workflows.algorithm_checks import check_algorithm
from embodied.workflows.context import WorkerContext
from embodied.workflows.recipes import recipe_of
from embodied.workflows.sizes import check_credit, check_ranks, groups_suffice, streams
from policies.contract import Policy


class Learner(WeightsSource):
    """Holds the policy that is trained and its optimiser. `collect` each part of a rollout, then `finish`."""

    takes: ClassVar[frozenset[str]] = frozenset({"trajectories", "episodes"})
    """What an edge to here may carry."""

    def __init__(
        self,
        policy: Policy,
        config: Config,
        run_dir: Path,
        affinity: Affinity | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` are not connected yet (`join`); None: this learner is the only one."""
        self.check(config)
        self.policy = policy
        self.ranks = ranks or Ranks()
        self._device = device_of(policy)
        self._recipe, self._run = recipe_of(config), config
        self._run_dir = run_dir
        self._controls = UpdateControls(config)
        self._hold(WholePolicy(policy, self.ranks))
        self._streams = streams(config)
        self._joins = not groups_suffice(config)
        """The estimator needs all parts of an iteration at once."""
        self._affinity = affinity or Affinity((), config.optim.threads or len(os.sched_getaffinity(0)))
        forget_peak(device_of(policy))
        self._offload: Offload | None = None
        self._writer = BackgroundWriter()
        self._memory: TrajectoryMemory | None = None
        """Where the trajectories are: kept, so that it is mapped and pinned once."""
        self._frames = FrameCounts()
        """Of this iteration."""
        self._parts: list[Rows] = []
        self._batches: list[Trajectories] = []
        self._unstreamed: list[Rows] = []
        self._lag = 0
        self._learn_s = 0.0
        self._broken = 0
        """Episodes of this iteration whose rewards were not finite."""

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` for settings that contradict each other, or ask for what no component adds."""
        check_credit(config)
        check_ranks(config, config.optim.ranks)
        check_algorithm(config)
        UpdateControls(config)  # a critic that would be misunderstood

    @classmethod
    def make(cls, context: WorkerContext) -> Learner:
        """The learner of a run."""
        policy = context.policy()
        assert policy is not None, "the learner's policy is the one that others share"
        ranks = Ranks("learner", context.rank, context.ranks, device_of(policy))
        return cls(policy, context.config, context.run_dir, context.affinity, ranks)

    def listen(self, host: str = LOOPBACK) -> str:
        """Of rank 0: wait for the others at this machine's address `host`. HOST:PORT for `join`."""
        return self.ranks.listen(host)

    def join(self, address: str, timeout_s: float) -> None:
        """Connect to the other ranks, through rank 0 at `address`; take this rank's part of the policy.

        Raises `PeerFailed` where they are not all there in time, and for whatever waits longer than `timeout_s` later.
        """
        from embodied.learning.sharding import held  # takes a second, which one rank alone need not wait

        with self._affinity.applied():
            self.ranks.join(address, timeout_s)
            self._hold(held(self.policy, self._run, self.ranks))

    def _hold(self, part: WholePolicy) -> None:
        self._held, self._work = part, SharedWork(part, self._run, self._recipe.critic, self._recipe.loss())
        self.optimizer = make_optimizer(self.policy, self._run.optim)
        self._steps = UpdateSteps(part, self._work, self.optimizer, self._controls, self._run, self._run_dir)

    def leave(self) -> None:
        """Close the connections to the other ranks, once what is being written is complete."""
        try:
            self.saved()
        finally:
            self.leave_takers()
            self.ranks.leave()

    def weights(self) -> dict[str, Tensor]:
        """The parameters and statistics that training changes, as the policy worker loads them; where the policy is
        whole, on its device.

        Every rank has to be asked; those but the first return nothing. The caller must not change the tensors. The
        policy worker has the frozen ones: it is made from the same configuration.
        """
        self.load_back()
        return self._held.weights()

    def shares_policy(self) -> bool:
        """Whether others of this process can compute with its policy: not where it holds a shard of it."""
        return not self._held.sharded

    def own_policy(self) -> Policy:
        """The policy itself, for a policy worker of the same process. Raises `UserError` for a shard of it."""
        if self._held.sharded:
            raise UserError(
                "the learner's ranks hold shards of the policy, and nobody can act with a shard: set optim.sharding to "
                "whole, or take a plan whose policy worker has a process of its own"
            )
        return self.policy

    def unload(self, weights: bool) -> Switch:
        """Leave the device's memory: the optimiser's state, and the weights unless a policy worker shares them.

        Waits for a checkpoint whose writer reads weights from there: what is frozen is not copied for it.
        """
        if weights and self._held.lends_frozen:
            self._writer.settle()
        rank = f"-{self.ranks.rank}" if self.ranks.rank else ""
        self._offload = Offload(
            self._run_dir / f"unloaded-learner{rank}.safetensors", self.policy if weights else None, self.optimizer
        )
        return self._offload.unload()

    def peak_bytes(self) -> int:
        """The most that this process has held in its GPU's memory; 0 on a CPU."""
        return peak_bytes(device_of(self.policy))

    def trained_bytes(self) -> TrainedBytes:
        """How large the policy is, and what of it is trained and handed out."""
        self.load_back()
        parameters = list(self.policy.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return TrainedBytes(_bytes(parameters), _bytes(trained), _bytes(self.weights().values()))

    def load_back(self) -> Switch:
        """Return to the device's memory."""
        return self._offload.load() if self._offload is not None else Switch(0, 0.0)

    def update(self, batch: Trajectories, iteration: int) -> dict[str, float]:
        """One iteration of a rollout that comes in one part: `collect` and `finish`."""
        self.collect(batch, iteration)
        return self.finish(iteration)

    def collect(self, batch: Trajectories, iteration: int) -> CollectStatistics:
        """Take a part of the iteration's trajectories. Where the update is a sum over parts, add the part's gradient.

        Raises `OffPolicy` if the first part's ratios are not one.
        """
        begin = time.monotonic()
        rows, groups = 0, 0
        if isinstance(batch.decisions, StoredDecisions):
            self._memory = batch.decisions.memory
        with self._affinity.applied(), self._counted():
            self._lag = max(self._lag, iteration - batch.version)
            batch, broken = without_broken_episodes(batch, sum(part.mask.shape[1] for part in self._batches))
            self._broken += broken
            if self._joins:
                self._batches.append(batch)
            if not self._joins or batch.episode_group is not None:
                rows, groups = self._estimate(batch, iteration)
        learn_s = time.monotonic() - begin
        self._learn_s += learn_s
        return CollectStatistics(rows, groups, learn_s)

    def _estimate(self, batch: Trajectories, iteration: int) -> tuple[int, int]:
        """Make rows of a part; learn from them, if this is an update in parts. Rows, and episode groups that teach."""
        if not self._joins:
            batch = self._judged(batch, iteration)
        estimate = self._recipe.estimate()(batch, self._run)
        rows = rows_of(batch, estimate)
        if not self._joins:
            self._parts.append(rows)
        if self._streams and len(rows):
            self._unstreamed.append(rows)
            # Away from the device there is nothing to compute with, and gradients would not survive the return.
            if self._offload is None or not self._offload.away:
                self._stream_waiting()
        teaches = (estimate.keep & batch.mask).any(0)
        groups = 0 if batch.episode_group is None else len(batch.episode_group[teaches].unique())
        return len(rows), groups

    def _judged(self, batch: Trajectories, iteration: int) -> Trajectories:
        """The trajectories with values in the unit of rewards: those that were said, or, where the policy that acted is
        an update behind, what the present critic says of the decisions."""
        now = self._work.values(batch) if self._recipe.critic and iteration > batch.version else None
        return self._controls.in_rewards(batch, now)

    def finish(self, iteration: int) -> dict[str, float]:
        """The epochs over what was collected, or the step of what was summed up. Returns metrics by name.

        Raises `OffPolicy` if the first minibatch's ratios are not one, `NonFinite` after several steps in a
        row that had to be skipped, `UserError` where a critic has nothing to learn from.
        """
        begin = time.monotonic()
        with self._affinity.applied(), self._counted():
            if self._joins:
                # Not earlier: a rollout that is ahead begins once the last part is collected.
                whole = self._judged(join_columns(self._batches), iteration)
                self._parts = [rows_of(whole, self._recipe.estimate()(whole, self._run))]
            in_rewards = join_rows(self._parts)
            rows = self._controls.in_deviations(in_rewards)
            self._parts, self._batches = [], []
            if len(rows) == 0 and self._recipe.critic:
                raise UserError("the rollout holds no decision that was really taken; nothing can be learned from it")
            self._controls.set_learning_rates(self.optimizer, iteration)
            sums, norms, stopped = LossSums(), list[float](), False
            if self._streams:
                self._stream_waiting()
                sums, norms = self._steps.step_streamed(rows, iteration)
            elif len(rows):
                sums, norms, stopped = self._steps.epochs(rows, iteration, self._lag > 0)
            if len(rows) and defines(self.policy, "observe"):
                self.policy.observe(rows.decisions.inputs(self._device, frames=False))
            await_devices(self.policy.parameters())  # else the last step would count as the next rollout's time
        metrics = self._metrics(in_rewards, sums, norms, stopped, iteration)
        if self._frames.read:
            metrics |= {"learner/frames_read": self._frames.read, "learner/frame_copies": self._frames.copied}
        if self._broken:
            metrics["learner/broken_episodes"] = float(self._broken)
        update_s = self._learn_s + time.monotonic() - begin
        self._learn_s, self._lag, self._broken, self._steps.first_ratio_error = 0.0, 0, 0, float("nan")
        self._frames = FrameCounts()
        return {**metrics, "learner/update_s": update_s}

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Add the frames that are read in the block to the iteration's: others of this process may read the memory
        too."""
        before = FrameCounts() if self._memory is None else self._memory.counts
        yield
        if self._memory is not None:
            self._frames += self._memory.counts - before

    def save(self, root: Path, state: checkpoint.RunState, environments: dict[str, np.ndarray]) -> None:
        """Begin to write a checkpoint of policy, optimiser and run, as they are now, below `root`.

        Returns once all is copied: the run may go on, and a thread of each rank writes. `saved` waits until the
        checkpoint is complete. Every rank has to be asked. Waits for the one before, and raises its failure.
        """
        self.saved()
        state = replace(state, controls=self._controls.numbers())
        self._writer.begin(self._held.stage(root, state, self.optimizer, environments))

    def saving(self) -> bool:
        """Whether what `save` began is still being written."""
        return self._writer.busy

    def saved(self) -> Written | None:
        """Wait for what `save` began; when it was written, None where nothing was.

        Raises `CheckpointError`, once, where it could not be written; then nothing is left of it.
        """
        return self._writer.wait()

    def load(self, folder: Path) -> None:
        """Take policy and optimiser from a verified checkpoint, which any number of ranks has written."""
        self.saved()
        self._held.load(folder, self.optimizer)
        # Rank 0 reads: another may be on a machine that does not see the folder.
        found = self.ranks.first_does("read the checkpoint", lambda: dict(checkpoint.read_state(folder).controls))
        self._controls.load(self.ranks.broadcast_plain(found))

    def _stream_waiting(self) -> None:
        for rows in self._unstreamed:
            self._steps.stream(rows, self._lag > 0)
        self._unstreamed = []

    def _metrics(
        self, rows: Rows, sums: LossSums, norms: list[float], stopped: bool, iteration: int
    ) -> dict[str, float]:
        measured = metrics_of(rows, sums, norms)
        if self._run.loss.reference_kl:
            measured["learner/reference_kl"] = sums.reference_kl / max(sums.units, 1)
        if sums.auxiliary:
            measured["learner/auxiliary_loss"] = sums.auxiliary / sums.weights
        return {
            **measured,
            **self._controls.note(measured, iteration),
            "learner/first_ratio_error": self._steps.first_ratio_error,
            "learner/stopped_by_kl": float(stopped),
            "learner/policy_lr": float(self.optimizer.param_groups[0]["lr"]),
        }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
