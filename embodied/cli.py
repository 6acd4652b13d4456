"""The command line: `embodied VERB ...`. What it does can also be done from Python, see `embodied/__init__.py`.

Exit status: 0 done, 1 our own failure (with a traceback), 2 a mistake that the message says how to mend,
130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from embodied import migration
from embodied.bench.settings import BenchFarm, BenchLearner, BenchPolicy, BenchTransport
from embodied.commands import reward as reward_command
from embodied.config import Config, load_config
from embodied.errors import UserError
from embodied.reporting.results import write_json
from policies.contract import PolicyError
from schedulers.errors import PlanError
from sim_farm.contract import FarmError

Text = tyro.conf.Positional[str]


@dataclass(frozen=True)
class Train:
    """Train a policy; evaluate it at the end, film it and write the report."""

    config: Text
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest checkpoint of the run called --name, or begin it."""
    cluster: str | None = None
    """HOST:PORT of a running Ray cluster that has this machine as a node (docs/cluster.md): runtime.address."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Sft:
    """Let a policy learn the actions of demonstrations; evaluate it at the end, film it and write the report.

    `embodied train CONFIG --policy.init RUN` goes on from there by reinforcement.
    """

    config: Text
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    data: tuple[Path, ...] = ()
    """Datasets in LeRobot's layout, as `embodied record` writes them: sft.data."""
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest checkpoint of the run called --name, or begin it."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Eval:
    """Evaluate a run's newest checkpoint (or another) on episodes that no training run sees."""

    run: Text
    """A run's folder (or its name below --runs-dir), or a configuration whose policy needs no training or together
    with --checkpoint."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    checkpoint: Path | None = None
    """Folder of a checkpoint, for example runs/NAME/checkpoints/000100."""
    against: str | None = None
    """Compare with this on the same episodes: a run, a checkpoint, or the folder of an evaluation."""
    folder: Path | None = None
    """Folder of this evaluation; none: a new one below RUN/evals."""
    resume: Literal["no", "auto"] = "no"
    """auto: go on with the evaluation in --folder, or the newest of the same protocol and checkpoint, or begin it."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Record:
    """Record a policy's episodes as a dataset in LeRobot's layout (version 3.0): parquet and mp4."""

    run: Text
    """A run's folder (or its name below --runs-dir), whose newest checkpoint acts, or a configuration whose policy
    needs no training or together with --checkpoint."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    checkpoint: Path | None = None
    """Folder of a checkpoint, for example runs/NAME/checkpoints/000100."""
    out: Path = tyro.MISSING
    """Folder of the dataset; there must be none of that name."""
    episodes: int = 100
    """Episodes to run, with seeds that neither training nor evaluation draws."""
    only_successes: bool = False
    """Leave out the episodes that the policy failed."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Export:
    """Write a run's policy as its community's own programs load it: for OpenVLA a Hugging Face directory, an adapter
    merged into the weights."""

    run: Text
    """A run's folder, or its name below --runs-dir."""
    checkpoint: Path | None = None
    """Folder of a checkpoint; none: the run's newest."""
    out: Path = tyro.MISSING
    """Folder to write; there must be none of that name."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Report:
    """Write a run's report: one self-contained HTML page."""

    run: Text
    """A run's folder, or its name below --runs-dir."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Doctor:
    """Say what is missing on this machine, and the command that mends it."""

    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class ProfileCommand:
    """Measure a workflow's components on this machine, alone and beside each other, and write profile.json."""

    config: Text
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    out: Path = Path("profile.json")
    """Where the profile is written."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class PlanCommand:
    """Find the best plan for this machine, or for a cluster that one does not have, and say why."""

    config: Text
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    profile: Path = Path("profile.json")
    """Measured times: what `embodied profile` wrote."""
    cluster: str = "local"
    """`local`, or a YAML or JSON file of nodes with cores, accelerators, memory and links (docs/planning.md)."""
    out: Path = Path("plan")
    """Folder for plan.json, the predicted timeline (predicted.json for Perfetto) and its picture."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class CompareCommand:
    """Run every mode on the same work and report measured against predicted times."""

    config: Text
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    profile: Path | None = None
    """Measured times; none: measured first."""
    out: Path = Path("compare")
    """Folder for compare.html, the pictures and compare.json."""
    repeats: Annotated[int, tyro.conf.arg(name="repeats")] = 2
    """How often all modes are run in turn, three iterations each."""
    json: Path | None = None
    """Write the result to this file."""


Bench = Annotated[
    Annotated[BenchFarm, tyro.conf.subcommand("farm")]
    | Annotated[BenchTransport, tyro.conf.subcommand("transport")]
    | Annotated[BenchPolicy, tyro.conf.subcommand("policy")]
    | Annotated[BenchLearner, tyro.conf.subcommand("learner")],
    tyro.conf.arg(name=""),
]


