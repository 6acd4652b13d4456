"""What a snapshot of a farm must be before environments continue from it: a checkpoint, and so somebody else's data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import ANY

SNAPSHOT = ("base_episode", "base_step", "base_start", "history")
"""Arrays that say where every environment is: its episode, that one's start, and the actions executed in it."""
MOST = 2**40
"""Episodes of one environment, and starts: more than there will ever be."""


def check_snapshot(snapshot: Mapping[str, np.ndarray], slots: Mapping[str, np.ndarray], task: TaskSpec) -> None:
    """Raise `FarmError` where the snapshot is not of slots of these sizes and types, or says what cannot be."""
    for key in SNAPSHOT:
        if key not in snapshot and key == "base_start":
            continue  # written before starts could be drawn
        found = snapshot[key].shape if key in snapshot else None
        if found != slots[key].shape:
            raise FarmError(
                f"the snapshot's {key} of {task.name} has shape {found}, this farm's has {slots[key].shape}: resume "
                "with the same environments, tasks and chunk"
            )
        if not np.can_cast(snapshot[key].dtype, slots[key].dtype):  # older ones have narrower integers
            raise _wrong(task, f"{key} holds {snapshot[key].dtype}, and {slots[key].dtype} was written")
    steps, history = snapshot["base_step"], snapshot["history"]
    # A start may be none of this run's: episodes under way may be of other settings.
    bounds = {"base_episode": (0, MOST), "base_step": (0, history.shape[1] - 1), "base_start": (ANY, MOST)}
    for key, (least, most) in bounds.items():
        if key not in snapshot:
            continue
        bad = (snapshot[key] < least) | (snapshot[key] > most)
        if bad.any():
            env = int(bad.argmax())
            raise _wrong(task, f"{key} of environment {env} is {snapshot[key][env]}, and can be {least} to {most}")
    executed = np.arange(history.shape[1]) < steps[:, None]
    lost = executed & ~np.isfinite(history).all(axis=2)
    if lost.any():
        env, at = (int(i) for i in np.argwhere(lost)[0])
        raise _wrong(task, f"history of environment {env} has no finite action for step {at}, which it has executed")


def _wrong(task: TaskSpec, what: str) -> FarmError:
    return FarmError(f"the snapshot of {task.name} cannot be continued: its {what}; use an earlier checkpoint")
