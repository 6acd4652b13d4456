"""Tracking libraries that follow a run, by their own clients: TensorBoard, Weights & Biases, MLflow, Trackio.

`metrics.jsonl` stays the record (`embodied.reporting.metrics`), which they repeat under the same names, over env steps.
A library is imported only if `track` names it. A tracker that fails is dropped with a warning, and the run continues.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.files import read_json, write_whole
from embodied.reporting.live import tell

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run

FILE = "trackers.json"
"""File of the tracked runs' names, by tracker, in the run's folder."""
PROJECT = "embodied"
"""Project or experiment of the runs, where the library's own environment variable names none."""


class Tracker(Protocol):
    """One library. Whatever it raises ends it, and not the run."""

    def begin(self, settings: Mapping[str, Any], run_dir: Path, known: str | None) -> str | None:
        """Start the tracked run, or continue the run with the id `known`. Returns the run's id; None if its place in
        the run's folder identifies it."""

    def log(self, row: Mapping[str, float], env_steps: int) -> None:
        """Add finite numbers by name."""

    def rewind(self, env_steps: int) -> bool:
        """Forget what was logged at these env steps and after. Returns False if the library keeps it."""

    def evaluation(self, row: Mapping[str, float], env_steps: int) -> None:
        """Note the numbers of the evaluation at the run's end, in place of earlier ones where that is possible."""

    def file(self, path: Path) -> None:
        """Keep a film, or the page, with the run."""

    def close(self, done: bool) -> None:
        """Have all of it written. `done` is False for a run that was stopped or failed."""


