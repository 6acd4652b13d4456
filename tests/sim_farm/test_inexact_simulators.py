"""A simulator that declares what it cannot keep: lost episodes end as broken ones, and no other process draws."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim_farm.backends.tabletop.physics import TabletopPhysics
from sim_farm.backends.tabletop.renderer import TabletopRenderer
from sim_farm.catalogue import exact_replay, exact_split
from sim_farm.client.farm import Farm
from sim_farm.contract import Backend, FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes, ListedEpisodes, evaluation_episodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import Row, Trace, assert_same, drive, run
from tests.sim_farm.test_workers import Fate, run_with


def reach(spec: TaskSpec) -> TaskSpec:
    """The task as the simulator that is here calls it."""
    return replace(spec, name="tabletop/reach")


BACKEND = Backend(
    "inexact",
    make_physics=lambda spec: TabletopPhysics(reach(spec)),
    make_renderer=lambda spec: TabletopRenderer(reach(spec)),
    tasks=lambda: ["reach"],
    exact_replay=False,
    exact_split=False,
)
TASK = f"{__name__}:BACKEND/reach"
REACH = TaskSpec(TASK, cameras=1, image_size=16, max_episode_steps=7)
SPEC = FarmSpec(REACH, EndlessEpisodes(2), num_envs=2, chunk=3, final_frames="ended")
LISTED = replace(SPEC, episodes=ListedEpisodes(evaluation_episodes(2, 3), 2))
WRITES = ("action", "op", "steps", "reward", "terminated", "state", "episode", "active", "drawn", "simulated")


def lost(trace: Trace) -> list[tuple[Row, Row]]:
    """Of each chunk that ended an episode as a broken one: what its environment showed before it, and then."""
    pairs = [pair for rows in trace.values() for pair in zip(rows, rows[1:], strict=False)]
    return [(before, row) for before, row in pairs if not np.isfinite(row["reward"]).all()]


def test_it_is_said_without_a_simulator_of_ours() -> None:
    assert exact_replay("tabletop/reach") and exact_split("maniskill/PushCube-v1")
    assert not exact_replay(TASK) and not exact_split(TASK)


@pytest.mark.parametrize("spec", [SPEC, pytest.param(LISTED, marks=pytest.mark.slow)], ids=["endless", "listed"])
@pytest.mark.parametrize("moment", [0, pytest.param(None, marks=pytest.mark.slow)], ids=["middle", "every"])
def test_a_lost_worker_ends_its_episodes_and_the_next_begin(spec: FarmSpec, moment: int | None) -> None:
    expected, count = run(spec, chunks=8), Fate()
    assert not lost(expected)
    assert_same(expected, run_with(count, spec, chunks=8), "watching changes results")
    for name in (name for name in WRITES if count.writes[name]):
        last = count.writes[name]
        for number in [last // 2] if moment == 0 else range(1, last + 1):
            trace = run_with(Fate(name, number), spec, chunks=8)
            found = lost(trace)
            assert len(found) <= spec.num_envs, f"{name} {number}: the worker was lost once"
            assert found or moment is None, f"{name} {number}: no episode was lost"
            for before, row in found:
                assert (row["steps"], row["terminated"], row["truncated"]) == (1, True, False)
                assert not row["success"].any() and not row["final state"].any() and not row["final drawn"]
                assert (row["episode"], row["episode_step"]) == (before["episode"] + 1, 0)
            for rows in trace.values():
                assert all(np.isfinite(row["state"]).all() for row in rows)


def test_a_restored_farm_begins_the_next_episodes() -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        before, snapshot = drive(farm, end=3), farm.snapshot()
    under_way = {env: rows[-1]["episode_step"] > 0 for env, rows in before.items()}
    assert any(under_way.values())
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.restore(snapshot)
        after = drive(farm, end=0)
    for env, (row,) in after.items():
        assert row["episode"] == before[env][-1]["episode"] + under_way[env]
        assert row["episode_step"] == 0 and np.isfinite(row["state"]).all()


@pytest.mark.parametrize("shape", [{"render_workers": 1}, {"physics_workers": 2, "render_workers": 2}])
def test_render_workers_are_refused(shape: dict[str, Any]) -> None:
    with pytest.raises(FarmError, match=r"declares exact_split=False: .*; set farm.render_workers to 0, got [12]"):
        Farm.create(replace(SPEC, **shape), InProcess())
