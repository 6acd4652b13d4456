"""Predicted memory beside what is allocated, and the change of settings with which a run fits on a card."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from embodied.config.files import load_config
from embodied.learning.recompute import recompute
from embodied.planning.memory import RESERVE, peaks
from embodied.training.dry_run import dry_run
from policies.conformance import laws
from tests.policies.test_quantised import CASES, build, inputs_of, pi05
from tests.variants import often

__all__ = ["pi05"]

NAMES = [name for name in CASES if name != "language"]  # the length of an answer depends on numbers
EVERY = tuple(
    (name, base, again, rows) for name in NAMES for base in (None, "nf4") for again in (False, True) for rows in (2, 8)
)
OFTEN = (("pi0", None, True, 8), ("openvla", "nf4", False, 2))


def allocated(compute: Callable[[], object]) -> int:
    """Most bytes that the CPU's allocator has given out during a computation, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        compute()
    profiler: Any = found.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(("name", "base", "again", "rows"), often(OFTEN, EVERY))
def test_predicted_updates_are_within_a_tenth_of_what_is_allocated(
    name: str, base: str | None, again: bool, rows: int
) -> None:
    policy, inputs = build(name, base), inputs_of(name, rows)
    if again:
        recompute(policy)
    predicted = peaks(policy, inputs_of(name, 1), acting=rows, learning=rows)
    assert predicted is not None
    action = policy.act(inputs, laws.random_noise(policy, rows, 1))

    def update() -> None:
        terms = policy.evaluate(inputs, action.trace)
        (terms.log_prob.sum() + terms.entropy.sum() + terms.value.sum()).backward()

    update()  # gradients are there afterwards
    assert predicted.update == pytest.approx(allocated(update), rel=0.1)


def test_an_answers_memory_is_not_predicted() -> None:
    assert peaks(build("language", None), inputs_of("language", 1), acting=2, learning=2) is None


def test_a_policy_that_cannot_be_copied_is_not_predicted() -> None:
    policy = build("openvla", None)
    policy.lock = threading.Lock()
    assert peaks(policy, inputs_of("openvla", 1), acting=2, learning=2) is None


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
