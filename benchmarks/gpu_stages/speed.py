"""Stages `act` and `learn`: what `embodied bench policy|learner` measure of a published network with random weights."""

from __future__ import annotations

from benchmarks.gpu_stages.work import Figures, Work
from embodied_bench.learner import bench_learner
from embodied_bench.policy import bench_policy
from embodied_bench.settings import BenchLearner, BenchPolicy

BATCHES, TINY_BATCHES = (1, 8, 16, 32, 64, 128), (1, 2)
MICRO_BATCHES, TINY_MICRO_BATCHES = (8, 16, 32), (2, 4)
SECONDS, TINY_SECONDS = 1.0, 0.05
"""Of each measurement, of which there are three."""


def act(work: Work) -> Figures:
    """Actions or chunks per second of the best batch, and of each."""
    settings = BenchPolicy(
        model=work.model,
        random_weights=True,
        batches=TINY_BATCHES if work.tiny else BATCHES,
        device=work.device,
        seconds=TINY_SECONDS if work.tiny else SECONDS,
        peer=False,  # one row at a time: minutes that say nothing of a GPU's limit
    )
    return bench_policy(settings)


def learn(work: Work) -> Figures:
    """Samples per second of the best micro-batch, and of each; how many copies of the weights there are."""
    settings = BenchLearner(
        model=work.model,
        random_weights=True,
        micro_batches=TINY_MICRO_BATCHES if work.tiny else MICRO_BATCHES,
        device=work.device,
        seconds=TINY_SECONDS if work.tiny else SECONDS,
    )
    found = bench_learner(settings)
    memory = found["memory"]
    if "resident_bytes" in memory:
        # All but the optimiser's state; gradients are freed after a step.
        found["copies_of_weights"] = (memory["resident_bytes"] - memory["optimizer_bytes"]) / memory["weights_bytes"]
    return found
