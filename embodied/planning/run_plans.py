"""The plan of a run: made from a profile before the run, and made again while it runs.

`profile`, `plan` and `train` share the way from a configuration to a plan and its assignment. During a run `Watch`
compares each iteration's time with the plan's prediction. When several in a row are off, the profile's times are
brought up to date by what the components took, and the planner is asked again. A new plan is worth a switch when what
it gains over the iterations that are left exceeds what the switch costs, twice over.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rich import get_console
from rich import print as show

import schedulers
from embodied.config.schema import Config
from embodied.devices import fingerprint
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, assign, configured
from embodied.execution.iteration import Iteration
from embodied.execution.session import Session
from embodied.files import write_whole
from embodied.planning.clusters import leaving_home, local_cluster, planned_for, roles_of, run_cluster, with_stand_ins
from embodied.planning.profiler import decided_s, passed_s, profile_run, trained_s, work_of
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import workflow_of
from schedulers import Cluster, ComponentProfile, Plan, PlanError, Point, Profile, Workflow
from sim_farm.workers.hosts import InProcess

NO_MOMENT = "plan.replan moves a run between two updates, and there is no such moment with"
PLAN, PROFILE, TIMELINE, PICTURE = "plan.json", "profile.json", "predicted.json", "predicted.png"


def sized_workflow(run: RunSpec) -> Workflow:
    """The run's workflow; builds simulators for the length of their episodes where it matters."""
    steps = [task.env.max_episode_steps or InProcess().describe(task.spec).max_episode_steps for task in run.tasks]
    return workflow_of(run, steps)


def checked_profile(path: Path, run: RunSpec, workflow: Workflow, any_hardware: bool = False) -> Profile:
    """A profile from a file. Raises `UserError` for one of other settings, and, unless `any_hardware`, for one that was
    measured on other hardware."""
    if not path.exists():
        raise UserError(f"there is no profile file {str(path)!r}: `embodied profile CONFIG --out {path}` measures one")
    profile = schedulers.load(Profile, path)
    work = {key: value for key, value in profile.fingerprint.items() if key.startswith("work.")}
    differs = [key.removeprefix("work.") for key, value in work_of(run.config).items() if work.get(key, value) != value]
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
        schedulers.check_profile(profile, workflow, {**fingerprint(), **work_of(run.config)}, any_hardware)
    except PlanError as error:
        raise UserError(f"{path}: {error}") from error
    return profile


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The assignment of a run's workers, and the plan that it follows."""

    run: RunSpec
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
        if plan is None or workflow is None or cluster is None or profile is None or not self.run.config.plan.replan:
            return None

        def ask(profile: Profile) -> Plan:
            return schedulers.plan(workflow, profile, cluster, mode_of(self.run.config))

        return Watch(plan, profile, workflow, cluster, ask, switch_s)

    def moved(self, move: Move) -> RunPlan:
        """The run by another plan, which is written to its folder."""
        write_whole(self.run_dir / PLAN, schedulers.text_of(move.plan))
        assignment = assign(move.plan, self.run, self.session.cores, self.session.nodes)
        return replace(self, assignment=assignment, plan=move.plan, profile=move.profile)


