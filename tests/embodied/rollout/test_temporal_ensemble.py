"""Temporal ensembling: as LeRobot averages, and as an evaluation executes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied.commands.evaluate import evaluate_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.rollout.executed_chunks import ExecutedChunks

GOLDEN = Path(__file__).parents[2] / "golden" / "act" / "ensembles.safetensors"
STEPS = 6


@pytest.mark.parametrize("coefficient", ["0.01", "0.0", "-0.5"])
def test_predictions_are_averaged_as_by_lerobot(coefficient: str) -> None:
    """Values of LeRobot 0.6.1's ensembler, from the first decision to long after the first chunk's end."""
    golden = load_file(GOLDEN)
    ensemble = ExecutedChunks(1, float(coefficient))
    found = np.stack([ensemble.execute(chunk)[0] for chunk in golden["chunks"]])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, golden[f"actions.{coefficient}"], atol=1e-6)


def test_a_large_coefficient_leaves_one_prediction() -> None:
    chunks = np.random.default_rng(1).standard_normal((4, 3, 2)).astype(np.float32)
    oldest, newest = ExecutedChunks(1, 100.0), ExecutedChunks(1, -100.0)
    assert np.array_equal([oldest.execute(chunk)[0] for chunk in chunks], [*chunks[0], chunks[1, 2]])
    assert np.array_equal([newest.execute(chunk)[0] for chunk in chunks], chunks[:, 0])


def config(root: Path, chunk: int, **options: Any) -> Config:
    network = root / "network"
    if not network.exists():
        network.mkdir()
        entries = {"type": "act", "random_weights": 0, "chunk_size": STEPS, "dim_model": 16, "n_heads": 2,
                   "backbone_width": 4}  # fmt: skip
        (network / "config.json").write_text(json.dumps(entries))
    return parse_config(
        {
            "env": {"task": "tabletop/reach", "num_envs": 2, "cameras": 1, "image_size": 32,
                    "max_episode_steps": STEPS},
            "policy": {"kind": "act", "chunk": chunk, "reads": ["images", "proprio"],
                       "options": {"checkpoint": str(network), **options}},
            "eval": {"episodes": 3, "videos": 0},
            "runtime": {"mode": "inline"},
        },
        "test",
    )  # fmt: skip


def actions(root: Path, name: str, chunk: int, **options: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The executed actions of each episode, and what identifies the evaluation."""
    folder = root / name
    evaluate_run(name, config(root, chunk, **options), None, root, into=folder)
    found = [np.load(path) for path in sorted(folder.rglob("*.npy"))]
    return found, json.loads((folder / "protocol.json").read_text())["policy"]


def test_an_evaluation_executes_averages(tmp_path: Path) -> None:
    """With one prediction that counts for all, it is a whole chunk of the first decision, or a decision at every step;
    and an average between is neither."""
    whole, _ = actions(tmp_path, "whole", STEPS)
    single, plain = actions(tmp_path, "single", 1)
    oldest, _ = actions(tmp_path, "oldest", 1, temporal_ensemble=100.0)
    newest, _ = actions(tmp_path, "newest", 1, temporal_ensemble=-100.0)
    between, averaged = actions(tmp_path, "between", 1, temporal_ensemble=0.01)
    assert len(whole) == 3
    for a, b, c, d, e in zip(whole, single, oldest, newest, between, strict=True):
        np.testing.assert_allclose(c, a[: len(c)], atol=1e-5)
        np.testing.assert_allclose(d, b, atol=1e-5)
        assert len(a) == STEPS and np.abs(a - b).max() > 1e-3
        assert np.abs(e[1:] - a[1:]).max() > 1e-4 and np.abs(e[1:] - b[1:]).max() > 1e-4
        np.testing.assert_allclose(e[0], a[0], atol=1e-5)
    assert averaged != plain and averaged["temporal_ensemble"] == 0.01 and "temporal_ensemble" not in plain


def test_a_coefficient_of_the_folder_is_printed_and_identifies_the_result(tmp_path: Path) -> None:
    config(tmp_path, 1)
    path = tmp_path / "network" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temporal_ensemble_coeff": 0.5}))
    options = {"folder": {}, "off": {"temporal_ensemble": False}, "option": {"temporal_ensemble": 0.5}}
    found = {name: actions(tmp_path, name, 1, **each) for name, each in options.items()}
    lines = {name: json.loads((tmp_path / name / "eval.json").read_text())["policy_line"] for name in found}
    assert found["folder"][1]["temporal_ensemble"] == 0.5 and "temporal_ensemble" not in found["off"][1]
    assert "act, chunks of 1, temporal ensembling with coefficient 0.5, " in lines["folder"]
    assert "ensembling" not in lines["off"]
    for a, b, c in zip(*(found[name][0] for name in ("folder", "option", "off")), strict=True):
        assert np.array_equal(a, b) and not np.array_equal(a, c)
