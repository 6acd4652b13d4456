"""The policy that learns from demonstrations, on one rank: rows of the data, the loss of imitation, optimiser steps.

    [ minibatch of rows -> this rank's share, in micro-batches -> Imitates.imitate -> backward ] -> norm -> step

The rows of a step and the noise of its loss are functions of the seed and the step's number. They are the same for
every number of ranks; each rank reads its own share.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embodied import progress
from embodied.config.schema import Config, risen
from embodied.demonstrations import Batch, History, layout
from embodied.demonstrations.augmentation import CROPS, Augmentation
from embodied.demonstrations.findings import Finding, names_of
from embodied.demonstrations.inspection import Inspection
from embodied.demonstrations.loader import Loader, Request
from embodied.demonstrations.mixture import Demonstrations, Index
from embodied.demonstrations.normalised import check_normalised
from embodied.devices import Affinity, available_threads, device_of, to_host, useful_threads
from embodied.errors import UserError
from embodied.learning.optimizer import OptimizerSteps, make_optimizer
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.trained_policy import TrainedPolicy
from embodied.run import checkpoint
from embodied.runtime.ranks import Ranks
from embodied.training.interrupts import deferred_interrupts
from embodied.trajectories.random_streams import IMITATION, generator, permutation
from embodied.workflows.context import make_policy, policy_spec
from policies.capabilities import HasUnits, Imitates, Normalises, Observes, earlier_actions, source_of_statistics
from policies.contract import Inputs, Policy, PolicyError
from sim_farm.contract import TaskInfo

STAGE = "sft"
"""`checkpoint.RunState.stage` of these checkpoints."""
ADAM_EPS = 1e-8
"""Added to the root of Adam's second moment."""
MEASURED = 512
"""Rows of the held-out episodes that are measured, evenly spaced."""
OBSERVED = 4096
"""Number of rows whose statistics are computed in one batch."""


@dataclass(frozen=True)
class Pass(Request):
    """M rows of one dataset for a forward and backward pass."""

    places: Index
    """[M] their places in the minibatch."""
    counts: bool
    """False: the pass adds nothing to the gradient; the other ranks have a pass more than this one."""
    last: bool
    """True for the last of its minibatch."""