def plan_run(run: RunSpec, session: Session, run_dir: Path) -> RunPlan:
    """Assign the run's workers: as configured, by a plan file, or by the best plan, which may take a profile of ten
    iterations. The plan is written to the run's folder.

    Raises `UserError` or `PlanError` for a plan or profile that does not fit, before a worker is started.
    """
    config, wanted = run.config, run.config.plan
    if wanted.replan and wanted.ahead:
        raise UserError(f"{NO_MOMENT} plan.ahead")
    if wanted.mode == "configured":
        assignment = configured(run, session.cores, session.nodes)
        return RunPlan(run=run, run_dir=run_dir, session=session, assignment=assignment)
    cluster, workflow, profile = run_cluster(session), sized_workflow(run), None
    if wanted.file is not None:
        plan = _plan_file(config)
        if wanted.profile is not None:
            profile = _profile_of(run, session, run_dir, workflow)
        workflow, cluster = leaving_home(workflow), with_stand_ins(cluster, plan, config.policy.device)
        schedulers.validate(plan, workflow, cluster, profile)
    else:
        profile = _profile_of(run, session, run_dir, workflow)
        workflow = planned_for(workflow, profile, cluster)
        plan = schedulers.plan(workflow, profile, cluster, mode_of(config), ahead=wanted.ahead)
        get_console().print("\n".join(plan.why), markup=False, highlight=False, soft_wrap=True)
    if profile is not None:
        plan = replace(plan, prediction=schedulers.predict(plan, workflow, profile, cluster))
    write_whole(run_dir / PLAN, schedulers.text_of(plan))
    return RunPlan(
        run=run,
        run_dir=run_dir,
        session=session,
        assignment=assign(plan, run, session.cores, session.nodes),
        plan=plan,
        workflow=workflow,
        cluster=cluster,
        profile=profile,
    )


def check_plan_files(run: RunSpec) -> None:
    """Refuse plan and profile files that do not fit, before a worker is started. Raises as `plan_run` does.

    On a Ray cluster a plan is checked when the cluster's machines are known.
    """
    config, wanted = run.config, run.config.plan
    if wanted.file is None and wanted.profile is None:
        return
    workflow, profile = sized_workflow(run), None
    if wanted.profile is not None:
        profile = checked_profile(wanted.profile, run, workflow)
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


def _profile_of(run: RunSpec, session: Session, run_dir: Path, workflow: Workflow) -> Profile:
    """The profile that the configuration names, or the run's own, or one that is measured now."""
    own, named = run_dir / PROFILE, run.config.plan.profile
    found = named or (own if own.is_file() else None)  # its own: of a run that goes on
    if found is not None:
        profile = checked_profile(found, run, workflow)
    else:
        show("measuring the workflow's components ...")
        profile = profile_run(run, session, run_dir)
    if found != own:
        write_whole(own, schedulers.text_of(profile))
    return profile


def mode_of(config: Config) -> schedulers.Mode | None:
    """The mode that is wanted; None: whichever is fastest."""
    wanted = config.plan.mode
    return None if wanted == "auto" or wanted == "configured" or isinstance(wanted, Path) else wanted


# --- planning again during a run


PERSISTENT = 5
"""Iterations in a row that must be off before anything is asked: a longer one now and then is no change."""
OFF = 0.15
"""Relative departure of the median from the prediction that counts as off."""
PAYS = 2.0
"""Least gain of a switch over what is left of the run, in multiples of its cost."""


@dataclass(frozen=True)
class Move:
    """A plan to change to, and the reason."""

    plan: Plan
    profile: Profile
    gain_s: float
    """Predicted per iteration."""
    reason: str


