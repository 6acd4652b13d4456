"""Damaged directories of models and policies: refused by name, or a policy that acts in finite numbers."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import policies
from policies import Policy, PolicyError, PolicySpec
from policies.lerobot.features import check_numbers, ordered_cameras
from policies.lerobot.statistics import read_lerobot
from policies.pi0.checkpoint import find_sources
from policies.registry import check, policy_kind
from policies.scripted.replay import save_recording
from policies.smolvla.checkpoint import find_sources as smolvla_sources
from policies.smolvla.inputs import Prompts
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds
from tests.policies.openvla.cases import CHUNK, OFT, ONE_ACTION, OPENVLA, random_inputs
from tests.policies.pi0.cases import GOLDEN, SPEC
from tests.policies.pi0.test_pi0_adapters import described, peft_adapter
from tests.policies.pi0.test_pi0_processors import relative, with_modes
from tests.policies.smolvla import cases as smolvla

STATES = PolicySpec(action_dim=3, chunk=2, state_dim=5)
IMAGES = PolicySpec(action_dim=3, chunk=2, state_dim=5, proprio_dim=4, cameras=("front",), image_size=32)
SMALL = {"value_widths": [8]}
UNITS = {"unnorm_key": "toy_spatial_no_noops", **SMALL}
ADAPTED = {**SMALL, "lora_rank": 2}
SMOLVLA = {"checkpoint": str(smolvla.GOLDEN / "checkpoint"), "backbone": str(smolvla.GOLDEN / "vlm"), "steps": 2}
Case = tuple[str, PolicySpec, dict[str, Any]]
SAVED: dict[str, Case] = {
    "gaussian_mlp": ("gaussian_mlp", STATES, {"widths": [8, 8]}),
    "flow": ("flow", IMAGES, {"encoder": "cnn", "widths": [8, 8], "features": 8}),
    "openvla, adapter": ("openvla", ONE_ACTION, {"checkpoint": str(OPENVLA / "checkpoint"), **UNITS, **ADAPTED}),
    "pi0": ("pi0", SPEC, {"checkpoint": str(GOLDEN / "pi0/checkpoint"), **SMALL}),
    "smolvla": ("smolvla", smolvla.SPEC, {**SMOLVLA, **SMALL}),
    "smolvla, adapter": ("smolvla", smolvla.SPEC, {**SMOLVLA, **ADAPTED}),
    "pi0, adapter": ("pi0", SPEC, {"checkpoint": str(GOLDEN / "pi0/checkpoint"), "lora_parts": ["expert"], **ADAPTED}),
}
PUBLISHED: dict[str, Case] = {
    "openvla": ("openvla", ONE_ACTION, {"checkpoint": str(OPENVLA / "checkpoint"), **UNITS}),
    "openvla_oft": (
        "openvla_oft", replace(CHUNK, proprio_dim=8),
        {"checkpoint": str(OFT / "checkpoint"), "head": "l1", "proprio": True, **UNITS},
    ),
    "smolvla": ("smolvla", smolvla.SPEC, {**SMOLVLA, **SMALL}),
    "pi0, openpi": ("pi0", SPEC, {"checkpoint": str(GOLDEN / "pi0/checkpoint"), **SMALL}),
    "pi0.5, lerobot": (
        "pi0", SPEC, {"checkpoint": str(GOLDEN / "pi05/checkpoint_lerobot"), "state_in_prompt": True, **SMALL},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAVED)
@few_or_many(4)
def test_damaged_policies(case: str, cases: range, tmp_path: Path) -> None:
    kind, spec, options = SAVED[case]
    policies.save(policies.build(kind, spec, seed=0, **options), tmp_path / "whole")
    holds(
        cases, Damaged(tmp_path / "whole", tmp_path / "policy"), lambda path: acts(policies.load(path)), (PolicyError,)
    )


@pytest.mark.parametrize("case", PUBLISHED)
@few_or_many(4)
def test_damaged_checkpoints_of_others(case: str, cases: range, tmp_path: Path) -> None:
    kind, spec, options = PUBLISHED[case]

    def read(path: Path) -> None:
        given = {**options, "checkpoint": str(path)}
        check(kind, given)
        acts(policies.build(kind, spec, seed=0, **given))

    holds(cases, Damaged(Path(options["checkpoint"]), tmp_path / "checkpoint"), read, (PolicyError,))


@few_or_many(15, 10_000)
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_damaged_processors(family: str, cases: range, tmp_path: Path) -> None:
    """LeRobot's, with relative actions and mixed modes: what is said before a tensor is read, and the units."""
    whole = Path(shutil.copytree(GOLDEN / family / "checkpoint_lerobot", tmp_path / "whole"))
    relative(whole)
    with_modes(whole, "MIN_MAX", "QUANTILE10")
    spec, seen = SPEC, {"state_in_prompt": family == "pi05", **SMALL}

    def read(path: Path) -> None:
        given = {"checkpoint": str(path), **seen}
        check("pi0", given)
        policy_kind("pi0").format.assumed(given)
        source = find_sources(str(path))
        ordered_cameras(source, spec.cameras)
        check_numbers(source, spec.action_dim, spec.proprio_dim)
        read_lerobot(path)

    holds(cases, Damaged(whole, tmp_path / "checkpoint"), read, (PolicyError,))


