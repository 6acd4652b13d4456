"""Old keys: a run folder and a profile that the version before wrote are opened; a person's old keys are refused.

`old_run/` was written by `embodied train` of version 1 (two iterations, two environments), `old_plan/` by its
`embodied profile` and `embodied plan` of `reach` with four environments and eight decisions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import schedulers
from embodied import cli, migration
from embodied.commands.evaluate import evaluate_run
from embodied.commands.export import export_run
from embodied.commands.report import report_runs
from embodied.commands.train import train_run
from embodied.config.files import all_settings, load_config, parse_config, save_config, saved_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.planning.profiler import in_todays_keys, work_of
from embodied.planning.run_plans import checked_profile, sized_workflow
from embodied.reporting.run_record import read_run
from embodied.run import checkpoint
from embodied.run.folder import settings_of
from policies.contract import PolicyError
from schedulers import Plan

HERE = Path(__file__).parent
OLD_RUN, OLD_PLAN = HERE / "old_run", HERE / "old_plan"
KNOWN = list(all_settings())


def with_value(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs with a copy of the old one."""
    shutil.copytree(OLD_RUN, tmp_path / "runs" / "old_run")
    return tmp_path / "runs"


# --- the map


@pytest.mark.parametrize(("old", "new"), migration.RENAMED.items())
def test_every_old_key_has_a_key_of_today(old: str, new: str) -> None:
    assert new in KNOWN and old not in KNOWN


def test_every_value_of_a_saved_configuration_is_kept() -> None:
    """Each by today's name, and `normalise_advantages` as a word; what is new has its default."""
    old = yaml.safe_load((OLD_RUN / "config.yaml").read_text())
    expected = Config().model_dump(mode="json")
    for section, value in old.items():
        for name, item in value.items() if isinstance(value, dict) else [("", value)]:
            key = f"{section}.{name}".rstrip(".")
            place, _, last = migration.RENAMED.get(key, key).rpartition(".")
            (expected[place] if place else expected)[last] = item
    expected["advantage"]["normalise"] = "task"
    assert settings_of(str(OLD_RUN), Path()).model_dump(mode="json") == expected


@pytest.mark.parametrize(("old", "new"), [(True, "task"), (False, "none")])
def test_whether_advantages_were_normalised_is_kept(old: bool, new: str) -> None:
    found = migration.migrate({"ppo": {"normalise_advantages": old}})
    assert found == {"advantage": {"normalise": new}, "version": migration.VERSION}


def test_a_configuration_of_today_is_not_changed(tmp_path: Path) -> None:
    save_config(load_config("reach_grpo"), tmp_path / "config.yaml")
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert data["version"] == migration.VERSION and migration.migrate(data) == data
    assert saved_config(tmp_path / "config.yaml") == load_config("reach_grpo")


@pytest.mark.parametrize("version", [1, 2])
def test_conventions_of_a_policy_become_transforms(version: int) -> None:
    old = {"rotate_images": True, "gripper": "libero", "checkpoint": "here"}
    found = migration.migrate({"version": version, "policy": {"kind": "openvla", "options": old}})
    turned, gripper = {"kind": "turn_images"}, {"kind": "gripper", "convention": "libero"}
    assert found["policy"]["options"] == {"checkpoint": "here", "transforms": [turned, gripper]}


def test_what_is_given_is_not_changed_in_place() -> None:
    data = {"ppo": {"clip": 0.1}, "farm": {"stages": 3}}
    migration.migrate(data)
    assert data == {"ppo": {"clip": 0.1}, "farm": {"stages": 3}}


# --- an old run's folder


def test_an_old_run_is_evaluated(runs: Path) -> None:
    result = evaluate_run("old_run", settings_of("old_run", runs), None, runs)
    assert result["episodes"] == 4 and result["checkpoint"].endswith("000002")
    was = json.loads((OLD_RUN / "eval.json").read_text())
    assert result["return"] == pytest.approx(was["return"], rel=1e-3)


def test_an_old_run_goes_on_as_one_that_did_not_stop(runs: Path) -> None:
    config = load_config(str(runs / "old_run" / "config.yaml")).model_copy(update={"iterations": 3})
    train_run(config, "old_run", runs, resume=True)
    train_run(config.model_copy(update={"name": "whole"}), "whole", runs, resume=False)
    found, whole = (checkpoint.latest(runs / name / "checkpoints") for name in ("old_run", "whole"))
    assert found is not None and whole is not None and found.name == whole.name == "000003"
    for name in ("policy/model.safetensors", "value_head.safetensors", "optimizer.safetensors"):
        expected = load_file(whole / name)
        for key, tensor in load_file(found / name).items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")
    saved = yaml.safe_load((runs / "old_run" / "config.yaml").read_text())
    assert saved["version"] == migration.VERSION and saved_config(runs / "old_run" / "config.yaml") == config


