"""What a plan says of components and parts is what runs: a component of one's own, and parts of an iteration."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import schedulers
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.assignment import assign
from embodied.execution.iteration import Iteration, start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session, open_session
from embodied.learning.scorers import Scorer
from embodied.planning import profiler as profiling
from embodied.planning.clusters import local_cluster
from embodied.planning.profiler import profile_run
from embodied.planning.run_plans import sized_workflow
from embodied.reporting.metrics import read
from embodied.run.folder import prepare_run
from embodied.training import loop as training
from embodied.trajectories.batch import Trajectories
from embodied.workflows import GRPO, PPO, WorkflowComponent, passing
from embodied.workflows.context import WorkerContext
from embodied.workflows.run_spec import RunSpec
from schedulers import DeviceRange, Phase, Placement, Plan, Profile

CORES = tuple(sorted(os.sched_getaffinity(0))[:2])
ENVS, EPISODES, REFLECTS_S = 4, 2, 0.02


class Judge(Scorer):
    """Passes trajectories on as they are, after a while that nobody knows but the clock."""

    saw: ClassVar[list[int]] = []
    """Environments, or episodes, of each part."""

    @classmethod
    def make(cls, context: WorkerContext) -> Judge:
        return cls(context.affinity)

    def work(self, batch: Trajectories) -> Trajectories:
        self.saw.append(batch.log_prob.shape[1])
        time.sleep(REFLECTS_S)
        return batch


JUDGE = WorkflowComponent("judge", "thinks about what was done", f"{__name__}:Judge")
JUDGED = passing(PPO, JUDGE, "judged")
JUDGED_GROUPS = passing(GRPO, JUDGE, "judged_groups")

SETTINGS: dict[str, Any] = {
    "workflow": f"{__name__}:JUDGED",
    "seed": 3,
    "iterations": 2,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": 9},
    "policy": {"chunk": 2, "options": {"widths": [16]}},
    "rollout": {"decisions": 6},
    "optim": {"epochs": 1, "minibatch": 12},
    "runtime": {"mode": "inline"},
}
GROUPS: dict[str, Any] = {
    **SETTINGS,
    "workflow": f"{__name__}:JUDGED_GROUPS",
    "rollout": {"episode_group": 2, "episodes_per_env": EPISODES},
    "advantage": {"outcome": "return"},
    "optim": {"epochs": 1, "minibatch": 0},
    "runtime": {"mode": "inline"},
}


@pytest.fixture(scope="module")
def here() -> Iterator[Session]:
    with open_session(parse_config(SETTINGS, "test")) as session:
        yield replace(session, cores=CORES)


@pytest.fixture(autouse=True)
def few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST", profiling.LEAST)
    monkeypatch.setattr(Judge, "saw", [])


# --- a component that no line of the planning knows


@pytest.mark.slow
@pytest.mark.parametrize("extra_tasks", [[], [{"num_envs": ENVS}]])
def test_a_component_of_ones_own_is_measured_planned_and_predicted(
    extra_tasks: list[Any], here: Session, tmp_path: Path
) -> None:
    config = parse_config({**SETTINGS, "extra_tasks": extra_tasks}, "test")
    profile, workflow = profile_run(RunSpec.of(config), here, tmp_path), sized_workflow(RunSpec.of(config))
    judged, items = profile.components["judge"], ENVS * (1 + len(extra_tasks))
    assert list(profile.components) == list(workflow.names) and workflow.names[-2:] == ("judge", "learner")
    assert {(p.batch, p.devices) for p in judged.points} == {
        (batch, cores) for batch in (items // 2, items) for cores in (1, len(CORES))
    }
    assert all(point.seconds >= REFLECTS_S for point in judged.points)
    assert profile.transfers["policy>judge"] == profile.transfers["judge>learner"] > 0
    best = schedulers.plan(workflow, profile, local_cluster(len(CORES)))
    assert best.prediction is not None and best.prediction.components_s["judge"] >= REFLECTS_S
    assert best.prediction.iteration_s >= REFLECTS_S
    assert any("judge" in sentence for sentence in best.why)


@pytest.mark.slow
def test_a_run_that_plans_it_computes_what_one_without_it_does(tmp_path: Path) -> None:
    planned = run({**SETTINGS, "plan": {"mode": "auto"}}, tmp_path / "planned")
    plan = schedulers.load(Plan, planned / "plan.json")
    assert "judge" in schedulers.load(Profile, planned / "profile.json").components
    assert [name for phase in plan.phases for name in phase.components].count("judge") == 1
    rows = read(planned)
    assert all(row["time/judge_s"] >= REFLECTS_S for row in rows)
    plain = read(run({**SETTINGS, "workflow": "ppo", "farm": {"groups": plan.groups[0]}}, tmp_path / "plain"))
    for key in ("learner/policy_loss", "learner/value_loss", "env_steps"):
        assert [row[key] for row in rows] == [row[key] for row in plain], key


def run(settings: dict[str, Any], folder: Path) -> Path:
    config = parse_config(settings, "test")
    found = prepare_run(config, folder, resume=False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), folder, replace(session, cores=CORES), found)
    return folder


# --- parts


def by_plan(micro_batch: int, here: Session, folder: Path) -> tuple[Iteration, dict[str, Tensor]]:
    """One iteration of whole episodes by a plan that hands so many of them on at once."""
    config: Config = parse_config(GROUPS, "test")
    place = Placement(("physics", "policy", "judge", "learner"), (DeviceRange("here", "cores", 0, 1),))
    plan = Plan("judged_groups", "collocated", (Phase((place,), micro_batch),))
    schedulers.validate(plan, sized_workflow(RunSpec.of(config)), local_cluster(1))
    folder.mkdir()
    with start_run(RunSpec.of(config), folder, here, assign(plan, RunSpec.of(config), CORES)) as workers:
        workers.begin(None, 0)
        iteration = workers.iterate(0)
        weights = workers.learner.call(LearnerRole.weights)
        return iteration, {name: tensor.clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("parts", [2, 4])
def test_the_parts_of_a_plan_are_those_that_run(parts: int, here: Session, tmp_path: Path) -> None:
    items = ENVS * EPISODES
    whole, expected = by_plan(items, here, tmp_path / "whole")
    assert Judge.saw == [items]
    Judge.saw.clear()
    found, parameters = by_plan(items // parts, here, tmp_path / "parts")
    assert Judge.saw == [items // parts] * parts, "every component after the rollout is handed parts"
    rolled = [span.name for span in found.spans if span.name.startswith("roll out part")]
    assert rolled == [f"roll out part {number}" for number in range(parts)]
    key = [(e.env, e.length, e.total_reward) for e in whole.summary.episodes]
    assert [(e.env, e.length, e.total_reward) for e in found.summary.episodes] == key
    assert found.learned["learner/steps"] == whole.learned["learner/steps"] == 1, "one step, whatever the parts"
    assert whole.learned["learner/grad_norm"] > 0, "nothing was learned: parts would not matter"
    for name, tensor in expected.items():
        # Adam divides by the size of gradients, which carries on what sums round differently.
        assert torch.allclose(parameters[name], tensor, atol=1e-5), name
