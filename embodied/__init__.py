"""The stack: rollout, learning and evaluation over a simulator farm. What the command line does, from Python:

import embodied
result = embodied.train("pushcube", {"seed": 3})
print(result.evaluation.success_rate)
policy = embodied.load_policy(result.run)

A mistake raises `embodied.errors.UserError`, whichever package has found it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.errors import one_kind_of_mistake
from embodied.run import RUNS
from embodied_command import hidden

if TYPE_CHECKING:
    from embodied.config.schema import Config
    from embodied.reporting.results import EvaluationResult, RecordingResult, TrainingResult
    from embodied.rollout.loaded_policy import LoadedPolicy
    from embodied.training.callbacks import Callback

# Nothing heavy is imported here: `embodied doctor` must run where the packages it looks for are missing.


def _check_siblings() -> None:
    """Raise `ImportError` where another module has the name of a package beside this one, in whose place it would be
    imported. The command line ends with the message alone and exit status 2."""
    for message in filter(None, map(hidden, ("policies", "schedulers", "sim_farm"))):
        if Path(sys.argv[0]).name == "embodied" or "embodied.cli" in sys.orig_argv:
            print(f"embodied: {message}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(message)


_check_siblings()


@one_kind_of_mistake()
def load_config(reference: str, code: Collection[str] = ()) -> Config:
    """Load the configuration of that name from `configs/`, or from the YAML file of that path.

    `code`: what a configuration in a run's folder may name as `package.module:NAME`; the folder may come from others.
    """
    from embodied.config import files

    return files.load_config(reference, code)


@one_kind_of_mistake()
def train(
    config: Config | str,
    settings: Mapping[str, Any] | None = None,
    *,
    runs_dir: str | Path = "runs",
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> TrainingResult:
    """Train, evaluate, film and report, as `embodied train` does.

    `config` is a configuration, or the name of one; `settings` are other values of its settings by their keys
    (`{"optim.policy_lr": 1e-4}`). `callbacks` see each iteration's metrics, and may log, save and stop. With `resume`
    the run of this name continues from its newest checkpoint. If `config` is a name, the run takes `settings` and
    keeps its own values for all others; a `Config` is complete and replaces them all. Differences are printed and
    recorded; another seed, task or policy raises `UserError`.
    """
    from embodied.commands.train import continued_run, train_run
    from embodied.config.files import with_settings
    from embodied.reporting.results import TrainingResult
    from embodied.training.checks import Checked, check_settings
    from embodied.workflows.unread import check_read

    named = isinstance(config, str)
    name = config if isinstance(config, str) else "run"
    config = load_config(config) if isinstance(config, str) else config
    config = with_settings(config, settings or {}, "embodied.train")
    check_read("train", settings or {})
    if resume and named:
        config = continued_run(config, Path(runs_dir), settings or {}, name)
    run_dir = Path(runs_dir) / (config.name or "") if resume else None
    check_settings(Checked(command="train", config=config, run_dir=run_dir))
    result = train_run(config, config.name or Path(name).stem, Path(runs_dir), resume, callbacks)
    return TrainingResult.of(result)


@one_kind_of_mistake()
def evaluate(
    run: str | Path, checkpoint: str | Path | None = None, code: Collection[str] = (), **settings: Any
) -> EvaluationResult:
    """Evaluate the checkpoint that a run ends with (or another) as `embodied eval` does.

    `settings` are keys of `eval` (`protocol="openpi"`, `tasks=("libero/libero_goal",)`); others keep the run's values.
    `code`: what the run's configuration may name as `package.module:NAME`.
    """
    from embodied.commands.evaluate import evaluate_run
    from embodied.reporting.results import EvaluationResult
    from embodied.training.checks import Checked, check_settings
    from embodied.workflows.unread import check_read

    named = {f"eval.{key}": value for key, value in settings.items()}
    config = _settings_of(run, code, named, "embodied.evaluate")
    check_read("eval", named)
    check_settings(Checked(command="eval", config=config))
    folder = None if checkpoint is None else Path(checkpoint)
    return EvaluationResult.of(evaluate_run(str(run), config, folder, RUNS))


@one_kind_of_mistake()
def record(
    run: str | Path,
    out: str | Path,
    settings: Mapping[str, Any] | None = None,
    *,
    episodes: int = 100,
    checkpoint: str | Path | None = None,
    only_successes: bool = False,
    code: Collection[str] = (),
) -> RecordingResult:
    """Record episodes of a run's policy, or of a configuration's, as a dataset in LeRobot's layout in the folder `out`,
    as `embodied record` does. `settings` are other values of its settings by their keys."""
    from embodied.commands.record import record_run
    from embodied.reporting.results import RecordingResult
    from embodied.training.checks import Checked, check_settings
    from embodied.workflows.unread import check_read

    config = _settings_of(run, code, settings or {}, "embodied.record")
    check_read("record", settings or {})
    check_settings(Checked(command="record", config=config))
    folder = None if checkpoint is None else Path(checkpoint)
    return RecordingResult.of(record_run(str(run), config, folder, Path(out), episodes, only_successes, RUNS))


@one_kind_of_mistake()
def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run, or one of several runs beside each other (into `out`), and return its path."""
    from embodied.commands.report import report_runs

    return Path(report_runs([str(run) for run in runs], RUNS, None if out is None else Path(out))["report"])


@one_kind_of_mistake()
def load_policy(run: str | Path, checkpoint: str | Path | None = None, code: Collection[str] = ()) -> LoadedPolicy:
    """The policy that a run ends with (or of another checkpoint); its `act` takes observations as NumPy arrays.

    `code`: what the run's configuration may name as `package.module:NAME`.
    """
    from embodied.rollout import loaded_policy

    return loaded_policy.load_policy(run, checkpoint, code)


def _settings_of(run: str | Path, code: Collection[str], settings: Mapping[str, Any], source: str) -> Config:
    """The configuration of a run, or of that name, with other values of settings."""
    from embodied.config.files import with_settings
    from embodied.run.saved_settings import settings_of

    return with_settings(settings_of(str(run), RUNS, code), settings, source)


__all__ = ["evaluate", "load_config", "load_policy", "record", "report", "train"]
