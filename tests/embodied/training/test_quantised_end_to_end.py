"""A quantised base through every step that a user takes: demonstrations, reinforcement, resume, evaluation, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import policies
from embodied.commands.evaluate import evaluate_run
from embodied.commands.export import export_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.training.checks import Checked, check_settings
from embodied.training.dry_run import dry_run
from policies.quantised import quantised_layers
from tests.embodied.support.expert import record_reach
from tests.embodied.training.test_openvla_end_to_end import SHORT, newest, says


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", 4, image_size=56, cameras=1)


def short(demos: Dataset, **policy: object) -> Config:
    data = load_config("openvla_small_lora").model_dump(mode="json")
    for section, differs in SHORT.items():
        data[section] |= differs
    data["optim"] |= {"moments": "int8", "recompute": True, "lr_schedule": "constant"}
    data["policy"] |= policy
    data |= {"iterations": 2, "checkpoint_every": 1, "extra_tasks": []}
    data["env"]["task"] = "tabletop/reach"
    data["eval"]["tasks"] = []
    data["sft"]["data"] = [str(demos.folder)]
    return parse_config(data, "openvla_small_lora")


@pytest.mark.slow
def test_every_step_with_a_quantised_base(demos: Dataset, tmp_path: Path) -> None:
    config = short(demos, base="nf4")
    sft_run(config.model_copy(update={"name": "warm"}), "test", tmp_path, False)
    policy = config.policy.model_copy(update={"init": Path("warm")})
    further = config.model_copy(update={"name": "further", "policy": policy})
    result = train_run(further, "test", tmp_path, False)
    run = Path(result["run"])
    assert all(row["learner/first_ratio_error"] <= 1e-5 for row in read(run))
    assert not list((newest(run) / "policy").glob("model*.safetensors")), "a checkpoint holds the adapter alone"
    own = policies.load(newest(run))
    assert own.base == "nf4" and len(list(quantised_layers(own))) > 20

    # Resumed, with Adam's packed moments, it computes what it would have computed.
    longer = further.model_copy(update={"iterations": 3})
    whole = train_run(longer.model_copy(update={"name": "whole"}), "test", tmp_path, False)
    resumed = train_run(longer, "test", tmp_path, True)
    expected, found = (policies.load(newest(Path(each["run"]))).state_dict() for each in (whole, resumed))
    moments = [checkpoint.OptimizerState.read(newest(Path(each["run"]))).tensors for each in (whole, resumed)]
    for mine, its in ((found, expected), moments):
        assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)

    evaluated = evaluate_run("further", load_config(str(run / "config.yaml")), newest(run), tmp_path)
    assert "base in nf4" in evaluated["policy_line"]

    export_run("further", None, tmp_path / "merged", tmp_path)
    assert "differ from the base's files by about 9.2%" in (tmp_path / "merged" / "README.md").read_text()
    plain = {key: value for key, value in config.policy.options.items() if not key.startswith("lora")}
    acting = policies.load(newest(run))
    merged = policies.build("openvla", acting.spec, 0, **{**plain, "checkpoint": str(tmp_path / "merged")})
    assert (says(merged, demos) - says(acting, demos)).abs().max() < 1e-3


def test_a_dry_run_counts_a_quantised_base(demos: Dataset) -> None:
    found = {base: dry_run(short(demos, base=base)) for base in (None, "int8", "nf4")}
    assert len({each["policy"]["parameters"] for each in found.values()}) == 1
    weights = [found[base]["bytes"]["weights"] for base in (None, "int8", "nf4")]
    assert weights == sorted(weights, reverse=True)


def test_what_is_quantised_has_no_shards(demos: Dataset) -> None:
    for key, config in (
        ("policy.base", short(demos, base="nf4")),
        ("optim.moments", short(demos)),
    ):
        sharded = config.model_copy(update={"optim": config.optim.model_copy(update={"sharding": "sharded"})})
        with pytest.raises(UserError, match=f"{key} is .*Set optim.sharding to whole"):
            check_settings(Checked(command="train", config=sharded))
