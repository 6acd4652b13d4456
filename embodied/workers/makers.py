"""The makers of workers: functions of plain data, so that a worker can be made in any process."""

from __future__ import annotations

from pathlib import Path

import policies
from embodied.config import Config
from embodied.errors import UserError
from embodied.workers.affinity import Affinity
from embodied.workers.devices import find_device, settle
from embodied.workers.evaluator import Evaluator
from embodied.workers.learner import Learner
from embodied.workers.policy_worker import PolicyWorker
from embodied.workflows.recipes import recipe_of
from policies.contract import Policy, PolicySpec
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.farm import Farm, FarmAddress

FINALS = {"never": "never", "truncated": "truncated", "always": "ended"}
"""Final frames that are drawn, by which of them are valued."""


def task_spec(config: Config) -> TaskSpec:
    """What the farm simulates. Frames are drawn only if the policy reads them."""
    env = config.env
    reads_images = "images" in config.policy.reads
    if reads_images and not env.cameras:
        raise UserError("the policy reads images and env.cameras is 0; set env.cameras to 1 or more")
    return TaskSpec(
        env.task,
        env.control_mode,
        env.reward,
        env.max_episode_steps,
        env.cameras if reads_images else 0,
        env.image_size,
        env.settle_steps,
        env.orientation,
        env.gripper,
    )


def bootstrap_of(config: Config) -> str:
    """Which ended episodes' last observations are valued: none where no critic is trained."""
    return config.ppo.bootstrap if recipe_of(config).critic else "never"


def policy_spec(config: Config, info: TaskInfo) -> PolicySpec:
    """The sizes of the policy for this task."""
    reads = config.policy.reads
    return PolicySpec(
        action_dim=info.action_dim,
        chunk=config.policy.chunk,
        state_dim=info.state_dim if "state" in reads else 0,
        proprio_dim=info.proprio_dim if "proprio" in reads else 0,
        cameras=info.cameras if "images" in reads else (),
        image_size=config.env.image_size if "images" in reads else PolicySpec.image_size,
    )


def check_same_sizes(first: PolicySpec, other: PolicySpec, task: str) -> None:
    """Raise `UserError` where one policy cannot act in both tasks; cameras may have other names."""
    for name in ("action_dim", "state_dim", "proprio_dim", "image_size"):
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
        policy = policies.build(config.policy.kind, spec, config.seed, **config.policy.architecture)
    start = checkpoint or config.policy.init
    if start is not None:
        policies.load_into(policy, start)
    return settle(policy, find_device(device or config.policy.device))


def make_policy_worker(
    config: Config, spec: PolicySpec, farm: Farm | FarmAddress, affinity: Affinity | None = None, shares: bool = False
) -> PolicyWorker:
    """`shares`: it will be given the learner's policy, and needs none of its own."""
    policy = None if shares else make_policy(config, spec, device=affinity.device if affinity else None)
    return PolicyWorker(policy, _reach(farm), config.policy.reads, config.seed, bootstrap_of(config), affinity)


def make_learner(config: Config, spec: PolicySpec, run_dir: Path, affinity: Affinity | None = None) -> Learner:
    return Learner(make_policy(config, spec, device=affinity.device if affinity else None), config, run_dir, affinity)


def make_evaluator(config: Config, spec: PolicySpec, farm: Farm | FarmAddress, checkpoint: Path | None) -> Evaluator:
    """An evaluator that has begun the configuration's task."""
    evaluator = Evaluator(
        lambda sizes: _finished_policy(config, sizes, checkpoint),
        config.policy.reads,
        config.seed,
        config.eval.greedy is not False,
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


def _reach(farm: Farm | FarmAddress) -> Farm:
    return Farm.attach(farm) if isinstance(farm, FarmAddress) else farm
