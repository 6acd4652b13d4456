"""Supervised fine-tuning: a policy learns the actions of demonstrations. A run can begin from the trained policy.

    demonstrations -> inspected -> [ Imitator.step on every rank ] x steps -> checkpoint

A resumed training gives the same policy as one that was not stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.demonstrations import Dataset, layout
from embodied.demonstrations.findings import observed
from embodied.demonstrations.inspection import inspected, show_table, text
from embodied.demonstrations.mixture import (
    Demonstrations,
    Needed,
    Source,
    check_features,
    gripper_map,
    open_sources,
)
from embodied.errors import PeerFailed, UserError
from embodied.evaluation.protocol import expand
from embodied.execution.assignment import imitation_places
from embodied.execution.learner_ranks import connect_ranks
from embodied.execution.session import Session
from embodied.files import write_whole
from embodied.metric import Metric
from embodied.reporting.live import steps
from embodied.reporting.metrics import MetricsWriter
from embodied.reporting.trackers import NOT_TRACKED, Tracking
from embodied.run import checkpoint
from embodied.runtime.api import InlineRuntime
from embodied.runtime.handles import WorkerGroup
from embodied.training.checkpoints import FailedWrites
from embodied.training.checks import require_rows
from embodied.training.imitator import STAGE as STAGE
from embodied.training.imitator import Imitator
from embodied.workflows.run_spec import task_spec, tasks_of
from policies.registry import policy_kind
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from sim_farm.contract import TaskInfo

DATA = "data.json"
"""File of the data's inspection, in the run's folder."""
CONVENTIONS = ("control_mode", "orientation", "gripper", "image_size")
"""Settings that must be equal in a recording and in the run's environments."""
WORKERS_LOST = (WorkerFailed, WorkerTimeout, PeerFailed)
"""Errors after which the ranks cannot be called."""


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
    # A policy that reads the instruction alone observes the same at every step: it learns where it would decide.
    stride = config.policy.chunk if set(config.policy.reads) == {"instruction"} else 1
    left_out = policy_kind(config.policy.kind).format.left_out_rows(config.policy.architecture)
    found = Demonstrations(sources, gripper_map(config.sft.gripper, info), config.sft.weights, stride, left_out)
    if not len(found.train):
        raise UserError(
            f"the policy learns from no episode's last {left_out} env steps (drop_n_last_frames), and none of the "
            "episodes is longer: take longer ones, or set it to fewer in the checkpoint's config.json"
        )
    return found


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


@contextmanager
def start_imitators(
    config: Config, info: TaskInfo, demonstrations: Demonstrations, session: Session | None
) -> Iterator[WorkerGroup[Imitator]]:
    """The ranks that learn: as many as `optim.ranks` says on the session's runtime; without a session one, in this
    process, which computes what several do. They end with the block."""
    if session is None:
        handle = InlineRuntime(config.runtime.deadline_s).start("learner", Imitator, config, info, demonstrations)
        group = WorkerGroup("learner", (handle,))
    else:
        places = imitation_places(config, session.cores, session.runtime.nodes())
        of_rank = [(config, info, demonstrations, place, rank, len(places)) for rank, place in enumerate(places)]
        group = session.runtime.start_group(
            "learner", Imitator, len(places), of_rank.__getitem__, nodes=[place.node for place in places]
        )
        connect_ranks(session, group, [place.node for place in places])
    try:
        yield group
        group.call_all(Imitator.leave)
    finally:
        if session is None:
            group.call_all(Imitator.close)
    group.end()  # after a failure the session drops them: to end one that died would hide why


