"""`embodied plan`: the best plan for a cluster, why, and what the others would cost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import get_console
from rich import print as show

import schedulers
from embodied.commands.arguments import PlanArguments as Arguments
from embodied.config.schema import Config
from embodied.execution.assignment import HOME
from embodied.files import write_whole
from embodied.planning.clusters import planned_for, read_cluster, roles_of
from embodied.planning.estimates import with_estimates
from embodied.planning.run_plans import (
    PICTURE,
    PLAN,
    PROFILE,
    TIMELINE,
    checked_profile,
    make_folder,
    mode_of,
    sized_workflow,
)
from embodied.reporting.plan_picture import draw_plan
from embodied.run import RUNS
from embodied.run.folder import with_init
from embodied.training.checks import Checked, check_start
from schedulers import Cluster, Plan, Profile, Workflow
from schedulers.cards import CARDS


def run(args: Arguments) -> dict[str, Any]:
    return plan_command(with_init(args.settings, RUNS, required=False), args.profile, args.cluster, args.out)


def plan_command(config: Config, profile: Path, cluster: str, out: Path) -> dict[str, Any]:
    """The run's best plan for a cluster, why, what each mode would cost, and the predicted timeline.

    `plan.mode` restricts it to one mode. For several tasks the result also has the gain of rolling
    them out at the same time.
    """
    checked = Checked(command="plan", config=config)
    check_start(checked)
    run = checked.run
    target, workflow = read_cluster(cluster, config.policy.device), sized_workflow(run)
    # Another cluster has other hardware than this machine: its profile is the user's choice.
    elsewhere = target.nodes[0].name != HOME
    measured = checked_profile(profile, run, workflow, any_hardware=elsewhere)
    on_cores, measured = measured, with_estimates(measured, config, workflow, target)
    estimated = measured is not on_cores
    on_cores_s = _on_cores_s(on_cores, workflow, target, config) if estimated else None
    workflow = planned_for(workflow, measured, target)
    modes = schedulers.alternatives(workflow, measured, target, ahead=config.plan.ahead)
    best = schedulers.plan(workflow, measured, target, mode_of(config), ahead=config.plan.ahead)
    make_folder(out)
    write_whole(out / PLAN, schedulers.text_of(best))
    if estimated:
        write_whole(out / PROFILE, schedulers.text_of(measured))
    simulation = schedulers.simulate(best, workflow, measured, target)
    (out / TIMELINE).write_text(json.dumps(schedulers.chrome_trace(simulation)))
    draw_plan(out / PICTURE, {f"{best.mode} (best)": simulation, **_others(modes, best, workflow, measured, target)})
    scaled = _scaling(best, workflow, measured, target)
    reasons = [*best.why, *([str(scaled)] if scaled else []), *_beside(on_cores_s, measured, workflow, target)]
    get_console().print("\n".join(reasons), markup=False, highlight=False, soft_wrap=True)
    show(f"plan, timeline and picture: [bold]{out}[/]")
    return {
        "folder": str(out),
        "plan": schedulers.to_data(best),
        "iteration_s": _seconds(best),
        "tasks_in_turn_iteration_s": schedulers.predict_sequential(best, workflow, measured, target).iteration_s,
        "modes": {name: _seconds(plan) for name, plan in modes.items()},
        "estimated": [name for name, component in measured.components.items() if component.estimated],
        "on_cores_iteration_s": on_cores_s,
        **({} if scaled is None else _figures(scaled)),
    }


def _scaling(best: Plan, workflow: Workflow, profile: Profile, cluster: Cluster) -> schedulers.Scaling | None:
    """Beside one accelerator; None where there are not several."""
    if sum(node.accelerators for node in cluster.nodes) < 2:
        return None
    return schedulers.scaling(best, workflow, profile, cluster)


def _on_cores_s(measured: Profile, workflow: Workflow, cluster: Cluster, config: Config) -> float | None:
    """Seconds of the best plan by measured times alone; None where there is none."""
    try:
        return _seconds(
            schedulers.plan(workflow, measured, cluster, mode_of(config), ahead=config.plan.ahead, explain=False)
        )
    except schedulers.PlanError:
        return None


def _beside(on_cores_s: float | None, profile: Profile, workflow: Workflow, cluster: Cluster) -> list[str]:
    """Sentences beside estimated times: the measured time of a plan on cores, or that accelerators have none."""
    if on_cores_s is not None:
        return [f"With all components on cores, as measured, an iteration would take {on_cores_s:.3g} s."]
    if profile.components[roles_of(workflow).policy].pool == "cores" and any(n.accelerators for n in cluster.nodes):
        known = ", ".join(CARDS)
        return [
            "The profile has no times of the policy on accelerators: make one on a machine that has some, or name the "
            f"nodes' card in the cluster file to estimate them (card: one of {known})."
        ]
    return []


def _figures(scaled: schedulers.Scaling) -> dict[str, Any]:
    one = None if math.isinf(scaled.one_iteration_s) else scaled.one_iteration_s
    return {
        "accelerators": scaled.accelerators,
        "one_accelerator_iteration_s": one,
        "efficiency": None if one is None else scaled.efficiency,
        "bottleneck": scaled.bottleneck,
    }


def _others(
    modes: Mapping[schedulers.Mode, Plan], best: Plan, workflow: Workflow, profile: Profile, cluster: Cluster
) -> dict[str, schedulers.Simulation]:
    """The predicted timelines of the other modes' best plans."""
    return {
        name: schedulers.simulate(plan, workflow, profile, cluster) for name, plan in modes.items() if name != best.mode
    }


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s
