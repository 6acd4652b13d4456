"""Several workers under one handle, inline and on Ray: the laws are the same."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from embodied.errors import UserError
from embodied.runtime.api import InlineRuntime, LocalHandle, Runtime
from embodied.runtime.deadlines import Deadline
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ray.runtime import RayRuntime
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from tests.variants import often


@dataclass
class Member:
    """A worker that does things depending on its rank."""

    rank: int = 0
    made: int = 0

    def place(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def later_the_lower(self, size: int, text: str) -> str:
        """Rank 0 answers last."""
        time.sleep(0.2 * (size - self.rank))
        return f"{text} {self.rank}"

    def add(self, a: int, b: int = 0) -> int:
        return a + b + self.rank

    def fail(self, rank: int, message: str) -> None:
        if self.rank == rank:
            raise UserError(message)

    def fail_oddly(self, rank: int) -> None:
        if self.rank == rank:
            raise FileNotFoundError(2, "no such file", "weights")

    def die(self, rank: int) -> None:
        """The others wait for it, as in a collective operation."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def hang(self, rank: int) -> int:
        if self.rank == rank:
            time.sleep(3)
        return self.rank

    def sleep(self, below: int) -> None:
        if self.rank < below:
            time.sleep(3)

    def make(self) -> tuple[int, int]:
        """Its rank, and how often it was asked."""
        self.made += 1
        return self.rank, self.made

    def take(self, thing: tuple[int, int], more: str) -> tuple[int, tuple[int, int], str]:
        return self.rank, thing, more


@pytest.fixture(params=often(["inline"], ["inline", "ray"]))
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param == "inline":
        return InlineRuntime(60.0)
    found: RayRuntime = request.getfixturevalue("ray_runtime")
    return found


def members(runtime: Runtime, size: int) -> WorkerGroup[Member]:
    return runtime.start_group("member", Member, size, lambda rank: (rank,))


def with_deadline(group: WorkerGroup[Member], seconds: float) -> WorkerGroup[Member]:
    return replace(group, handles=tuple(replace(one, deadline=Deadline(seconds)) for one in group.handles))


def test_results_come_in_rank_order(runtime: Runtime) -> None:
    group = members(runtime, 3)
    assert [handle.name for handle in group.handles] == ["member 0", "member 1", "member 2"]
    assert group.call_all(Member.later_the_lower, 3, "rank") == ["rank 0", "rank 1", "rank 2"]
    assert group.scatter(Member.add, [(10,), (20, 5), (30,)]) == [10, 26, 32]
    assert group.call_one(2, Member.add, 1) == 3
    assert group.get(group.submit_all(Member.add, 100)) == [100, 101, 102]
    assert group.get_one(1, group.submit_one(1, Member.add, 7)) == 8
    with pytest.raises(ValueError, match="member has 3 ranks, got arguments for 2"):
        group.scatter(Member.add, [(1,), (2,)])
    with pytest.raises(ValueError, match="member has 3 ranks: name one with call_one"):
        group.call(Member.add, 1)
    group.end()


def test_the_error_of_a_rank_arrives_as_itself_with_its_name(runtime: Runtime) -> None:
    group = members(runtime, 2)
    with pytest.raises(UserError, match="^member 1: no such thing$"):
        group.call_all(Member.fail, 1, "no such thing")
    with pytest.raises(UserError, match="^member 0: nor this$"):
        group.get(group.submit_all(Member.fail, 0, "nor this"))
    with pytest.raises(UserError, match="^member 1: by itself$"):
        group.call_one(1, Member.fail, 1, "by itself")
    with pytest.raises(FileNotFoundError) as caught:
        group.call_all(Member.fail_oddly, 1)
    assert caught.value.filename == "weights" and "in member 1" in caught.value.__notes__
    assert group.call_all(Member.add, 0) == [0, 1], "a mistake has cost a worker"
    group.end()


def test_a_group_of_one_is_its_worker(runtime: Runtime) -> None:
    group = members(runtime, 1)
    (handle,) = group.handles
    assert (group.size, handle.name) == (1, "member"), "the name of an only worker has a rank in it"
    assert group.call(Member.add, 2, b=3) == 5 and group.call_all(Member.add, 2, 3) == [5]
    with pytest.raises(UserError, match="^as it is$"):
        group.call(Member.fail, 0, "as it is")
    with pytest.raises(UserError, match="^as it is$"):
        group.call_all(Member.fail, 0, "as it is")
    group.end()


def test_a_call_of_a_group_of_one_is_one_call_of_its_worker() -> None:
    class Counted(LocalHandle[Member]):
        started = 0

        def call(self, *args: Any, **kwargs: Any) -> Any:
            Counted.started += 1
            return super().call(*args, **kwargs)

    group: WorkerGroup[Member] = WorkerGroup("member", (Counted("member", Deadline(60.0), worker=Member()),))
    for call in (group.call, group.call_all):
        Counted.started = 0
        call(Member.add, 1)
        assert Counted.started == 1


@pytest.mark.slow
def test_things_go_rank_to_rank_or_from_one_to_all(runtime: Runtime) -> None:
    target, equal, single = members(runtime, 2), members(runtime, 2), members(runtime, 1)
    assert target.get(target.pipe(Member.take, equal, Member.make, "x")) == [(0, (0, 1), "x"), (1, (1, 1), "x")]
    assert target.get(target.pipe(Member.take, single, Member.make, "y")) == [(0, (0, 1), "y"), (1, (0, 1), "y")]
    with pytest.raises(ValueError, match="pipe goes rank to rank between groups of one size, or from a group of one"):
        single.pipe(Member.take, target, Member.make, "z")
    expected = "by reference" if isinstance(runtime, InlineRuntime) else "shared memory"
    assert target.path_from(equal) == target.path_from(single) == expected
    for group in (target, equal, single):
        group.end()


