"""The number of executed actions of a chunk is the setting's, or the checkpoint's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied.config.files import parse_config, save_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.run.folder import begun_from, with_init
from policies.registry import policy_kind
from tests.policies.act.cases import golden_checkpoint
from tests.policies.pi0.cases import GOLDEN

SMOLVLA = {"checkpoint": str(GOLDEN / "smolvla/checkpoint"), "backbone": str(GOLDEN / "smolvla/vlm")}
LEROBOT = {"checkpoint": str(GOLDEN / "pi0/checkpoint_lerobot")}


def config_of(kind: str, chunk: int, **options: Any) -> Config:
    return parse_config({"name": "run", "policy": {"kind": kind, "chunk": chunk, "options": options}}, "test")


@pytest.mark.parametrize(("kind", "options", "executed"), [("smolvla", SMOLVLA, 4), ("pi0", LEROBOT, 6)])
def test_zero_takes_the_checkpoints_number(kind: str, options: dict[str, Any], executed: int, tmp_path: Path) -> None:
    assert with_init(config_of(kind, 0, **options), tmp_path).policy.chunk == executed
    assert with_init(config_of(kind, 2, **options), tmp_path).policy.chunk == 2
    (note,) = policy_kind(kind).format.chunk_notes(options, 2, ())
    assert f"executes {executed} actions of a chunk (n_action_steps), and policy.chunk is 2" in note
    assert not policy_kind(kind).format.chunk_notes(options, executed, ())


def test_act_says_its_number_too(tmp_path: Path) -> None:
    checkpoint = str(golden_checkpoint(tmp_path / "act"))
    assert with_init(config_of("act", 0, checkpoint=checkpoint), tmp_path).policy.chunk == 4


@pytest.mark.parametrize("kind", ["gaussian_mlp", "pi0"])
def test_zero_is_refused_where_no_file_has_a_number(kind: str, tmp_path: Path) -> None:
    options = {"checkpoint": str(GOLDEN / "pi0/checkpoint")} if kind == "pi0" else {}
    with pytest.raises(UserError, match=f"no file of a {kind} has one: set policy.chunk to at least 1"):
        with_init(config_of(kind, 0, **options), tmp_path)


def test_a_resumed_run_keeps_its_number(tmp_path: Path) -> None:
    """Also where the checkpoint's is another one by now."""
    (tmp_path / "run/checkpoints/000001").mkdir(parents=True)
    (tmp_path / "run/checkpoints/000001/manifest.json").write_text("{}")
    save_config(config_of("smolvla", 3, **SMOLVLA), tmp_path / "run/config.yaml")
    assert begun_from(config_of("smolvla", 0, **SMOLVLA), tmp_path, True).policy.chunk == 3


def test_fifty_actions_in_libero_are_warned_of_whatever_the_policy() -> None:
    form = policy_kind("pi0").format
    (note,) = form.chunk_notes({"checkpoint": str(GOLDEN / "pi0/checkpoint")}, 50, ["libero/libero_spatial/0"])
    assert "policy.chunk is 50" in note and "set policy.chunk to 10" in note
