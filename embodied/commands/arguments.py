"""Arguments of the verbs as data, with their first checks. This module does not import the modules that do the work,
because they take seconds to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Self, get_type_hints

import tyro
from pydantic import Field, TypeAdapter, ValidationError
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from embodied.config.schema import Config, Section, explained
from embodied.errors import UserError
from embodied.run import RUNS
from embodied.run.continued import continued, typed_keys
from embodied.run.saved_settings import CONFIG


class Bounded:
    """Base of arguments whose types have bounds, `Annotated[int, Field(ge=1)]`."""

    def check(self) -> None:
        """Raise `UserError` for an argument that is beyond its bound."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            try:
                TypeAdapter(hint).validate_python(getattr(self, name))
            except ValidationError as error:
                place = explained(error, [])
                dot = "" if place.startswith(":") else "."
                raise UserError(f"--{name.replace('_', '-')}{dot}{place}") from error


@dataclass(frozen=True)
class TrainArguments:
    """Train a policy; evaluate it at the end, film it and write the report."""

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    resume: Literal["no", "auto"] = "no"
    """auto: continue from the newest checkpoint of the run called --name, or begin that run."""
    seeds: tuple[int, ...] = ()
    """Train once with each seed, one after the other, and compare the runs NAME-seed1, ... on the page NAME.html."""
    sweep: tuple[str, ...] = ()
    """Train once with each value of a setting, `optim.policy_lr=1e-4,3e-4`; with several settings, once with each
    combination."""
    dry_run: bool = False
    """Check everything and print shapes, memory and placement; start no worker and train nothing."""
    card: Annotated[float, Field(gt=0)] | None = None
    """With --dry-run: memory in GB of the card that the run is to fit on (16, 24, 40, 48, 80, 96, 141). None: that of
    this machine's GPU, if any."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""
    words: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Words of the command."""

    def typed(self, words: Sequence[str]) -> Self:
        """The arguments of a command of these words. Those of a resumed run have the run's settings, except for those
        given on the command line."""
        if self.seeds and "seed" in typed_keys(words):
            raise UserError("--seeds names the seed of each run, and --seed one: leave one of them out")
        several = self.seeds or self.sweep
        settings = self.settings if several else _going_on(self, words, "rl")
        return replace(self, settings=settings, words=tuple(words))


@dataclass(frozen=True)
class SftArguments:
    """Train a policy on demonstrations; evaluate it at the end, film it and write the report.

    `embodied train CONFIG --policy.init RUN` continues by reinforcement.
    """

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    data: tuple[Path, ...] = ()
    """Datasets in LeRobot's layout, as `embodied record` writes them, or Hugging Face names (`org/name`,
    `org/name@revision`): sft.data."""
    resume: Literal["no", "auto"] = "no"
    """auto: continue from the newest checkpoint of the run called --name, or begin that run."""
    dry_run: bool = False
    """Check everything and print shapes, memory of each rank and placement; start no worker and train nothing."""
    card: Annotated[float, Field(gt=0)] | None = None
    """With --dry-run: memory in GB of the card that a rank is to fit on (16, 24, 40, 48, 80, 96, 141). None: that of
    this machine's GPU, if any."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""

    def typed(self, words: Sequence[str]) -> Self:
        """The arguments of a command of these words. Those of a resumed run have the run's settings, except for those
        given on the command line."""
        return replace(self, settings=_going_on(self, words, "sft"))


def _going_on(args: TrainArguments | SftArguments, words: Sequence[str], stage: str) -> Config:
    """The settings of the resumed run, if the arguments name one; else the settings of the arguments."""
    run_dir = args.runs_dir / (args.settings.name or "")
    if args.resume == "no" or args.settings.name is None or not (run_dir / CONFIG).is_file():
        return args.settings
    return continued(args.settings, run_dir, typed_keys(words), args.config, stage)


@dataclass(frozen=True)
class EvalArguments:
    """Evaluate a run's best checkpoint, else its newest, or another one. The result states how many initial states of
    its episodes were trained on."""

    run: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir; its best checkpoint is used, else its newest. Or a configuration,
    if its policy needs no training or --checkpoint is given."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    checkpoint: Path | None = None
    """Folder of another checkpoint, for example runs/NAME/checkpoints/000100; `average`: the averaged weights in the
    run's checkpoint (optim.ema)."""
    against: str | None = None
    """Compare with a run, a checkpoint, or the folder of an evaluation, on the same episodes."""
    folder: Path | None = None
    """Folder of this evaluation. None: a new one below RUN/evals."""
    resume: Literal["no", "auto"] = "no"
    """auto: continue the evaluation in --folder, or the newest of the same protocol and checkpoint, or begin one."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class RecordArguments:
    """Record a policy's episodes as a dataset in LeRobot's layout (version 3.0): parquet and mp4."""

    run: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir; its best checkpoint is used, else its newest. Or a configuration,
    if its policy needs no training or --checkpoint is given."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    checkpoint: Path | None = None
    """Folder of another checkpoint, for example runs/NAME/checkpoints/000100; `average`: the averaged weights in the
    run's checkpoint (optim.ema)."""
    out: Path = tyro.MISSING
    """Folder of the new dataset. It must not exist yet."""
    episodes: int = 100
    """Number of episodes, with seeds that neither training nor evaluation draws."""
    only_successes: bool = False
    """Leave out the episodes that the policy failed."""
    instructions: tuple[str, ...] = ()
    """Wordings that are recorded in place of the task's instruction, in turn, one per episode, so that a policy learns
    several. The recorded policy itself gets the task's instruction."""
    disturb: float = 0.0
    """Standard deviation of noise that is added to each number of an executed action. The recorded action is without
    noise, so that episodes show how to recover from deviations (DART, arXiv 1703.09327)."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class ServeArguments:
    """Serve a policy's actions to other programs and robots by openpi's websocket protocol (docs/serving.md)."""

    run: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir; its best checkpoint is served, else its newest. Or the folder of a
    checkpoint below a run. Or a configuration, if its policy needs no training or --checkpoint is given."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    checkpoint: Path | None = None
    """Folder of another checkpoint, for example runs/NAME/checkpoints/000100; `average`: the averaged weights in the
    run's checkpoint (optim.ema)."""
    host: str = "127.0.0.1"
    """Address to listen on. By default only programs on this machine can connect. There is no password."""
    port: int = 8000
    """Port to listen on. 0: a free one."""
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of the clients' observations that differ from openpi's: `images.base KEY`."""
    batch: int = 1
    """Largest number of rows that are computed as one batch, from requests that wait at the same time. 1: each row is
    computed alone, bit for bit as `act` does."""
    sample: bool = False
    """Sample actions, from `seed`, for clients that do not choose. Without it they get the policy's mode."""
    threads: int = 1
    """Number of PyTorch's threads. Evaluations use one; with another number, sums are rounded differently."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the counts and latencies to this file at the end."""

    def check(self) -> None:
        """Raise `UserError` for numbers that cannot be."""
        for name, least, most in (("port", 0, 65535), ("batch", 1, 4096), ("threads", 1, 4096)):
            given = getattr(self, name)
            if not least <= given <= most:
                raise UserError(f"--{name} is of {least} to {most}, got {given}")


