"""What an evaluation records: its files agree, its films show what differs, comparisons pair the same episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from embodied.commands.evaluate import evaluate_run
from embodied.evaluation.films import differing, worth_seeing
from embodied.evaluation.folder import read_folder
from embodied.reporting.run_record import read_run
from embodied.rollout.evaluator import EpisodeResult
from embodied.run.saved_settings import settings_of
from sim_farm.contract import EpisodeSpec, TaskSpec
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import config, evaluated, trained

run = evaluations.run  # the fixture


def test_replaying_the_kept_actions_gives_the_recorded_episode(tmp_path: Path) -> None:
    from sim_farm.registry import make_physics

    kept = evaluated(tmp_path / "e", config(eval={"tasks": ["tabletop/push"], "episodes": 5}))
    physics = make_physics(TaskSpec("tabletop/push"))
    for outcome in kept.in_order():
        physics.reset(outcome.spec)
        result = physics.step(kept.actions(outcome))
        assert result.ended and result.steps == outcome.length and bool(result.success.any()) == outcome.success
        assert float(result.reward.sum()) == pytest.approx(outcome.total_reward, abs=1e-5)


def test_episodes_that_run_to_their_limit_tell_success_once_from_success_at_the_end(tmp_path: Path) -> None:
    from sim_farm.registry import make_physics

    kept = evaluated(tmp_path / "e", config(eval={"episodes": 24, "ignore_terminations": True}))
    physics = make_physics(TaskSpec("tabletop/reach", ignore_terminations=True))
    for outcome in kept.in_order():
        physics.reset(outcome.spec)
        result = physics.step(kept.actions(outcome))
        assert outcome.length == outcome.limit == result.steps and not result.terminated.any()
        assert (outcome.success, outcome.success_at_end) == (bool(result.success.any()), bool(result.success[-1]))
    result = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert 0 <= result["success_at_end"] < result["success_once"] == result["success_rate"]
    assert result["success_at_end_low"] <= result["success_at_end"] <= result["success_at_end_high"]
    lines = [json.loads(line) for line in (tmp_path / "e" / "episodes.jsonl").read_text().splitlines()]
    assert sum(line["success_at_end"] for line in lines) == round(24 * result["success_at_end"])
    assert "at end %" in (tmp_path / "e" / "eval.md").read_text()
    page = read_run(tmp_path / "e").evals[0]
    assert page.at_end is not None and page.at_end[0] == result["success_at_end"]


def test_where_success_ends_an_episode_both_are_the_same(tmp_path: Path) -> None:
    kept = evaluated(tmp_path / "e", config(eval={"episodes": 8}))
    assert all(outcome.success == outcome.success_at_end for outcome in kept.outcomes.values())
    assert "which is the same, as success ends an episode" in (tmp_path / "e" / "eval.md").read_text()


def test_the_files_of_a_result_agree(tmp_path: Path) -> None:
    kept = evaluated(tmp_path / "e", config(eval={"tasks": ["tabletop"], "episodes": 4}))
    result = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert [row.task for row in read_run(tmp_path / "e").evals] == list(kept.identity.protocol.tasks)
    assert result["episodes"] == len(kept.outcomes) == 4 * len(result["tasks"])
    assert result["success_rate"] == np.mean([bool(o.success) for o in kept.outcomes.values()])
    assert result["protocol"]["sha256"] == kept.identity.protocol.sha256
    assert result["episode_len"] == pytest.approx(np.mean([row["episode_len"] for row in result["tasks"]]))
    table = (tmp_path / "e" / "eval.md").read_text()
    assert kept.identity.protocol.sha256[:12] in table and "**tabletop**" in table
    assert all(f"| {row['task']} " in table for row in result["tasks"])


def test_videos_show_failures_first_and_each_task_s_first() -> None:
    def outcome(task: str, trial: int, success: bool) -> EpisodeResult:
        return EpisodeResult(task, trial, EpisodeSpec(0), success, success, 0.0, 1, 1, np.zeros((1, 1), np.float32))

    listed = [outcome(task, trial, trial == 0) for task in "ab" for trial in range(3)]
    shown = [(o.task, o.trial) for o in worth_seeing(listed, 5)]
    assert shown == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 0)]


def test_a_film_of_differences_has_what_the_first_alone_solved_first() -> None:
    def outcomes(solved: dict[str, list[int]]) -> list[EpisodeResult]:
        return [
            EpisodeResult(task, trial, EpisodeSpec(0), success, success, 0.0, 1, 1, np.zeros((1, 1), np.float32))
            for task, successes in solved.items()
            for trial, success in enumerate(map(bool, successes))
        ]

    first, second = outcomes({"a": [1, 0, 1, 1], "b": [1, 1, 0, 0]}), outcomes({"a": [1, 1, 0, 0], "b": [0, 1, 0, 1]})
    pairs = differing(first, second, 9)
    assert [(mine.task, mine.trial) for mine, _ in pairs] == [("a", 2), ("b", 0), ("a", 3), ("a", 1), ("b", 3)]
    assert all((mine.task, mine.trial) == (other.task, other.trial) for mine, other in pairs)
    assert differing(first, second, 2) == pairs[:2] and differing(first, first, 9) == []


@pytest.mark.slow
def test_a_comparison_pairs_the_same_episodes(run: Path, tmp_path: Path) -> None:
    other = trained(tmp_path, "other", seed=2, iterations=2, policy_lr=1e-2, minibatch=32)  # it solves some
    base = settings_of(str(run), tmp_path).model_dump(mode="json")
    settings = config(base, eval={"episodes": 30})
    result = evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "e", against=str(other))
    found = result["comparison"]
    ours, theirs = read_folder(tmp_path / "e"), read_folder(Path(found["folder"]))
    assert ours.identity.protocol == theirs.identity.protocol and ours.identity.policy != theirs.identity.policy
    pairs = [(bool(a.success), bool(b.success)) for a, b in zip(ours.in_order(), theirs.in_order(), strict=True)]
    assert found["difference"] == pytest.approx(np.mean([a for a, _ in pairs]) - np.mean([b for _, b in pairs]))
    assert found["first_only"] == sum(a and not b for a, b in pairs)
    assert found["difference_low"] < found["difference"] < found["difference_high"]

    unlike = found["first_only"] + found["second_only"]
    film = tmp_path / "e" / "videos" / "against.mp4"
    assert unlike and not film.exists(), "no film was asked for"
    filmed = config(base, eval={"episodes": 30, "videos": 2})
    evaluate_run(str(run), filmed, None, tmp_path, into=tmp_path / "e", resume=True, against=str(other))
    reader: Any = imageio.get_reader(film)
    width, height = reader.get_meta_data()["size"]
    columns = min(unlike, 2)
    assert abs(width / columns - 260) < 8 and height > 2 * 256, "a column for each episode, a row for each policy"
    assert (run / "videos" / "against.mp4").is_file()

    there = evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "f", against=found["folder"])
    assert not (run / "videos" / "against.mp4").exists(), "the page would show a film of another evaluation"
    assert {**there["comparison"], "against": ""} == {**found, "against": ""}, "recorded results are as good"
