"""`metaworld/<task>`: the 50 manipulation tasks of Meta-World, with the goal in the state (`reach-v3`) or without
(`reach-v3-goal-hidden`, as its meta-learning benchmarks have it)."""

from metaworld_farm.simulator import MetaWorldPhysics, MetaWorldRenderer, task_names
from sim_farm.backends.mujoco_gl import drawn_by
from sim_farm.contract import Backend

BACKEND = Backend("metaworld", MetaWorldPhysics, MetaWorldRenderer, tasks=task_names, drawn_by=drawn_by)
