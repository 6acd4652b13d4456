"""Resuming gives what not stopping would have given: to the last bit, times apart."""

from __future__ import annotations

import json
import operator
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

import embodied
from embodied.config.files import load_config, parse_config, save_config, saved_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.session import Session, open_session
from embodied.learning.learner import Learner
from embodied.reporting.metrics import FILE, read
from embodied.reporting.trackers import FILE as TRACKED
from embodied.run import checkpoint, continued
from embodied.run.checkpoint import CheckpointError
from embodied.run.folder import open_run_folder, prepare_run
from embodied.run.saved_settings import settings_of
from embodied.runtime.api import InlineRuntime, LocalHandle
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from tests.embodied.commands.test_cli import here
from tests.variants import often

RUNTIME = {"mode": "inline"}
STATES = {
    "seed": 4,
    "checkpoint_every": 3,
    "env": {"task": "tabletop/push", "num_envs": 4, "max_episode_steps": 13},
    "policy": {"options": {"widths": [16], "initial_log_std": 0.0}},
    "rollout": {"decisions": 16},
    "optim": {"target_kl": 0.5, "epochs": 2, "minibatch": 24, "policy_lr": 3e-3},
    "runtime": RUNTIME,
}
IMAGES = {
    **STATES,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/push", "num_envs": 2, "max_episode_steps": 10, "cameras": 1, "image_size": 64},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images"],
        "chunk": 4,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16]},
    },
    "rollout": {"decisions": 4},
    "optim": {"epochs": 1, "minibatch": 4},
}


def config_of(settings: dict[str, Any], iterations: int, lr_schedule: str | None = None) -> Config:
    optim = {**settings["optim"], "lr_schedule": lr_schedule}
    return parse_config({**settings, "iterations": iterations, "optim": optim}, "test")


def run(config: Config, folder: Path, resume: bool = False) -> None:
    found = prepare_run(config, folder, resume)
    assert resume == (found is not None), "there was nothing to resume from"
    with open_session(config) as session:
        training.train(RunSpec.of(config), folder, session, found)


def rewind(source: Path, target: Path, iteration: int) -> None:
    """A copy of the run as a crash would have left it some time after the checkpoint of `iteration`."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").glob("0*"):
        if int(folder.name) > iteration:
            shutil.rmtree(folder)
    (target / "checkpoints" / "latest").write_text(f"{iteration:06d}\n")


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what the clock said."""
    clock = ("time/", "farm/")
    return {k: v for k, v in row.items() if not k.startswith(clock) and k not in ("wall_s", "learner/update_s")}


