"""A curriculum over tasks: what each of them is given, what is learned from it, and that a run can be gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policies
from embodied.algorithms.curricula import TASKS_DECAY, TaskCurriculum
from embodied.algorithms.estimators import gae_of
from embodied.config.schema import AdvantageConfig
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.rollout.policy_worker import PolicyWorker
from embodied.rollout.rollout_loop import RolloutSettings
from embodied.run import checkpoint
from embodied.training.preflight import check_run
from embodied.trajectories.batch import EndedEpisode
from embodied.trajectories.memory import TrajectoryMemory
from policies import PolicySpec
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.embodied.run.test_resume import STATES, assert_same_run, config_of, run
from tests.embodied.support.copied_out import copied_out

DECISIONS = 12
TASKS: dict[str, Any] = {
    **STATES,
    "env": {**STATES["env"], "task": "tabletop/reach_red"},
    "extra_tasks": [{"task": "tabletop/reach_blue", "num_envs": 6}],
    "rollout": {"decisions": DECISIONS, "task_curriculum": 0.75},
}
COUNTED = {"task_tried": np.array([1e9, 1e9]), "task_solved": np.array([5e8, 0.0])}
"""The first task is solved sometimes, the second never."""


def episodes(task: int, solved: int, of: int) -> list[EndedEpisode]:
    return [EndedEpisode(env, env < solved, 0.0, 5, task) for env in range(of)]


def test_a_task_that_is_solved_sometimes_is_given_the_most() -> None:
    curriculum = TaskCurriculum(3, share=0.8)
    assert curriculum.decisions(20) == (20, 20, 20), "at first all alike"
    curriculum.count([*episodes(0, 4, 8), *episodes(1, 8, 8)])
    learnable = 0.9 * 0.1 / 0.25
    assert curriculum.decisions(20) == (20, round(20 * (0.8 * learnable + 0.2)), 20)
    for _ in range(50):
        curriculum.count([*episodes(0, 5, 10), *episodes(1, 10, 10), *episodes(2, 0, 10)])
    few = round(20 * (0.8 * (1 / 102 * 101 / 102) / 0.25 + 0.2))  # of the last hundred or so, all or none
    assert curriculum.decisions(20) == (20, few, few)
    assert TaskCurriculum(2, 1.0).decisions(1) == (1, 1)


def test_its_counts_fade_and_go_on() -> None:
    curriculum, later, other = TaskCurriculum(2, 1.0), TaskCurriculum(2, 1.0), TaskCurriculum(3, 1.0)
    curriculum.count(episodes(1, 0, 4))
    curriculum.count(episodes(1, 3, 3))
    tried, solved = curriculum.state().values()
    assert tried.tolist() == [0, pytest.approx(4 * TASKS_DECAY**3 + 3)] and solved.tolist() == [0, 3]
    for each in (later, other):
        each.load(curriculum.state())
        each.load({})
    assert later.decisions(50) == curriculum.decisions(50)
    assert other.decisions(50) == (50, 50, 50)


@contextmanager
def worker(share: float, snapshot: dict[str, np.ndarray] | None) -> Iterator[PolicyWorker]:
    """Of two tasks of four environments each."""
    specs = [
        FarmSpec(TaskSpec(f"tabletop/reach_{ball}", max_episode_steps=5), EndlessEpisodes(7), 4, 1, groups, 1)
        for ball, groups in (("red", 2), ("blue", 1))
    ]
    with closing(Farm.create(specs, [InProcess(), InProcess()])) as farm:
        spec = PolicySpec(farm.infos[0].action_dim, chunk=1, state_dim=farm.infos[0].state_dim)
        policy = policies.build("gaussian_mlp", spec, seed=1, widths=[8])
        made = PolicyWorker(
            policy, farm, RolloutSettings(("state",), (7, 8), "truncated", DECISIONS, task_curriculum=share)
        )
        made.use(TrajectoryMemory.create(made.layout(), None, shared=False))
        made.begin(snapshot)
        yield made


def test_a_task_is_rolled_out_less_and_learned_from_as_if_the_rollout_had_been_shorter() -> None:
    with worker(0.0, None) as first:
        first.rollout(2)
        snapshot = first.snapshot() | COUNTED
    batches = []
    for share, decisions in ((0.75, DECISIONS), (0.0, DECISIONS), (0.0, 3)):
        with worker(share, snapshot) as made:
            summary = made.rollout(decisions)
            batches.append(copied_out(made.trajectories()))
            if share:
                red, blue = (summary.curriculum[f"curriculum/decisions/tabletop/reach_{x}"] for x in ("red", "blue"))
                assert (red, blue) == (DECISIONS, 3)
                assert made.snapshot()["task_tried"][1] < COUNTED["task_tried"][1], "what ended is not counted"
    mask = batches[0].mask
    assert mask[:, :4].all() and mask[-3:, 4:].all() and not mask[:-3, 4:].any()
    assert batches[0].truncated[:, 4:].any(), "no episode of the second task ended: nothing is shown"
    settings = AdvantageConfig(normalise="none")
    mine, whole, short = (gae_of(batch, settings) for batch in batches)
    for name in ("advantage", "returns"):
        found = getattr(mine, name)
        assert torch.equal(found[:, :4], getattr(whole, name)[:, :4])
        assert torch.equal(found[-3:, 4:], getattr(short, name)[:, 4:])


@pytest.mark.slow
def test_a_run_with_a_curriculum_that_is_stopped_and_gone_on_with_is_the_same_run(tmp_path: Path) -> None:
    run(config_of(TASKS, 6), tmp_path / "whole")
    run(config_of(TASKS, 3), tmp_path / "parts")
    run(config_of(TASKS, 6), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    kept = checkpoint.read_environments(tmp_path / "whole" / "checkpoints" / "000006")
    rows = read(tmp_path / "whole")
    assert kept["task_tried"].min() > 5
    taken = [[row[f"curriculum/decisions/tabletop/reach_{ball}"] for ball in ("red", "blue")] for row in rows]
    assert taken[0] == [DECISIONS] * 2 and all(max(each) == DECISIONS for each in taken)
    assert len({min(each) for each in taken}) > 1, "the counts changed nothing"


def test_what_cannot_be_dealt_out_is_refused_before_a_worker_starts() -> None:
    with pytest.raises(UserError, match=r"rollout.task_curriculum is 0.75, and tabletop/reach_red is the run's one"):
        check_run(config_of({**TASKS, "extra_tasks": []}, 3))
    with pytest.raises(UserError, match=r"task_curriculum is 0.75, and the workflow grpo rolls out whole episodes, as"):
        rollout = {"task_curriculum": 0.75, "episode_group": 2}
        check_run(config_of({**TASKS, "workflow": "grpo", "rollout": rollout, "advantage": {}, "optim": {}}, 3))
