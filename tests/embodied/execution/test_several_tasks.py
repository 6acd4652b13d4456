"""Runs of several tasks: each has simulators and seeds of its own; one policy worker decides for all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algorithms.estimators import gae
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import UserError
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import Iteration, OnPolicy, start_run
from embodied.execution.roles import LearnerRole, RolloutRole
from embodied.execution.session import Session, open_session
from embodied.reporting.metrics import read
from embodied.rollout.rollout_summary import EpisodePart
from embodied.runtime.api import LocalHandle
from embodied.runtime.ray.runtime import RayRuntime
from embodied.training import iteration_metrics
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from sim_farm.contract import FarmError
from tests.embodied.run.test_resume import assert_same_run, rewind, run
from tests.embodied.support.checked import check
from tests.variants import often

FIRST, SECOND = 4, 8
"""Environments of the first and the second task."""
DECISIONS, CHUNK, MINIBATCH = 12, 2, 48
SETTINGS: dict[str, Any] = {
    "seed": 2,
    "iterations": 2,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/reach", "num_envs": FIRST, "max_episode_steps": 20, "cameras": 1, "image_size": 32},
    "extra_tasks": [{"task": "tabletop/push", "num_envs": SECOND}],
    "policy": {
        "kind": "flow",
        "reads": ["images"],
        "chunk": CHUNK,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16], "steps": 2},
    },
    "rollout": {"decisions": DECISIONS},
    "optim": {"epochs": 1, "minibatch": MINIBATCH},
    "runtime": {"mode": "inline", "deadline_s": 120},
}
STATES: dict[str, Any] = {
    **SETTINGS,
    "env": {"task": "tabletop/reach", "num_envs": FIRST, "max_episode_steps": 20},
    "policy": {"chunk": CHUNK, "options": {"widths": [16]}},
    "extra_tasks": [{"num_envs": SECOND}],
}
CORE = min(os.sched_getaffinity(0))


def config_of(settings: dict[str, Any], **changes: Any) -> Config:
    return parse_config({**settings, **changes}, "test")


def placed(one_process: bool, groups: tuple[int, int] = (1, 1), tasks: int = 2, **plan: Any) -> Assignment:
    """Everything on one core, with so many groups of each task's environments."""
    farms = tuple(FarmAssignment(groups[number], (CORE,), (HERE,)) for number in range(tasks))
    components = {"policy": (Affinity((CORE,)),), "learner": (Affinity((CORE,)),)}
    return Assignment("collocated", farms, components, (0,) if one_process else (), **plan)


AHEAD = placed(False, ahead=1)


@dataclass(frozen=True)
class Run:
    iterations: list[Iteration]
    parameters: dict[str, Tensor]


def run_by(config: Config, session: Session, folder: Path, assignment: Assignment) -> Run:
    with start_run(RunSpec.of(config), folder, session, assignment) as workers:
        workers.begin(None, 0)
        iterations = [workers.iterate(number) for number in range(config.iterations)]
        weights = workers.learner.call(LearnerRole.weights)
        return Run(iterations, {name: tensor.clone() for name, tensor in weights.items()})


def assert_equal(found: Run, expected: Run) -> None:
    for mine, other in zip(found.iterations, expected.iterations, strict=True):
        assert mine.summary.episodes == other.summary.episodes
        assert mine.summary.env_steps == other.summary.env_steps
        assert mine.environments.keys() == other.environments.keys()
        assert all((mine.environments[key] == array).all() for key, array in other.environments.items())
        assert mine.learned["learner/policy_loss"] == other.learned["learner/policy_loss"]
    assert all(torch.equal(found.parameters[name], tensor) for name, tensor in expected.parameters.items())


@pytest.fixture(scope="module")
def here() -> Iterator[Session]:
    with open_session(config_of(SETTINGS)) as session:
        yield session


