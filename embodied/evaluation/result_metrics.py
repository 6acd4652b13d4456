"""The result of an evaluation as metrics: `eval/...` during training, `final/...` at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from embodied.metric import Metric

METRICS = (
    Metric("eval/success_rate", "share", "Episodes that were solved."),
    Metric("eval/success_low", "share", "Lower end of its 95% interval (Wilson)."),
    Metric("eval/success_high", "share", "Upper end of its 95% interval (Wilson)."),
    Metric("eval/episodes", "episodes", "Episodes that the evaluation has."),
    Metric("eval/pass@<k>", "share", "Trials that at least one of k attempts solves, where each is attempted often."),
    Metric("eval/pass@<k>_low", "share", "Lower end of its 95% interval (Wilson)."),
    Metric("eval/pass@<k>_high", "share", "Upper end of its 95% interval (Wilson)."),
    Metric("eval/return", "reward", "Mean return."),
    Metric("eval/return_low", "reward", "Lower end of its 95% interval (Student's t)."),
    Metric("eval/return_high", "reward", "Upper end of its 95% interval (Student's t)."),
    Metric("eval/episode_len", "env steps", "Mean length of an episode."),
    Metric("eval/wall_s", "s", "Time that the evaluation took."),
    Metric(
        "eval/success_rate/<task>", "share", "Episodes of the task that were solved, where there are several tasks."
    ),
)
"""Metrics of evaluations during training, in `selection.jsonl`."""
FINAL = tuple(Metric("final" + one.name.removeprefix("eval"), one.unit, one.meaning) for one in METRICS)
"""Metrics of the evaluation at the end, on other episodes, as trackers record them."""


def metrics_of(found: Mapping[str, Any], prefix: Literal["eval", "final"]) -> dict[str, float]:
    """The numbers of a result. Where the tasks have no success, nothing in them is about that."""
    names = ("episodes", "return", "return_low", "return_high", "episode_len", "wall_s")
    rates = ("success_rate", "success_low", "success_high")
    passes = [name for name in found if name.startswith("pass@")]
    tasks = found["tasks"] if len(found["tasks"]) > 1 else []
    return {
        **{f"{prefix}/{name}": found[name] for name in rates if name in found},
        **{f"{prefix}/{name}": found[name] for name in (*passes, *names)},
        **{f"{prefix}/success_rate/{task['task']}": task["success_rate"] for task in tasks if "success_rate" in task},
    }
