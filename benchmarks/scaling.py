"""OpenVLA on 8, 64 and 512 GPUs: predicted speed, efficiency and bottleneck, with LoRA and with full fine-tuning.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Nothing here is measured: the figures are the planner's predictions for machines that were not there, from the times in
`NOTES`, which others have published or which were measured elsewhere.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import schedulers  # noqa: E402
from benchmarks.planner import PUBLISHED_BATCH, PUBLISHED_INFERENCE_S  # noqa: E402
from benchmarks.tasks_together import DECISIONS, LEARNER_S_PER_DECISION, LIBERO  # noqa: E402
from embodied_bench.settings import show_and_write  # noqa: E402
from schedulers import (  # noqa: E402
    Cluster,
    Component,
    ComponentProfile,
    Edge,
    Exchange,
    Loop,
    Node,
    Plan,
    Point,
    Profile,
    Workflow,
)

GPUS = (8, 64, 512)
PER_GPU = 32
"""Environments for each GPU, where the work grows with their number."""
FIXED = 4096
"""Environments on any number of GPUs, where it does not."""
STEPS = 16
"""Of the optimiser in an iteration."""
MICRO_BATCH = 8
"""Rows of a pass."""
PARAMETERS = 7_541_237_184
ADAPTERS = 110_828_288
"""Parameters of rank 32 on all of the network's linear layers."""
NETWORKS = {"fast": 400e9, "slow": 12.5e9}
"""Bytes per second that a node sends to others: eight times 400 Gb/s, once 100 Gb/s."""

NOTES = (
    "predictions, not measurements: by the cost laws, with constant times",
    "published (RLinf): OpenVLA-7B's inference 0.40, 0.64, 0.90, 1.15 s on one H100 for 10, 20, 30, 40 environments; "
    "beyond these on the straight line through the nearest two",
    "derived from RLinf's training on 16 H100 (191 s for 320 environments of 168 decisions): 57 ms a decision on one, "
    "with LoRA too",
    "measured on one core of a small virtual machine, frames drawn in software: LIBERO 6.5 ms a physics step, 100 ms "
    "the frames of its two cameras; cores share environments evenly, 12 come with a GPU",
    f"assumed: {DECISIONS} decisions of each environment, {STEPS} optimiser steps an iteration, passes over "
    f"{MICRO_BATCH} rows; links of 450 GB/s in a node, 400 (fast) or 12.5 GB/s (slow) between nodes, 10 us a message",
    "LoRA: ranks hold the whole network and add up gradients of the adapters alone, 111 million numbers in fp32; these "
    "are what replicas are sent",
    "full: ranks hold shards, gather 7.5 billion numbers in bf16 for each pass, forwards and backwards, and scatter "
    "their gradients in fp32 at each step; replicas are sent all of it in bf16",
    "nothing that is sent overlaps with computing, which libraries do in part: the efficiency of full fine-tuning is "
    "a lower estimate; memory is not looked at, so that one GPU, which could not hold full fine-tuning, is compared",
)


@dataclass(frozen=True)
class Arguments:
    """Predicted speed of fine-tuning OpenVLA on 8, 64 and 512 GPUs."""

    json: Path | None = None
    """Write the result to this file."""


