"""LeRobot itself acts with what is exported, and computes what the golden values say."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies.conformance import laws
from tests.embodied.demonstrations.test_lerobot import LEROBOT
from tests.policies.act.cases import GOLDEN, SPEC, make, new_checkpoint

FOR_POLICIES = "imageio diffusers<0.36 transformers>=4.57,<5 pyserial"
"""Packages that LeRobot's policies import and its datasets do not."""
SCRIPT = Path(__file__).parent / "in_lerobot.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment in which LeRobot was installed anew."""
    environment = tmp_path_factory.mktemp("lerobot") / "venv"
    venv.create(environment, with_pip=True)
    found = str(environment / "bin/python")
    for packages in (*LEROBOT, FOR_POLICIES):
        ran = subprocess.run(
            [found, "-m", "pip", "install", "--quiet", *packages.split()], capture_output=True, text=True
        )
        if ran.returncode:
            pytest.fail(f"pip cannot install {packages}: is there an index? {ran.stderr[-2000:]}")
    return found


def run(python: str, *arguments: str | Path, script: Path = SCRIPT) -> None:
    ran = subprocess.run([python, str(script), *map(str, arguments)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_lerobot_acts_with_what_is_exported(python: str, tmp_path: Path) -> None:
    policy = make(new_checkpoint(tmp_path / "new", backbone_width=64), SPEC)
    laws.perturb(policy, 0.01, seed=1)
    generator = torch.Generator().manual_seed(1)
    policy.adopt_units(torch.randn(100, 7, generator=generator), 0.1 * torch.randn(100, 8, generator=generator))
    policies.export(policy, tmp_path / "exported")
    inputs = laws.random_inputs(SPEC, 2, seed=1)
    raw = {"raw.observation.images.top": inputs.frames["top"], "raw.observation.state": inputs.proprio}
    save_file({name: tensor for name, tensor in raw.items() if tensor is not None}, tmp_path / "in.safetensors")
    run(python, "act", tmp_path / "exported", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")["chunk"]
    torch.testing.assert_close(policy.predict(inputs, None), found, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_golden_chunks_are_lerobots(python: str, tmp_path: Path) -> None:
    """Those in the repository are 0.6.1's, which needs Python 3.12. This version's chunks, latents and averages are the
    same; its L1 is divided by padded steps too."""
    run(python, "variants", tmp_path / "made")
    variants = [path.name for path in (GOLDEN / "variants").iterdir()]
    names = [f"{variant}/golden.safetensors" for variant in variants]
    pairs = {name: (load_file(GOLDEN / "variants" / name), load_file(tmp_path / "made" / name)) for name in names}
    averages = [load_file(at / "ensembles.safetensors") for at in (GOLDEN, tmp_path / "made")]
    pairs["ensembles"] = (averages[0], averages[1])
    assert len(pairs) == 5
    for name, (stored, found) in pairs.items():
        same = [key for key in stored if not key.startswith(("loss", "l1_loss", "grad."))]
        assert same and stored.keys() == found.keys()
        for key in same:
            torch.testing.assert_close(found[key], stored[key], atol=1e-5, rtol=1e-5, msg=f"{name}: {key}")
