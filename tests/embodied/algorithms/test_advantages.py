"""Advantages: against literal loops, against other projects' values, and against their own laws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodied.algorithms.advantages import generalised_advantages, normalise

GOLDEN = load_file(Path(__file__).parent / "golden_ppo.safetensors")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=rtol)


def literal_advantages(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, final_value: Tensor, last_value: Tensor,
    gamma: float, lam: float, always: bool,
) -> list[list[float]]:  # fmt: skip
    """The sum of discounted errors from each decision to its episode's end, computed anew for each decision."""
    decisions, envs = reward.shape
    found = [[0.0] * envs for _ in range(decisions)]
    for env in range(envs):
        for start in range(decisions):
            weight, total = 1.0, 0.0
            for t in range(start, decisions):
                following = float(value[t + 1, env]) if t + 1 < decisions else float(last_value[env])
                if terminated[t, env]:
                    following = float(final_value[t, env]) if always else 0.0
                elif truncated[t, env]:
                    following = float(final_value[t, env])
                total += weight * (float(reward[t, env]) + gamma * following - float(value[t, env]))
                weight *= gamma * lam
                if terminated[t, env] or truncated[t, env]:
                    break
            found[start][env] = total
    return found


@pytest.mark.parametrize("bootstrap", ["truncated", "always"])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_equal_a_literal_double_loop(seed: int, bootstrap: Literal["truncated", "always"]) -> None:
    g = generator(seed)
    shape = (13, 5)
    reward, value, final_value = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    last_value = torch.randn(5, generator=g, dtype=torch.float64)
    draw = torch.rand(shape, generator=g)
    terminated, truncated = draw < 0.15, draw > 0.8
    terminated[-1, 0], truncated[-1, 0], truncated[-1, 1] = True, False, True
    data = (reward, value, terminated, truncated, final_value, last_value)
    advantage, returns = generalised_advantages(*data, 0.97, 0.9, bootstrap)
    expected = torch.tensor(literal_advantages(*data, 0.97, 0.9, bootstrap == "always"), dtype=torch.float64)
    close(advantage, expected, atol=1e-12)
    close(returns, expected + value, atol=1e-12)


@pytest.mark.parametrize("far", [1e6, math.inf, math.nan])
def test_what_follows_an_end_does_not_touch_what_came_before(far: float) -> None:
    g = generator(0)
    reward, value, final_value = (torch.randn(6, 2, generator=g) for _ in range(3))
    terminated, truncated = torch.zeros(6, 2, dtype=torch.bool), torch.zeros(6, 2, dtype=torch.bool)
    terminated[2, 0] = truncated[2, 1] = True
    ends = (terminated, truncated, final_value, torch.zeros(2), 0.99, 0.95)
    before, _ = generalised_advantages(reward, value, *ends)
    reward[3:], value[3:] = far, -far
    after, _ = generalised_advantages(reward, value, *ends)
    assert torch.equal(before[:3], after[:3])


def test_unread_final_values_do_not_matter() -> None:
    g = generator(1)
    reward, value, final_value = (torch.randn(6, 2, generator=g) for _ in range(3))
    terminated, truncated = torch.zeros(6, 2, dtype=torch.bool), torch.zeros(6, 2, dtype=torch.bool)
    terminated[2, 0] = truncated[2, 1] = True
    ends = (terminated, truncated)
    before, _ = generalised_advantages(reward, value, *ends, final_value, torch.zeros(2), 0.99, 0.95)
    other = torch.where(truncated, final_value, torch.nan)
    after, _ = generalised_advantages(reward, value, *ends, other, torch.zeros(2), 0.99, 0.95)
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["plain", "bootstrapped"])
def test_advantages_of_chunks_equal_those_of_rlinf(name: str) -> None:
    done, values = GOLDEN["gae.dones"][1:].any(-1), GOLDEN["gae.values"][..., 0]
    # RLinf bootstraps where the last step of the chunk was truncated; `plain` bootstraps nothing.
    truncated = GOLDEN["gae.truncations"][..., -1] & (name == "bootstrapped")
    advantage, returns = generalised_advantages(
        GOLDEN["gae.rewards"].sum(-1), values[:-1], done & ~truncated, truncated,
        GOLDEN["gae.final_values"][..., 0], values[-1], 0.99, 0.95,
    )  # fmt: skip
    close(advantage, GOLDEN[f"gae.chunk_level.{name}.adv.textbook64"][..., 0])
    close(advantage, GOLDEN[f"gae.chunk_level.{name}.adv"][..., 0])
    close(returns, GOLDEN[f"gae.chunk_level.{name}.returns"][..., 0])
    everywhere = torch.ones_like(done)
    normalised = normalise(advantage, everywhere, eps=1e-5)
    close(normalised, GOLDEN[f"gae.chunk_level.{name}.adv_normalised"][..., 0])


