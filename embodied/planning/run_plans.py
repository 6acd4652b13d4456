"""From a configuration to a plan, and from a plan to an assignment: what `profile`, `plan` and `train` share."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich import get_console
from rich import print as show

import schedulers
from embodied.config.schema import Config
from embodied.devices import fingerprint
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, assign, configured
from embodied.execution.makers import check_components
from embodied.execution.session import Session
from embodied.files import write_whole
from embodied.planning.clusters import local_cluster, run_cluster, with_stand_ins
from embodied.planning.components import leaving_home, planned_for
from embodied.planning.profiler import profile_config, work_of
from embodied.planning.replanning import Decision, Watch
from embodied.workflows.context import task_spec
from embodied.workflows.sizes import tasks_of, workflow_of
from schedulers import Cluster, Plan, PlanError, Profile, Workflow
from sim_farm.workers.hosts import InProcess

NO_MOMENT = "plan.replan moves a run between two updates, and there is no such moment with"
PLAN, PROFILE, TIMELINE, PICTURE = "plan.json", "profile.json", "predicted.json", "predicted.png"


def sized_workflow(config: Config) -> Workflow:
    """The configuration's workflow; asks the simulators for the length of their episodes where it matters."""
    steps = [
        task.env.max_episode_steps or InProcess().describe(task_spec(task)).max_episode_steps
        for task in tasks_of(config)
    ]
    return workflow_of(config, steps)


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
    planned: Planned | None = None
    """None: as configured."""

    @property
    def plan(self) -> Plan | None:
        return self.planned.plan if self.planned else None

    @property
    def predicted_s(self) -> float | None:
        """Of an iteration, where the plan has times."""
        prediction = self.plan.prediction if self.plan is not None else None
        return None if prediction is None else prediction.iteration_s

    def watch(self, switch_s: float) -> Watch | None:
        """Watches the plan, where the configuration wants it and there are times to compare with; placing the workers
        anew takes `switch_s`."""
        known = self.planned
        if known is None or known.profile is None or not self.config.plan.replan:
            return None
        workflow, cluster = known.workflow, known.cluster

        def ask(profile: Profile) -> Plan:
            return schedulers.plan(workflow, profile, cluster, mode_of(self.config))

        return Watch(known.plan, known.profile, workflow, cluster, ask, switch_s)

    def moved(self, decision: Decision) -> Placed:
        """The run by another plan, which its folder keeps."""
        assert self.planned is not None
        write_whole(self.run_dir / PLAN, schedulers.text_of(decision.plan))
        assignment = assign(decision.plan, self.config, self.session.cores, self.session.nodes)
        planned = replace(self.planned, plan=decision.plan, profile=decision.profile)
        return replace(self, assignment=assignment, planned=planned)


def place_run(config: Config, session: Session, run_dir: Path) -> Placed:
    """Where the run's workers go: as configured, by a plan file, or by the best plan.

    The run's folder keeps the plan. Raises `UserError` or `PlanError` for a plan or profile that does not fit,
    before anything is started.
    """
    wanted = config.plan
    if wanted.replan and wanted.ahead:
        raise UserError(f"{NO_MOMENT} plan.ahead")
    if wanted.mode == "configured" and wanted.file is None:
        return Placed(config, run_dir, session, configured(config, session.cores, session.nodes))
    cluster, workflow, profile = run_cluster(session), sized_workflow(config), None
    if wanted.file is not None:
        plan = _plan_file(config)
        if wanted.profile is not None:
            profile = _profile_of(config, session, run_dir, workflow)
        workflow, cluster = leaving_home(workflow), with_stand_ins(cluster, plan, config.policy.device)
        schedulers.validate(plan, workflow, cluster, profile)
    else:
        profile = _profile_of(config, session, run_dir, workflow)
        workflow = planned_for(workflow, profile, cluster)
        plan = schedulers.plan(workflow, profile, cluster, mode_of(config), ahead=wanted.ahead)
        get_console().print("\n".join(plan.why), markup=False, highlight=False, soft_wrap=True)
    if profile is not None:
        plan = replace(plan, prediction=schedulers.predict(plan, workflow, profile, cluster))
    write_whole(run_dir / PLAN, schedulers.text_of(plan))
    assignment = assign(plan, config, session.cores, session.nodes)
    return Placed(config, run_dir, session, assignment, Planned(plan, workflow, cluster, profile))


def check_files(config: Config) -> None:
    """Refuse settings, plan and profile files that do not fit, before anything is started. Raises as `place_run` does.

    On a cluster a plan is checked when the cluster's machines are known.
    """
    check_components(config)
    wanted = config.plan
    if wanted.file is None and wanted.profile is None:
        return
    workflow, profile = sized_workflow(config), None
    if wanted.profile is not None:
        profile = checked_profile(wanted.profile, config, workflow, wanted.any_hardware)
    if wanted.file is not None:
        plan = _plan_file(config)
        if config.runtime.address == "local":
            here = local_cluster(len(os.sched_getaffinity(0)), config.policy.device)
            cluster = with_stand_ins(here, plan, config.policy.device)
            schedulers.validate(plan, workflow, cluster, profile)


def _plan_file(config: Config) -> Plan:
    """The plan that the configuration names."""
    assert config.plan.file is not None
    plan = schedulers.load(Plan, config.plan.file)
    if config.plan.replan and plan.ahead:
        raise UserError(f"{NO_MOMENT} the plan of {config.plan.file}, which runs ahead")
    return plan


def make_folder(path: Path) -> None:
    """Raises `UserError` where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made a folder ({error.strerror}); choose another --out") from error


def _profile_of(config: Config, session: Session, run_dir: Path, workflow: Workflow) -> Profile:
    """The profile that the configuration names, or the run's own, or one that is measured now."""
    own, named = run_dir / PROFILE, config.plan.profile
    found = named or (own if own.is_file() else None)  # its own: of a run that goes on
    if found is not None:
        profile = checked_profile(found, config, workflow, config.plan.any_hardware)
    else:
        show("measuring the workflow's components ...")
        profile = profile_config(config, session, run_dir)
    if found != own:
        write_whole(own, schedulers.text_of(profile))
    return profile


def mode_of(config: Config) -> schedulers.Mode | None:
    """The mode that is wanted; None: whichever is fastest."""
    wanted = config.plan.mode
    return None if wanted == "auto" or wanted == "configured" else wanted
