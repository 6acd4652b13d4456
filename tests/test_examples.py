"""Every file of examples/ runs, at a smaller size, and stays short."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import embodied
from embodied.config.schema import Config
from policies.registry import KINDS
from sim_farm.contract import TaskSpec
from sim_farm.registry import BACKENDS
from tests.sim_farm.conformance import PHYSICS_LAWS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples").glob("*.py"))
TRAIN = ("train", "own_policy", "own_simulator", "own_estimator", "own_scorer")
"""Examples that train with their `CONFIG`."""
MOST_LINES = 80


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Imports an example by its name, as its folder's scripts do; what it registers is taken back."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    before = dict(KINDS), dict(BACKENDS)
    imported: list[str] = []

    def load(name: str) -> ModuleType:
        imported.append(name)
        return importlib.import_module(name)

    yield load
    for registry, names in zip((KINDS, BACKENDS), before, strict=True):
        registry.clear()
        registry.update(names)
    for name in imported:
        sys.modules.pop(name, None)


def _short(config: Config) -> Config:
    data = config.model_dump(mode="json")
    data["iterations"] = 2
    data["eval"]["episodes"] = 4
    return Config.model_validate(data)


@pytest.mark.parametrize("name", TRAIN)
def test_an_example_trains(example: Any, name: str) -> None:
    result = embodied.train(_short(example(name).CONFIG), runs_dir="runs")
    assert result["episodes"] == 4 and (Path(result["run"]) / "report.html").is_file()


def test_the_evaluation_reads_the_run_of_the_training(example: Any) -> None:
    example("train").main(_short(example("train").CONFIG))
    result = example("evaluate").main()
    assert result["episodes"] == 50 and not result["protocol"]["greedy"]


def test_the_plan_for_a_cluster_is_written(example: Any) -> None:
    best = example("plan_a_cluster").main(nodes=2)
    assert best.prediction.iteration_s > 0 and Path("plan.json").is_file()


def test_the_simulator_keeps_the_laws(example: Any) -> None:
    example("own_simulator")
    for law in PHYSICS_LAWS:
        law(TaskSpec("point/reach"))


@pytest.mark.parametrize(("name", "size"), [("sb3_ppo", 512), ("cleanrl_ppo", 2)])
def test_another_library_s_ppo_runs_on_the_farm(example: Any, name: str, size: int) -> None:
    assert 0 <= example(name).main(size) <= 1


def test_an_example_is_at_most_eighty_lines_long() -> None:
    long = {path.name: count for path in FILES if (count := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in FILES} == {*TRAIN, "evaluate", "plan_a_cluster", "sb3_ppo", "cleanrl_ppo"}
