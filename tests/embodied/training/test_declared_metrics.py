"""The law of metrics: a row has no name that is not declared, and no name is declared that nothing makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.metric import Metric, undeclared
from embodied.reporting.metrics import SELECTION, read
from embodied.training.declared_metrics import COUNTS, EVALUATION, FINAL, IMITATION, TRAINING
from tests.embodied.config.test_read_settings import config_of
from tests.embodied.support.expert import record_reach

ROOT = Path(__file__).parents[3]
SEVERAL: dict[str, Any] = {
    "extra_tasks": [{"task": "tabletop/reach_blue"}],
    "env": {"task": "tabletop/reach_red", "num_envs": 2, "max_episode_steps": 4, "init_states": "seeds:2"},
    "rollout": {"decisions": 4},
    "advantage": {"normalise_returns": True},
    "eval": {"episodes": 2, "every": 1, "videos": 0},
}
"""Two tasks, a scale of returns, and evaluations during training."""


def test_a_training_run_has_declared_names_alone(tmp_path: Path) -> None:
    """The runs of each workflow are in test_read_settings.py."""
    train_run(config_of("ppo", name="run", **SEVERAL), "law", tmp_path, resume=False)
    (row,) = read(tmp_path / "run")
    assert not undeclared(row, (*COUNTS, *TRAINING))
    evaluated = read(tmp_path / "run", SELECTION)
    assert len(evaluated) == 1
    assert not undeclared({name for row in evaluated for name in row}, (*COUNTS, *EVALUATION))


def test_learning_from_demonstrations_has_declared_names_alone(tmp_path: Path) -> None:
    data = record_reach(tmp_path / "data", 4)
    learning = {"data": [str(data.folder)], "steps": 2, "batch": 4, "measure_every": 1, "holdout": 0.5}
    sft_run(config_of("ppo", name="run", sft=learning), "law", tmp_path, resume=False)
    rows = read(tmp_path / "run")
    assert len(rows) == 2 and not undeclared(rows[-1], (*COUNTS, *IMITATION))
    assert {metric.name for metric in IMITATION} <= rows[-1].keys()


def texts(node: ast.AST) -> Iterator[str]:
    """The texts of a module and of the parts of its f-strings, but for those that declare a metric."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Metric":
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def test_every_declared_name_is_made_somewhere() -> None:
    """As a whole; or from its group and what is after it, as `time/` and `physics` are; of a family, its beginning."""
    made = {text for path in (ROOT / "embodied").rglob("*.py") for text in texts(ast.parse(path.read_text()))}
    for metric in (*COUNTS, *TRAINING, *IMITATION, *EVALUATION):
        beginning = metric.name.partition("<")[0]
        group, _, name = beginning.partition("/")
        parts = (f"{group}/" in made or group == "eval") and (name.removesuffix("/") in made or not name)
        assert {beginning, beginning.removesuffix("/")} & made or parts, metric


def test_names_are_declared_once_with_unit_and_sentence() -> None:
    every = (*COUNTS, *TRAINING, *IMITATION, *EVALUATION, *FINAL)
    assert len({metric.name for metric in every}) == len(every)
    for metric in every:
        assert metric.unit and metric.meaning.endswith("."), metric


def test_a_family_has_names_of_its_pattern() -> None:
    family = Metric("time/<component>_s", "s", "A family.")
    assert family.names("time/reward_s") and not family.names("time/_s") and not family.names("time/reward")
    assert undeclared(["time/reward_s", "other"], [family]) == {"other"}
