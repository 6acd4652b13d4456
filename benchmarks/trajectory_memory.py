"""Assembling a rollout of `openvla_ppo_maniskill`: 64 environments, 80 decisions, one frame of 224 x 224 pixels each.

    python benchmarks/trajectory_memory.py

Before the trajectory memory each decision kept a copy of its frames, and a rollout's end joined the copies and put them
in order. That is `join_inputs` here, on the same decisions. Now the frames lie where the learner reads them, and
assembling makes a table of rows. Memory is what the process holds by itself or in shared memory, beyond what it held
before the rollout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro

from embodied.trajectories.batch import GroupDecision, assemble, join_inputs, table_of_decisions
from embodied.trajectories.memory import MemoryLayout, MemoryShape, TrajectoryMemory
from embodied_bench.settings import show_and_write
from policies.contract import Action, Inputs
from sim_farm.shared_memory.frame_memory import FrameMemory

ENVS, DECISIONS, SIZE, GROUPS, TOKENS = 64, 80, 224, 2, 7
INSTRUCTION = "pick up the red cube and move it to the green goal"


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    repeats: int = 5
    json: Path | None = None
    """Write the result to this file."""


def used_bytes() -> int:
    """Memory of this process: its own and its part of what is shared."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Pss:")))


def action_of(rows: int) -> Action:
    tokens = torch.zeros(rows, TOKENS, dtype=torch.int64)
    return Action(torch.zeros(rows, 1, TOKENS), torch.zeros(rows, 1, TOKENS), torch.zeros(rows), {"tokens": tokens})


def inputs_of(rows: int, frames: torch.Tensor | None = None) -> Inputs:
    pictures = {} if frames is None else {"base": frames}
    return Inputs(frames=pictures, instruction=(INSTRUCTION,) * rows)


def in_memory(repeats: int) -> dict[str, float]:
    """Write a rollout as the workers do, assemble it, and read every row once in micro-batches of 8."""
    before = used_bytes()
    frames = FrameMemory.create((DECISIONS + 1) * ENVS, 1, SIZE, shared=True)
    shape = MemoryShape(DECISIONS + 1, ENVS, ("base",))
    layout = MemoryLayout.of(shape, inputs_of(1), action_of(1))
    memory = TrajectoryMemory.create(layout, frames, shared=True)
    each = ENVS // GROUPS
    groups: list[list[GroupDecision]] = [[] for _ in range(GROUPS)]
    zero = np.zeros(each, np.float32)
    for t in range(DECISIONS):
        for group in range(GROUPS):
            flat = t * ENVS + group * each + np.arange(each)
            frames.frames[flat] = t  # the frame writer
            memory.write_decision(flat, inputs_of(each), action_of(each))
            ended: dict[str, np.ndarray] = {name: zero.astype(bool) for name in ("success", "terminated", "truncated")}
            step: dict[str, np.ndarray] = {
                "reward": zero,
                "step_reward": zero[:, None],
                "executed": zero.astype(np.int64),
            }
            memory.write_outcome(flat, step | ended)
            envs = group + GROUPS * np.arange(each)
            groups[group].append(GroupDecision(flat, envs, np.ones(each, bool), *np.zeros((2, each), np.int64)))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        table, mask = table_of_decisions(groups, ENVS)
        batch = assemble(memory, table, mask, {}, torch.zeros(ENVS), 0, None, None)
        times.append(time.perf_counter() - begin)
    peak = used_bytes()
    for index in torch.arange(DECISIONS * ENVS).split(8):
        batch.decisions.select(index).inputs()
        peak = max(peak, used_bytes())
    found = {"assembly_s": median(times), "peak_bytes": float(peak - before), "rollout_bytes": float(memory.nbytes)}
    copies = {"frame_copies": memory.counts.copied / memory.counts.read}
    memory.close()
    frames.close()
    return found | copies


def joined(repeats: int) -> float:
    """Seconds to join the copies of the same decisions and put them in order."""
    each = ENVS // GROUPS
    parts = [
        inputs_of(each, torch.full((each, SIZE, SIZE, 3), t, dtype=torch.uint8))
        for _ in range(GROUPS)
        for t in range(DECISIONS)
    ]
    offsets = np.arange(GROUPS * DECISIONS).reshape(GROUPS, DECISIONS) * each
    order = np.empty((DECISIONS, ENVS), np.int64)
    for group in range(GROUPS):
        order[:, group::GROUPS] = offsets[group][:, None] + np.arange(each)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        join_inputs(parts, torch.from_numpy(order.flatten()))
        times.append(time.perf_counter() - begin)
    return median(times)


def main(settings: Settings) -> None:
    memory = in_memory(settings.repeats)
    joined_s = joined(settings.repeats)
    result = {
        **memory,
        "joined_s": joined_s,
        "share_of_joined": memory["assembly_s"] / joined_s,
        "peak_over_rollout": memory["peak_bytes"] / memory["rollout_bytes"],
        "environments": ENVS,
        "decisions": DECISIONS,
    }
    show_and_write(result, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings))
