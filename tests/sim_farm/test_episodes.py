"""Which episode comes next: a pure function of (run, environment, episode), and episode groups that begin alike."""

from __future__ import annotations

from itertools import product

import pytest

from sim_farm.episodes import (
    GROUPED,
    MAX_GROUPS,
    EndlessEpisodes,
    GroupedEpisodes,
    Starts,
    episode_seed,
    evaluation_episodes,
)

GROUPS = GroupedEpisodes(run_seed=7, group_size=4, begin=Starts(init_states=range(50)))
ENVS, EPISODES = range(12), range(6)


def test_episodes_begin_alike_within_an_episode_group_and_only_there() -> None:
    begins: dict[int, set[tuple[int, int | None]]] = {}
    for env, episode in product(ENVS, EPISODES):
        spec = GROUPS.spec(env, episode)
        begins.setdefault(GROUPS.episode_group(env, episode), set()).add((spec.seed, spec.init_state))
    assert len(begins) == 3 * len(EPISODES)
    assert {len(found) for found in begins.values()} == {1}
    assert len(set.union(*begins.values())) == len(begins)


def test_an_episode_group_has_one_episode_of_each_of_its_environments() -> None:
    members: dict[int, list[tuple[int, int]]] = {}
    for env, episode in product(ENVS, EPISODES):
        members.setdefault(GROUPS.episode_group(env, episode), []).append((env, episode))
    for found in members.values():
        (episode,) = {episode for _, episode in found}
        first = found[0][0]
        assert found == [(first + i, episode) for i in range(4)] and first % 4 == 0


def test_episode_group_ids_stay_what_they_are() -> None:
    assert [
        GROUPS.episode_group(0, 0),
        GROUPS.episode_group(3, 0),
        GROUPS.episode_group(4, 0),
        GROUPS.episode_group(5, 2),
    ] == [0, 0, 1, 2 * 2**20 + 1]
    assert GROUPS.episode_group(4 * MAX_GROUPS - 1, 0) == MAX_GROUPS - 1
    with pytest.raises(ValueError, match=f"environment {4 * MAX_GROUPS} is in episode group {MAX_GROUPS}"):
        GROUPS.episode_group(4 * MAX_GROUPS, 0)


def test_initial_states_are_drawn_from_the_seed() -> None:
    specs = [GROUPS.spec(env, episode) for env, episode in product(range(0, 400, 4), EPISODES)]
    assert all(spec.init_state == spec.seed % 50 for spec in specs)
    assert {spec.init_state for spec in specs} == set(range(50))
    assert GroupedEpisodes(7, 4).spec(3, 1).init_state is None


def test_episode_groups_of_another_run_begin_differently() -> None:
    other = GroupedEpisodes(run_seed=8, group_size=4)
    assert not {GROUPS.spec(env, n).seed for env, n in product(ENVS, EPISODES)} & {
        other.spec(env, n).seed for env, n in product(ENVS, EPISODES)
    }


def test_grouped_endless_and_evaluation_seeds_are_streams_of_their_own() -> None:
    """Episode groups of one share (run, env, episode) with endless episodes: only the stream tells them apart."""
    alone = GroupedEpisodes(run_seed=7, group_size=1)
    grouped = [alone.spec(env, episode).seed for env, episode in product(ENVS, EPISODES)]
    endless = [EndlessEpisodes(7).spec(env, episode).seed for env, episode in product(ENVS, EPISODES)]
    evaluation = [spec.seed for spec in evaluation_episodes(7, len(grouped))]
    assert len({*grouped, *endless, *evaluation}) == 3 * len(grouped)
    assert alone.spec(5, 2).seed == episode_seed(GROUPED, 7, 5, 2)


def test_an_episode_group_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        GroupedEpisodes(0, 0)
