"""Decisions on several observations, in whole runs: no plan changes what is computed, and what the learner reads of the
trajectory memory is what was acted on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.execution.session import Session
from tests.embodied.execution.test_executor import Reference, ray, reference
from tests.embodied.support.runs import GROUPS, IMAGES, Run, assert_equal, assert_was_a_test, assigned, inline, run
from tests.variants import often

__all__ = ["ray", "reference"]


def looking_back(settings: dict[str, Any], observations: int, distance: int, chunk: int) -> dict[str, Any]:
    own = IMAGES["policy"]
    options = {**own["options"], "observations": observations, "distance": distance}
    return {**settings, "env": IMAGES["env"], "policy": {**own, "chunk": chunk, "options": options}}


SETTINGS = {
    "K = 2, d = 1, C = 1": looking_back(IMAGES, 2, 1, 1),
    "K = 2, d = 1, C = 4": looking_back(IMAGES, 2, 1, 4),
    "K = 3, d = 2, C = 2": looking_back(IMAGES, 3, 2, 2),
    "episode groups": looking_back(GROUPS, 2, 1, 2),
}
APART = assigned("disaggregated", 2, (0,), (0,), (1,), (0,), one_process=False)
PLANS = {
    "two groups drawn apart": APART,
    "fused, 2 workers": assigned("hybrid", 1, (0, 1), (), (1,), (0, 1)),
    "one step ahead": assigned("disaggregated", 2, (0,), (), (1,), (0,), one_process=False, ahead=1),
    "split, context switches": replace(assigned(render=(1,), one_process=False), unload=True),
}
ROUNDING = 1e-5
"""Mean |ratio - 1| at the first minibatch of a policy that has just acted."""


def assert_on_policy(found: Run) -> None:
    errors = [one.learned["learner/first_ratio_error"] for one in found.iterations]
    assert max(errors) < ROUNDING, errors


@pytest.mark.parametrize("name", SETTINGS)
def test_the_learner_reads_what_was_acted_on(name: str, reference: Reference) -> None:
    settings = SETTINGS[name]
    found = reference(settings, inline(assigned()))
    assert_was_a_test(found)
    assert_on_policy(found)
    frames = torch.cat([part["frames.front"] for part in found.gathered])
    options = settings["policy"]["options"]
    assert frames.shape[1] == options["observations"] == found.gathered[0]["proprio"].shape[1]
    moved = (frames[:, 0] != frames[:, -1]).flatten(1).any(1).float().mean()
    assert 0.2 < moved < 1, "earlier observations differ, but for those of an episode's beginning"
    if name == "K = 2, d = 1, C = 1":  # every env step is decided for: the earlier observation is the last decision's
        proprio = torch.cat([part["proprio"].unflatten(0, (-1, 4)) for part in found.gathered])
        own, earlier = proprio[:, :, 1], proprio[:, :, 0]
        same, begun = (earlier[1:] == own[:-1]).all(-1), (earlier[1:] == own[1:]).all(-1)
        assert bool((same | begun).all()) and bool(same.any()) and bool(begun.any())


# The default run has two groups drawn apart of two observations in test_training_delay.
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_plan_changes_what_is_computed(
    name: str, plan: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(SETTINGS[name], ray, PLANS[plan], tmp_path / "ray")
    assert_was_a_test(found)
    if not PLANS[plan].ahead:
        assert_on_policy(found)
    assert_equal(found, reference(SETTINGS[name], PLANS[plan]))


@pytest.mark.parametrize("name", often(("K = 3, d = 2, C = 2",), SETTINGS))
def test_groups_change_nothing_but_rounding(name: str, reference: Reference) -> None:
    one, two = (reference(SETTINGS[name], inline(assigned(groups=groups, physics=(0,) * groups))) for groups in (1, 2))
    for found, expected in zip(two.gathered, one.gathered, strict=True):
        assert torch.equal(found["frames.front"][:8], expected["frames.front"][:8])
    assert_equal(two, one, tolerance=1e-3)
