"""A finished run keeps its result when a film, the page or TensorBoard's files cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied.commands import evaluate
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from sim_farm.backends import tabletop
from sim_farm.contract import TaskSpec
from tests.variants import often

SETTINGS: dict[str, Any] = {
    "iterations": 1,
    "env": {"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 4},
    "policy": {"options": {"widths": [8]}},
    "rollout": {"decisions": 4},
    "optim": {"epochs": 1},
    "eval": {"episodes": 2, "videos": 2},
    "runtime": {"mode": "inline"},
}


class CannotDraw:
    def __init__(self, task: TaskSpec) -> None:
        raise RuntimeError("the graphics driver is gone")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], tuple[dict[str, Any], Path]]:
    """A run in `tabletop` with another renderer."""

    def train(renderer: Any) -> tuple[dict[str, Any], Path]:
        monkeypatch.setattr(tabletop, "BACKEND", replace(tabletop.BACKEND, make_renderer=renderer))
        result = train_run(parse_config({**SETTINGS, "name": "run"}, "test"), "test", tmp_path, resume=False)
        folder = tmp_path / "run"
        assert result["episodes"] == 2 and (folder / "eval.json").is_file(), "the evaluation is lost"
        return result, folder

    return train


@pytest.mark.parametrize(
    ("renderer", "filmed"),
    often(
        [(tabletop.BACKEND.make_renderer, True), (CannotDraw, False)],
        [(tabletop.BACKEND.make_renderer, True), (CannotDraw, False), (None, False)],
    ),
)
def test_a_film_that_fails_costs_the_film(renderer: Any, filmed: bool, trained: Any, capsys: Any) -> None:
    result, folder = trained(renderer)
    assert (folder / "videos" / "evaluation.mp4").exists() is filmed
    assert Path(result["report"]).is_file()
    said = " ".join(capsys.readouterr().out.split())
    warned = "Warning: the film could not be made" in said
    assert warned is (renderer is CannotDraw), "nothing is filmed where there is no camera"
    assert not warned or "RuntimeError: the graphics driver is gone (" in said, said
    assert not warned or said.index("kept in") < said.index("the film"), "the result waits for the film"


def test_a_page_that_fails_costs_the_page(trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def failing(run_dir: Path) -> Path:
        raise ValueError("no such chart")

    monkeypatch.setattr(evaluate, "write_report", failing)
    result, _ = trained(None)
    assert "report" not in result
    assert "Warning: the report could not be made (ValueError: no such chart)" in capsys.readouterr().out


def test_tensorboard_that_fails_costs_its_files(trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import fails
    _, folder = trained(None)
    assert (folder / "metrics.jsonl").read_text().count("\n") == 1
    assert capsys.readouterr().out.count("Warning: tensorboard does not follow") == 1
