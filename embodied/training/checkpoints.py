"""A run's checkpoints: when one is written, where, how long the run stands still for it, and which are evaluated.

    RUN/checkpoints/000120/            every `checkpoint_every` iterations, where one is evaluated, and at the end
    RUN/checkpoints/interim/000127/    in between, as often as `SHARE` of the run's time allows; the newest alone

What a run loses with a worker, or by being killed, is what came after the newest of both. An interim checkpoint is
removed once a later one is complete.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from embodied.config.schema import Config
from embodied.execution.iteration import Environments, Iteration, OnPolicy
from embodied.files import is_full
from embodied.metric import Metric
from embodied.reporting.live import Progress, tell
from embodied.reporting.metrics import MetricsWriter
from embodied.run import checkpoint
from embodied.run.background_writer import Written
from embodied.run.checkpoint import CheckpointError
from embodied.run.folder import interim_root, lasting_root
from embodied.run.trace import Span, TraceWriter
from embodied.training.callbacks import IterationEnd
from embodied.training.selection import BackgroundError, Candidate, Selection
from sim_farm.workers import faults

SHARE = 0.02
"""Share of a run's time that interim checkpoints may take: the run standing still, and a thread writing."""


RECENT = 100
"""Training episodes over which the success and the return that are reported as `env/success_recent` and
`env/return_recent` are averaged."""


METRICS = (
    Metric("time/checkpoint_stall_s", "s", "Time for which the run stood still for checkpoints since the last row."),
    Metric("time/checkpoint_write_s", "s", "Time of writing complete checkpoints since then, while the run went on."),
)


@dataclass
class Position:
    """Position of a run between two iterations: everything but the weights."""

    iteration: int = 0
    env_steps: int = 0
    wall_s: float = 0.0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Outcomes of the last training episodes, oldest first."""
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Returns of the last training episodes whose numbers were finite, oldest first."""
    environments: Environments = field(default_factory=dict)
    """Snapshot of the environments; empty during an update, when it does not belong to the learner's weights."""

    def add(self, iteration: Iteration) -> None:
        """Move behind an iteration that was completed."""
        self.iteration += 1
        self.env_steps += iteration.summary.env_steps
        self.wall_s += iteration.wall_s
        episodes = iteration.summary.episodes
        self.recent.extend(episode.success for episode in episodes)
        self.recent_returns.extend(e.total_reward for e in episodes if math.isfinite(e.total_reward))
        self.environments = iteration.environments

    def state(self) -> checkpoint.RunState:
        recent, returns = tuple(self.recent), tuple(self.recent_returns)
        return checkpoint.RunState(self.iteration, self.env_steps, self.wall_s, recent, recent_return=returns)

    @classmethod
    def of(cls, state: checkpoint.RunState) -> Position:
        recent = deque(state.recent_success, maxlen=RECENT), deque(state.recent_return, maxlen=RECENT)
        return cls(state.iteration, state.env_steps, state.wall_s, *recent)


