"""The makers of workers: functions of plain data, so that a worker can be made in any process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.rollout.evaluator import Evaluator
from embodied.rollout.replicas import ReplicaAddress
from embodied.workflows.context import WorkerContext, make_policy
from embodied.workflows.recipes import WorkflowComponent
from policies.contract import Policy, PolicySpec
from sim_farm.client.farm import Farm, FarmAddress


def make_component(component: WorkflowComponent, context: WorkerContext) -> Any:
    """The worker of a component, whatever its class."""
    return component.worker_class().make(context)


def make_replica(component: WorkflowComponent, context: WorkerContext) -> Any:
    """One of several workers that act, of the last component of the loop."""
    return component.worker_class().make_replica(context)


def make_loop(component: WorkflowComponent, context: WorkerContext, replicas: Sequence[ReplicaAddress]) -> Any:
    """The rollout worker of these replicas."""
    return component.worker_class().make_loop(context, replicas)


def make_evaluator(
    config: Config, spec: PolicySpec, farm: Farm | FarmAddress, checkpoint: Path | None, disturbance: float = 0.0
) -> Evaluator:
    """An evaluator that has begun the configuration's task. `disturbance`: see `Evaluator`."""
    evaluator = Evaluator(
        lambda sizes: _finished_policy(config, sizes, checkpoint),
        config.policy.reads,
        config.seed,
        config.eval.greedy is not False,
        config.eval.instruction,
        disturbance,
    )
    evaluator.begin(config.env.task, spec, farm)
    return evaluator


def _finished_policy(config: Config, spec: PolicySpec, checkpoint: Path | None) -> Policy:
    """The policy as it is evaluated: from a checkpoint, unless there is nothing in it to train."""
    policy = make_policy(config, spec, checkpoint)
    untrained = checkpoint is None and config.policy.init is None and not policy.pretrained
    if untrained and any(parameter.requires_grad for parameter in policy.parameters()):
        raise UserError(
            f"the policy {config.policy.kind} has to be trained before it is evaluated: name a run instead of a "
            "configuration, or its checkpoint with --checkpoint"
        )
    return policy
