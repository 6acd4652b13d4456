"""The reward worker: what it judges, whose credit that is, and a classifier that tells solved frames from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.commands import reward as command
from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.demonstrations import Dataset
from embodied.devices import CPU
from embodied.errors import UserError
from embodied.execution.assignment import configured
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.roles import RolloutRole
from embodied.execution.session import open_session
from embodied.learning.scorers import RewardWorker, Scorer
from embodied.learning.success_classifier import Looks, SuccessClassifier
from embodied.reporting.metrics import read
from embodied.training.checks import Checked, check_start
from embodied.training.classifier_training import ClassifierTraining, learn_success, read_labelled
from embodied.trajectories.batch import Trajectories
from embodied.workflows import PPO, WorkflowComponent, passing
from embodied.workflows.context import WorkerContext, policy_spec
from embodied.workflows.recipes import recipe_of
from embodied.workflows.run_spec import RunSpec
from tests.embodied.run.test_resume import assert_same_run
from tests.embodied.run.test_resume import run as train
from tests.embodied.support.checked import check
from tests.embodied.support.expert import record_reach

SIZE, CAMERAS, ENVS = 48, 2, 4
EPISODES = 48


def brightness(frames: Mapping[str, Tensor], instructions: Sequence[str]) -> Tensor:
    """A judge that anybody can compute: the first camera's mean, less what the instruction is long."""
    (first, *_) = frames.values()
    assert first.dtype == torch.uint8 and len(first) == len(instructions) > 0
    return first.float().mean((1, 2, 3)) - torch.tensor([float(len(text)) for text in instructions])


def half_a_judge(frames: Mapping[str, Tensor], instructions: Sequence[str]) -> Tensor:
    return torch.zeros(len(instructions) // 2)


def speechless(frames: Mapping[str, Tensor], instructions: Sequence[str]) -> np.ndarray:
    return np.full(len(instructions), np.nan)


SETTINGS: dict[str, Any] = {
    "workflow": "ppo_reward",
    "seed": 4,
    "iterations": 2,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": 7, "cameras": CAMERAS, "image_size": SIZE},
    "farm": {"physics_workers": 1},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images", "instruction"],
        "chunk": 2,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16]},
    },
    "reward": {"model": f"{__name__}:brightness"},
    "rollout": {"decisions": 6},
    "optim": {"epochs": 1, "minibatch": 8, "micro_batch": 5},
    "runtime": {"mode": "inline", "deadline_s": 120},
}


def config_of(**changes: Any) -> Config:
    """The settings with changes, section by section."""
    merged = {k: {**SETTINGS.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}
    return parse_config({**SETTINGS, **merged}, "test")


@contextmanager
def begun(config: Config, folder: Path) -> Iterator[OnPolicy]:
    with (
        open_session(config) as session,
        start_run(RunSpec.of(config), folder, session, configured(RunSpec.of(config), session.cores)) as workers,
    ):
        workers.begin(None, 0)
        yield workers


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trajectories]:
    """A rollout in which episodes end, in the middle of a chunk too."""
    with begun(config_of(), tmp_path_factory.mktemp("rolled")) as workers:
        workers.rollout_worker.call(RolloutRole.rollout, 6, 60.0)
        found = workers.rollout_worker.call(RolloutRole.trajectories)
        assert (found.executed == 1).any() and (found.terminated | found.truncated)[:-1].any()
        yield found


def judged(batch: Trajectories, rows: int = 5) -> Trajectories:
    worker = RewardWorker(brightness, rows, CPU)
    assert worker.receive(batch, 0) > 0
    return worker.trajectories()


# --- what is judged, and whose credit it is


def test_a_decision_is_rewarded_for_the_observation_that_it_led_to(batch: Trajectories) -> None:
    """The next decision's, in a loop; its own where the episode or the rollout ends with it."""
    inputs = batch.inputs
    scores = brightness(inputs.frames, inputs.instruction).view_as(batch.reward)
    found = judged(batch).reward
    decisions, envs = batch.mask.shape
    for env in range(envs):
        for t in range(decisions):
            ends = bool(batch.terminated[t, env] or batch.truncated[t, env]) or t == decisions - 1
            assert found[t, env] == pytest.approx(float(scores[t if ends else t + 1, env]), rel=1e-5)
    assert len(found.unique()) > decisions, "all frames look alike: nothing was tested"


def test_the_last_executed_action_has_the_credit(batch: Trajectories) -> None:
    found = judged(batch)
    assert found.step_reward is not None
    assert torch.equal(found.step_reward.sum(2), found.reward)
    for t, env in np.ndindex(*batch.mask.shape):
        last = int(batch.executed[t, env]) - 1
        assert found.step_reward[t, env, last] == found.reward[t, env]


