"""Evaluations during training: they change nothing of it, and by them the best checkpoint is known and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.evaluation.protocol import protocol_of
from embodied.reporting.metrics import SELECTION, read
from embodied.run import checkpoint
from embodied.run.folder import whole_checkpoint
from embodied.training.selection import selection_protocol
from tests.embodied.commands.test_cli import here
from tests.embodied.run.test_resume import RUNTIME, assert_same_run, rewind, run

SETTINGS = {
    "seed": 2,
    "checkpoint_every": 2,
    "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 20},
    "policy": {"options": {"widths": [16], "initial_log_std": 0.0}},
    "rollout": {"decisions": 32},
    "optim": {"epochs": 2, "minibatch": 32, "policy_lr": 3e-2},
    "runtime": RUNTIME,
}
"""A rate that makes another policy of it every time: some are better than others."""


def config_of(every: int, iterations: int = 6, **changes: object) -> Config:
    evaluation = {"every": every, "videos": 0} | ({"episodes": 24} if every else {})
    return parse_config({**SETTINGS, "iterations": iterations, "eval": evaluation, **changes}, "test")


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations, each of which was evaluated."""
    folder = tmp_path_factory.mktemp("runs") / "selected"
    run(config_of(1), folder)
    return folder


@pytest.mark.slow
def test_it_changes_nothing_of_the_run(selected: Path, tmp_path: Path) -> None:
    run(config_of(0), tmp_path / "without")
    assert_same_run(selected, tmp_path / "without")
    assert not (tmp_path / "without" / SELECTION).exists()


def test_the_best_is_the_one_of_the_highest_success_and_of_equal_ones_the_last(selected: Path) -> None:
    rows = read(selected, SELECTION)
    rates = [row["eval/success_rate"] for row in rows]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert len(set(rates)) > 1, "all alike: nothing is chosen"
    best = max(range(6), key=lambda i: (rates[i], i)) + 1
    root = selected / "checkpoints"
    assert checkpoint.best(root) == root / f"{best:06d}" == whole_checkpoint(selected, None)
    steps = {row["iteration"]: (row["env_steps"], row["wall_s"]) for row in read(selected)}
    assert all(steps[row["iteration"]] == (row["env_steps"], row["wall_s"]) for row in rows)
    for row in rows:
        found = json.loads((selected / "evals" / "selection" / f"{row['iteration']:06d}" / "eval.json").read_text())
        assert found["success_rate"] == row["eval/success_rate"] and found["episodes"] == 24
        assert found["checkpoint"].endswith(f"{row['iteration']:06d}")


def test_a_run_that_goes_on_chooses_as_if_it_had_not_stopped(selected: Path, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    rewind(selected, crashed, 3)
    # It was stopped in the middle of the evaluation of its third iteration.
    own = crashed / "evals" / "selection" / "000003"
    lines = (own / "episodes.jsonl").read_text().splitlines(keepends=True)
    (own / "episodes.jsonl").write_text("".join(lines[:5]))
    rows = (crashed / SELECTION).read_text().splitlines(keepends=True)
    (crashed / SELECTION).write_text("".join(rows[:2]))
    for trial in range(24):  # what the first five were is not done again
        if not any(json.loads(line)["trial"] == trial for line in lines[:5]):
            (own / "actions" / "tabletop" / "reach" / f"{trial}.npy").unlink()
    run(config_of(1), crashed, resume=True)
    assert_same_run(crashed, selected)
    found, expected = (
        [{k: v for k, v in row.items() if "wall_s" not in k} for row in read(folder, SELECTION)]
        for folder in (crashed, selected)
    )
    assert found == expected
    names = [checkpoint.best(folder / "checkpoints") for folder in (crashed, selected)]
    assert names[0] is not None and names[1] is not None and names[0].name == names[1].name


def test_rates_of_other_episodes_are_not_compared(selected: Path, tmp_path: Path) -> None:
    """A run that goes on with other settings of its evaluations begins to choose anew."""
    other = tmp_path / "other"
    shutil.copytree(selected, other)
    evaluation = {"every": 4, "episodes": 8, "videos": 0}
    run(config_of(4, 8, eval=evaluation), other, resume=True)
    assert checkpoint.best(other / "checkpoints") == other / "checkpoints" / "000008"


def test_a_run_that_chooses_no_more_ends_with_its_newest(selected: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    rewind(selected, other, 3)
    run(config_of(0), other, resume=True)
    assert checkpoint.best(other / "checkpoints") is None
    assert whole_checkpoint(other, None) == other / "checkpoints" / "000006"
    assert [row["iteration"] for row in read(other, SELECTION)] == [1, 2, 3]
    assert not (other / "evals" / "selection" / "000004").exists()


def test_an_evaluation_that_other_settings_began_is_begun_anew(selected: Path, tmp_path: Path) -> None:
    """It was interrupted; what the policy's section says now is not what its folder says."""
    other = tmp_path / "other"
    rewind(selected, other, 6)
    rows = (other / SELECTION).read_text().splitlines(keepends=True)
    (other / SELECTION).write_text("".join(rows[:5]))
    again = config_of(1, policy={**SETTINGS["policy"], "device": "cpu"})
    run(again, other, resume=True)
    assert [row["iteration"] for row in read(other, SELECTION)] == [1, 2, 3, 4, 5, 6]


def test_its_episodes_are_neither_those_of_training_nor_those_of_the_end() -> None:
    config = config_of(1)
    protocols = (of(config) for of in (selection_protocol, protocol_of))
    chosen, final = ({spec.seed for spec in protocol.episodes(config.env.task)} for protocol in protocols)
    assert len(chosen) == 24 and len(final) == 24 and not chosen & final
    libero = load_config("libero_scripted").model_copy(
        update={"eval": parse_config({"eval": {"protocol": "openvla-oft", "every": 1}}, "test").eval}
    )
    tasks = libero.model_copy(update={"env": libero.env.model_copy(update={"task": "libero/libero_spatial/0"})})
    protocol = selection_protocol(tasks)
    assert protocol.init_states is None and protocol.env_seed is None, "the benchmark's own states chose the policy"
    assert protocol.trials == 50, "the protocol's own number counts for the evaluation at the end"
    assert protocol.limits == {"libero/libero_spatial/0": 220} and protocol.gripper == "inverted"


def test_a_run_ends_with_the_best_and_keeps_it(tmp_path: Path) -> None:
    """As a user types it: the evaluation at the end, and later ones, are of the best checkpoint."""
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({**SETTINGS, "iterations": 6}))
    options = ["--eval.every", "1", "--eval.episodes", "24", "--eval.videos", "0"]
    out = tmp_path / "result.json"
    status, output = here(
        "train", str(file), "--name", "r", "--keep-checkpoints", "1", *options, "--runs-dir", str(tmp_path), "--json",
        str(out),
    )  # fmt: skip
    assert status == 0, output
    result = json.loads(out.read_text())
    folder = tmp_path / "r" / "checkpoints"
    best = folder / f"{result['best_iteration']:06d}"
    assert result["checkpoint"] == str(best) and checkpoint.best(folder) == best
    kept = {path.name for path in folder.iterdir() if path.is_dir()}
    assert kept == {best.name, "000006"}
    assert "evaluated: success" in output and "the best so far" in output
    page = (tmp_path / "r" / "report.html").read_text()
    assert "evaluated during training" in page
    status, output = here("eval", "r", *options[2:], "--runs-dir", str(tmp_path), "--json", str(out))
    assert status == 0 and json.loads(out.read_text())["checkpoint"] == str(best), output
