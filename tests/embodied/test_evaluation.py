"""Evaluations: each episode once and the same one, whoever runs it, wherever it stops, and nothing lost."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from embodied import checkpoint, cli
from embodied.commands.evaluate import evaluate_run
from embodied.commands.train import train_run
from embodied.config import Config
from embodied.config_files import load_config, parse_config
from embodied.errors import UserError
from embodied.evaluation import films
from embodied.evaluation.evaluate import Subject, evaluate, evaluation_folder
from embodied.evaluation.films import FRAMES, Filmer, Shown, differing, filmed_steps, stride, worth_seeing
from embodied.evaluation.folder import EvalFolder, Identity, open_folder, read_folder
from embodied.evaluation.protocol import as_data, protocol_of
from embodied.execution import recovery
from embodied.execution.session import open_session
from embodied.reporting.run_record import read_run
from embodied.reporting.video import EpisodeFrames
from embodied.run_folder import settings_of
from embodied.workers.evaluator import EpisodeOutcome, EpisodeResult, deal_out
from policies.contract import PolicyError
from sim_farm import faults
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.episodes import ListedEpisodes, evaluation_episodes
from sim_farm.layout import FarmSpec

COMMAND = Path(sys.executable).parent / "embodied"
RANDOM: dict[str, Any] = {
    "env": {"task": "tabletop/reach", "num_envs": 8},
    "policy": {"kind": "random", "chunk": 2},
    "farm": {"physics_workers": 1},
    "eval": {"greedy": False, "videos": 0},
    "runtime": {"mode": "inline"},
}


def config(base: dict[str, Any] = RANDOM, **sections: dict[str, Any]) -> Config:
    """`base` with some keys of some sections replaced."""
    return parse_config(base | {name: base.get(name, {}) | own for name, own in sections.items()}, "test")


def evaluated(folder: Path, settings: Config, **how: Any) -> EvalFolder:
    evaluate_run("untrained", settings, None, folder.parent, into=folder, **how)
    return read_folder(folder)


def assert_same_episodes(a: EvalFolder, b: EvalFolder) -> None:
    assert a.in_order() == b.in_order()
    for outcome in a.in_order():
        assert np.array_equal(a.actions(outcome), b.actions(outcome)), f"other actions in {outcome}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run whose policy multiplies matrices, trained for an iteration: its rounding shows the shape of a batch."""
    yield trained(tmp_path_factory.mktemp("runs"), "run", seed=1)


def trained(runs_dir: Path, name: str, seed: int, iterations: int = 1, **optim: Any) -> Path:
    small = {"iterations": iterations, "name": name, "seed": seed, "stop_at_success": None, "optim": optim}
    sections = {
        **small,
        "env": {"task": "tabletop/reach", "num_envs": 8},
        "policy": {"options": {"widths": [64, 64]}},
        "rollout": {"decisions": 16},
        "farm": {"physics_workers": 1},
        "eval": {"episodes": 4, "videos": 0},
        "runtime": {"mode": "inline"},
    }
    return Path(train_run(parse_config(sections, "test"), "reach", runs_dir, False)["report"]).parent


# --- the result does not depend on who does the work


