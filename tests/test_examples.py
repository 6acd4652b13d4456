"""Every file of examples/ runs, at a smaller size, and stays short."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import embodied
from embodied.config.schema import Config

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples").glob("*.py"))
TRAIN = ("own_policy", "own_simulator", "own_estimator", "own_scorer")
"""Examples that train with their `CONFIG`."""
MOST_LINES = 80


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Imports an example by its name, as its folder's scripts do."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    imported: list[str] = []

    def load(name: str) -> ModuleType:
        imported.append(name)
        return importlib.import_module(name)

    yield load
    for name in imported:
        sys.modules.pop(name, None)


def _short(config: Config) -> Config:
    data = config.model_dump(mode="json")
    data["iterations"] = 2
    data["runtime"]["mode"] = "inline"
    data["eval"]["episodes"] = 4
    return Config.model_validate(data)


@pytest.mark.parametrize("name", TRAIN)
def test_an_example_trains(example: Any, name: str) -> None:
    result = embodied.train(_short(example(name).CONFIG), runs_dir="runs")
    assert result.evaluation.episodes == 4 and result.report is not None and result.report.is_file()


def test_the_evaluation_reads_the_run_of_the_training(example: Any) -> None:
    small = {"iterations": 2, "rollout.decisions": 16, "eval.episodes": 4}
    trained = example("train").main({**example("train").SETTINGS, **small})
    assert trained.evaluation.episodes == 4 and "my/reward_per_step" in trained.metrics()[-1]
    result = example("evaluate").main()
    assert result.episodes == 50 and result.data is not None and not result.data["protocol"]["greedy"]


def test_the_plan_for_a_cluster_is_written(example: Any) -> None:
    best = example("plan_a_cluster").main(nodes=2)
    assert best.prediction.iteration_s > 0 and Path("plan.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_simulator", "own_policy"])
def test_an_example_as_a_script_is_found_by_its_workers(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/report.html"))


@pytest.mark.parametrize(("name", "size"), [("sb3_ppo", 512), ("cleanrl_ppo", 2)])
def test_another_library_s_ppo_runs_on_the_farm(example: Any, name: str, size: int) -> None:
    assert 0 <= example(name).main(size) <= 1


def test_an_example_is_at_most_eighty_lines_long() -> None:
    long = {path.name: count for path in FILES if (count := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in FILES} == {*TRAIN, "train", "evaluate", "plan_a_cluster", "sb3_ppo", "cleanrl_ppo"}
