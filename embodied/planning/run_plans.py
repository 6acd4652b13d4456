"""From a configuration to a plan, and from a plan to an assignment: what `profile`, `plan` and `train` share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import get_console
from rich import print as show

import schedulers
from embodied.config import Config
from embodied.doctor.hardware import fingerprint
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, assign, configured
from embodied.execution.session import Session
from embodied.planning.clusters import local_cluster, run_cluster
from embodied.planning.profiler import profile_config, work_of
from embodied.planning.replanning import Decision, Watch, Watches
from embodied.workers.makers import task_spec
from embodied.workflows.recipes import check_credit, configs_of_tasks, workflow_of
from schedulers import Cluster, Plan, PlanError, Profile, Workflow
from sim_farm.hosts import InProcess

NO_MOMENT = "plan.replan moves a run between two updates, and there is no such moment with"
PLAN, PROFILE, TIMELINE, PICTURE = "plan.json", "profile.json", "predicted.json", "predicted.png"


def sized_workflow(config: Config) -> Workflow:
    """The configuration's workflow; asks the simulator for the length of its episodes where they matter."""
    steps = config.env.max_episode_steps
    return workflow_of(config, steps or InProcess().describe(task_spec(config)).max_episode_steps)


def checked_profile(path: Path, config: Config, workflow: Workflow, any_hardware: bool) -> Profile:
    """A profile from a file. Raises `UserError` or `PlanError` for one that does not belong to what is planned here."""
    profile = schedulers.load(Profile, path)
    work = {key: value for key, value in profile.fingerprint.items() if key.startswith("work.")}
    differs = [key.removeprefix("work.") for key, value in work_of(config).items() if work.get(key, value) != value]
    if differs:
        raise UserError(
            f"{path} was measured with other settings of {', '.join(differs)}: measure again with "
            f"`embodied profile`, or use the configuration that it belongs to"
        )
    try:
        schedulers.check_profile(profile, workflow, None)
    except PlanError as error:
        raise UserError(f"{path}: {error}") from error
    try:
        schedulers.check_profile(profile, workflow, {**fingerprint(), **work_of(config)}, any_hardware)
    except PlanError as error:
        raise UserError(f"{path}: {error} (--plan.any-hardware)") from error
    return profile


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    workflow: Workflow
    cluster: Cluster
    profile: Profile | None
    """None: a plan file without times."""


@dataclass(frozen=True)
class Placed:
    """Where a run's workers go, and why."""

    config: Config
    run_dir: Path
    session: Session
    assignment: Assignment
    number: int = 0
    """Of the task among the run's."""
    planned: Planned | None = None
    """None: as configured."""

    @property
    def plan(self) -> Plan | None:
        return self.planned.plan if self.planned else None

    def watch(self, switch_s: float) -> Watch | None:
        """Watches the plan, where there are times to compare with; placing the workers anew takes `switch_s`."""
        known = self.planned
        if known is None or known.profile is None:
            return None
        workflow, cluster = known.workflow, known.cluster

        def ask(profile: Profile) -> Plan:
            return schedulers.plan(workflow, profile, cluster, mode_of(self.config))

        return Watch(known.plan, known.profile, workflow, cluster, ask, switch_s)

    def moved(self, decision: Decision) -> Placed:
        """The run by another plan, which its folder keeps."""
        assert self.planned is not None
        schedulers.save(decision.plan, self.run_dir / file_of_task(Path(PLAN), self.number))
        assignment = assign(decision.plan, self.config, self.session.cores, self.session.nodes)
        planned = replace(self.planned, plan=decision.plan, profile=decision.profile)
        return replace(self, assignment=assignment, planned=planned)


def watch_run(config: Config, placed: Sequence[Placed], switch_s: float) -> Watches | None:
    """Watches the plans of all tasks, where the configuration wants it and each has times to compare with."""
    watches = [task.watch(switch_s) for task in placed] if config.plan.replan else []
    known = tuple(watch for watch in watches if watch is not None)
    return Watches(known) if known and len(known) == len(placed) else None


def predicted_seconds(placed: Sequence[Placed]) -> float | None:
    """Of an iteration: the tasks' predictions add up (to a bound, where one's rollout hides another's update). None
    where a task has none."""
    known = [place.plan.prediction for place in placed if place.plan is not None]
    found = [prediction.iteration_s for prediction in known if prediction is not None]
    return sum(found) if len(found) == len(placed) else None