@dataclass(frozen=True)
class ProfileArguments:
    """Measure a workflow's components on this machine, alone and at the same time, and write profile.json."""

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    out: Path = Path("profile.json")
    """File that the profile is written to."""
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class PlanArguments:
    """Find the best plan for this machine, or for a cluster that a file describes, and explain it."""

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    profile: Path = Path("profile.json")
    """File of measured times, as `embodied profile` writes it."""
    cluster: str = "local"
    """`local`: this machine. Or a YAML or JSON file of nodes with cores, accelerators, memory and links
    (docs/planning.md)."""
    out: Path = Path("plan")
    """Folder for plan.json, the predicted timeline (predicted.json for Perfetto) and its picture."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class CompareArguments:
    """Run every mode on the same work, and compare measured with predicted times."""

    config: tyro.conf.Positional[str]
    """Name of a file in configs/ (without .yaml), or the path of one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    profile: Path | None = None
    """File of measured times, as `embodied profile` writes it. None: they are measured first."""
    out: Path | None = None
    """Folder for compare.html, its pictures and compare.json. None: compare/, or compare/NAME with --name, which the
    page then shows as the name of the workload."""
    repeats: Annotated[int, tyro.conf.arg(name="repeats")] = 2
    """Number of times that every mode is run, three iterations each time."""
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class InspectArguments:
    """Print the content of a dataset or a checkpoint. For a dataset: episodes, frames, each action dimension beside the
    environment's range, errors, and values that look wrong; a contact sheet and histograms are written to --out. For a
    checkpoint: kind, sizes, statistics, processor steps, and other files in its folder."""

    path: tyro.conf.Positional[str]
    """Folder of a dataset, of a checkpoint, or of a run; or the Hugging Face name of a dataset (`org/name`)."""
    config: str | None = None
    """Configuration whose policy is to learn from the data: a name in configs/ or the path of one. Without it, only a
    dataset of `embodied record` is compared with its environment."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()
    out: Path | None = None
    """Folder for the pictures and data.json. None: inspect-NAME in the current folder."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class RewardArguments(Bounded):
    """Train a success classifier from recorded episodes, solved and failed. `reward.model` names its folder in a
    configuration whose workflow has a reward worker (ppo_reward)."""

    data: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Datasets in LeRobot's layout with frames, as `embodied record` writes them."""
    out: Path = tyro.MISSING
    """Folder of the new classifier. It must not exist yet."""
    last: int = 2
    """Frames at the end of a solved episode that count as solved."""
    steps: int = 200
    """Optimiser steps."""
    batch: int = 64
    """Frames per step. Half of them show success."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of the first step; it falls linearly to zero."""
    holdout: float = 0.2
    """Share of the episodes that is not learned from, but measured."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initial weights, batches and held-out episodes."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class ExportArguments:
    """Write a run's policy in the layout that its community's programs load: for OpenVLA a Hugging Face directory, with
    an adapter merged into the weights. README.md lists the conventions under which the policy was trained."""

    run: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir."""
    checkpoint: Path | None = None
    """Folder of a checkpoint. None: the run's best, else its newest."""
    out: Path = tyro.MISSING
    """Folder to write. It must not exist yet."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class ReportArguments:
    """Write the report of a run, or of several side by side, as one self-contained HTML page."""

    run: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs, or their names below --runs-dir. Runs that differ only in the seed are drawn as one curve."""
    out: Path | None = None
    """The page of several runs. None: report.html in --runs-dir."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


def unchecked_sections() -> ConstructorRegistry:
    """The parser's rule that puts the configuration's sections together unchecked, for `files.checked` to find all
    mistakes at once: the parser itself shows an error of pydantic's as it comes, or raises it."""
    registry = ConstructorRegistry()
    registry.struct_rule(_unchecked)
    return registry


def _unchecked(info: StructTypeInfo) -> StructConstructorSpec | None:
    if not (isinstance(info.type, type) and issubclass(info.type, Section)):
        return None
    hints = get_type_hints(info.type, include_extras=True)
    fields = info.type.model_fields.items()
    described = (StructFieldSpec(name, hints[name], getattr(info.default, name), f.description) for name, f in fields)
    return StructConstructorSpec(info.type.model_construct, tuple(described))
