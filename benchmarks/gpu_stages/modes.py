"""Stage `modes`: what `embodied compare` finds of a run of the model: each mode measured beside predicted, and whether
the planner's choice was the best one. It measures a profile first, as `embodied profile` does."""

from __future__ import annotations

import json
import os
from typing import cast

from benchmarks.gpu_stages.checkpoints import write_checkpoint
from benchmarks.gpu_stages.runs import LIGHT_TASK, Runtime, vla_config
from benchmarks.gpu_stages.work import Figures, Work
from embodied.commands.compare import compare_command
from embodied.doctor.checks import vulkan_device

MANISKILL = {"task": "maniskill/PickCube-v1", "control_mode": "pd_ee_delta_pose"}
"""As `openvla_ppo_maniskill` has it."""
DECISIONS, TINY_DECISIONS, ROWS = 4, 2, 64


def modes(work: Work) -> Figures:
    """Two groups of an environment for each core, a few decisions of each."""
    cores = len(os.sched_getaffinity(0))
    folder = work.scratch / "checkpoint"
    write_checkpoint(folder, work.model, work.device, "float32" if work.tiny else "bfloat16")
    task = {"task": LIGHT_TASK} if work.tiny or vulkan_device() is None else MANISKILL
    env = {**task, "num_envs": 2 * cores, "max_episode_steps": 16}
    decisions = TINY_DECISIONS if work.tiny else DECISIONS
    rows = decisions * 2 * cores
    optim = {"minibatch": min(rows, ROWS), "micro_batch": min(rows, 16)}
    config = vla_config(
        work, folder, cast(Runtime, work.variant), env=env, rollout={"decisions": decisions}, optim=optim
    )
    out = work.scratch / "compare"
    found = compare_command(config, f"{work.model}, {task['task']}, {work.variant}", out, None, 1)
    profile = json.loads((out / "profile.json").read_text())
    return found | {"profile": profile, "largest_error": max(abs(row["error"]) for row in found["modes"])}
