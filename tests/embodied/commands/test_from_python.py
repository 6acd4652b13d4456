"""What the command line does, from Python: typed results, callbacks, a policy that acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodied
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.reporting.results import TrainingResult
from embodied.training.callbacks import IterationEnd
from sim_farm.contract import FarmError

SETTINGS: dict[str, Any] = {
    "name": "run",
    "iterations": 6,
    "env.num_envs": 2,
    "env.max_episode_steps": 6,
    "rollout.decisions": 8,
    "optim.epochs": 1,
    "eval.episodes": 4,
    "eval.videos": 0,
    "checkpoint_every": 100,
    "runtime.mode": "inline",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(folder: Path) -> TrainingResult:
    """A run that a callback ends after its third iteration, with a checkpoint of the second."""

    def watch(iteration: IterationEnd) -> None:
        iteration.log("my/twice", 2 * iteration.iteration)
        if iteration.iteration == 2:
            iteration.save()
        if iteration.iteration == 3:
            iteration.stop("three are enough")

    return embodied.train("reach", SETTINGS, runs_dir=folder, callbacks=[watch])


def test_a_callback_logs_saves_and_stops(trained: TrainingResult) -> None:
    assert trained.iterations == 3 and [row["my/twice"] for row in trained.metrics()] == [2, 4, 6]
    assert {path.name for path in (trained.run / "checkpoints").glob("0*")} == {"000002", "000003"}
    assert trained.metrics() == read(trained.run) and trained.env_steps == trained.metrics()[-1]["env_steps"]


def test_results_are_typed(trained: TrainingResult) -> None:
    found = trained.evaluation
    assert found.task == "tabletop/reach" and found.episodes == 4 and found.tasks[0].episodes == 4
    assert found.success_rate is not None and found.success_interval is not None
    assert found.success_interval[0] <= found.success_rate <= found.success_interval[1]
    assert trained.report is not None and trained.report.is_file() and (found.folder / "eval.json").is_file()


def test_an_evaluation_and_a_page_are_had_of_a_run(trained: TrainingResult) -> None:
    again = embodied.evaluate(trained.run, episodes=3)
    assert again.episodes == 3 and again.protocol_sha256 != trained.evaluation.protocol_sha256
    assert embodied.report(trained.run) == trained.report


def test_a_policy_acts_for_one_observation_or_a_batch(trained: TrainingResult) -> None:
    policy = embodied.load_policy(trained.run)
    assert policy.checkpoint is not None and policy.checkpoint.name == "000003"
    states = np.random.default_rng(0).standard_normal((3, policy.spec.state_dim), np.float32)
    batch = policy.act({"state": states})
    assert batch.shape == (3, 1, policy.spec.action_dim) and batch.dtype == np.float32
    np.testing.assert_allclose(policy.act({"state": states[1]}), batch[1], rtol=1e-5, atol=1e-6)
    drawn = policy.act({"state": states}, seed=1)
    assert not np.allclose(drawn, batch) and np.array_equal(drawn, policy.act({"state": states}, seed=1))


def test_a_policy_that_reads_images_and_words_acts(folder: Path) -> None:
    seen = {
        "policy.kind": "openvla",
        "policy.reads": ["images", "instruction"],
        "policy.options": {"checkpoint": "assets/openvla_tiny", "unnorm_key": "demonstrations"},
        "env.cameras": 1,
        "env.image_size": 56,
        "name": "seen",
        "iterations": 1,
    }
    policy = embodied.load_policy(embodied.train("reach", SETTINGS | seen, runs_dir=folder).run)
    frames = np.random.default_rng(0).integers(0, 255, (2, 56, 56, 3), np.uint8)
    camera, words = policy.spec.cameras[0], "reach the ball"
    both = policy.act({"images": {camera: frames}, "instruction": [words, words]})
    one = policy.act({"images": {camera: frames[1]}, "instruction": words})
    assert both.shape == (2, *one.shape)
    np.testing.assert_allclose(both[1], one, atol=1e-4)
    with pytest.raises(UserError, match="the observation lacks 'instruction', which the policy reads"):
        policy.act({"images": {camera: frames}})
    with pytest.raises(UserError, match=r"images\['front'\] has the shape \(2, 28, 28, 3\): the policy reads \(56, 56"):
        policy.act({"images": {camera: frames[:, :28, :28]}, "instruction": [words, words]})
    with pytest.raises(UserError, match="have 1 and 2 rows"):
        policy.act({"images": {camera: frames}, "instruction": words})


def test_episodes_are_recorded(folder: Path) -> None:
    found = embodied.record(
        "tabletop_scripted", folder / "data", {"runtime.mode": "inline", "env.cameras": 0}, episodes=2
    )
    assert found.episodes == 2 and found.solved == 2 and (found.dataset / "meta" / "info.json").is_file()


def test_mistakes_are_user_errors(trained: TrainingResult, folder: Path) -> None:
    with pytest.raises(UserError, match="embodied.train: unknown key 'optim.policy_rl'; did you mean optim.policy_lr"):
        embodied.train("reach", {"optim.policy_rl": 1.0}, runs_dir=folder)
    with pytest.raises(UserError, match="unknown task 'tabletop/raech'; did you mean tabletop/reach") as caught:
        embodied.train("reach", {"env.task": "tabletop/raech"}, runs_dir=folder)
    assert isinstance(caught.value.__cause__, FarmError)
    with pytest.raises(UserError, match="no run 'nothing'"):
        embodied.load_policy("nothing")
    with pytest.raises(
        UserError, match="the observation lacks 'state', which the policy reads; it has \\['proprio'\\]"
    ):
        embodied.load_policy(trained.run).act({"proprio": np.zeros(3)})
    with pytest.raises(UserError, match=r"state has the shape \(3,\): the policy reads"):
        embodied.load_policy(trained.run).act({"state": np.zeros(3)})


def test_a_metric_of_the_run_is_not_replaced(folder: Path) -> None:
    def replacing(iteration: IterationEnd) -> None:
        iteration.log("env/return", 0.0)

    with pytest.raises(ValueError, match="the metric env/return is there already"):
        embodied.train("reach", SETTINGS | {"name": "replacing"}, runs_dir=folder, callbacks=[replacing])
