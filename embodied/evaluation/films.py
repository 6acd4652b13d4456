"""Films of evaluated episodes: selected episodes are replayed from their specs and actions, and tiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from embodied.execution.replay import in_order, worker_count
from embodied.execution.session import Session
from embodied.reporting.live import steps
from embodied.reporting.video import EpisodeFrames, write_tiled
from embodied.rollout.evaluator import EpisodeOutcome
from embodied.runtime.handles import Handle
from sim_farm.client.replay import Replayer
from sim_farm.contract import EpisodeSpec, Float32, TaskSpec, UInt8

SIZE = 256
FRAMES = 60
"""Frames of a filmed episode, about; longer episodes are filmed every second, third, ... step."""


class Filmer:
    """A worker that films episodes of one task after the other."""

    def __init__(self) -> None:
        self._task: TaskSpec | None = None
        self._replayer: Replayer | None = None

    def film(self, task: TaskSpec, episode: EpisodeSpec, actions: Float32, every: int) -> list[UInt8]:
        """Frames uint8 [SIZE, SIZE, 3] of the task's first camera, upright."""
        if self._replayer is None or task != self._task:
            if self._replayer is not None:
                self._replayer.close()
            self._replayer = Replayer(replace(task, cameras=1, image_size=SIZE, orientation="upright"))
            self._task = task
        return self._replayer.film(episode, actions, every)


def stride(length: int) -> int:
    """Every how many env steps an episode of so many is filmed."""
    return max(1, length // FRAMES)


def filmed_steps(length: int, every: int) -> list[int]:
    """The env steps after which the frames of `Filmer.film` were taken."""
    return [*range(0, length, every), length]


def worth_seeing(outcomes: Sequence[EpisodeOutcome], count: int) -> list[EpisodeOutcome]:
    """At most `count`: failures first, the first of each task before the second of any."""
    turns: dict[tuple[str, bool], int] = defaultdict(int)
    ranked: list[tuple[bool, int, int, EpisodeOutcome]] = []
    for place, outcome in enumerate(outcomes):
        turn = turns[outcome.task, outcome.success]
        turns[outcome.task, outcome.success] = turn + 1
        ranked.append((outcome.success, turn, place, outcome))
    return [outcome for *_, outcome in sorted(ranked, key=lambda item: item[:3])[:count]]


def differing(
    first: Sequence[EpisodeOutcome], second: Sequence[EpisodeOutcome], count: int
) -> list[tuple[EpisodeOutcome, EpisodeOutcome]]:
    """At most `count` pairs of the same episode that came out otherwise: those first that the first alone solved, the
    first of each task before the second of any."""
    pairs = {(mine.task, mine.trial): (mine, other) for mine, other in zip(first, second, strict=True)}
    # `worth_seeing` has failures first: here those of the second.
    unlike = [other for mine, other in pairs.values() if mine.success != other.success]
    return [pairs[other.task, other.trial] for other in worth_seeing(unlike, count)]


@dataclass(frozen=True)
class Shown:
    """An episode to film."""

    outcome: EpisodeOutcome
    actions: Float32
    """[length, A] as executed."""
    label: str
    """What is written under it beside its task, steps and outcome."""


def write_film(
    path: Path,
    session: Session,
    episodes: Sequence[Shown],
    task_of: Callable[[str], TaskSpec],
    columns: int | None = None,
) -> None:
    """Replay the episodes and tile them into one video, in rows of `columns` or with failures first; the work is dealt
    out to as many filmers as cores. All are as fast as the longest, so that one can be compared with another."""
    # Episodes of a task next to each other: a filmer builds a task's scene once.
    ordered = sorted(range(len(episodes)), key=lambda place: episodes[place].outcome.task)
    count = worker_count(session, len(ordered))
    session.runtime.prepare(count)
    every = stride(max((one.outcome.length for one in episodes), default=0))

    def begin(filmer: Handle[Filmer], place: int) -> list[UInt8]:
        outcome = episodes[place].outcome
        return filmer.submit(Filmer.film, task_of(outcome.task), outcome.spec, episodes[place].actions, every)

    films: dict[int, list[UInt8]] = {}
    with steps("Filming", len(ordered)) as bar:
        filmers = [session.runtime.place(f"filmer {i}", Filmer) for i in range(count)]
        for place, film in in_order(filmers, ordered, begin):
            films[place] = film
            bar.advance()
        for filmer in filmers:
            filmer.end()
    tiles = [
        EpisodeFrames(
            one.outcome.task, films[place], one.outcome.success, one.label, filmed_steps(one.outcome.length, every)
        )
        for place, one in enumerate(episodes)
    ]
    write_tiled(path, tiles, 15, columns)
