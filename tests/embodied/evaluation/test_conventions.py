"""Conventions of a policy's training, compared wherever it meets an environment: pictures, gripper, control mode."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from embodied import cli, load_policy
from embodied.commands.evaluate import evaluate_run
from embodied.config.files import parse_config, saved_config, with_settings
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.folder import read_folder
from embodied.evaluation.protocol import protocol_of
from embodied.training.checks import AT_END, Checked, check_start
from embodied.workflows.conventions import check_checkpoint, differences, notes_on, overruled
from tests.embodied.support.evaluations import trained

PICTURES: dict[str, dict[str, Any]] = {
    "env": {"num_envs": 2, "cameras": 1, "image_size": 32, "max_episode_steps": 8},
    "policy": {
        "kind": "flow",
        "reads": ["images", "proprio"],
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16]},
    },
    "rollout": {"decisions": 4},
    "eval": {"episodes": 2, "videos": 0},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs, which see pictures turned otherwise and have other grippers."""
    folder = tmp_path_factory.mktemp("runs")
    for name, orientation, gripper in (("turned", "rotated", "inverted"), ("plain", "upright", "simulator")):
        env = PICTURES["env"] | {"orientation": orientation, "gripper": gripper}
        trained(folder, name, seed=1, sections=PICTURES | {"env": env})
    return folder


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "000001"


def other(run: Path, **settings: Any) -> Config:
    return with_settings(
        saved_config(run / "config.yaml"), {f"env.{key}": value for key, value in settings.items()}, "t"
    )


@pytest.mark.parametrize(
    ("setting", "value", "follows"),
    [
        ("orientation", "upright", "its pictures are turned: let it act as it was trained (--env.orientation rotated)"),
        (
            "gripper",
            "simulator",
            "its gripper does the opposite: let it act as it was trained (--env.gripper inverted)",
        ),
        ("gripper", "binary", "its gripper does the opposite"),
        ("control_mode", "ee_delta_pose", "its actions move the robot otherwise"),
        ("image_size", 64, "(--env.image-size 32)"),
        ("cameras", 2, "it sees other cameras"),
    ],
)
def test_a_convention_by_which_a_policy_is_wrong_is_named_with_that_of_its_training(
    runs: Path, setting: str, value: Any, follows: str
) -> None:
    run = runs / "turned"
    with pytest.raises(UserError) as caught:
        check_checkpoint(checkpoint_of(run), other(run, **{setting: value}))
    assert f"{checkpoint_of(run)} was trained with env.{setting}" in str(caught.value) and follows in str(caught.value)


def test_what_is_the_same_by_another_word_is_no_difference(runs: Path) -> None:
    """The control mode of tabletop is its only one, and its own pictures are upright."""
    assert differences(other(runs / "plain"), other(runs / "plain", control_mode="ee_delta_pos")) == []
    assert differences(other(runs / "plain"), other(runs / "plain", orientation="stock")) == []


def test_order_of_cameras_matters(runs: Path) -> None:
    both, swapped = (other(runs / "plain", cameras=names) for names in (["base", "wrist"], ["wrist", "base"]))
    assert [one.setting for one in differences(both, swapped)] == ["env.cameras"]


def test_orientation_is_of_no_matter_to_a_policy_that_sees_nothing() -> None:
    states = parse_config({"env": {"task": "tabletop/reach"}}, "test")
    assert differences(states, with_settings(states, {"env.orientation": "rotated"}, "test")) == []


def test_a_task_has_the_conventions_that_it_was_trained_with() -> None:
    """Of several tasks each is compared with its own settings."""
    second = {"task": "tabletop/reach_blue", "gripper": "inverted"}
    both = parse_config({"env": {"task": "tabletop/reach"}, "extra_tasks": [second]}, "test")
    alone = parse_config({"env": {"task": "tabletop/reach_blue"}}, "test")
    assert [(one.trained, one.here) for one in differences(both, alone)] == [("inverted", "simulator")]
    assert differences(both, with_settings(alone, {"env.gripper": "inverted"}, "test")) == []


