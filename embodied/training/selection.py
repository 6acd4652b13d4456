"""Evaluations during training, by which the best checkpoint is known.

They are by the run's own protocol, with the delay of its training, on other episodes: from seeds that neither training
nor the evaluation at the end draws, since a choice among many checkpoints flatters the chosen one on the episodes it
was chosen by. Each is a folder below RUN/evals/selection, and a row of `selection.jsonl`. They take place in the
background if the run leaves room (`free_room`), else the run waits. Their episodes are the same either way.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from embodied.config.schema import NO_DELAY, Config
from embodied.devices import CPU
from embodied.errors import UserError
from embodied.evaluation.evaluate import Subject, evaluate, evaluation_folder
from embodied.evaluation.folder import Identity, read_identity
from embodied.evaluation.protocol import LATENCY, Protocol, protocol_of
from embodied.evaluation.result_metrics import metrics_of
from embodied.execution.assignment import HERE, Assignment
from embodied.execution.session import Session, open_session
from embodied.reporting.metrics import SELECTION, MetricsWriter, read
from embodied.reporting.trackers import NOT_TRACKED, Tracking
from embodied.run import checkpoint

OTHER_SEEDS = 2**30
"""Bit that is flipped in the run's seed, which is below 2**31, for the seed of these evaluations."""


MOST_TRIALS = 50
"""Trials of each task in an evaluation during training, or fewer where `eval.episodes` is less."""


