"""A run's folder may come from elsewhere: the code that its configuration names is not run unless the user names it."""

from __future__ import annotations

import base64
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import embodied
import policies
from embodied.cli import _parse, main
from embodied.commands.train import Arguments
from embodied.config.files import load_config, parse_config, save_config
from embodied.config.schema import KEYS, Config
from embodied.errors import UserError
from embodied.evaluation.provenance import lineage
from embodied.run.saved_settings import settings_of
from policies.contract import PolicyError
from tests.embodied.support.evaluations import trained

EVIL = """
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
from embodied.workflows import PPO as MINE
def judge(frames, instructions): ...
"""
WORKFLOW, REWARD = "from_elsewhere:MINE", "from_elsewhere:judge"
POLICY, SIMULATOR = "from_elsewhere:Policy", "from_elsewhere:BACKEND"
NAMED: dict[str, tuple[dict[str, Any], str, str]] = {
    "workflow": ({"workflow": WORKFLOW}, WORKFLOW, f"--workflow {WORKFLOW}"),
    "policy.kind": ({"policy": {"kind": POLICY}}, POLICY, f"--policy.kind {POLICY}"),
    "env.task": ({"env": {"task": f"{SIMULATOR}/reach"}}, SIMULATOR, f"--env.task {SIMULATOR}/reach"),
    "extra_tasks": (
        {"extra_tasks": [{"task": f"{SIMULATOR}/reach"}]}, SIMULATOR, f"--extra_tasks '{{task: '{SIMULATOR}/reach'}}'",
    ),
    "eval.tasks": (
        {"eval": {"tasks": ["tabletop/reach", f"tabletop,{SIMULATOR}"]}},
        SIMULATOR, f"--eval.tasks tabletop/reach tabletop,{SIMULATOR}",
    ),
}  # fmt: skip
"""By the setting's key: what names code there, the code, and how it is typed."""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether the code that came with a run has run in this process."""
    (tmp_path / "from_elsewhere.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "from_elsewhere", raising=False)
    return (tmp_path / "from_elsewhere.ran").exists


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs"), "run", seed=1)


def naming(run: Path, key: str) -> Config:
    """Have the run's configuration name code at the key."""
    data = settings_of(str(run), Path(), [WORKFLOW, SIMULATOR, POLICY]).model_dump(mode="json")
    for section, value in NAMED[key][0].items():
        data[section] = data[section] | value if isinstance(value, dict) else value
    config = parse_config(data, "test")
    save_config(config, run / "config.yaml")
    return config


@pytest.fixture
def named(whole_run: Path) -> Iterator[Path]:
    """A run with a checkpoint, whose configuration is as it was again after the test."""
    text = (whole_run / "config.yaml").read_text()
    yield whole_run
    (whole_run / "config.yaml").write_text(text)


@pytest.fixture
def downloaded(named: Path) -> Path:
    """A run with a checkpoint whose configuration names a module's workflow."""
    naming(named, "workflow")
    return named


