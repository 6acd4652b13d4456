"""A run's folder may come from elsewhere: the code that its configuration names is not run unless the user names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import embodied
from embodied.cli import main
from embodied.config.files import load_config, parse_config, save_config
from embodied.config.schema import KEYS
from embodied.errors import UserError
from embodied.run.saved_settings import settings_of
from tests.embodied.evaluations import trained

EVIL = """
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
from embodied.workflows import PPO as MINE
def judge(frames, instructions): ...
"""
WORKFLOW, REWARD = "from_elsewhere:MINE", "from_elsewhere:judge"


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


@pytest.fixture
def downloaded(whole_run: Path) -> Iterator[Path]:
    """A run with a checkpoint whose configuration names a module's workflow."""
    data = settings_of(str(whole_run), Path()).model_dump(mode="json") | {"workflow": WORKFLOW}
    save_config(parse_config(data, "test"), whole_run / "config.yaml")
    yield whole_run
    save_config(parse_config(data | {"workflow": "ppo"}, "test"), whole_run / "config.yaml")


@pytest.mark.parametrize("verb", ["eval", "record", "train", "plan", "profile", "compare"])
def test_no_verb_runs_the_code_that_a_runs_folder_names(
    verb: str, downloaded: Path, tmp_path: Path, ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    named = downloaded if verb in ("eval", "record") else downloaded / "config.yaml"
    assert main([verb, str(named), "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert f"names code that would be run: workflow: {WORKFLOW}" in output and f"--workflow {WORKFLOW}" in output
    assert "Traceback" not in output and not ran()


def test_nor_where_a_run_is_compared_with_another(
    downloaded: Path, tmp_path: Path, ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "tabletop_scripted", "--runtime.mode", "inline", "--against", str(downloaded), "--eval.episodes"]
    assert main([*command, "2", "--runs-dir", str(tmp_path)]) == 2
    assert "names code that would be run" in capsys.readouterr().err and not ran()


def test_code_that_the_user_types_is_run(downloaded: Path, tmp_path: Path, ran: Any) -> None:
    command = ["eval", str(downloaded), "--runs-dir", str(tmp_path), "--folder", str(tmp_path / "eval")]
    for typed in (["--workflow", WORKFLOW], [f"--workflow={WORKFLOW}"]):
        assert main([*command, "--eval.episodes", "2", "--resume", "auto", *typed]) == 0
    assert ran()


def test_other_code_than_the_runs_allows_nothing(downloaded: Path, ran: Any) -> None:
    with pytest.raises(UserError, match="names code"):
        embodied.evaluate(downloaded, code=["from_elsewhere:OTHER"])
    assert not ran()
    assert settings_of(str(downloaded), Path(), [WORKFLOW]).named_code == {"workflow": WORKFLOW}


def test_a_reward_function_is_code_too(downloaded: Path, ran: Any) -> None:
    data = settings_of(str(downloaded), Path(), [WORKFLOW]).model_dump(mode="json")
    data |= {"workflow": "ppo_reward", "reward": {"function": REWARD}}
    save_config(parse_config(data, "test"), downloaded / "config.yaml")
    with pytest.raises(UserError, match=rf"reward.function: {REWARD}.*type --reward.function {REWARD} as well"):
        load_config(str(downloaded / "config.yaml"))
    assert load_config(str(downloaded / "config.yaml"), [REWARD]).reward.function == REWARD
    assert not ran()


def test_a_configuration_of_the_users_own_may_name_code(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"workflow: {WORKFLOW}\n")
    assert load_config(str(tmp_path / "mine.yaml")).workflow == WORKFLOW


def test_every_setting_whose_meaning_is_code_is_known() -> None:
    """By the words that document it: `package.module:NAME`."""
    from embodied.config.schema import Config

    def documented(model: Any, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found += documented(field.annotation, f"{prefix}{name}.")
            elif "package.module:" in (field.description or ""):
                found.append(f"{prefix}{name}")
        return found

    assert set(documented(Config)) == set(KEYS)
