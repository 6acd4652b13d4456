"""Action bins as a field of the checkpoint, and the small checkpoint that has fewer of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import policies
from policies import Inputs, PolicyError, PolicySpec
from policies.openvla.action_tokens import action_of, token_of

SMALL = Path(__file__).resolve().parents[3] / "assets/openvla_small"
SPEC = PolicySpec(3, cameras=("front",), image_size=56)
INSTRUCTION = "move the gripper to the red ball"


@pytest.mark.parametrize("bins", [2, 8, 32, 256])
def test_a_bins_centre_is_in_the_bin(bins: int) -> None:
    tokens = torch.arange(512 - bins, 512)
    centres = action_of(tokens, 512, bins)
    again = token_of(centres, 512, bins)
    assert torch.equal(again[1:], tokens[1:]) and int(again[0]) == 512 - bins + 1, (
        "the two lowest share the last centre"
    )
    width = 2 / (bins - 1)
    values = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, 1000))
    assert (action_of(token_of(values, 512, bins), 512, bins) - values).abs().max() <= width / 2 + 1e-12


def small(**options: object) -> policies.Policy:
    return policies.build("openvla", SPEC, 0, checkpoint=str(SMALL), unnorm_key="demonstrations", **options)


def seen(rows: int) -> Inputs:
    g = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (rows, 56, 56, 3), generator=g, dtype=torch.uint8)
    return Inputs(frames={"front": frames}, instruction=(INSTRUCTION,) * rows)


def test_a_policy_of_few_bins_says_no_other_token() -> None:
    policy, inputs = small(), seen(64)
    action = policy.act(inputs, torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    tokens = action.trace["tokens"]
    assert tokens.min() >= 512 - 32 and tokens.max() < 512 and len(tokens.unique()) > 8
    found = policy.evaluate(inputs, action.trace)
    torch.testing.assert_close(found.log_prob, action.log_prob, atol=1e-4, rtol=0)
    assert float(found.entropy.detach().max()) <= np.log(32) + 1e-5


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    policy, inputs = small(), seen(4)
    policies.save(policy, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/policy/config.json").read_text())["n_action_bins"] == 32
    again = policies.load(tmp_path / "saved")
    assert torch.equal(again.act(inputs, None).chunk, policy.act(inputs, None).chunk)


@pytest.mark.parametrize("bins", [1, 257, "many", None])
def test_another_number_of_bins_is_refused(bins: object, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(SMALL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_action_bins": bins}))
    with pytest.raises(PolicyError, match="n_action_bins is a number from 2 to 256"):
        policies.build("openvla", SPEC, 0, checkpoint=str(folder), unnorm_key="demonstrations")