@pytest.mark.parametrize(
    "how",
    [
        {"farm": {"physics_workers": 2}},
        {"farm": {"groups": 1}, "eval": {"num_envs": 4}},
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


def test_an_episode_does_not_depend_on_the_other_tasks_of_an_evaluation(tmp_path: Path) -> None:
    alone = evaluated(tmp_path / "alone", config(eval={"tasks": ["tabletop/push"], "episodes": 5}))
    among = evaluated(tmp_path / "among", config(eval={"tasks": ["tabletop"], "episodes": 5}))
    for key, outcome in alone.outcomes.items():
        assert among.outcomes[key] == outcome
        assert np.array_equal(among.actions(outcome), alone.actions(outcome))


def test_tasks_do_not_share_their_noise(tmp_path: Path) -> None:
    both = evaluated(tmp_path / "e", config(eval={"tasks": ["tabletop/push", "tabletop/pick_and_place"]}))
    push, place = (both.actions(both.outcomes[task, 0])[0, :3] for task in ("tabletop/push", "tabletop/pick_and_place"))
    assert not np.array_equal(push, place)


def test_a_policy_that_reads_instructions_acts_alone_as_among_others(tmp_path: Path) -> None:
    """Fewer episodes than environments: those that never have one show no instruction."""
    tiny = load_config("openvla_tiny").model_dump(mode="json")
    short: dict[str, Any] = {"env": {"max_episode_steps": 4}, "runtime": {"mode": "inline", "trace": False}}
    few, all_rows = (
        config(tiny, eval={"episodes": episodes, "num_envs": 6, "videos": 0, "greedy": False}, **short)
        for episodes in (1, 6)
    )
    assert "instruction" in few.policy.reads
    alone, among = evaluated(tmp_path / "alone", few), evaluated(tmp_path / "among", all_rows)
    (outcome,) = alone.in_order()
    assert outcome == among.in_order()[0]
    assert np.array_equal(alone.actions(outcome), among.actions(outcome))


def test_a_policy_acts_on_what_it_is_told(tmp_path: Path) -> None:
    tiny = load_config("openvla_tiny").model_dump(mode="json")
    short: dict[str, Any] = {"env": {"max_episode_steps": 4}, "runtime": {"mode": "inline", "trace": False}}
    found = {}
    for told in (None, "move the gripper to the green ball", "reach the ball"):
        asked = {"episodes": 2, "num_envs": 2, "videos": 0, "instruction": told}
        result = evaluated(tmp_path / str(told), config(tiny, eval=asked, **short))
        found[told] = [result.actions(outcome) for outcome in result.in_order()]
    own, same, other = found.values()
    assert all(np.array_equal(a, b) for a, b in zip(own, same, strict=True)), (
        "told the task's own words it acts otherwise"
    )
    assert any(not np.array_equal(a, b) for a, b in zip(own, other, strict=True)), "what it is told does not matter"


@pytest.mark.parametrize("length", [1, 59, 119, 121, 160])
def test_a_long_film_says_at_which_step_each_frame_was_taken(length: int) -> None:
    """The last is the episode's end, whatever lies between two frames."""
    task, episode = TaskSpec("tabletop/push", max_episode_steps=length), EpisodeSpec(3)
    frames = Filmer().film(task, episode, np.zeros((length, 3), np.float32), stride(length))
    said = filmed_steps(length, stride(length))
    assert len(said) == len(frames) and said[0] == 0 and said[-1] == length
    assert len(frames) <= 2 * FRAMES + 1


def test_episodes_of_a_film_are_equally_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiles: list[EpisodeFrames] = []
    monkeypatch.setattr(films, "write_tiled", lambda path, shown, fps, columns: tiles.extend(shown))
    task, lengths = TaskSpec("tabletop/push", max_episode_steps=3 * FRAMES), (5, 3 * FRAMES)
    outcomes = [EpisodeOutcome(task.name, i, EpisodeSpec(3), False, 0.0, n, n) for i, n in enumerate(lengths)]
    episodes = [Shown(one, np.zeros((one.length, 3), np.float32), "") for one in outcomes]
    with open_session(config()) as session:
        films.write_film(tmp_path / "film.mp4", session, episodes, lambda name: task)
    said = [list(tile.steps or ()) for tile in tiles]
    assert said == [[*range(0, length, 3), length] for length in lengths]
    assert [len(one) for one in said] == [len(tile.frames) for tile in tiles]


def test_a_run_shows_what_it_reached_by_the_tasks_own_words(tmp_path: Path) -> None:
    tiny = load_config("openvla_tiny").model_dump(mode="json")
    short: dict[str, Any] = {"env": {"max_episode_steps": 4}, "runtime": {"mode": "inline", "trace": False}}
    run = tmp_path / "run"
    run.mkdir()
    shown: list[int] = []
    for told in (None, "reach the ball", None):
        asked = {"episodes": 2 + len(shown), "num_envs": 2, "videos": 0, "instruction": told}
        subject = Subject("run", config(tiny, eval=asked, **short), None, run, run / "evals")
        protocol = protocol_of(subject.config)
        with evaluation_folder(subject, protocol, None, False) as folder, open_session(subject.config) as session:
            evaluate(subject, protocol, session, folder)
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
        said = begun.communicate(timeout=240)[0]
    (folder,) = folders(runs_dir)
    kept = len(read_folder(folder).outcomes)
    assert 30 <= kept < 200, f"not interrupted on the way: {said}"
    assert not (folder / "eval.json").exists()
    assert how is signal.SIGKILL or (begun.returncode == 130 and "--resume auto" in said)

    assert cli.main([*arguments[1:], "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["folder"] == str(folder) and result["episodes_of_earlier_sessions"] == kept
    lines_kept = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert len({(line["task"], line["trial"]) for line in lines_kept}) == len(lines_kept) == 200

    settings = config(settings_of(str(run), tmp_path).model_dump(mode="json"), eval={"episodes": 200, "greedy": False})
    evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "whole")
    assert_same_episodes(read_folder(tmp_path / "whole"), read_folder(folder))
    assert tables(tmp_path / "whole") == tables(folder)


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


# --- what is refused, and nothing lost by it


def refusal(folder: Path, settings: Config, kind: type[Exception] = UserError, **how: Any) -> str:
    with pytest.raises(kind) as caught:
        evaluated(folder, settings, **how)
    return str(caught.value)


@pytest.mark.parametrize("episodes", [2, 5])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_another_protocol_is_refused_and_left_alone(resume: bool, episodes: int, tmp_path: Path) -> None:
    kept = evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    said = refusal(tmp_path / "e", config(eval={"episodes": episodes}), resume=resume)
    assert "--folder" in said and "delete" not in said
    assert f"protocol.trials is 3, asked for is {episodes}" in said if resume else "an evaluation of 3 episodes" in said
    assert_same_episodes(read_folder(tmp_path / "e"), kept)


def test_a_folder_by_the_first_version_of_protocols_is_read_and_not_gone_on_with(tmp_path: Path) -> None:
    settings = config(eval={"episodes": 3})
    kept = evaluated(tmp_path / "e", settings)
    first = replace(protocol_of(settings), cameras=None, chunk=None, version=1)
    data = {"protocol": as_data(first), "policy": dict(kept.identity.policy)}
    assert "version" not in data["protocol"]
    (tmp_path / "e" / "protocol.json").write_text(json.dumps(data))
    lines = [json.loads(line) for line in (tmp_path / "e" / "episodes.jsonl").read_text().splitlines()]
    old = [{key: line[key] for key in line if key not in ("resets", "unseeded_resets")} for line in lines]
    (tmp_path / "e" / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert_same_episodes(read_folder(tmp_path / "e"), kept)
    said = refusal(tmp_path / "e", settings, resume=True)
    assert "version 1 of protocols" in said and "--folder" in said
    assert "another protocol" in refusal(tmp_path / "f", settings, against=str(tmp_path / "e"))


def test_resets_before_an_episode_are_kept_with_it(tmp_path: Path) -> None:
    settings = config()
    with open_folder(tmp_path / "e", Identity(protocol_of(settings), {}), settings, resume=False) as folder:
        spec = EpisodeSpec(7, 4, resets=4, unseeded_resets=1)
        actions = np.zeros((2, 3), np.float32)
        folder.add(EpisodeResult("tabletop/reach", 0, spec, True, 1.0, 2, 50, actions))
    assert [outcome.spec for outcome in read_folder(tmp_path / "e").in_order()] == [spec]


def test_policies_that_decide_at_other_intervals_are_compared_on_the_same_episodes(tmp_path: Path) -> None:
    evaluated(tmp_path / "two", config(eval={"episodes": 4}))
    one = config(eval={"episodes": 4}, policy={"chunk": 1})
    result = evaluate_run("untrained", one, None, tmp_path, into=tmp_path / "one", against=str(tmp_path / "two"))
    assert result["comparison"]["episodes"] == 4
    assert read_folder(tmp_path / "one").identity.protocol != read_folder(tmp_path / "two").identity.protocol


def test_a_folder_of_another_policy_is_refused(tmp_path: Path) -> None:
    evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    said = refusal(tmp_path / "e", config(eval={"episodes": 3}, policy={"chunk": 1}), resume=True)
    assert "policy.chunk is 2, asked for is 1" in said


def test_a_folder_that_holds_an_evaluation_is_refused_unless_it_is_gone_on_with(tmp_path: Path) -> None:
    evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    said = refusal(tmp_path / "e", config(eval={"episodes": 3}))
    assert "3 episodes" in said and "--resume auto" in said and "--folder" in said


def test_two_evaluations_into_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    with (tmp_path / "e" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = refusal(tmp_path / "e", config(eval={"episodes": 3}), resume=True)
    assert "another process" in said and "--folder" in said


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    assert "--folder" in refusal(tmp_path / "thesis", config())
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    assert "cannot be written" in refusal(Path("/sys/evaluation"), config())


def test_initial_states_that_a_task_lacks_are_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path / "e", config(eval={"init_states": [0, 1], "episodes": 2}))
    assert "tabletop/reach has no initial state 0, 1" in said and "no recorded initial states" in said
    assert not (tmp_path / "e").exists(), "an evaluation that never began must leave no folder"


def test_a_camera_that_a_task_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    settings = config(env={"cameras": ["ceiling"]}, policy={"reads": ["images"]})
    said = refusal(tmp_path / "e", settings, FarmError)
    assert "ceiling" in said and "wrist" in said


@pytest.mark.parametrize("tensor", ["log_std", "normalizer.var"])
def test_weights_that_are_not_finite_are_refused_wherever_they_enter(run: Path, tensor: str, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(run, tmp_path / "spoiled"))
    newest = checkpoint.latest(spoiled / "checkpoints")
    assert newest is not None
    tensors = load_file(newest / "policy" / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith(tensor)]
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, newest / "policy" / "model.safetensors")
    manifest = json.loads((newest / checkpoint.MANIFEST).read_text())
    digest = hashlib.sha256((newest / "policy" / "model.safetensors").read_bytes()).hexdigest()
    (newest / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"policy/model.safetensors": digest}))
    settings = settings_of(str(spoiled), tmp_path)
    message = f"model.safetensors: '{name}' has numbers that are not finite.*earlier checkpoint"
    with pytest.raises(PolicyError, match=message):
        evaluate_run(str(spoiled), settings, None, tmp_path, into=tmp_path / "of a run")
    with pytest.raises(PolicyError, match=message):
        evaluate_run("reach", settings, newest, tmp_path, into=tmp_path / "of a checkpoint")
    begun = settings.model_copy(update={"policy": settings.policy.model_copy(update={"init": spoiled}), "name": "next"})
    with pytest.raises(PolicyError, match=message):
        train_run(begun, "test", tmp_path, False)
    assert not (tmp_path / "next").exists()


def test_a_policy_of_another_action_size_is_refused_with_the_task(run: Path, tmp_path: Path) -> None:
    base = settings_of(str(run), tmp_path).model_dump(mode="json")
    with pytest.raises(PolicyError) as caught:
        settings = config(base, eval={"tasks": ["tabletop/reach", "tabletop/pick_and_place"], "episodes": 2})
        evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "e")
    said = str(caught.value)
    assert "tabletop/pick_and_place" in said and "action_dim is 3, expected 4" in said
    assert {task for task, _ in read_folder(tmp_path / "e").outcomes} == {"tabletop/reach"}, "what was done is kept"


