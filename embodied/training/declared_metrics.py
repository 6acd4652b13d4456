"""Every metric of a run, gathered from the modules that make them: docs/metrics.md is written from this."""

from __future__ import annotations

from embodied.algorithms import controls
from embodied.evaluation import result_metrics
from embodied.execution import iteration
from embodied.learning import learner, update
from embodied.training import checkpoints, iteration_metrics, sft

COUNTS = iteration_metrics.COUNTS
TRAINING = (
    *iteration_metrics.METRICS,
    *checkpoints.METRICS,
    *iteration.METRICS,
    *update.METRICS,
    *controls.METRICS,
    *learner.METRICS,
)
"""Metrics of a row of `embodied train`."""
IMITATION = sft.METRICS
"""Metrics of a row of `embodied sft`."""
EVALUATION, FINAL = result_metrics.METRICS, result_metrics.FINAL
