"""Losses of policy and critic: against literal loops, against other projects' values, and against their own laws."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodied.algorithms.losses import (
    RatioUnit,
    behaviour_weight,
    k3,
    policy_loss,
    reduce_to_unit,
    sum_units,
    value_loss,
)
from embodied.trajectories.batch import alive_actions

GOLDEN = load_file(Path(__file__).parent / "golden_ppo.safetensors")
WEIGHTED = load_file(Path(__file__).parents[2] / "golden/rl/groups.safetensors")
UNITS: tuple[RatioUnit, ...] = ("chunk", "action", "element")
each_unit = pytest.mark.parametrize("unit", UNITS)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=rtol)


# --- the unit of the ratio


@each_unit
def test_units_sum_executed_elements_only(unit: RatioUnit) -> None:
    values = torch.randn(4, 3, 2, generator=generator(3))
    alive = alive_actions(torch.tensor([3, 1, 2, 1]), 3, torch.tensor([0, 0, 1, 1]))
    assert alive.tolist() == [[True] * 3, [True, False, False], [False, True, True], [False, True, False]]
    found, mask = reduce_to_unit(values, alive, unit)
    for row in range(4):
        kept = values[row, alive[row]]
        expected = {"chunk": kept.sum()[None], "action": kept.sum(1), "element": kept.flatten()}[unit]
        close(found[row][mask[row]], expected)
        assert len(expected) == mask[row].sum()
    # What was not executed does not matter, not even in the masked-out units.
    values[~alive] = 1e6
    assert torch.equal(found, reduce_to_unit(values, alive, unit)[0])


@each_unit
def test_actions_that_were_not_executed_have_no_gradient(unit: RatioUnit) -> None:
    g = generator(4)
    log_prob = torch.randn(4, 3, 2, generator=g).requires_grad_()
    executed = alive_actions(torch.tensor([3, 1, 2, 1]), 3, torch.tensor([0, 0, 1, 1]))
    new, mask = reduce_to_unit(log_prob, executed, unit)
    old, _ = reduce_to_unit(torch.randn(4, 3, 2, generator=g), executed, unit)
    policy_loss(new, old, torch.randn(4, generator=g), mask, 5.0, 5.0).loss.backward()
    assert log_prob.grad is not None
    alive = executed[..., None].expand(4, 3, 2)
    assert (log_prob.grad[alive] != 0).all() and (log_prob.grad[~alive] == 0).all()


# --- the surrogate


def golden_units(level: str, masked: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probs (with gradient), new and old units of the ratio, their mask, and their advantages."""
    log_prob = GOLDEN["loss.logp"].to(dtype, copy=True).requires_grad_()
    rows, chunk, dims = log_prob.shape
    per_chunk = level == "chunk_level"
    unit: RatioUnit = {"chunk_level": "chunk", "action_level": "action", "token_level": "element"}[level]  # type: ignore[assignment]
    shape = (rows, chunk, dims) if per_chunk else (rows * chunk, 1, dims)  # one advantage per action: a row each
    full = torch.ones(shape[:2], dtype=torch.bool)
    new, _ = reduce_to_unit(log_prob.view(shape), full, unit)
    old, _ = reduce_to_unit(GOLDEN["loss.logp_old"].view(shape).to(dtype), full, unit)
    name = "chunk" if per_chunk else "action"
    mask = GOLDEN[f"loss.mask_{name}"].reshape(-1, 1).expand(new.shape) | (not masked)
    return log_prob, torch.stack([new, old]), mask, GOLDEN[f"loss.adv_{name}"].flatten().to(dtype)


LEVELS = ("chunk_level", "action_level", "token_level")
# RLinf's masked token-level loss has another denominator: see the README.
LOSSES = set(product(("textbook64", "rlinf"), LEVELS, ("nomask", "masked"))) - {("rlinf", "token_level", "masked")}


@pytest.mark.parametrize(("source", "level", "masked"), sorted(LOSSES))
def test_policy_loss_equals_those_of_rlinf_and_of_the_formula(source: str, level: str, masked: str) -> None:
    dtype = torch.float64 if source == "textbook64" else torch.float32
    log_prob, (new, old), mask, advantage = golden_units(level, masked == "masked", dtype)
    loss = policy_loss(new, old, advantage, mask, 0.2, 0.28).loss / mask.sum()
    loss.backward()
    assert log_prob.grad is not None
    name = f"ppo.{level}.{'adv_chunk' if level == 'chunk_level' else 'adv_action'}.{masked}.{source}"
    close(loss, GOLDEN[f"{name}.loss"])
    close(log_prob.grad, GOLDEN[f"{name}.grad"])


