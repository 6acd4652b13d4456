"""The training loop: what one iteration is, and what is done after each.

[ rollout -> update -> publish weights -> record ] x iterations -> checkpoint -> evaluation -> report

`TrainingLoop.run` is the loop. The steps of an iteration are in `embodied.execution.iteration`. Whatever else a run
does is an observer, which is called after each iteration, or is around the loop: `train` starts the workers, and starts
them anew after a loss (`embodied.execution.recovery`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import print as show
from rich.markup import escape

from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.devices import accelerators
from embodied.execution.iteration import Iteration, OnPolicy, start_run
from embodied.execution.recovery import FILE, Recovery
from embodied.execution.session import Session
from embodied.other_programs import OtherPrograms
from embodied.planning.run_plans import Move, Watch, plan_run
from embodied.reporting.live import Progress, tell
from embodied.reporting.metrics import MetricsWriter, read
from embodied.reporting.trackers import NOT_TRACKED, Tracking
from embodied.run import checkpoint
from embodied.run.folder import lasting_root, newest_whole
from embodied.run.trace import TraceWriter
from embodied.runtime.api import Runtime
from embodied.training.callbacks import Callback, IterationEnd
from embodied.training.checkpoints import RECENT, Position, RunCheckpoints
from embodied.training.interrupts import deferrable_interrupts
from embodied.training.iteration_metrics import iteration_row, left_out
from embodied.training.selection import BackgroundError, Selection, free_room
from embodied.training.watches import BrokenWatch, CollapseWatch, Milestones, StandstillWatch
from embodied.workflows.run_spec import RunSpec
from policies.capabilities import SampledElsewhere
from policies.registry import policy_kind
from sim_farm.workers import faults

FINISHING = "interrupted: finishing the update, so that its iteration is kept; once more stops at once"
Observer = Callable[[IterationEnd, Iteration], None]
"""Called after each iteration whose row is recorded. It may stop the run (`IterationEnd.stop`)."""


def train(
    run: RunSpec,
    run_dir: Path,
    session: Session,
    resume_from: Path | None,
    callbacks: Sequence[Callback] = (),
    *,
    tracking: Tracking = NOT_TRACKED,
) -> dict[str, Any]:
    """Run the remaining iterations and write a checkpoint of the last. `callbacks` see each iteration, and `tracking`
    its row. Returns the result as plain data, with `deterministic` false where an engine draws what the seed does not
    determine.

    If the run is interrupted between two updates, the last finished iteration is kept as a checkpoint.
    """
    begin, config = time.monotonic(), run.config
    planned = plan_run(run, session, run_dir)
    recovery = Recovery(run_dir)
    selection, metrics = Selection(config, run_dir, session, tracking), MetricsWriter(run_dir, tracking)
    loop = TrainingLoop(config, run_dir, selection, metrics, recovery, session.runtime, callbacks)
    start_from, startup_s, move, ended = resume_from, 0.0, None, False

    def go_back(error: Exception) -> None:
        nonlocal start_from
        start_from = loop.go_back(error, resume_from)

    with metrics, closing(selection):
        while not ended:
            building = time.monotonic()
            with recovery.attempt(session, lambda: loop.position.iteration, go_back):
                faults.point("driver", "start")
                with start_run(run, run_dir, session, planned.assignment) as workers:
                    recovery.built()
                    show(workers.memory.describe())
                    selection.move(free_room(planned.assignment, session.cores, accelerators(config.policy.device)))
                    loop.begin(workers, start_from)
                    recovery.current(loop.position.iteration)
                    save_config(config, run_dir / "config.yaml")  # a resumed run may have other settings that fit
                    built = time.monotonic()
                    startup_s = startup_s or built - begin
                    move = loop.run(planned.watch(built - building))
                ended = move is None
            if move is not None:  # the new workers continue from the checkpoint that was just written
                planned, move, start_from = planned.moved(move), None, checkpoint.latest(run_dir / "checkpoints")
    recovery.note_replaced(session.runtime, loop.position.iteration, tell)  # what was lost at the very end
    position, not_learned = loop.position, loop.standstill.at_end()
    recent, returns = (position.recent if loop.workers.has_success else ()), position.recent_returns
    acting = policy_kind(config.policy.kind).policy_for(config.policy.architecture)
    return {
        "run": str(run_dir),
        "mode": planned.assignment.mode,
        "predicted_iteration_s": planned.predicted_s,
        "iterations": position.iteration,
        "env_steps": position.env_steps,
        "wall_s": position.wall_s,
        "startup_s": startup_s,
        "success_recent": float(np.mean(recent)) if recent else None,
        "return_recent": float(np.mean(returns)) if returns else None,
        **({} if not_learned is None else {"not_learned": not_learned}),
        **({"recoveries": recovery.recoveries} if recovery.recoveries else {}),
        **({"replaced": recovery.replaced} if recovery.replaced else {}),
        **({} if selection.best is None else {"best_iteration": selection.best}),
        **({"deterministic": False} if issubclass(acting, SampledElsewhere) else {}),
        "env_steps_per_s": position.env_steps / max(position.wall_s, 1e-9),
        **loop.milestones.reached,
    }


class TrainingLoop:
    """The iterations of one run."""

    workers: OnPolicy
    progress: Progress
    _others: OtherPrograms

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        selection: Selection,
        metrics: MetricsWriter,
        recovery: Recovery,
        runtime: Runtime,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config, self.run_dir, self.selection, self.metrics = config, run_dir, selection, metrics
        self._recovery, self._runtime, self._callbacks = recovery, runtime, callbacks
        self.position, self.trace = Position(), TraceWriter(run_dir / "trace.json")
        self.checkpoints = RunCheckpoints(config, run_dir, selection, metrics, self.trace)
        self._memory = MemoryWatch(runtime, self.checkpoints)
        self._watch_anew()

    def _watch_anew(self) -> None:
        self.milestones, self.standstill = Milestones(), StandstillWatch(self.config)
        self._collapse, self._broken = CollapseWatch(RECENT), BrokenWatch()

    def begin(self, workers: OnPolicy, resume_from: Path | None) -> None:
        """Load the checkpoint, if there is one, and start the environments."""
        self.workers, self._others = workers, OtherPrograms()
        environments = None
        if resume_from is not None:
            workers.load(resume_from)
            environments = checkpoint.read_environments(resume_from)
        self.position = Position() if resume_from is None else Position.of(checkpoint.read_state(resume_from))
        self.position.environments = environments or {}
        stays = resume_from is not None and resume_from.parent == lasting_root(self.run_dir)
        self.checkpoints.begin(workers, self.position, self.position.iteration if stays else -1)
        self.metrics.truncate(self.position.iteration)
        self.selection.begin(self.position.iteration)
        self._watch_anew()
        for row in read(self.run_dir):
            for watch in (self.milestones, self._collapse, self.standstill, self._broken):
                watch.see(row)
        workers.begin(environments, self.position.iteration)

    def run(self, watch: Watch | None) -> Move | None:
        """Iterate to the end, or until an observer stops the run; or, if there is a better plan, to a checkpoint from
        which the run continues by it."""
        config, position = self.config, self.position
        progress = Progress(self.run_dir.name, config.iterations, config.stop_at, self.workers.has_success)
        with progress as self.progress, self._kept():
            replanning = Replanning(watch, self.checkpoints, progress)
            observers: Sequence[Observer] = (
                self._report, self._watch, self.checkpoints.see, self._stop_at_target, replanning.see, self._memory.see,
            )  # fmt: skip
            self.checkpoints.evaluate_begun(progress)
            while position.iteration < config.iterations:
                self.trace.iteration(position.iteration)
                faults.point("driver", "rollout")
                with deferrable_interrupts(lambda: progress.note(FINISHING)) as defer:
                    # A run that continues from a checkpoint has no rollout ahead; one that passes it must compute the
                    # same.
                    iteration = self.workers.iterate(
                        position.iteration,
                        drain=self.checkpoints.lasts(position.iteration + 1),
                        before_update=partial(self._before_update, defer),
                    )
                    position.add(iteration)
                    end = self._record(iteration)
                for observe in observers:
                    observe(end, iteration)
                if replanning.move is not None:
                    return replanning.move
                if end.stopping is not None:
                    progress.note(end.stopping)
                    break
            self.checkpoints.finish()
        return None

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep what was computed, however the block ends: a checkpoint of the last finished iteration after an
        interruption, the checkpoint in progress after an error, and the timeline."""
        try:
            yield
        except KeyboardInterrupt:
            self.progress.note(f"interrupted; {self.checkpoints.keep()}")
            raise
        except Exception:  # whatever ended the run: the checkpoint in progress is completed first
            with suppress(Exception):  # what ends the run says more
                self.checkpoints.complete_after_loss()
            raise
        finally:
            try:
                self.trace.write()
            except OSError as error:  # it must not hide what ends the run
                tell(f"cannot write {self.run_dir / 'trace.json'} ({error.strerror}): the run is without a timeline")

    def _before_update(self, defer: Callable[[], None]) -> None:
        """Called between rollout and update. From now on the iteration has to be completed: until then, learner and
        environments belong to different iterations, and no checkpoint can be written."""
        self._memory.measure()
        faults.point("driver", "update")
        defer()
        self.position.environments = {}

    def _record(self, iteration: Iteration) -> IterationEnd:
        """Write the iteration's row, with what the callbacks add to it."""
        position = self.position
        row = iteration_row(
            self.workers.spec,
            position,
            iteration,
            self.checkpoints.taken(),
            has_success=self.workers.has_success,
            other_programs=self._others.share(),
        )
        end = IterationEnd(self.config, self.run_dir, position.iteration, position.env_steps, row)
        for callback in self._callbacks:
            callback(end)
        if end.stopping is not None:
            end.stopping += ": stopping as a callback asks"
        if end.saving:
            self.checkpoints.request()
        self.metrics.write(position.iteration, position.env_steps, row)
        return end

    # --- observers

    def _report(self, end: IterationEnd, iteration: Iteration) -> None:
        self.trace.add(iteration.spans)
        self.progress.row(end.row)
        self._recovery.note_replaced(self._runtime, end.iteration, self.progress.note)

    def _watch(self, end: IterationEnd, iteration: Iteration) -> None:
        """Say what the watches find in the row. Raises `UserError` where every episode is broken."""
        without = ""
        if broken := end.row.get("learner/broken_episodes"):
            without = left_out(int(broken), iteration.summary, self.workers.spec)
            self.progress.note(without)
        self._broken.see(end.row)
        self._broken.end(iteration.summary.episodes, without, last=end.iteration == self.config.iterations)
        self.milestones.see(end.row)
        for watch in (self._collapse, self.standstill):
            if said := watch.see(end.row):
                self.progress.note(said)

    def _stop_at_target(self, end: IterationEnd, iteration: Iteration) -> None:
        """Stop the run once its success, or its return without success, reaches the target of the configuration."""
        name, target = "success" if self.workers.has_success else "return", self.config.stop_at
        recent = end.row.get(f"env/{name}_recent", math.nan)
        if target is not None and recent >= target and end.stopping is None:
            end.stop(f"{name} of the last {RECENT} episodes is {recent:.2f}: stopping as asked")

    # --- after a loss

    def go_back(self, error: Exception, first: Path | None) -> Path | None:
        """The checkpoint from which the run continues after a loss: its newest complete one; without one, the
        checkpoint that it began from, if there was one. Raises `CheckpointError` if it has some, and none is complete.
        """
        done = self.position.iteration
        if self.selection.pending is not None:
            try:
                show(self.selection.finish(block=True))
            except BackgroundError:  # it is evaluated when the run continues
                self.selection.close()
        newest, damaged = newest_whole(self.run_dir)
        for one in damaged:
            show(escape(f"{one}"))
        folder = newest or first
        begun = 0 if folder is None else checkpoint.read_state(folder).iteration
        again = f", and computes {done - begun} again" if done > begun else ""
        show(escape(f"lost: {error}\nthe run goes on from iteration {begun}{again}; see {self.run_dir / FILE}"))
        return folder


