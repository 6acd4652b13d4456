"""Damaged directories of ACT: refused by name, or a policy that acts in finite numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import policies
from policies import PolicyError
from policies.act.kind import ACT
from policies.conformance import laws
from policies.registry import check, policy_kind
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds
from tests.policies.act.cases import SMALL, as_older, make, new_checkpoint
from tests.policies.act.test_act_policy import TASK, trained
from tests.policies.test_fuzzed_directories import acts

TINY = {"dim_model": 8, "dim_feedforward": 8, "latent_dim": 4, "backbone_width": 1, "n_encoder_layers": 1}


@few_or_many(100, 10_000)
@pytest.mark.parametrize("layout", ["0.6", "0.3", "new"])
def test_damaged_checkpoints(layout: str, cases: range, tmp_path: Path) -> None:
    """In LeRobot's layouts, the older one with statistics among the weights, and of new networks."""
    whole = tmp_path / "whole"
    if layout == "new":
        new_checkpoint(whole, **TINY)
    else:
        policy = trained(tmp_path / "new", TASK, TINY)
        ACT.format.write(policy, whole)
        (whole / "units.safetensors").unlink()
        if layout == "0.3":
            as_older(whole)
        assert (make(whole, TASK).act(laws.random_inputs(TASK, 2, 1), None).chunk
                - policy.act(laws.random_inputs(TASK, 2, 1), None).chunk).abs().max() < 1e-5  # fmt: skip

    def read(path: Path) -> None:
        given = {"checkpoint": str(path), **SMALL}
        check("act", given)
        policy_kind("act").format.assumed(given)
        acts(policies.build("act", TASK, seed=0, **given))

    holds(cases, Damaged(whole, tmp_path / "checkpoint"), read, (PolicyError,))


@few_or_many(50, 10_000)
def test_damaged_policies(cases: range, tmp_path: Path) -> None:
    policies.save(trained(tmp_path / "new", TASK, TINY), tmp_path / "whole")
    holds(
        cases, Damaged(tmp_path / "whole", tmp_path / "saved"), lambda path: acts(policies.load(path)), (PolicyError,)
    )
