"""Evaluations: each episode once and the same one, whoever runs it, wherever it stops, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied import cli
from embodied.commands.evaluate import evaluate_run
from embodied.config.files import load_config
from embodied.evaluation import films
from embodied.evaluation.evaluate import Subject, evaluate, evaluation_folder, film
from embodied.evaluation.films import FRAMES, EpisodeFrames, Shown, filmed_steps, stride
from embodied.evaluation.folder import read_folder
from embodied.evaluation.protocol import protocol_of
from embodied.execution import recovery
from embodied.execution.session import open_session
from embodied.rollout.evaluator import EpisodeOutcome, deal_out
from embodied.run.saved_settings import settings_of
from sim_farm.client.episode_replay import Replayer
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.episodes import ListedEpisodes, evaluation_episodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers import faults
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import assert_same_episodes, config, evaluated, refusal
from tests.variants import often

COMMAND = Path(sys.executable).parent / "embodied"
COUNTDOWN = str(Path(__file__).parents[3] / "assets" / "countdown_lm")
run = evaluations.run  # the fixture


# --- the result does not depend on who does the work


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"farm": {"physics_workers": 2}}, marks=pytest.mark.slow),
        pytest.param({"farm": {"groups": 1}, "eval": {"num_envs": 4}}, marks=pytest.mark.slow),
        {"farm": {"groups": 4, "physics_workers": 2}, "eval": {"num_envs": 16}},
        pytest.param({"runtime": {"mode": "ray"}, "farm": {"physics_workers": 2}}, marks=pytest.mark.slow),
    ],
    ids=["two workers", "one group", "four groups", "ray"],
)
def test_workers_groups_and_mode_change_no_bit_of_an_episode(run: Path, how: dict[str, Any], tmp_path: Path) -> None:
    """With as many rows in a batch: num_envs / groups = 4."""
    settings = settings_of(str(run), tmp_path)
    base = settings.model_dump(mode="json")
    base["eval"] |= {"episodes": 21, "greedy": False}
    one, other = config(base), config(base, **how)
    evaluate_run(str(run), one, None, tmp_path, into=tmp_path / "one")
    evaluate_run(str(run), other, None, tmp_path, into=tmp_path / "other")
    assert len(read_folder(tmp_path / "one").outcomes) == 21
    assert_same_episodes(read_folder(tmp_path / "one"), read_folder(tmp_path / "other"))


def test_attempts_begin_alike_and_differ_by_noise(tmp_path: Path) -> None:
    text = {"task": "text/countdown_3", "options": {"tokenizer": COUNTDOWN}, "max_episode_steps": 8, "num_envs": 4}
    policy = {"kind": "language", "chunk": 8, "reads": ["instruction"], "options": {"checkpoint": COUNTDOWN}}
    found = evaluated(
        tmp_path / "several", config(env=text, policy=policy, eval={"episodes": 3, "attempts": 4, "greedy": None})
    )
    episodes = found.in_order()
    assert len(episodes) == 12 and len({one.spec.seed for one in episodes}) == 3
    for first in range(0, 12, 4):
        answers = {found.actions(one).tobytes() for one in episodes[first : first + 4]}
        assert len({one.spec for one in episodes[first : first + 4]}) == 1 and len(answers) == 4
    result = json.loads((tmp_path / "several" / "eval.json").read_text())
    assert [name for name in result if name.endswith("_high") and "@" in name] == [
        "pass@1_high", "pass@2_high", "pass@4_high"
    ]  # fmt: skip
    assert "3 trials a task, each attempted 4 times" in result["protocol_line"]
    assert "pass@4 %" in (tmp_path / "several" / "eval.md").read_text()
    again = config(env=text, policy=policy, eval={"episodes": 3, "attempts": 4, "greedy": True})
    assert "set --eval.greedy False" in refusal(tmp_path / "greedy", again)


def test_an_episode_does_not_depend_on_the_other_tasks_of_an_evaluation(tmp_path: Path) -> None:
    alone = evaluated(tmp_path / "alone", config(eval={"tasks": ["tabletop/push"], "episodes": 5}))
    among = evaluated(tmp_path / "among", config(eval={"tasks": ["tabletop"], "episodes": 5}))
    for key, outcome in alone.outcomes.items():
        assert among.outcomes[key] == outcome
        assert np.array_equal(among.actions(outcome), alone.actions(outcome))


@pytest.mark.slow
def test_tasks_do_not_share_their_noise(tmp_path: Path) -> None:
    both = evaluated(tmp_path / "e", config(eval={"tasks": ["tabletop/push", "tabletop/pick_and_place"]}))
    push, place = (both.actions(both.outcomes[task, 0])[0, :3] for task in ("tabletop/push", "tabletop/pick_and_place"))
    assert not np.array_equal(push, place)


def test_a_policy_that_reads_instructions_acts_alone_as_among_others(tmp_path: Path) -> None:
    """Fewer episodes than environments: those that never have one show no instruction."""
    tiny = load_config("openvla_tiny").model_dump(mode="json")
    short: dict[str, Any] = {"env": {"max_episode_steps": 4}, "runtime": {"mode": "inline"}}
    few, all_rows = (
        config(tiny, eval={"episodes": episodes, "num_envs": 6, "videos": 0, "greedy": False}, **short)
        for episodes in (1, 6)
    )
    assert "instruction" in few.policy.reads
    alone, among = evaluated(tmp_path / "alone", few), evaluated(tmp_path / "among", all_rows)
    (outcome,) = alone.in_order()
    assert outcome == among.in_order()[0]
    assert np.array_equal(alone.actions(outcome), among.actions(outcome))


def test_a_policy_acts_on_its_instruction(tmp_path: Path) -> None:
    tiny = load_config("openvla_tiny").model_dump(mode="json")
    short: dict[str, Any] = {"env": {"max_episode_steps": 4}, "runtime": {"mode": "inline"}}
    found = {}
    for instruction in (None, "move the gripper to the green ball", "reach the ball"):
        settings = {"episodes": 2, "num_envs": 2, "videos": 0, "instruction": instruction}
        result = evaluated(tmp_path / str(instruction), config(tiny, eval=settings, **short))
        found[instruction] = [result.actions(outcome) for outcome in result.in_order()]
    own, same, other = found.values()
    assert all(np.array_equal(a, b) for a, b in zip(own, same, strict=True)), (
        "told the task's own words it acts otherwise"
    )
    assert any(not np.array_equal(a, b) for a, b in zip(own, other, strict=True)), "what it is told does not matter"


@pytest.mark.slow
@pytest.mark.parametrize("length", often([121], [1, 59, 119, 121, 160]))
def test_a_long_film_says_at_which_step_each_frame_was_taken(length: int) -> None:
    """The last is the episode's end, whatever lies between two frames."""
    task, episode = TaskSpec("tabletop/push", cameras=1, max_episode_steps=length), EpisodeSpec(3)
    frames = Replayer(task).film(episode, np.zeros((length, 3), np.float32), stride(length))
    numbers = filmed_steps(length, stride(length))
    assert len(numbers) == len(frames) and numbers[0] == 0 and numbers[-1] == length
    assert len(frames) <= 2 * FRAMES + 1


