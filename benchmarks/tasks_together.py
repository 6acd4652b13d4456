"""Two tasks in one run, a light one and a heavy one: predicted time of an iteration together and one after the other.

    python benchmarks/tasks_together.py --json benchmarks/results/tasks_together.json

Nothing here is measured: the figures are predictions by the event simulation, for machines that were not there, from
the times in `NOTES`. With the same program and profiles that `embodied profile` writes there they can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

import schedulers
from benchmarks.planner import PUBLISHED_BATCH, PUBLISHED_INFERENCE_S
from embodied_bench.settings import show_and_write
from schedulers import Cluster, Component, ComponentProfile, Edge, Loop, Node, Plan, Point, Pool, Profile, Workflow

CORES = (8, 16, 32)
DECISIONS = 80
"""Of each environment in a rollout; OpenVLA decides for every single step."""
LEARNER_S_PER_DECISION = 191.0 * 16 / (320 * 168)

NOTES = (
    "prediction by the event simulation with constant times, not a measurement",
    "measured on one core of a small virtual machine, frames drawn in software: PushCube 0.54 ms a physics step, 34 ms "
    "a frame of its camera; LIBERO 6.5 ms a physics step, 100 ms the frames of its two cameras",
    "published (RLinf): OpenVLA-7B's inference 0.40, 0.64, 0.90, 1.15 s on one H100 for 10, 20, 30, 40 environments",
    "derived from RLinf's training on 16 H100 (191 s for 320 environments of 168 decisions): the learner takes 57 ms a "
    "decision on one; it is the same either way",
    "assumed: cores share a task's environments evenly; nothing is slower beside others; everything fits in memory",
    "one after the other: each task has all cores and the GPU while it is rolled out, by the best plan of its own",
)


@dataclass(frozen=True)
class Task:
    name: str
    environments: int
    physics_s: float
    """Of one environment's step on one core."""
    render_s: float
    """Of its frames."""


PUSHCUBE = Task("maniskill/PushCube-v1", 32, 0.54e-3, 34e-3)
LIBERO = Task("libero/libero_spatial/0", 16, 6.5e-3, 100e-3)


@dataclass(frozen=True)
class Arguments:
    """Two tasks with one 7B policy on one GPU, together and one after the other."""

    json: Path | None = None
    """Write the result to this file."""


def workflow_of(*tasks: Task) -> Workflow:
    components, edges, loops = [], [], []
    for i, task in enumerate(tasks):
        own = [f"{name}-{i}" if i else name for name in ("physics", "render")]
        components += [Component(name, task=i) for name in own]
        edges += [Edge(own[0], own[1], "scenes"), Edge(own[1], "policy", "frames")]
        loops.append(Loop((*own, "policy"), DECISIONS, task.environments, task.name))
    items = sum(task.environments for task in tasks)
    components += [Component("policy"), Component("learner")]
    edges.append(Edge("policy", "learner", "trajectories"))
    return Workflow("ppo", tuple(components), tuple(edges), tuple(loops), items)


def profile_of(*tasks: Task) -> Profile:
    def measured(pool: Pool, values: dict[int, float]) -> ComponentProfile:
        points = tuple(Point(batch, 1, seconds, seconds, seconds) for batch, seconds in values.items())
        return ComponentProfile(pool, points, data_parallel=pool == "cores")

    items = sum(task.environments for task in tasks)
    components = {
        "policy": measured("accelerators", dict(zip(PUBLISHED_BATCH, PUBLISHED_INFERENCE_S, strict=True))),
        "learner": measured("accelerators", {items: items * DECISIONS * LEARNER_S_PER_DECISION}),
    }
    for i, task in enumerate(tasks):
        end = f"-{i}" if i else ""
        components[f"physics{end}"] = measured("cores", {1: task.physics_s, 64: 64 * task.physics_s})
        components[f"render{end}"] = measured("cores", {1: task.render_s, 64: 64 * task.render_s})
    return Profile("ppo", {"gpu": "H100 80GB"}, components)


def planned(cluster: Cluster, *tasks: Task) -> tuple[Plan, float, float]:
    """The best plan, and seconds of its iteration and of the phase with the rollout, played."""
    workflow, profile = workflow_of(*tasks), profile_of(*tasks)
    best = schedulers.plan(workflow, profile, cluster)
    learner = profile.components["learner"].points[0].seconds
    seconds = schedulers.simulate(best, workflow, profile, cluster).seconds
    return best, seconds, seconds - learner


def compared(cores: int, light: Task, heavy: Task) -> dict[str, Any]:
    cluster = Cluster((Node("node0", cores, 1),))
    best, together_s, rollout_s = planned(cluster, light, heavy)
    alone = {task.name: planned(cluster, task) for task in (light, heavy)}
    after_s = sum(seconds for _, seconds, _ in alone.values())
    after_rollout_s = sum(rollout for *_, rollout in alone.values())
    workflow, profile = workflow_of(light, heavy), profile_of(light, heavy)
    kept = schedulers.predict_sequential(best, workflow, profile, cluster).iteration_s
    events = schedulers.simulate(best, workflow, profile, cluster).events
    acting = sum(event.end_s - event.start_s for event in events if event.component == "policy")
    assert best.prediction is not None
    return {
        "cores": cores,
        "environments": [light.environments, heavy.environments],
        "predicted_iteration_s": {"together": together_s, "one_after_the_other": after_s},
        "predicted_rollout_s": {"together": rollout_s, "one_after_the_other": after_rollout_s},
        "predicted_rollout_alone_s": {name: rollout for name, (_, _, rollout) in alone.items()},
        "predicted_saving_of_rollout": 1 - rollout_s / after_rollout_s,
        "predicted_saving_of_iteration": 1 - together_s / after_s,
        "predicted_iteration_one_after_the_other_with_the_same_placements_s": kept,
        "policy_busy_share_of_rollout": acting / rollout_s,
        "lower_bound_iteration_s": best.prediction.lower_bound_s,
        "plan": schedulers.to_data(replace(best, why=())),
        "why": best.why,
        "plans_alone": {name: schedulers.to_data(replace(plan, why=())) for name, (plan, _, _) in alone.items()},
    }


def sentence(row: dict[str, Any]) -> str:
    rollout, iteration = row["predicted_rollout_s"], row["predicted_iteration_s"]
    return (
        f"{row['cores']} cores and a GPU, predicted: the rollout takes {rollout['together']:.1f} s together, "
        f"{rollout['one_after_the_other']:.1f} s one after the other ({row['predicted_saving_of_rollout']:.0%} less); "
        f"an iteration {iteration['together']:.0f} s and {iteration['one_after_the_other']:.0f} s "
        f"({row['predicted_saving_of_iteration']:.0%} less). The policy is busy "
        f"{row['policy_busy_share_of_rollout']:.0%} of the rollout together: while one task is simulated it decides "
        "for the other, in whole batches."
    )


def main() -> None:
    arguments = tyro.cli(Arguments)
    rows = [compared(cores, PUSHCUBE, LIBERO) for cores in CORES]
    for row in rows:
        print(sentence(row))
    figures: dict[str, Any] = {"prediction": True, "notes": NOTES, "decisions": DECISIONS, "sizes": rows}
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main()
