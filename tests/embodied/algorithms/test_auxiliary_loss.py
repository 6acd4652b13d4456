"""A loss of the policy's own beside the objective: here the state that pictures show, which the critic reads anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import policies
from embodied.algorithms.samples import Samples
from embodied.config.schema import LossConfig
from embodied.learning.update import Denominators, LossFunction, LossSums, micro_batch_loss, read_losses
from embodied.reporting.metrics import read as metrics_of
from embodied.trajectories.batch import TensorDecisions
from policies.conformance import laws
from policies.contract import Policy, PolicyError, PolicySpec, actor_parameters
from policies.small.flow import FlowPolicy, StateCritic
from tests.embodied.run.test_resume import IMAGES, config_of, run

SPEC = PolicySpec(action_dim=2, chunk=2, state_dim=3, proprio_dim=2, cameras=("base",), image_size=16)
ROWS = 12


def make_policy(**options: Any) -> Policy:
    settings = {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [8], "critic_reads_state": True}
    policy = policies.build("flow", SPEC, seed=0, **settings | options)
    policy.observe(laws.random_inputs(SPEC, 50, seed=5))
    laws.perturb(policy, 0.05, seed=6)
    return policy


def make_rows(policy: Policy) -> Samples:
    """Decisions of the policy, of which some were cut short and some count for less."""
    g = torch.Generator().manual_seed(3)
    inputs = laws.random_inputs(SPEC, ROWS, seed=7)
    action = policy.act(inputs, torch.randn(ROWS, policy.noise_dim, generator=g))
    return Samples(
        decisions=TensorDecisions(inputs, dict(action.trace)),
        log_prob=action.log_prob,
        executed=torch.arange(ROWS) % 2 + 1,
        advantage=torch.randn(ROWS, generator=g),
        weight=torch.rand(ROWS, generator=g) + 0.5,
        value=action.value,
        returns=torch.randn(ROWS, generator=g),
        importance=torch.ones(ROWS, 1),
    )


def gradients(
    policy: Policy, rows: Samples, size: int, unit: str = "chunk"
) -> tuple[dict[str, torch.Tensor], LossSums]:
    function = LossFunction(LossConfig.model_validate({"value_clip": None, "ratio_unit": unit}))
    every, shares = torch.arange(len(rows)), []
    denominators = Denominators.of(rows, every, function)
    policy.zero_grad()
    for index in every.split(size):
        loss, share = micro_batch_loss(policy, rows.take(index), function, denominators)
        loss.backward()  # type: ignore[no-untyped-call]
        shares.append(share)
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return found, read_losses(shares)[0]


def test_it_is_the_weighted_mean_of_the_rows_losses() -> None:
    policy = make_policy(state_loss=0.5)
    rows = make_rows(policy)
    found, sums = gradients(policy, rows, ROWS)
    policy.zero_grad()
    missed = policy.evaluate(rows.inputs, rows.trace).auxiliary
    assert missed is not None and missed.shape == (ROWS,)
    mean = (missed * rows.weight).sum() / rows.weight.sum()
    mean.backward()
    for name, parameter in policy.named_parameters():
        if name.startswith("state_head."):
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)
    assert sums.auxiliary / sums.weights == pytest.approx(float(mean.detach()), rel=1e-5)


@pytest.mark.parametrize("unit", ["chunk", "action", "element"])
def test_it_does_not_depend_on_micro_batches(unit: str) -> None:
    policy = make_policy(state_loss=2.0)
    rows = make_rows(policy)
    (whole, sums), (split, others) = gradients(policy, rows, ROWS, unit), gradients(policy, rows, 5, unit)
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert others.auxiliary == pytest.approx(sums.auxiliary, rel=1e-5)


def test_it_reaches_the_encoder_and_changes_nothing_else() -> None:
    """Without it the same weights begin, act and are scored alike."""
    plain, policy = make_policy(), make_policy(state_loss=1.0)
    policy.load_state_dict(plain.state_dict(), strict=False)
    rows = make_rows(plain)
    assert plain.evaluate(rows.inputs, rows.trace).auxiliary is None
    (without, sums), (found, _) = gradients(plain, rows, ROWS), gradients(policy, rows, ROWS)
    assert sums.auxiliary == 0.0
    changed = {name for name, gradient in without.items() if not torch.allclose(gradient, found[name], atol=1e-7)}
    assert changed and all(name.startswith("encoder.") for name in changed)


@pytest.mark.parametrize(("by", "loss"), [(0.5, 0.25), (1.0, 1.0), (9.0, 17.0)])
def test_it_grows_with_the_square_of_small_errors_only(by: float, loss: float) -> None:
    """A number of the state that hardly ever moves does not outweigh all others when it does."""
    policy = make_policy(state_loss=3.0)
    rows = make_rows(policy)
    assert isinstance(policy, FlowPolicy) and isinstance(policy.value_head, StateCritic)
    assert policy.state_head is not None and rows.inputs.state is not None
    rows.inputs.state[:] = policy.value_head.normalizer.mean
    for parameter in policy.state_head.parameters():
        parameter.data.zero_()
    policy.state_head.get_parameter("2.bias").data.fill_(by)
    missed = policy.evaluate(rows.inputs, rows.trace).auxiliary
    torch.testing.assert_close(missed, torch.full((ROWS,), 3.0 * loss))


def test_the_state_is_learned_from_pictures() -> None:
    """Frames whose brightness is the state's first number."""
    policy = make_policy(state_loss=1.0)
    rows = make_rows(policy)
    assert rows.inputs.state is not None
    rows.inputs.state[:] = torch.linspace(-1, 1, ROWS)[:, None]
    rows.inputs.frames["base"][:] = torch.linspace(40, 215, ROWS).to(torch.uint8)[:, None, None, None]
    policy.observe(rows.inputs)
    optimizer = torch.optim.Adam(actor_parameters(policy), lr=3e-3)
    missed = []
    for _ in range(60):
        _, sums = gradients(policy, rows, ROWS)
        optimizer.step()
        missed.append(sums.auxiliary / sums.weights)
    assert missed[-1] < 0.2 * missed[0]


def test_without_a_critic_on_states_it_is_refused() -> None:
    with pytest.raises(PolicyError, match="takes critic_reads_state, got 1.0 with critic_reads_state False"):
        make_policy(state_loss=1.0, critic_reads_state=False)
    with pytest.raises(PolicyError, match="at least 0"):
        make_policy(state_loss=-1.0)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_run_says_the_loss(weight: float, tmp_path: Path) -> None:
    images: dict[str, Any] = dict(IMAGES)
    options = {**images["policy"]["options"], "critic_reads_state": True, "state_loss": weight}
    policy = {**images["policy"], "reads": ["state", "proprio", "images"], "options": options}
    run(config_of({**images, "policy": policy}, 2), tmp_path)
    found = [row.get("learner/auxiliary_loss", 0.0) for row in metrics_of(tmp_path)]
    assert len(found) == 2 and all((loss > 0.0) == (weight > 0.0) for loss in found)
