"""OpenVLA from demonstrations to an exported adapter, through every step that a user takes: a tiny network."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policies
from embodied.commands.evaluate import evaluate_run
from embodied.commands.export import export_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, parse_config, save_config
from embodied.config.schema import Config
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from policies.contract import Policy
from policies.openvla.normalisation import DEMONSTRATIONS
from tests.embodied.support.expert import record_reach
from tests.variants import often

SHORT = {
    "env": {"num_envs": 2, "max_episode_steps": 4},
    "optim": {"minibatch": 8, "micro_batch": 3, "epochs": 2},
    "rollout": {"decisions": 6},
    "sft": {"steps": 6, "batch": 8, "measure_every": 3},
    "eval": {"episodes": 2, "videos": 0},
    "runtime": {"mode": "inline"},
}


@dataclass(frozen=True)
class Steps:
    """What each step left."""

    config: Config
    demos: Dataset
    warm: Path
    further: Path
    result: dict[str, Any]


def short(name: str, demos: Dataset, **options: Any) -> Config:
    """The configuration of that name with seconds of work; instructions of two lengths would need two tasks."""
    data = load_config(name).model_dump(mode="json")
    for section, differs in SHORT.items():
        data[section] |= differs
    data["policy"]["options"] |= options
    data["iterations"] = 2
    data["sft"]["data"] = [str(demos.folder)]
    return parse_config(data, name)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", 6, image_size=56, cameras=2)


@pytest.fixture(scope="module", params=often(("openvla_tiny",), ("openvla_tiny", "openvla_oft_tiny")))
def steps(request: pytest.FixtureRequest, demos: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Warm start, then two iterations of reinforcement from it, each with its evaluation."""
    root = tmp_path_factory.mktemp(request.param)
    config = short(request.param, demos)
    warm = sft_run(config.model_copy(update={"name": "warm"}), "test", root, False)
    policy = config.policy.model_copy(update={"init": Path("warm")})
    further = config.model_copy(update={"name": "further", "policy": policy})
    result = train_run(further, "test", root, False)
    return Steps(config, demos, Path(warm["run"]), Path(result["run"]), result)


def newest(run: Path) -> Path:
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    return found


def says(policy: Policy, demos: Dataset) -> torch.Tensor:
    inputs = demos.batch([0, 3, 7], policy.spec.chunk, policy.spec.cameras).inputs()
    return policy.act(replace(inputs, state=None, proprio=None), None).chunk


@pytest.mark.slow
def test_reinforcement_begins_where_imitation_ended(steps: Steps) -> None:
    rows = read(steps.further)
    assert len(rows) == 2
    assert all(row["learner/first_ratio_error"] <= 1e-4 for row in rows)
    assert all(row["learner/steps"] > 0 for row in rows)
    assert steps.result["episodes"] == 2
    warm, further = (policies.load(newest(run)) for run in (steps.warm, steps.further))
    before, after = dict(warm.named_parameters()), dict(further.named_parameters())
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    if "lora_rank" in steps.config.policy.options:
        assert all("lora_" in name or name.startswith("value_head.") for name in moved), "the base is frozen"
    units = [policy.state_dict()["statistics.low"] for policy in (warm, further)]
    assert torch.equal(*units)
    assert units[0].abs().max() < 0.9, "they are the demonstrations', not the network's"


def test_what_is_exported_acts_as_the_run_does(steps: Steps, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    export_run(str(steps.further), None, out, tmp_path)
    own = policies.load(newest(steps.further))
    plain = {key: value for key, value in steps.config.policy.options.items() if not key.startswith("lora")}
    merged = policies.build(steps.config.policy.kind, own.spec, 0, **{**plain, "checkpoint": str(out)})
    assert (says(merged, steps.demos) - says(own, steps.demos)).abs().max() < 1e-5
    statistics = json.loads((out / "dataset_statistics.json").read_text())
    assert DEMONSTRATIONS in statistics
    env, says_so = steps.config.env, (out / "README.md").read_text()
    assert f"| pictures | {env.orientation} (env.orientation)" in says_so and f"| gripper | {env.gripper}" in says_so


@pytest.mark.slow
def test_an_adapter_is_in_pefts_layout_and_is_trained_further(demos: Dataset, steps: Steps, tmp_path: Path) -> None:
    if "lora_rank" not in steps.config.policy.options:
        assert not (newest(steps.further) / "policy" / "adapter_config.json").exists(), "every weight is trained"
        return
    folder = newest(steps.further) / "policy"
    assert (folder / "adapter_model.safetensors").exists()
    config = short("openvla_tiny", demos, adapter=str(folder), lora_rank=0)
    own = policies.load(newest(steps.further))
    other = policies.build("openvla", own.spec, 1, **config.policy.options)
    assert torch.equal(says(own, demos), says(other, demos))
    result = train_run(config.model_copy(update={"name": "third", "iterations": 1}), "test", tmp_path, False)
    assert result["iterations"] == 1


def test_somebodys_checkpoint_is_evaluated_as_it_is(demos: Dataset, tmp_path: Path) -> None:
    """Without a run: how good is what was downloaded?"""
    path = tmp_path / "own.yaml"
    save_config(short("openvla_tiny", demos, lora_rank=0), path)
    result = evaluate_run(str(path), load_config(str(path)), None, tmp_path)
    assert result["episodes"] == 2


def test_a_policy_without_a_community_has_nothing_to_export(tmp_path: Path, demos: Dataset) -> None:
    data = {"env": {"task": "tabletop/reach", "num_envs": 2}, "iterations": 1, **{k: SHORT[k] for k in ("eval",)}}
    config = parse_config({**data, "name": "small", "runtime": SHORT["runtime"], "rollout": {"decisions": 2}}, "test")
    train_run(config, "test", tmp_path, False)
    with pytest.raises(policies.PolicyError, match="no layout but this project's"):
        export_run("small", None, tmp_path / "out", tmp_path)
    with pytest.raises(UserError, match="exists"):
        export_run("small", None, tmp_path, tmp_path)
    assert not (tmp_path / "out").exists()
