"""ACT from demonstrations to a folder that LeRobot loads, through every step that a user takes: a tiny network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import policies
from embodied.commands.export import export_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from policies import PolicySpec
from policies.conformance import laws
from tests.embodied.support.expert import record_reach


def settings(root: Path, network: Path, **sections: object) -> Config:
    data = {
        "iterations": 2,
        "env": {"task": "tabletop/reach", "num_envs": 4, "cameras": 1, "image_size": 32, "max_episode_steps": 6},
        "policy": {"kind": "act", "chunk": 2, "reads": ["images", "proprio"], "options": {"checkpoint": str(network)}},
        "optim": {"minibatch": 8, "micro_batch": 4, "epochs": 2},
        "rollout": {"decisions": 4},
        "sft": {"steps": 4, "batch": 8, "data": [str(root / "demos")]},
        "eval": {"episodes": 2, "videos": 0},
        "runtime": {"mode": "inline"},
        **sections,
    }
    return parse_config(data, "test")


def test_from_demonstrations_to_an_exported_folder(tmp_path: Path) -> None:
    network = tmp_path / "network"
    network.mkdir()
    entries = {"type": "act", "random_weights": 0, "chunk_size": 4, "dim_model": 16, "n_heads": 2, "latent_dim": 4,
               "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}  # fmt: skip
    (network / "config.json").write_text(json.dumps(entries))
    record_reach(tmp_path / "demos", 4, image_size=32, cameras=1)
    config = settings(tmp_path, network)
    warm = Path(sft_run(config.model_copy(update={"name": "warm"}), "test", tmp_path, False)["run"])
    policy = config.policy.model_copy(update={"init": warm})
    further = config.model_copy(update={"name": "further", "policy": policy})
    run = Path(train_run(further, "test", tmp_path, False)["run"])
    errors = [row["learner/first_ratio_error"] for row in read(run) if "learner/first_ratio_error" in row]
    assert len(errors) == 2 and max(errors) < 1e-5
    folders = [checkpoint.latest(each / "checkpoints") for each in (warm, run)]
    assert None not in folders
    learned, improved = (policies.load(str(folder)) for folder in folders)
    inputs = laws.random_inputs(improved.spec, 3, seed=1)
    assert not torch.equal(learned.act(inputs, None).chunk, improved.act(inputs, None).chunk)
    export_run(str(run), None, tmp_path / "out", tmp_path)
    spec = PolicySpec(3, 2, proprio_dim=improved.spec.proprio_dim, cameras=improved.spec.cameras, image_size=32)
    again = policies.build("act", spec, seed=0, checkpoint=str(tmp_path / "out"))
    # LeRobot's statistics are in 32 bits.
    assert torch.allclose(again.act(inputs, None).chunk, improved.act(inputs, None).chunk, rtol=0, atol=1e-5)


@pytest.mark.parametrize("workflow", ["grpo", "reinforce"])
def test_without_a_critic(workflow: str, tmp_path: Path) -> None:
    network = tmp_path / "network"
    network.mkdir()
    entries = {"type": "act", "random_weights": 0, "chunk_size": 4, "dim_model": 16, "n_heads": 2, "backbone_width": 4}
    (network / "config.json").write_text(json.dumps(entries))
    config = settings(
        tmp_path, network, workflow=workflow, rollout={"episode_group": 2}, advantage={"outcome": "return"}
    )
    result = train_run(config.model_copy(update={"iterations": 1, "name": workflow}), "test", tmp_path, False)
    assert len(list(read(Path(result["run"])))) == 1
