"""Supervised fine-tuning: a policy learns the actions of demonstrations. A run can begin from the trained policy.

[ minibatch of env steps -> Policy.imitate -> step ] x steps -> checkpoint

The rows of a step and the noise of its loss are functions of the seed and the step's number, so that a resumed training
gives the same policy as one that was not stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.demonstrations import Batch, Dataset, layout
from embodied.demonstrations.data_files import read_ahead
from embodied.demonstrations.findings import Finding, names_of, observed
from embodied.demonstrations.inspection import inspected, show_table, text
from embodied.demonstrations.mixture import (
    Demonstrations,
    Index,
    Needed,
    Source,
    check_features,
    gripper_map,
    open_sources,
)
from embodied.demonstrations.normalised import check_normalised
from embodied.devices import Affinity, available_threads, device_of, useful_threads
from embodied.errors import UserError
from embodied.evaluation.protocol import expand
from embodied.files import write_whole
from embodied.metric import Metric
from embodied.reporting.live import steps
from embodied.reporting.metrics import MetricsWriter
from embodied.reporting.trackers import NOT_TRACKED, Tracking
from embodied.run import checkpoint
from embodied.training.checkpoints import Unwritten
from embodied.training.interrupts import deferred_interrupts
from embodied.trajectories.random_streams import IMITATION, generator, permutation
from embodied.workflows.context import make_policy, policy_spec, task_spec
from embodied.workflows.sizes import tasks_of
from policies.contract import Inputs, Policy
from sim_farm.contract import TaskInfo

Read = Sequence[tuple[Index, Batch]]
"""Batches, one for each dataset that has rows of a micro-batch, and the places of their rows in the minibatch."""
STAGE = "sft"
"""`checkpoint.RunState.stage` of these checkpoints."""
MEASURED = 512
"""Rows of the held-out episodes that are measured, evenly spaced."""
OBSERVED = 4096
"""Rows whose statistics are taken at once."""
DATA = "data.json"
"""File of the data's inspection, in the run's folder."""
CONVENTIONS = ("control_mode", "orientation", "gripper", "image_size")
"""Settings that must be equal in a recording and in the run's environments."""


METRICS = (
    Metric("sft/loss", "loss", "Mean loss of the steps since the last row."),
    Metric("sft/held_out_loss", "loss", "Loss on held-out episodes."),
    Metric(
        "sft/held_out_distance",
        "action units",
        "Distance of the policy's mode from what was demonstrated in held-out episodes, a mean over action elements.",
    ),
)


def read_demonstrations(config: Config, info: TaskInfo) -> Demonstrations:
    """The datasets of `sft.data`. Raises `UserError` where one does not fit the run's task."""
    if not config.sft.data:
        raise UserError("no demonstrations are named: --data FOLDER (a dataset, as `embodied record` writes them)")
    sources = open_sources(config.sft, config.seed, lambda dataset: _check_fits(dataset, config, info))
    stride = config.policy.chunk if config.sft.rows == "decisions" else 1
    return Demonstrations(sources, gripper_map(config.sft.gripper, info), config.sft.weights, stride)


def _check_fits(dataset: Dataset, config: Config, info: TaskInfo) -> None:
    reads = config.policy.reads
    needed = [Needed(layout.ACTION, info.action_dim)]
    needed += [Needed(layout.PROPRIO, info.proprio_dim)] if "proprio" in reads else []
    needed += [Needed(layout.STATE, info.state_dim)] if "state" in reads else []
    needed += [Needed(layout.IMAGES + camera, 0) for camera in info.cameras] if "images" in reads else []
    check_features(dataset, needed, f"{config.env.task} with policy.reads {list(reads)}")
    size = math.prod(dataset.features[layout.ACTION].shape)
    if size != info.action_dim:
        raise UserError(
            f"the actions in {dataset.folder} have {size} numbers, those of {config.env.task} {info.action_dim}: "
            "choose the control mode that they are of (--env.control-mode), or another feature (--sft.features)"
        )
    dataset.check_frames(info.cameras if "images" in reads else ())
    for need in needed[1:]:
        size = math.prod(dataset.features[need.name].shape)
        if need.size and size != need.size:
            word = {layout.PROPRIO: "proprio", layout.STATE: "state"}[need.name]
            raise UserError(
                f"{need.name} in {dataset.folder} has {size} numbers, that of {config.env.task} {need.size}: map a "
                f"feature that has as many (--sft.features), or let the policy act without it "
                f"(--policy.reads {' '.join(read for read in reads if read != word)})"
            )
    recorded = dataset.task
    if recorded is None:  # another project's: nothing says by which conventions it was made
        return
    known = [own.env.task for own in tasks_of(config)]
    if recorded.name not in (*known, *(expand(config.eval.tasks) if config.eval.tasks else ())):
        raise UserError(
            f"{dataset.folder} was recorded in {recorded.name}, and the run is of {', '.join(dict.fromkeys(known))}: "
            "name other demonstrations, or count the task among the run's (extra_tasks, --eval.tasks)"
        )
    for name in CONVENTIONS:
        if name in ("orientation", "image_size") and "images" not in config.policy.reads:
            continue
        theirs, ours = getattr(recorded, name), getattr(info.spec, name)
        if theirs != ours:
            raise UserError(
                f"{dataset.folder} was recorded with env.{name} {theirs}, the run has {ours}: "
                f"set --env.{name.replace('_', '-')} {theirs}, or record with {ours}"
            )


