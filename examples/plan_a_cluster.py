"""Plan for a cluster that you do not have: which mode, which devices, what limits it.

    python examples/plan_a_cluster.py

Times are measured by `embodied profile CONFIG --out profile.json` and read by `schedulers.load`; here they are numbers
in the text: LIBERO drawn in software, RLinf's published inference of OpenVLA-7B, a learner of 57 ms a decision.
"""

from __future__ import annotations

import schedulers
from schedulers import Cluster, Component, ComponentProfile, Edge, Loop, Node, Plan, Point, Profile, Workflow

ENVIRONMENTS, DECISIONS = 256, 64
WORKFLOW = Workflow(
    "ppo",
    tuple(Component(name) for name in ("physics", "render", "policy", "learner")),
    (
        Edge("physics", "render", "scenes", "micro_batch"),
        Edge("render", "policy", "frames", "micro_batch"),
        Edge("policy", "learner", "trajectories", "barrier"),
    ),
    (Loop(("physics", "render", "policy"), steps=DECISIONS),),
    items=ENVIRONMENTS,
)


def measured(seconds: dict[int, float]) -> tuple[Point, ...]:
    """Seconds of so many environments on one device of the component's pool."""
    return tuple(Point(batch, 1, value, value, value) for batch, value in seconds.items())


PROFILE = Profile(
    "ppo",
    {"gpu": "H100 80GB"},
    {
        "physics": ComponentProfile("cores", measured({1: 0.0065, 64: 0.416})),
        "render": ComponentProfile("cores", measured({1: 0.1, 64: 6.4})),
        "policy": ComponentProfile("accelerators", measured({10: 0.40, 20: 0.64, 30: 0.90, 40: 1.15})),
        "learner": ComponentProfile("accelerators", measured({ENVIRONMENTS: ENVIRONMENTS * DECISIONS * 0.057})),
    },
)


def main(nodes: int = 4) -> Plan:
    cluster = Cluster(tuple(Node(f"node{i}", cores=96, accelerators=8) for i in range(nodes)), link_bytes_per_s=12.5e9)
    best = schedulers.plan(WORKFLOW, PROFILE, cluster)
    print("\n".join(best.why))
    schedulers.save(best, "plan.json")  # `embodied train CONFIG --plan.mode plan.json` runs it, perhaps edited
    return best


if __name__ == "__main__":
    main()
