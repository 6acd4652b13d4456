"""The lines of a pushed card are run as they stand, by the program that they name, on files that come from the hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from embodied.commands.export import write_policy
from embodied.config.files import parse_config, save_config
from embodied.run import checkpoint
from embodied.run.checkpoint import RunState
from embodied_hub import push
from policies import Policy
from policies.conformance import laws
from policies.lora import merged_state
from policies.registry import policy_kind
from tests.embodied.support.hub_server import Hub
from tests.extensions.hub.conftest import Trained
from tests.policies.act import cases as act
from tests.policies.diffusion import cases as diffusion
from tests.policies.openvla.tiny import write_tiny
from tests.policies.smolvla import beside

ROOT = Path(__file__).parents[3]
TORCHVISION = "from policies.torchvision_operators import import_torchvision\n\nimport_torchvision()\n"
"""Before libraries that import torchvision, of which this project's environment has no operators."""


def run_of(policy: Policy, folder: Path) -> Path:
    """The folder of a run with this policy as its checkpoint."""
    folder.mkdir()
    policy_of = {"kind": policy.kind, "chunk": policy.spec.chunk, "reads": ["images", "proprio"]}
    save_config(parse_config({"env": {"task": "tabletop/reach"}, "policy": policy_of}, "test"), folder / "config.yaml")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    checkpoint.write(folder / "checkpoints", RunState(3, 96, 1.0, ()), policy, optimizer, {})
    return folder


def lines_of(server: Hub, name: str) -> str:
    """The Python of the card."""
    found = re.search(r"```python\n(.*?)```", server.contents(f"models/{name}")["README.md"].decode(), re.DOTALL)
    assert found is not None
    return found[1]


def run_lines(text: str, folder: Path, *paths: Path) -> None:
    """Run Python with the hub of the test as the only one."""
    from huggingface_hub import constants

    place = os.pathsep.join(map(str, [ROOT, *paths]))
    settings = {"PYTHONPATH": place, "HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(folder / "home")}
    environment = {**os.environ, **settings, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", text]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside.install(tmp_path_factory.mktemp("lerobot"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_lerobot_loads_what_was_pushed(kind: str, server: Hub, lerobot: Path, tmp_path: Path) -> None:
    cases: Any = {"act": act, "diffusion": diffusion}[kind]
    policy = cases.make(cases.new_checkpoint(tmp_path / "new", backbone_width=64), cases.SPEC)
    laws.perturb(policy, 0.01, seed=1)
    policy.adopt_units(torch.randn(100, 7), 0.1 * torch.randn(100, cases.SPEC.proprio_dim))
    push.run(push.Arguments(str(run_of(policy, tmp_path / "run")), "me/policy"))
    lines = f"{TORCHVISION}{lines_of(server, 'me/policy')}\n"
    lines += "from safetensors.torch import save_file\n"
    lines += "save_file({n: t.contiguous() for n, t in policy.state_dict().items()}, 'theirs.safetensors')\n"
    run_lines(lines, tmp_path, lerobot)
    write_policy(policy, tmp_path / "run", tmp_path / "ours")
    ours, theirs = load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs.safetensors")
    assert ours.keys() <= theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_peft_loads_the_adapter_that_was_pushed(trained: Trained, server: Hub, tmp_path: Path) -> None:
    push.run(push.Arguments("warm", "me/warm", runs_dir=trained.runs_dir))
    lines = lines_of(server, "me/warm") + "\nfrom safetensors.torch import save_file\n"
    lines += "merged = model.merge_and_unload().state_dict()\n"
    lines += "save_file({n: t.clone().contiguous() for n, t in merged.items()}, 'theirs.safetensors')\n"
    run_lines(lines, tmp_path)
    found = checkpoint.latest(trained.run / "checkpoints")
    assert found is not None
    model = policies.load(found).model
    theirs = {model.checkpoint_name(name): t for name, t in load_file(tmp_path / "theirs.safetensors").items()}
    ours = {name: tensor for name, tensor in merged_state(model).items() if name in theirs}
    assert len(ours) > 20
    assert all(torch.allclose(tensor, theirs[name], atol=1e-6) for name, tensor in ours.items())


def with_code(folder: Path) -> Path:
    """Let the directory name Python code of its network, as the published one does."""
    named = {"AutoConfig": "configuration_x.XConfig", "AutoModelForVision2Seq": "modeling_x.XForActionPrediction"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": named}))
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    fast = {"AutoImageProcessor": ["processing_x.XProcessor", None]}
    (folder / "preprocessor_config.json").write_text(json.dumps({**preprocessor, "auto_map": fast}))
    return folder


def test_an_export_of_a_downloaded_openvla_names_the_code_in_its_repository(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are downloaded without code, and without it transformers cannot load the export."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from embodied.run.folder import fetched

    base = with_code(write_tiny(tmp_path / "base", action_dim=3))
    (base / "configuration_x.py").write_text("class XConfig:\n    layers = 7\n")
    server.add("models/org/base", base)
    data = {
        "env": {"task": "tabletop/reach", "cameras": 1, "image_size": 28},
        "policy": {"kind": "openvla", "reads": ["images", "instruction"], "options": {"checkpoint": "org/base"}},
    }
    config = fetched(parse_config(data, "test"))
    assert config.policy.hub_name is not None
    spec = policies.PolicySpec(action_dim=3, cameras=("front",), image_size=28)
    policy = policies.build("openvla", spec, 0, **{**config.policy.architecture, "unnorm_key": "tiny"})
    run = tmp_path / "run"
    run.mkdir()
    save_config(config, run / "config.yaml")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    found = checkpoint.write(run / "checkpoints", RunState(3, 96, 1.0, ()), policy, optimizer, {})
    write_policy(policies.load(found), found, tmp_path / "out")
    named = json.loads((tmp_path / "out/config.json").read_text())["auto_map"]
    assert named["AutoConfig"] == "org/base--configuration_x.XConfig"
    listed = json.loads((tmp_path / "out/preprocessor_config.json").read_text())["auto_map"]
    assert listed == {"AutoImageProcessor": ["org/base--processing_x.XProcessor", None]}
    assert policy_kind("openvla").format.loaded_by(tmp_path / "out").program == ""  # timm knows no such towers
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert get_class_from_dynamic_module(named["AutoConfig"], tmp_path / "out").layers == 7


def test_a_published_openvla_is_loaded_by_transformers(tmp_path: Path) -> None:
    folder = with_code(write_tiny(tmp_path / "published"))
    config = json.loads((folder / "config.json").read_text())
    del config["timm_model_kwargs"]
    (folder / "config.json").write_text(json.dumps(config))
    loaded = policy_kind("openvla").format.loaded_by(folder)
    assert loaded.program == "transformers 4.40.1" and "trust_remote_code=True" in loaded.lines
    save_file({}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    assert policy_kind("openvla").format.loaded_by(folder).library == "peft"