DOORS = {
    "init": ["train", "CONFIG", "--policy.init", "RUN", "--env.orientation", "upright"],
    "resume": ["train", "CONFIG", "--name", "turned", "--resume", "auto", "--env.orientation", "upright"],
    "dry run": ["train", "CONFIG", "--policy.init", "RUN", "--env.orientation", "upright", "--dry-run"],
    "eval": ["eval", "RUN", "--env.orientation", "upright"],
    "checkpoint": ["eval", "OTHER", "--checkpoint", "CHECKPOINT"],
    "record": ["record", "RUN", "--env.orientation", "upright", "--out", "RUN/../recorded"],
    "serve": ["serve", "RUN", "--port", "0", "--env.orientation", "upright"],
    "plan": ["plan", "CONFIG", "--policy.init", "RUN", "--env.orientation", "upright"],
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_pictures_that_are_turned(
    runs: Path, door: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "turned"
    named = {"RUN": run, "OTHER": runs / "plain", "CONFIG": run / "config.yaml", "CHECKPOINT": checkpoint_of(run)}
    monkeypatch.chdir(runs.parent)
    words = [str(named.get(word, word)).replace("RUN", str(run)) for word in DOORS[door]]
    given = [] if door in ("serve", "plan") else ["--quiet"]
    assert cli.main([*words, *given, *([] if door == "plan" else ["--runs-dir", str(runs)])]) == 2
    says = (
        "with env.orientation 'rotated', not 'upright'"
        if door == "resume"
        else "was trained with env.orientation rotated"
    )
    assert says in (error := capsys.readouterr().err), error
    assert "Traceback" not in error


def test_a_run_goes_on_whatever_it_once_began_from(runs: Path) -> None:
    """It has learned since, by demonstrations or before this was compared."""
    init = other(runs / "plain").model_copy(update={"name": "plain"})
    begun = with_settings(init, {"policy.init": str(checkpoint_of(runs / "turned"))}, "test")
    with pytest.raises(UserError, match="teach it these by demonstrations"):
        check_start(Checked(command="train", config=begun))
    check_start(Checked(command="train", config=begun, run_dir=runs / "plain"))


def test_a_policy_is_loaded_with_the_settings_of_its_own_run(runs: Path) -> None:
    with pytest.raises(UserError, match=r"was trained with env\.orientation rotated and env\.gripper inverted"):
        load_policy(runs / "plain", checkpoint_of(runs / "turned"))
    assert load_policy(runs / "turned").config.env.orientation == "rotated"


def test_demonstrations_may_teach_another_convention(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, and the next mistake is named."""
    run = runs / "turned"
    words = ["sft", str(run / "config.yaml"), "--policy.init", str(run), "--env.orientation", "upright", "--name", "t"]
    with caplog.at_level(logging.WARNING):
        assert cli.main([*words, "--runs-dir", str(tmp_path)]) == 2
    assert "no demonstrations are named" in capsys.readouterr().err
    assert any("was trained with env.orientation rotated, and acts here with upright" in one for one in caplog.messages)


def test_each_of_two_policies_sees_and_acts_by_its_own_conventions(runs: Path, tmp_path: Path) -> None:
    run = runs / "turned"
    alone = json.loads((run / "eval.json").read_text())
    shutil.rmtree(run / "evals")
    plain = saved_config(runs / "plain" / "config.yaml")
    result = evaluate_run(str(runs / "plain"), plain, None, runs, into=tmp_path / "e", against=str(run))
    theirs = read_folder(Path(result["comparison"]["folder"]))
    protocol = theirs.identity.protocol
    assert (protocol.orientation, protocol.gripper) == ("rotated", "inverted")
    assert fmean(one.total_reward for one in theirs.in_order()) == pytest.approx(alone["return"], abs=1e-6)
    assert "gripper inverted" in result["comparison"]["conventions"]


def test_a_difference_that_matters_less_stands_in_the_result(runs: Path, tmp_path: Path) -> None:
    config = other(runs / "plain", gripper="binary")
    result = evaluate_run(str(runs / "plain"), config, None, runs, into=tmp_path / "e")
    said = [note for note in result["notes"] if "env.gripper simulator, and acts here with binary" in note]
    assert len(said) == 1


def test_a_checkpoint_away_from_its_run_says_that_nothing_is_known(runs: Path, tmp_path: Path) -> None:
    away = shutil.copytree(checkpoint_of(runs / "turned"), tmp_path / "away")
    (note,) = notes_on(away, other(runs / "plain"))
    assert note.startswith(f"nothing says under which conventions {away} was trained") and "orientation upright" in note
    check_checkpoint(away, other(runs / "plain"))


LIBERO: dict[str, Any] = {
    "env": {"task": "libero/libero_spatial/0", "cameras": 2, "image_size": 256, "num_envs": 2},
    "policy": {"kind": "flow", "reads": ["images"], "chunk": 5, "options": {"encoder": "cnn"}},
    "eval": {"protocol": "openpi"},
}


def test_a_run_is_not_evaluated_by_a_protocol_of_other_conventions() -> None:
    with pytest.raises(
        UserError, match=r"this run was trained with env\.orientation upright, and acts here with rotated"
    ):
        check_start(Checked(command=AT_END, config=parse_config(LIBERO, "test")))
    rotated = parse_config(LIBERO | {"env": LIBERO["env"] | {"orientation": "rotated"}}, "test")
    protocol = protocol_of(rotated)
    assert differences(rotated, protocol.applied(rotated, protocol.tasks[0])) == []


def test_a_protocol_that_overrules_what_a_pretrained_policy_needs_is_named() -> None:
    """Only what the configuration says: its defaults say nothing about a checkpoint of others."""
    kind = {"policy": {"kind": "pi0", "reads": ["images", "instruction"]}}
    said = parse_config(LIBERO | kind | {"env": LIBERO["env"] | {"gripper": "inverted"}}, "test")
    applied = with_settings(said, {"env.orientation": "rotated", "env.gripper": "simulator"}, "test")
    (sentence,) = overruled(said, applied)
    assert "the policy of this configuration is with env.gripper inverted, and acts here with simulator" in sentence
