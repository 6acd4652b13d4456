"""Runs on a simulator that declares that its episodes cannot be replayed, or its pictures not be drawn elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import embodied
from embodied.config.files import parse_config
from embodied.errors import UserError
from embodied.reporting.metrics import read
from sim_farm.contract import FarmError
from sim_farm.workers import faults

SIMULATOR = """
from dataclasses import replace

import numpy as np

from sim_farm.backends.tabletop import TabletopPhysics, TabletopRenderer
from sim_farm.contract import Backend


class Restless(TabletopPhysics):
    def __init__(self, spec):
        super().__init__(replace(spec, name="tabletop/reach"))

    def reset(self, episode):
        return super().reset(replace(episode, seed=int(np.random.default_rng().integers(2**31))))


def draw(spec):
    return TabletopRenderer(replace(spec, name="tabletop/reach"))


BACKEND = Backend("restless", Restless, draw, lambda: ["reach"], exact_replay=False, exact_split=False)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the simulator's module."""
    (tmp_path / "restless.py").write_text(SIMULATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("restless", None)


def settings(mode: str = "inline", **more: Any) -> dict[str, Any]:
    return {
        "iterations": 3,
        "checkpoint_every": 1,
        "env": {"task": "restless:BACKEND/reach", "num_envs": 4},
        "policy": {"options": {"widths": [8]}},
        "farm": {"physics_workers": 2},
        "rollout": {"decisions": 16},
        "eval": {"episodes": 4, "videos": 2},
        "runtime": {"mode": mode},
        **more,
    }


def test_it_trains_and_goes_on_and_is_neither_filmed_nor_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(settings(), "test")
    first = embodied.train(config.model_copy(update={"iterations": 2, "name": "run"}))
    assert "No film of restless:BACKEND/reach: a film is a replay" in capsys.readouterr().out
    result = embodied.train(config.model_copy(update={"name": "run"}), resume=True)
    assert result.run == first.run and [row["iteration"] for row in read(result.run)] == [1, 2, 3]
    assert result.evaluation.episodes == 4 and not list(folder.rglob("*.mp4"))
    with pytest.raises(UserError, match="declares exact_replay=False: recordings are replays"):
        embodied.record(result.run, folder / "data", episodes=2, code=["restless:BACKEND"])


def test_render_workers_are_refused_before_anything_starts(folder: Path) -> None:
    more = settings(env={"task": "restless:BACKEND/reach", "cameras": 1, "num_envs": 4})
    more["policy"] = {"kind": "flow", "reads": ["proprio", "images"], "options": {"encoder": "cnn"}}
    more["farm"]["render_workers"] = 1
    with pytest.raises((UserError, FarmError), match="set farm.render_workers to 0, got 1"):
        embodied.train(parse_config(more, "test"))
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_on_ray_a_killed_physics_worker_costs_its_episodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck = folder / "faults.json"
    struck.write_text(json.dumps([{"worker": "physics 1", "phase": "step", "kind": "kill", "nth": 20}]))
    monkeypatch.setenv(faults.VARIABLE, str(struck))
    run = embodied.train(parse_config(settings("ray", name="ray"), "test")).run
    assert Path(f"{struck}.fired-0").exists(), "the fault has not struck"
    rows = read(run)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert sum(row.get("learner/broken_episodes", 0) for row in rows) == 2, "the lost worker had two environments"