def test_the_size_of_pictures_that_a_policy_never_sees_does_not_matter_to_it(run: Path, tmp_path: Path) -> None:
    base = settings_of(str(run), tmp_path).model_dump(mode="json")
    subject = Subject(
        "run", config(base, env={"image_size": 64}), checkpoint.latest(run / "checkpoints"), None, tmp_path
    )
    protocol = replace(protocol_of(config(base, eval={"episodes": 2})), image_size=256)
    with (
        open_session(subject.config) as session,
        open_folder(tmp_path / "e", subject.identity(protocol), subject.config, resume=False) as folder,
    ):
        assert evaluate(subject, protocol, session, folder)["episodes"] == 2


def test_a_policy_that_has_to_be_trained_is_not_evaluated_without_a_checkpoint(tmp_path: Path) -> None:
    said = refusal(tmp_path / "e", config(policy={"kind": "gaussian_mlp"}))
    assert "--checkpoint" in said and "gaussian_mlp" in said


# --- what is recorded


def test_replaying_the_kept_actions_gives_the_recorded_episode(tmp_path: Path) -> None:
    from sim_farm.registry import make_physics

    kept = evaluated(tmp_path / "e", config(eval={"tasks": ["tabletop/push"], "episodes": 5}))
    physics = make_physics(TaskSpec("tabletop/push"))
    for outcome in kept.in_order():
        physics.reset(outcome.spec)
        result = physics.step(kept.actions(outcome))
        assert result.ended and result.steps == outcome.length and bool(result.success.any()) == outcome.success
        assert float(result.reward.sum()) == pytest.approx(outcome.total_reward, abs=1e-5)