def test_a_group_beside_another_shares_its_processes(runtime: Runtime) -> None:
    first = members(runtime, 2)
    second = runtime.start_group("other", Member, 2, lambda rank: (10 + rank,), beside=first.handles)
    here, there = first.call_all(Member.place), second.call_all(Member.place)
    assert [pid for _, pid in here] == [pid for _, pid in there]
    assert [rank for rank, _ in there] == [10, 11]
    assert second.path_from(first) == "by reference"
    assert second.get(second.pipe(Member.take, first, Member.make, "")) == [(10, (0, 1), ""), (11, (1, 1), "")]
    with pytest.raises(ValueError, match="third has 3 ranks, got what to be beside for 2"):
        runtime.start_group("third", Member, 3, beside=first.handles)
    with pytest.raises(ValueError, match="third has at least one rank, got 0"):
        runtime.start_group("third", Member, 0)
    second.end()
    assert first.call_all(Member.add, 0) == [0, 1], "the end of one group has ended the other"
    first.end()


def test_only_some_of_a_group_may_be_beside_others(runtime: Runtime) -> None:
    first = members(runtime, 2)
    beside = [None, first.handles[1], first.handles[0]]
    second = runtime.start_group("other", Member, 3, lambda rank: (10 + rank,), beside=beside)
    (_, own), *shared = second.call_all(Member.place)
    pids = [pid for _, pid in first.call_all(Member.place)]
    assert [pid for _, pid in shared] == pids[::-1]
    assert own not in pids or isinstance(runtime, InlineRuntime)
    guests = second.some([1, 2])
    assert guests.get(guests.pipe(Member.take, first.some([1, 0]), Member.make, "")) == [
        (11, (1, 1), ""),
        (12, (0, 1), ""),
    ]
    with pytest.raises(UserError, match="^other 2: oh$"):
        second.some([2]).call_all(Member.fail, 12, "oh")
    second.end()
    assert first.call_all(Member.add, 0) == [0, 1], "the end of one group has ended the other"
    first.end()


def refuse(rank: int, which: int) -> Member:
    if rank == which:
        raise UserError("it cannot be built")
    return Member(rank)


def test_a_rank_that_cannot_be_made_is_named_and_none_is_left(runtime: Runtime) -> None:
    before = len(runtime._processes) if isinstance(runtime, RayRuntime) else 0
    spare = len(runtime._spare) if isinstance(runtime, RayRuntime) else 0
    with pytest.raises(UserError, match="^member 1: it cannot be built$"):
        runtime.start_group("member", refuse, 2, lambda rank: (rank, 1))
    if isinstance(runtime, RayRuntime):
        assert len(runtime._processes) - len(runtime._spare) == before - spare, "processes are left"
    with pytest.raises(UserError, match="^it cannot be built$"):
        runtime.start_group("member", refuse, 1, (0, 0))


# --- between processes


def meet(rank: int, size: int, folder: Path) -> Member:
    """A worker that is made only when all the others have begun to be."""
    (folder / str(rank)).touch()
    end = time.monotonic() + 240
    while len(list(folder.iterdir())) < size:
        if time.monotonic() > end:
            raise UserError("the others have not begun")
        time.sleep(0.01)
    return Member(rank)


@pytest.mark.slow
def test_ranks_start_side_by_side(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    group = ray_runtime.start_group("member", meet, 3, lambda rank: (rank, 3, tmp_path))
    places = group.call_all(Member.place)
    assert [rank for rank, _ in places] == [0, 1, 2]
    assert len({pid for _, pid in places} | {os.getpid()}) == 4, "ranks share a process"
    group.end()


@pytest.mark.slow
def test_a_killed_rank_is_named_while_the_others_wait_for_it(ray_runtime: RayRuntime) -> None:
    group = members(ray_runtime, 2)
    with pytest.raises(WorkerFailed, match="^member 1 died during 'die'"):
        group.call_all(Member.die, 1)
    with pytest.raises(WorkerFailed, match="^member 1 died during 'add'"):
        group.call_one(1, Member.add, 0)


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_not_waited_for_to_know_whether_all_answer(ray_runtime: RayRuntime) -> None:
    group = members(ray_runtime, 2)
    stuck = group.submit_one(1, Member.hang, 1)
    assert not group.answers(group.submit_all(Member.add, 0), 0.1)
    group.get_one(1, stuck)
    assert group.answers(group.submit_all(Member.add, 0), 60.0)
    with pytest.raises(UserError, match="^member 1: gone$"):
        group.answers(group.submit_all(Member.fail, 1, "gone"), 60.0)
    group.end()


@pytest.mark.slow
def test_a_late_rank_is_named_and_is_of_use_again(ray_runtime: RayRuntime) -> None:
    group = members(ray_runtime, 3)
    with pytest.raises(WorkerTimeout, match=r"^member 1 did not finish 'hang': no progress for .* deadline of 1 s$"):
        with_deadline(group, 1.0).call_all(Member.hang, 1)
    assert group.call_all(Member.add, 0) == [0, 1, 2]
    with pytest.raises(WorkerTimeout, match="^member 0 did not finish 'sleep': .*; not finished either: member 1$"):
        with_deadline(group, 1.0).call_all(Member.sleep, 2)
    group.end()