class TensorBoard:
    """Event files in the run's `tensorboard/`. They hold no other files."""

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def begin(self, settings: Mapping[str, Any], run_dir: Path, known: str | None) -> str | None:
        self._folder = run_dir / "tensorboard"
        return None

    def log(self, row: Mapping[str, float], env_steps: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds: only where it is used

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in row.items():
            self._writer.add_scalar(name, value, global_step=env_steps)
        self._writer.flush()

    def rewind(self, env_steps: int) -> bool:
        if self._writer is None and self._purge_step is not None:  # two records go back before there is a row
            env_steps = min(env_steps, self._purge_step)
        self._purge_step = env_steps
        self.close(False)  # a file says at its beginning what it replaces
        return True

    def evaluation(self, row: Mapping[str, float], env_steps: int) -> None:
        self.log(row, env_steps)

    def file(self, path: Path) -> None:
        pass

    def close(self, done: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandB:
    """Weights & Biases. Its environment variables say where (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY); the local part
    is in the run's `wandb/`."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def begin(self, settings: Mapping[str, Any], run_dir: Path, known: str | None) -> str | None:
        if not os.access(Path.home(), os.W_OK):  # where it keeps files on their way, and their cache
            for kind in ("DATA", "CACHE", "CONFIG", "ARTIFACT"):
                os.environ.setdefault(f"WANDB_{kind}_DIR", str(run_dir / "wandb" / kind.lower()))
        import wandb

        own = wandb.Settings(console="off")  # the terminal has a live table
        where = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "dir": str(run_dir)}
        named = {"id": known, "name": run_dir.name}
        self._run = wandb.init(**where, **named, config=dict(settings), resume="allow", settings=own)
        # An evaluation in the background may come after rows of later env steps: wandb's own steps only rise.
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")
        return str(self._run.id)

    @property
    def _begun(self) -> Run:
        assert self._run is not None, "begin() comes first"
        return self._run

    def log(self, row: Mapping[str, float], env_steps: int) -> None:
        self._begun.log({**row, "env_steps": env_steps})

    def rewind(self, env_steps: int) -> bool:
        return False

    def evaluation(self, row: Mapping[str, float], env_steps: int) -> None:
        self._begun.summary.update(dict(row))

    def file(self, path: Path) -> None:
        self._begun.log_artifact(path, name=f"{self._begun.id}-{path.stem}", type=path.suffix.removeprefix("."))

    def close(self, done: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if done else 1)


LONGEST, MOST = 6000, 100
"""MLflow's limits: characters of a parameter, and parameters of a request."""


class MLflow:
    """MLflow. MLFLOW_TRACKING_URI says where, by default a database in the run's `mlruns/`; MLFLOW_EXPERIMENT_NAME in
    which experiment."""

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._run_id = ""

    def begin(self, settings: Mapping[str, Any], run_dir: Path, known: str | None) -> str | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        where, files = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not where:
            folder = (run_dir / "mlruns").resolve()
            folder.mkdir(exist_ok=True)
            where, files = f"sqlite:///{folder}/mlflow.db", folder.as_uri()
        self._client = client = MlflowClient(where)
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run_id = known
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name, files) if experiment is None else experiment.experiment_id
        self._run_id = client.create_run(number, run_name=run_dir.name).info.run_id
        params = [Param(key, str(value)[:LONGEST]) for key, value in _flat(settings)]
        for first in range(0, len(params), MOST):
            client.log_batch(self._run_id, params=params[first : first + MOST])
        return self._run_id

    @property
    def _begun(self) -> MlflowClient:
        assert self._client is not None, "begin() comes first"
        return self._client

    def log(self, row: Mapping[str, float], env_steps: int) -> None:
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 10**6
        metrics = [Metric(name, float(value), now_ms, env_steps) for name, value in row.items()]
        self._begun.log_batch(self._run_id, metrics=metrics)

    def rewind(self, env_steps: int) -> bool:
        return False

    def evaluation(self, row: Mapping[str, float], env_steps: int) -> None:
        self.log(row, env_steps)

    def file(self, path: Path) -> None:
        self._begun.log_artifact(self._run_id, str(path))

    def close(self, done: bool) -> None:
        if self._client is not None and self._run_id:
            self._client.set_terminated(self._run_id, "FINISHED" if done else "KILLED")


class Trackio:
    """Trackio. Its environment variables say where: TRACKIO_DIR locally, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, settings: Mapping[str, Any], run_dir: Path, known: str | None) -> str | None:
        import trackio

        name = known or f"{run_dir.name}-{secrets.token_hex(4)}"  # a run is gone on with by its name alone
        self._run = trackio.init(PROJECT, name=name, config=dict(settings), resume="allow", embed=False)
        return name

    def log(self, row: Mapping[str, float], env_steps: int) -> None:
        self._run.log(dict(row), step=env_steps)

    def rewind(self, env_steps: int) -> bool:
        return False

    def evaluation(self, row: Mapping[str, float], env_steps: int) -> None:
        self.log(row, env_steps)

    def file(self, path: Path) -> None:
        self._run.log_artifact(path, name=f"{self._run.name}-{path.stem}", type=path.suffix.removeprefix("."))

    def close(self, done: bool) -> None:
        if self._run is not None:
            import trackio

            trackio.finish()  # of the run alone, it would be ended again with the process


@dataclass(frozen=True)
class Library:
    """A library by which runs can be tracked."""

    make: Callable[[], Tracker]
    package: str
    """Python package that it imports."""
    install: str
    """Argument of `pip install` that installs the library."""


TRACKERS = {
    "tensorboard": Library(TensorBoard, "tensorboard", "tensorboard"),
    "wandb": Library(WandB, "wandb", "wandb"),
    "mlflow": Library(MLflow, "mlflow", "mlflow-skinny sqlalchemy alembic"),
    "trackio": Library(Trackio, "trackio", "trackio"),
}
"""By the names that `track` takes."""


def check_packages(names: Iterable[str]) -> None:
    """Raise `UserError` for trackers whose packages are not installed."""
    missing = [name for name in dict.fromkeys(names) if not _is_installed(TRACKERS[name].package)]
    if missing:
        one = len(missing) == 1
        raise UserError(
            f"track names {' and '.join(missing)}, "
            f"{'whose package is not installed' if one else 'whose packages are not installed'}: "
            f"pip install {' '.join(TRACKERS[name].install for name in missing)}, "
            f"or leave {'it' if one else 'them'} out of --track"
        )


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of this name, as wandb makes one, is no package


class Tracking:
    """The trackers of one run. If a tracker fails, one warning is printed and it is dropped; the others continue.

    Rows that a resumed run computes again are not logged again, unless the library dropped them first.
    """

    def __init__(self, run_dir: Path, trackers: Mapping[str, Tracker], say: Callable[[str], None] = tell) -> None:
        self._run_dir, self._say = run_dir, say
        self._trackers = dict(trackers)
        self._known: dict[str, str] = {}
        """Ids of the tracked runs, by tracker."""
        self._has_rows: set[str] = set()
        """Trackers that rows may have been logged to."""
        self._until: dict[tuple[str, str], int] = {}
        """Env steps up to which a tracker has the rows of a record already, by tracker and record."""

    def begin(self, config: Config) -> None:
        """Start the tracked runs, or continue those recorded in the run's folder."""
        settings = config.model_dump(mode="json")
        with suppress(OSError, ValueError):
            self._known = {name: str(known) for name, known in read_json(self._run_dir / FILE).items()}
        self._has_rows = set(self._known)
        before = dict(self._known)
        for name, tracker in list(self._trackers.items()):
            with self._may_fail(name):
                known = tracker.begin(settings, self._run_dir, self._known.get(name))
                if known is not None:
                    self._known[name] = known
        if self._known != before:
            try:
                write_whole(self._run_dir / FILE, json.dumps(self._known) + "\n")
            except OSError as error:
                self._say(
                    f"cannot write {self._run_dir / FILE} ({error.strerror}): a resumed run is tracked as another"
                )

    def log(self, record: str, row: Mapping[str, float | None], env_steps: int) -> None:
        """Add a row of a record (a file's name) to every tracker; what is not a finite number is left out."""
        numbers = {name: value for name, value in row.items() if value is not None and math.isfinite(value)}
        for name, tracker in list(self._trackers.items()):
            if env_steps > self._until.get((name, record), -1):
                with self._may_fail(name):
                    tracker.log(numbers, env_steps)
                    self._has_rows.add(name)

    def rewind(self, record: str, first: int, last: int) -> None:
        """The record's rows from the env steps `first` to `last` are dropped, and will be computed again."""
        for name, tracker in list(self._trackers.items()):
            with self._may_fail(name):
                if not tracker.rewind(first) and name in self._has_rows:
                    self._until[name, record] = last

    def evaluation(self, row: Mapping[str, float], env_steps: int) -> None:
        """Note the numbers of the evaluation at the run's end."""
        for name, tracker in list(self._trackers.items()):
            with self._may_fail(name):
                tracker.evaluation(row, env_steps)

    def file(self, path: Path) -> None:
        """Keep a file, if it is there, with the tracked runs."""
        for name, tracker in list(self._trackers.items()):
            with self._may_fail(name):
                if path.is_file():
                    tracker.file(path)

    def close(self, done: bool = True) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._may_fail(name):
                tracker.close(done)
        self._trackers.clear()

    @contextmanager
    def _may_fail(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is: a tracker only repeats the record
            with suppress(Exception):  # of what is still to be written: there is no room for it, or it failed before
                self._trackers.pop(name).close(False)
            why = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            self._say(
                f"Warning: {name} does not follow {self._run_dir} any more ({why}); the run goes on, and its "
                "metrics.jsonl has everything"
            )


NOT_TRACKED = Tracking(Path(), {})
"""Tracking that records nowhere."""


@contextmanager
def tracked(config: Config, run_dir: Path) -> Iterator[Tracking]:
    """The run's trackers, begun and, whatever happens within, closed."""
    tracking = Tracking(run_dir, {name: TRACKERS[name].make() for name in dict.fromkeys(config.track)})
    tracking.begin(config)
    try:
        yield tracking
    except BaseException:
        tracking.close(done=False)
        raise
    tracking.close()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting by its key with dots."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
