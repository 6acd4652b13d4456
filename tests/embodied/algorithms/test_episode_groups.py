"""Advantages without a value function: against literal loops, other projects' values, and their own laws."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodied.algorithms.advantages import (
    Scale,
    differing,
    group_advantages,
    informative,
    overlong_penalty,
)

GOLDEN = load_file(Path(__file__).parents[2] / "golden/rl/groups.safetensors")
SCALES: tuple[Scale, ...] = ("group", "batch", "none")
each_scale = pytest.mark.parametrize("scale", SCALES)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=rtol)


def batch(seed: int, size: int = 5, groups: int = 9) -> tuple[Tensor, Tensor]:
    """Outcomes that no float adds up exactly, and ids far apart; two groups are not complete, one is too large."""
    g = generator(seed)
    names = torch.randint(0, 2**40, (groups,), generator=g)
    counts = torch.tensor([size - 1, 1, size + 1, *[size] * (groups - 3)])
    group = names.repeat_interleave(counts)
    order = torch.randperm(len(group), generator=g)
    return torch.randn(len(group), generator=g) * 1e3, group[order]


# --- group advantages


def literal_advantages(outcome: list[float], group: list[int], size: int, scale: Scale, eps: float) -> list[float]:
    def deviation(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))

    complete = [r for r, g in zip(outcome, group, strict=True) if group.count(g) == size]
    found = []
    for mine, name in zip(outcome, group, strict=True):
        members = [r for r, g in zip(outcome, group, strict=True) if g == name]
        if len(members) != size:
            found.append(0.0)
            continue
        divisor = {"group": deviation(members) + eps, "batch": deviation(complete) + eps, "none": 1.0}[scale]
        found.append((mine - math.fsum(members) / size) / divisor)
    return found


@each_scale
@pytest.mark.parametrize("seed", range(3))
def test_group_advantages_equal_a_literal_loop(seed: int, scale: Scale) -> None:
    outcome, group = batch(seed)
    found, complete = group_advantages(outcome.double(), group, 5, scale, eps=0.5)
    expected = literal_advantages(outcome.double().tolist(), group.tolist(), 5, scale, eps=0.5)
    close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-12)
    assert complete.tolist() == [group.tolist().count(name) == 5 for name in group.tolist()]


def test_group_advantages_equal_those_of_rlinf_and_verl_and_of_the_formula() -> None:
    outcome, group = GOLDEN["grpo.scores"], torch.arange(8) // 4
    found, complete = group_advantages(outcome, group, 4)
    close(found, GOLDEN["grpo.adv_per_env.verl"], atol=1e-5)
    exact, _ = group_advantages(outcome.double(), group, 4)
    close(exact, GOLDEN["grpo.adv_per_env.textbook64"], atol=0, rtol=1e-6)
    assert complete.all()
    # RLinf gives a decision, or an action, its episode's advantage where its mask is set.
    mask = GOLDEN["grpo.loss_mask"]
    of_actions = found[None, :, None] * mask
    close(of_actions, GOLDEN["grpo.action_level.adv"], atol=1e-5)
    of_decisions = found * mask.any(-1)
    close(of_decisions, GOLDEN["grpo.chunk_level.adv"][..., 0], atol=1e-5)


@each_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_episodes_changes_no_bit(scale: Scale, dtype: torch.dtype) -> None:
    outcome, group = batch(3)
    outcome = outcome.to(dtype) / 3
    before, was_complete = group_advantages(outcome, group, 5, scale)
    for seed in range(20):
        order = torch.randperm(len(group), generator=generator(seed))
        after, complete = group_advantages(outcome[order], group[order], 5, scale)
        assert torch.equal(after, before[order])
        assert torch.equal(complete, was_complete[order])


@pytest.mark.parametrize("scale", ["group", "none"])
def test_other_groups_change_no_bit(scale: Scale) -> None:
    outcome, group = batch(4)
    before, _ = group_advantages(outcome, group, 5, scale)
    for name in group.unique():
        alone, others = group == name, group != name
        assert torch.equal(group_advantages(outcome[alone], group[alone], 5, scale)[0], before[alone])
        assert torch.equal(group_advantages(outcome[others], group[others], 5, scale)[0], before[others])
    renamed, _ = group_advantages(outcome, 2**40 - group, 5, scale)
    assert torch.equal(renamed, before)


@each_scale
def test_equal_outcomes_have_advantage_exactly_zero(scale: Scale) -> None:
    # Three times 0.1 over three is not 0.1, in float32 nor in float64.
    for value, size, dtype in ((0.1, 3, torch.float64), (0.1, 7, torch.float32), (0.7, 11, torch.float32)):
        outcome = torch.full((2 * size,), value, dtype=dtype)
        outcome[size:] = torch.arange(size)
        found, complete = group_advantages(outcome, torch.arange(2 * size) // size, size, scale)
        assert complete.all() and (found[size:] != 0).any()
        assert (found[:size] == 0).all(), found


@each_scale
def test_groups_that_are_not_complete_have_no_advantage_and_count_nothing(scale: Scale) -> None:
    outcome = torch.tensor([0.0, 1.0, 1e9, -1e9, 5.0, 6.0, 7.0])
    group = torch.tensor([9, 9, 3, 4, 2, 2, 2])
    found, complete = group_advantages(outcome, group, 2, scale)
    assert complete.tolist() == [True, True, *[False] * 5]
    assert (found[2:] == 0).all()
    assert torch.equal(found[:2], group_advantages(outcome[:2], group[:2], 2, scale)[0])


@each_scale
def test_an_empty_batch_and_one_without_complete_groups_have_no_advantages(scale: Scale) -> None:
    nothing = torch.empty(0)
    found, complete = group_advantages(nothing, nothing.long(), 4, scale)
    assert found.shape == complete.shape == (0,)
    found, complete = group_advantages(torch.tensor([1.0, 2.0]), torch.tensor([1, 2]), 4, scale)
    assert not found.any() and not complete.any()


def test_groups_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="two members or more to be compared, not 1"):
        group_advantages(torch.zeros(3), torch.arange(3), 1)
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        group_advantages(torch.zeros(3), torch.arange(2), 2)


# --- which groups are worth a forward pass


@pytest.mark.parametrize("size", [2, 3, 7, 8, 10])
def test_informative_groups_have_a_success_rate_within_bounds_that_count_themselves(size: int) -> None:
    group = torch.arange(size + 1).repeat_interleave(size)
    success = torch.cat([torch.arange(size) < won for won in range(size + 1)])  # group k succeeds k times
    for low, high in ((0.1, 0.9), (0.0, 1.0), (1 / size, 1 - 1 / size), (0.3, 0.7)):
        expected = [low <= int(name) / size <= high for name in group]
        assert informative(success, group, size, low, high).tolist() == expected
        assert informative(success.float(), group, size, low, high).tolist() == expected


def test_differing_groups_have_two_different_outcomes() -> None:
    outcome = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, math.nextafter(0.1, 1)], dtype=torch.float64)
    group = torch.tensor([5, 5, 5, 1, 1, 1])
    assert differing(outcome, group, 3).tolist() == [*[False] * 3, *[True] * 3]


def test_groups_that_are_not_complete_are_not_worth_learning_from() -> None:
    outcome, group = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([1, 1, 2, 2, 2])
    assert differing(outcome, group, 3).tolist() == [*[False] * 2, *[True] * 3]
    assert informative(outcome, group, 3, 0.0, 1.0).tolist() == [*[False] * 2, *[True] * 3]


# --- overlong shaping


def test_overlong_penalty_falls_from_zero_to_minus_one_over_the_margin() -> None:
    length = torch.tensor([1, 79, 80, 81, 85, 90, 99, 100, 101, 500])
    expected = torch.tensor([0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1, -1])
    close(overlong_penalty(length, longest=100, margin=20), expected)


@pytest.mark.parametrize("margin", [0, -1, 101])
def test_a_margin_without_room_is_refused(margin: int) -> None:
    with pytest.raises(ValueError, match=f"not {margin}"):
        overlong_penalty(torch.tensor([1]), 100, margin)