@pytest.mark.slow
def test_episodes_of_a_film_are_equally_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiles: list[EpisodeFrames] = []
    monkeypatch.setattr(films, "write_tiled", lambda path, shown, fps, columns: tiles.extend(shown))
    task, lengths = TaskSpec("tabletop/push", max_episode_steps=3 * FRAMES), (5, 3 * FRAMES)
    outcomes = [EpisodeOutcome(task.name, i, EpisodeSpec(3), False, False, 0.0, n, n) for i, n in enumerate(lengths)]
    episodes = [Shown(one, np.zeros((one.length, 3), np.float32), "", task) for one in outcomes]
    with open_session(config()) as session:
        films.write_film(tmp_path / "film.mp4", session, episodes)
    numbers = [list(tile.steps or ()) for tile in tiles]
    assert numbers == [[*range(0, length, 3), length] for length in lengths]
    assert [len(one) for one in numbers] == [len(tile.frames) for tile in tiles]


def test_a_run_shows_what_it_reached_by_the_tasks_own_words(tmp_path: Path) -> None:
    tiny = load_config("openvla_tiny").model_dump(mode="json")
    short: dict[str, Any] = {"env": {"max_episode_steps": 4}, "runtime": {"mode": "inline"}}
    run = tmp_path / "run"
    run.mkdir()
    shown: list[int] = []
    for instruction in (None, "reach the ball", None):
        settings = {"episodes": 2 + len(shown), "num_envs": 2, "videos": 0, "instruction": instruction}
        subject = Subject("run", config(tiny, eval=settings, **short), None, run, run / "evals")
        protocol = protocol_of(subject.config)
        with evaluation_folder(subject, protocol, None, False) as folder, open_session(subject.config) as session:
            evaluate(subject, protocol, session, folder)
            film(subject, protocol, session, folder)
        shown.append(json.loads((run / "eval.json").read_text())["episodes"])
    assert shown == [2, 2, 4] and len(list((run / "evals").iterdir())) == 3


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("left", [range(23), (0, 1, 5, 9, 13, 17, 22), ()])
def test_every_trial_is_dealt_out_once_and_always_to_its_row(workers: int, groups: int, left: Any) -> None:
    specs, rows = evaluation_episodes(0, 23), 4
    shape = FarmSpec(TaskSpec("tabletop/reach"), ListedEpisodes(specs, 4 * groups), 4 * groups, 1, groups, workers)
    dealt = deal_out(shape, specs, tuple(left))
    episodes = dealt.episodes
    assert isinstance(episodes, ListedEpisodes) and episodes.queues is not None
    assert sorted(trial for queue in episodes.queues for trial in queue) == sorted(left)
    for group in range(groups):
        own = [env for env in range(dealt.num_envs) if dealt.group_of(env) == group]
        for row, env in enumerate(own):
            assert all(trial % rows == row for trial in episodes.queues[env])
            count = len(episodes.queues[env])
            assert [episodes.spec(env, k) for k in range(count)] == [specs[t] for t in episodes.queues[env]]
            assert episodes.spec(env, count) is None


