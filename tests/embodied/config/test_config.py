"""The configuration: what is refused and how it says so, and that its surface does not change unnoticed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from embodied.config.files import (
    CONFIGS,
    all_settings,
    former_settings,
    load_config,
    parse_config,
    save_config,
    saved_config,
    with_settings,
)
from embodied.config.schema import JOINED, Config
from embodied.errors import UserError
from embodied.files import yaml_text

PINNED_KEYS = Path(__file__).parent / "config_keys.txt"


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse_config(data, "here.yaml")
    message = str(caught.value)
    assert message.startswith("here.yaml: "), "the message does not say where the mistake is"
    assert "pydantic" not in message and "\n" not in message, f"not one sentence for a user: {message!r}"
    return message


# --- the surface is frozen


def test_the_keys_are_those_of_the_pinned_list() -> None:
    """Adding or removing a key changes what users may write: it belongs into config_keys.txt in the same commit."""
    assert sorted(all_settings()) == PINNED_KEYS.read_text().split()


def test_every_key_says_what_it_means() -> None:
    assert not [key for key, field in all_settings().items() if not field.description]


# --- what is refused


@pytest.mark.parametrize(
    ("data", "given", "nearest"),
    [
        ({"loss": {"clpi": 0.1}}, "loss.clpi", "loss.clip"),
        ({"advantage": {"lambda": 0.9}}, "advantage.lambda", "advantage.lam"),
        ({"optim": {"minibatch_size": 4}}, "optim.minibatch_size", "optim.minibatch"),
        ({"env": {"num_env": 4}}, "env.num_env", "env.num_envs"),
        ({"iteration": 4}, "iteration", "iterations"),
        ({"farm": {"physics_worker": 2}}, "farm.physics_worker", "farm.physics_workers"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(data: dict[str, Any], given: str, nearest: str) -> None:
    message = refusal(data)
    assert f"unknown key '{given}'" in message
    suggested = re.findall(r"[\w.]+", message.partition("did you mean ")[2])
    assert nearest in suggested, message


def test_a_key_without_a_likeness_is_refused_with_all_valid_ones() -> None:
    message = refusal({"zzzz": 1})
    assert all(key in message for key in all_settings())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("iterations", "many"),
        ("iterations", 0),
        ("iterations", 2.5),
        ("seed", -1),
        ("seed", 2**31),
        ("optim", 3),
        ("advantage.gamma", 1.5),
        ("loss.clip", 0),
        ("advantage.bootstrap", "sometimes"),
        ("loss.ratio_unit", "token"),
        ("env.reward", "rich"),
        ("env.num_envs", [4]),
        ("env.image_size", 8),
        ("policy.options", 3),
        ("policy.device", "gpu"),
        ("policy.device", "cuda:first"),
        ("runtime.mode", "threads"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    message = refusal({section: {name: value}} if section else {name: value})
    assert f"{key}: " in message and f"(got {value!r})" in message


def test_a_wrong_item_of_a_list_is_refused_with_its_place() -> None:
    assert "policy.reads.1: " in refusal({"policy": {"reads": ["state", "sound"]}})


def test_every_mistake_is_named_at_once() -> None:
    message = refusal({"seed": -1, "advantage": {"lamm": 1, "gamma": 2}, "ppo": {"clip": 3}})
    assert all(key in message for key in ("seed", "advantage.lamm", "advantage.gamma", "ppo"))


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValidationError):
        Config().advantage.gamma = 2.0  # type: ignore[misc]


# --- files


def test_a_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = parse_config(
        {
            "name": "a run: with colon", "seed": 3, "stop_at": 0.9,
            "env": {"task": "tabletop/push", "max_episode_steps": 30, "control_mode": None},
            "policy": {"reads": ["proprio", "images"], "options": {"widths": [8, 8], "initial_log_std": -0.5}},
            "loss": {"clip_high": 0.28, "value_clip": None}, "optim": {"target_kl": 1e-7},
        },
        "test",
    )  # fmt: skip
    save_config(config, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml")) == config


def test_a_saved_configuration_holds_every_key_so_that_later_defaults_change_nothing(tmp_path: Path) -> None:
    save_config(Config(), tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())

    def keys(data: dict[str, Any], prefix: str = "") -> list[str]:
        found: list[str] = []
        for name, value in data.items():
            nested = isinstance(value, dict) and f"{prefix}{name}" not in all_settings()
            found += keys(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
        return found

    assert sorted(keys(saved)) == sorted(all_settings())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_loads_by_its_name(path: Path) -> None:
    config = load_config(path.stem)
    assert config == load_config(str(path))
    assert config != Config(), "it says nothing"


def test_a_setting_that_joined_another_is_named_with_that() -> None:
    for former, present in JOINED.items():
        *sections, last = former.split(".")
        data = {sections[0]: {last: "x"}} if sections else {last: "x"}
        assert f"unknown key '{former}'; it is {present} now" in refusal(data)
        key = present.partition(" ")[0]
        assert former not in all_settings() and (key in all_settings() or key.startswith("policy.options."))


def test_an_unknown_configuration_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match="no configuration 'pushcub'; did you mean .*pushcube"):
        load_config("pushcub")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no configuration"):
        load_config(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(("text", "reason"), [("loss: {clip: 1", "not valid YAML"), ("- 1\n- 2\n", "keys and values")])
def test_a_file_that_is_no_mapping_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=reason) as caught:
        load_config(str(path))
    assert str(path) in str(caught.value)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(str(path)) == Config()


def test_a_copy_is_checked_as_a_file_is() -> None:
    config = Config()
    assert config.env.model_copy(update={"num_envs": 3}).num_envs == 3
    for section, update, says in (
        (config.env, {"num_env": 3}, "EnvConfig: unknown key 'num_env'; did you mean num_envs"),
        (config.env, {"num_envs": "many"}, "EnvConfig: num_envs: .*got 'many'"),
        (config, {"optim": {"lr": 1.0}}, "Config: unknown key 'optim.lr'"),
    ):
        with pytest.raises(UserError, match=says):
            section.model_copy(update=update)


def test_settings_are_changed_by_their_keys() -> None:
    changed = with_settings(Config(), {"optim.policy_lr": 1e-4, "seed": 3, "policy.options.widths": [8]}, "here")
    assert (changed.optim.policy_lr, changed.seed, changed.policy.options) == (1e-4, 3, {"widths": [8]})
    for key in ("optim.policy_rl", "optima.policy_lr", "seed.policy_lr"):
        with pytest.raises(UserError, match=f"here: unknown key '{key}'"):
            with_settings(Config(), {key: 1}, "here")


def test_former_settings_of_further_tasks_follow_the_rule_of_env(tmp_path: Path) -> None:
    """A resumed run's file may have them in `extra_tasks` as well."""
    path = tmp_path / "config.yaml"
    data = Config().model_dump(mode="json")
    data["env"] |= {"options": {"files": "a"}, "tokenizer": "first", "randomise_levels": "1-5"}
    blue = {"task": "tabletop/reach_blue"}
    data["extra_tasks"] = [
        {**blue, "tokenizer": "second", "randomise_levels": "1-5"},
        {**blue, "options": {}, "tokenizer": "third"},
    ]
    path.write_text(yaml_text(data))
    assert former_settings(path) == ["env.randomise_levels", "extra_tasks[0].randomise_levels"]
    found = saved_config(path)
    assert dict(found.env.options) == {"files": "a", "tokenizer": "first"}
    assert found.extra_tasks == (
        {**blue, "options": {"files": "a", "tokenizer": "second"}},
        {**blue, "options": {"tokenizer": "third"}},
    )
    data["extra_tasks"][1]["randomise_levels"] = "1-3"
    path.write_text(yaml_text(data))
    with pytest.raises(UserError, match=r"extra_tasks\[1\]\.randomise_levels is '1-3', and there is no such setting"):
        saved_config(path)
