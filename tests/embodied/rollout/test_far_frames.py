"""Frames that are fetched from another machine: each once, in calls that are not too large."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.execution.delivery import FrameSource, FrameSourceReader
from embodied.trajectories import memory as trajectory_memory
from embodied.trajectories.batch import join_columns
from embodied.trajectories.memory import FrameShape, RemoteFrames
from tests.embodied.rollout.test_policy_worker import ENVS, Watcher, worker
from tests.embodied.trajectories.test_trajectory_memory import WATCHED, assert_same

SHAPE = FrameShape(("front", "wrist"), (4, 4, 3))
MEMORY = torch.randint(0, 256, (100, 2, 4, 4, 3), dtype=torch.uint8)


@dataclass
class Reader:
    requests: list[list[int]] = field(default_factory=list)

    def read(self, rows: Tensor) -> Tensor:
        self.requests.append(rows.tolist())
        return MEMORY[rows]


def assert_shown(found: dict[str, Tensor], rows: list[int]) -> None:
    assert list(found) == ["front", "wrist"]
    assert all(torch.equal(found[name], MEMORY[rows, i]) for i, name in enumerate(found))


def test_what_is_there_is_not_fetched_again() -> None:
    reader = Reader()
    frames = RemoteFrames(reader, SHAPE, torch.arange(50, 60))
    assert_shown(frames.at(torch.tensor([3, 1, 3])), [53, 51, 53])
    assert_shown(frames.at(torch.tensor([9, 1])), [59, 51])
    assert_shown(frames.at(torch.tensor([3])), [53])
    assert_shown(frames.at(torch.tensor([], dtype=torch.int64)), [])
    assert reader.requests == [[53, 51], [59]]


def test_parts_are_joined_with_what_they_have_fetched() -> None:
    reader = Reader()
    first, second = (RemoteFrames(reader, SHAPE, torch.arange(begin, begin + 4)) for begin in (10, 70))
    first.at(torch.tensor([2]))
    second.at(torch.tensor([0]))
    whole = RemoteFrames.joined([pickle.loads(pickle.dumps(first)), second])
    whole._reader = reader
    assert_shown(whole.at(torch.arange(8)), [10, 11, 12, 13, 70, 71, 72, 73])
    assert reader.requests == [[12], [70], [10, 11, 13, 71, 72, 73]]


def test_no_call_fetches_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    monkeypatch.setattr(trajectory_memory, "CALL_BYTES", 3 * SHAPE.nbytes + 1)
    assert_shown(RemoteFrames(reader, SHAPE, torch.arange(7)).at(torch.arange(7)), list(range(7)))
    assert reader.requests == [[0, 1, 2], [3, 4, 5], [6]]
    monkeypatch.setattr(trajectory_memory, "CALL_BYTES", 1)
    assert_shown(RemoteFrames(reader, SHAPE, torch.arange(2)).at(torch.arange(2)), [0, 1])
    assert reader.requests[3:] == [[0], [1]]


@dataclass
class Straight:
    """Calls the source in this process."""

    source: FrameSource
    rows: list[int] = field(default_factory=list)
    name: str = "frame source"

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        self.rows += args[0].tolist()
        return method(self.source, *args)

    def submit(self, method: Callable[..., Any], *args: Any) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_result(self.call(method, *args))
        return result


@pytest.mark.parametrize("observations", [1, 2])
def test_trajectories_sent_to_another_machine_are_those_of_the_memory(observations: int) -> None:
    """Whole, and in parts that are joined again; each frame is fetched once."""
    with worker(Watcher(observations=observations), task=WATCHED) as made:
        made.rollout(8, 60.0)
        batch = made.trajectories()
        caller: Any = Straight(FrameSource())
        caller.source.use(made.memory)
        whole = batch.without_memory(FrameSourceReader(caller))
        for _ in range(2):
            assert_same(whole, batch)
        # Earlier observations are those of the env step before each decision, and an episode's first stands for them.
        assert 8 * ENVS * observations - len(caller.rows) in range(observations * 4 * ENVS)
        assert len(set(caller.rows)) == len(caller.rows) >= 8 * ENVS
        parts = [batch.columns(first, last) for first, last in ((0, 1), (1, ENVS))]
        assert_same(join_columns([part.without_memory(FrameSourceReader(caller)) for part in parts]), batch)