# --- interruption


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL], ids=lambda how: how.name
)
def test_an_interrupted_evaluation_goes_on_to_the_same_result(how: signal.Signals, run: Path, tmp_path: Path) -> None:
    runs_dir = Path(shutil.copytree(run.parent, tmp_path / "runs"))
    shutil.rmtree(runs_dir / "run" / "evals")
    arguments = [str(COMMAND), "eval", "run", "--runs-dir", str(runs_dir), "--eval.episodes", "200"]
    arguments += ["--eval.greedy", "False", "--resume", "auto"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as begun:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and sum(map(line_count, folders(runs_dir))) < 30:
            time.sleep(0.002)  # a few episodes' time, so that it is interrupted well before the 200th
        os.kill(begun.pid, how)
        output = begun.communicate(timeout=240)[0]
    (folder,) = folders(runs_dir)
    kept = len(read_folder(folder).outcomes)
    assert 30 <= kept < 200, f"not interrupted on the way: {output}"
    assert not (folder / "eval.json").exists()
    assert how is signal.SIGKILL or (begun.returncode == 130 and "--resume auto" in output)

    assert cli.main([*arguments[1:], "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["folder"] == str(folder) and result["episodes_of_earlier_sessions"] == kept
    lines_kept = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert len({(line["task"], line["trial"]) for line in lines_kept}) == len(lines_kept) == 200

    settings = config(settings_of(str(run), tmp_path).model_dump(mode="json"), eval={"episodes": 200, "greedy": False})
    evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "whole")
    assert_same_episodes(read_folder(tmp_path / "whole"), read_folder(folder))
    assert tables(tmp_path / "whole") == tables(folder)


@pytest.mark.slow
def test_an_evaluation_that_loses_its_workers_goes_on_to_the_same_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_as = settings_of(str(run), tmp_path).model_dump(mode="json") | {"runtime": {"mode": "inline"}}
    settings = config(trained_as, eval={"episodes": 40, "greedy": False, "videos": 1})
    evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "whole")
    file = tmp_path / "faults.json"
    found = [("evaluator", "advance", "kill", 3), ("physics 0", "step", "kill", 30)]
    names = ("worker", "phase", "kind", "nth")
    file.write_text(json.dumps([dict(zip(names, fault, strict=True)) for fault in found]))
    monkeypatch.setenv(faults.VARIABLE, str(file))
    away = settings.model_copy(update={"runtime": settings.runtime.model_copy(update={"mode": "ray"})})
    evaluate_run(str(run), away, None, tmp_path, into=tmp_path / "lost")
    assert_same_episodes(read_folder(tmp_path / "whole"), read_folder(tmp_path / "lost"))
    assert (tmp_path / "lost" / "videos" / "evaluation.mp4").is_file()
    rows = [json.loads(line) for line in (tmp_path / "lost" / recovery.FILE).read_text().splitlines()]
    assert {row["outcome"] for row in rows} == {"the run goes on", "the run is back", "it was replaced"}
    for worker, *_ in found:
        assert any(worker in row.get("error", "") and "episodes" in row for row in rows), f"{worker}: {rows}"


def folders(runs_dir: Path) -> list[Path]:
    return [file.parent for file in runs_dir.glob("run/evals/*/protocol.json")]


def line_count(folder: Path) -> int:
    file = folder / "episodes.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def tables(folder: Path) -> list[str]:
    return [line for line in (folder / "eval.md").read_text().splitlines() if line.startswith("|")]


def test_an_episode_whose_line_was_torn_is_run_again_and_no_other(tmp_path: Path) -> None:
    settings = config(eval={"episodes": 6})
    whole = evaluated(tmp_path / "e", settings)
    file = tmp_path / "e" / "episodes.jsonl"
    before = file.read_text().splitlines(keepends=True)
    file.write_text("".join(before[:-1]) + before[-1][:25])
    again = evaluated(tmp_path / "e", settings, resume=True)
    assert file.read_text().splitlines(keepends=True)[:-1] == before[:-1]
    assert_same_episodes(whole, again)


def test_a_finished_evaluation_is_not_run_again(tmp_path: Path) -> None:
    settings = config(eval={"episodes": 3})
    evaluated(tmp_path / "e", settings)
    before = (tmp_path / "e" / "episodes.jsonl").read_bytes()
    result = evaluate_run("untrained", settings, None, tmp_path, into=tmp_path / "e", resume=True)
    assert (tmp_path / "e" / "episodes.jsonl").read_bytes() == before
    assert result["episodes"] == result["episodes_of_earlier_sessions"] == 3


def test_resume_without_a_folder_finds_the_same_evaluation_or_begins_one(tmp_path: Path) -> None:
    three, four = config(eval={"episodes": 3}), config(eval={"episodes": 4})
    first = evaluate_run("untrained", three, None, tmp_path, resume=True)["folder"]
    other = evaluate_run("untrained", four, None, tmp_path, resume=True)["folder"]
    again = evaluate_run("untrained", three, None, tmp_path, resume=True)["folder"]
    anew = evaluate_run("untrained", three, None, tmp_path)["folder"]
    assert first == again and len({first, other, anew}) == 3
