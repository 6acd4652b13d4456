"""Which episode an environment runs next: a pure function of (environment, episode), which no plan, no number of
workers and no order of finishing can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sim_farm.contract import EpisodeSpec

TRAINING, EVALUATION, GROUPED = 0, 1, 2
"""First word of the key from which episode seeds are drawn, so that evaluation never meets a training seed's stream."""
MAX_GROUPS = 1 << 20
"""Episode groups that run side by side and have ids of their own."""


class Episodes(Protocol):
    def spec(self, env: int, episode: int) -> EpisodeSpec | None:
        """The `episode`-th episode of environment `env`; None when there is none left and it rests."""
        ...


def episode_seed(stream: int, run_seed: int, env: int, episode: int) -> int:
    """A seed in [0, 2**31) from NumPy's SeedSequence over (stream, run, env, episode)."""
    return int(np.random.SeedSequence((stream, run_seed, env, episode)).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class EndlessEpisodes:
    """Training: every environment goes on for ever, seeded by (run, env, episode)."""

    run_seed: int
    init_states: int = 0
    """Episodes begin from one of so many recorded initial states, drawn from the seed; 0: from the seed alone."""

    def spec(self, env: int, episode: int) -> EpisodeSpec:
        seed = episode_seed(TRAINING, self.run_seed, env, episode)
        return EpisodeSpec(seed, seed % self.init_states if self.init_states else None)


@dataclass(frozen=True)
class GroupedEpisodes:
    """Training on episode groups, whose episodes begin alike: `group_size` neighbouring environments run one together.

    The n-th episodes of the environments k x group_size .. (k + 1) x group_size - 1 are one episode group, seeded by
    (run, k, n) and alike in everything but the policy's sampling noise. The episode groups of environments that are
    left over are never complete.
    """

    run_seed: int
    group_size: int
    init_states: int = 0
    """Episodes begin from one of so many recorded initial states, drawn from the seed; 0: from the seed alone."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"an episode group has one member or more, not {self.group_size}")

    def spec(self, env: int, episode: int) -> EpisodeSpec:
        seed = episode_seed(GROUPED, self.run_seed, env // self.group_size, episode)
        return EpisodeSpec(seed, seed % self.init_states if self.init_states else None)

    def episode_group(self, env: int, episode: int) -> int:
        """The id of the episode group, the same in every run; later episodes have larger ids.

        Raises ValueError for an environment beyond those whose episode groups have ids of their own.
        """
        place = env // self.group_size
        if place >= MAX_GROUPS:
            raise ValueError(f"environment {env} is in episode group {place} of those side by side; {MAX_GROUPS} fit")
        return episode * MAX_GROUPS + place


@dataclass(frozen=True)
class ListedEpisodes:
    """Evaluation: each of the listed episodes at most once."""

    specs: tuple[EpisodeSpec, ...]
    num_envs: int
    queues: tuple[tuple[int, ...], ...] | None = None
    """Of each environment, the indices of `specs` that it runs, in order. None deals all of them out in turn."""

    def spec(self, env: int, episode: int) -> EpisodeSpec | None:
        trial = self.trial(env, episode)
        return self.specs[trial] if trial < len(self.specs) else None

    def trial(self, env: int, episode: int) -> int:
        """Index into `specs` of the episode; `len(specs)` or more where there is none."""
        if self.queues is None:
            return env + episode * self.num_envs
        queue = self.queues[env]
        return queue[episode] if episode < len(queue) else len(self.specs)


def evaluation_episodes(run_seed: int, count: int) -> tuple[EpisodeSpec, ...]:
    """`count` episodes whose seeds no training run draws: they come from a stream of their own."""
    return tuple(EpisodeSpec(episode_seed(EVALUATION, run_seed, 0, trial)) for trial in range(count))
