"""What the planner chooses for each task of a run on a machine of 16 cores and one GPU, from written profiles."""

from __future__ import annotations

from benchmarks.planner import PUBLISHED_BATCH, PUBLISHED_INFERENCE_S
from schedulers import Cluster, Node, Plan, Profile, Workflow
from tests.schedulers.instances import measured, tasks

NEAR = 1.03
MACHINE = Cluster((Node("node0", 16, 1),))
STEPS = 6
"""Of a rollout: enough for who waits for whom."""


def seconds(found: Plan) -> float:
    assert found.prediction is not None
    return found.prediction.iteration_s


def bound_by(policy: str, environments: int = 16) -> tuple[Workflow, Profile]:
    """A light ManiSkill task and one of LIBERO (`benchmarks.tasks_together`): with a 7B policy, whose times are
    published, the first waits for the GPU; with a small one the second for its cores."""
    workflow = tasks(2, [environments, environments], [STEPS, STEPS])
    inference = dict(zip([(b, 1) for b in PUBLISHED_BATCH], PUBLISHED_INFERENCE_S, strict=True))
    if policy == "small":
        inference = {(1, 1): 0.002, (32, 1): 0.01}
    drawn = {"physics": 0.54e-3, "render": 5e-3, "physics-1": 6.5e-3, "render-1": 100e-3}
    components = {name: measured("cores", {(1, 1): s, (64, 1): 64 * s}) for name, s in drawn.items()}
    components["policy"] = measured("accelerators", inference, spreads=False)
    components["learner"] = measured("accelerators", {(2 * environments, 1): 5.0}, spreads=False)
    return workflow, Profile("tasks", {}, components)