def test_rewards_do_not_depend_on_how_many_frames_are_judged_at_once(batch: Trajectories) -> None:
    whole = judged(batch, rows=0)
    for rows in (1, 3, 24):
        assert torch.equal(judged(batch, rows=rows).reward, whole.reward)


def test_decisions_that_nobody_took_are_not_judged_and_follow_nothing(batch: Trajectories) -> None:
    """As in trajectories of whole episodes, of which the shorter ones are masked at their end."""
    mask = batch.mask.clone()
    mask[3:, 1] = False
    whole, part = judged(batch).reward, judged(replace(batch, mask=mask)).reward
    scores = brightness(batch.inputs.frames, batch.inputs.instruction).view_as(whole)
    assert not part[3:, 1].any()
    assert part[2, 1] == scores[2, 1]
    mask[2, 1] = False
    assert torch.equal(part[mask], whole[mask])


def test_all_else_of_the_trajectories_stays(batch: Trajectories) -> None:
    before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    found = judged(batch)
    for name, value in before.items():
        assert torch.equal(getattr(batch, name), value), f"{name} was written into"
        if name not in ("reward", "step_reward"):
            assert torch.equal(getattr(found, name), value), name


# --- the classifier


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", EPISODES, image_size=SIZE, cameras=CAMERAS)


@pytest.fixture(scope="module")
def classifier(demos: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """As the command leaves it, and what the command says."""
    out = tmp_path_factory.mktemp("classifier") / "reach"
    return out, command.run(command.Arguments((demos.folder,), out, steps=80))


@pytest.mark.slow
def test_solved_frames_of_held_out_episodes_are_distinguished_from_others(
    classifier: tuple[Path, dict[str, Any]],
) -> None:
    metrics = classifier[1]
    assert metrics["episodes"] == EPISODES
    assert metrics["held_out_positive"] >= 20 and metrics["held_out_frames"] - metrics["held_out_positive"] >= 20
    assert metrics["roc_area"] > 0.85 and metrics["balanced_accuracy"] > 0.75


@pytest.mark.slow
def test_only_the_last_frames_of_solved_episodes_are_positive(demos: Dataset) -> None:
    labelled = read_labelled((demos.folder, demos.folder), 2)
    assert len(labelled.positive) == 2 * len(demos)
    expected = np.zeros(len(demos), np.bool_)
    for episode in demos.episodes:
        assert episode.row["success"]
        expected[episode.end - 2 : episode.end] = True
    assert (labelled.positive == np.tile(expected, 2)).all()
    rows = np.array([len(demos) + 3, 1, len(demos) - 1])
    frames, texts = labelled.inputs(rows)
    for name in demos.cameras:
        assert (frames[name].numpy() == demos.frames(name, [3, 1, len(demos) - 1])).all(), "not in the order asked for"
    assert len(texts) == 3


@pytest.mark.slow
def test_a_classifier_comes_back_as_it_was_saved(demos: Dataset, tmp_path: Path) -> None:
    labelled = read_labelled((demos.folder,), 2)
    made = [learn_success(labelled, ClassifierTraining(steps=3, seed=1))[0] for _ in range(2)]
    made[0].save(tmp_path / "c")
    back = SuccessClassifier.load(tmp_path / "c")
    frames, texts = labelled.inputs(np.arange(6))
    expected = made[0].probability(frames, texts)
    assert torch.equal(back.probability(frames, texts), expected)
    assert torch.equal(made[1].probability(frames, texts), expected), "the same seed learned something else"


def test_a_classifier_reads_the_instruction() -> None:
    torch.manual_seed(0)
    classifier = SuccessClassifier(Looks(("front",), 32, "upright"))
    frames = {"front": torch.zeros(3, 32, 32, 3, dtype=torch.uint8)}
    probabilities = classifier.probability(frames, ("push the cube", "reach the point", "Push the cube!"))
    assert probabilities[0] == probabilities[2] != probabilities[1]
    assert classifier.probability(frames, ("", "", "")).isfinite().all()


# --- runs


@pytest.mark.slow
def test_a_run_is_rewarded_by_the_classifier(classifier: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    config = config_of(reward={"model": str(classifier[0])}, iterations=1)
    with begun(config, tmp_path) as workers:
        workers.rollout_worker.call(RolloutRole.rollout, 6, 60.0)
        batch = workers.rollout_worker.call(RolloutRole.trajectories)
        spec = policy_spec(config, workers.farm.infos[0])
        worker = RewardWorker.make(
            WorkerContext(RunSpec.of(config), spec, tmp_path, workers.assignment.first_of("reward"))
        )
        worker.receive(batch, 0)
        reward = worker.trajectories().reward
    assert ((reward >= 0) & (reward <= 1)).all() and reward.std() > 0
    train(config, tmp_path / "run")
    (row,) = read(tmp_path / "run")
    assert row["learner/steps"] > 0 and row["time/reward_s"] > 0


@pytest.mark.slow
def test_runs_with_a_reward_worker_are_the_same_in_processes(tmp_path: Path) -> None:
    train(config_of(), tmp_path / "inline")
    train(config_of(runtime={"mode": "ray"}), tmp_path / "ray")
    assert_same_run(tmp_path / "ray", tmp_path / "inline")


class StepCost(Scorer):
    """A component of one's own, as docs/workflows.md has it."""

    @classmethod
    def make(cls, context: WorkerContext) -> StepCost:
        return cls(context.affinity)

    def work(self, batch: Trajectories) -> Trajectories:
        return replace(batch, reward=batch.reward - 0.01 * batch.executed)


PPO_STEP_COST = passing(
    PPO, WorkflowComponent("step_cost", "charges for env steps", f"{__name__}:StepCost"), "ppo_step_cost"
)


def test_a_component_of_ones_own_is_a_class_and_a_line(tmp_path: Path) -> None:
    plain = config_of(iterations=1, workflow="ppo", reward={"model": None})
    train(plain.model_copy(update={"workflow": f"{__name__}:PPO_STEP_COST"}), tmp_path / "charged")
    train(plain, tmp_path / "plain")
    mine, its = (read(tmp_path / name)[0] for name in ("charged", "plain"))
    assert mine["time/step_cost_s"] > 0
    assert mine["learner/value_loss"] != its["learner/value_loss"]


@pytest.mark.slow
def test_another_reward_teaches_something_else(tmp_path: Path) -> None:
    train(config_of(iterations=1), tmp_path / "judged")
    train(config_of(iterations=1, workflow="ppo", reward={"model": None}), tmp_path / "simulated")
    mine, its = (read(tmp_path / name)[0] for name in ("judged", "simulated"))
    assert mine["env/return"] == its["env/return"], "the record's return stays the simulator's"
    assert mine["learner/value_loss"] != its["learner/value_loss"]


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": {"model": None}}, "reward.model is not set"),
        ({"reward": {"model": "somewhere"}}, "somewhere"),
        ({"policy": {"reads": ["proprio", "images"]}}, "add instruction"),
        ({"policy": {"reads": ["state"]}}, "add images and instruction"),
    ],
)
def test_a_reward_worker_that_cannot_judge_is_refused_before_anything_starts(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        check_start(Checked(command="train", config=config_of(**changes)))


@pytest.mark.parametrize("name", ["brightness", "nowhere_to_be_found:judge", f"{__name__}:nobody", f"{__name__}:SIZE"])
def test_a_function_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=name):
        check(config_of(reward={"model": name}))