@pytest.mark.parametrize("name", ["plain", "bootstrapped"])
def test_advantages_of_actions_equal_those_of_rlinf(name: str) -> None:
    decisions, envs, chunk = GOLDEN["gae.rewards"].shape

    def steps(tensor: Tensor) -> Tensor:
        """[T, E, C] to [T * C, E]."""
        return tensor.transpose(1, 2).reshape(decisions * chunk, envs)

    values = GOLDEN["gae.values_action_level"]
    truncated = GOLDEN["gae.truncations"] & (name == "bootstrapped")
    advantage, returns = generalised_advantages(
        steps(GOLDEN["gae.rewards"]), steps(values[:-1]), steps(GOLDEN["gae.dones"][1:] & ~truncated),
        steps(truncated), steps(GOLDEN["gae.final_values"].expand(-1, -1, chunk)), values[-1, :, 0], 0.99, 0.95,
    )  # fmt: skip
    close(advantage, steps(GOLDEN[f"gae.action_level.{name}.adv.textbook64"]))
    close(advantage, steps(GOLDEN[f"gae.action_level.{name}.adv"]))
    close(returns, steps(GOLDEN[f"gae.action_level.{name}.returns"]))
    normalised = normalise(advantage, torch.ones_like(advantage, dtype=torch.bool), eps=1e-5)
    close(normalised, steps(GOLDEN[f"gae.action_level.{name}.adv_normalised"]))


def test_bootstrapping_always_equals_adding_the_final_value_to_the_last_reward() -> None:
    """The form in which RLinf writes it: the value as reward, the end as a termination."""
    done, values, final = GOLDEN["gae.dones"][1:].any(-1), GOLDEN["gae.values"][..., 0], GOLDEN["gae.final_values"]
    reward, never = GOLDEN["gae.rewards"].sum(-1), torch.zeros_like(done)
    found = generalised_advantages(reward, values[:-1], done, never, final[..., 0], values[-1], 0.99, 0.95, "always")
    added = reward + 0.99 * final[..., 0] * done
    expected = generalised_advantages(added, values[:-1], done, never, final[..., 0], values[-1], 0.99, 0.95)
    close(found[0], expected[0])


# --- normalisation


def test_normalisation_is_over_masked_in_rows_only() -> None:
    advantage = GOLDEN["gae.chunk_level.plain.adv"][..., 0]
    mask = GOLDEN["mask.loss_mask"].any(-1)
    assert not mask.all()
    close(normalise(advantage, mask, eps=1e-5), GOLDEN["gae.chunk_level.masked.adv_normalised"][..., 0])
    other = torch.where(mask, advantage, torch.full_like(advantage, 1e6))
    assert torch.equal(normalise(advantage, mask)[mask], normalise(other, mask)[mask])


def test_normalised_advantages_have_zero_mean_and_unit_unbiased_deviation() -> None:
    advantage = 3 + 5 * torch.randn(40, 3, generator=generator(2), dtype=torch.float64)
    found = normalise(advantage, torch.ones(40, 3, dtype=torch.bool))
    assert float(found.mean()) == pytest.approx(0, abs=1e-12)
    assert float(found.std()) == pytest.approx(1, abs=1e-7)


def test_a_single_row_is_centred_and_not_divided_by_nothing() -> None:
    found = normalise(torch.tensor([[2.0, 7.0]]), torch.tensor([[True, False]]))
    assert found[0, 0] == 0 and found.isfinite().all()