def machines(gpus: int, network: str) -> Cluster:
    """Nodes of 8 GPUs and 96 cores; one GPU has its share of a node."""
    nodes = tuple(Node(f"node{i}", 96, 8) for i in range(gpus // 8)) or (Node("node0", 12, 1),)
    return Cluster(nodes, NETWORKS[network], 10e-6, device_link_bytes_per_s=450e9)


def workflow_of(environments: int) -> Workflow:
    names = ("physics", "render", "policy", "learner")
    loop = Loop(names[:3], DECISIONS, name=LIBERO.name)
    edges = (
        Edge("physics", "render", "scenes"),
        Edge("render", "policy", "frames"),
        Edge("policy", "learner", "trajectories"),
    )
    return Workflow("ppo", tuple(Component(name) for name in names), edges, (loop,), environments)


def profile_of(environments: int, full: bool) -> Profile:
    """One profile for all numbers of GPUs; of what is exchanged the number of passes goes with that of rows."""

    def measured(points: dict[int, float]) -> tuple[Point, ...]:
        return tuple(Point(batch, 1, seconds, seconds, seconds) for batch, seconds in points.items())

    rows = environments * DECISIONS
    learner = ComponentProfile(
        "accelerators",
        measured({environments: rows * LEARNER_S_PER_DECISION}),
        exchanges=_exchanges(rows, full),
        published_bytes=2.0 * PARAMETERS if full else 4.0 * ADAPTERS,
    )
    inference = dict(zip(PUBLISHED_BATCH, PUBLISHED_INFERENCE_S, strict=True))
    components = {
        "physics": ComponentProfile("cores", measured({1: LIBERO.physics_s, 64: 64 * LIBERO.physics_s})),
        "render": ComponentProfile("cores", measured({1: LIBERO.render_s, 64: 64 * LIBERO.render_s})),
        "policy": ComponentProfile("accelerators", measured(inference)),
        "learner": learner,
    }
    return Profile("ppo", {"gpu": "H100 80GB"}, components)


def _exchanges(rows: int, full: bool) -> tuple[Exchange, ...]:
    if not full:
        return (Exchange("all_reduce", 4.0 * ADAPTERS, STEPS),)
    passes = rows / MICRO_BATCH
    return (
        Exchange("all_gather", 2.0 * PARAMETERS, 2 * passes, fewest=2 * STEPS),
        Exchange("reduce_scatter", 4.0 * PARAMETERS, STEPS),
    )


def planned(gpus: int, environments: int, full: bool, network: str) -> Plan:
    workflow, profile = workflow_of(environments), profile_of(environments, full)
    return schedulers.plan(workflow, profile, machines(gpus, network), explain=False)


def predicted(gpus: int, environments: int, full: bool, network: str) -> dict[str, Any]:
    """The best plan beside the same work on one GPU, and beside that GPU's share of the work on it."""
    workflow, profile, cluster = workflow_of(environments), profile_of(environments, full), machines(gpus, network)
    best = planned(gpus, environments, full, network)
    share = planned(1, environments // gpus, full, network)
    assert best.prediction is not None and share.prediction is not None
    found = schedulers.scaling(best, workflow, profile, cluster)
    seconds = best.prediction.iteration_s
    return {
        "gpus": gpus,
        "environments": environments,
        "trained": "full" if full else "lora",
        "network": network,
        "predicted_iteration_s": seconds,
        "predicted_decisions_per_s": environments * DECISIONS / seconds,
        "predicted_communication_s": best.prediction.communication_s,
        "predicted_speed_up_over_one_gpu": found.speed_up,
        "predicted_efficiency": found.efficiency,
        "predicted_efficiency_beside_a_share_of_the_work": share.prediction.iteration_s / seconds,
        "bottleneck": found.bottleneck,
        "predicted_gain_of_half_the_time": dict(found.gains),
        "lower_bound_iteration_s": best.prediction.lower_bound_s,
        "plan": {"mode": best.mode, "groups": best.groups, "phases": _devices(best)},
    }


def _devices(plan: Plan) -> list[dict[str, int]]:
    return [{" ".join(p.components): p.count for p in phase.placements} for phase in plan.phases]


def table(rows: list[dict[str, Any]]) -> str:
    """Efficiency beside the same work on one GPU, and beside that GPU's share of it."""
    heads = ("GPUs", "environments", "trained", "network", "iteration", "communication", "efficiency", "beside a share")
    lines = ["| " + " | ".join((*heads, "bottleneck")) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        shown = (
            row["gpus"], row["environments"], row["trained"], row["network"], f"{row['predicted_iteration_s']:.1f} s",
            f"{row['predicted_communication_s']:.2f} s", f"{row['predicted_efficiency']:.0%}",
            f"{row['predicted_efficiency_beside_a_share_of_the_work']:.1%}", row["bottleneck"],
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    return "\n".join(lines)


def main() -> None:
    arguments = tyro.cli(Arguments)
    kinds = [(full, network) for full in (False, True) for network in NETWORKS]
    rows = [
        predicted(gpus, environments, full, network)
        for full, network in kinds
        for gpus in GPUS
        for environments in (gpus * PER_GPU, FIXED)
    ]
    print(f"{table(rows)}\n")
    show_and_write({"prediction": True, "notes": NOTES, "decisions": DECISIONS, "sizes": rows}, arguments.json)


if __name__ == "__main__":
    main()