@dataclass
class MemoryWatch:
    """Restarts all workers, as after a loss, once one of them occupies too much memory."""

    runtime: Runtime
    checkpoints: RunCheckpoints
    _large: Exception | None = None
    """The error of such a worker."""

    def measure(self) -> None:
        self._large = self._large or self.runtime.too_large()

    def see(self, end: IterationEnd, iteration: Iteration) -> None:
        """Write a checkpoint and raise the error, unless the run ends anyway.

        If rollouts run ahead this waits for a checkpoint that was asked for: a run that continues from another would
        act with other weights. If none can be written the run continues as it is.
        """
        if self._large is None or end.stopping is not None or end.iteration == end.config.iterations:
            return
        if self.checkpoints.workers.assignment.ahead and not self.checkpoints.lasts(end.iteration):
            return
        large, self._large = self._large, None
        if self.checkpoints.save_whole():
            raise large


@dataclass
class Replanning:
    """Moves a run to a better plan, once its times show that there is one."""

    watch: Watch | None
    checkpoints: RunCheckpoints
    progress: Progress
    move: Move | None = None

    def see(self, end: IterationEnd, iteration: Iteration) -> None:
        if self.watch is None or end.stopping is not None:
            return
        move = self.watch.see(iteration, end.config.iterations - end.iteration)
        if move is not None:
            self.progress.note(f"planned again: {move.reason}")
            self.checkpoints.report_selection(block=True)
            self.move = move if self.checkpoints.save_whole() else None
