"""Frames are drawn into the rows that the client names, once, and read where they are."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations, StaleFrame
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes, ListedEpisodes, evaluation_episodes
from sim_farm.shared_memory import memory
from sim_farm.shared_memory.frame_memory import FrameMemory, nbytes_of
from sim_farm.shared_memory.memory import FOLDER, MAGIC
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import actions_for, drive, mixed_policy, run
from tests.sim_farm.test_workers import MortalProcesses

REACH = TaskSpec("tabletop/reach", cameras=2, image_size=16, max_episode_steps=7)
SPEC = FarmSpec(REACH, EndlessEpisodes(5), num_envs=4, chunk=3, final_frames="ended")
CHUNKS = 6
ROWS = 4 * (CHUNKS + 1)
"""A trajectory [T + 1, B]; the rows for final observations follow, [T, B]."""


def submit(farm: Farm, number: int) -> None:
    """Chunk `number`, drawn into its place in the trajectory."""
    here = np.arange(4) + 4 * (number + 1)
    farm.submit(0, actions_for(farm, 0, number), here, ROWS + here - 4)


def roll(farm: Farm) -> list[Observations]:
    """A trajectory in which each moment has rows of its own."""
    farm.reset(0, np.arange(4))
    seen = [farm.collect(0)]
    for number in range(CHUNKS):
        submit(farm, number)
        seen.append(farm.collect(0))
    return seen


@pytest.mark.parametrize("shape", [{}, {"physics_workers": 2, "render_workers": 2}], ids=["fused", "split"])
def test_a_trajectory_is_drawn_where_it_is_read_and_nothing_is_copied(shape: dict[str, Any]) -> None:
    """At its end every row still shows what was observed there, without a copy, and equals a farm's own rows."""
    plain = run(SPEC, chunks=CHUNKS)
    finals = 0
    with closing(Farm.create(replace(SPEC, **shape), InProcess(), frame_rows=2 * ROWS - 4)) as farm:
        assert farm.frames is not None
        for moment, seen in enumerate(roll(farm)):
            assert seen.frame_rows.tolist() == [4 * moment + env for env in range(4)]
            for i, (camera, frames) in enumerate(seen.frames.items()):
                assert np.shares_memory(frames, farm.frames.frames), "frames were copied"
                for env in range(4):
                    assert np.array_equal(frames[env], plain[env][moment][camera])
                    assert np.array_equal(farm.frames.frames[4 * moment + env, i], plain[env][moment][camera])
            shown = farm.frames.frames_of[seen.frame_rows]
            assert np.array_equal(shown, np.stack((seen.episode, seen.episode_step), 1))
            for k, env in enumerate(seen.final.rows.tolist()):
                row = ROWS + 4 * (moment - 1) + env
                assert seen.final.frame_rows[k] == row and seen.final.drawn[k]
                for i, camera in enumerate(seen.final.frames):
                    assert np.array_equal(farm.frames.frames[row, i], plain[env][moment][f"final {camera}"])
                finals += 1
        assert farm.frame_copies == 0
        unused = farm.frames.frames_of[:, 0] < 0
        assert finals and unused.sum() == 2 * ROWS - 4 - ROWS - finals
        assert (farm.frames.frames[unused] == MAGIC).all(), "rows were drawn that nobody has named"


def test_rows_may_be_used_again_as_in_a_ring() -> None:
    plain = run(SPEC, chunks=CHUNKS)
    with closing(Farm.create(replace(SPEC, final_frames="never"), InProcess(), frame_rows=8)) as farm:
        farm.reset(0, np.arange(4))
        for moment in range(CHUNKS):
            seen = farm.collect(0)
            for camera, frames in seen.frames.items():
                assert all(np.array_equal(frames[env], plain[env][moment][camera]) for env in range(4))
            farm.submit(0, actions_for(farm, 0, moment), np.arange(4) + 4 * ((moment + 1) % 2))
        assert farm.frame_copies == 0


def test_frames_in_rows_that_do_not_follow_each_other_are_copied_once_when_requested_and_counted() -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.reset(0, np.array([7, 1, 4, 2]))
        seen = farm.collect(0)
        assert farm.frame_copies == 0, "nobody has asked for a frame"
        assert farm.frames is not None
        for i, frames in enumerate(seen.frames.values()):
            assert not np.shares_memory(frames, farm.frames.frames)
            assert np.array_equal(frames, farm.frames.frames[[7, 1, 4, 2], i])
        assert farm.frame_copies == 4, "four environments, both cameras at once"


def test_a_farm_without_named_rows_draws_into_two_rows_of_its_own_for_each_environment() -> None:
    with closing(Farm.create((SPEC, replace(SPEC, num_envs=3)), InProcess())) as farm:
        assert farm.frames is not None and farm.frames.rows == 14
        for group in (0, 1):
            farm.reset(group)
            assert farm.collect(group).frame_rows.tolist() == [[0, 1, 2, 3], [8, 9, 10]][group]
        for _ in range(3):
            farm.submit(1, np.stack([mixed_policy(0, 0, np.zeros(20))] * 3))
            final = farm.collect(1).final
            assert (final.frame_rows == final.rows + 11).all()


