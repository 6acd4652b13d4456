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
from embodied.execution.session import Session
from embodied.files import write_whole
from embodied.planning.clusters import leaving_home, local_cluster, planned_for, run_cluster, with_stand_ins
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


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The assignment of a run's workers, and the plan that it follows."""

    config: Config
    run_dir: Path
    session: Session
    assignment: Assignment
    plan: Plan | None = None
    """None: the workers are placed as configured."""
    workflow: Workflow | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    """None: as configured, or by a plan file without times."""

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of an iteration, if the plan has times."""
        prediction = None if self.plan is None else self.plan.prediction
        return None if prediction is None else prediction.iteration_s

    def watch(self, switch_s: float) -> Watch | None:
        """Watches the plan, if the configuration asks for it and there are times to compare with; starting the workers
        anew takes `switch_s` seconds."""
        plan, workflow, cluster, profile = self.plan, self.workflow, self.cluster, self.profile
        if plan is None or workflow is None or cluster is None or profile is None or not self.config.plan.replan:
            return None

        def ask(profile: Profile) -> Plan:
            return schedulers.plan(workflow, profile, cluster, mode_of(self.config))

        return Watch(plan, profile, workflow, cluster, ask, switch_s)

    def moved(self, decision: Decision) -> RunPlan:
        """The run by another plan, which is written to its folder."""
        write_whole(self.run_dir / PLAN, schedulers.text_of(decision.plan))
        assignment = assign(decision.plan, self.config, self.session.cores, self.session.nodes)
        return replace(self, assignment=assignment, plan=decision.plan, profile=decision.profile)


def plan_run(config: Config, session: Session, run_dir: Path) -> RunPlan:
    """Assign the run's workers: as configured, by a plan file, or by the best plan, which may take a profile of ten
    iterations. The plan is written to the run's folder.

    Raises `UserError` or `PlanError` for a plan or profile that does not fit, before a worker is started.
    """
    wanted = config.plan
    if wanted.replan and wanted.ahead:
        raise UserError(f"{NO_MOMENT} plan.ahead")
    if wanted.mode == "configured" and wanted.file is None:
        assignment = configured(config, session.cores, session.nodes)
        return RunPlan(config=config, run_dir=run_dir, session=session, assignment=assignment)
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
    return RunPlan(
        config=config,
        run_dir=run_dir,
        session=session,
        assignment=assign(plan, config, session.cores, session.nodes),
        plan=plan,
        workflow=workflow,
        cluster=cluster,
        profile=profile,
    )


def check_plan_files(config: Config) -> None:
    """Refuse plan and profile files that do not fit, before a worker is started. Raises as `plan_run` does.

    On a Ray cluster a plan is checked when the cluster's machines are known.
    """
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