@dataclass(frozen=True)
class BenchCommand:
    """Measure a building block against its peers and its limit."""

    what: Bench


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status. Installed as `embodied`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Ending a run by `kill` should leave as little behind as ending it by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(stderr=True)
    try:
        command = _parse(arguments)
        return _run(command)
    except (UserError, FarmError, PolicyError, PlanError) as error:
        console.print(f"[bold red]embodied:[/] {_escape(str(error))}", soft_wrap=True, highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("embodied: interrupted")
        return 130


def _parse(arguments: list[str]) -> Any:
    """The command as typed data. Defaults of `train` and `eval` come from the configuration or run they name."""
    from embodied.run_folder import settings_of

    train, evaluate, record = Train(""), Eval(""), Record("")
    verb, named = (arguments + ["", ""])[:2]
    if verb != "bench":
        _refuse_old_keys(arguments)
    if verb == "train" and named and not named.startswith("-"):
        train = replace(train, config=named, settings=load_config(named))
    if verb == "eval" and named and not named.startswith("-"):
        evaluate = replace(evaluate, run=named, settings=settings_of(named, _option(arguments, "--runs-dir", "runs")))
    if verb == "record" and named and not named.startswith("-"):
        record = replace(record, run=named, settings=settings_of(named, _option(arguments, "--runs-dir", "runs")))
    sft, profile, plan, compare = Sft(""), ProfileCommand(""), PlanCommand(""), CompareCommand("")
    if verb in ("sft", "profile", "plan", "compare") and named and not named.startswith("-"):
        settings = load_config(named)
        sft = replace(sft, config=named, settings=settings)
        profile = replace(profile, config=named, settings=settings)
        plan = replace(plan, config=named, settings=settings)
        compare = replace(compare, config=named, settings=settings)
    commands = (
        Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Sft, tyro.conf.subcommand("sft", default=sft)]
        | Annotated[Eval, tyro.conf.subcommand("eval", default=evaluate)]
        | Annotated[Record, tyro.conf.subcommand("record", default=record)]
        | Annotated[ProfileCommand, tyro.conf.subcommand("profile", default=profile)]
        | Annotated[PlanCommand, tyro.conf.subcommand("plan", default=plan)]
        | Annotated[CompareCommand, tyro.conf.subcommand("compare", default=compare)]
        | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
        | Annotated[reward_command.Arguments, tyro.conf.subcommand("reward")]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    )
    about = "Reinforcement learning for robot policies, with simulators as first-class workers."
    return tyro.cli(commands, args=arguments, prog="embodied", description=about)


def _refuse_old_keys(arguments: list[str]) -> None:
    """Raise `UserError` for `--ppo.clip 0.1`: with all old keys that are given, and what they are called now."""
    keys = [a[2:].partition("=")[0].replace("-", "_").replace(".no_", ".") for a in arguments if a.startswith("--")]
    said = [found for found in map(migration.renamed, keys) if found is not None]
    if said:
        raise UserError("; ".join(said))


def _option(arguments: list[str], name: str, default: str) -> Path:
    """The value of an option that is needed before the others can be parsed."""
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if argument.startswith(f"{name}="):
            return Path(argument.partition("=")[2])
    return Path(default)


def _run(command: Any) -> int:
    from embodied import run_folder

    if isinstance(command, BenchCommand):
        command = command.what
    if isinstance(command, (Eval, Record, ProfileCommand, PlanCommand, CompareCommand)):
        named = run_folder.with_init(command.settings, getattr(command, "runs_dir", Path("runs")), required=False)
        command = replace(command, settings=named)
    if isinstance(command, Train):
        settings = command.settings
        if command.cluster is not None:
            runtime = settings.runtime.model_copy(update={"address": command.cluster})
            settings = settings.model_copy(update={"runtime": runtime})
        from embodied.commands.train import train_run

        result = train_run(settings, command.config, command.runs_dir, command.resume == "auto")
    elif isinstance(command, Sft):
        learning = command.settings.sft.model_copy(update={"data": command.data or command.settings.sft.data})
        settings = command.settings.model_copy(update={"sft": learning})
        from embodied.commands.sft import sft_run

        result = sft_run(settings, command.config, command.runs_dir, command.resume == "auto")
    elif isinstance(command, Eval):
        from embodied.commands.evaluate import evaluate_run

        result = evaluate_run(
            command.run,
            command.settings,
            command.checkpoint,
            command.runs_dir,
            command.folder,
            command.resume == "auto",
            command.against,
        )
    elif isinstance(command, Record):
        from embodied.demonstrations.recording import record_run

        result = record_run(
            command.run,
            command.settings,
            command.checkpoint,
            command.out,
            command.episodes,
            command.only_successes,
            command.runs_dir,
        )
    elif isinstance(command, reward_command.Arguments):
        result = reward_command.run(command)
    elif isinstance(command, Export):
        from embodied.commands.export import export_run

        result = export_run(command.run, command.checkpoint, command.out, command.runs_dir)
    elif isinstance(command, Report):
        from embodied.commands.report import report_run

        result = report_run(command.run, command.runs_dir)
    elif isinstance(command, ProfileCommand):
        from embodied.commands.profile import profile_command

        result = profile_command(command.settings, command.out)
    elif isinstance(command, PlanCommand):
        from embodied.commands.plan import plan_command

        result = plan_command(command.settings, command.profile, command.cluster, command.out)
    elif isinstance(command, CompareCommand):
        from embodied.commands.compare import compare_command

        name = Path(command.config).stem
        result = compare_command(command.settings, name, command.out, command.profile, command.repeats)
    elif isinstance(command, BenchFarm):
        from embodied.bench.farm import bench_farm

        result = bench_farm(command)
    elif isinstance(command, BenchTransport):
        from embodied.bench.transport import bench_transport

        result = bench_transport(command)
    elif isinstance(command, BenchPolicy):
        from embodied.bench.policy import bench_policy

        result = bench_policy(command)
    elif isinstance(command, BenchLearner):
        from embodied.bench.learner import bench_learner

        result = bench_learner(command)
    else:
        from embodied.doctor import checks as doctor

        return doctor.main(command.json)
    if command.json is not None:
        write_json(command.json, result)
    return 0


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    # Ray's workers must find the same modules as this process, whatever the folder it is started from.
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
