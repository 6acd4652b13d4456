"""A simulator whose numbers are not finite any more costs the episode, not the worker, and nobody is shown them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim_farm.backends.tabletop.physics import TabletopPhysics
from sim_farm.contract import EpisodeSpec, PhysicsResult, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from tests.sim_farm.driving import Trace, assert_same, run
from tests.sim_farm.test_workers import Fate, run_with
from tests.variants import often

REACH = TaskSpec("tabletop/reach", cameras=1, image_size=16, max_episode_steps=7)
SPEC = FarmSpec(REACH, EndlessEpisodes(2), num_envs=2, chunk=3, final_frames="ended")


@pytest.fixture(params=["state", "proprio"])
def broken(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every environment's episodes, some begin with a number that is not finite, and some come to one."""
    reset, step = TabletopPhysics.reset, TabletopPhysics.step

    def spoilt(result: PhysicsResult) -> PhysicsResult:
        values = getattr(result, request.param).copy()
        values[-1] = np.inf
        return replace(result, **{request.param: values})

    def begun(self: Any, episode: EpisodeSpec) -> PhysicsResult:
        self.seed = episode.seed
        result = reset(self, episode)
        return spoilt(result) if self.seed % 4 == 1 else result

    def stepped(self: Any, actions: np.ndarray) -> PhysicsResult:
        result = step(self, actions)
        return spoilt(result) if self.seed % 2 == 0 and self._steps_left < 3 else result

    monkeypatch.setattr(TabletopPhysics, "reset", begun)
    monkeypatch.setattr(TabletopPhysics, "step", stepped)


def outcomes(trace: Trace) -> list[tuple[float, bool, bool, int]]:
    """Of each chunk that ended an episode: its reward, success and end by the task, and the env steps executed."""
    return [
        (float(row["reward"].sum()), bool(row["success"].any()), bool(row["terminated"]), int(row["steps"]))
        for rows in trace.values()
        for row in rows
        if row["terminated"] or row["truncated"]
    ]


@pytest.mark.parametrize("history", [{}, {"observations": 3, "distance": 2}], ids=["one", "three"])
def test_an_episode_whose_observation_is_not_finite_ends_and_the_next_begins(
    broken: None, history: dict[str, Any]
) -> None:
    trace = run(replace(SPEC, **history), chunks=24)
    for rows in trace.values():
        for row in rows:
            assert np.isfinite(row["state"]).all() and np.isfinite(row["proprio"]).all()
            assert all(np.isfinite(row[name]).all() for name in ("final state", "final proprio") if name in row)
            assert row["active"]
    ended = outcomes(trace)
    bad = [outcome for outcome in ended if not np.isfinite(outcome[0])]
    assert 0 < len(bad) < len(ended)
    assert all(terminated and not success for _, success, terminated, _ in bad)


HOW = ({"groups": 2}, {"physics_workers": 2, "render_workers": 1}, {"physics_workers": 2})


@pytest.mark.parametrize("how", often(HOW[:2], HOW))
def test_workers_and_groups_change_nothing_of_it(broken: None, how: dict[str, Any]) -> None:
    assert_same(run(SPEC, chunks=12), run(replace(SPEC, **how), chunks=12), "workers change broken episodes")


@pytest.mark.slow
def test_nor_does_a_worker_that_is_lost_at_any_write(broken: None) -> None:
    expected = run(SPEC, chunks=8)
    count = Fate()
    run_with(count, SPEC, chunks=8)
    names = [
        name for name in ("steps", "reward", "terminated", "draw_final", "state", "simulated") if count.writes[name]
    ]
    assert len(names) == 6
    for name in names:
        for number in range(1, count.writes[name] + 1, 5):
            assert_same(expected, run_with(Fate(name, number), SPEC, chunks=8), f"lost before write {number} of {name}")