@pytest.mark.parametrize("judge", [half_a_judge, speechless])
def test_a_judge_that_does_not_say_a_number_for_each_row_is_refused(judge: Any, batch: Trajectories) -> None:
    with pytest.raises(UserError, match="one finite number for each"):
        RewardWorker(judge, 0, CPU).receive(batch, 0)


def test_a_classifier_of_other_frames_and_one_that_is_damaged_are_refused(tmp_path: Path) -> None:
    config = config_of(reward={"model": str(tmp_path / "c")})
    with pytest.raises(UserError, match="embodied reward"):
        check(config)  # before anything starts
    SuccessClassifier(Looks(("front",), 32, "upright")).save(tmp_path / "c")
    with pytest.raises(UserError, match="32 pixels"), begun(config, tmp_path / "run"):
        pass
    (tmp_path / "c" / "classifier.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        SuccessClassifier.load(tmp_path / "c")


@pytest.mark.slow
def test_episodes_without_frames_or_successes_teach_nothing(demos: Dataset, tmp_path: Path) -> None:
    plain = record_reach(tmp_path / "plain", 2, cameras=0)
    with pytest.raises(UserError, match="no frames"):
        read_labelled((plain.folder,), 2)
    labelled = read_labelled((demos.folder,), 1000)
    with pytest.raises(UserError, match="no frame before success"):
        learn_success(labelled, ClassifierTraining())
    with pytest.raises(UserError, match="no episode that was solved"):
        learn_success(replace(labelled, positive=np.zeros_like(labelled.positive)), ClassifierTraining())


def test_the_shipped_configuration_has_a_reward_worker() -> None:
    config = load_config("reach_reward")
    check(config)
    assert "reward" in {component.name for component in recipe_of(config).after_rollout}
