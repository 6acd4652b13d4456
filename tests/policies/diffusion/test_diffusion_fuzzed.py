"""Damaged directories of Diffusion Policy: refused by name, or a policy that acts in finite numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import policies
from policies import PolicyError
from policies.conformance import laws
from policies.diffusion.kind import DIFFUSION
from policies.registry import check, policy_kind
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds
from tests.policies.diffusion.cases import SMALL, TASK, as_older, make, new_checkpoint
from tests.policies.diffusion.test_diffusion_policy import trained
from tests.policies.test_fuzzed_directories import acts

TINY = {
    "down_dims": [8], "n_groups": 2, "diffusion_step_embed_dim": 4, "num_train_timesteps": 3, "backbone_width": 1,
    "spatial_softmax_num_keypoints": 1, "use_separate_rgb_encoder_per_camera": False,
}  # fmt: skip


@few_or_many(100, 10_000)
@pytest.mark.parametrize("layout", ["0.6", "0.3", "new"])
def test_damaged_checkpoints(layout: str, cases: range, tmp_path: Path) -> None:
    """In LeRobot's layouts, the older one with statistics among the weights, and of new networks."""
    whole = tmp_path / "whole"
    if layout == "new":
        new_checkpoint(whole, **TINY)
    else:
        policy = trained(tmp_path / "new", TINY)
        DIFFUSION.format.write(policy, whole)
        (whole / "units.safetensors").unlink()
        if layout == "0.3":
            as_older(whole)
        inputs = laws.random_inputs(policy.spec, 2, 1)
        assert (make(whole, TASK).act(inputs, None).chunk - policy.act(inputs, None).chunk).abs().max() < 1e-4

    def read(path: Path) -> None:
        given = {"checkpoint": str(path), **SMALL}
        check("diffusion", given)
        for note in (policy_kind("diffusion").format.assumed, policy_kind("diffusion").format.left_out_rows):
            note(given)
        acts(policies.build("diffusion", TASK, seed=0, **given))

    holds(cases, Damaged(whole, tmp_path / "checkpoint"), read, (PolicyError,))


@few_or_many(50, 10_000)
def test_damaged_policies(cases: range, tmp_path: Path) -> None:
    policies.save(trained(tmp_path / "new", TINY), tmp_path / "whole")
    holds(
        cases, Damaged(tmp_path / "whole", tmp_path / "saved"), lambda path: acts(policies.load(path)), (PolicyError,)
    )
