"""The law of settings: one that nothing in a run reads is refused, for every setting and every workflow."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import embodied
from embodied import cli
from embodied.algorithms.estimators import gae
from embodied.commands.evaluate import evaluate_run
from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import all_settings, parse_config
from embodied.config.schema import Config, Section
from embodied.errors import UserError
from embodied.metric import undeclared
from embodied.reporting import metrics
from embodied.training.declared_metrics import COUNTS, TRAINING
from embodied.workflows.recipes import PPO, RECIPES
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.unread import DEFAULTS, READERS, VERBS, changed_settings, check_read, check_unread
from tests.variants import often

SMALL: dict[str, Any] = {
    "seed": 2,
    "iterations": 1,
    "env": {"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 4},
    "policy": {"options": {"widths": [8]}},
    "rollout": {"decisions": 4},
    "optim": {"epochs": 1, "minibatch": 4},
    "eval": {"episodes": 2, "videos": 0},
    "runtime": {"mode": "inline"},
}
EPISODES: dict[str, Any] = {"rollout": {"episode_group": 2}}
RETURNS: dict[str, Any] = {"advantage": {"outcome": "return"}}
"""Untrained policies solve nothing: compared by success, no episode group would tell anything."""
IMAGES: dict[str, Any] = {
    "env": {**SMALL["env"], "cameras": 1, "image_size": 32},
    "policy": {
        "kind": "flow",
        "reads": ["images", "proprio", "instruction"],
        "options": {"encoder": "cnn", "features": 8, "widths": [8], "critic_widths": [8]},
    },
}
OF_WORKFLOWS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {**EPISODES, **RETURNS},
    "reinforce": EPISODES,
    "stepnft": {
        **EPISODES,
        "policy": {"kind": "flow", "options": {"widths": [8], "critic_widths": [8], "steps": 2}},
        "loss": {"ratio_unit": "action"},
    },
    "ppo_reference": {"loss": {"reference_kl": 0.1}},
    "grpo_reference": {**EPISODES, **RETURNS, "loss": {"reference_kl": 0.1}},
    "reinforce_reference": {**EPISODES, "loss": {"reference_kl": 0.1}},
    "ppo_reward": {**IMAGES, "reward": {"model": f"{__name__}:bright"}},
}
PLACED = {
    *("farm.physics_workers", "farm.render_workers", "farm.nodes", "farm.devices"),
    *("optim.ranks", "optim.sharding", "policy.device", "policy.replicas"),
    *("runtime.address", "runtime.deadline_s", "runtime.mode", "runtime.worker_gb"),
}
"""Say where something is computed, and never what: a run inline has all in one process, and one with a plan the plan's.
They may stand in a configuration whatever runs it."""
OF_OTHER_COMMANDS = {key for key in all_settings() if key.startswith("sft.")}
"""A configuration serves `embodied sft` and `embodied train`."""


def bright(frames: dict[str, Any], instructions: list[str]) -> Any:
    return next(iter(frames.values())).float().mean((1, 2, 3))


def config_of(workflow: str, **changes: Any) -> Config:
    return parse_config({**SMALL, **OF_WORKFLOWS[workflow], "workflow": workflow, **changes}, "test")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Keys of the settings that are read from here on, but for what only checks them."""
    found: set[str] = set()
    sections = {type(getattr(DEFAULTS, name)): name for name, field in Config.model_fields.items()}
    plain = Section.__getattribute__

    def noted(self: Section, name: str) -> Any:
        if name in type(self).model_fields:
            section = sections.get(type(self))
            found.add(name if isinstance(self, Config) else f"{section}.{name}")
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", noted)
    return found


OFTEN = ("grpo", "ppo", "ppo_reward", "reinforce_reference", "stepnft")
"""Between them all that reads settings; the others combine the same."""


@pytest.mark.parametrize("workflow", often(OFTEN, sorted(OF_WORKFLOWS)))
def test_a_setting_is_read_or_refused(workflow: str, read: set[str], tmp_path: Path) -> None:
    train_run(config_of(workflow, name="law"), "law", tmp_path, resume=False)
    unread = set(all_settings()) - read - PLACED - OF_OTHER_COMMANDS
    refused = {key for reader in READERS for key in reader.settings}
    assert unread <= refused, f"{workflow} does not read them, and does not refuse them"
    (row,) = metrics.read(tmp_path / "law")  # the law of metrics, of the same run
    assert not undeclared(row, (*COUNTS, *TRAINING))


@pytest.mark.parametrize("workflow", sorted(OF_WORKFLOWS))
def test_what_a_workflow_does_not_read_is_named_with_a_remedy(workflow: str) -> None:
    plain, recipe = config_of(workflow), RECIPES[workflow]
    check_unread(RunSpec.of(plain))
    for reader in READERS:
        if not reader.there(plain, recipe):
            for key in reader.settings:
                section, _, name = key.partition(".")
                data = plain.model_dump(mode="json")
                data[section][name] = another(key)
                with pytest.raises(
                    UserError, match=f"{key} is .* has no {reader.name}, .*set workflow|{reader.remedy}"
                ):
                    check_unread(RunSpec.of(parse_config(data, "test")))


