"""The training loop: rollout, update and weights once per iteration, and the records and checkpoints of a run.

[ rollout -> update -> publish weights -> record ] x iterations -> checkpoint -> evaluation -> report

The steps of an iteration are in `embodied.execution.iteration`. Every `eval.every` iterations a checkpoint is written
and evaluated: in the background if the run leaves a core free, else the run waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich import print as show
from rich.markup import escape

from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.devices import accelerators
from embodied.errors import UserError
from embodied.execution.iteration import Iteration, OnPolicy, start_run
from embodied.execution.recovery import FILE, Recovery
from embodied.execution.session import Session
from embodied.files import is_full
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
from embodied.training.iteration_metrics import (
    CollapseWatch,
    FaultWatch,
    StandstillWatch,
    iteration_row,
    left_out,
)
from embodied.training.selection import BackgroundError, Candidate, Selection, free_room
from policies.registry import policy_kind
from sim_farm.workers import faults

FINISHING = "interrupted: finishing the update, so that its iteration is kept; once more stops at once"


def train(
    config: Config,
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
    begin = time.monotonic()
    planned = plan_run(config, session, run_dir)
    recovery = Recovery(run_dir)
    selection, metrics = Selection(config, run_dir, session, tracking), MetricsWriter(run_dir, tracking)
    loop = _Loop(config, run_dir, selection, metrics, recovery, session.runtime, callbacks)
    first, startup_s = resume_from, 0.0
    with loop.metrics, closing(loop.selection):
        while True:
            building = time.monotonic()
            recovery.started()
            try:
                faults.point("driver", "start")
                with start_run(config, run_dir, session, planned.assignment) as workers:
                    recovery.built()
                    show(workers.memory.describe())
                    loop.selection.move(
                        free_room(planned.assignment, session.cores, accelerators(config.policy.device))
                    )
                    loop.begin(workers, resume_from)
                    recovery.current(loop.position.iteration)
                    save_config(config, run_dir / "config.yaml")  # a resumed run may have other settings that fit
                    built = time.monotonic()
                    startup_s = startup_s or built - begin
                    with Progress(
                        run_dir.name, config.iterations, config.stop_at_success, config.stop_at_return
                    ) as progress:
                        move = loop.run(progress, planned.watch(built - building))
            except Exception as error:
                if config.runtime.mode == "inline":  # there is no other process to be lost
                    raise
                loop.note_replaced(tell)
                if not recovery.goes_on(error, loop.position.iteration):
                    raise
                session.runtime.end_workers()
                resume_from = loop.go_back(error, first)
                continue
            if move is None:
                loop.note_replaced(tell)  # what was lost at the very end
                break
            # The new workers go on from the checkpoint that was just written.
            planned = planned.moved(move)
            resume_from = checkpoint.latest(run_dir / "checkpoints")
    position = loop.position
    recent, returns = (position.recent if loop.workers.has_success else ()), position.recent_returns
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
        **({} if loop.standstill.at_end() is None else {"not_learned": loop.standstill.at_end()}),
        **({"recoveries": recovery.recoveries} if recovery.recoveries else {}),
        **({"replaced": recovery.replaced} if recovery.replaced else {}),
        **({} if loop.selection.best is None else {"best_iteration": loop.selection.best}),
        **(
            {"deterministic": False}
            if policy_kind(config.policy.kind).policy.asks_engine(config.policy.architecture)
            else {}
        ),
        "env_steps_per_s": position.env_steps / max(position.wall_s, 1e-9),
        **loop.milestones,
    }


class _Loop:
    """The iterations of one run."""

    workers: OnPolicy
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
        self._stopping: str | None = None
        """A callback's reason to end the run."""
        self._save_at = -1
        """Iteration whose checkpoint a callback has asked for."""
        self.position = Position()
        self.trace = TraceWriter(run_dir / "trace.json")
        self.milestones: dict[str, float] = {}
        self._environments: dict[str, np.ndarray] = {}
        self._checkpoints = RunCheckpoints(config, run_dir, selection, self.metrics, self.trace)
        self._collapse, self._faults = CollapseWatch(RECENT), FaultWatch()
        self.standstill = StandstillWatch(config)
        self._large: Exception | None = None
        """The error of a worker that occupies too much memory."""
        self._consistent = True
        """True if learner, environments and position belong to the same iteration, so that they may be saved."""

    def begin(self, workers: OnPolicy, resume_from: Path | None) -> None:
        """Load the checkpoint, if there is one, and start the environments."""
        self.workers, self._others = workers, OtherPrograms()
        environments = None
        if resume_from is not None:
            self.workers.load(resume_from)
            environments = checkpoint.read_environments(resume_from)
        self.position = Position() if resume_from is None else Position.of(checkpoint.read_state(resume_from))
        self._checkpoints.begin(workers, self._kept_at(resume_from))
        self._environments, self._consistent = environments or {}, True
        self._collapse, self._faults, self.milestones = CollapseWatch(RECENT), FaultWatch(), {}
        self.standstill = StandstillWatch(self.config)
        self.metrics.truncate(self.position.iteration)
        self.selection.begin(self.position.iteration)
        for row in read(self.run_dir):
            self._note_milestones(row)
            self._collapse.see(row)
            self.standstill.see(row)
        self.workers.begin(environments, self.position.iteration)

    def _kept_at(self, begun_from: Path | None) -> int:
        """Iteration of the checkpoint that the run begins from, if it is one that stays; else -1."""
        stays = begun_from is not None and begun_from.parent == lasting_root(self.run_dir)
        return self.position.iteration if stays else -1

    def go_back(self, error: Exception, first: Path | None) -> Path | None:
        """The checkpoint from which the run goes on after a loss: its newest complete one; without one, the checkpoint
        that it began from, if there was one. Raises `CheckpointError` if it has some, and none is complete."""
        done = self.position.iteration
        if self.selection.pending is not None:
            try:
                show(self.selection.finish(block=True))
            except BackgroundError:  # it is evaluated when the run goes on
                self.selection.close()
        found, damaged = newest_whole(self.run_dir)
        for one in damaged:
            show(escape(f"{one}"))
        folder = found or first
        begun = 0 if folder is None else checkpoint.read_state(folder).iteration
        again = f", and computes {done - begun} again" if done > begun else ""
        show(escape(f"lost: {error}\nthe run goes on from iteration {begun}{again}; see {self.run_dir / FILE}"))
        return folder

    def note_replaced(self, say: Callable[[str], None]) -> None:
        """Record the farm's workers that were replaced, and print each with `say`."""
        for lost in self._runtime.host.take_replaced():
            say(self._recovery.note_replaced(lost, self.position.iteration))

    def run(self, progress: Progress, watch: Watch | None) -> Move | None:
        """Iterate to the end; or, if there is a better plan, to a checkpoint from which the run goes on by it."""
        config = self.config
        try:
            for candidate in self.selection.begun(self.position.iteration):
                self._evaluate(progress, candidate)
            self._select(progress)  # a run that goes on may have been stopped in the middle of an evaluation
            while self.position.iteration < config.iterations:
                row, iteration = self._iterate(progress)
                progress.row(row)
                self._note_milestones(row)
                self.note_replaced(progress.note)
                without = None
                if broken := row.get("learner/broken_episodes"):
                    without = left_out(int(broken), iteration.summary, config)
                    progress.note(without)
                self._faults.see(iteration.summary)
                notes = self._collapse.see(row), self.standstill.see(row)
                if self.standstill.all_broken(self.position.iteration == config.iterations):
                    count = self.standstill.iterations
                    raise UserError(
                        f"nothing can be learned: every episode of {count} iterations was broken. The last: {without}"
                    )
                for said in filter(None, notes):
                    progress.note(said)
                if self._lasts(self.position.iteration):
                    self._checkpoints.save(self.position, self._environments)
                    self._select(progress)
                else:
                    self._checkpoints.save_between(self.position, self._environments)
                self._report_selection(progress)
                if (reached := self._reached(row)) is not None:
                    progress.note(reached)
                    break
                move = watch.see(iteration, config.iterations - self.position.iteration) if watch else None
                if move is not None:
                    progress.note(f"planned again: {move.reason}")
                    self._report_selection(progress, block=True)
                    self._checkpoints.save(self.position, self._environments)
                    self._checkpoints.complete()
                    if self._checkpoints.whole == self.position.iteration:
                        return move
                if self.position.iteration < config.iterations:
                    self._replace_large()
            self._checkpoints.finish(self.position, self._environments)
            self._select(progress, last=True)
        except KeyboardInterrupt:
            progress.note(f"interrupted; {self._keep()}")
            raise
        except Exception:
            with suppress(Exception):  # what ends the run says more
                self._checkpoints.complete_after_loss()
            raise
        finally:
            self._write_trace()
        return None

    def _replace_large(self) -> None:
        """If a worker occupies too much memory, write a checkpoint and raise the error that restarts all workers.

        If rollouts run ahead this waits for a checkpoint that the configuration asks for: a run that goes on from
        another would act with other weights. If none can be written the run goes on as it is.
        """
        number = self.position.iteration
        if self._large is None or (self.workers.assignment.ahead and not self._checkpoints.lasts(number)):
            return
        large, self._large = self._large, None
        self._checkpoints.save(self.position, self._environments)
        self._checkpoints.complete()
        if self._checkpoints.whole == number:
            raise large

    def _write_trace(self) -> None:
        try:
            self.trace.write()
        except OSError as error:  # it must not hide what ends the run
            tell(f"cannot write {self.run_dir / 'trace.json'} ({error.strerror}): the run is without a timeline")

    def _select(self, progress: Progress, last: bool = False) -> None:
        """Evaluate the current checkpoint if that is due, or begin to; wait for the last one, and for one before it."""
        position, selection = self.position, self.selection
        last = last or position.iteration == self.config.iterations
        due = selection.due(position.iteration, last)
        if due or last:
            self._report_selection(progress, block=True)
        if not due:
            return
        candidate = Candidate(position.iteration, position.env_steps, position.wall_s)
        self._checkpoints.complete()
        if self._checkpoints.whole != position.iteration:
            progress.note(f"iteration {position.iteration} is not evaluated: its checkpoint could not be written")
            return
        if selection.in_background and not last:
            try:
                selection.start(candidate)
                return
            except BackgroundError as error:
                self._stop_background(progress, candidate, error)
        self._evaluate(progress, candidate)

    def _evaluate(self, progress: Progress, candidate: Candidate) -> None:
        try:
            with progress.paused():
                message = self.selection.evaluate(candidate)
        except OSError as error:
            if not is_full(error):
                raise
            message = f"iteration {candidate.iteration} is not evaluated: {error}"
        progress.note(message)
        self._checkpoints.keep_newest()

    def _report_selection(self, progress: Progress, block: bool = False) -> None:
        """Report the evaluation in the background, if it is complete. If its process is gone, evaluate here."""
        pending = self.selection.pending
        if pending is None:
            return
        try:
            message = self.selection.finish(block)
        except (BackgroundError, OSError) as error:
            if not (isinstance(error, BackgroundError) or is_full(error)):
                raise
            self._stop_background(progress, pending, error)
            self._evaluate(progress, pending)
            return
        if message is not None:
            progress.note(message)
            self._checkpoints.keep_newest()

    def _stop_background(self, progress: Progress, candidate: Candidate, error: Exception) -> None:
        """Evaluate nothing in the background from now on."""
        self.selection.close()
        number = candidate.iteration
        progress.note(f"evaluating iteration {number} in the background: {error}; the run waits for it now")

    def _iterate(self, progress: Progress) -> tuple[dict[str, float], Iteration]:
        """Run one iteration; its row of metrics, and its result."""
        number = self.position.iteration
        self.trace.iteration(number)
        faults.point("driver", "rollout")
        with deferrable_interrupts(lambda: progress.note(FINISHING)) as defer:

            def before_update() -> None:
                self._large = self._large or self._runtime.too_large()
                faults.point("driver", "update")
                defer()
                self._consistent = False

            # A run that goes on from a checkpoint has no rollout ahead; one that passes it must compute the same.
            drain = self._lasts(number + 1)
            iteration = self.workers.iterate(number, drain=drain, before_update=before_update)
            self._environments = iteration.environments
            self.position.add(iteration)
            self._consistent = True
            row = iteration_row(
                self.config,
                self.position,
                iteration,
                self._checkpoints.taken(),
                has_success=self.workers.has_success,
            )
            share = self._others.share()
            row["time/other_programs"] = float("nan") if share is None else share
            self._call_back(row)
            self.metrics.write(self.position.iteration, self.position.env_steps, row)
        self.trace.add(iteration.spans)
        return row, iteration

    def _lasts(self, iteration: int) -> bool:
        """True if a checkpoint of that iteration is to be written: the configuration or a callback asks for it."""
        return iteration == self._save_at or self._checkpoints.lasts(iteration)

    def _call_back(self, row: dict[str, float]) -> None:
        """Let the callbacks see the iteration, and note what they ask for."""
        position = self.position
        asked = IterationEnd(self.config, self.run_dir, position.iteration, position.env_steps, row)
        for callback in self._callbacks:
            callback(asked)
        self._stopping = asked.stopping
        if asked.saving:  # a rollout that is ahead already cannot be taken back: then the next iteration is saved
            self._save_at = position.iteration + (1 if self.workers.assignment.ahead else 0)

    def _reached(self, row: Mapping[str, float]) -> str | None:
        """A note that the run has come as far as was asked for, or is asked to end; None until then."""
        if self._stopping is not None:
            return f"{self._stopping}: stopping as a callback asks"
        wanted = {"success": self.config.stop_at_success, "return": self.config.stop_at_return}
        for name, least in wanted.items():
            recent = row.get(f"env/{name}_recent", math.nan)
            if least is not None and recent >= least:
                return f"{name} of the last {RECENT} episodes is {recent:.2f}: stopping as asked"
        return None

    def _note_milestones(self, row: Mapping[str, Any]) -> None:
        recent = row.get("env/success_recent")
        if recent is None:  # NaN in metrics.jsonl
            return
        for level in (0.5, 0.9, 0.95):
            key = f"success_{level}"
            if recent >= level and f"{key}_wall_s" not in self.milestones:
                self.milestones[f"{key}_wall_s"] = row["wall_s"]
                self.milestones[f"{key}_env_steps"] = row["env_steps"]

    def _keep(self) -> str:
        """After an interruption: save the last finished iteration, if the learner still has its weights."""
        if self._consistent and self._environments:
            self._checkpoints.save(self.position, self._environments)
        self._checkpoints.complete()
        whole = self._checkpoints.whole
        return f"iteration {whole} is kept" if whole >= 0 else "no iteration is kept"
