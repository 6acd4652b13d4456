"""What the ranks of a trainer will send one another: counted from its policy and the configuration, not measured.

One rank exchanges nothing, so a profile that was measured with one says nothing of it.
"""

from __future__ import annotations

import math
from statistics import median

from embodied.config import Config
from embodied.execution.executor import Iteration
from embodied.workers.roles import TrainedBytes
from embodied.workflows.sizes import holds_shards
from schedulers.profile import Exchange
from schedulers.workflow import Workflow


def exchanges_of(
    config: Config, workflow: Workflow, size: TrainedBytes, iterations: tuple[Iteration, ...], accelerated: bool
) -> tuple[Exchange, ...]:
    """Of one iteration, with as many optimiser steps as the measured ones had.

    Ranks that hold the whole policy add up their gradients: with adapters, those of the adapters alone. Ranks that hold
    shards gather the parameters for each micro-batch, forwards and backwards, and scatter the gradients at each step.
    """
    steps = median(iteration.learned.get("learner/steps", 1.0) for iteration in iterations)
    if not holds_shards(config, size.trained, size.parameters, accelerated):
        return (Exchange("all_reduce", float(size.trained), steps),)
    rows = config.optim.minibatch or sum((loop.items or workflow.items) * loop.steps for loop in workflow.loops)
    passes = math.ceil(rows / (config.optim.micro_batch or rows))
    return (
        Exchange("all_gather", float(size.parameters), 2 * steps * passes, fewest=2 * steps),
        Exchange("reduce_scatter", float(size.trained), steps),
    )
