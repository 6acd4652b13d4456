"""The runs that stages measure: a configuration, and an assignment that says who shares a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_stages.work import Work
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from policies.openvla.sizes import CHUNK, find

Runtime = Literal["ray", "inline"]
LIGHT_TASK = "tabletop/reach"
"""Needs neither Vulkan nor assets."""


def vla_config(work: Work, checkpoint: Path, runtime: Runtime, lora_rank: int = 32, **sections: Any) -> Config:
    """A run of the model, whose files are in `checkpoint`, on `LIGHT_TASK` unless `sections` say otherwise."""
    kind, _ = find(work.model)
    env = {"task": LIGHT_TASK, "cameras": 1, "image_size": 56 if work.tiny else 224, "num_envs": 2}
    options = {
        "checkpoint": str(checkpoint),
        "unnorm_key": "demonstrations",
        "dtype": "float32" if work.tiny else "bfloat16",
        "lora_rank": lora_rank,
    }
    policy = {
        "kind": kind,
        "reads": ["images", "instruction"],
        "chunk": CHUNK if kind == "openvla_oft" else 1,
        "device": work.device,
        "options": options,
    }
    return parse_config(
        {
            "seed": 1,
            "env": env | sections.get("env", {}),
            "policy": policy,
            "rollout": {"decisions": 2} | sections.get("rollout", {}),
            "loss": {"ratio_unit": "action", "value_clip": None},
            "optim": {"epochs": 1, "policy_lr": 1e-5, "adam_eps": 1e-8, "recompute": True} | sections.get("optim", {}),
            "runtime": {"mode": runtime},
        },
        "benchmarks/gpu_stages",
    )


def on_one_core(one_process: bool, unload: bool = False) -> Assignment:
    """One physics worker, which draws; policy worker and learner where `policy.device` says, in one process or two."""
    core = min(os.sched_getaffinity(0))
    farm = FarmAssignment(groups=2, physics=(core,), physics_nodes=(HERE,))
    components = {"policy": (Affinity(),), "learner": (Affinity(),)}
    return Assignment("collocated", (farm,), components, (0,) if one_process else (), unload=unload)
