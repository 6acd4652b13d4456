"""Diffusion Policy from demonstrations to a folder that LeRobot loads, through every step that a user takes: a tiny
network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import policies
from embodied.commands.export import export_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.training.sft import read_demonstrations
from policies import PolicySpec
from policies.conformance import laws
from tests.embodied.support.expert import record_reach
from tests.embodied.training.test_imitation import info_of

NETWORK = {
    "type": "diffusion", "random_weights": 0, "horizon": 4, "down_dims": [16], "n_groups": 4, "kernel_size": 3,
    "diffusion_step_embed_dim": 8, "num_train_timesteps": 6, "spatial_softmax_num_keypoints": 4, "crop_shape": [34, 34],
    "use_separate_rgb_encoder_per_camera": False,
}  # fmt: skip


def network(folder: Path, **entries: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**NETWORK, **entries}))
    return folder


def settings(root: Path, checkpoint: Path, **sections: object) -> Config:
    data = {
        "iterations": 2,
        "env": {"task": "tabletop/reach", "num_envs": 4, "cameras": 1, "image_size": 40, "max_episode_steps": 6},
        "policy": {
            "kind": "diffusion", "chunk": 2, "reads": ["images", "proprio"],
            "options": {"checkpoint": str(checkpoint), "num_inference_steps": 3},
        },
        "optim": {"minibatch": 8, "micro_batch": 4, "epochs": 2},
        "rollout": {"decisions": 4},
        "sft": {"steps": 4, "batch": 8, "data": [str(root / "demos")]},
        "eval": {"episodes": 2, "videos": 0},
        "runtime": {"mode": "inline"},
        **sections,
    }  # fmt: skip
    return parse_config(data, "test")


def test_from_demonstrations_to_an_exported_folder(tmp_path: Path) -> None:
    record_reach(tmp_path / "demos", 4, image_size=40, cameras=1)
    config = settings(tmp_path, network(tmp_path / "network"))
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
    spec = PolicySpec(3, 2, proprio_dim=improved.spec.proprio_dim, cameras=improved.spec.cameras, image_size=40)
    again = policies.build("diffusion", spec, seed=0, checkpoint=str(tmp_path / "out"))
    # LeRobot's statistics are in 32 bits.
    assert torch.allclose(again.act(inputs, None).chunk, improved.act(inputs, None).chunk, rtol=0, atol=1e-5)


@pytest.mark.parametrize("workflow", ["grpo", "reinforce"])
def test_without_a_critic(workflow: str, tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        network(tmp_path / "network", backbone_width=4),
        workflow=workflow,
        rollout={"episode_group": 2},
        advantage={"outcome": "return"},
    )
    result = train_run(config.model_copy(update={"iterations": 1, "name": workflow}), "test", tmp_path, False)
    assert len(list(read(Path(result["run"])))) == 1


def test_the_last_rows_of_episodes_are_left_out(tmp_path: Path) -> None:
    """Rows that are learned from and measured on; statistics are of all rows."""
    record_reach(tmp_path / "demos", 6, image_size=40, cameras=1)
    episodes = Dataset(tmp_path / "demos").episodes
    for left_out in (0, 2):
        folder = network(tmp_path / str(left_out), drop_n_last_frames=left_out)
        config = settings(tmp_path, folder)
        data = read_demonstrations(config, info_of(config))
        kept = {row for e in episodes for row in range(e.begin, e.end - left_out)}
        assert {*data.train.tolist(), *data.held_out.tolist()} == kept
        used = [episodes[i] for i in data.sources[0].train]
        assert len(data.column("action")) == sum(e.length for e in used)
    folder = network(tmp_path / "all", drop_n_last_frames=max(e.length for e in episodes))
    config = settings(tmp_path, folder)
    with pytest.raises(UserError, match=r"learns from no episode's last \d+ env steps \(drop_n_last_frames\)"):
        read_demonstrations(config, info_of(config))