@dataclass
class Watch:
    """Watches a run's plan. `ask` plans for a profile; `switch_s` is what changing over costs."""

    plan: Plan
    profile: Profile
    workflow: Workflow
    cluster: Cluster
    ask: Callable[[Profile], Plan]
    switch_s: float
    _recent: deque[Iteration] = field(default_factory=lambda: deque(maxlen=PERSISTENT))

    def see(self, iteration: Iteration, left: int) -> Move | None:
        """Take note of an iteration; a move where another plan pays for the `left` iterations that remain."""
        self._recent.append(iteration)
        if len(self._recent) < PERSISTENT:
            return None
        predicted = _seconds(self.plan)
        ratios = [it.wall_s / predicted for it in self._recent]
        if not (all(r > 1 + OFF for r in ratios) or all(r < 1 - OFF for r in ratios)):
            return None
        updated, words = self.updated()
        self._recent.clear()  # the next question needs as many new iterations
        found = self.ask(updated)
        # Both plans under the same times: what the times do not explain, another plan will not save.
        present = schedulers.predict(self.plan, self.workflow, updated, self.cluster).iteration_s
        gain = median(ratios) * predicted * (1 - _seconds(found) / present)
        if _same(found, self.plan) or gain * left <= PAYS * self.switch_s:
            return None
        reason = (
            f"iterations take {median(ratios):.3g} times the {predicted:.3g} s predicted ({words}); {found.mode} would "
            f"take {_seconds(found) / present:.0%} of that, which saves {gain * left:.0f} s of what is left for "
            f"{self.switch_s:.0f} s"
        )
        return Move(found, updated, gain, reason)

    def updated(self) -> tuple[Profile, str]:
        """The profile with every component's times multiplied by measured over profiled, and that in words."""
        busy = [busy_seconds(iteration, self.workflow) for iteration in self._recent]
        factors = {
            name: _factor(expected, [seconds[name] for seconds in busy]) for name, expected in self._expected().items()
        }
        here = self.profile.on_pools(self.plan.pools).components  # what was measured elsewhere stays as it was
        components = {name: _scaled(p, factors.get(name, 1.0)) for name, p in here.items()}
        # What was measured together belongs to the times that are no more.
        together = tuple(
            replace(entry, seconds=entry.seconds * by, low=entry.low * by, high=entry.high * by)
            for entry in self.profile.together
            for by in [median(factors.get(name, 1.0) for name in entry.components)]
        )
        words = ", ".join(f"{name} x {factor:.3g}" for name, factor in factors.items())
        return replace(self.profile, components=components, together=together), words

    def _expected(self) -> dict[str, float]:
        """Busy seconds per iteration of each component by the profile, summed over devices of simulators."""
        roles, flow = roles_of(self.workflow), self.workflow
        times = self.profile.on_pools(self.plan.pools).components
        devices = {name: p.count for phase in self.plan.phases for p in phase.placements for name in p.components}
        found = dict.fromkeys(flow.names, 0.0)
        for number, loop in enumerate(flow.loops):
            groups = self.plan.groups_of(number)
            calls, batch = groups * loop.steps * flow.episodes_per_env, flow.environments(number) / groups
            for name in loop.components:
                # A farm's time is until its last worker is done: its workers' clocks add up to as many times that.
                workers = 1 if name == roles.policy else devices[name]
                found[name] += calls * workers * times[name].seconds(batch, devices[name])
        for name in (*roles.scorers, roles.learner):
            found[name] = times[name].seconds(flow.items, devices[name])
        # The learner's time is the rest: also messages between its ranks, and the publication of weights.
        found[roles.learner] += (self.plan.prediction.communication_s or 0.0) if self.plan.prediction else 0.0
        return found


def busy_seconds(iteration: Iteration, workflow: Workflow) -> dict[str, float]:
    """Busy seconds of each component in an iteration, summed over a farm's workers."""
    roles, clock = roles_of(workflow), iteration.summary.clock
    found = {roles.policy: decided_s(iteration), roles.learner: trained_s(iteration, roles.scorers)}
    found |= {name: passed_s(iteration, name) for name in roles.scorers}
    for task, names in enumerate(roles.simulators):
        found |= dict(zip(names, (clock.stepping[task], clock.drawing[task]), strict=False))
    return found


def _factor(expected: float, measured: list[float]) -> float:
    """Median of measured over expected seconds."""
    return max(1e-3, median(measured) / expected) if expected > 0 else 1.0


def _scaled(component: ComponentProfile, factor: float) -> ComponentProfile:
    points = tuple(
        Point(p.batch, p.devices, p.seconds * factor, p.low * factor, p.high * factor) for p in component.points
    )
    return replace(component, points=points)


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None, "a plan that is watched has a prediction"
    return plan.prediction.iteration_s


def _same(first: Plan, second: Plan) -> bool:
    return (first.phases, first.groups, first.ahead) == (second.phases, second.groups, second.ahead)
