"""Watches of a run: each looks at the rows of metrics, and says when the run unlearns, learns nothing or cannot learn.

`see` takes an iteration's row, of a resumed run those of the record first, and returns a note or None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.statistics import wilson
from embodied.trajectories.batch import FAULTY, EndedEpisode


@dataclass
class Milestones:
    """Wall time and env steps after which success has reached a level for the first time."""

    reached: dict[str, float] = field(default_factory=dict)
    """`success_0.9_wall_s`, `success_0.9_env_steps` and so on."""

    def see(self, row: Mapping[str, Any]) -> None:
        recent = row.get("env/success_recent")
        if recent is None:  # NaN in metrics.jsonl
            return
        for level in (0.5, 0.9, 0.95):
            if recent >= level and f"success_{level}_wall_s" not in self.reached:
                self.reached[f"success_{level}_wall_s"] = row["wall_s"]
                self.reached[f"success_{level}_env_steps"] = row["env_steps"]


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
"""Iterations in a row without learning after which a run says so, and after which it ends if every episode was
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

    def see(self, row: Mapping[str, Any]) -> str | None:
        """Look at an iteration's row of metrics. What to say, once for each standstill."""
        self._cause = _unlearned(row, self.config)
        self.learned |= not self._cause
        self.iterations = self.iterations + 1 if self._cause else 0
        return self._sentence() if self.iterations == STANDSTILL else None

    def at_end(self) -> str | None:
        """The warning at the end of a run; None where its last iterations have learned."""
        if self.iterations < STANDSTILL and (self.learned or not self.iterations):
            return None
        return ("nothing was learned: " if not self.learned else "") + self._sentence()

    def _sentence(self) -> str:
        last = "the last iteration" if self.iterations == 1 else f"the last {self.iterations} iterations"
        return f"{last} did not change the policy: {self._cause}"


def _unlearned(row: Mapping[str, Any], config: Config) -> str:
    """Cause why an iteration left the policy unchanged, with the usual remedy; empty if the policy changed."""
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
    """Advice if all episodes of each episode group had the same outcome."""
    success, settings = row.get("env/success_once"), config.advantage
    if success == 1:
        return "Every episode is solved: take a harder task, or end the run (--stop-at)"
    ways = []
    if settings.overlong == "masked":
        ways.append("count episodes that reach their limit (--advantage.overlong None)")
    if settings.keep_rates is not None:
        ways.append(f"keep more groups than those of advantage.keep_rates {settings.keep_rates}")
    if success == 0:
        ways.append("begin from a policy that solves some (`embodied sft`, then --policy.init RUN)")
    else:
        ways.append("sample more widely")
    ways.append("take an easier task")
    ways.append(f"let more episodes be compared (--rollout.episode-group {2 * config.rollout.episode_group})")
    return f"The episodes of each came out alike: {', or '.join(ways)}"


# --- A run from whose episodes nothing can be learned ends with the reason.


@dataclass
class BrokenWatch:
    """Ends a run in which every episode is broken. A fault that the task has named is certain after `FAULTY` episodes;
    numbers that are not finite may come from a lost worker, and have to last for `STANDSTILL` iterations
    (docs/decisions/0205-one-watch-for-broken-episodes.md)."""

    _iterations: int = 0
    """Number of latest iterations in a row in which every episode was broken."""
    _some_whole: bool = False
    """True if an iteration had an episode that was whole."""
    _faulty: int = 0
    """Episodes of the last iterations, in which every judged one was broken by a fault."""

    def see(self, row: Mapping[str, Any]) -> None:
        broken = _only_broken(row)
        self._iterations = self._iterations + 1 if broken else 0
        self._some_whole |= not broken

    def end(self, episodes: Sequence[EndedEpisode], without: str, *, last: bool) -> None:
        """After `see`: raise `UserError` where nothing can be learned, with the fault of the iteration's episodes, or
        with the note `without` on those that were left out. `last`: no iteration follows."""
        judged = [episode.fault for episode in episodes if episode.fault or not episode.truncated]
        self._faulty = self._faulty + len(judged) if all(judged) else 0
        if judged and self._faulty >= FAULTY:
            raise UserError(f"the last {self._faulty} episodes that the task ended were all broken: {judged[-1]}")
        if self._iterations >= STANDSTILL or (last and self._iterations and not self._some_whole):
            count = self._iterations
            raise UserError(
                f"nothing can be learned: every episode of {count} iterations was broken. The last: {without}"
            )


def _only_broken(row: Mapping[str, Any]) -> bool:
    """True if episodes ended in the iteration, and a number of each was not finite."""
    mean = row.get("env/return")
    return bool(row.get("env/episodes")) and (mean is None or math.isnan(mean))
