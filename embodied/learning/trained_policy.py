"""The policy that is trained, as one rank has it: with its optimiser, its connections to other ranks, its checkpoints.

What is learned, and from which data, is a subclass's: `learner.Learner` learns from trajectories, and the imitator of
`embodied.training` from demonstrations (docs/decisions/0192-one-learner.md).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from embodied.config.schema import Config
from embodied.devices import Affinity, device_of
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.recompute import recompute
from embodied.run import checkpoint
from embodied.run.background_writer import BackgroundWriter, Written
from embodied.runtime.ranks import LOOPBACK, Ranks
from policies.contract import Policy


class TrainedPolicy:
    """The policy on one rank. `ranks` are not connected yet (`join`); one rank is connected to none."""

    optimizer: torch.optim.Optimizer
    """Set by `_use`."""

    def __init__(self, policy: Policy, config: Config, affinity: Affinity, ranks: Ranks | None) -> None:
        self.policy, self._config, self._affinity = policy, config, affinity
        self.ranks = ranks or Ranks(device=device_of(policy))
        self._writer = BackgroundWriter()
        if config.optim.recompute:
            recompute(policy)
        self._use(ReplicatedPolicy(policy, self.ranks))

    def _use(self, parallel: ReplicatedPolicy) -> None:
        """Train the policy as this rank has it, with a new optimiser. A subclass makes that."""
        self._parallel = parallel

    # --- ranks

    def listen(self, host: str = LOOPBACK) -> str:
        """On rank 0: accept the other ranks at this machine's address `host`. Returns HOST:PORT for `join`."""
        return self.ranks.listen(host)

    def join(self, address: str, timeout_s: float) -> None:
        """Connect to the other ranks, through rank 0 at `address`; replicate or shard the policy.

        Raises `PeerFailed` where not all ranks are there in time, and for later waits of more than `timeout_s`.
        """
        from embodied.learning.sharding import parallelised  # an import of a second, which one rank does not need

        with self._affinity.applied():
            self.ranks.join(address, timeout_s)
            self._use(parallelised(self.policy, self._config, self.ranks))

    def leave(self) -> None:
        """Close the connections to the other ranks, once the checkpoint in progress is complete."""
        try:
            self.saved()
        finally:
            self.ranks.leave()

    # --- checkpoints

    def save(self, root: Path, state: checkpoint.RunState, environments: checkpoint.Arrays) -> None:
        """Begin to write a checkpoint of policy, optimiser and run, as they are now, below `root`.

        Returns once everything is copied: training may continue while a thread of each rank writes. `saved` waits until
        the checkpoint is complete. Every rank must be called. Waits for the previous checkpoint, and raises its
        failure.
        """
        self.saved()
        self._writer.begin(self._parallel.stage(root, state, self.optimizer, environments))

    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writer.busy

    def saved(self) -> Written | None:
        """Wait for the checkpoint that `save` began. Returns when it was written, None without one.

        Raises `CheckpointError`, once, where it could not be written; then nothing is left of it.
        """
        return self._writer.wait()

    def load(self, folder: Path) -> None:
        """Load policy and optimiser from a verified checkpoint, of any number of ranks."""
        self.saved()
        self._parallel.load(folder, self.optimizer)
        if self._config.optim.ema is None:  # the average of a run that kept one
            for state in self.optimizer.state.values():
                state.pop(checkpoint.AVERAGE, None)

    def _state_in(self, folder: Path) -> dict[str, Any]:
        """The run's state in a verified checkpoint, by the names of `RunState`, on every rank. Rank 0 reads it: another
        may be on a machine that does not see the folder."""
        found = self.ranks.first_does("read the checkpoint", lambda: asdict(checkpoint.read_state(folder)))
        state: dict[str, Any] = self.ranks.broadcast_plain(found)
        return state
