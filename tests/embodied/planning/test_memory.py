"""Predicted memory beside what is allocated, and the change of settings with which a run fits on a card."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional

from benchmarks.card_memory import ROWS, Row, build, compare, config_of, inputs_of
from embodied import cli
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.learning.recompute import recompute
from embodied.planning.memory import RESERVE, CardMemory, Passes, card_memory, changes, smallest_change
from embodied.planning.uncomputed import Uncomputed
from embodied.training.dry_run import dry_run, sft_dry_run
from policies import quantised
from policies.quantised import dynamic_levels
from policies.random_weights import undrawn
from tests.variants import often

BASES = (None, "int8", "nf4")
OFTEN = (
    Row("openvla", "grpo", lora_rank=8, base="nf4", recompute=True),
    Row("pi0", "ppo", moments="int8"),
    Row("language", "grpo", recompute=True, passes=2),
    Row("act", "sft", passes=2),
)


@pytest.mark.parametrize("row", often(OFTEN, ROWS), ids=lambda row: f"{row.network} {row.method} {row.trained}")
def test_predicted_memory_is_within_a_tenth_of_what_is_allocated(row: Row, tmp_path: Path) -> None:
    """Not predicted are working copies of a convolution's weight, at most three."""
    found = compare(row, tmp_path)
    measured, predicted = found["peak_bytes"], found["peak_predicted"]
    assert 0.9 * measured - 3 * found["largest_convolution_bytes"] <= predicted <= 1.1 * measured


def test_weights_that_no_gradient_reaches_have_no_moments(tmp_path: Path) -> None:
    """Only keys and values of the last layer of π₀'s language model are read: its feed-forward part learns nothing."""
    row = Row("pi0", "sft", rows=2, ema=0.9)
    policy = build(row, tmp_path)
    found = card_memory(config_of(row, policy), policy, Passes(inputs_of(policy, 1), 2, 2, imitates=True))
    assert found.moments == 2 * found.gradients and found.average == found.gradients
    assert found.gradients < 0.95 * found.trained


@pytest.mark.parametrize("row", [Row("pi0", "ppo", rows=2, lora_rank=8, base="nf4"), Row("language", "grpo", rows=2)])
def test_a_policy_without_numbers_is_predicted_alike(row: Row, tmp_path: Path) -> None:
    policy = build(row, tmp_path)
    with undrawn():
        empty = build(row, tmp_path)
    assert any(parameter.is_meta for parameter in empty.parameters())
    passes = Passes(inputs_of(policy, 1), row.rows, row.rows)
    one, other = (card_memory(config_of(row, each), each, passes) for each in (policy, empty))
    assert one == other and one.update


