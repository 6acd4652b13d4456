"""The metrics of one iteration: what the record of a run has in a row."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from embodied.config.schema import Config
from embodied.rollout.rollout_summary import RolloutSummary
from embodied.training.position import RECENT, Position
from embodied.workflows.sizes import tasks_of


def iteration_row(
    config: Config,
    position: Position,
    summary: RolloutSummary,
    learned: dict[str, float],
    wall_s: float,
    checkpoints: Mapping[str, float],
) -> dict[str, float]:
    """The row of the iteration that ends at `position` and took `wall_s` seconds, with what `checkpoints` took."""
    episodes = summary.episodes
    returns = [e.total_reward for e in episodes if np.isfinite(e.total_reward)]
    nothing = float("nan")
    return {
        "iteration": position.iteration,
        "env_steps": position.env_steps,
        "wall_s": position.wall_s,
        "env/episodes": len(episodes),
        "env/success_once": float(np.mean([e.success for e in episodes])) if episodes else nothing,
        "env/success_recent": float(np.mean(position.recent)) if len(position.recent) == RECENT else nothing,
        **_of_tasks(summary, config),
        **summary.curriculum,
        "env/return": float(np.mean(returns)) if returns else nothing,
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
    }


def _of_tasks(summary: RolloutSummary, config: Config) -> dict[str, float]:
    """Success of each task of a run that has several; of one of which no episode ended it is not known."""
    tasks = [own.env.task for own in tasks_of(config)]
    if len(tasks) == 1:
        return {}
    solved: dict[str, list[bool]] = {task: [] for task in tasks}
    for episode in summary.episodes:
        solved[tasks[episode.task]].append(episode.success)
    return {f"env/success_once/{task}": float(np.mean(found)) if found else math.nan for task, found in solved.items()}


def left_out(count: int, summary: RolloutSummary, config: Config) -> str:
    """What to say of episodes in which a reward or an observation was not finite: the learner leaves out what a rollout
    has of them."""
    tasks = tasks_of(config)
    ended = [episode for episode in summary.episodes if not np.isfinite(episode.total_reward)]
    places = ", ".join(f"column {episode.env}, {tasks[episode.task].env.task}" for episode in ended)
    return f"left out {count} episodes in which a reward or an observation was not finite" + (
        f" ({places})" if places else ""
    )


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
