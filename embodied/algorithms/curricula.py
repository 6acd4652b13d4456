"""Curricula: the starts and tasks of training episodes, chosen by how often they were solved.

`Curricula` has all of a run: a `StartCurriculum` for each task, and a `TaskCurriculum`, as far as the settings
`rollout.curriculum` and `rollout.task_curriculum` ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodied.errors import CheckpointError
from embodied.metric import Metric
from embodied.trajectories.batch import EndedEpisode
from sim_farm.episodes import Float64


class SuccessCounts:
    """Success counts of starts or tasks, the items. Later episodes count for more, since policies change.

    They are a function of the episodes of each call of `count`, whatever the order within one call.
    """

    def __init__(self, number: int, kept: float, name: str) -> None:
        """`kept` is the factor of an item's counts for each new episode of it: about the last 1 / (1 - kept) count.
        `name` is that of the counts in checkpoints."""
        self._kept, self._name = kept, name
        self.tried, self._solved = np.zeros(number), np.zeros(number)

    def count(self, items: Sequence[int], successes: Sequence[bool]) -> None:
        """Count an episode for each of `items`."""
        number, which = len(self.tried), np.array(items, np.int64)
        new = np.bincount(which, minlength=number)
        self.tried = self.tried * self._kept**new + new
        self._solved = self._solved * self._kept**new + np.bincount(which, np.array(successes, np.float64), number)

    def rates(self) -> Float64:
        """The success rate of each, as of one more success and one more failure: 1/2 where none is known."""
        return np.asarray((self._solved + 1) / (self.tried + 2))

    def learnable(self) -> Float64:
        """p (1 - p) of each: items that are always or never solved carry no gradient, which grows with the variance of
        an episode's success (Foster et al. 2025, "Learning to Reason at the Frontier of Learnability")."""
        rates = self.rates()
        return np.asarray(rates * (1 - rates))

    def state(self) -> dict[str, Float64]:
        """The counts, for a checkpoint."""
        return {f"{self._name}_tried": self.tried.copy(), f"{self._name}_solved": self._solved.copy()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state`. A checkpoint of another number of items, or without any, begins anew. Raises
        `CheckpointError` for numbers that are no counts."""
        tried, solved = (state.get(key) for key in self.state())
        if tried is None or solved is None or tried.shape != self.tried.shape:
            return
        if solved.shape != tried.shape or {tried.dtype.kind, solved.dtype.kind} != {"f"}:
            raise CheckpointError(f"the checkpoint's counts of {self._name}s do not fit each other: use an earlier one")
        if not np.isfinite(tried).all() or not ((solved >= 0) & (solved <= tried)).all():
            raise CheckpointError(f"the checkpoint's counts of {self._name}s cannot be: use an earlier one")
        self.tried, self._solved = tried.astype(np.float64), solved.astype(np.float64)


# --- A curriculum over the starts of training episodes: those are drawn more often that are solved sometimes.


STARTS_DECAY = 0.97
"""About the last 30 episodes of a start count."""
BETWEEN = (0.1, 0.9)
"""Success rates of the starts that `figures` counts as solved sometimes."""


class StartCurriculum:
    """Success counts of one task's starts, and the shares that follow from them."""

    def __init__(self, starts: int, share: float) -> None:
        """`share` of the episodes are drawn by p (1 - p), the others alike."""
        self._starts, self._share = starts, share
        self._counts = SuccessCounts(starts, STARTS_DECAY, "start")

    def count(self, ended: Sequence[EndedEpisode]) -> None:
        """Count the task's episodes that ended in a rollout, but for those whose start was not drawn here: in a run
        that continues, episodes under way may be of other settings."""
        mine = [episode for episode in ended if 0 <= episode.start < self._starts]
        self._counts.count([episode.start for episode in mine], [episode.success for episode in mine])

    def rates(self) -> Float64:
        """[S] the success rate of each start."""
        return self._counts.rates()

    def shares(self) -> Float64:
        """[S] of the episodes to come; they add up to one."""
        learnable = self._counts.learnable()
        return np.asarray(self._share * learnable / learnable.sum() + (1 - self._share) / len(learnable))

    def figures(self) -> dict[str, float]:
        """Metrics of the curriculum."""
        rates, shares, tried = self.rates(), self.shares(), self._counts.tried > 0
        low, high = BETWEEN
        return {
            "curriculum/tried": float(tried.mean()),
            "curriculum/solved_sometimes": float((tried & (rates > low) & (rates < high)).mean()),
            "curriculum/effective_starts": float(1 / (shares**2).sum()),
        }

    def state(self) -> dict[str, Float64]:
        """The counts, for a checkpoint."""
        return self._counts.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state`. A checkpoint of another number of starts, or without any, begins anew."""
        self._counts.load(state)


# --- A curriculum over the tasks of a run: those are rolled out less that are always or never solved.


TASKS_DECAY = 0.99
"""About the last 100 episodes of a task count."""


class TaskCurriculum:
    """Success counts of a run's tasks, and the decisions of a rollout that follow from them."""

    def __init__(self, tasks: int, share: float) -> None:
        """`share` of a task's decisions are taken in proportion to p (1 - p), the others always."""
        self._share = share
        self._counts = SuccessCounts(tasks, TASKS_DECAY, "task")

    def count(self, ended: Sequence[EndedEpisode]) -> None:
        """Count the episodes that ended in a rollout."""
        self._counts.count([episode.task for episode in ended], [episode.success for episode in ended])

    def decisions(self, most: int) -> tuple[int, ...]:
        """Decisions of each environment in a rollout, per task: `most` where p (1 - p) is highest, else at least
        one."""
        learnable = self._counts.learnable()
        part = self._share * learnable / learnable.max() + 1 - self._share
        return tuple(np.maximum(np.rint(most * part), 1).astype(int).tolist())

    def state(self) -> dict[str, Float64]:
        """The counts, for a checkpoint."""
        return self._counts.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state`. A checkpoint of another number of tasks, or without any, begins anew."""
        self._counts.load(state)


METRICS = (
    Metric("curriculum/tried", "share", "Starts of which an episode has ended."),
    Metric("curriculum/tried/<task>", "share", "The same of each task of a run that has several."),
    Metric("curriculum/solved_sometimes", "share", "Starts that are solved in 10% to 90% of their episodes."),
    Metric("curriculum/solved_sometimes/<task>", "share", "The same of each task of a run that has several."),
    Metric("curriculum/effective_starts", "starts", "Equally likely starts that would vary as much as those drawn."),
    Metric("curriculum/effective_starts/<task>", "starts", "The same of each task of a run that has several."),
    Metric("curriculum/decisions/<task>", "decisions", "Decisions of each of the task's environments in a rollout."),
)


# --- The curricula of a run.


class Curricula:
    """The curricula over the starts of each task, and the one over the tasks; none whose share is 0.

    Episodes are counted when the next iteration begins, together, whatever the parts in which a rollout returned them.
    """

    def __init__(self, tasks: Sequence[str], starts: Sequence[int], *, share: float, task_share: float) -> None:
        """`tasks` are the names of the run's tasks, `starts` their numbers of starts."""
        self._tasks = tuple(tasks)
        self._of_starts = [StartCurriculum(number, share) for number in starts] if share else []
        self._of_tasks = TaskCurriculum(len(tasks), task_share) if task_share else None
        self._decisions: tuple[int, ...] = ()
        """Per task, as the curriculum over tasks gave them last."""
        self._uncounted: list[EndedEpisode] = []

    def note(self, ended: Sequence[EndedEpisode]) -> None:
        """Keep the episodes that ended in a rollout, for the next `count`."""
        self._uncounted += ended

    def count(self) -> None:
        """Count the episodes that were noted."""
        if self._of_tasks is not None:
            self._of_tasks.count(self._uncounted)
        for task, curriculum in enumerate(self._of_starts):
            curriculum.count([episode for episode in self._uncounted if episode.task == task])
        self._uncounted = []

    def shares(self) -> list[Float64]:
        """Per task [S], the shares of its starts; empty without a curriculum over starts."""
        return [curriculum.shares() for curriculum in self._of_starts]

    def decisions(self, most: int) -> tuple[int, ...]:
        """Decisions of each environment in the next rollout, per task: `most` without a curriculum over tasks."""
        if self._of_tasks is None:
            return (most,) * len(self._tasks)
        self._decisions = self._of_tasks.decisions(most)
        return self._decisions

    def figures(self) -> dict[str, float]:
        """Metrics of the curricula after a rollout; those over starts by task, where there are several."""
        found: dict[str, float] = {}
        for task, curriculum in zip(self._tasks, self._of_starts, strict=False):
            suffix = f"/{task}" if len(self._tasks) > 1 else ""
            found |= {name + suffix: figure for name, figure in curriculum.figures().items()}
        for task, decisions in zip(self._tasks, self._decisions, strict=False):
            found[f"curriculum/decisions/{task}"] = float(decisions)
        return found

    def state(self) -> dict[str, Float64]:
        """The counts, for a checkpoint; those of the second task's starts begin with `1.`."""
        found = {} if self._of_tasks is None else self._of_tasks.state()
        for task, curriculum in enumerate(self._of_starts):
            found |= {_prefix(task) + name: counts for name, counts in curriculum.state().items()}
        return found

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state`, as each curriculum does. Raises `CheckpointError` for numbers that are no counts."""
        if self._of_tasks is not None:
            self._of_tasks.load(state)
        for task, curriculum in enumerate(self._of_starts):
            prefix = _prefix(task)
            curriculum.load({name: state[prefix + name] for name in curriculum.state() if prefix + name in state})


def _prefix(task: int) -> str:
    return f"{task}." if task else ""
