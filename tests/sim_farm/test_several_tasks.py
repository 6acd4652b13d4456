"""A farm of several tasks: each gives what it gives alone, whatever is served first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim_farm import make_physics
from sim_farm.client.farm import Farm, GroupError, WorkerTimeout
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import Trace, actions_for, append, assert_same, drive, mixed_policy, run
from tests.sim_farm.test_workers import MortalProcesses, processes, until

REACH = FarmSpec(
    TaskSpec("tabletop/reach", cameras=1, image_size=16, max_episode_steps=7),
    EndlessEpisodes(2),
    num_envs=8,
    chunk=3,
    groups=2,
    physics_workers=2,
    final_frames="ended",
)
PUSH = FarmSpec(
    TaskSpec("tabletop/push", cameras=1, image_size=16, max_episode_steps=9),
    EndlessEpisodes(3),
    num_envs=3,
    chunk=3,
    render_workers=1,
)
TASKS = (REACH, PUSH)
CHUNKS = 5
Order = Callable[[Farm, list[int]], int]
"""`(farm, chunks that each group has had)` to the group that is collected next."""


def in_turn(farm: Farm, had: list[int]) -> int:
    return min(range(farm.groups), key=lambda group: had[group])


def backwards(farm: Farm, had: list[int]) -> int:
    return min(range(farm.groups), key=lambda group: (had[group], -group))


def one_task_ahead(farm: Farm, had: list[int]) -> int:
    return next(group for group in (2, 0, 1) if had[group] < CHUNKS + 1)


def what_is_ready(farm: Farm, had: list[int]) -> int:
    return farm.wait_ready(deadline_s=60)


def drive_all(farm: Farm, order: Order) -> list[Trace]:
    """`CHUNKS` chunks of every group, of each task what its environments showed."""
    traces: list[Trace] = [{env: [] for env in range(spec.num_envs)} for spec in farm.specs]
    had = [0] * farm.groups
    for group in range(farm.groups):
        farm.reset(group)
    while min(had) <= CHUNKS:
        group = order(farm, had)
        append(traces[farm.task_of(group)], farm.collect(group, deadline_s=60))
        if had[group] < CHUNKS:
            farm.submit(group, actions_for(farm, group, had[group]))
        had[group] += 1
    return traces


@pytest.fixture(scope="module")
def alone() -> list[Trace]:
    """Each task in a farm of its own."""
    return [run(spec, chunks=CHUNKS) for spec in TASKS]


@pytest.mark.parametrize("order", [in_turn, backwards, one_task_ahead, what_is_ready])
def test_the_order_of_serving_never_changes_a_result(alone: list[Trace], order: Order) -> None:
    with closing(Farm.create(TASKS, InProcess())) as farm:
        for one, other in zip(alone, drive_all(farm, order), strict=True):
            assert_same(one, other, f"{order.__name__} changes results")


@pytest.mark.slow
def test_processes_of_two_tasks_give_what_each_gives_alone_and_leave_nothing(
    alone: list[Trace], own_memory: Callable[[], set[Path]]
) -> None:
    with processes(*TASKS) as (farm, _):
        client = Farm.attach(farm.address)
        assert len(own_memory()) == 4, "slots of two tasks, one bell, one frame memory"
        for one, other in zip(alone, drive_all(client, what_is_ready), strict=True):
            assert_same(one, other, "processes change results")
        client.detach()
    assert not own_memory(), "the farm's memory is still there"


def test_groups_are_numbered_through_and_environments_within_their_task() -> None:
    with closing(Farm.create((REACH, PUSH, PUSH), InProcess())) as farm:
        assert farm.groups == 4 and [farm.task_of(group) for group in range(4)] == [0, 0, 1, 2]
        assert [farm.envs_of(group).tolist() for group in range(4)] == [
            [0, 1, 4, 5],
            [2, 3, 6, 7],
            [0, 1, 2],
            [0, 1, 2],
        ]
        assert farm.built() == 14 and [len(each) for each in farm.private_bytes()] == [2, 2, 2]
        with pytest.raises(GroupError, match="group 3 is not yet reset"):
            farm.collect(3)
        with pytest.raises(FarmError, match=r"group 2 takes actions of shape \(3, 3, 3\), got \(1, 3, 3\)"):
            farm.reset(2)
            farm.collect(2)
            farm.submit(2, np.zeros((1, 3, 3), np.float32))


def test_ready_are_the_submitted_groups_that_are_done_and_the_lowest_is_served_first() -> None:
    with closing(Farm.create(TASKS, InProcess())) as farm:
        with pytest.raises(GroupError, match="no group is submitted"):
            farm.wait_ready()
        assert farm.ready() == []
        for group in (2, 1):
            farm.reset(group)
        assert farm.ready() == [1, 2] and farm.wait_ready(deadline_s=60) == 1
        farm.collect(1)
        assert farm.ready() == [2] and farm.wait_ready(deadline_s=60) == 2


@pytest.mark.slow
def test_a_late_worker_is_named_with_its_task() -> None:
    with processes(*TASKS) as (farm, host):
        drive_all(farm, in_turn)
        host.signal(TASKS[0].workers, signal.SIGSTOP)
        farm.submit(2, actions_for(farm, 2, 0))
        farm.submit(0, actions_for(farm, 0, 0))
        until(lambda: farm.ready() == [0])
        assert farm.wait_ready(deadline_s=1) == 0, "a light task's group waits for a heavy one's"
        farm.collect(0)
        with pytest.raises(WorkerTimeout, match="physics 0 of tabletop/push did not answer within 1 s"):
            farm.wait_ready(deadline_s=1)
        host.signal(TASKS[0].workers, signal.SIGCONT)
        assert farm.wait_ready(deadline_s=60) == 2


def test_a_restored_farm_of_several_tasks_continues_bit_for_bit(alone: list[Trace]) -> None:
    with closing(Farm.create(TASKS, InProcess())) as farm:
        drive_all(farm, in_turn)
        snapshot = farm.snapshot()
        keys = ("base_episode", "base_step", "base_start", "history")
        assert set(snapshot) == {f"{task}{key}" for task in ("", "1.") for key in keys}
    with closing(Farm.create(TASKS, InProcess())) as farm:
        farm.restore(snapshot)
        for group in range(farm.groups):
            farm.reset(group)
            seen, task = farm.collect(group), farm.task_of(group)
            for row, env in enumerate(seen.envs.tolist()):
                assert seen.state[row].tobytes() == alone[task][env][-1]["state"].tobytes()
    with closing(Farm.create((REACH, replace(PUSH, num_envs=2)), InProcess())) as farm:
        with pytest.raises(FarmError, match="tabletop/push has shape .* resume with the same environments"):
            farm.restore(snapshot)
        assert not farm.tasks[0].slots["base_step"].any(), "a snapshot that does not fit is taken in part"


def test_holding_and_renderers_that_leave_are_of_one_task_or_of_all() -> None:
    with closing(Farm.create(TASKS, InProcess())) as farm:
        farm.hold(1, task=1)
        assert (farm.tasks[1].slots["limit"] == 1).all() and (farm.tasks[0].slots["limit"] > 1).all()
        farm.hold(2)
        assert all((task.slots["limit"] == 2).all() for task in farm.tasks)
        drive_all(farm, in_turn)
        farm.unload_renderers(task=1)
        farm.submit(0, actions_for(farm, 0, 0))
        with pytest.raises(GroupError, match="renderers are away"):
            farm.submit(2, actions_for(farm, 2, 0))
        farm.load_renderers()
        farm.submit(2, actions_for(farm, 2, 0))
        with pytest.raises(GroupError, match="collect every group"):
            farm.unload_renderers()


def test_one_spec_is_a_farm_of_one_task() -> None:
    with closing(Farm.create(REACH, InProcess())) as one, closing(Farm.create([REACH], [InProcess()])) as other:
        assert_same(drive(one, end=2), drive(other, end=2), "a list of one spec changes results")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "action size": ({"name": "tabletop/pick_and_place"}, "reach has actions of size 3 and .*pick_and_place has .* 4"),
    "cameras": ({"cameras": 2}, "reach has cameras: 1 and tabletop/push has cameras: 2.* name as many"),
    "no camera": ({"cameras": 0}, "reach has cameras: 1 and tabletop/push has cameras: 0"),
    "image size": ({"image_size": 24}, "reach has an image size of 16 and tabletop/push has an image size of 24"),
}


class NothingStarts(InProcess):
    """Workers that may not be started."""

    def launch(self, setup: Any, memory: Any) -> Any:
        raise AssertionError("a worker was started")


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_tasks_that_do_not_fit_together_are_refused_at_once(change: dict[str, Any], message: str) -> None:
    other = replace(PUSH, task=replace(PUSH.task, **change))
    with pytest.raises(FarmError, match=message):
        Farm.create((REACH, other), NothingStarts())


def test_wrong_numbers_of_hosts_and_cores_are_refused() -> None:
    for hosts, cores in (([InProcess()], ()), (InProcess(), ((0,),)), ([], ())):
        with pytest.raises(FarmError, match="a farm of 2 tasks takes one host or 2"):
            Farm.create(TASKS, hosts, cores)
    with pytest.raises(FarmError, match="one task or more"):
        Farm.create((), InProcess())
    with pytest.raises(FarmError, match="hosts of one kind"):
        Farm.create(TASKS, [InProcess(), MortalProcesses()])


def test_the_same_policy_drives_tasks_whose_states_differ_in_size() -> None:
    """So that the comparisons above are of two tasks, not of one twice."""
    sizes = []
    for spec in TASKS:
        with closing(make_physics(spec.task)) as physics:
            sizes.append(physics.info.state_dim)
            assert mixed_policy(1, 0, np.zeros(physics.info.state_dim)).shape == (3, physics.info.action_dim)
    assert len(set(sizes)) == 2