def test_every_reader_is_had_somewhere() -> None:
    for reader in READERS:
        had = [reader.there(config_of(workflow), RECIPES[workflow]) for workflow in OF_WORKFLOWS]
        assert reader.remedy or (any(had) and not all(had)), reader


def test_one_message_names_all_of_them() -> None:
    changes = {"advantage": {"gamma": 0.9, "lam": 0.9}, "loss": {"value_coef": 1.0}}
    with pytest.raises(UserError) as caught:
        check_unread(RunSpec.of(config_of("grpo", **changes)))
    for key in (
        "advantage.gamma is 0.9 and advantage.lam is 0.9",
        "--advantage.gamma 0.99 --advantage.lam 0.95",
        "value_coef",
    ):
        assert key in str(caught.value)


def test_an_estimator_of_ones_own_may_read_what_it_likes() -> None:
    check_unread(
        RunSpec.of(
            parse_config({"workflow": f"{__name__}:OWN", "advantage": {"scale": "batch", "baseline": "group"}}, "test")
        )
    )


OWN = replace(PPO, name="own", estimator=gae)


def another(key: str) -> Any:
    """A value of the setting other than its default."""
    section, _, name = key.partition(".")
    default = getattr(getattr(DEFAULTS, section), name)
    for value in (
        True,
        3,
        0.5,
        64,
        "truncated",
        "always",
        "action",
        "run",
        "return",
        "batch",
        "group",
        "episode",
        "stock",
    ):
        with suppress(UserError):
            found = parse_config({section: {name: value}}, "test")
            if getattr(getattr(found, section), name) != default:
                return value
    return {"reward.model": "a:b", "advantage.keep_rates": [0.1, 0.9]}.get(key, "somewhere")


def test_there_is_a_run_of_every_workflow() -> None:
    assert set(OF_WORKFLOWS) == set(RECIPES)


# --- commands


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a recording of its policy, on which the other commands work."""
    folder = tmp_path_factory.mktemp("commands")
    train_run(config_of("ppo", name="run"), "law", folder, resume=False)
    record_run(str(folder / "run"), config_of("ppo"), None, folder / "demos", 3, False, folder)
    return folder


@pytest.mark.parametrize("verb", ["eval", "record", "sft"])
def test_what_a_command_does_not_read_is_refused_when_it_is_typed(verb: str, recorded: Path, read: set[str]) -> None:
    config = config_of("ppo", sft={"data": [str(recorded / "demos")], "steps": 1, "holdout": 0.4}, name=verb)
    read.clear()
    if verb == "eval":
        evaluate_run(str(recorded / "run"), config, None, recorded)
    elif verb == "record":
        record_run(str(recorded / "run"), config, None, recorded / "more", 1, False, recorded)
    else:
        sft_run(config, "law", recorded, resume=False)
    never = {key for key in all_settings() if key not in read and not key.startswith("env.")} - PLACED
    assert {key for key in never if key in VERBS[verb]} <= CONDITIONAL


CONDITIONAL = {"eval.tasks", "policy.init"}
"""Read where a protocol, a suite or a checkpoint is named."""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["sft", "reach", "--optim.epochs", "2"], "moments, max_grad_norm, ranks, sharding; read by `embodied train`"),
        (["eval", "reach", "--iterations", "3"], "`embodied eval` does not read iterations (3): leave it out"),
        (["eval", "reach", "--policy.replicas", "2"], "does not read policy.replicas (2)"),
        (["record", "reach", "--out", "demos", "--eval.episodes", "5"], "of eval it reads init_states, greedy"),
        (["serve", "reach", "--eval.greedy", "False"], "does not read eval.greedy (False)"),
        (["train", "reach", "--sft.steps", "4"], "read by `embodied sft`"),
        (["train", "reach", "--sweep", "sft.steps=4,5"], "`embodied train` does not read sft.steps ([4, 5])"),
        (["inspect", "demos", "--config", "reach", "--sft.lr", "1"], "does not read sft.lr (1.0)"),
        (["plan", "reach", "--eval.episodes", "3"], "does not read eval.episodes (3)"),
    ],
)  # fmt: skip
def test_the_message_names_what_is_read(command: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_what_is_typed_as_it_is_anyway_is_no_mistake() -> None:
    assert changed_settings(DEFAULTS, DEFAULTS) == {}
    check_read("sft", {"sft.lr": 1.0, "policy.options.widths": [8]})


def test_from_python_too() -> None:
    with pytest.raises(UserError, match="`embodied train` does not read sft.lr"):
        embodied.train("reach", {"sft.lr": 0.1})
    with pytest.raises(UserError, match="`embodied record` does not read iterations"):
        embodied.record("reach", "demos", {"iterations": 3})
