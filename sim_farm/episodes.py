"""The episode that an environment runs next: a pure function of (environment, episode), which no plan, no number of
workers and no order of finishing can change.

Training episodes may begin from a fixed number of starts: recorded initial states, or seeds. The start of an episode is
a function of (environment, episode) too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sim_farm.contract import EpisodeSpec

TRAINING, EVALUATION, GROUPED, START, PERTURBED = 0, 1, 2, 3, 4
"""First word of the key from which episode seeds are drawn, so that evaluation never meets a training seed's stream."""
MAX_GROUPS = 1 << 20
"""Episode groups that run side by side and have different ids."""


ANY = -1
"""In place of a seed of the client's: (environment, episode) determines where the episode begins."""


class Episodes(Protocol):
    def spec(self, env: int, episode: int, start: int = ANY) -> EpisodeSpec | None:
        """The `episode`-th episode of environment `env`; None when there is none left and it rests. `start`: the seed
        that the client gave (`SeededEpisodes`)."""
        ...


def episode_seed(stream: int, run_seed: int, env: int, episode: int) -> int:
    """A seed in [0, 2**31) from NumPy's SeedSequence over (stream, run, env, episode)."""
    return int(np.random.SeedSequence((stream, run_seed, env, episode)).generate_state(1)[0] >> 1)


def start_seed(start: int) -> int:
    """The seed of the `start`-th of the seeds that training episodes begin from, the same in every run."""
    return episode_seed(START, 0, 0, start)


@dataclass(frozen=True)
class Starts:
    """The starts that training episodes have, drawn from an episode's own seed in [0, 2**31)."""

    init_states: Sequence[int] = ()
    """Recorded initial states of the task, each once; none: episodes begin from their seeds alone."""
    seeds: int = 0
    """Number of fixed seeds that episodes begin from, the same in every run; 0: none. Excludes `init_states`."""
    perturbations: int = 0
    """Number of the task's perturbations. An episode's own seed draws one of them, or none, each as often."""

    def __post_init__(self) -> None:
        if self.init_states and self.seeds:
            raise ValueError("episodes begin from recorded initial states or from a number of seeds, not from both")

    def spec(self, seed: int) -> EpisodeSpec:
        """The episode of that seed."""
        if not self.perturbations:
            return self._unperturbed(seed)
        drawn = episode_seed(PERTURBED, seed, 0, 0) % (self.perturbations + 1)
        return replace(self._unperturbed(seed), perturbation=drawn - 1 if drawn else None)

    def _unperturbed(self, seed: int) -> EpisodeSpec:
        if self.init_states:
            return EpisodeSpec(seed, self.init_states[seed % len(self.init_states)])
        return EpisodeSpec(start_seed(seed % self.seeds) if self.seeds else seed)


class TrainingEpisodes(ABC):
    """Episodes that are determined by their seeds, and by the start where there are starts."""

    @property
    @abstractmethod
    def begin(self) -> Starts:
        """Initial states of episodes."""

    def spec(self, env: int, episode: int, start: int = ANY) -> EpisodeSpec:
        return self.begin.spec(self._seed(env, episode))

    @abstractmethod
    def _seed(self, env: int, episode: int) -> int:
        """In [0, 2**31); equal for episodes that begin alike."""


@dataclass(frozen=True)
class EndlessEpisodes(TrainingEpisodes):
    """Training: every environment begins new episodes for ever, seeded by (run, env, episode)."""

    run_seed: int
    begin: Starts = Starts()

    def _seed(self, env: int, episode: int) -> int:
        return episode_seed(TRAINING, self.run_seed, env, episode)


@dataclass(frozen=True)
class GroupedEpisodes(TrainingEpisodes):
    """Training on episode groups, whose episodes begin alike: `group_size` neighbouring environments run one together.

    The n-th episodes of the environments k x group_size .. (k + 1) x group_size - 1 are one episode group, seeded by
    (run, k, n) and alike in everything but the policy's sampling noise. The episode groups of environments that are
    left over are never complete.
    """

    run_seed: int
    group_size: int
    begin: Starts = Starts()

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"an episode group has one member or more, not {self.group_size}")

    def _seed(self, env: int, episode: int) -> int:
        return episode_seed(GROUPED, self.run_seed, env // self.group_size, episode)

    def episode_group(self, env: int, episode: int) -> int:
        """The id of the episode group, the same in every run; later episodes have larger ids.

        Raises ValueError for an environment beyond those whose episode groups have different ids.
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
    """Indices of `specs` that each environment runs, in order. None deals all of them out in turn."""
    paired: int = 0
    """Trial t repeats trial t % paired under another perturbation, and its policy's draws; 0: none repeats another."""

    def spec(self, env: int, episode: int, start: int = ANY) -> EpisodeSpec | None:
        trial = self.trial(env, episode)
        return self.specs[trial] if trial < len(self.specs) else None

    def trial(self, env: int, episode: int) -> int:
        """Index into `specs` of the episode; `len(specs)` or more where there is none."""
        if self.queues is None:
            return env + episode * self.num_envs
        queue = self.queues[env]
        return queue[episode] if episode < len(queue) else len(self.specs)

    def unperturbed(self, trial: int) -> int:
        """The trial that `trial` repeats; itself, where it repeats none."""
        return trial % self.paired if self.paired else trial


@dataclass(frozen=True)
class SeededEpisodes:
    """Episodes whose seeds the client gives, in place of their starts (`Farm.begin`, `Farm.submit(next_seeds=...)`). An
    environment without a seed for its next episode rests."""

    def spec(self, env: int, episode: int, start: int = ANY) -> EpisodeSpec | None:
        return None if start == ANY else EpisodeSpec(start)


def evaluation_episodes(run_seed: int, count: int) -> tuple[EpisodeSpec, ...]:
    """`count` episodes whose seeds come from a stream that training does not draw from."""
    return tuple(EpisodeSpec(episode_seed(EVALUATION, run_seed, 0, trial)) for trial in range(count))
