"""Learner ranks by themselves: in processes on Ray, without a farm, beside one learner in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.learning.learner import Learner
from embodied.run.checkpoint import RunState
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ranks import Ranks
from embodied.runtime.ray.runtime import RayRuntime
from embodied.trajectories.batch import Trajectories
from embodied.workflows.run_spec import RunSpec
from policies.contract import Policy
from tests.embodied.learning.test_learner import make_policy

TOLERANCE = 1e-5
"""Of every parameter after three iterations: sums over ranks round differently."""


def config_of(**optim: Any) -> Config:
    settings = {"epochs": 2, "minibatch": 8, "policy_lr": 3e-3, "value_lr": 3e-3, **optim}
    return parse_config({"seed": 5, "iterations": 10, "optim": settings}, "test")


class Counted(Learner):
    """Counts floating-point operations."""

    def counted_update(self, batch: Trajectories, iteration: int) -> int:
        with FlopCounterMode(display=False) as counter:
            self.update(batch, iteration)
        return counter.get_total_flops()

    def local_numbers(self) -> int:
        """Of parameters and moments, in this process."""
        found = [*self.policy.parameters(), *(t for s in self.optimizer.state.values() for t in s.values() if t.ndim)]
        return sum(getattr(t, "to_local", lambda t=t: t)().numel() for t in found)

    def gradients(self) -> dict[str, Tensor]:
        """Of the last update."""
        return {n: p.grad.clone() for n, p in self.policy.named_parameters() if p.grad is not None}

    def loss_of(self, batch: Trajectories) -> dict[str, float]:
        return self.update(batch, 0)


def small_policy() -> Policy:
    return make_policy()


def make_rank(make: Any, options: dict[str, Any], config: Config, folder: Path, rank: int, ranks: int) -> Counted:
    return Counted(make(**options), RunSpec.of(config), folder, Affinity(), Ranks("learner", rank, ranks))


@contextmanager
def connected(
    runtime: RayRuntime, ranks: int, config: Config, folder: Path, make: Any = small_policy, **options: Any
) -> Iterator[WorkerGroup[Counted]]:
    group = runtime.start_group("learner", make_rank, ranks, lambda rank: (make, options, config, folder, rank, ranks))
    if ranks > 1:
        group.call_all(Learner.join, group.call_one(0, Learner.listen), 60.0)
    yield group
    group.call_all(Learner.leave)
    group.end()


def alone(config: Config, folder: Path, make: Any = small_policy, **options: Any) -> Counted:
    return make_rank(make, options, config, folder, 0, 1)


def weights_of(group: WorkerGroup[Counted]) -> dict[str, Tensor]:
    first, *others = group.call_all(Learner.weights)
    assert not any(others), "only rank 0 hands out weights"
    return {name: tensor.clone() for name, tensor in first.items()}


def state_at(iteration: int) -> RunState:
    return RunState(iteration, 0, 0.0, ())


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        worst = float((found[name].double() - tensor.double()).abs().max()) if tensor.numel() else 0.0
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"