def test_the_files_of_a_result_agree(tmp_path: Path) -> None:
    kept = evaluated(tmp_path / "e", config(eval={"tasks": ["tabletop"], "episodes": 4}))
    result = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert [row.task for row in read_run(tmp_path / "e").evals] == list(kept.identity.protocol.tasks)
    assert result["episodes"] == len(kept.outcomes) == 4 * len(result["tasks"])
    assert result["success_rate"] == np.mean([o.success for o in kept.outcomes.values()])
    assert result["protocol"]["sha256"] == kept.identity.protocol.sha256
    assert result["episode_len"] == pytest.approx(np.mean([row["episode_len"] for row in result["tasks"]]))
    table = (tmp_path / "e" / "eval.md").read_text()
    assert kept.identity.protocol.sha256[:12] in table and "**tabletop**" in table
    assert all(f"| {row['task']} " in table for row in result["tasks"])


def test_videos_show_failures_first_and_each_task_s_first() -> None:
    def outcome(task: str, trial: int, success: bool) -> EpisodeResult:
        return EpisodeResult(task, trial, EpisodeSpec(0), success, 0.0, 1, 1, np.zeros((1, 1), np.float32))

    listed = [outcome(task, trial, trial == 0) for task in "ab" for trial in range(3)]
    shown = [(o.task, o.trial) for o in worth_seeing(listed, 5)]
    assert shown == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 0)]


