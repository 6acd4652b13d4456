"""A fixed number of starts: which one an episode begins from, and that no plan changes it."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from sim_farm.client.farm import Farm
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.episodes import EndlessEpisodes, GroupedEpisodes, Starts
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import assert_same, drive, run

SEEDS = EndlessEpisodes(3, Starts(seeds=8))
STATES = GroupedEpisodes(3, 4, Starts(init_states=range(8)))
PLACES = list(product(range(40), range(50)))
REACH = TaskSpec("tabletop/reach", max_episode_steps=7)
SPEC = FarmSpec(REACH, SEEDS, num_envs=8, chunk=3)


def test_a_start_of_seeds_is_one_seed_and_a_recorded_one_keeps_the_episodes_own() -> None:
    assert len({SEEDS.spec(env, number) for env, number in PLACES}) == 8
    assert {spec.init_state for spec in specs_of(SEEDS)} == {None}
    of_states = {STATES.spec(env, number) for env, number in PLACES}
    assert {spec.init_state for spec in of_states} == set(range(8)) and len(of_states) == len(PLACES) // 4
    other_run = EndlessEpisodes(4, Starts(seeds=8))
    ours, theirs = ({run.spec(env, number) for env, number in PLACES} for run in (SEEDS, other_run))
    assert ours == theirs, "a run's seed does not change its starts"


def test_starts_are_drawn_alike() -> None:
    """2,000 draws, 500 where four episodes begin alike: within four deviations of a binomial count."""
    for episodes, alike in ((SEEDS, 1), (STATES, 4)):
        drawn = Counter(
            (spec.seed, None) if spec.init_state is None else spec.init_state for spec in specs_of(episodes)
        )
        wanted = len(PLACES) / 8
        deviation = math.sqrt(wanted * (1 - 1 / 8) * alike)
        assert len(drawn) == 8 and max(abs(count - wanted) for count in drawn.values()) <= 4 * deviation, drawn


def specs_of(episodes: EndlessEpisodes | GroupedEpisodes) -> list[EpisodeSpec]:
    return [episodes.spec(env, number) for env, number in PLACES]


def test_recorded_states_and_seeds_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="not from both"):
        Starts(init_states=range(3), seeds=4)


# --- in a farm


SHAPES: tuple[dict[str, Any], ...] = ({"groups": 2}, {"physics_workers": 4}, {"groups": 2, "physics_workers": 2})


def test_a_plan_does_not_change_where_episodes_begin() -> None:
    expected = run(SPEC)
    for shape in SHAPES:
        assert_same(expected, run(replace(SPEC, **shape)), f"{shape} changes results")
    plain = run(replace(SPEC, episodes=EndlessEpisodes(3)))
    assert any(not np.array_equal(plain[env][0]["state"], expected[env][0]["state"]) for env in plain)


def test_a_snapshot_from_before_seeds_could_be_given_is_gone_on_from() -> None:
    expected = run(SPEC)
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=4)
        kept = {key: array for key, array in farm.snapshot().items() if key != "base_start"}
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.restore(kept)
        farm.reset(0)
        farm.collect(0)
        tail = drive(farm, begin=4, end=7, reset=False)
    assert_same(tail, {env: rows[5:] for env, rows in expected.items()}, "an old snapshot is another one")