def test_an_old_run_is_reported(runs: Path) -> None:
    found = read_run(runs / "old_run")
    assert "config.yaml" not in found.missing and found.config["loss"]["clip"] == 0.25
    assert len(found.rows) == 2 and len(found.evals) == 1
    assert Path(report_runs(["old_run"], runs)["report"]).is_file()


def test_a_checkpoint_of_an_old_run_is_where_another_begins(runs: Path) -> None:
    config = saved_config(OLD_RUN / "config.yaml").model_copy(update={"name": "next", "iterations": 1})
    policy = config.policy.model_copy(update={"init": runs / "old_run"})
    result = train_run(config.model_copy(update={"policy": policy}), "next", runs, resume=False)
    assert result["env_steps"] == 16


def test_the_policy_of_an_old_run_is_found_for_export(runs: Path, tmp_path: Path) -> None:
    """This policy has no other layout, and says so: its checkpoint was read."""
    with pytest.raises(PolicyError, match="gaussian_mlp has no layout"):
        export_run("old_run", None, tmp_path / "out", runs)


# --- an old profile and plan


def reach(**optim: Any) -> Config:
    whole = load_config("reach").model_dump(mode="json")
    whole["env"] |= {"num_envs": 4}
    whole["rollout"] |= {"decisions": 8}
    whole["optim"] |= optim
    return parse_config(whole, "test")


def test_an_old_profile_belongs_to_the_same_settings_and_to_no_others() -> None:
    config = reach()
    profile = checked_profile(OLD_PLAN / "profile.json", config, sized_workflow(config), any_hardware=True)
    assert set(profile.components) == {"physics", "policy", "learner"}
    with pytest.raises(UserError, match="other settings of optim:"):
        checked_profile(OLD_PLAN / "profile.json", reach(epochs=3), sized_workflow(config), any_hardware=True)
    assert in_todays_keys(profile.fingerprint) == profile.fingerprint


def test_a_profile_from_before_a_key_was_there_belongs_to_its_default() -> None:
    today = work_of(reach())
    rollout = json.loads(today["work.rollout"])
    before = {**today, "work.rollout": json.dumps({k: v for k, v in rollout.items() if k != "curriculum"})}
    assert rollout.pop("curriculum") == 0 and in_todays_keys({"cpu": "x", **before}) == {"cpu": "x", **today}
    without = {key: value for key, value in today.items() if key not in ("work.extra_tasks", "work.loss")}
    assert in_todays_keys(without) == {key: value for key, value in today.items() if key != "work.loss"}


def test_an_old_plan_is_read() -> None:
    plan = schedulers.load(Plan, OLD_PLAN / "plan.json")
    assert {name for phase in plan.phases for p in phase.placements for name in p.components} == {
        "physics", "policy", "learner",
    }  # fmt: skip


# --- a person's old keys


@pytest.mark.parametrize(("old", "new"), migration.RENAMED.items())
def test_an_old_key_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(UserError, match=r"here\.yaml: ") as caught:
        parse_config(with_value(old, 1), "here.yaml")
    assert old in str(caught.value) and new in str(caught.value)


def test_a_section_that_is_no_more_says_where_its_keys_are() -> None:
    with pytest.raises(UserError) as caught:
        parse_config({"ppo": {"decisions": 8, "clpi": 0.1}, "seed": -1}, "here.yaml")
    said = "ppo: its keys are in rollout, advantage, loss and optim now: ppo.decisions -> rollout.decisions, "
    assert f"{said}ppo.clpi -> loss.clip?" in str(caught.value)
    assert "seed: " in str(caught.value), "the other mistake is not named"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ppo.clip", "0.1"], "ppo.clip is loss.clip now"),
        (["--ppo.clip=0.1", "--farm.stages", "1"], "ppo.clip is loss.clip now; farm.stages is farm.groups now"),
        (["--group.max-waves", "3"], "group.max_waves is rollout.max_episodes_per_env now"),
        (["--ppo.no-normalise-advantages"], "ppo.normalise_advantages is advantage.normalise now (true -> task, "),
        (["--learner.minibatches", "3"], "learner: its keys are in optim now: learner.minibatches -> optim.minibatch?"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "profile"])
def test_an_old_option_is_refused_with_the_new_one(
    verb: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, "reach", *arguments]) == 2
    assert said in capsys.readouterr().err


# --- versions


@pytest.mark.parametrize("version", [migration.VERSION + 1, 0, "two", None])
def test_a_version_that_is_not_known_is_refused(version: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"version": version, "seed": 3}))
    for read in (saved_config, lambda path: load_config(str(path))):
        with pytest.raises(UserError, match=f"config.yaml: version {version!r} .* only 1 to {migration.VERSION}"):
            read(path)
