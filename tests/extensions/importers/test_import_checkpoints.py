"""`embodied import` of what other trainings leave: the command line, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied import cli
from embodied.demonstrations.mixture import open_dataset
from embodied.errors import UserError
from embodied_importers.formats import format_of
from policies.files import Shards
from tests.policies.pi0.cases import GOLDEN
from tests.policies.shards import trained

BASE = GOLDEN / "pi0" / "checkpoint"


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder as RLinf leaves it."""
    folder = tmp_path / "global_step_10"
    (folder / "actor/model_state_dict").mkdir(parents=True)
    state = {f"module.{name}": tensor for name, tensor in trained(BASE).items()}
    torch.save({**state, "value_head.0.weight": torch.ones(2, 2)}, folder / "actor/model_state_dict/full_weights.pt")
    return folder


def test_the_command_line(left: Path, tmp_path: Path) -> None:
    out, result = tmp_path / "out", tmp_path / "result.json"
    command = ["import", str(left), "--base", str(BASE), "--out", str(out)]
    assert cli.main([*command, "--json", str(result)]) == 0
    shards = Shards.find(out)
    for name, tensor in trained(BASE).items():
        assert torch.equal(shards.tensor(name), tensor)
    summary = json.loads(result.read_text())
    assert summary == json.loads((out / "import.json").read_text())
    assert summary["left_out"] == ["value_head.0.weight"] and summary["kind"] == "a whole state dict"
    assert summary["tensors"] == summary["changed"] == len(shards.files) == len(trained(BASE))
    assert cli.main(command) == 2  # it is there already


def test_what_is_refused_leaves_nothing(left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for options, words in (
        ([], "give the checkpoint that the training began from, with --base FOLDER"),
        (["--base", str(left)], "has no config.json"),
        (["--base", str(BASE), "--fps", "20"], "--fps is not for"),
        (["--base", str(BASE), "--episodes", "0-3"], "what can be given is: --base"),
    ):
        assert cli.main(["import", str(left), "--out", str(out), *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert not out.exists() and not (tmp_path / ".out.partial").exists()


def test_a_checkpoint_is_no_dataset(left: Path) -> None:
    found = format_of(left)
    assert found is not None and not found.is_dataset
    with pytest.raises(UserError, match="info.json") as error:
        open_dataset(left)
    assert "embodied import" not in str(error.value)


def test_other_files_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    for name, content in (("a.pt", b"text"), ("a.json", b"{}"), ("a.safetensors", b"PK\3\4")):
        (tmp_path / name).write_bytes(content)
        assert format_of(tmp_path / name) is None
    assert format_of(tmp_path) is None and format_of(tmp_path / "none") is None