def selection_protocol(config: Config) -> Protocol:
    """The run's protocol with the episodes that checkpoints are chosen by: all begin from seeds that only these
    evaluations draw, also where the evaluation at the end begins from recorded states. Raises `UserError`."""
    settings: dict[str, Any] = {"episodes": None, "init_states": None}
    if config.eval.delay != NO_DELAY:  # the delay of the training, whichever the evaluation at the end has
        settings |= {"delay": (), "delay_method": ()}
        settings |= {"protocol": None} if config.eval.protocol == LATENCY else {}
    evaluation = config.eval.model_copy(update=settings)
    protocol = protocol_of(config.model_copy(update={"eval": evaluation}))
    seed, trials = config.seed ^ OTHER_SEEDS, min(config.eval.episodes or MOST_TRIALS, MOST_TRIALS)
    one = replace(protocol, name=None, trials=trials, seed=seed, init_states=None, env_seed=None)
    return replace(one, seeding="each", unseeded_resets=0, perturbations={}, delays=())


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to be evaluated, and where the run was when it was written."""

    iteration: int
    env_steps: int
    wall_s: float


class Selection:
    """Evaluates a run's checkpoints, one at a time, and keeps track of the best."""

    def __init__(self, config: Config, run_dir: Path, session: Session, tracking: Tracking = NOT_TRACKED) -> None:
        videos = config.eval.model_copy(update={"videos": 0})
        self._config, self._session = config.model_copy(update={"eval": videos}), session
        self._run_dir, self._root, self._tracking = run_dir, run_dir / "checkpoints", tracking
        self._protocol = selection_protocol(config) if config.eval.every else None
        self._done: dict[int, float] = {}
        """Measure of this protocol's evaluations, by iteration."""
        self._room: Room | None = None
        self._process: BackgroundProcess | None = None
        self._pending: Candidate | None = None

    def move(self, room: Room | None) -> None:
        """Evaluate in this room from now on; None: while the run waits. Nothing is pending."""
        self.close()
        self._room = room if self._protocol is not None else None

    def close(self) -> None:
        """Give up the pending evaluation; a resumed run completes it."""
        self._pending = self._room = None
        if self._process is not None:
            self._process.close()
        self._process = None

    def begin(self, iteration: int) -> None:
        """Drop the results after the iteration that the run is resumed from. If no evaluation is configured any more,
        also drop the best checkpoint."""
        if self._protocol is None and not (self._run_dir / SELECTION).exists():
            return
        with MetricsWriter(self._run_dir, self._tracking, SELECTION) as record:
            record.truncate(iteration)
        for folder in self._folder(0).parent.glob("[0-9]*"):
            if folder.name.isdecimal() and int(folder.name) > iteration:
                shutil.rmtree(folder)
        measures = {row["iteration"]: _measure(row, "eval/") for row in read(self._run_dir, SELECTION)}
        # What keep_checkpoints has removed, or an evaluation by other settings, is no candidate.
        self._done = {
            number: measure
            for number, measure in measures.items()
            if measure is not None and self._checkpoint(number).is_dir() and self._is_ours(number)
        }
        self._mark()

    def begun(self, iteration: int) -> list[Candidate]:
        """Checkpoints before this iteration whose evaluation an earlier session began in the background and left."""
        folders = (int(folder.name) for folder in self._folder(0).parent.glob("[0-9]*") if folder.name.isdecimal())
        numbers = [n for n in sorted(folders) if n < iteration and n not in self._done and self._is_ours(n)]
        states = [checkpoint.read_state(self._checkpoint(n)) for n in numbers if self._checkpoint(n).is_dir()]
        return [Candidate(state.iteration, state.env_steps, state.wall_s) for state in states]

    def due(self, iteration: int, last: bool = False) -> bool:
        """True if the checkpoint of the iteration is to be evaluated and has not been; a run's last one always is."""
        pending = self._pending is not None and self._pending.iteration == iteration
        if self._protocol is None or not iteration or iteration in self._done or pending:
            return False
        return last or iteration % self._config.eval.every == 0 or iteration == self._config.iterations

    @property
    def in_background(self) -> bool:
        """True if checkpoints are evaluated while the run continues."""
        return self._room is not None

    @property
    def pending(self) -> Candidate | None:
        """The candidate that is being evaluated in the background, whose checkpoint must stay."""
        return self._pending

    def start(self, candidate: Candidate) -> None:
        """Begin to evaluate a checkpoint, which is complete, in the background. Nothing else is pending.

        Raises `BackgroundError` if the process is gone."""
        assert self._room is not None and self._pending is None, "one at a time, where there is room"
        config = self._room.applied(self._config)
        if self._process is None:
            self._process = BackgroundProcess(config, self._room, self._folder(0).parent / "background.log")
        self._process.begin(partial(_evaluated, *self._request(candidate, config)))
        self._pending = candidate

    def finish(self, block: bool) -> str | None:
        """Report of the evaluation in the background, once it is complete; None if it is not, or there is none.

        Raises the error that ended it; `BackgroundError` if its process is gone.
        """
        if self._process is None or self._pending is None:
            return None
        candidate, outcome = self._pending, self._process.result(block)
        if outcome is None:
            return None
        self._pending = None
        return self._note(candidate, outcome)

    def evaluate(self, candidate: Candidate) -> str:
        """Evaluate a checkpoint, which is complete, while the run waits. Returns a report in one line."""
        return self._note(candidate, _evaluated(*self._request(candidate, self._config), self._session))

    def _request(self, candidate: Candidate, config: Config) -> tuple[Subject, Protocol, Path]:
        protocol, into = self._protocol, self._folder(candidate.iteration)
        assert protocol is not None, "no evaluation is asked for"
        folder = self._checkpoint(candidate.iteration)
        subject = Subject(folder.name, config, folder, None, into.parent)
        if _identity(into) != subject.identity(protocol):
            shutil.rmtree(into, ignore_errors=True)  # begun by other settings
        return subject, protocol, into

    def _note(self, candidate: Candidate, outcome: Mapping[str, Any]) -> str:
        iteration = candidate.iteration
        with MetricsWriter(self._run_dir, self._tracking, SELECTION) as record:
            record.write(iteration, candidate.env_steps, {"wall_s": candidate.wall_s, **metrics_of(outcome, "eval")})
        measure = _measure(outcome)
        assert measure is not None, "an evaluation has a return"
        self._done[iteration] = measure
        self._mark()
        best = "the best so far" if self.best == iteration else f"the best is iteration {self.best}"
        if "success_rate" in outcome:
            said = "success {success_rate:.1%} ({success_low:.1%} to {success_high:.1%})".format_map(outcome)
        else:
            said = "return {return:.2f} ({return_low:.2f} to {return_high:.2f})".format_map(outcome)
        return f"iteration {iteration} evaluated: {said}; {best}"

    @property
    def best(self) -> int | None:
        """The iteration of the highest success, or return (`_measure`); of equal ones the last, which has learned
        more."""
        return max(self._done, key=lambda number: (self._done[number], number), default=None)

    def _mark(self) -> None:
        checkpoint.mark_best(self._root, None if self.best is None else self._checkpoint(self.best))

    def _checkpoint(self, iteration: int) -> Path:
        return self._root / f"{iteration:06d}"

    def _folder(self, iteration: int) -> Path:
        return self._run_dir / "evals" / "selection" / f"{iteration:06d}"

    def _is_ours(self, iteration: int) -> bool:
        """True if the iteration was evaluated by this protocol."""
        identity = _identity(self._folder(iteration))
        return identity is not None and identity.protocol == self._protocol


def _evaluated(subject: Subject, protocol: Protocol, into: Path, session: Session) -> dict[str, Any]:
    with evaluation_folder(subject, protocol, into, resume=True) as opened:
        return evaluate(subject, protocol, session, opened)


def _identity(folder: Path) -> Identity | None:
    try:
        return read_identity(folder)
    except UserError:
        return None