def test_a_chunks_advantage_belongs_to_each_of_its_actions() -> None:
    full = torch.ones(6, 3, dtype=torch.bool)
    new, mask = reduce_to_unit(GOLDEN["loss.logp"], full, "action")
    old, _ = reduce_to_unit(GOLDEN["loss.logp_old"], full, "action")
    loss = policy_loss(new, old, GOLDEN["loss.adv_chunk"][:, 0], mask, 0.2, 0.28).loss / mask.sum()
    close(loss, GOLDEN["ppo.action_level.adv_chunk.nomask.rlinf.loss"])


@each_unit
def test_loss_and_gradient_do_not_depend_on_packing_or_order(unit: RatioUnit) -> None:
    g = generator(5)
    count = 12
    leaf = torch.randn(count, 3, 2, generator=g, dtype=torch.float64).requires_grad_()
    old_log_prob = leaf.detach() + 0.3 * torch.randn(count, 3, 2, generator=g, dtype=torch.float64)
    advantage = torch.randn(count, generator=g, dtype=torch.float64)
    executed = alive_actions(torch.randint(1, 4, (count,), generator=g), 3)

    def total(packs: list[Tensor]) -> tuple[Tensor, ...]:
        leaf.grad = None
        parts = []
        for pick in packs:
            new, mask = reduce_to_unit(leaf[pick], executed[pick], unit)
            old, _ = reduce_to_unit(old_log_prob[pick], executed[pick], unit)
            part = policy_loss(new, old, advantage[pick], mask, 0.2, 0.28)
            part.loss.backward()
            parts.append(part)
        assert leaf.grad is not None
        sums = (sum(getattr(p, key) for p in parts) for key in ("loss", "approx_kl", "clipped", "off_policy"))
        return (*map(torch.as_tensor, sums), leaf.grad.clone())

    whole = total([torch.arange(count)])
    order = torch.randperm(count, generator=g)
    for packs in ([order], list(order.split(1)), list(order.split(5)), [order[:2], order[2:]]):
        for found, expected in zip(total(packs), whole, strict=True):
            close(found, expected, atol=1e-12)


def test_masked_units_count_nothing_whatever_they_hold() -> None:
    g = generator(6)
    new, old = (torch.randn(8, 3, generator=g) for _ in range(2))
    mask = torch.rand(8, 3, generator=g) < 0.6
    advantage = torch.randn(8, generator=g)
    before = policy_loss(new, old, advantage, mask, 0.2, 0.2)
    after = policy_loss(torch.where(mask, new, torch.nan), old, advantage, mask, 0.2, 0.2)
    for key in ("loss", "approx_kl", "clipped", "off_policy"):
        assert torch.equal(getattr(before, key), getattr(after, key)), key


def test_equal_log_probs_have_ratio_one() -> None:
    log_prob, advantage = torch.randn(8, 1, generator=generator(7)), torch.arange(8.0)
    found = policy_loss(log_prob, log_prob, advantage, torch.ones(8, 1, dtype=torch.bool), 0.2, 0.2)
    assert [float(found.off_policy), float(found.approx_kl), float(found.clipped)] == [0, 0, 0]
    assert float(found.loss) == -float(advantage.sum())


def test_far_ratios_stay_finite() -> None:
    new = torch.tensor([[500.0], [-500.0]], requires_grad=True)
    found = policy_loss(new, torch.zeros(2, 1), torch.tensor([1.0, -1.0]), torch.ones(2, 1, dtype=torch.bool), 0.2, 0.2)
    found.loss.backward()
    assert new.grad is not None and new.grad.isfinite().all() and found.loss.isfinite() and found.approx_kl.isfinite()


# --- weights