class Imitator(TrainedPolicy):
    """Holds the policy that learns from demonstrations, and its optimiser, as one rank has them."""

    def __init__(
        self,
        config: Config,
        info: TaskInfo,
        demonstrations: Demonstrations,
        affinity: Affinity | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Several ranks are not connected yet (`join`)."""
        self.demonstrations = demonstrations
        place = affinity or Affinity((), available_threads())
        policy = make_policy(config, policy_spec(config, info), device=place.device)
        if not isinstance(policy, Imitates):
            raise PolicyError(f"the policy {policy.kind} cannot learn from demonstrations: it has no `imitate`")
        batch = min(config.sft.batch, len(demonstrations.train))
        self._batch, self._per_epoch = batch, len(demonstrations.train) // batch
        self._micro = config.optim.micro_batch or batch
        threads = useful_threads(policy, config.optim.micro_batch or config.sft.batch, place.threads)
        self.done = 0
        """Steps."""
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._ahead: Generator[tuple[Pass, Batch], None, None] | None = None
        """Passes of the steps to come, in their order."""
        group = Ranks("learner", rank, ranks, device_of(policy))
        super().__init__(policy, config, replace(place, threads=threads), group)
        self._history = History(policy.spec.observations, policy.spec.distance, earlier_actions(policy))
        # Last, since its processes have to be closed.
        self._loader = Loader(
            demonstrations,
            chunk=policy.spec.predicted,
            cameras=policy.spec.cameras,
            history=self._history,
            augmentation=Augmentation(config.sft.augment, config.seed) if config.sft.augment else None,
            workers=config.sft.loader_workers,
        )

    def _use(self, parallel: ReplicatedPolicy) -> None:
        super()._use(parallel)
        config = self._config
        self.optimizer = make_optimizer(self.policy, config.optim, policy_lr=config.sft.lr, value_lr=None, eps=ADAM_EPS)
        self._steps = OptimizerSteps(parallel, self.optimizer, config.optim)

    # --- before the first step

    def understood(self, found: Inspection) -> Inspection:
        """The table of the data with what the policy makes of it."""
        return found.with_policy(self.policy, self._config.policy.init)

    def begin(self) -> None:
        """Take the demonstrations' statistics: units of actions, normalisation of what is observed.

        A policy that has learned before keeps its units, since they are what its outputs mean.
        """
        data, policy = self.demonstrations, self.policy
        has_proprio = all("observation.state" in dataset.features for dataset in data.datasets)
        proprio = torch.from_numpy(data.column("observation.state")) if has_proprio else None
        with self._affinity.applied():
            if self._config.policy.init is None and isinstance(policy, HasUnits):
                policy.adopt_units(torch.from_numpy(data.column("action")), proprio)
            if isinstance(policy, Observes):
                for rows in np.array_split(data.train, -(-len(data.train) // OBSERVED)):
                    for _, batch in data.batches(rows, 1, (), self._history):
                        policy.observe(self._shown(batch))
            for statistics in policy.buffers():  # another kind of processor may round them differently
                self.ranks.broadcast(statistics)

    def beside_statistics(self) -> tuple[Finding, ...]:
        """Findings where what is learned from lies far outside of the statistics that normalise it."""
        data, policy, init = self.demonstrations, self.policy, self._config.policy.init
        columns = {"action": layout.ACTION, "proprio": layout.PROPRIO, "state": layout.STATE}
        read = {name: column for name, column in columns.items() if name in ("action", *self._config.policy.reads)}
        values = {name: torch.from_numpy(data.column(column)).to(device_of(policy)) for name, column in read.items()}
        names = {name: names_of(data.datasets[0], read[name], given.shape[1]) for name, given in values.items()}
        with self._affinity.applied():
            inputs = Inputs(state=values.get("state"), proprio=values.get("proprio"))
            own = isinstance(policy, Normalises)
            numbers = policy.normalised_numbers(inputs, values["action"]) if own else ()
        statistics = source_of_statistics(policy) if init is None else f"those of {init}"
        return tuple(check_normalised(numbers, names, statistics, _other_statistics(policy, init)))

    def load(self, folder: Path) -> None:
        """Go on from a verified checkpoint."""
        super().load(folder)
        self.done = self._state_in(folder)["iteration"]

    # --- steps

    def state(self, wall_s: float) -> checkpoint.RunState:
        """The training as it is now, for a checkpoint. Repeated rows count as env steps, too."""
        return checkpoint.RunState(self.done, self.done * self._batch, wall_s, (), STAGE)

    def step(self) -> float:
        """One optimiser step; the loss before it. Raises `UserError` where it is not finite."""
        with self._affinity.applied(), self.ranks.waiting("take a step"):
            optim, sft = self._config.optim, self._config.sft
            for group in self.optimizer.param_groups:
                group["lr"] = sft.lr * optim.fallen(self.done, sft.steps, "linear") * risen(self.done, sft.warmup)
            self._steps.begin()
            losses, noise = [], self._noise(self._batch, self.done + 1)
            for read, batch in self._next():
                self._parallel.begin_pass(read.last)
                share = self._loss(read, batch, noise)
                share.backward()  # type: ignore[no-untyped-call]
                losses.append(share.detach())
                del share  # its graph
            known = to_host({"norm": self._steps.norm(), **{str(i): loss for i, loss in enumerate(losses)}})
            mine = sum((float(known[str(i)]) for i in range(len(losses))), 0.0)
            loss, norm = self.ranks.sum_numbers({"loss": mine})["loss"], known["norm"]
            if not np.isfinite(loss) or not torch.isfinite(norm):
                raise UserError(
                    f"at step {self.done} loss ({loss}) or gradient ({float(norm)}) is not finite: a smaller sft.lr is "
                    "the usual next step; the last checkpoint is kept"
                )
            with deferred_interrupts():  # a step is done and counted, or neither
                self._steps.take()
                self.done += 1
        return loss

    def measure(self) -> dict[str, float]:
        """On held-out episodes: the loss, and how far the policy's mode is from what was demonstrated, in the
        environment's units, as a mean over action elements."""
        rows = self.demonstrations.held_out
        if not len(rows):
            return {}
        rows = rows[np.linspace(0, len(rows) - 1, min(MEASURED, len(rows))).astype(np.int64)]
        found, noise = {"loss": 0.0, "distance": 0.0, "count": 0.0}, self._noise(len(rows), 0)
        with self._affinity.applied(), torch.no_grad(), self._parallel.gathered():
            for read, batch in self._loader.read(self._passes(rows, None)):
                progress.report()
                share = self._loss(read, batch, noise)
                predicted = self.policy.act(self._shown(batch), None).chunk.cpu()
                executed = slice(self._history.actions, self._history.actions + predicted.shape[1])
                actions, padding = (torch.from_numpy(part[:, executed]) for part in (batch.actions, batch.padding))
                off = (predicted - actions).abs()[~padding]
                if read.counts:
                    found["loss"] += float(share)
                    found["distance"] += float(off.sum())
                    found["count"] += off.numel()
        found = self.ranks.sum_numbers(found)
        return {"sft/held_out_loss": found["loss"], "sft/held_out_distance": found["distance"] / found["count"]}

    def close(self) -> None:
        """End the threads or processes that read ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._loader.close()

    def leave(self) -> None:
        self.close()
        super().leave()

    def _noise(self, count: int, key: int) -> npt.NDArray[np.float32]:
        """[count, Z] standard normal numbers of the losses of a minibatch, by its key."""
        drawn = generator(IMITATION, self._config.seed, 0, key, 0)
        return drawn.standard_normal((count, self.policy.noise_dim), np.float32)

    def _loss(self, read: Pass, batch: Batch, noise: npt.NDArray[np.float32]) -> Tensor:
        """The pass's share of the mean loss of a minibatch, whose `noise` has a row for each."""
        device = device_of(self.policy)
        assert isinstance(self.policy, Imitates)  # checked when it was made
        cropped = read.epoch is not None and self._config.sft.augment in CROPS
        losses = self.policy.imitate(
            replace(self._shown(batch), cropped=cropped),
            torch.from_numpy(batch.actions).to(device),
            torch.from_numpy(~batch.padding).to(device),
            torch.from_numpy(noise[read.places]).to(device),
        )
        return losses.sum() / (len(noise) if read.counts else float("inf"))

    def _shown(self, batch: Batch) -> Inputs:
        """The batch's features that the policy reads, on its device."""
        reads, inputs = self._config.policy.reads, batch.inputs()
        return replace(
            inputs,
            state=inputs.state if "state" in reads else None,
            proprio=inputs.proprio if "proprio" in reads else None,
            instruction=inputs.instruction if "instruction" in reads else (),
        ).to(device_of(self.policy))

    # --- rows

    def _next(self) -> Iterator[tuple[Pass, Batch]]:
        """This rank's passes of the step that is due, which were read meanwhile."""
        if self._ahead is None:
            due = range(self.done, max(self._config.sft.steps, self.done + 1))
            self._ahead = self._loader.read(
                part for step in due for part in self._passes(self._rows(step), self._epoch_of(step))
            )
        ahead = self._ahead
        try:
            for read, batch in ahead:
                yield read, batch
                if read.last:
                    return
        except BaseException:
            self._ahead = None
            raise

    def _passes(self, rows: Index, epoch: int | None) -> list[Pass]:
        """This rank's passes over its share of a minibatch of an epoch, in micro-batches, each of one dataset's
        rows."""
        shares = [self._pieces(rows, share) for share in np.array_split(np.arange(len(rows)), self.ranks.size)]
        most = max(len(pieces) for pieces in shares)
        passes = self._parallel.padded(shares[self.ranks.rank], most, np.zeros(1, np.int64))
        return [
            Pass(rows[places], epoch, places, counts, number == len(passes) - 1)
            for number, (places, counts) in enumerate(passes)
        ]

    def _pieces(self, rows: Index, share: Index) -> list[Index]:
        """The places `share` of a minibatch in pieces of at most a micro-batch, and of one dataset each."""
        micro = (share[first : first + self._micro] for first in range(0, len(share), self._micro))
        return [part[places] for part in micro for places in self.demonstrations.by_dataset(rows[part])]

    def _epoch_of(self, step: int) -> int:
        """The epoch of a step; where each row is drawn independently, every step is one."""
        return step // self._per_epoch if self.demonstrations.chances is None else step

    def _rows(self, step: int) -> Index:
        """The rows of a step. Each epoch has a different order, cut into whole minibatches. Where datasets have
        weights, each row is drawn independently."""
        chances = self.demonstrations.chances
        if chances is not None:
            drawn = generator(IMITATION, self._config.seed, 1, step, 0)
            return self.demonstrations.train[drawn.choice(len(chances), self._batch, p=chances)]
        epoch, place = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            order = permutation(self._config.seed, 1 + epoch, 0, len(self.demonstrations.train))
            self._epoch, self._order = epoch, self.demonstrations.train[order]
        return self._order[place * self._batch : (place + 1) * self._batch]


def _other_statistics(policy: Policy, init: Path | None) -> str:
    """Advice on how to learn with the statistics of the demonstrations."""
    own = f"--policy.options.{policy.own_units}" if isinstance(policy, HasUnits) else ""
    if init is not None:
        more = f", with {own}" if own else ""
        return (
            f"These statistics belong to the weights of {init}: begin without --policy.init{more}, or convert the data"
        )
    if own:
        return f"To learn with the statistics of these demonstrations: {own}"
    return "Convert the data to the numbers that the policy was trained with"