def _measure(numbers: Mapping[str, Any], prefix: str = "") -> float | None:
    """By what checkpoints are compared: success, or return where the tasks have no success."""
    return numbers.get(f"{prefix}success_rate", numbers.get(f"{prefix}return"))


# --- the background: a process on a core, and with a GPU, that the run does not use


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
Work = Callable[[Session], dict[str, Any]]


@dataclass(frozen=True)
class Room:
    """A core, and where policies compute on GPUs one of those, that the run does not use."""

    core: int
    gpu: int | None = None
    """Its number in this process; None: policies compute on the CPU."""

    def applied(self, config: Config) -> Config:
        """The configuration for one process on this machine. The settings that identify an evaluation stay."""
        runtime = config.runtime.model_copy(update={"mode": "inline"})
        # Its one GPU is the first that it sees.
        devices = config.farm.devices
        if self.gpu is not None and devices and devices != "cpu":
            devices = (0,)
        farm = config.farm.model_copy(update={"nodes": (), "devices": devices})
        return config.model_copy(update={"runtime": runtime, "farm": farm})

    def enter(self) -> None:
        """Confine this process to the core and the GPU, before it has used any."""
        os.sched_setaffinity(0, {self.core})
        if self.gpu is not None:
            visible = os.environ.get(VISIBLE_GPUS, "")
            os.environ[VISIBLE_GPUS] = visible.split(",")[self.gpu] if visible else str(self.gpu)


def free_room(assignment: Assignment, cores: Sequence[int], gpus: Sequence[torch.device]) -> Room | None:
    """Return a core that no worker is pinned to and no thread needs and, if policies compute on GPUs, a GPU that no
    worker uses. Return None if the run leaves none.

    Unpinned workers may run on any core. A run with unpinned simulators therefore leaves no free core, and a component
    on the CPU that no cores are assigned to needs one core per thread. A GPU that draws frames is in use; a farm
    without named GPUs draws on the first.
    """
    physics = [
        core for farm in assignment.farms for core, node in zip(farm.physics, farm.physics_nodes, strict=True)
        if node == HERE
    ]  # fmt: skip
    if None in physics:
        return None
    computing = [place for places in assignment.components.values() for place in places if place.node == HERE]
    used = {core for core in physics if core is not None}
    used |= {core for farm in assignment.farms for core in farm.render if core is not None}
    used |= {core for place in computing for core in place.cores}
    on_cpu = [place for place in computing if not gpus or place.device == str(CPU)]
    threads = max((place.threads for place in on_cpu if not place.cores), default=0)
    spare = [core for core in cores if core not in used]
    if not spare or threads >= len(cores):
        return None
    if not gpus:
        return Room(spare[-1])
    taken = {place.device or str(gpus[0]) for place in computing}
    drawing = [device for farm in assignment.farms for device in farm.devices or (gpus[0].index,)]
    taken |= {f"cuda:{device}" for device in drawing}
    free = [gpu.index for gpu in gpus if str(gpu) not in taken]
    return Room(spare[-1], free[0]) if free else None


class BackgroundError(Exception):
    """The background process ended before its work was done."""


class BackgroundProcess:
    """A separate process, which does one piece of work at a time. It ends with its parent, however that
    ends."""

    def __init__(self, config: Config, room: Room, log: Path) -> None:
        """`config` is the configuration of its session. Its output, which would disturb a live table, goes to `log`."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, room, log), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, work: Work) -> None:
        """Have `work`, which is pickled, done in the process's session. Take its result before the next begins.

        Raises `BackgroundError` if the process is gone.
        """
        try:
            self._ours.send(work)
        except OSError as error:  # a broken pipe
            raise self._gone() from error

    def result(self, block: bool) -> dict[str, Any] | None:
        """Result of the work; None if it is not done and `block` is false.

        Raises the error of the work, and `BackgroundError` if the process is gone.
        """
        try:
            if not block and not self._ours.poll():
                return None
            outcome = self._ours.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _gone(self) -> BackgroundError:
        self._process.join(1)
        return BackgroundError(f"the process ended with exit status {self._process.exitcode}")

    def close(self) -> None:
        """End the process, and what it is doing."""
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(requests: Connection, config: Config, room: Room, log: Path) -> None:
    room.enter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as text:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(text.fileno(), stream.fileno())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with open_session(config) as session:
            while True:
                try:
                    work: Work = requests.recv()
                except EOFError:
                    return
                try:
                    requests.send(work(session))
                except Exception as error:  # it is raised again where the result is waited for
                    requests.send(error)


def _end_with_parent() -> None:
    """End this process when its parent is gone: a run that was killed cannot end its processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