@pytest.mark.parametrize("verb", ["eval", "record", "train", "sft", "plan", "profile", "compare"])
@pytest.mark.parametrize("key", NAMED)
def test_no_verb_runs_the_code_that_a_runs_folder_names(
    key: str, verb: str, named: Path, tmp_path: Path, ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    naming(named, key)
    _, name, typed = NAMED[key]
    run = named if verb in ("eval", "record") else named / "config.yaml"
    assert main([verb, str(run), "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert f"names code that would be run: {key}: {name}" in output and f"type {typed.split()[0]} " in output
    assert "Traceback" not in output and not ran()


@pytest.mark.parametrize("key", NAMED)
def test_what_the_message_says_to_type_is_taken(key: str, named: Path, ran: Any) -> None:
    config = naming(named, key)
    _, name, typed = NAMED[key]
    words = shlex.split(config.typed(key))
    assert words[0] == typed.split()[0]
    found = _parse("train", Arguments, str(named / "config.yaml"), [str(named / "config.yaml"), *words])
    assert found.settings == config and not ran(), "it is named, and nothing has used it yet"
    assert load_config(str(named / "config.yaml"), [name]) == config
    with pytest.raises(UserError, match="names code"):
        load_config(str(named / "config.yaml"), [f"{name}S"])


def test_a_further_task_is_a_text_from_the_beginning(tmp_path: Path) -> None:
    """Binary data would be made one, and name code, after everybody was asked."""
    hidden = base64.b64encode(f"{SIMULATOR}/reach".encode()).decode()
    for task, message in ((f"!!binary {hidden}", "is a bytes to YAML"), ("7", "the task is a text")):
        (tmp_path / "mine.yaml").write_text(f"extra_tasks: [{{task: {task}}}]")
        with pytest.raises(UserError, match=message):
            load_config(str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match="the task is a text"):
        parse_config({"extra_tasks": [{"task": f"{SIMULATOR}/reach".encode()}]}, "test")


def test_a_simulator_is_allowed_by_any_of_its_tasks(named: Path, ran: Any) -> None:
    naming(named, "eval.tasks")
    for allowed in (f"{SIMULATOR}/another", f"tabletop,{SIMULATOR}/x", SIMULATOR):
        assert load_config(str(named / "config.yaml"), [allowed]).named_code == {SIMULATOR: "eval.tasks"}
    assert not ran()


def test_a_checkpoint_s_kind_is_not_imported_unless_it_is_named(named: Path, tmp_path: Path, ran: Any) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(named / "checkpoints/000001", folder)
    config = folder / "policy/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"kind": POLICY}))
    with pytest.raises(PolicyError, match=rf"names code that would be run: the kind '{POLICY}'.*code=\['{POLICY}'\]"):
        policies.load(folder)
    assert main(["inspect", str(folder)]) == 0
    assert not ran()
    with pytest.raises(PolicyError, match="has no Policy"):
        policies.load(folder, code=[POLICY])
    assert ran()


def test_a_dataset_s_task_is_not_imported(named: Path, tmp_path: Path, ran: Any, capsys: Any) -> None:
    data = tmp_path / "demos"
    assert main(["record", str(named), "--out", str(data), "--episodes", "1"]) == 0
    about = data / "meta/embodied.json"
    about.write_text(about.read_text().replace("tabletop/reach", f"{SIMULATOR}/reach"))
    assert main(["inspect", str(data), "--out", str(tmp_path / "out")]) == 0
    assert f"not compared with {SIMULATOR}/reach: it names code" in " ".join(capsys.readouterr().out.split())
    assert not ran()


def test_nor_is_the_policy_of_a_run_that_another_began_from(named: Path, tmp_path: Path, ran: Any) -> None:
    naming(named, "policy.kind")
    (tmp_path / "mine.yaml").write_text(f"policy: {{init: {named}}}")
    mine = load_config(str(tmp_path / "mine.yaml"))
    assert lineage(None, mine.policy).reinforced and not ran()


def test_nor_where_a_run_is_compared_with_another(
    downloaded: Path, tmp_path: Path, ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "tabletop_scripted", "--runtime.mode", "inline", "--against", str(downloaded), "--eval.episodes"]
    assert main([*command, "2", "--runs-dir", str(tmp_path)]) == 2
    assert "names code that would be run" in capsys.readouterr().err and not ran()


def test_code_that_the_user_types_is_run(downloaded: Path, tmp_path: Path, ran: Any) -> None:
    short = ["--iterations", "1", "--eval.episodes", "2", "--eval.videos", "0", "--runs-dir", str(tmp_path)]
    for name, typed in (("apart", ["--workflow", WORKFLOW]), ("joined", [f"--workflow={WORKFLOW}"])):
        assert main(["train", str(downloaded / "config.yaml"), "--name", name, *short, *typed]) == 0
    assert ran()


def test_an_evaluation_runs_no_workflow(downloaded: Path, tmp_path: Path, ran: Any) -> None:
    command = ["eval", str(downloaded), "--runs-dir", str(tmp_path), "--folder", str(tmp_path / "eval")]
    assert main([*command, "--eval.episodes", "2", "--workflow", WORKFLOW]) == 0
    assert not ran()


def test_other_code_than_the_runs_allows_nothing(downloaded: Path, ran: Any) -> None:
    with pytest.raises(UserError, match="names code"):
        embodied.evaluate(downloaded, code=["from_elsewhere:OTHER"])
    assert not ran()
    assert settings_of(str(downloaded), Path(), [WORKFLOW]).named_code == {WORKFLOW: "workflow"}


def test_a_reward_function_is_code_too(downloaded: Path, ran: Any) -> None:
    data = settings_of(str(downloaded), Path(), [WORKFLOW]).model_dump(mode="json")
    data |= {"workflow": "ppo_reward", "reward": {"model": REWARD}}
    save_config(parse_config(data, "test"), downloaded / "config.yaml")
    with pytest.raises(UserError, match=rf"reward.model: {REWARD}.*type --reward.model {REWARD} as well"):
        load_config(str(downloaded / "config.yaml"))
    assert load_config(str(downloaded / "config.yaml"), [REWARD]).reward.model == REWARD
    assert not ran()


def test_a_configuration_of_the_users_own_may_name_code(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"workflow: {WORKFLOW}\n")
    assert load_config(str(tmp_path / "mine.yaml")).workflow == WORKFLOW


def test_every_setting_whose_meaning_is_code_is_known() -> None:
    """By the words that document it: `package.module:NAME`."""

    def documented(model: Any, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found += documented(field.annotation, f"{prefix}{name}.")
            elif "package.module:" in (field.description or ""):
                found.append(f"{prefix}{name}")
        return found

    assert set(documented(Config)) == set(KEYS)
