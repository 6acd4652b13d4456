"""LeRobot itself acts with what is exported, and computes what the golden values say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies.conformance import laws
from tests.policies.act.test_act_lerobot import python as python  # the environment in which LeRobot is installed
from tests.policies.act.test_act_lerobot import run
from tests.policies.diffusion.cases import GOLDEN, SPEC, make, new_checkpoint, noise_of

SCRIPT = Path(__file__).parent / "in_lerobot.py"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_lerobot_acts_with_what_is_exported(python: str, tmp_path: Path) -> None:
    folder = new_checkpoint(tmp_path / "new", backbone_width=64, crop_shape=[40, 40], horizon=8)
    policy = make(folder, SPEC, min_sampling_denoising_std=0.0)
    laws.perturb(policy, 0.01, seed=1)
    generator = torch.Generator().manual_seed(1)
    policy.adopt_units(torch.randn(100, 7, generator=generator), 0.1 * torch.randn(100, 8, generator=generator))
    policies.export(policy, tmp_path / "exported")
    inputs = laws.random_inputs(policy.spec, 2, seed=1)
    assert inputs.proprio is not None
    given = {
        "raw.observation.images.image": inputs.frames["image"],
        "raw.observation.state": inputs.proprio,
        "noise": torch.randn(2, 8, 7, generator=generator),
    }
    save_file(given, tmp_path / "in.safetensors")
    run(python, "act", tmp_path / "exported", tmp_path / "in.safetensors", tmp_path / "out.safetensors", script=SCRIPT)
    found = load_file(tmp_path / "out.safetensors")
    chunk = policy.act(inputs, noise_of(policy, {**given, **found})).chunk
    torch.testing.assert_close(chunk, found["chunk"], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_golden_chunks_are_lerobots(python: str, tmp_path: Path) -> None:
    """Those in the repository are 0.6.1's, which needs Python 3.12. Version 0.4 does not resize by a ratio. It divides
    a masked loss by all actions, and 0.6 by the counted ones: of the variant with that loss the chunk is compared."""
    run(python, "variants", tmp_path / "made", "ddim", "ddim_noise", "ddpm_sample", script=SCRIPT)
    for name in ("ddim", "ddim_noise", "ddpm_sample"):
        stored, found = (load_file(at / name / "golden.safetensors") for at in (GOLDEN / "variants", tmp_path / "made"))
        assert stored.keys() == found.keys()
        for key in stored if name != "ddim_noise" else ["chunk", "step_noise"]:
            most = 1e-4 * float(stored[key].abs().max()) if key.startswith("grad.") else 1e-5
            apart = float((found[key].double() - stored[key].double()).abs().max())
            assert apart <= most, f"{name}: {key} is {apart:.1e} apart, and {most:.1e} is allowed"
