"""Tasks without success (`gymnasium/CartPole-v1`): the return takes its place, and what needs it is refused."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from embodied.commands.evaluate import evaluate_run
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.folder import read_folder
from embodied.reporting.metrics import SELECTION, read
from embodied.reporting.run_record import RETURN, read_run
from embodied.reporting.runs_page import write_runs_page
from embodied.run import checkpoint
from embodied.training import checks
from embodied.workflows.context import policy_spec
from policies import PolicyError
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.registry import make_physics

SETTINGS: dict[str, Any] = {
    "name": "balanced",
    "iterations": 20,
    "stop_at": 24.0,
    "env": {"task": "gymnasium/CartPole-v1", "num_envs": 8, "max_episode_steps": 200},
    "policy": {"kind": "categorical_mlp", "options": {"widths": [16]}},
    "rollout": {"decisions": 64},
    "advantage": {"gamma": 0.9},
    "optim": {"policy_lr": 1e-3, "value_lr": 1e-3, "minibatch": 128},
    "eval": {"videos": 0, "episodes": 8, "num_envs": 8, "every": 3},
    "runtime": {"mode": "inline"},
}


def config_of(**changes: Any) -> Config:
    return parse_config(SETTINGS | changes, "test")


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, printed: io.StringIO) -> tuple[dict[str, Any], Path]:
    """The result of a run that ends by its return, and its folder."""
    runs = tmp_path_factory.mktemp("runs")
    with redirect_stdout(printed):
        return train_run(config_of(), "test", runs, False), runs / "balanced"


def test_a_run_ends_when_its_return_is_reached(trained: tuple[dict[str, Any], Path]) -> None:
    result, folder = trained
    rows = read(folder)
    recent = [row["env/return_recent"] for row in rows]
    assert 1 < result["iterations"] == len(rows) < 20
    assert recent[-1] >= 24 and all(value is None or value < 24 for value in recent[:-1])
    assert result["return_recent"] == pytest.approx(recent[-1]) and result["success_recent"] is None
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.read_state(newest)
    assert len(state.recent_return) == 100 and sum(state.recent_return) / 100 == pytest.approx(recent[-1])
    assert not any("success" in key for row in rows for key in row)


def test_the_best_checkpoint_is_that_of_the_highest_return(trained: tuple[dict[str, Any], Path]) -> None:
    result, folder = trained
    found = {row["iteration"]: row["eval/return"] for row in read(folder, SELECTION)}
    assert len(set(found.values())) > 1, "all alike: nothing is chosen"
    assert result["best_iteration"] == max(found, key=lambda number: (found[number], number))
    assert not any("success" in key for row in read(folder, SELECTION) for key in row)


def test_results_and_pages_say_return_and_nothing_of_success(trained: tuple[dict[str, Any], Path]) -> None:
    result, folder = trained
    evaluation = json.loads((folder / "eval.json").read_text())
    kept = read_folder(Path(result["folder"])).in_order()
    mean = sum(outcome.total_reward for outcome in kept) / 8
    assert evaluation["return"] == pytest.approx(mean)
    assert evaluation["return_low"] < evaluation["return"] < evaluation["return_high"]
    assert "success_rate" not in evaluation and all(outcome.success is None for outcome in kept)
    table = (folder / "eval.md").read_text()
    assert "| return |" in " ".join(table.split()) and f"{mean:.3f}" in table
    assert "success" not in table.replace("the tasks have no success", "")
    run, page = read_run(folder), (folder / "report.html").read_text()
    assert run.measure is RETURN and run.target == 24 and run.evaluated() == (pytest.approx(mean), 8)
    for text in ("Return in evaluation", "Return against env steps", "Time to return 24", "target 24"):
        assert text in page
    assert "Success" not in page and "success once" not in page
    both = write_runs_page([folder, folder], folder.parent / "both.html")
    assert both["groups"][0]["return"] == pytest.approx(mean) and "success_rate" not in both["groups"][0]
    assert "Return of the last 100 training episodes" in (folder.parent / "both.html").read_text()


def test_the_live_lines_show_no_success(trained: tuple[dict[str, Any], Path], printed: io.StringIO) -> None:
    text = printed.getvalue()
    assert "iter 1/20  env steps 512" in text and "return " in text and "evaluated: return " in text
    assert "success" not in text.replace("the tasks have no success", "")


def test_two_such_policies_are_not_compared_by_success(trained: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, folder = trained
    other = shutil.copytree(folder, tmp_path / "other")
    with pytest.raises(UserError, match="gymnasium/CartPole-v1 has no success by which episodes could be paired"):
        evaluate_run(str(folder), config_of(), None, folder.parent, into=tmp_path / "e", against=str(other))


def measured(*infos: TaskInfo, **changes: Any) -> None:
    """Check the measure of a run whose simulators say this."""
    checks._measure(checks.Checked(command="train", config=config_of(**changes), infos=infos))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workflow": "grpo"}, "advantage.outcome: success is about; .*: set it to return"),
        ({"workflow": "stepnft"}, "the workflow stepnft is about; .*: set workflow to ppo"),
    ],
)
def test_what_needs_success_is_refused(changes: dict[str, Any], message: str) -> None:
    with closing(make_physics(TaskSpec("gymnasium/CartPole-v1"))) as physics:
        info = physics.info
    with pytest.raises(UserError, match=f"CartPole-v1 has no success, which {message}"):
        measured(info, **changes)
    measured(info, workflow="grpo", advantage={"outcome": "return"})


def test_a_run_that_needs_success_is_refused_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="advantage.outcome: success is about"):
        changes: dict[str, Any] = {"advantage": {}, "rollout": {"episode_group": 2}, "optim": {"policy_lr": 5e-3}}
        train_run(config_of(workflow="grpo", **changes), "test", tmp_path, False)


@pytest.mark.parametrize(
    ("stop_at", "says"), [(95, "95% is 0.95"), (0, "above 0"), (-3, "above 0"), (300, "at most 1")]
)
def test_a_target_of_success_is_a_share(stop_at: float, says: str) -> None:
    with closing(make_physics(TaskSpec("tabletop/reach"))) as physics:
        info = physics.info
    with pytest.raises(UserError, match=f"stop_at is a share of solved episodes.*{says}"):
        measured(info, stop_at=stop_at)
    measured(info, stop_at=1.0)


def test_tasks_with_and_without_success_are_not_trained_together() -> None:
    one = TaskInfo(TaskSpec("a/without"), 1, (-1.0,), (1.0,), 0, 3, 0, (), 9, 1.0, has_success=False)
    other = TaskInfo(TaskSpec("a/with"), 1, (-1.0,), (1.0,), 0, 3, 0, (), 9, 1.0)
    with pytest.raises(UserError, match="a/without has no success .* a/with has one"):
        measured(other, one)


def test_a_policy_that_says_real_numbers_is_refused_where_actions_are_choices() -> None:
    with closing(make_physics(TaskSpec("gymnasium/CartPole-v1"))) as physics:
        assert policy_spec(config_of(), physics.info).discrete_actions == 2
        with pytest.raises(PolicyError, match="one of 2 choices, and gaussian_mlp .* policy.kind to categorical_mlp"):
            policy_spec(config_of(policy={}), physics.info)
    with closing(make_physics(TaskSpec("gymnasium/Pendulum-v1"))) as physics:
        with pytest.raises(PolicyError, match="categorical_mlp chooses .* set policy.kind to gaussian_mlp"):
            policy_spec(config_of(), physics.info)
