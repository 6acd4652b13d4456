"""The metrics of one iteration: what the record of a run has in a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.iteration import Iteration
from embodied.metric import Metric
from embodied.rollout.rollout_summary import RolloutSummary
from embodied.statistics import wilson
from embodied.training.checkpoints import RECENT, Position
from embodied.trajectories.batch import FAULTY
from embodied.workflows.sizes import tasks_of
from sim_farm.catalogue import exact_replay

SHOWN_FAULTS = 3
"""Faults, and places of others, that a note names."""
COUNTS = (
    Metric("iteration", "iterations", "Iterations that are done; in `embodied sft`, optimiser steps."),
    Metric("env_steps", "env steps", "Env steps that were simulated; in `embodied sft`, those learned from."),
    Metric("wall_s", "s", "Time since the run began, pauses between sessions left out."),
)
"""What every row has."""
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
    Metric("time/physics", "share", "Of the iteration's time, waiting for physics."),
    Metric("time/render", "share", "Of the iteration's time, waiting for frames."),
    Metric("time/policy", "share", "Of the iteration's time, inference."),
    Metric("time/learner", "share", "Of the iteration's time, the update."),
    Metric("time/transport", "share", "Of the iteration's time, moving data."),
    Metric("time/idle", "share", "Of the iteration's time, what none of these explains."),
    Metric(
        "time/other_programs",
        "share",
        "Share of the cores' time used by other programs, sampled every few seconds.",
    ),
)


def iteration_row(
    config: Config, position: Position, iteration: Iteration, checkpoints: Mapping[str, float], *, has_success: bool
) -> dict[str, float]:
    """The row of the iteration that ends at `position`, with the seconds that `checkpoints` took. Where the tasks have
    no success, nothing in it is about that."""
    summary, learned, wall_s = iteration.summary, iteration.learned, iteration.wall_s
    episodes = summary.episodes
    returns = [e.total_reward for e in episodes if np.isfinite(e.total_reward)]
    nothing = float("nan")
    return {
        "iteration": position.iteration,
        "env_steps": position.env_steps,
        "wall_s": position.wall_s,
        "env/episodes": len(episodes),
        **(_success(config, position, summary) if has_success else {}),
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
    }


def _success(config: Config, position: Position, summary: RolloutSummary) -> dict[str, float]:
    solved = [episode.success for episode in summary.episodes]
    return {
        "env/success_once": float(np.mean(solved)) if solved else math.nan,
        "env/success_recent": _mean_of_recent(position.recent),
        **_of_tasks(summary, config),
    }


def _mean_of_recent(values: Collection[float]) -> float:
    return float(np.mean(list(values))) if len(values) == RECENT else math.nan


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
    """A note on episodes in which a reward or an observation was not finite, or which a lost worker took with it, and
    which the learner leaves out."""
    tasks = tasks_of(config)
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


class FaultWatch:
    """Watches for a fault of the task's that breaks every episode, from which nothing is learned."""

    def __init__(self) -> None:
        self._faulty = 0
        """Episodes of the last iterations, in which every judged one was broken by a fault."""

    def see(self, summary: RolloutSummary) -> None:
        """Raise `UserError` with the fault where whole iterations, of `FAULTY` episodes or more, were broken by one."""
        judged = [episode.fault for episode in summary.episodes if episode.fault or not episode.truncated]
        self._faulty = self._faulty + len(judged) if all(judged) else 0
        if judged and self._faulty >= FAULTY:
            raise UserError(f"the last {self._faulty} episodes that the task ended were all broken: {judged[-1]}")


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


# --- A run that unlearns what it had learned says so, with what usually explains it.


PATIENCE = 5
"""Iterations in a row for which success must be below what it was."""
EXPLAINS = ("approx_kl", "clip_fraction", "entropy", "grad_norm", "explained_variance")
"""Metrics of the learner that a warning of fallen success shows."""


@dataclass
class CollapseWatch:
    """Compares the success of the last training episodes with the best that it has been.

    It has fallen where the 95% Wilson intervals of the two do not meet.
    """

    episodes: int
    """Number of episodes that a success rate is over."""
    best: float = 0.0
    best_iteration: int = 0
    _below: int = 0
    _reported: bool = field(default=False, repr=False)

    def see(self, row: Mapping[str, Any]) -> str | None:
        """Look at an iteration's row of metrics. What to say, once for each fall."""
        recent = row.get("env/success_recent")
        if recent is None or recent != recent:
            return None
        if recent >= self.best:
            self.best, self.best_iteration = recent, int(row["iteration"])
            self._below, self._reported = 0, False
            return None
        low, high = self._interval(recent)
        best_low, best_high = self._interval(self.best)
        self._below = self._below + 1 if high < best_low else 0
        if self._below < PATIENCE or self._reported:
            return None
        self._reported = True
        explaining = {name: row.get(f"learner/{name}") for name in EXPLAINS}
        beside = ", ".join(f"{name} {value:.3g}" for name, value in explaining.items() if value is not None)
        return (
            f"success has fallen: {recent:.0%} ({low:.0%} to {high:.0%}) of the last {self.episodes} episodes, for "
            f"{PATIENCE} iterations, and {self.best:.0%} ({best_low:.0%} to {best_high:.0%}) at iteration "
            f"{self.best_iteration}; {beside}. A smaller optim.policy_lr or optim.target_kl is the usual way on, "
            "from a checkpoint of that time (--policy.init RUN/checkpoints/NNNNNN)"
        )

    def _interval(self, rate: float) -> tuple[float, float]:
        return wilson(round(rate * self.episodes), self.episodes)


