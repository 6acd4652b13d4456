"""LIBERO's task files: which of them are LIBERO's own, and what is written to find them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim_farm.backends.libero import tasks
from sim_farm.backends.libero.package import prepare

TASK = "libero_goal/0"
SCRIPT = f"""
import json, sys
from sim_farm.backends.libero.tasks import find_task, task_files
from sim_farm.contract import FarmError
try:
    found = task_files("libero/{TASK}")
    print(json.dumps([found.digest, found.foreign, str(find_task("libero/{TASK}").bddl)]))
except FarmError as error:
    print(json.dumps(str(error)))
"""


def files_with(home: Path, settings: str | None) -> Any:
    """Digest, foreign files and task file of `TASK`, or an error's text, in a process with that home and
    LIBERO_CONFIG_PATH."""
    kept = {key: value for key, value in os.environ.items() if key != "LIBERO_CONFIG_PATH"}
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home.parent / "cache")}
    named = {} if settings is None else {"LIBERO_CONFIG_PATH": settings}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=kept | own | named, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def package() -> Path:
    prepare()
    return Path(str(importlib.import_module("libero.libero").__file__)).parent


def test_every_task_is_libero_s_own() -> None:
    every = [tasks.task_files(f"libero/{name}") for name in tasks.task_names()]
    assert len(every) == 130 and len({one.digest for one in every}) == 130
    assert not any(one.foreign for one in every)


def test_policies_get_the_instruction_of_the_task_and_not_that_of_its_file() -> None:
    """Published protocols use `task.language`; the task files say something else in 29 of 130 tasks."""
    parse = importlib.import_module("libero.libero.envs.bddl_utils").get_problem_info
    known = importlib.import_module("libero.libero.benchmark").task_maps
    every = [tasks.find_task(f"libero/{name}") for name in tasks.task_names()]
    languages = [task.language for suite in tasks.SUITES for task in known[suite].values()]
    assert [task.instruction for task in every] == languages
    assert sum(parse(str(task.bddl))["language_instruction"] != task.instruction for task in every) == 29


@pytest.mark.slow
def test_an_edited_goal_and_other_initial_states_are_another_task_and_reported(tmp_path: Path) -> None:
    """LIBERO's files copied, with one goal and one file of initial states changed, and a settings file that names
    them: in the user's home, and in LIBERO_CONFIG_PATH."""
    home, copy = tmp_path / "home", tmp_path / "libero"
    for kind in ("bddl_files", "init_files"):
        shutil.copytree(package() / kind / "libero_goal", copy / kind / "libero_goal")
    settings = {"bddl_files": str(copy / "bddl_files"), "init_states": str(copy / "init_files")}
    (home / ".libero").mkdir(parents=True)
    (home / ".libero" / "config.yaml").write_text(yaml.safe_dump(settings))
    digest, foreign, bddl = files_with(home, "")
    assert bddl.startswith(str(copy)) and not foreign
    assert digest == tasks.task_files(f"libero/{TASK}").digest, "equal files in another place are the same task"

    text = Path(bddl).read_text()
    edited = re.sub(r"\(Open wooden_cabinet_1_middle_region\)", "(Open wooden_cabinet_1_top_region)", text)
    assert edited != text
    Path(bddl).write_text(edited)
    initial = tasks.find_task(f"libero/{TASK}").initial
    assert initial is not None
    another = next(copy.glob("init_files/libero_goal/*_bowl_*.pruned_init"))
    shutil.copyfile(another, another.with_name(initial.name))
    changed, foreign, _ = files_with(tmp_path / "elsewhere", str(home / ".libero"))
    assert changed != digest and len(foreign) == 2
    assert foreign[0] == f"{bddl} is not LIBERO's own file (named by {home}/.libero/config.yaml)"
    assert initial.name in foreign[1]


@pytest.mark.slow
def test_nothing_is_written_into_the_user_s_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    for settings in ("", str(empty)):
        _, foreign, bddl = files_with(home, settings)
        assert bddl.startswith(str(package())) and not foreign
    assert not list(home.iterdir()) and not list(empty.iterdir())


def test_a_settings_file_that_names_no_folders_is_refused(tmp_path: Path) -> None:
    settings = tmp_path / "config.yaml"
    for text, message in (
        ("bddl_files: /nowhere\ninit_states: /nowhere\n", "names '/nowhere' as bddl_files, which is no folder"),
        ("- 1", "names no folder 'bddl_files'"),
        ("a: [", "cannot be read"),
    ):
        settings.write_text(text)
        found = files_with(tmp_path, str(tmp_path))
        assert message in found and str(settings) in found and "LIBERO_CONFIG_PATH to a folder without" in found
