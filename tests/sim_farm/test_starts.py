"""A fixed number of starts: which one an episode begins from, by itself or by the shares that the client sets."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from sim_farm.client.farm import Farm
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes, Episodes, GroupedEpisodes, ListedEpisodes, Starts, evaluation_episodes
from sim_farm.registry import make_physics
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import Trace, actions_for, append, assert_same, drive, run

SEEDS = EndlessEpisodes(3, Starts(seeds=8))
STATES = GroupedEpisodes(3, 4, Starts(init_states=range(8)))
PLACES = list(product(range(40), range(50)))
REACH = TaskSpec("tabletop/reach", max_episode_steps=7)
SPEC = FarmSpec(REACH, SEEDS, num_envs=8, chunk=3)


@pytest.mark.parametrize("episodes", [SEEDS, STATES], ids=["seeds", "states"])
def test_starts_are_drawn_by_their_shares(episodes: Episodes) -> None:
    """2,000 draws (500 where four episodes begin alike): within four deviations of a binomial count; never of none."""
    shares = np.array([0.0, 1, 2, 3, 0, 4, 5, 5])
    drawn = np.array([episodes.draw_start(env, number, shares.cumsum()) for env, number in PLACES])
    counts, wanted = np.bincount(drawn, minlength=8), shares / shares.sum() * len(PLACES)
    alike = 4 if episodes is STATES else 1
    deviation = np.sqrt(wanted * (1 - shares / shares.sum()) * alike)
    assert (np.abs(counts - wanted) <= 4 * deviation).all(), counts
    assert not counts[shares == 0].any()


def test_a_start_of_seeds_is_one_seed_and_a_recorded_one_keeps_the_episodes_own() -> None:
    by_seed = {SEEDS.spec(env, number, start=5) for env, number in PLACES}
    assert len(by_seed) == 1 and next(iter(by_seed)).init_state is None
    assert len({SEEDS.spec(0, 0, start).seed for start in range(8)}) == 8
    assert {SEEDS.spec(env, number) for env, number in PLACES} == {SEEDS.spec(0, 0, start) for start in range(8)}
    of_states = {STATES.spec(env, number, start=5) for env, number in PLACES}
    assert {spec.init_state for spec in of_states} == {5} and len(of_states) == len(PLACES) // 4
    other_run = EndlessEpisodes(4, Starts(seeds=8))
    assert other_run.spec(0, 0, start=5) == SEEDS.spec(0, 0, start=5), "a run's seed does not change its starts"


def test_members_of_an_episode_group_begin_from_one_start() -> None:
    shares = np.ones(8).cumsum()
    for env, number in PLACES:
        first = env // 4 * 4
        assert STATES.draw_start(env, number, shares) == STATES.draw_start(first, number, shares)


def test_recorded_states_and_seeds_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="not from both"):
        Starts(init_states=range(3), seeds=4)


# --- in a farm


def one_hot(start: int) -> np.ndarray:
    return np.eye(8)[start]


def first_states(start: int) -> np.ndarray:
    physics = make_physics(REACH)
    state = physics.reset(SEEDS.spec(0, 0, start)).state
    physics.close()
    return state


def test_episodes_begin_from_the_drawn_starts_and_those_under_way_keep_theirs() -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.draw_starts(0, one_hot(2))
        farm.reset(0)
        seen = farm.collect(0)
        assert (seen.start == 2).all() and (seen.state == first_states(2)).all()
        farm.draw_starts(0, one_hot(6))
        begun = np.zeros(8, np.int64)
        for number in range(4):
            farm.submit(0, actions_for(farm, 0, number))
            seen = farm.collect(0)
            ended = seen.terminated | seen.truncated
            assert (seen.last_start == np.where(begun == 0, 2, 6)).all()
            begun += ended
            assert (seen.start == np.where(begun == 0, 2, 6)).all()
            assert (seen.state[ended] == first_states(6)).all()
        assert begun.min() >= 1
        farm.draw_starts(0, None)
        for number in range(4, 8):
            farm.submit(0, actions_for(farm, 0, number))
            seen = farm.collect(0)
        assert (seen.start == -1).all(), "each begins as (environment, episode) says by itself"


SHAPES: tuple[dict[str, Any], ...] = ({"groups": 2}, {"physics_workers": 4}, {"groups": 2, "physics_workers": 2})


def test_a_plan_does_not_change_what_is_drawn() -> None:
    expected = run(SPEC)
    for shape in SHAPES:
        assert_same(expected, run(replace(SPEC, **shape)), f"{shape} changes results")
    plain = run(replace(SPEC, episodes=EndlessEpisodes(3)))
    assert any(not np.array_equal(plain[env][0]["state"], expected[env][0]["state"]) for env in plain)


def test_a_snapshot_goes_on_from_the_starts_that_were_drawn() -> None:
    """Though the shares have changed since."""
    expected = run(SPEC)
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=4)
        kept = farm.snapshot()
    assert set(kept["base_start"].tolist()) > {-1} or kept["base_start"].min() >= 0
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.restore(kept)
        farm.draw_starts(0, one_hot(7))
        farm.reset(0)
        again: Trace = {env: [] for env in range(8)}
        append(again, farm.collect(0))
        farm.draw_starts(0, np.arange(1.0, 9))
        tail = drive(farm, begin=4, end=7, reset=False)
    for env, rows in expected.items():
        assert np.array_equal(again[env][0]["state"], rows[4]["state"]), "an episode under way began elsewhere"
    assert_same(tail, {env: rows[5:] for env, rows in expected.items()}, "a snapshot changes what is drawn")


def test_a_snapshot_from_before_starts_were_drawn_is_gone_on_from() -> None:
    plain = replace(SPEC, episodes=EndlessEpisodes(3))
    expected = run(plain)
    with closing(Farm.create(plain, InProcess())) as farm:
        drive(farm, end=4)
        kept = {key: array for key, array in farm.snapshot().items() if key != "base_start"}
    with closing(Farm.create(plain, InProcess())) as farm:
        farm.restore(kept)
        farm.reset(0)
        farm.collect(0)
        tail = drive(farm, begin=4, end=7, reset=False)
    assert_same(tail, {env: rows[5:] for env, rows in expected.items()}, "an old snapshot is another one")


def test_what_was_executed_before_starts_were_drawn_is_replayed_where_it_happened() -> None:
    """A run that is gone on with may have a curriculum that it did not have before."""
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.reset(0)
        farm.collect(0)
        farm.submit(0, actions_for(farm, 0, 0))
        before, kept = farm.collect(0), farm.snapshot()
    under_way = before.episode_step > 0
    assert under_way.any() and (kept["base_start"] == -1).all()
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.restore(kept)
        farm.draw_starts(0, one_hot(7))
        farm.reset(0)
        after = farm.collect(0)
    assert np.array_equal(after.state[under_way], before.state[under_way])
    assert (after.start == np.where(under_way, -1, 7)).all()


@pytest.mark.parametrize("shares", [np.ones(7), np.zeros(8), -one_hot(1) + 0.5, np.full(8, np.nan)], ids=str)
def test_shares_that_are_none_are_refused(shares: np.ndarray) -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm, pytest.raises(FarmError, match="begins from 8 starts"):
        farm.draw_starts(0, shares)


def test_listed_episodes_have_no_starts() -> None:
    listed: dict[str, Any] = {"episodes": ListedEpisodes(evaluation_episodes(1, 8), 8)}
    with closing(Farm.create(replace(SPEC, **listed), InProcess())) as farm:
        with pytest.raises(FarmError, match="begins from 0 starts"):
            farm.draw_starts(0, np.ones(1))
        drive(farm, end=2)
