"""What an evaluation refuses, and that nothing is lost by it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from embodied.commands.evaluate import evaluate_run
from embodied.commands.train import train_run
from embodied.evaluation.evaluate import Subject, evaluate
from embodied.evaluation.folder import Identity, open_folder, read_folder
from embodied.evaluation.protocol import as_data, protocol_of
from embodied.execution.session import open_session
from embodied.rollout.evaluator import EpisodeResult
from embodied.run import checkpoint
from embodied.run.saved_settings import settings_of
from policies.contract import PolicyError
from sim_farm.contract import EpisodeSpec, FarmError
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import assert_same_episodes, config, evaluated, refusal

run = evaluations.run  # the fixture


@pytest.mark.parametrize("episodes", [2, 5])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_another_protocol_is_refused_and_left_alone(resume: bool, episodes: int, tmp_path: Path) -> None:
    kept = evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    message = refusal(tmp_path / "e", config(eval={"episodes": episodes}), resume=resume)
    assert "--folder" in message and "delete" not in message
    assert (
        f"protocol.trials is 3, asked for is {episodes}" in message
        if resume
        else "an evaluation of 3 episodes" in message
    )
    assert_same_episodes(read_folder(tmp_path / "e"), kept)


def test_a_folder_by_another_version_of_protocols_is_refused(tmp_path: Path) -> None:
    settings = config(eval={"episodes": 3})
    kept = evaluated(tmp_path / "e", settings)
    other = replace(protocol_of(settings), version=1)
    data = {"protocol": as_data(other), "policy": dict(kept.identity.policy)}
    (tmp_path / "e" / "protocol.json").write_text(json.dumps(data))
    assert "version 1 of protocols" in refusal(tmp_path / "e", settings, resume=True)


def test_resets_before_an_episode_are_kept_with_it(tmp_path: Path) -> None:
    settings = config()
    with open_folder(tmp_path / "e", Identity(protocol_of(settings), {}), settings, resume=False) as folder:
        spec = EpisodeSpec(7, 4, resets=4, unseeded_resets=1)
        actions = np.zeros((2, 3), np.float32)
        folder.add(EpisodeResult("tabletop/reach", 0, spec, True, True, 1.0, 2, 50, actions))
    assert [outcome.spec for outcome in read_folder(tmp_path / "e").in_order()] == [spec]


def test_policies_that_decide_at_other_intervals_are_compared_on_the_same_episodes(tmp_path: Path) -> None:
    evaluated(tmp_path / "two", config(eval={"episodes": 4}))
    one = config(eval={"episodes": 4}, policy={"chunk": 1})
    result = evaluate_run("untrained", one, None, tmp_path, into=tmp_path / "one", against=str(tmp_path / "two"))
    assert result["comparison"]["episodes"] == 4
    assert read_folder(tmp_path / "one").identity.protocol != read_folder(tmp_path / "two").identity.protocol


def test_a_folder_of_another_policy_is_refused(tmp_path: Path) -> None:
    evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    message = refusal(tmp_path / "e", config(eval={"episodes": 3}, policy={"chunk": 1}), resume=True)
    assert "policy.chunk is 2, asked for is 1" in message


def test_a_folder_that_holds_an_evaluation_is_refused_unless_it_is_gone_on_with(tmp_path: Path) -> None:
    evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    message = refusal(tmp_path / "e", config(eval={"episodes": 3}))
    assert "3 episodes" in message and "--resume auto" in message and "--folder" in message


def test_two_evaluations_into_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    evaluated(tmp_path / "e", config(eval={"episodes": 3}))
    with (tmp_path / "e" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = refusal(tmp_path / "e", config(eval={"episodes": 3}), resume=True)
    assert "another process" in message and "--folder" in message


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    assert "--folder" in refusal(tmp_path / "thesis", config())
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    assert "cannot be written" in refusal(Path("/sys/evaluation"), config())


def test_initial_states_that_a_task_lacks_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "e", config(eval={"init_states": [0, 1], "episodes": 2}))
    assert "tabletop/reach has no initial state 0, 1" in message and "no recorded initial states" in message
    assert not (tmp_path / "e").exists(), "an evaluation that never began must leave no folder"


def test_a_camera_that_a_task_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    settings = config(env={"cameras": ["ceiling"]}, policy={"reads": ["images"]})
    message = refusal(tmp_path / "e", settings, FarmError)
    assert "ceiling" in message and "wrist" in message


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
    message = str(caught.value)
    assert "tabletop/pick_and_place" in message and "action_dim is 3, expected 4" in message
    assert message.endswith("name tasks of the sizes it was trained on in eval.tasks")
    assert not (tmp_path / "e").exists(), "all tasks are looked at before the first episode"


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
    message = refusal(tmp_path / "e", config(policy={"kind": "gaussian_mlp"}))
    assert "--checkpoint" in message and "gaussian_mlp" in message


def test_a_comparison_with_results_by_another_protocol_is_refused(tmp_path: Path) -> None:
    evaluated(tmp_path / "three", config(eval={"episodes": 3}))
    message = refusal(tmp_path / "four", config(eval={"episodes": 4}), against=str(tmp_path / "three"))
    assert "another protocol" in message and not (tmp_path / "four").exists()
    assert "neither a run" in refusal(tmp_path / "four", config(), against="nothing")
