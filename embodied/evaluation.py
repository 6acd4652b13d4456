"""Evaluation: a fixed list of episodes, each exactly once, and the success rate with its interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest

from embodied.noise import EVALUATION, SamplingNoise
from embodied.trajectories import to_inputs
from policies.contract import Policy
from sim_farm.contract import EpisodeSpec
from sim_farm.episodes import ListedEpisodes
from sim_farm.farm import Farm
from sim_farm.observations import Observations


@dataclass(frozen=True)
class EpisodeResult:
    """One evaluated episode; `spec` and `actions` are all that is needed to see it again."""

    trial: int
    spec: EpisodeSpec
    success: bool
    """Solved at any env step."""
    total_reward: float
    length: int
    actions: np.ndarray
    """[length, A] as executed."""


class Evaluator:
    """Runs a policy over a farm whose episodes are listed."""

    def __init__(self, policy: Policy, farm: Farm, reads: Sequence[str], seed: int, greedy: bool) -> None:
        self.policy, self.farm = policy, farm
        self._reads, self._greedy = tuple(reads), greedy
        episodes = farm.spec.episodes
        assert isinstance(episodes, ListedEpisodes)
        self._episodes = episodes
        # Keyed by trial, so that sampling does not depend on how trials are dealt out.
        self._noise = SamplingNoise(seed, policy.noise_dim, EVALUATION)
        self._return = np.zeros(farm.spec.num_envs)
        self._solved = np.zeros(farm.spec.num_envs, np.bool_)
        self._actions: list[list[np.ndarray]] = [[] for _ in range(farm.spec.num_envs)]
        self._submitted = [False] * farm.spec.stages
        self._begun = False

    def advance(self, budget_s: float, deadline_s: float) -> list[EpisodeResult]:
        """Go on for about `budget_s` seconds (or to the end) and return the episodes that ended meanwhile."""
        torch.set_num_threads(1)
        stages = range(self.farm.spec.stages)
        if not self._begun:
            for stage in stages:
                self.farm.reset(stage)
            self._submitted = [True] * len(stages)
            self._begun = True
        results: list[EpisodeResult] = []
        begin = time.monotonic()
        while any(self._submitted) and time.monotonic() - begin < budget_s:
            for stage in stages:
                if self._submitted[stage]:
                    results += self._turn(stage, deadline_s)
        return results

    def _turn(self, stage: int, deadline_s: float) -> list[EpisodeResult]:
        """Collect the stage, note what ended, and decide again if any of its episodes goes on."""
        seen = self.farm.collect(stage, deadline_s)
        ended = self._note(seen)
        if not seen.active.any():
            self._submitted[stage] = False
            return ended
        inputs = to_inputs(seen, self._reads, self._episodes)
        noise = None
        if not self._greedy:
            trials = np.array(
                [self._episodes.trial(e, k) for e, k in zip(seen.envs.tolist(), seen.episode.tolist(), strict=True)]
            )
            noise = torch.from_numpy(self._noise.draw(trials, np.zeros_like(trials), seen.episode_step))
        chunk = self.policy.act(inputs, noise).chunk.numpy()
        for row, env in enumerate(seen.envs.tolist()):
            if seen.active[row]:
                self._actions[env].append(chunk[row])
        self.farm.submit(stage, chunk)
        return ended

    def _note(self, seen: Observations) -> list[EpisodeResult]:
        self._return[seen.envs] += seen.reward.sum(1)
        self._solved[seen.envs] |= seen.success.any(1)
        over = seen.terminated | seen.truncated
        results = []
        for row in np.flatnonzero(over).tolist():
            env, episode = int(seen.envs[row]), int(seen.episode[row]) - 1
            unused = self.farm.spec.chunk - int(seen.steps[row])
            actions = np.concatenate(self._actions[env])
            actions = actions[: len(actions) - unused]
            trial = self._episodes.trial(env, episode)
            results.append(
                EpisodeResult(
                    trial,
                    self._episodes.specs[trial],
                    bool(self._solved[env]),
                    float(self._return[env]),
                    len(actions),
                    actions,
                )
            )
            self._actions[env] = []
            self._return[env] = 0
            self._solved[env] = False
        return results


def summarise(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Success with its 95% Wilson interval, mean length and return."""
    solved = sum(result.success for result in results)
    interval = binomtest(solved, len(results)).proportion_ci(method="wilson")
    return {
        "episodes": len(results),
        "success_rate": solved / len(results),
        "success_low": float(interval.low),
        "success_high": float(interval.high),
        "episode_len": float(np.mean([result.length for result in results])),
        "return": float(np.mean([result.total_reward for result in results])),
    }


def run_to_end(
    advance: Callable[[float], list[EpisodeResult]], episodes: int, tell: Callable[[int], Any]
) -> list[EpisodeResult]:
    """Call `advance` until every episode is there; `tell` hears how many more are. In the order of trials."""
    results: list[EpisodeResult] = []
    while len(results) < episodes:
        more = advance(1.0)
        results += more
        tell(len(more))
    return sorted(results, key=lambda result: result.trial)
