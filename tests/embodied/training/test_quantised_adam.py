"""Adam with moments in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import policies
from embodied.config.schema import OptimConfig
from embodied.errors import UserError
from embodied.learning.optimizer import make_optimizer
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.quantised_adam import BLOCK, LARGEST, LEAST, QuantisedAdam
from embodied.run import checkpoint
from embodied.run.checkpoint import MOMENTS
from embodied.runtime.ranks import Ranks
from policies import Policy, PolicySpec

SPEC = PolicySpec(action_dim=3, state_dim=40)


def optimizer_of(policy: Policy, **settings: object) -> torch.optim.Adam:
    return make_optimizer(policy, OptimConfig.model_validate(settings), policy_lr=1e-3, value_lr=1e-3, eps=1e-8)


def wide() -> Policy:
    return policies.build("gaussian_mlp", SPEC, 0, widths=[128, 128])


def steps(policy: Policy, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        for parameter in policy.parameters():
            parameter.grad = (torch.randn(parameter.shape, generator=generator) + 0.5).to(parameter.dtype)
        optimizer.step()


def vector(policy: Policy) -> torch.Tensor:
    return nn.utils.parameters_to_vector(policy.parameters()).detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_near_those_of_adam_and_moments_take_a_quarter(decay: float) -> None:
    begun = vector(wide())
    found = {}
    for moments in (None, "int8"):
        policy = wide()
        optimizer = optimizer_of(policy, moments=moments, weight_decay=decay)
        steps(policy, optimizer, 30)
        big = [state for p, state in optimizer.state.items() if p.numel() >= LEAST]
        found[moments] = (
            vector(policy) - begun,
            sum(t.numel() * t.element_size() for state in big for name, t in state.items() if name != "step"),
            sum(p.numel() for p in optimizer.state if p.numel() >= LEAST),
        )
    (plain, plain_bytes, numbers), (ours, ours_bytes, _) = found[None], found["int8"]
    assert torch.cosine_similarity(plain, ours, dim=0) > 0.995
    assert plain_bytes == 8 * numbers and ours_bytes <= 8 * numbers * (0.25 + 1 / BLOCK)


def test_a_small_parameter_steps_as_adam_does() -> None:
    parameters = [nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2)]
    optimizers = [kind([p], lr=1e-2) for kind, p in zip((torch.optim.Adam, QuantisedAdam), parameters, strict=True)]
    for number in range(5):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = torch.sin(torch.arange(50.0) + number)
            optimizer.step()
    torch.testing.assert_close(*parameters, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_takes_the_same_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    """A checkpoint has the moments in real numbers, which quantising does not change."""
    policy = wide().to(dtype)
    optimizer = optimizer_of(policy, moments="int8")
    steps(policy, optimizer, 4)
    state = checkpoint.RunState(1, 1, 1.0, ())
    folder = checkpoint.write(tmp_path, state, policy, optimizer, {})
    saved = checkpoint.OptimizerState.read(folder)
    assert all(t.dtype in (torch.float32, dtype) for t in saved.tensors.values())
    again = wide().to(dtype)
    other = optimizer_of(again, moments="int8")
    ReplicatedPolicy(again, Ranks("learner", 0, 1, torch.device("cpu"))).load(folder, other)
    packed = [state for p, state in other.state.items() if p.numel() >= LEAST]
    assert packed and all(
        state[key].dtype == torch.uint8 and f"{key}{LARGEST}" in state for state in packed for key in MOMENTS
    )
    for each, its in ((policy, optimizer), (again, other)):
        steps(each, its, 3, first=4)
    assert torch.equal(vector(policy), vector(again))
    plain = optimizer_of(again)  # the same file serves Adam
    ReplicatedPolicy(again, Ranks("learner", 0, 1, torch.device("cpu"))).load(folder, plain)
    steps(again, plain, 1)


def test_shards_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.full_tensor = lambda: parameter  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="set optim.sharding to whole"):
        QuantisedAdam([parameter])