def test_a_prediction_leaves_the_policy_as_it_is(tmp_path: Path) -> None:
    row = Row("openvla", "ppo", rows=2, lora_rank=8, recompute=True, ema=0.9)
    policy = build(row, tmp_path)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    card_memory(config_of(row, policy), policy, Passes(inputs_of(policy, 1), 2, 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())
    recompute(policy)  # as the learner does


def test_a_policy_that_cannot_be_copied_is_not_predicted(tmp_path: Path) -> None:
    row = Row("openvla", "ppo", rows=2)
    policy: Any = build(row, tmp_path)
    policy.lock = threading.Lock()
    found = card_memory(config_of(row, policy), policy, Passes(inputs_of(policy, 1), 2, 2))
    assert found.update is None and found.decision is None and found.gradients


def test_a_minibatch_of_all_samples_is_predicted_as_such() -> None:
    config = load_config("openvla_tiny")
    all_samples = config.optim.model_copy(update={"minibatch": 0, "micro_batch": None})
    whole = dry_run(config.model_copy(update={"optim": all_samples}), 24)
    given = config.optim.model_copy(update={"minibatch": whole["iteration"]["samples"], "micro_batch": None})
    assert dry_run(config.model_copy(update={"optim": given}), 24)["bytes"] == whole["bytes"]


def test_a_dry_run_names_the_smallest_change_that_fits() -> None:
    config = load_config("openvla_small_lora")
    config = config.model_copy(update={"env": config.env.model_copy(update={"num_envs": 2})})
    whole = dry_run(config, 24)
    assert whole["card"]["verdict"] == "the run fits"
    needs = whole["bytes"]["at_most_at_once"]
    found = dry_run(config, (needs / 4 + RESERVE) / 1e9)["card"]["verdict"]
    assert found.startswith("it does not fit; with --optim.micro_batch ") and "recompute" not in found
    small = (whole["bytes"]["weights"] * 0.2 + RESERVE) / 1e9
    assert "no change of settings makes it fit; as it is, a card of 16 GB" in dry_run(config, small)["card"]["verdict"]


def test_the_smallest_change_alters_least_of_what_is_computed_and_then_costs_least_time(tmp_path: Path) -> None:
    """Every change is predicted, in the order that is documented: on each card the first that fits is named."""
    row = Row("language", "ppo", rows=2, lora_rank=8)
    built = {base: build(replace(row, base=base), tmp_path) for base in BASES}
    config = config_of(row, built[None])
    known: dict[str, CardMemory] = {}

    def predict(changed: Config) -> CardMemory:
        policy, key, rows = built[changed.policy.base], changes(config, changed), changed.optim.micro_batch or 2
        if key not in known:
            passes = Passes(inputs_of(policy, 1), 2, rows, of_a_step=2 // rows)
            known[key] = card_memory(changed, policy, passes)
        return known[key]

    every = [
        with_settings(config, {"policy.base": base, "optim": optim}, "test")
        for base in BASES
        for moments in (None, "int8")
        for again in (False, True)
        for rows in (2, 1)
        for optim in [config.optim.model_dump() | {"moments": moments, "recompute": again, "micro_batch": rows}]
    ]
    totals = [predict(changed).total for changed in every]
    named = set()
    for total in totals:
        card = (total + 1 + RESERVE) / 1e9
        expected = next(changed for changed, needs in zip(every, totals, strict=True) if needs <= total)
        found = smallest_change(config, predict, card, adapted=True)
        assert found is not None and changes(config, found) == changes(config, expected)
        named.add(changes(config, found))
    assert smallest_change(config, predict, (min(totals) - 1 + RESERVE) / 1e9, adapted=True) is None
    assert named >= {"", "--optim.micro_batch 1", "--optim.micro_batch 1 --optim.recompute true"}
    assert {name.rpartition("--policy.base ")[2] for name in named} >= {"int8", "nf4"}


def test_a_policy_without_blocks_fits_by_a_smaller_micro_batch_alone(tmp_path: Path) -> None:
    row = Row("gaussian_mlp", "ppo", rows=512)
    policy = build(row, tmp_path)
    config = config_of(row, policy)

    def predict(changed: Config) -> CardMemory:
        rows = changed.optim.micro_batch or 512
        return card_memory(changed, policy, Passes(inputs_of(policy, 1), 1, rows, of_a_step=1024 // rows))

    card = (predict(config).total - 1 + RESERVE) / 1e9
    found = smallest_change(config, predict, card, adapted=False)
    assert found is not None and changes(config, found) == "--optim.micro_batch 256"
    assert smallest_change(config, predict, (predict(config).lasting + RESERVE) / 1e9, adapted=False) is None


def test_supervised_learning_has_the_same_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("openvla_small_lora")
    whole = sft_dry_run(config, 24)
    assert whole["card"]["verdict"] == "the run fits" and whole["bytes"]["update"] > 0
    card = (whole["bytes"]["at_most_at_once"] / 2 + RESERVE) / 1e9
    assert cli.main(["sft", "openvla_small_lora", "--dry-run", "--card", f"{card}"]) == 0
    assert "verdict it does not fit; with --optim.micro_batch " in capsys.readouterr().out


def test_a_card_too_small_for_anything_is_refused() -> None:
    with pytest.raises(UserError, match=r"--card 0\.5 is too small for anything: 1 GB .* usual cards have 16, 24"):
        dry_run(load_config("openvla_tiny"), 0.5)


def test_levels_that_a_prediction_asks_for_first_are_numbers() -> None:
    """They are kept for the process: what trains after a prediction quantises by them."""
    quantised._made.cache_clear()
    with Uncomputed():
        dynamic_levels(torch.device("cpu"))
    levels = dynamic_levels(torch.device("cpu"))
    expected = functional.create_dynamic_map(signed=True)
    assert torch.equal(levels[1:], expected[1:]) and levels[0] == -1 and levels[-1] == 1