@pytest.fixture(scope="module")
def pictures(here: Session, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Both tasks from images, in this process."""
    return run_by(config_of(SETTINGS), here, tmp_path_factory.mktemp("run"), placed(True))


@pytest.fixture(scope="module")
def states(here: Session, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same task twice, from states, in this process."""
    return run_by(config_of(STATES), here, tmp_path_factory.mktemp("run"), placed(True))


# --- what flows


@pytest.mark.slow
def test_env_steps_of_all_tasks_count(pictures: Run) -> None:
    most = DECISIONS * CHUNK
    for one in pictures.iterations:
        assert most * SECOND < one.summary.env_steps <= most * (FIRST + SECOND), "a task is missing"
        assert one.learned["learner/steps"] == DECISIONS * (FIRST + SECOND) / MINIBATCH


def test_episodes_of_all_tasks_are_reported(pictures: Run) -> None:
    episodes = pictures.iterations[0].summary.episodes
    assert sorted(e.env for e in episodes) == [*range(FIRST + SECOND)], "every environment ends one episode of 20 steps"
    assert all(episode.task == (episode.env >= FIRST) for episode in episodes)


def test_success_of_each_task_is_a_metric(pictures: Run) -> None:
    """Here as if the second task's episodes of even environments had been solved."""
    summary = pictures.iterations[0].summary
    solved = tuple(replace(e, success=e.task == 1 and e.env % 2 == 0) for e in summary.episodes)
    found = iteration_metrics._of_tasks(replace(summary, episodes=solved), RunSpec.of(config_of(SETTINGS)))
    assert found == {"env/success_once/tabletop/reach": 0.0, "env/success_once/tabletop/push": 0.5}
    nobody = iteration_metrics._of_tasks(replace(summary, episodes=solved[:0]), RunSpec.of(config_of(SETTINGS)))
    assert all(math.isnan(rate) for rate in nobody.values()) and nobody.keys() == found.keys()
    assert iteration_metrics._of_tasks(summary, RunSpec.of(config_of(SETTINGS, extra_tasks=[]))) == {}


def test_an_episode_that_is_left_out_is_named_with_its_task(pictures: Run) -> None:
    """Here as if the simulator had given one of the second task's episodes a reward that is not finite."""
    summary = pictures.iterations[0].summary
    broken = tuple(replace(e, total_reward=math.nan) if e.env == FIRST + 1 else e for e in summary.episodes)
    message = iteration_metrics.left_out(1, replace(summary, episodes=broken), RunSpec.of(config_of(SETTINGS)))
    assert "left out 1 episodes in which a reward or an observation was not finite" in message
    assert message.endswith(f"(column {FIRST + 1}, tabletop/push)")
    running = iteration_metrics.left_out(2, summary, RunSpec.of(config_of(SETTINGS)))
    assert "left out 2 episodes" in running and "column" not in running, "none of them has ended"


def test_the_return_is_that_of_the_episodes_whose_rewards_are_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, returns = OnPolicy.rollout, list[list[float]]()

    def with_one_broken(workers: OnPolicy, number: int) -> Any:
        summary = rollout(workers, number)
        first, *rest = summary.episodes
        returns.append([episode.total_reward for episode in rest])
        return replace(summary, episodes=(replace(first, total_reward=math.nan), *rest))

    monkeypatch.setattr(OnPolicy, "rollout", with_one_broken)
    run(config_of(STATES, iterations=1), tmp_path / "run")
    (row,) = read(tmp_path / "run")
    assert returns[0] and row["env/return"] == pytest.approx(sum(returns[0]) / len(returns[0]))


def test_positions_of_all_tasks_are_kept_apart(pictures: Run) -> None:
    environments = pictures.iterations[0].environments
    first = {key for key in environments if "." not in key}
    assert {key.removeprefix("1.") for key in environments if key.startswith("1.")} == first
    assert len(environments["base_step"]) == FIRST and len(environments["1.base_step"]) == SECOND


def test_every_task_has_seeds_of_its_own(states: Run) -> None:
    seeds = RunSpec.of(config_of(STATES, extra_tasks=[{}, {}])).seeds
    assert len(set(seeds)) == 3 and seeds[0] == STATES["seed"]
    episodes = states.iterations[0].summary.episodes
    returns = {episode.env: episode.total_reward for episode in episodes}
    assert all(returns[env] != returns[FIRST + env] for env in range(FIRST)), "the tasks repeat each other's episodes"


def test_the_second_task_changes_what_is_learned_and_not_what_the_first_did(
    here: Session, states: Run, tmp_path: Path
) -> None:
    alone = run_by(config_of(STATES, extra_tasks=[]), here, tmp_path, placed(True, tasks=1))
    mine = [episode for episode in states.iterations[0].summary.episodes if episode.task == 0]
    assert mine == list(alone.iterations[0].summary.episodes)
    assert any(not torch.equal(states.parameters[name], tensor) for name, tensor in alone.parameters.items())


def test_advantages_are_normalised_over_each_task(here: Session, tmp_path: Path) -> None:
    config = config_of(STATES)
    with start_run(RunSpec.of(config), tmp_path, here, placed(False)) as workers:
        workers.begin(None, 0)
        workers.rollout_worker.call(RolloutRole.rollout, DECISIONS, 60.0)
        batch = workers.rollout_worker.call(RolloutRole.trajectories)
        assert batch.task is not None and batch.task.tolist() == [0] * FIRST + [1] * SECOND
        advantage = gae(batch, config).advantage
    assert max(advantage[:, batch.task == number].mean().abs() for number in (0, 1)) < 1e-6


def test_one_policy_worker_holds_the_weights_of_all_tasks(here: Session, tmp_path: Path) -> None:
    """In the learner's process it holds none of its own."""
    with start_run(RunSpec.of(config_of(SETTINGS)), tmp_path, here, placed(True)) as workers:
        assert (workers.acting.name, workers.learner.name, workers.scorers) == ("policy", "learner", {})
        rollout_worker, learner = workers.rollout_worker.handles[0], workers.learner.handles[0]
        assert isinstance(rollout_worker, LocalHandle) and isinstance(learner, LocalHandle)
        acting, trained = rollout_worker.worker.policy, learner.worker.policy
        assert acting is trained


def test_episode_groups_of_tasks_have_names_of_their_own(here: Session, tmp_path: Path) -> None:
    config = config_of(STATES, workflow="grpo", rollout={"episode_group": 2, "episodes_per_env": 2})
    with start_run(RunSpec.of(config), tmp_path, here, placed(False)) as workers:
        workers.begin(None, 0)
        names = []
        for number in range(2):
            part = EpisodePart(number * (FIRST + SECOND), (number + 1) * (FIRST + SECOND))
            workers.rollout_worker.call(RolloutRole.rollout_episodes, part, 2, 60.0)
            batch = workers.rollout_worker.call(RolloutRole.trajectories)
            assert batch.episode_group is not None
            names.append(batch.episode_group)
    assert torch.cat(names).unique(return_counts=True)[1].tolist() == [2] * (FIRST + SECOND)


# --- when and where


def test_one_process_or_two_change_nothing(here: Session, states: Run, tmp_path: Path) -> None:
    assert_equal(run_by(config_of(STATES), here, tmp_path, placed(False)), states)


@pytest.mark.slow
@pytest.mark.parametrize("one_process", often((True,), (True, False)))
def test_tasks_may_take_turns_with_the_learner(one_process: bool, here: Session, pictures: Run, tmp_path: Path) -> None:
    """The policy worker and the renderers of all tasks leave, and the learner."""
    found = run_by(config_of(SETTINGS), here, tmp_path, placed(one_process, unload=True))
    assert_equal(found, pictures)
    spans = [span.args["worker"] for span in found.iterations[1].spans if span.name == "switch"]
    policy = [] if one_process else ["policy"]
    assert sorted(spans) == sorted(2 * ["renderers of tabletop/reach, tabletop/push", *policy, "learner"])
    assert not list(tmp_path.glob("unloaded-*")), "what was spilled is left behind"


def test_a_plan_that_runs_ahead_cannot_unload(here: Session, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set ahead 0 or unload false"):
        run_by(config_of(SETTINGS), here, tmp_path, replace(AHEAD, unload=True))


@pytest.fixture(scope="module")
def ahead(here: Session, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three iterations from states, in this process, the rollout ahead of the update."""
    return run_by(config_of(STATES, iterations=3), here, tmp_path_factory.mktemp("run"), AHEAD)


def versions(run: Run) -> list[int]:
    return [one.summary.version for one in run.iterations]


def test_tasks_may_run_ahead(ahead: Run, states: Run) -> None:
    assert versions(ahead) == [0, 0, 1]
    first, same = ahead.iterations[0], states.iterations[0]
    assert first.summary.episodes == same.summary.episodes
    assert first.learned["learner/policy_loss"] == same.learned["learner/policy_loss"]


@pytest.mark.slow
def test_processes_that_run_ahead_compute_the_same(ahead: Run, tmp_path: Path) -> None:
    config = config_of(STATES, iterations=3, runtime={"deadline_s": 120})
    runtime = RayRuntime("local", 240.0)
    try:
        found = run_by(config, Session(config, runtime, (CORE,)), tmp_path, AHEAD)
    finally:
        runtime.close()
    assert versions(found) == versions(ahead)
    assert_equal(found, ahead)


def test_tasks_may_have_different_numbers_of_groups(here: Session, states: Run, tmp_path: Path) -> None:
    """Groups cut batches, which round differently: what is counted is equal."""
    found = run_by(config_of(STATES), here, tmp_path, placed(True, groups=(1, 2)))
    for mine, other in zip(found.iterations, states.iterations, strict=True):
        assert [(e.env, e.length) for e in mine.summary.episodes] == [(e.env, e.length) for e in other.summary.episodes]
    for name, tensor in states.parameters.items():
        assert torch.allclose(found.parameters[name], tensor, atol=1e-4), name


@pytest.mark.slow
def test_workers_in_processes_compute_the_same(pictures: Run, tmp_path: Path) -> None:
    config = config_of(SETTINGS, runtime={"deadline_s": 120})
    runtime = RayRuntime("local", 240.0)
    try:
        found = run_by(config, Session(config, runtime, (CORE,)), tmp_path, placed(True))
    finally:
        runtime.close()
    assert_equal(found, pictures)  # whoever was ready first
    assert all(one.learned["learner/grad_norm"] > 0 for one in found.iterations)


# --- whole runs


def test_going_on_equals_not_having_stopped(tmp_path: Path) -> None:
    config = config_of(STATES, iterations=3)
    run(config, tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "crashed", 1)
    run(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")
    rows = read(tmp_path / "whole")
    assert rows[-1]["env_steps"] > 3 * DECISIONS * CHUNK * SECOND


def refusal(folder: Path, **changes: Any) -> str:
    settings = {**SETTINGS, **changes}
    config = parse_config(settings, "test")
    with open_session(config) as session, pytest.raises((UserError, FarmError)) as refused:
        folder.mkdir()
        training.train(RunSpec.of(config), folder, replace(session, cores=(CORE,)), None)
    return str(refused.value)


def test_tasks_that_one_policy_cannot_act_in_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "env": {**STATES["env"], "num_envs": 2}, "policy": STATES["policy"],
        "extra_tasks": [{"task": "tabletop/push", "num_envs": 2}],
    }  # fmt: skip
    with pytest.raises(UserError, match=r"one policy cannot act in tabletop/push too.*state_dim.*reads: \[images\]"):
        check(parse_config({**SETTINGS, **changes}, "test"))
    small = {**SETTINGS["env"], "num_envs": 2}
    message = refusal(
        tmp_path / "sizes", env=small, extra_tasks=[{"task": "tabletop/push", "num_envs": 2, "image_size": 64}]
    )
    assert "tabletop/reach has an image size of 32 and tabletop/push has an image size of 64" in message
    message = refusal(
        tmp_path / "cameras", env=small, extra_tasks=[{"task": "tabletop/push", "num_envs": 2, "cameras": 2}]
    )
    assert "cameras" in message and "tabletop/push" in message and "tabletop/reach" in message


def test_a_wrong_key_of_a_further_task_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "run", extra_tasks=[{"task": "tabletop/push"}, {"num_env": 2}])
    assert "extra_tasks[1]" in message and "num_envs" in message
    assert "tabletop/push" in refusal(tmp_path / "task", extra_tasks=[{"task": "tabletop/pusch"}])
