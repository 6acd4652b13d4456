"""A curriculum over starts: what is counted, what is drawn, and that a run with it can be stopped and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied.algorithms.curricula import STARTS_DECAY, StartCurriculum
from embodied.errors import UserError
from embodied.execution.iteration import start_run
from embodied.execution.session import open_session
from embodied.planning.run_plans import plan_run
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.training.preflight import check_run
from embodied.trajectories.batch import EndedEpisode
from tests.embodied.run.test_resume import STATES, assert_same_run, config_of, run

ENV: dict[str, Any] = STATES["env"]  # type: ignore[assignment]
DRAWN: dict[str, Any] = {
    **STATES,
    "env": {**ENV, "task": "tabletop/reach_red", "start_seeds": 12},
    "extra_tasks": [{"task": "tabletop/reach_blue", "start_seeds": 5}],
    "rollout": {"decisions": 16, "curriculum": 0.75},
}


def episodes(start: int, solved: int, of: int) -> list[EndedEpisode]:
    return [EndedEpisode(env, env < solved, 0.0, 5, start=start) for env in range(of)]


def test_a_start_that_is_solved_sometimes_is_drawn_more_often() -> None:
    curriculum = StartCurriculum(4, share=0.8)
    assert curriculum.shares().tolist() == [0.25] * 4, "at first all are drawn alike"
    curriculum.count([*episodes(0, 8, 8), *episodes(1, 4, 8), *episodes(2, 0, 8)])
    rates = [9 / 10, 5 / 10, 1 / 10, 1 / 2]
    assert curriculum.rates() == pytest.approx(rates)
    learnable = [p * (1 - p) for p in rates]
    assert curriculum.shares() == pytest.approx([0.8 * each / sum(learnable) + 0.05 for each in learnable])
    assert curriculum.figures() == pytest.approx(
        {
            "curriculum/tried": 0.75,
            "curriculum/solved_sometimes": 0.25,
            "curriculum/effective_starts": 1 / sum(share**2 for share in curriculum.shares()),
        }
    )


def test_later_episodes_count_for_more_and_their_order_within_a_rollout_for_nothing() -> None:
    one, other = StartCurriculum(2, 1.0), StartCurriculum(2, 1.0)
    first, second = episodes(1, 0, 4), [*episodes(1, 2, 2), *episodes(0, 1, 2)]
    for curriculum, batch in ((one, second), (other, second[::-1])):
        curriculum.count(first)
        curriculum.count(batch)
    assert one.rates().tolist() == other.rates().tolist()
    assert one.rates()[1] == pytest.approx((2 + 1) / (4 * STARTS_DECAY**2 + 2 + 2))
    one.count([EndedEpisode(0, True, 0.0, 5), EndedEpisode(0, True, 0.0, 5, start=2)])
    assert one.rates().tolist() == other.rates().tolist(), "an episode of no start of these was counted"


def test_a_start_that_is_never_solved_is_hardly_drawn_in_the_end() -> None:
    curriculum = StartCurriculum(2, 1.0)
    for number in range(100):
        curriculum.count([*episodes(0, 0, 1), *episodes(1, number % 2, 1)])
    assert curriculum.shares()[0] < 0.12
    assert curriculum.figures()["curriculum/solved_sometimes"] == 0.5


def test_its_state_goes_on_and_one_of_another_number_begins_anew() -> None:
    curriculum, later, other = StartCurriculum(3, 1.0), StartCurriculum(3, 1.0), StartCurriculum(4, 1.0)
    curriculum.count(episodes(2, 1, 4))
    for each in (later, other):
        each.load(curriculum.state())
        each.load({})
    assert later.rates().tolist() == curriculum.rates().tolist()
    assert other.rates().tolist() == [0.5] * 4


@pytest.mark.slow
def test_a_run_with_a_curriculum_that_is_stopped_and_gone_on_with_is_the_same_run(tmp_path: Path) -> None:
    run(config_of(DRAWN, 6), tmp_path / "whole")
    run(config_of(DRAWN, 3), tmp_path / "parts")
    assert checkpoint.read_environments(tmp_path / "parts" / "checkpoints" / "000003")["base_step"].any()
    run(config_of(DRAWN, 6), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    kept = checkpoint.read_environments(tmp_path / "whole" / "checkpoints" / "000006")
    assert (len(kept["start_tried"]), len(kept["1.start_tried"])) == (12, 5)
    assert kept["start_tried"].sum() > 5 < kept["1.start_tried"].sum()
    for row in read(tmp_path / "whole")[2:]:
        assert 0 < row["curriculum/tried/tabletop/reach_red"] <= 1
        assert 1 <= row["curriculum/effective_starts/tabletop/reach_blue"] <= 5


def test_without_a_curriculum_no_start_is_drawn_and_nothing_is_counted(tmp_path: Path) -> None:
    settings = {**DRAWN, "rollout": {"decisions": 16}}
    run(config_of(settings, 1), tmp_path / "plain")
    assert not any(key.startswith("curriculum") for key in read(tmp_path / "plain")[0])
    kept = checkpoint.read_environments(tmp_path / "plain" / "checkpoints" / "000001")
    assert "start_tried" not in kept and (kept["base_start"] == -1).all()


def test_a_rollout_draws_by_what_was_counted_before_it(tmp_path: Path) -> None:
    """Of twelve starts one alone is solved sometimes, as far as the counts say; episodes under way keep their start."""
    settings = {**DRAWN, "extra_tasks": [], "rollout": {"decisions": 40, "curriculum": 1.0}}
    config = config_of(settings, 3)
    with open_session(config) as session:
        plan = plan_run(config, session, tmp_path).assignment
        with start_run(config, tmp_path, session, plan) as workers:
            workers.begin(None, 0)
            kept = workers.iterate(0).environments
        kept["start_tried"][:], kept["start_solved"][:] = 1e9, 0
        kept["start_solved"][4] = 5e8
        with start_run(config, tmp_path, session, plan) as workers:
            workers.begin(kept, 1)
            ended = workers.iterate(1).summary.episodes
    under_way = dict(enumerate(kept["base_start"].tolist()))
    assert len(ended) > 2 * len(under_way)
    for episode in ended:
        assert episode.start == under_way.pop(episode.env, 4)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"start_seeds": 0}, "rollout.curriculum is 0.75, and the episodes of tabletop/reach_red begin from seeds"),
        ({"start_seeds": 4, "init_states": 3}, "env.init_states is 3 and env.start_seeds 4"),
    ],
    ids=["nothing to draw from", "two ways"],
)
def test_what_cannot_be_drawn_is_refused_before_a_worker_starts(env: dict[str, Any], message: str) -> None:
    settings = {**DRAWN, "env": {**DRAWN["env"], **env}, "extra_tasks": []}
    with pytest.raises(UserError, match=message):
        check_run(config_of(settings, 3))