def assert_same_run(found: Path, expected: Path) -> None:
    last = [checkpoint.latest(run_dir / "checkpoints") for run_dir in (found, expected)]
    assert last[0] is not None and last[1] is not None and last[0].name == last[1].name
    checkpoint.verify(last[0])
    files = [sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")) for folder in last if folder]
    assert files[0] == files[1] and len(files[0]) >= 4
    for name in files[0]:
        tensors, others = load_file(last[0] / name), load_file(last[1] / name)
        assert tensors.keys() == others.keys(), name
        for key, tensor in tensors.items():
            assert tensor.tobytes() == others[key].tobytes(), f"{name}: {key}"
    states = [json.loads((folder / "state.json").read_text()) for folder in last if folder]
    assert [{**state, "wall_s": 0} for state in states][0] == {**states[1], "wall_s": 0}
    rows, other_rows = read(found), read(expected)
    assert [row["iteration"] for row in rows] == list(range(1, len(other_rows) + 1))
    for row, other in zip(rows, other_rows, strict=True):
        assert timeless(row) == timeless(other)
        assert row.keys() == other.keys()
    assert all(later["wall_s"] > row["wall_s"] for row, later in zip(rows, rows[1:], strict=False))


def test_three_iterations_and_three_after_a_stop_are_six(tmp_path: Path) -> None:
    run(config_of(STATES, 6), tmp_path / "whole")
    run(config_of(STATES, 3), tmp_path / "parts")
    assert len(read(tmp_path / "parts")) == 3
    run(config_of(STATES, 6), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    environments = checkpoint.read_environments(tmp_path / "whole" / "checkpoints" / "000003")
    assert environments["base_step"].any(), "no episode was under way at the stop: the run would not test it"
    assert any(row["env/episodes"] for row in read(tmp_path / "whole"))


def test_a_run_keeps_as_many_checkpoints_as_its_settings_say(tmp_path: Path) -> None:
    often = {**STATES, "checkpoint_every": 1}
    run(config_of(often, 3), tmp_path / "all")
    run(config_of({**often, "keep_checkpoints": 2}, 3), tmp_path / "two")
    folders = [tmp_path / name / "checkpoints" for name in ("all", "two")]
    kept = [sorted(path.name for path in folder.iterdir() if path.is_dir()) for folder in folders]
    assert kept == [["000001", "000002", "000003"], ["000002", "000003"]]
    assert checkpoint.recover(folders[1])[0] == folders[1] / "000003"


def test_a_run_that_crashed_after_its_checkpoint_repeats_what_was_lost(tmp_path: Path) -> None:
    config = config_of(STATES, 5, "linear")
    run(config, tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "crashed", 3)
    assert len(read(tmp_path / "crashed")) == 5, "the record is ahead of the checkpoint"
    run(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


@pytest.mark.parametrize("pointer", [None, "000009\n"], ids=["missing", "astray"])
def test_a_run_goes_on_from_its_newest_checkpoint_without_a_pointer(pointer: str | None, tmp_path: Path) -> None:
    config = config_of(STATES, 5, "linear")
    run(config, tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "crashed", 3)
    (tmp_path / "crashed" / "checkpoints" / "latest").unlink()
    if pointer is not None:
        (tmp_path / "crashed" / "checkpoints" / "latest").write_text(pointer)
    run(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(STATES, 5)
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    path = tmp_path / "damaged" / "checkpoints" / "000005" / "policy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    run(config, tmp_path / "damaged", resume=True)
    output = "".join(capsys.readouterr().out.split())
    assert "000005isdamaged:policy/model.safetensors" in output and "goesonfrom" in output and "000003" in output
    assert_same_run(tmp_path / "damaged", tmp_path / "whole")


def test_a_run_that_is_absent_on_this_machine_is_named_where_it_was_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a preemption, where the new machine does not share the folder."""
    config, absent = config_of(STATES, 2), f"there is no run {tmp_path}/parts on {socket.gethostname()}: it begins"
    for shown in (True, False):  # then its folder is there
        assert prepare_run(config, tmp_path / "parts", resume=True) is None
        assert (absent.replace(" ", "") in "".join(capsys.readouterr().out.split())) is shown
    assert prepare_run(config, tmp_path / "new", resume=False) is None
    assert not capsys.readouterr().out


def test_a_run_that_crashed_before_its_first_checkpoint_starts_over_and_keeps_its_record(tmp_path: Path) -> None:
    config = config_of(STATES, 2)
    run(config, tmp_path / "whole")
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "whole", crashed)
    recorded = (crashed / FILE).read_bytes()
    for number in (1, 2):  # again and again
        (crashed / TRACKED).write_text(f"{number}")
        shutil.rmtree(crashed / "checkpoints")
        assert prepare_run(config, crashed, resume=True) is None
        with open_session(config) as session:
            training.train(RunSpec.of(config), crashed, session, None)
        assert_same_run(crashed, tmp_path / "whole")
        assert (crashed / f"{FILE}.1").read_bytes() == recorded
        assert (crashed / f"{FILE}.{number}").is_file()
        assert not (crashed / TRACKED).exists(), "it is tracked as another run"
        assert (crashed / f"{TRACKED}.{number}").read_text() == f"{number}"


def test_a_run_that_fails_as_it_begins_anew_keeps_its_record(tmp_path: Path) -> None:
    config = config_of(STATES, 1).model_copy(update={"name": "run"})
    run(config, tmp_path / "run")
    recorded = (tmp_path / "run" / FILE).read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(RuntimeError), open_run_folder(config, "test", tmp_path, True, "rl"):
        raise RuntimeError("before the first iteration")
    assert (tmp_path / "run" / f"{FILE}.1").read_bytes() == recorded


def test_milestones_from_before_the_stop_are_in_the_result(tmp_path: Path) -> None:
    run(config_of(STATES, 2), tmp_path / "run")
    rows = read(tmp_path / "run")
    rows[0]["env/success_recent"] = 0.6  # so small a run solves nothing: its record is made to say that it did
    (tmp_path / "run" / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(STATES, 3)
    found = prepare_run(config, tmp_path / "run", resume=True)
    with open_session(config) as session:
        result = training.train(RunSpec.of(config), tmp_path / "run", session, found)
    assert result.get("success_0.5_env_steps") == rows[0]["env_steps"]
    assert result.get("success_0.5_wall_s") == rows[0]["wall_s"]


@pytest.mark.parametrize("history", [{}, {"observations": 3, "distance": 2}], ids=["one", "three"])
def test_a_run_from_images_goes_on_as_if_it_had_not_stopped(history: dict[str, int], tmp_path: Path) -> None:
    policy = {**IMAGES["policy"], "options": {**IMAGES["policy"]["options"], **history}}
    config = config_of({**IMAGES, "policy": policy}, 3)
    run(config, tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "crashed", 1)
    run(config, tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = config_of(STATES, 2)
    run(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    run(config, tmp_path / "again", resume=True)
    assert_same_run(tmp_path / "again", tmp_path / "run")


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    config = config_of(STATES, 1)
    prepare_run(config, tmp_path / "run", resume=False)
    with pytest.raises(UserError, match="exists: go on with it by --resume auto, or choose another --name"):
        prepare_run(config, tmp_path / "run", resume=False)


def test_a_run_without_a_whole_checkpoint_is_refused_before_it_begins_and_keeps_its_record(tmp_path: Path) -> None:
    config = config_of(STATES, 1)
    run(config, tmp_path / "run")
    recorded = (tmp_path / "run" / FILE).read_bytes()
    path = tmp_path / "run" / "checkpoints" / "000001" / "environments.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="environments.safetensors is not what was written"):
        prepare_run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / FILE).read_bytes() == recorded


# --- other settings


def resumed(folder: Path, *typed: str, status: int = 0) -> str:
    """What the command says that goes on with the run in the folder, of the configuration beside it."""
    own = ["--name", folder.name, "--runs-dir", str(folder.parent), "--resume", "auto"]
    found, output = here("train", str(folder.parent / "own.yaml"), *own, *typed)
    assert found == status, output
    return " ".join(output.split())


@pytest.fixture()
def begun(tmp_path: Path) -> Path:
    """A run of two iterations, of a configuration with other settings than were typed."""
    written = {**STATES, "iterations": 2, "checkpoint_every": 1, "eval": {"episodes": 1, "videos": 0}, "track": []}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(written))
    typed = ["--optim.policy-lr", "1e-5", "--loss.clip", "0.05", "--seed", "7"]
    status, output = here("train", str(tmp_path / "own.yaml"), "--name", "run", "--runs-dir", str(tmp_path), *typed)
    assert status == 0, output
    return tmp_path / "run"


def test_what_is_not_typed_again_stays_and_what_is_typed_is_said_and_recorded(begun: Path) -> None:
    output = resumed(begun, "--iterations", "3")
    assert "optim.policy_lr 1e-05 (own.yaml: 0.003)" in output and "--optim.policy-lr 0.003" in output
    kept = settings_of("run", begun.parent)
    assert (kept.optim.policy_lr, kept.loss.clip, kept.seed, kept.iterations) == (1e-5, 0.05, 7, 3)
    output = resumed(begun, "--iterations", "4", "--optim.policy-lr", "0.003", "--optim.lr-schedule", "linear")
    assert "after 3 iterations" in output and "optim.policy_lr 1e-05 -> 0.003" in output
    assert "fall to zero over 4 iterations now: the next has 25% of optim.policy_lr in place of 100%" in output
    assert [row["iteration"] for row in read(begun)] == [1, 2, 3, 4]
    assert [row["learner/policy_lr"] for row in read(begun)] == pytest.approx([1e-5, 1e-5, 1e-5, 0.003 / 4])
    changed = {part.iteration: {str(change) for change in part.changes} for part in continued.parts(begun)}
    assert changed == {
        2: {"iterations 2 -> 3"},
        3: {"iterations 3 -> 4", "optim.policy_lr 1e-05 -> 0.003", "optim.lr_schedule None -> 'linear'"},
    }
    assert saved_config(begun / "config.until-000002.yaml").optim.policy_lr == 1e-5
    assert "optim.policy_lr" in (begun / "report.html").read_text().partition("other settings than it began")[2]
    status, output = here("inspect", str(begun))
    assert status == 0 and "settings after 3" in output


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (("--seed", "0"), "seed 7, not 0"),
        (("--env.task", "tabletop/reach"), "env.task 'tabletop/push', not 'tabletop/reach'"),
        (("--policy.kind", "flow"), "policy.kind 'gaussian_mlp', not 'flow'"),
        (("--policy.options.widths", "8"), "policy.options.widths [16], not [8]"),
    ],
)
def test_what_would_make_the_record_untrue_is_refused(typed: tuple[str, ...], says: str, begun: Path) -> None:
    before = (begun / "config.yaml").read_bytes()
    output = resumed(begun, *typed, status=2)
    assert f"has done 2 iterations with {says}" in output and f"--policy.init {begun}" in output
    assert (begun / "config.yaml").read_bytes() == before and not list(begun.glob("config.until*"))


@pytest.mark.parametrize("typed", [("--optim.policy-lr", "9e-3"), ("--iterations", "1")])
def test_a_run_that_is_done_is_not_said_to_have_been_trained_otherwise(typed: tuple[str, ...], begun: Path) -> None:
    before = (begun / "config.yaml").read_bytes()
    output = resumed(begun, *typed, status=2)
    assert "has done all its 2 iterations, with " in output and "--iterations 4" in output
    assert (begun / "config.yaml").read_bytes() == before


def test_from_python_a_complete_configuration_is_compared_and_a_named_one_stays(begun: Path) -> None:
    whole, named = load_config(str(begun.parent / "own.yaml")), {"name": "run", "iterations": 3}
    with pytest.raises(UserError, match="seed 7, not 4"):
        embodied.train(whole, named, runs_dir=begun.parent, resume=True)
    embodied.train(str(begun.parent / "own.yaml"), named, runs_dir=begun.parent, resume=True)
    assert settings_of("run", begun.parent).optim.policy_lr == 1e-5 and len(read(begun)) == 3


def test_a_run_of_an_earlier_version_goes_on_without_its_former_settings(begun: Path) -> None:
    path = begun / "config.yaml"
    now = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**now, "farm": {**now["farm"], "pin": False}}))
    assert "former settings, which are ignored: farm.pin" in resumed(begun, "--iterations", "3")
    assert yaml.safe_load(path.read_text()) == {**now, "iterations": 3}
    path.write_text(yaml.safe_dump({**now, "loss": {**now["loss"], "dual_clip": 3.0}}))
    output = resumed(begun, "--iterations", "4", status=2)
    assert "loss.dual_clip is 3.0, and there is no such setting any more (its default, None" in output


def test_former_settings_that_have_another_key_are_read_under_that(begun: Path) -> None:
    path = begun / "config.yaml"
    now = yaml.safe_load(path.read_text())
    env, optim = {**now["env"], "tokenizer": "assets/countdown_lm"}, {**now["optim"], "anneal": True}
    path.write_text(yaml.safe_dump({**now, "env": env, "optim": optim}))
    found = saved_config(path)
    assert found.env.options == {"tokenizer": "assets/countdown_lm"} and found.optim.lr_schedule == "linear"
    for section, keys, expected in FORMER:
        changed = {**now, **keys} if section is None else {**now, section: {**now[section], **keys}}
        path.write_text(yaml.safe_dump(changed))
        assert [operator.attrgetter(key)(saved_config(path)) for key in expected] == [*expected.values()], keys


FORMER: list[tuple[str | None, dict[str, Any], dict[str, Any]]] = [
    (None, {"stop_at_success": 0.9, "stop_at_return": None}, {"stop_at": 0.9}),
    (None, {"stop_at_success": None, "stop_at_return": 0.0}, {"stop_at": 0.0}),
    (
        None,
        {"extra_tasks": [{"task": "a/b", "start_seeds": 8}]},
        {"extra_tasks": ({"task": "a/b", "init_states": "seeds:8"},)},
    ),
    ("env", {"start_seeds": 0}, {"env.init_states": 0}),
    ("env", {"start_seeds": 16}, {"env.init_states": "seeds:16"}),
    (
        "policy",
        {"path": "org/x", "options": {"widths": [4]}},
        {"policy.options": {"widths": [4], "checkpoint": "org/x"}},
    ),
    ("policy", {"path": None}, {"policy.init": None}),
    (
        "policy",
        {"kind": "openvla", "options": {"gradient_checkpointing": True}},
        {"policy.options": {}, "optim.recompute": True},
    ),
    (
        "policy",
        {"kind": "language", "options": {"gradient_checkpointing": False}},
        {"policy.options": {}, "optim.recompute": False},
    ),
    ("policy", {"kind": "a:B", "options": {"gradient_checkpointing": 2}}, {"optim.recompute": False}),
    ("advantage", {"overlong_margin": None, "mask_truncated": False}, {"advantage.overlong": None}),
    ("advantage", {"overlong_margin": 4, "mask_truncated": False}, {"advantage.overlong": 4}),
    ("advantage", {"overlong_margin": None, "mask_truncated": True}, {"advantage.overlong": "masked"}),
    ("reward", {"function": "a:b", "classifier": None}, {"reward.model": "a:b"}),
    ("reward", {"function": None, "classifier": "a/b"}, {"reward.model": "a/b"}),
    ("plan", {"mode": "auto", "file": None}, {"plan.mode": "auto"}),
    ("plan", {"mode": "configured", "file": "plan.json"}, {"plan.mode": Path("plan.json")}),
    ("sft", {"rows": "steps", "only_successes": True, "episodes": []}, {"sft.episodes": ("solved",)}),
    ("sft", {"only_successes": True, "episodes": ["0-9", "all"]}, {"sft.episodes": ("solved:0-9", "solved")}),
    ("eval", {"axes": ["camera"], "event": ["objects:3@2"]}, {"eval.axes": ("camera", "objects:3@2")}),
    ("eval", {"prompt": "intended", "protocol": "libero-pro"}, {"eval.protocol": "libero-pro"}),
    ("eval", {"prompt": "published", "protocol": "libero-pro"}, {"eval.protocol": "libero-pro-published"}),
]
"""Section, its former keys, and the present settings that they become."""


@pytest.mark.parametrize(
    ("section", "keys", "says"),
    [
        ("advantage", {"overlong_margin": 4, "mask_truncated": True}, "are one setting now, overlong"),
        ("env", {"start_seeds": 4, "init_states": 9}, "init_states 9 and start_seeds .* are one setting now"),
        ("reward", {"function": "a:b", "classifier": "c"}, "are one setting now, model"),
        ("sft", {"rows": "decisions"}, "no setting sft.rows any more, .* learns from steps"),
    ],
)
def test_former_settings_that_exclude_each_other_are_refused(
    section: str, keys: dict[str, Any], says: str, begun: Path
) -> None:
    path = begun / "config.yaml"
    now = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**now, section: {**now[section], **keys}}))
    with pytest.raises(UserError, match=rf"config.yaml: .*{says}"):
        saved_config(path)


def test_what_is_typed_is_known_by_its_words() -> None:
    words = [
        "train",
        "reach",
        "--optim.policy-lr=1e-3",
        "--advantage.no-normalise-returns",
        "--policy.options.rows",
        "8",
        "--runtime.address",
    ]
    typed = {"optim.policy_lr", "advantage.normalise_returns", "policy.options.rows", "runtime.address"}
    assert continued.typed_keys([*words, "a:1", "--nothing", "--resume", "auto"]) == typed
    first, second = (
        parse_config({"advantage": {"normalise_returns": on}, "env": {"cameras": ["a", "b"]}}, "")
        for on in (True, False)
    )
    (change,) = continued.changes(first, second)
    assert (
        change.typed == "--advantage.no-normalise-returns"
        and str(change) == "advantage.normalise_returns True -> False"
    )


def test_another_beginning_is_refused_and_one_that_is_gone_says_nothing(begun: Path) -> None:
    (begun.parent / "other").mkdir()
    output = resumed(begun, "--policy.init", str(begun.parent / "other"), "--iterations", "3", status=2)
    assert f"{begun} began from no other policy, and policy.init is" in output and "--policy.init out" in output
    assert "began from" not in resumed(begun, "--policy.init", "nowhere")


def test_a_run_that_goes_back_behind_a_change_keeps_the_settings_of_what_is_left(tmp_path: Path) -> None:
    configs = [parse_config({"optim": {"policy_lr": rate}}, "test") for rate in (1.0, 2.0, 3.0)]
    save_config(configs[1], tmp_path / "config.yaml")
    save_config(configs[0], tmp_path / "config.until-000010.yaml")
    kept = continued.keep_settings(tmp_path, configs[1], configs[2], 5)
    assert kept == tmp_path / "config.until-000005.yaml" and list(tmp_path.glob("config.until*")) == [kept]
    assert saved_config(tmp_path / "config.until-000005.yaml") == configs[0]


def test_the_command_that_is_advised_goes_on_with_the_very_run(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(update: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "finish", stopped)
        output = resumed(begun, "--iterations", "3", status=130)
    (advised,) = re.findall(r"go on with: (embodied train .* --resume auto)", output)
    status, output = here(*shlex.split(advised)[1:])
    assert status == 0, output
    assert [row["iteration"] for row in read(begun)] == [1, 2, 3]
    kept = settings_of("run", begun.parent)
    assert (kept.optim.policy_lr, kept.loss.clip, kept.seed) == (1e-5, 0.05, 7)
    unknown = continued.command(begun, begun.parent, None, kept)
    assert unknown == f"embodied train {begun}/config.yaml --name run --runs-dir {begun.parent} --resume auto"
    assert here(*shlex.split(unknown)[1:])[0] == 0


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    config = parse_config({"env": {"task": "tabletop/reach"}}, "test")
    with ExitStack() as stack:
        opened = [stack.enter_context(open_run_folder(config, "own.yaml", tmp_path, False, "rl")) for _ in range(3)]
        assert len({folder for folder, _ in opened}) == 3


# --- one owner

OWN = """
import sys, time
from pathlib import Path
from embodied.config.files import parse_config
from embodied.run.folder import open_run_folder
config = parse_config({"name": "run"}, "test")
with open_run_folder(config, "test", Path(sys.argv[1]), False, "rl"):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("stage", often(("rl",), ("rl", "sft")))
def test_a_run_has_one_owner_until_its_process_is_killed(stage: str, tmp_path: Path) -> None:
    config = parse_config({"name": "run"}, "test")
    with subprocess.Popen([sys.executable, "-c", OWN, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            while "owned" not in (line := owner.stdout.readline()):
                assert line, "it ended before it owned the run"
            before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
            message = f"process {owner.pid} on {socket.gethostname()} trains into .*run now.*--resume auto.*--name"
            for resume in (False, True):
                with pytest.raises(UserError, match=message), open_run_folder(config, "test", tmp_path, resume, stage):
                    pytest.fail("two processes own the run")
            assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
            assert settings_of("run", tmp_path).name == "run", "it cannot be read meanwhile"
        finally:
            owner.kill()
    with open_run_folder(config, "test", tmp_path, True, "rl") as (run_dir, found):
        assert found is None and json.loads((run_dir / ".owner").read_text())["process"] == os.getpid()


# --- interruptions


@dataclass
class Interrupted(LocalHandle[Any]):
    """Sends this process a Ctrl-C just before or just after the `count`-th call of `method`."""

    method: str = ""
    count: int = 0
    after: bool = False

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._start(method.__name__, args, kwargs)

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count -= method == self.method
        due = method == self.method and self.count == 0
        if due and not self.after:
            signal.raise_signal(signal.SIGINT)
        result = super()._start(method, args, kwargs)
        if due and self.after:
            signal.raise_signal(signal.SIGINT)
        return result


class InterruptedRuntime(InlineRuntime):
    def __init__(self, method: str, count: int, after: bool) -> None:
        super().__init__(60.0)
        self._fault: dict[str, Any] = {"method": method, "count": count, "after": after}

    def start(self, name: str, make: Callable[..., Any], *args: Any, beside: Any = None) -> Interrupted:
        return Interrupted(name, self.deadline, worker=make(*args), **self._fault)


CALLS = ("rollout", "trajectories", "receive", "finish", "weights", "load_weights", "snapshot", "save")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations with checkpoints after the third and the last."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(config_of(STATES, 4), folder)
    return folder


# After a call is before the next one.
@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"])
@pytest.mark.parametrize("method", CALLS)
def test_a_run_interrupted_at_any_call_goes_on_as_if_it_had_not_been(
    method: str, after: bool, whole: Path, tmp_path: Path
) -> None:
    config, folder = config_of(STATES, 4), tmp_path / "run"
    prepare_run(config, folder, resume=False)
    runtime = InterruptedRuntime(method, 1 if method == "save" else 2, after)
    with pytest.raises(KeyboardInterrupt):
        training.train(RunSpec.of(config), folder, Session(config, runtime, (0,)), None)
    found = prepare_run(config, folder, resume=True)
    kept = checkpoint.read_state(found).iteration if found else 0
    recorded = [row["iteration"] for row in read(folder)]
    assert recorded == list(range(1, kept + 1)), f"iteration {kept} is kept, {recorded} are recorded"
    with open_session(config) as session:
        training.train(RunSpec.of(config), folder, session, found)
    assert_same_run(folder, whole)
