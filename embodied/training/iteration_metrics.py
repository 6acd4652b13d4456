"""The metrics of one iteration: what the record of a run has in a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np

from embodied.execution.iteration import Iteration
from embodied.metric import Metric
from embodied.rollout.rollout_summary import RolloutSummary
from embodied.training.checkpoints import RECENT, Position
from embodied.workflows.run_spec import RunSpec
from sim_farm.catalogue import exact_replay

SHOWN_FAULTS = 3
"""Faults, and places of others, that a note names."""
COUNTS = (
    Metric("iteration", "iterations", "Iterations that are done; in `embodied sft`, optimiser steps."),
    Metric(
        "env_steps",
        "env steps",
        "Env steps that were simulated; in `embodied sft`, and under `env.delay`, those learned from.",
    ),
    Metric("wall_s", "s", "Time since the run began, pauses between sessions left out."),
)
"""Metrics that every row has."""
METRICS = (
    Metric("env/episodes", "episodes", "Episodes that ended in the rollout."),
    Metric("env/success_once", "share", "Those of them that were solved at some env step."),
    Metric("env/success_once/<task>", "share", "The same of each task of a run that has several."),
    Metric("env/success_recent", "share", "Solved episodes among the last 100; empty before there are as many."),
    Metric("env/return", "reward", "Mean return of the episodes that ended."),
    Metric("env/return_recent", "reward", "Mean return of the last 100 episodes; empty before there are as many."),
    Metric("env/episode_len", "env steps", "Mean length of the episodes that ended."),
    Metric("farm/env_steps_per_s", "env steps/s", "Env steps over the time of the whole iteration."),
    Metric("farm/rollout_env_steps_per_s", "env steps/s", "Env steps over the time of the rollout."),
    Metric("farm/physics_busy_s", "s", "Time in which physics workers simulated, summed over them."),
    Metric("farm/render_busy_s", "s", "Time in which frames were drawn, summed over the workers that draw."),
    Metric("farm/wire_bytes_per_env_step", "bytes", "Traffic with physics workers on other machines."),
    Metric("farm/frame_copies", "copies", "Copies of a frame on its way from renderer to device."),
    Metric("lag/updates", "updates", "Updates by which the acting weights were behind the learner's."),
    Metric("time/iteration_s", "s", "Time of the iteration."),
    Metric("time/physics", "share", "Share of the iteration's time spent waiting for physics."),
    Metric("time/render", "share", "Share of the iteration's time spent waiting for frames."),
    Metric("time/policy", "share", "Share of the iteration's time spent on inference."),
    Metric("time/learner", "share", "Share of the iteration's time spent on the update."),
    Metric("time/transport", "share", "Share of the iteration's time spent moving data."),
    Metric("time/idle", "share", "Share of the iteration's time that none of these explains."),
    Metric(
        "time/other_programs",
        "share",
        "Share of the cores' time used by other programs, sampled every few seconds.",
    ),
)


def iteration_row(
    run: RunSpec,
    position: Position,
    iteration: Iteration,
    checkpoints: Mapping[str, float],
    *,
    has_success: bool,
    other_programs: float | None,
) -> dict[str, float]:
    """The row of the iteration that ends at `position`, with the seconds that `checkpoints` took. Where the tasks have
    no success, nothing in it is about that. `other_programs`: the share that they used, None where it is not known."""
    summary, learned, wall_s = iteration.summary, iteration.learned, iteration.wall_s
    episodes = summary.episodes
    returns = [e.total_reward for e in episodes if np.isfinite(e.total_reward)]
    nothing = float("nan")
    return {
        "iteration": position.iteration,
        "env_steps": position.env_steps,
        "wall_s": position.wall_s,
        "env/episodes": len(episodes),
        **(_success(run, position, summary) if has_success else {}),
        "env/return": float(np.mean(returns)) if returns else nothing,
        "env/return_recent": _mean_of_recent(position.recent_returns),
        "env/episode_len": float(np.mean([e.length for e in episodes])) if episodes else nothing,
        "farm/env_steps_per_s": summary.env_steps / wall_s,
        "farm/rollout_env_steps_per_s": summary.env_steps / summary.wall_s,
        "farm/physics_busy_s": summary.clock.physics_busy,
        "farm/render_busy_s": summary.clock.render_busy,
        "farm/wire_bytes_per_env_step": summary.wire_bytes / max(summary.env_steps, 1),
        **_frame_copies(summary, learned),
        "lag/updates": position.iteration - 1 - summary.version,
        "time/iteration_s": wall_s,
        **checkpoints,
        **_shares(summary, learned["learner/update_s"], wall_s),
        **learned,
        "time/other_programs": nothing if other_programs is None else other_programs,
    }


def _success(run: RunSpec, position: Position, summary: RolloutSummary) -> dict[str, float]:
    solved = [episode.success for episode in summary.episodes]
    return {
        "env/success_once": float(np.mean(solved)) if solved else math.nan,
        "env/success_recent": _mean_of_recent(position.recent),
        **_of_tasks(summary, run),
    }


def _mean_of_recent(values: Collection[float]) -> float:
    return float(np.mean(list(values))) if len(values) == RECENT else math.nan


def _of_tasks(summary: RolloutSummary, run: RunSpec) -> dict[str, float]:
    """Success of each task in a run of several tasks; unknown for a task in which no episode ended."""
    tasks = [task.env.task for task in run.tasks]
    if len(tasks) == 1:
        return {}
    solved: dict[str, list[bool]] = {task: [] for task in tasks}
    for episode in summary.episodes:
        solved[tasks[episode.task]].append(episode.success)
    return {f"env/success_once/{task}": float(np.mean(each)) if each else math.nan for task, each in solved.items()}


def left_out(count: int, summary: RolloutSummary, run: RunSpec) -> str:
    """A note on episodes in which a reward or an observation was not finite, or which a lost worker took with it, and
    which the learner leaves out."""
    tasks = run.tasks
    ended = [episode for episode in summary.episodes if not np.isfinite(episode.total_reward)]
    unknown = [episode for episode in ended if not episode.fault]
    places = "; ".join(
        f"column {episode.env}, {tasks[episode.task].env.task}" for episode in unknown[:SHOWN_FAULTS]
    ) + (f"; {len(unknown) - SHOWN_FAULTS} more" if len(unknown) > SHOWN_FAULTS else "")
    exact = all(exact_replay(task.env.task) for task in tasks)
    lost = "" if exact else ", or that a lost worker took with it"
    where = f" ({places})" if places else ""
    faults = Counter(episode.fault for episode in ended if episode.fault).most_common(SHOWN_FAULTS)
    why = "".join(f"\n  {fault}" + (f" ({times} times)" if times > 1 else "") for fault, times in faults)
    return f"left out {count} episodes in which a reward or an observation was not finite{lost}{where}{why}"


def _frame_copies(summary: RolloutSummary, learned: Mapping[str, float]) -> dict[str, float]:
    """Copies of frames between renderer and device, per frame that was read from the trajectory memory."""
    read = summary.frames.read + learned.get("learner/frames_read", 0)
    copied = summary.frames.copied + learned.get("learner/frame_copies", 0)
    return {"farm/frame_copies": copied / read} if read else {}


def _shares(summary: RolloutSummary, update_s: float, wall_s: float) -> dict[str, float]:
    """Shares of the iteration's wall time, as seen from its critical path; they add up to one, or to more
    where a rollout runs beside the update.

    The policy worker either infers, moves data, or waits for the farm; waiting is physics and render in the
    proportion in which their workers were busy. What neither rollout nor update explains is idle.
    """
    clock = summary.clock
    busy = clock.physics_busy + clock.render_busy
    drawing = clock.render_busy / busy if busy else 0.0
    parts = {
        "physics": clock.waiting * (1 - drawing),
        "render": clock.waiting * drawing,
        "policy": clock.acting,
        "learner": update_s,
        "transport": clock.transport,
    }
    shares = {f"time/{name}": seconds / wall_s for name, seconds in parts.items()}
    return {**shares, "time/idle": max(0.0, 1 - sum(shares.values()))}