def test_a_film_of_differences_has_what_the_first_alone_solved_first() -> None:
    def outcomes(solved: dict[str, list[int]]) -> list[EpisodeResult]:
        return [
            EpisodeResult(task, trial, EpisodeSpec(0), bool(success), 0.0, 1, 1, np.zeros((1, 1), np.float32))
            for task, successes in solved.items()
            for trial, success in enumerate(successes)
        ]

    first, second = outcomes({"a": [1, 0, 1, 1], "b": [1, 1, 0, 0]}), outcomes({"a": [1, 1, 0, 0], "b": [0, 1, 0, 1]})
    pairs = differing(first, second, 9)
    assert [(mine.task, mine.trial) for mine, _ in pairs] == [("a", 2), ("b", 0), ("a", 3), ("a", 1), ("b", 3)]
    assert all((mine.task, mine.trial) == (other.task, other.trial) for mine, other in pairs)
    assert differing(first, second, 2) == pairs[:2] and differing(first, first, 9) == []


def test_a_comparison_pairs_the_same_episodes(run: Path, tmp_path: Path) -> None:
    other = trained(tmp_path, "other", seed=2, iterations=2, policy_lr=1e-2, minibatch=32)  # it solves some
    base = settings_of(str(run), tmp_path).model_dump(mode="json")
    settings = config(base, eval={"episodes": 30})
    result = evaluate_run(str(run), settings, None, tmp_path, into=tmp_path / "e", against=str(other))
    found = result["comparison"]
    ours, theirs = read_folder(tmp_path / "e"), read_folder(Path(found["folder"]))
    assert ours.identity.protocol == theirs.identity.protocol and ours.identity.policy != theirs.identity.policy
    pairs = [(a.success, b.success) for a, b in zip(ours.in_order(), theirs.in_order(), strict=True)]
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


def test_a_comparison_with_results_by_another_protocol_is_refused(tmp_path: Path) -> None:
    evaluated(tmp_path / "three", config(eval={"episodes": 3}))
    said = refusal(tmp_path / "four", config(eval={"episodes": 4}), against=str(tmp_path / "three"))
    assert "another protocol" in said and not (tmp_path / "four").exists()
    assert "neither a run" in refusal(tmp_path / "four", config(), against="nothing")