def recorded_starts(source: Source) -> dict[str, Any]:
    """The starts of the episodes that are learned from, for evaluations to be compared with: recorded initial states,
    and the seeds of the other episodes. `task` is None where the dataset does not say them."""
    specs = [source.dataset.episodes[i].spec for i in source.train]
    recorded = [spec for spec in specs if spec is not None]
    task = source.dataset.task if len(recorded) == len(specs) else None
    return {
        "folder": str(source.dataset.folder),
        "task": None if task is None else task.name,
        "init_states": sorted({spec.init_state for spec in recorded if spec.init_state is not None}),
        "seeds": sorted({spec.seed for spec in recorded if spec.init_state is None}),
    }


def _other_statistics(policy: Policy, init: Path | None) -> str:
    """How to learn with the statistics of the demonstrations."""
    own = f"--policy.options.{policy.own_units}" if policy.own_units else ""
    if init is not None:
        more = f", with {own}" if own else ""
        return (
            f"These statistics belong to the weights of {init}: begin without --policy.init{more}, or convert the data"
        )
    if own:
        return f"To learn with the statistics of these demonstrations: {own}"
    return "Convert the data to the numbers that the policy was trained with"


class Imitator:
    """Holds the policy that learns from demonstrations, and its optimiser."""

    def __init__(self, config: Config, info: TaskInfo, demonstrations: Demonstrations) -> None:
        self.config, self.demonstrations = config, demonstrations
        self.policy: Policy = make_policy(config, policy_spec(config, info))
        threads = useful_threads(self.policy, config.optim.micro_batch or config.sft.batch, available_threads())
        self._affinity = Affinity((), threads)
        self.optimizer = torch.optim.Adam(list(self.policy.actor_parameters()), lr=config.sft.lr, fused=True)
        self.done = 0
        """Steps."""
        batch = min(config.sft.batch, len(demonstrations.train))
        self._batch, self._per_epoch = batch, len(demonstrations.train) // batch
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._ahead: Iterator[Read] | None = None
        """Micro-batches of the steps to come, in their order."""

    @property
    def rows_seen(self) -> int:
        """Demonstrated env steps that were learned from, repetitions counted."""
        return self.done * self._batch

    def begin(self) -> None:
        """Take the demonstrations' statistics: units of actions, normalisation of what is observed.

        A policy that has learned before keeps its units, since they are what its outputs mean.
        """
        data, policy = self.demonstrations, self.policy
        has_proprio = all("observation.state" in dataset.features for dataset in data.datasets)
        proprio = torch.from_numpy(data.column("observation.state")) if has_proprio else None
        with self._affinity.applied():
            if self.config.policy.init is None:
                policy.adopt_units(torch.from_numpy(data.column("action")), proprio)
            for rows in np.array_split(data.train, -(-len(data.train) // OBSERVED)):
                for _, batch in data.batches(rows, 1, ()):
                    policy.observe(self._shown(batch))

    def beside_statistics(self) -> Iterator[Finding]:
        """Findings where what is learned from lies far outside of the statistics that normalise it."""
        data, policy, init = self.demonstrations, self.policy, self.config.policy.init
        columns = {"action": layout.ACTION, "proprio": layout.PROPRIO, "state": layout.STATE}
        read = {name: column for name, column in columns.items() if name in ("action", *self.config.policy.reads)}
        values = {name: torch.from_numpy(data.column(column)).to(device_of(policy)) for name, column in read.items()}
        names = {name: names_of(data.datasets[0], read[name], given.shape[1]) for name, given in values.items()}
        with self._affinity.applied():
            inputs = Inputs(state=values.get("state"), proprio=values.get("proprio"))
            numbers = policy.normalised_numbers(inputs, values["action"])
        statistics = policy.normalised_by if init is None else f"those of {init}"
        return check_normalised(numbers, names, statistics, _other_statistics(policy, init))

    def load(self, folder: Path) -> None:
        """Go on from a verified checkpoint."""
        checkpoint.load_weights(folder, self.policy)
        checkpoint.load_optimizer(folder, self.policy, self.optimizer)
        self.done = checkpoint.read_state(folder).iteration

    def step(self) -> float:
        """One optimiser step; the loss before it. Raises `UserError` where it is not finite."""
        with self._affinity.applied():
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.sft.lr * (1 - self.done / self.config.sft.steps)
            self.optimizer.zero_grad(set_to_none=True)
            loss = 0.0
            for _, share in self._shares(self._next(), self._batch, self.done + 1):
                share.backward()  # type: ignore[no-untyped-call]
                loss += float(share.detach())
            norm = torch.nn.utils.clip_grad_norm_(self.policy.actor_parameters(), self.config.optim.max_grad_norm)
            if not np.isfinite(loss) or not torch.isfinite(norm):
                raise UserError(
                    f"at step {self.done} loss ({loss}) or gradient ({float(norm)}) is not finite: a smaller sft.lr is "
                    "the usual next step; the last checkpoint is kept"
                )
            with deferred_interrupts():  # a step is done and counted, or neither
                self.optimizer.step()
                self.done += 1
        return loss

    def measure(self) -> dict[str, float]:
        """On held-out episodes: the loss, and how far the policy's mode is from what was demonstrated, in the
        environment's units, as a mean over action elements."""
        rows = self.demonstrations.held_out
        if not len(rows):
            return {}
        rows = rows[np.linspace(0, len(rows) - 1, min(MEASURED, len(rows))).astype(np.int64)]
        loss, distance, count = 0.0, 0.0, 0
        with self._affinity.applied(), torch.no_grad():
            for batch, share in self._shares(self._micro_batches([rows]), len(rows), 0):
                predicted = self.policy.act(self._shown(batch), None).chunk.cpu()
                actions, padding = (
                    torch.from_numpy(part[:, : predicted.shape[1]]) for part in (batch.actions, batch.padding)
                )
                off = (predicted - actions).abs()[~padding]
                loss += float(share)
                distance, count = distance + float(off.sum()), count + off.numel()
        return {"sft/held_out_loss": loss, "sft/held_out_distance": distance / count}

    def close(self) -> None:
        """End the threads that read ahead."""
        self._ahead = None

    def _shares(self, read: Iterable[Read], count: int, key: int) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch of `count` rows, and its share of their mean loss. The noise of losses is keyed by `key`."""
        device = device_of(self.policy)
        noise = generator(IMITATION, self.config.seed, 0, key, 0).standard_normal(
            (count, self.policy.noise_dim), np.float32
        )
        for part in read:
            for places, batch in part:
                losses = self.policy.imitate(
                    self._shown(batch),
                    torch.from_numpy(batch.actions).to(device),
                    torch.from_numpy(~batch.padding).to(device),
                    torch.from_numpy(noise[places]).to(device),
                )
                yield batch, losses.sum() / count

    def _next(self) -> Iterator[Read]:
        """The micro-batches of the step that is due, which threads have read meanwhile."""
        if self._ahead is None:
            due = range(self.done, max(self.config.sft.steps, self.done + 1))
            self._ahead = self._micro_batches(self._rows(step) for step in due)
        try:
            for _ in range(0, self._batch, self._micro):
                yield next(self._ahead)
        except BaseException:
            self.close()
            raise

    @property
    def _micro(self) -> int:
        return self.config.optim.micro_batch or self._batch

    def _micro_batches(self, minibatches: Iterable[Index]) -> Iterator[Read]:
        """Each minibatch in pieces, read ahead by threads: for each dataset that has some of a piece's rows a batch of
        them, and their places in the minibatch."""
        spec, size = self.policy.spec, self._micro

        def read(piece: tuple[int, Index]) -> Read:
            first, rows = piece
            found = self.demonstrations.batches(rows, spec.predicted, spec.cameras)
            return [(first + places, batch) for places, batch in found]

        pieces = ((first, rows[first : first + size]) for rows in minibatches for first in range(0, len(rows), size))
        return read_ahead(read, pieces)

    def _shown(self, batch: Batch) -> Inputs:
        """The batch's features that the policy reads, on its device."""
        reads, inputs = self.config.policy.reads, batch.inputs()
        return replace(
            inputs,
            state=inputs.state if "state" in reads else None,
            proprio=inputs.proprio if "proprio" in reads else None,
            instruction=inputs.instruction if "instruction" in reads else (),
        ).to(device_of(self.policy))

    def _rows(self, step: int) -> Index:
        """The rows of a step: those of an epoch in an order of its own, whole minibatches of them. Where datasets have
        weights, each row is drawn by itself."""
        chances = self.demonstrations.chances
        if chances is not None:
            drawn = generator(IMITATION, self.config.seed, 1, step, 0)
            return self.demonstrations.train[drawn.choice(len(chances), self._batch, p=chances)]
        epoch, place = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            order = permutation(self.config.seed, 1 + epoch, 0, len(self.demonstrations.train))
            self._epoch, self._order = epoch, self.demonstrations.train[order]
        return self._order[place * self._batch : (place + 1) * self._batch]


def imitate(
    config: Config, info: TaskInfo, run_dir: Path, resume_from: Path | None, *, tracking: Tracking = NOT_TRACKED
) -> dict[str, Any]:
    """Run the steps that are left and leave a checkpoint of the last; `tracking` sees the rows. Returns the result as
    plain data.

    Interrupted, the last finished step is kept as a checkpoint.
    """
    demonstrations = read_demonstrations(config, info)
    understood = inspected(demonstrations, config, observed(task_spec(config), draw="images" in config.policy.reads))
    if understood.refused:
        show_table(replace(understood, findings=understood.warnings))
        understood.raise_refusals()
    imitator = Imitator(config, info, demonstrations)
    understood = understood.with_policy(imitator.policy, config.policy.init)
    log = _Log(run_dir, time.monotonic())
    if resume_from is None:
        imitator.begin()
    else:
        imitator.load(resume_from)
    understood = understood.with_findings(imitator.beside_statistics())
    show_table(replace(understood, findings=understood.warnings))
    understood.raise_refusals()
    if resume_from is not None:
        log = _Log(run_dir, log.began_s - checkpoint.read_state(resume_from).wall_s, imitator.done)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, run_dir / "config.yaml")
    starts = [recorded_starts(source) for source in imitator.demonstrations.sources]
    data = understood.as_data() | {"text": text(understood), "starts": starts}
    write_whole(run_dir / DATA, json.dumps(data, indent=1))
    try:
        measured = _learn(imitator, config, log, tracking)
    except BaseException:  # of an interrupted run, or one whose loss went astray
        log.save(imitator)
        raise
    finally:
        imitator.close()
    log.finish(imitator)
    return {
        "run": str(run_dir),
        "steps": imitator.done,
        "episodes": imitator.demonstrations.episodes,
        "wall_s": log.wall_s,
        **measured,
    }


@dataclass
class _Log:
    """Files that a training leaves in its folder."""

    run_dir: Path
    began_s: float
    """Start of the training in seconds, as if it had never been interrupted."""
    saved: int = 0
    """Steps that the newest checkpoint has."""
    unwritten: Unwritten = field(default_factory=Unwritten)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began_s

    def save(self, imitator: Imitator) -> None:
        """Write a checkpoint of what is now. Where that cannot be, the training goes on, and the next is tried."""
        if imitator.done > self.saved:
            state = checkpoint.RunState(imitator.done, imitator.rows_seen, self.wall_s, (), STAGE)
            with self.unwritten.noted():
                checkpoint.write(self.run_dir / "checkpoints", state, imitator.policy, imitator.optimizer, {})
                self.saved = imitator.done
                self.unwritten.over()

    def finish(self, imitator: Imitator) -> None:
        """Write the last one. Raises `CheckpointError` where that cannot be, also when it is tried again."""
        for _ in range(2):
            self.save(imitator)
        if imitator.done > self.saved:
            raise self.unwritten.error()


def _learn(imitator: Imitator, config: Config, log: _Log, tracking: Tracking) -> dict[str, float]:
    """The steps that are left, with their rows of metrics; the last of these."""
    row, losses, total = dict[str, float](), list[float](), config.sft.steps
    title = f"Learning from {imitator.demonstrations.episodes} episodes"
    with MetricsWriter(log.run_dir, tracking) as metrics, steps(title, total) as bar:
        metrics.truncate(imitator.done)
        bar.advance(imitator.done)
        while imitator.done < total:
            losses.append(imitator.step())
            if imitator.done % config.sft.measure_every == 0 or imitator.done == total:
                row = {"sft/loss": float(np.mean(losses)), **imitator.measure()}
                metrics.write(imitator.done, imitator.rows_seen, {"wall_s": log.wall_s, **row})
                losses.clear()
            if imitator.done % config.sft.checkpoint_every == 0:
                metrics.sync()
                log.save(imitator)
            bar.advance(1, f"loss {row['sft/loss']:.4g}" if row else "")
    return row
