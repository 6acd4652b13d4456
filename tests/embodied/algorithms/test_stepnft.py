"""Step-wise negative-aware fine-tuning: the objective by its definition, its labels, and runs of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import policies
from embodied.algorithms.estimators import binary
from embodied.algorithms.losses import DRIFT_WEIGHT, MAX_DRIFT, contrast, unit_mask
from embodied.algorithms.samples import Samples
from embodied.config.files import parse_config
from embodied.config.schema import LossConfig
from embodied.errors import UserError
from embodied.learning.update import Denominators, LossFunction, micro_batch_loss
from embodied.reporting.metrics import read
from embodied.trajectories.batch import TensorDecisions
from policies import Inputs, PolicySpec
from policies.conformance import laws
from policies.contract import actor_parameters
from policies.denoising import VARIANCE_EPS
from tests.embodied.algorithms.test_estimators import make_batch
from tests.embodied.run.test_resume import run
from tests.embodied.support.checked import check
from tests.embodied.training.test_pi0_end_to_end import SETTINGS

SPEC = PolicySpec(action_dim=3, chunk=2, horizon=3, state_dim=5)
LOSS = LossConfig(ratio_unit="action")
ROWS = 12


def flow_and_rows() -> tuple[Any, Samples]:
    """Decisions that a flow policy took, some of them cut short, and that policy."""
    policy = policies.build("flow", SPEC, 1, steps=3, widths=[16], critic_widths=[8], features=16)
    laws.perturb(policy, 0.1, seed=1)
    inputs: Inputs = laws.random_inputs(SPEC, ROWS, 2)
    action = policy.act(inputs, laws.random_noise(policy, ROWS, 3))
    g = torch.Generator().manual_seed(4)
    advantage = torch.where(torch.rand(ROWS, generator=g) < 0.5, 1.0, -1.0)
    executed = torch.randint(1, 3, (ROWS,), generator=g)
    weight = torch.rand(ROWS, generator=g) + 0.5
    decisions = TensorDecisions(inputs, dict(action.trace))
    rows = Samples(
        decisions, action.log_prob, action.value, advantage, action.value, executed, weight, torch.ones(ROWS, 1)
    )
    return policy, rows


def loss_of(policy: Any, rows: Samples, loss: LossConfig = LOSS) -> Tensor:
    mask = unit_mask(rows.alive, SPEC.action_dim, "action")
    return contrast(policy.evaluate(rows.inputs, rows.trace), rows, loss, mask).loss


def by_definition(policy: Any, rows: Samples) -> Tensor:
    """From the means of the two velocities, action by action."""
    trace, table = rows.trace, policy.denoising.transitions
    features = policy.encoder(rows.inputs)
    velocity = policy.velocity(trace["x"], policy.velocity.context(features, trace["step"]), trace["step"])[:, 0]
    total = torch.zeros(())
    for row in range(len(rows)):
        w_x, w_v, std = table[trace["step"][row, 0]]
        for action in range(int(rows.executed[row])):
            there = slice(action * SPEC.action_dim, (action + 1) * SPEC.action_dim)
            x, drawn = trace["x"][row, 0, there], trace["x_next"][row, 0, there]
            old, now = trace["v"][row, 0, there], velocity[row, there]
            change = now - old
            d = change * min(MAX_DRIFT / float(change.detach().norm()), 1.0)
            far = [((drawn - (w_x * x + w_v * v)) ** 2).sum() / (std**2 + VARIANCE_EPS) for v in (old + d, old - d)]
            term = torch.nn.functional.softplus(0.5 * rows.advantage[row] * (far[0] - far[1]))
            total = total + rows.weight[row] * (term + DRIFT_WEIGHT * change.square().mean())
    return total


@pytest.mark.parametrize("change", [0.01, 0.2])
def test_it_contrasts_the_means_of_two_velocities(change: float) -> None:
    """With drifts that are shortened among them."""
    policy, rows = flow_and_rows()
    laws.perturb(policy, change, seed=5)
    found, expected = loss_of(policy, rows), by_definition(policy, rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    drift = policy.evaluate(rows.inputs, rows.trace).contrast.drift.norm(dim=2)
    assert bool((drift > MAX_DRIFT).any()) == (change == 0.2)


def test_where_nothing_has_changed_it_is_log_2_and_moves_towards_what_was_solved() -> None:
    policy, rows = flow_and_rows()
    rows = replace(rows, executed=torch.full((ROWS,), 2), weight=torch.ones(ROWS))
    loss = loss_of(policy, rows) / (2 * ROWS)
    assert math.isclose(float(loss), math.log(2), rel_tol=1e-5)
    for sign in (1.0, -1.0):
        policy, rows = flow_and_rows()
        rows = replace(rows, advantage=torch.full((ROWS,), sign))
        before = policy.evaluate(rows.inputs, rows.trace).log_prob.detach().sum()
        optimizer = torch.optim.SGD(list(actor_parameters(policy)), lr=1e-4)
        loss_of(policy, rows).backward()
        optimizer.step()
        after = policy.evaluate(rows.inputs, rows.trace).log_prob.detach().sum()
        assert (after > before) == (sign > 0), "the sign is wrong"


def test_it_does_not_depend_on_micro_batches() -> None:
    policy, rows = flow_and_rows()
    laws.perturb(policy, 0.05, seed=5)
    weights = float((rows.executed * rows.weight).sum())
    gradients = []
    for size in (ROWS, 5):
        policy.zero_grad()
        for index in torch.arange(ROWS).split(size):
            function = LossFunction(LOSS, critic=False, objective=contrast)
            loss, _ = micro_batch_loss(policy, rows.take(index), function, Denominators(weights, ROWS))
            loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(torch.cat([p.grad.flatten() for p in actor_parameters(policy) if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_every_decision_of_an_episode_has_its_outcome() -> None:
    batch = make_batch()
    estimate = binary(batch, parse_config({"workflow": "stepnft", "loss": {"ratio_unit": "action"}}, "test"))
    solved = (batch.success & batch.mask).any(0)
    assert solved.any() and not solved.all()
    assert torch.equal(estimate.advantage, torch.where(solved, 1.0, -1.0).expand_as(batch.mask))
    assert torch.equal(estimate.keep, batch.mask)


STEPNFT: dict[str, Any] = {
    **SETTINGS,
    "workflow": "stepnft",
    "rollout": {"episodes_per_env": 1, "episode_group": 1},
    "advantage": {},
    "loss": {"ratio_unit": "action"},
    "optim": {**SETTINGS["optim"], "value_lr": 3e-4},
}


@pytest.mark.parametrize("scored", ["one", "any"])
def test_a_run_learns_from_episodes(scored: str, tmp_path: Path) -> None:
    policy = {**SETTINGS["policy"], "options": {**SETTINGS["policy"]["options"], "scored": scored}}
    run(parse_config({**STEPNFT, "policy": policy}, "test"), tmp_path / "run")
    rows = read(tmp_path / "run")
    assert len(rows) == 2 and all(row["learner/first_ratio_error"] < 1e-4 for row in rows)
    assert all(row["learner/policy_loss"] > 0 for row in rows) and rows[-1]["learner/approx_kl"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {}}, "has a loss for each action, and loss.ratio_unit is chunk: set it to action"),
        (
            {"policy": {"kind": "gaussian_mlp"}, "env": {}},
            "drawn step, which the policy gaussian_mlp does not have",
        ),
        (
            {"policy": {"kind": "flow", "options": {"joint": True}}, "env": {}},
            "policy flow does not have with these options",
        ),
        (
            {"policy": {"kind": "pi0", "options": {"scored": "learned"}}, "env": {}},
            "the policy pi0 does not have with these options",
        ),
        ({"advantage": {"outcome": "return"}}, "has no outcome of an episode"),
        (
            {"advantage": {"overlong": 2}, "env": {"max_episode_steps": 8}},
            "overlong is 2, and",
        ),
        ({"rollout": {"max_episodes_per_env": 4}}, "has no comparison within episode groups"),
        ({"workflow": "grpo"}, "judges episodes of a group against each other: set it to 2 or more"),
    ],
)
def test_what_cannot_be_contrasted_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(parse_config({**STEPNFT, **changes}, "test"))