class FailedWrites:
    """Checkpoints that could not be written since the last complete one."""

    def __init__(self) -> None:
        self._first: CheckpointError | None = None
        self._last: CheckpointError | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, a checkpoint is written, or begun; if that fails, the run continues."""
        try:
            yield
        except CheckpointError as error:
            self._last = error
            if self._first is None:
                self._first = error
                tell(
                    f"{error}. The run goes on, and tries again at the next checkpoint. If there is no room on that "
                    "disk, make some: remove what is not needed, and keep fewer checkpoints (--keep-checkpoints 2)"
                )

    def over(self) -> None:
        """One has been written."""
        if self._first is not None:
            tell("checkpoints are written again")
        self._first = self._last = None

    def error(self) -> CheckpointError:
        """The error that ends a run whose last checkpoint cannot be written."""
        assert self._first is not None and self._last is not None
        if str(self._first) == str(self._last):
            return self._last
        return CheckpointError(f"{self._last}. The first that could not be written was another: {self._first}")


@dataclass
class RunCheckpoints:
    """The checkpoints of one run while it trains. If one cannot be written, the run continues and tries the next."""

    config: Config
    run_dir: Path
    selection: Selection
    metrics: MetricsWriter
    trace: TraceWriter
    whole: int = -1
    """The iteration of the newest that stays and is complete; -1: none."""
    workers: OnPolicy = field(init=False)
    position: Position = field(init=False)
    progress: Progress = field(init=False)
    _requested: int = -1
    """Iteration whose checkpoint a callback has asked for."""
    _stall_s: float = 0.0
    """Seconds for which the run stood still for checkpoints since the last row of metrics."""
    _write_s: float = 0.0
    """Seconds of writing complete checkpoints since then, while the run continued."""
    _begun_s: float = field(default_factory=time.monotonic)
    """When the last one was begun."""
    _copied_s: float = 0.0
    """Seconds for which the run stood still for it."""
    _cost_s: float = 0.0
    """Seconds that the last complete one took."""
    _in_flight: tuple[Path, int] | None = None
    """Folder and iteration of the checkpoint that is being written."""
    _failed_writes: FailedWrites = field(default_factory=FailedWrites)

    def begin(self, workers: OnPolicy, position: Position, whole: int) -> None:
        """From now on checkpoints are those of these workers at this position. They continue from one of the iteration
        `whole` that stays; -1: from none."""
        self.workers, self.position, self._in_flight, self.whole = workers, position, None, whole

    def request(self) -> None:
        """Write a checkpoint of this iteration; of the next where a rollout is ahead, which cannot be taken back."""
        self._requested = self.position.iteration + (1 if self.workers.assignment.ahead else 0)

    def lasts(self, iteration: int) -> bool:
        """True if a checkpoint of that iteration is to be written, and to stay."""
        every = iteration % self.config.checkpoint_every == 0 or iteration == self._requested
        return every or iteration == self.config.iterations or self.selection.due(iteration)

    def see(self, end: IterationEnd, iteration: Iteration) -> None:
        """Begin to write the iteration's checkpoint, and to evaluate it, if either is due."""
        if self.lasts(self.position.iteration):
            self.save()
            self._select()
        else:
            self.save_between()
        self.report_selection()

    def save(self) -> None:
        """Begin to write a checkpoint that is kept, unless it exists."""
        root = lasting_root(self.run_dir)
        if self.whole != self.position.iteration and self._in_flight != (root, self.position.iteration):
            self._save(root)

    def save_between(self) -> None:
        """Begin to write an interim one, if the run has the time for it.

        Not where rollouts run ahead: a run that continues has none that is ahead, and would compute something else.
        """
        if self.workers.assignment.ahead or (self._in_flight is not None and self.workers.saving()):
            return
        if self._in_flight is not None:
            self.complete()
        if time.monotonic() - self._begun_s >= self._cost_s / SHARE:
            self._save(interim_root(self.run_dir))

    def save_whole(self) -> bool:
        """Write one that stays, and wait until it is complete; false if it could not be written."""
        self.save()
        self.complete()
        return self.whole == self.position.iteration

    def complete(self) -> None:
        """Wait until the last one is, or could not be written."""
        begin = time.monotonic_ns()
        self._settle()
        self._note_stall(begin, "complete the checkpoint")

    def complete_after_loss(self) -> None:
        """Wait until the last one is, where the workers that write it answer: a failure must not take along what was
        computed before it, nor wait for ranks that wait for the one that failed."""
        if self._in_flight is not None and self.workers.saves_on():
            self.complete()

    def keep(self) -> str:
        """After an interruption: write one of the last finished iteration, if the learner still has its weights.
        Returns a note on what is kept."""
        if self.position.environments:
            self.save()
        self.complete()
        return f"iteration {self.whole} is kept" if self.whole >= 0 else "no iteration is kept"

    def finish(self) -> None:
        """Write and evaluate the last checkpoint, which every finished run needs. Raises `CheckpointError` if it cannot
        be written, also at a second try."""
        if not (self.save_whole() or self.save_whole()):
            raise self._failed_writes.error()
        self._select(last=True)

    def taken(self) -> dict[str, float]:
        """Seconds that checkpoints took, as metrics; counting starts anew."""
        taken = {"time/checkpoint_stall_s": self._stall_s, "time/checkpoint_write_s": self._write_s}
        self._stall_s = self._write_s = 0.0
        return taken

    def keep_newest(self) -> None:
        """Remove what is not to be kept, unless it is being evaluated, and what a later one makes useless."""
        lasting, interim = lasting_root(self.run_dir), interim_root(self.run_dir)
        if self.config.keep_checkpoints and self.selection.pending is None:
            checkpoint.keep_newest(lasting, self.config.keep_checkpoints)
        newest, between = checkpoint.latest(lasting), checkpoint.latest(interim)
        if between is not None:
            of_use = newest is None or int(newest.name) < int(between.name)
            checkpoint.keep_newest(interim, 1) if of_use else shutil.rmtree(interim)

    # --- evaluations

    def evaluate_begun(self, progress: Progress) -> None:
        """Evaluate what an earlier session has left, in the middle of an evaluation or before it. `progress` shows it,
        and what follows."""
        self.progress = progress
        for candidate in self.selection.begun(self.position.iteration):
            self._evaluate(candidate)
        self._select()

    def report_selection(self, block: bool = False) -> None:
        """Report the evaluation in the background, if it is complete. If its process is gone, evaluate in this one."""
        pending = self.selection.pending
        if pending is None:
            return
        try:
            message = self.selection.finish(block)
        except (BackgroundError, OSError) as error:
            if not (isinstance(error, BackgroundError) or is_full(error)):
                raise
            self._stop_background(pending, error)
            self._evaluate(pending)
            return
        if message is not None:
            self.progress.note(message)
            self.keep_newest()

    def _select(self, last: bool = False) -> None:
        """Evaluate the current checkpoint if that is due, or begin to; wait for the last one, and for one before it."""
        position = self.position
        last = last or position.iteration == self.config.iterations
        due = self.selection.due(position.iteration, last)
        if due or last:
            self.report_selection(block=True)
        if not due:
            return
        candidate = Candidate(position.iteration, position.env_steps, position.wall_s)
        self.complete()
        if self.whole != position.iteration:
            note = f"iteration {position.iteration} is not evaluated: its checkpoint could not be written"
            self.progress.note(note)
            return
        if self.selection.in_background and not last:
            try:
                self.selection.start(candidate)
                return
            except BackgroundError as error:
                self._stop_background(candidate, error)
        self._evaluate(candidate)

    def _evaluate(self, candidate: Candidate) -> None:
        try:
            with self.progress.paused():
                message = self.selection.evaluate(candidate)
        except OSError as error:
            if not is_full(error):
                raise
            message = f"iteration {candidate.iteration} is not evaluated: {error}"
        self.progress.note(message)
        self.keep_newest()

    def _stop_background(self, candidate: Candidate, error: Exception) -> None:
        """Evaluate nothing in the background from now on."""
        self.selection.close()
        number = candidate.iteration
        self.progress.note(f"evaluating iteration {number} in the background: {error}; the run waits for it now")

    # --- writing

    def _save(self, root: Path) -> None:
        faults.point("driver", "save")
        begin = time.monotonic_ns()
        self._settle()
        self.metrics.sync()  # a checkpoint that counts after a crash has its rows
        with self._failed_writes.noted():
            self.workers.save(root, self.position.state(), self.position.environments)
            self._in_flight = (root, self.position.iteration)
        self._begun_s = begin / 1e9
        self._copied_s = self._note_stall(begin, "copy for a checkpoint")

    def _settle(self) -> None:
        if self._in_flight is None:
            return
        (root, iteration), self._in_flight = self._in_flight, None
        with self._failed_writes.noted():
            written = self.workers.saved()
            self._failed_writes.over()
            if root == lasting_root(self.run_dir):
                self.whole = iteration
            if written is not None:
                self._note_written(written)

    def _note_written(self, written: Written) -> None:
        self._write_s += written.seconds
        self._cost_s = self._copied_s + written.seconds
        self.trace.add([Span("checkpoint", "write", written.begin_ns, written.end_ns)])
        self.keep_newest()

    def _note_stall(self, begin_ns: int, name: str) -> float:
        end_ns = time.monotonic_ns()
        self._stall_s += (end_ns - begin_ns) / 1e9
        self.trace.add([Span("driver", name, begin_ns, end_ns)])
        return (end_ns - begin_ns) / 1e9
