"""What is said of a checkpoint directory without building its policy."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from policies.checkpoint_inspection import inspect_checkpoint
from policies.contract import PolicyError
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds

GOLDEN = Path("tests/golden")


def test_openvla_ofts_parts_beside_the_weights_are_named() -> None:
    found = inspect_checkpoint(GOLDEN / "openvla_oft/checkpoint")
    assert found.kind.startswith("openvla, Hugging Face's")
    assert found.sizes["image_sizes"] == [28, 28]
    assert found.parameters > 100_000
    assert {entry.dataset for entry in found.statistics} == {"toy_spatial_no_noops", "toy_long"}
    assert {entry.vector for entry in found.statistics} == {"action", "proprio"}
    assert found.beside == ("action_head--7_checkpoint.pt", "proprio_projector--7_checkpoint.pt")
    assert "action_head--7_checkpoint.pt" in found.warnings[0]


def test_lerobots_processor_steps_are_listed_in_order() -> None:
    found = inspect_checkpoint(GOLDEN / "pi05/checkpoint_lerobot")
    assert found.kind == "pi05, LeRobot's layout"
    steps = [step.split(" ")[1] for step in found.steps]
    assert (
        steps.index("normalizer_processor") < steps.index("tokenizer_processor") < steps.index("unnormalizer_processor")
    )
    action = next(entry for entry in found.statistics if entry.vector == "action")
    assert action.ends == "q01 to q99"
    assert len(action.low) == 7
    assert not found.beside


def test_openpis_statistics_are_found_below_assets() -> None:
    found = inspect_checkpoint(GOLDEN / "pi0/checkpoint")
    assert "openpi" in found.kind
    assert {(entry.dataset, entry.vector) for entry in found.statistics} == {
        ("assets/toy/libero", "actions"),
        ("assets/toy/libero", "state"),
    }


def test_nearly_constant_dimensions_are_warned_of(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "openvla_oft/checkpoint", tmp_path / "still"))
    path = folder / "dataset_statistics.json"
    data = json.loads(path.read_text())
    data["toy_long"]["action"]["q01"][2] = data["toy_long"]["action"]["q99"][2] = 0.25
    path.write_text(json.dumps(data))
    assert any(
        "toy_long: action is nearly constant in dimensions 2" in text for text in inspect_checkpoint(folder).warnings
    )


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "openvla/openvla-7b", "r": 32, "target_modules": ["q_proj", "fc1"]})
    )
    found = inspect_checkpoint(tmp_path)
    assert found.adapter["base"] == "openvla/openvla-7b"
    assert found.adapter["modules"] == ["fc1", "q_proj"]
    assert "there are no weights in safetensors here" in found.warnings


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no checkpoint that is known here"):
        inspect_checkpoint(tmp_path)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    """JSON can write half a pair of surrogates (`\\ud800`); no path, terminal or digest takes one."""
    folder = Path(shutil.copytree(GOLDEN / "pi05/checkpoint_lerobot", tmp_path / "half"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repo_id": "\ud800"}))
    with pytest.raises(PolicyError, match="config.json cannot be read.*surrogates not allowed"):
        inspect_checkpoint(folder)


def shown(folder: Path) -> None:
    """All that is said of a checkpoint, as a program prints it."""
    json.dumps(asdict(inspect_checkpoint(folder)))


@few_or_many(10, 10_000)
@pytest.mark.parametrize("name", ["openvla_oft/checkpoint", "pi05/checkpoint_lerobot", "pi0/checkpoint"])
def test_damaged_checkpoints(name: str, cases: range, tmp_path: Path) -> None:
    holds(cases, Damaged(GOLDEN / name, tmp_path / "damaged"), shown, (PolicyError,))