# --- A run that learns nothing says so, with the cause and what is the usual way on.


STANDSTILL = 3
"""Iterations in a row without learning after which it is said, and after which a run ends of which every episode is
broken."""


@dataclass
class StandstillWatch:
    """Counts the iterations in a row in which the policy was not changed, by their rows of metrics."""

    config: Config
    iterations: int = 0
    """Those of them that were the last ones."""
    learned: bool = False
    """True if an iteration has changed the policy."""
    _cause: str = ""
    _last: dict[str, Any] = field(default_factory=dict)

    def see(self, row: Mapping[str, Any]) -> str | None:
        """Look at an iteration's row of metrics. What to say, once for each standstill."""
        self._cause, self._last = _unlearned(row, self.config), dict(row)
        self.learned |= not self._cause
        self.iterations = self.iterations + 1 if self._cause else 0
        return self._sentence() if self.iterations == STANDSTILL else None

    def all_broken(self, last: bool) -> bool:
        """True if every episode of several iterations was broken, or of all that there were, where none follows."""
        lasting = self.iterations >= STANDSTILL or (last and not self.learned)
        return lasting and bool(self.iterations) and _only_broken(self._last)

    def at_end(self) -> str | None:
        """The warning at the end of a run; None where its last iterations have learned."""
        if self.iterations < STANDSTILL and (self.learned or not self.iterations):
            return None
        return ("nothing was learned: " if not self.learned else "") + self._sentence()

    def _sentence(self) -> str:
        last = "the last iteration" if self.iterations == 1 else f"the last {self.iterations} iterations"
        return f"{last} did not change the policy: {self._cause}"


def _only_broken(row: Mapping[str, Any]) -> bool:
    """True if episodes ended in the iteration, and a number of each was not finite."""
    mean = row.get("env/return")
    return bool(row.get("env/episodes")) and (mean is None or math.isnan(mean))


def _unlearned(row: Mapping[str, Any], config: Config) -> str:
    """Cause for which an iteration has not changed the policy, with the usual way on; empty where it has."""
    if "learner/steps" not in row:  # of a record that does not say it
        return ""
    if _only_broken(row):
        return (
            f"all {row['env/episodes']:.0f} episodes were left out, since a reward or an observation was not finite. "
            "Mend the task, or its reward"
        )
    if config.optim.policy_lr == 0:
        return "optim.policy_lr is 0. Set it above 0 (--optim.policy-lr 3e-4)"
    if row["learner/steps"] and row.get("learner/grad_norm") != 0:
        return ""
    if row.get("learner/stopped_by_kl"):
        return "optim.target_kl ended the update before its first optimiser step. Raise it, or leave it out"
    if row.get("learner/informative_groups") != 0:
        taken = "no optimiser step was taken" if not row["learner/steps"] else "the gradient was zero"
        return (
            f"{taken}. Every episode counted alike ({_outcomes(row)}), or all were masked: begin from a policy that "
            "solves some of them (--policy.init RUN), or take an easier task or a denser reward"
        )
    return f"no episode group was informative ({_outcomes(row)}), so that no optimiser step was taken. " + _way_on(
        row, config
    )


def _outcomes(row: Mapping[str, Any]) -> str:
    success, mean = row.get("env/success_once"), row.get("env/return")
    solved = "" if success is None or math.isnan(success) else f"{success:.0%} of the episodes solved, "
    return f"{solved}mean return {'unknown' if mean is None else f'{mean:.3g}'}"


def _way_on(row: Mapping[str, Any], config: Config) -> str:
    """What to do where all episodes of each episode group came out alike."""
    success, settings = row.get("env/success_once"), config.advantage
    if success == 1:
        return "Every episode is solved: take a harder task, or end the run (--stop-at-success)"
    ways = []
    if settings.mask_truncated:
        ways.append("count episodes that reach their limit (--advantage.no-mask-truncated)")
    if settings.keep_rates is not None:
        ways.append(f"keep more groups than those of advantage.keep_rates {settings.keep_rates}")
    if success == 0:
        ways.append("begin from a policy that solves some (`embodied sft`, then --policy.init RUN)")
    else:
        ways.append("sample more widely")
    ways.append("take an easier task")
    ways.append(f"let more episodes be compared (--rollout.episode-group {2 * config.rollout.episode_group})")
    return f"The episodes of each came out alike: {', or '.join(ways)}"
