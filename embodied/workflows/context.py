"""The context of a worker: plain data from which it is made in any process, and the policy that it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import policies
from embodied.config.schema import Config
from embodied.devices import Affinity, find_device, settle
from embodied.errors import UserError
from embodied.workflows.run_spec import RunSpec
from policies.contract import Policy, PolicySpec
from policies.registry import arguments_of, check_actions, observations_of, policy_kind
from sim_farm.client.farm import Farm, FarmAddress
from sim_farm.contract import TaskInfo


@dataclass(frozen=True)
class WorkerContext:
    """All that a component's worker is made from."""

    run: RunSpec
    spec: PolicySpec
    """Sizes of the run's policy."""
    run_dir: Path
    affinity: Affinity
    farm: Farm | FarmAddress | None = None
    """For a component that steps the environments."""
    rounds: int = 0
    """Decisions of each environment that the trajectory memory holds."""
    rank: int = 0
    """Number of this instance among the component's instances."""
    ranks: int = 1
    """Number of instances."""
    shares: bool = False
    """True if the worker will share the policy of another one in its process, and builds none."""

    @property
    def config(self) -> Config:
        return self.run.config

    def policy(self) -> Policy | None:
        """The run's policy for this worker, unless it will be given one."""
        return None if self.shares else make_policy(self.config, self.spec, device=self.affinity.device)

    def reach(self) -> Farm:
        assert self.farm is not None, "this component has no farm"
        return Farm.attach(self.farm) if isinstance(self.farm, FarmAddress) else self.farm


def policy_spec(config: Config, info: TaskInfo) -> PolicySpec:
    """The sizes of the policy for this task. Raises `PolicyError` where the policy cannot act by the task's actions."""
    reads = config.policy.reads
    _check_seen(config, info)
    scaled = policy_kind(config.policy.kind).scales_to_bounds
    low, high = _bounds(info) if scaled and not info.discrete_actions else ((), ())
    observations, distance = observations_of(config.policy.kind, config.policy.architecture)
    spec = PolicySpec(
        action_dim=info.action_dim,
        chunk=config.decided,
        horizon=config.policy.horizon,
        state_dim=info.state_dim if "state" in reads else 0,
        proprio_dim=info.proprio_dim if "proprio" in reads else 0,
        cameras=info.cameras if "images" in reads else (),
        image_size=config.env.image_size if "images" in reads else PolicySpec.image_size,
        discrete_actions=info.discrete_actions,
        action_low=low,
        action_high=high,
        observations=observations,
        distance=distance,
    )
    check_actions(config.policy.kind, spec)
    return spec


def _check_seen(config: Config, info: TaskInfo) -> None:
    """Raise `UserError` where the policy reads a state, and all that the task shows are pictures."""
    kind = config.policy.kind
    if "state" not in config.policy.reads or info.state_dim:
        return
    another = "" if "encoder" in arguments_of(policy_kind(kind)) else "--policy.kind flow "
    raise UserError(
        f"{info.spec.name} has no state, which the policy {kind} reads: all that it shows are pictures. Give {another}"
        "--policy.reads images --env.cameras 1 --policy.options.encoder cnn"
    )


def _bounds(info: TaskInfo) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lower and upper bounds of the task's actions; both empty where all are -1 and 1. An element without bounds is in
    the environment's units, as those are."""
    pairs = [
        (low, high) if math.isfinite(low) and math.isfinite(high) else (-1.0, 1.0)
        for low, high in zip(info.action_low, info.action_high, strict=True)
    ]
    if all(pair == (-1.0, 1.0) for pair in pairs):
        return (), ()
    return tuple(low for low, _ in pairs), tuple(high for _, high in pairs)


def check_same_sizes(first: PolicySpec, other: PolicySpec, task: str) -> None:
    """Raise `UserError` where one policy cannot act in both tasks; cameras may have other names."""
    for name in (
        "action_dim",
        "discrete_actions",
        "action_low",
        "action_high",
        "state_dim",
        "proprio_dim",
        "image_size",
    ):
        mine, its = getattr(first, name), getattr(other, name)
        if mine != its:
            raise UserError(
                f"one policy cannot act in {task} too: its {name} is {its}, the first task's {mine}; let the policy "
                "read what all tasks have (policy.reads: [images]) and choose control modes of equal size"
            )
    if len(first.cameras) != len(other.cameras):
        raise UserError(f"{task} has {len(other.cameras)} cameras, the first task {len(first.cameras)}")


def make_policy(config: Config, spec: PolicySpec, checkpoint: Path | None = None, device: str | None = None) -> Policy:
    """The run's policy: new from its seed, as `policy.init` has it, or from a checkpoint of the same kind and sizes; on
    the `device`, or where `policy.device` says."""
    # On one thread: orthogonal initial weights come from a QR decomposition, which rounds by the number of threads.
    with Affinity().applied():
        policy = policies.build(config.policy.kind, spec, config.seed, config.policy.base, **config.policy.architecture)
    start = checkpoint or config.policy.init
    if start is not None:
        policies.load_into(policy, start)
    return settle(policy, find_device(device or config.policy.device))