def test_a_frame_of_another_moment_is_noticed_in_final_rows_too() -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=2)
        farm.submit(0, actions_for(farm, 0, 2))
        ended = int(np.flatnonzero(farm.tasks[0].slots["truncated"])[0])
        assert farm.frames is not None
        farm.frames.frames_of[4 + ended, 1] -= 1
        with pytest.raises(StaleFrame, match=f"environment {ended} .* its final frames show"):
            farm.collect(0)


def test_the_row_of_an_environment_that_rests_holds_zeros() -> None:
    spec = replace(SPEC, episodes=ListedEpisodes(evaluation_episodes(2, 3), 4))
    with closing(Farm.create(spec, InProcess())) as farm:
        farm.reset(0, np.array([3, 2, 1, 0]))
        seen = farm.collect(0)
        assert farm.frames is not None and seen.active.tolist() == [True, True, True, False]
        assert not farm.frames.frames[0].any() and farm.frames.frames[1:4].any((1, 2, 3, 4)).all()


@pytest.mark.parametrize(
    ("rows", "final_rows"),
    [([0, 1, 2], None), ([0, 1, 2, 8], None), ([-1, 0, 1, 2], None), ([0, 1, 2, 2], None), (None, [0, 1, 2, 9])],
    ids=["too few", "beyond the end", "negative", "twice the same", "final beyond the end"],
)
def test_rows_that_are_not_there_are_refused(rows: Any, final_rows: Any) -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=0)
        chosen = [None if each is None else np.array(each) for each in (rows, final_rows)]
        with pytest.raises(FarmError, match=r"takes 4 different `(final_)?rows` from 0 to 7, got \["):
            farm.submit(0, np.zeros((4, 3, 3), np.float32), *chosen)
        farm.submit(0, np.zeros((4, 3, 3), np.float32))


def test_without_cameras_there_is_no_frame_memory() -> None:
    with closing(Farm.create(replace(SPEC, task=replace(REACH, cameras=0)), InProcess())) as farm:
        farm.reset(0)
        seen = farm.collect(0)
        assert farm.frames is None and not seen.frames and (seen.frame_rows == -1).all() and farm.frame_copies == 0


# --- the memory itself


@pytest.mark.parametrize("shared", [True, False])
def test_a_new_memory_is_undrawn_and_as_large_as_was_given(shared: bool) -> None:
    with closing(FrameMemory.create(5, 2, 8, shared)) as frames:
        assert frames.frames.shape == (5, 2, 8, 8, 3) and (frames.frames == MAGIC).all()
        assert frames.frames_of.shape == (5, 2) and (frames.frames_of == -1).all()
        if shared:
            assert (FOLDER / frames.address.memory).stat().st_size == nbytes_of(5, 2, 8)


def test_an_attached_process_sees_what_is_drawn_and_leaves_the_memory_there() -> None:
    with closing(FrameMemory.create(3, 1, 8, shared=True)) as frames:
        other = FrameMemory.attach(frames.address)
        frames.frames[1] = 7
        frames.frames_of[1] = 4, 2
        assert (other.frames[1] == 7).all() and other.frames_of[1].tolist() == [4, 2]
        other.close()
        assert (FOLDER / frames.address.memory).exists()


def test_another_process_reads_the_trajectory_of_a_farm() -> None:
    plain = run(SPEC, chunks=CHUNKS)
    spec = replace(SPEC, render_workers=1)
    with closing(MortalProcesses()) as host, closing(Farm.create(spec, host, frame_rows=2 * ROWS - 4)) as farm:
        assert farm.frames is not None
        learner = FrameMemory.attach(farm.frames.address)
        roll(farm)
        for env in range(4):
            for moment in range(CHUNKS + 1):
                assert np.array_equal(learner.frames[4 * moment + env, 0], plain[env][moment]["front"])
        learner.close()


Disk = namedtuple("Disk", "f_bavail f_frsize")


def test_a_memory_that_is_too_small_is_refused_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, own_memory: Callable[[], set[Path]]
) -> None:
    """Before anything is taken: of 64 environments, 80 decisions and 224 pixels."""
    large = replace(SPEC, num_envs=64, task=replace(REACH, cameras=1, image_size=224))
    rows = 64 * 81
    monkeypatch.setattr(memory.os, "statvfs", lambda _: Disk(64, 2**20))
    needs = f"{nbytes_of(rows, 1, 224) / 2**20:,.1f} MiB"
    message = f"frame memory .5,184 rows of 1 x 224 x 224 pixels. needs {needs} .*64.0 MiB free.*--shm-size"
    with closing(MortalProcesses()) as host:
        with pytest.raises(FarmError, match=f"the farm's slots needs .* and the {message}"):
            Farm.create(large, host, frame_rows=rows)
    assert not own_memory()