def place_run(config: Config, session: Session, run_dir: Path) -> tuple[Placed, ...]:
    """Where the workers of each of the run's tasks go: as configured, by a plan file, or by the best plan.

    The run's folder keeps the plans. Raises `UserError` or `PlanError` for plans and profiles that do not fit,
    before anything is started.
    """
    wanted, tasks = config.plan, configs_of_tasks(config)
    if wanted.replan and wanted.ahead:
        raise UserError(f"{NO_MOMENT} plan.ahead")
    if wanted.mode == "configured" and wanted.file is None:
        places = [configured(task, session.cores, session.nodes) for task in tasks]
        return tuple(
            Placed(t, run_dir, session, place, i) for i, (t, place) in enumerate(zip(tasks, places, strict=True))
        )
    cluster = run_cluster(session)
    return tuple(_place_task(task, number, session, cluster, run_dir) for number, task in enumerate(tasks))


def check_files(config: Config) -> None:
    """Refuse settings, plan and profile files that do not fit, before anything is started. Raises as `place_run` does.

    On a cluster a plan is checked when the cluster's machines are known.
    """
    check_credit(config)
    wanted = config.plan
    if wanted.file is None and wanted.profile is None:
        return
    for number, task in enumerate(configs_of_tasks(config)):
        workflow, profile = sized_workflow(task), None
        if wanted.profile is not None:
            profile = checked_profile(file_of_task(wanted.profile, number), task, workflow, wanted.any_hardware)
        if wanted.file is not None:
            plan = _plan_file(config, number)
            if config.runtime.address == "local":
                cluster = local_cluster(len(os.sched_getaffinity(0)), config.policy.device)
                schedulers.validate(plan, workflow, cluster, profile)


def _plan_file(config: Config, number: int) -> Plan:
    """The task's plan as the configuration names it."""
    assert config.plan.file is not None
    path = file_of_task(config.plan.file, number)
    plan = schedulers.load(Plan, path)
    if config.plan.replan and plan.ahead:
        raise UserError(f"{NO_MOMENT} the plan of {path}, which runs ahead")
    return plan


def _place_task(config: Config, number: int, session: Session, cluster: Cluster, run_dir: Path) -> Placed:
    wanted, workflow = config.plan, sized_workflow(config)
    profile = None
    if wanted.file is not None:
        plan = _plan_file(config, number)
        if wanted.profile is not None:
            profile = _profile_of(config, number, session, run_dir, workflow)
        schedulers.validate(plan, workflow, cluster, profile)
    else:
        profile = _profile_of(config, number, session, run_dir, workflow)
        plan = schedulers.plan(workflow, profile, cluster, mode_of(config), wanted.ahead)
        console = get_console()
        console.print(f"[bold]{config.env.task}[/]")
        console.print("\n".join(plan.why), markup=False, highlight=False, soft_wrap=True)
    if profile is not None:
        plan = replace(plan, prediction=schedulers.predict(plan, workflow, profile, cluster))
    schedulers.save(plan, run_dir / file_of_task(Path(PLAN), number))
    assignment = assign(plan, config, session.cores, session.nodes)
    return Placed(config, run_dir, session, assignment, number, Planned(plan, workflow, cluster, profile))


def make_folder(path: Path) -> None:
    """Raises `UserError` where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made a folder ({error.strerror}); choose another --out") from error


def file_of_task(path: Path, number: int) -> Path:
    """The file of a run's task: `plan.json`, `plan-1.json`, ..."""
    return path.with_stem(f"{path.stem}-{number}") if number else path


def _profile_of(config: Config, number: int, session: Session, run_dir: Path, workflow: Workflow) -> Profile:
    """The profile that the configuration names, or the run's own, or one that is measured now."""
    own = run_dir / file_of_task(Path(PROFILE), number)
    if config.plan.profile is not None:
        named = file_of_task(config.plan.profile, number)
        profile = checked_profile(named, config, workflow, config.plan.any_hardware)
        schedulers.save(profile, own)
        return profile
    if own.is_file():  # a run that goes on
        return checked_profile(own, config, workflow, config.plan.any_hardware)
    show("measuring the workflow's components ...")
    profile = profile_config(config, session, run_dir)
    schedulers.save(profile, own)
    return profile


def mode_of(config: Config) -> schedulers.Mode | None:
    """The mode that is wanted; None: whichever is fastest."""
    wanted = config.plan.mode
    return None if wanted == "auto" or wanted == "configured" else wanted


def title_of(config: Config, number: int, others: Mapping[str, Any]) -> str:
    """The task's name, with its number where another of the run's tasks has that name."""
    task = config.env.task
    return f"{task} ({number})" if task in others else task