def some_units(seed: int, rows: int = 8, units: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probs (with gradient), old ones, advantages and a mask; float64."""
    g = generator(seed)
    old = torch.randn(rows, units, generator=g, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(rows, units, generator=g, dtype=torch.float64)).requires_grad_()
    return new, old, torch.randn(rows, generator=g, dtype=torch.float64), torch.rand(rows, units, generator=g) < 0.7


@pytest.mark.parametrize(("level", "name"), [("action_level", "ratio_norm"), ("token_level", "ratio_norm_token")])
def test_losses_weighted_by_episode_length_equal_those_of_rlinf(level: str, name: str) -> None:
    # RLinf multiplies by 20 / length (20: its longest episode) and divides by the number of units, masked ones too.
    for dtype, source in ((torch.float32, "rlinf"), (torch.float64, "textbook64")):
        log_prob, (new, old), mask, advantage = golden_units(level, masked=True, dtype=dtype)
        weight = 20 / WEIGHTED["ppo.ratio_norm.loss_mask_sum"].flatten().to(dtype)
        loss = policy_loss(new, old, advantage, mask, 0.2, 0.28, weight=weight).loss / mask.numel()
        close(loss, WEIGHTED[f"ppo.{name}.{source}.loss"])
        if source == "rlinf":
            loss.backward()
            assert log_prob.grad is not None
            close(log_prob.grad, WEIGHTED[f"ppo.{name}.rlinf.grad"])


@each_unit
def test_weights_of_inverse_lengths_give_every_episode_the_same_weight(unit: RatioUnit) -> None:
    """Two episodes, of three decisions and of one, are worth the mean of their own means."""
    g = generator(8)
    executed, episode = alive_actions(torch.tensor([3, 3, 3, 1]), 3), torch.tensor([5, 2, 5, 5])
    advantage = torch.randn(4, generator=g)
    new, mask = reduce_to_unit(torch.randn(4, 3, 2, generator=g) * 0.1, executed, unit)
    old = torch.zeros_like(new)
    parts = []
    for name in (5, 2):
        rows = episode == name
        found = policy_loss(new[rows], old[rows], advantage[rows], mask[rows], 0.2, 0.2)
        parts.append(found.loss / mask[rows].sum())
    lengths = {name: int(mask[episode == name].sum()) for name in (5, 2)}
    weight = torch.tensor([1 / lengths[name] for name in episode.tolist()])
    whole = policy_loss(new, old, advantage, mask, 0.2, 0.2, weight=weight)
    close(whole.loss / 2, torch.stack(parts).mean())


def test_weights_belong_to_rows_or_to_units() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[True, True], [True, False]])
    assert float(sum_units(values, mask)) == 7
    assert float(sum_units(values, mask, torch.tensor([1.0, 10.0]))) == 43
    assert float(sum_units(values, mask, torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))) == 421


def test_weights_leave_the_metrics_alone() -> None:
    new, old, advantage, mask = some_units(9)
    plain = policy_loss(new, old, advantage, mask, 0.2, 0.2)
    heavy = policy_loss(new, old, advantage, mask, 0.2, 0.2, weight=torch.full((8,), 3.0))
    close(heavy.loss, 3 * plain.loss)
    for key in ("approx_kl", "clipped", "off_policy"):
        assert torch.equal(getattr(plain, key), getattr(heavy, key)), key


def test_weighted_loss_does_not_depend_on_packing_or_order() -> None:
    new, old, advantage, mask = some_units(10, rows=12)
    weight = torch.rand(12, 3, generator=generator(11), dtype=torch.float64)
    whole = policy_loss(new, old, advantage, mask, 0.2, 0.28, weight=weight).loss
    order = torch.randperm(12, generator=generator(12))
    for packs in (order.split(1), order.split(5)):
        parts = [policy_loss(new[i], old[i], advantage[i], mask[i], 0.2, 0.28, weight=weight[i]).loss for i in packs]
        close(torch.stack(parts).sum(), whole, atol=1e-12)


# --- behaviour older than the proximal policy


def test_decoupled_loss_equals_a_literal_loop() -> None:
    leaf, proximal, advantage, mask = some_units(13)
    new = leaf.detach()
    behaviour = proximal + 0.8 * torch.randn(8, 3, generator=generator(14), dtype=torch.float64)
    weight = behaviour_weight(proximal, behaviour, bound=1.5)
    found = policy_loss(new, proximal, advantage, mask, 0.2, 0.28, weight=weight)
    expected, truncated = 0.0, 0
    for row, unit in mask.nonzero().tolist():
        correction = math.exp(proximal[row, unit] - behaviour[row, unit])
        truncated += correction > 1.5
        ratio, gain = math.exp(new[row, unit] - proximal[row, unit]), float(advantage[row])
        expected += min(correction, 1.5) * -min(gain * ratio, gain * min(max(ratio, 0.8), 1.28))
    assert truncated > 0
    assert float(found.loss) == pytest.approx(expected, rel=1e-12)


def test_decoupled_loss_without_lag_is_the_plain_one() -> None:
    new, old, advantage, mask = some_units(15)
    plain = policy_loss(new, old, advantage, mask, 0.2, 0.2)
    weight = behaviour_weight(old, old, bound=2.0)
    assert torch.equal(policy_loss(new, old, advantage, mask, 0.2, 0.2, weight=weight).loss, plain.loss)


def test_where_nothing_is_clipped_the_proximal_policy_does_not_matter() -> None:
    """proximal / behaviour times new / proximal is new / behaviour: only the clip range knows the proximal policy."""
    new, behaviour, advantage, mask = some_units(16)
    direct = policy_loss(new, behaviour, advantage, mask, 1.0, 1e9)
    for seed in (17, 18):
        proximal = behaviour + torch.randn(8, 3, generator=generator(seed), dtype=torch.float64)
        weight = behaviour_weight(proximal, behaviour, bound=1e9)
        close(policy_loss(new, proximal, advantage, mask, 1.0, 1e9, weight=weight).loss, direct.loss)


def test_behaviour_weights_are_constants_that_stay_finite() -> None:
    proximal = torch.tensor([[900.0, -900.0, 0.0]], requires_grad=True)
    found = behaviour_weight(proximal, torch.zeros(1, 3), bound=5.0)
    assert not found.requires_grad
    close(found, torch.tensor([[5.0, 0.0, 1.0]]))


# --- KL to a reference


def test_k3_equals_that_of_rlinf_in_this_order_of_arguments() -> None:
    log_prob, reference = WEIGHTED["loss.logp"], WEIGHTED["loss.logp_old"]
    close(k3(log_prob, reference), WEIGHTED["kl.k3"])
    assert (k3(reference, log_prob) - WEIGHTED["kl.k3"]).abs().max() > 1e-3


def test_k3_estimates_the_divergence_from_the_reference() -> None:
    """Exactly, for a policy and a reference over four tokens: the mean over the policy's own actions."""
    policy, reference = torch.randn(2, 4, generator=generator(19), dtype=torch.float64).log_softmax(-1).unbind(0)
    found = (policy.exp() * k3(policy, reference)).sum()
    close(found, (policy.exp() * (policy - reference)).sum(), atol=1e-12)
    assert (k3(policy, reference) >= 0).all() and not k3(policy, policy).any()


def test_k3_stays_finite_and_draws_an_unlikely_reference_back() -> None:
    log_prob = torch.tensor([500.0, -500.0], requires_grad=True)
    found = k3(log_prob, torch.zeros(2))
    found.sum().backward()
    assert found.isfinite().all() and log_prob.grad is not None
    assert log_prob.grad.tolist() == [1.0, 0.0]


# --- the value loss


@pytest.mark.parametrize("masked", ["nomask", "masked"])
def test_value_loss_equals_those_of_rlinf_and_of_the_formula(masked: str) -> None:
    mask = GOLDEN["loss.mask_action"] | (masked == "nomask")
    value = GOLDEN["value.values"].clone().requires_grad_()
    loss = value_loss(value[mask], GOLDEN["value.values_old"][mask], GOLDEN["value.returns"][mask], 0.2) / mask.sum()
    loss.backward()
    assert value.grad is not None
    close(loss, GOLDEN[f"value.{masked}.huber10.0.rlinf.loss"])
    close(loss, GOLDEN[f"value.{masked}.huber10.0.textbook64.loss"])
    close(value.grad, GOLDEN[f"value.{masked}.huber10.0.rlinf.grad"])


def test_unclipped_value_loss_is_half_the_squared_error_near_and_linear_far() -> None:
    old = torch.zeros(2)
    found = value_loss(torch.tensor([1.0, 0.0]), old, torch.tensor([4.0, 110.0]), None)
    assert float(found) == pytest.approx(0.5 * 3**2 + 10 * (110 - 5))


def test_value_losses_of_rows_are_weighted() -> None:
    g = generator(20)
    value, old, returns, weight = (torch.randn(6, generator=g) for _ in range(4))
    for clip in (None, 0.2):
        rows = [value_loss(value[i : i + 1], old[i : i + 1], returns[i : i + 1], clip) for i in range(6)]
        close(value_loss(value, old, returns, clip, weight), (torch.stack(rows) * weight).sum())
        close(value_loss(value, old, returns, clip), torch.stack(rows).sum())