@few_or_many(60, 10_000)
@pytest.mark.parametrize("layout", ["0.6", "0.3"])
def test_damaged_folders_of_smolvla(layout: str, cases: range, tmp_path: Path) -> None:
    """What is said before the network is read, and the units."""
    whole = Path(shutil.copytree(smolvla.GOLDEN / "checkpoint", tmp_path / "whole"))
    if layout == "0.3":
        smolvla.of_lerobot_03(whole)

    def read(path: Path) -> None:
        given = {**SMOLVLA, "checkpoint": str(path), **SMALL}
        check("smolvla", given)
        policy_kind("smolvla").format.chunk_notes(given, 50, ["libero/libero_goal/1"])
        source = smolvla_sources(str(path), backbone=str(smolvla.GOLDEN / "vlm"))
        ordered_cameras(source, smolvla.SPEC.cameras)
        check_numbers(source, 7, 8)
        source.units()

    holds(cases, Damaged(whole, tmp_path / "checkpoint"), read, (PolicyError,))


@few_or_many(60, 10_000)
def test_damaged_backbones(cases: range, tmp_path: Path) -> None:
    def read(path: Path) -> None:
        sizes = smolvla_sources(SMOLVLA["checkpoint"], backbone=str(path)).sizes()
        Prompts(path, sizes.prompt_len, sizes.vocab_size).batch(("pick up the bowl",))

    holds(cases, Damaged(smolvla.GOLDEN / "vlm", tmp_path / "vlm"), read, (PolicyError,))


@few_or_many(4)
def test_damaged_adapters_of_others(cases: range, tmp_path: Path) -> None:
    base = GOLDEN / "pi05" / "checkpoint_lerobot"
    peft_adapter(base, tmp_path / "whole")
    described(base, tmp_path / "whole")

    def read(path: Path) -> None:
        given = {"checkpoint": str(base), "adapter": str(path), "state_in_prompt": True, **SMALL}
        check("pi0", given)
        acts(policies.build("pi0", SPEC, seed=0, **given))

    holds(cases, Damaged(tmp_path / "whole", tmp_path / "adapter"), read, (PolicyError,))


@few_or_many(10, 10_000)
def test_damaged_recordings(cases: range, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    actions = [np.full((length, 3), length, np.float32) for length in (2, 5)]
    save_recording(tmp_path / "whole/played.safetensors", [(0, None), (1, 2)], actions)
    damaged = Damaged(tmp_path / "whole", tmp_path / "recording")

    def read(path: Path) -> None:
        policies.build("replay", PolicySpec(action_dim=3, chunk=2), 0, recording=str(path / "played.safetensors"))

    holds(cases, damaged, read, (PolicyError,))


def acts(policy: Policy) -> None:
    """What was accepted is whole: every tensor is finite, and it decides, or says why it cannot."""
    for name, tensor in policy.state_dict().items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), name
    with suppress(PolicyError):
        policy.act(random_inputs(policy.spec, 1, seed=0, texts=("pick",)), None)