def imitate(
    config: Config,
    info: TaskInfo,
    run_dir: Path,
    resume_from: Path | None,
    *,
    session: Session | None = None,
    tracking: Tracking = NOT_TRACKED,
) -> dict[str, Any]:
    """Run the steps that are left and leave a checkpoint of the last; `tracking` sees the rows. Returns the result as
    plain data.

    `session` has the ranks; None: one rank in this process. Interrupted, the last finished step is kept as a
    checkpoint.
    """
    demonstrations = read_demonstrations(config, info)
    require_rows(config, len(demonstrations.train))
    understood = inspected(demonstrations, config, observed(task_spec(config), draw="images" in config.policy.reads))
    if understood.refused:
        show_table(replace(understood, findings=understood.warnings))
        understood.raise_refusals()
    with start_imitators(config, info, demonstrations, session) as ranks:
        understood = ranks.call_one(0, Imitator.understood, understood)
        log = _Log(run_dir, ranks, time.monotonic())
        if resume_from is None:
            ranks.call_all(Imitator.begin)
        else:
            ranks.call_all(Imitator.load, resume_from)
        understood = understood.with_findings(ranks.call_one(0, Imitator.beside_statistics))
        show_table(replace(understood, findings=understood.warnings))
        understood.raise_refusals()
        if resume_from is not None:
            state = checkpoint.read_state(resume_from)
            log = _Log(run_dir, ranks, log.began_s - state.wall_s, state.iteration)
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, run_dir / "config.yaml")
        starts = [recorded_starts(source) for source in demonstrations.sources]
        data = understood.as_data() | {"text": text(understood), "starts": starts}
        write_whole(run_dir / DATA, json.dumps(data, indent=1))
        try:
            measured = _learn(ranks, config, log, tracking, demonstrations.episodes)
        except WORKERS_LOST:  # nothing can be asked of them
            raise
        except BaseException:  # of an interrupted run, or one whose loss went astray
            log.save()
            log.settle()
            raise
        log.finish()
        return {
            "run": str(run_dir),
            "steps": log.saved,
            "episodes": demonstrations.episodes,
            "wall_s": log.wall_s,
            **measured,
        }


@dataclass
class _Log:
    """Files that a training leaves in its folder."""

    run_dir: Path
    ranks: WorkerGroup[Imitator]
    began_s: float
    """Start of the training in seconds, as if it had never been interrupted."""
    saved: int = 0
    """Steps that the newest complete checkpoint has."""
    begun: int = 0
    """Steps of the one that is being written; 0: none is."""
    failed_writes: FailedWrites = field(default_factory=FailedWrites)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began_s

    def save(self) -> None:
        """Begin to write a checkpoint of what is now. If that fails, the training continues, and the next one is
        tried."""
        self.settle()
        state = self.ranks.call_one(0, Imitator.state, self.wall_s)
        if state.iteration > self.saved:
            with self.failed_writes.noted():
                self.ranks.call_all(Imitator.save, self.run_dir / "checkpoints", state, {})
                self.begun = state.iteration

    def settle(self) -> None:
        """Wait until the checkpoint is complete that was begun, or could not be written."""
        if self.begun:
            begun, self.begun = self.begun, 0
            with self.failed_writes.noted():
                self.ranks.call_all(Imitator.saved)
                self.saved = begun
                self.failed_writes.over()

    def finish(self) -> None:
        """Write the last one. Raises `CheckpointError` where that cannot be, also when it is tried again."""
        for _ in range(2):
            self.save()
            self.settle()
        if self.ranks.call_one(0, Imitator.state, 0.0).iteration > self.saved:
            raise self.failed_writes.error()


def _learn(
    ranks: WorkerGroup[Imitator], config: Config, log: _Log, tracking: Tracking, episodes: int
) -> dict[str, float]:
    """The steps that are left, with their rows of metrics; the last of these."""
    row, losses, total = dict[str, float](), list[float](), config.sft.steps
    done = log.saved
    with (
        MetricsWriter(log.run_dir, tracking) as metrics,
        steps(f"Learning from {episodes} episodes", total) as bar,
    ):
        metrics.truncate(done)
        bar.advance(done)
        while done < total:
            losses.append(ranks.call_all(Imitator.step)[0])
            done += 1
            if done % config.sft.measure_every == 0 or done == total:
                row = {"sft/loss": float(np.mean(losses)), **ranks.call_all(Imitator.measure)[0]}
                state = ranks.call_one(0, Imitator.state, log.wall_s)
                metrics.write(done, state.env_steps, {"wall_s": state.wall_s, **row})
                losses.clear()
            if done % config.sft.checkpoint_every == 0:
                metrics.sync()
                log.save()
            bar.advance(1, f"loss {row['sft/loss']:.4g}" if row else "")
    return row
