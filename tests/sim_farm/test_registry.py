"""Task names: found, or refused with the nearest that exist."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sim_farm
from sim_farm.catalogue import CATALOGUE, check_task, task_names
from sim_farm.contract import EpisodeSpec, FarmError, Physics, Renderer, TaskSpec
from sim_farm.registry import BACKENDS, backend, make_physics, make_renderer, resolve

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("tabletop/reahc", "unknown task 'tabletop/reahc'; did you mean tabletop/reach"),
        ("tabeltop/reach", "unknown simulator 'tabeltop'; did you mean tabletop"),
        ("nothing-like-it/reach", "unknown simulator 'nothing-like-it'; valid: .*maniskill.*tabletop"),
        ("tabletop/", "unknown task 'tabletop/'"),
        ("tabletop", "named <simulator>/<task>, got 'tabletop'; did you mean tabletop"),
        ("", "named <simulator>/<task>, got ''; valid: "),
        ("tabletop/0123456789-0123456789", "valid: tabletop/pick_and_place, tabletop/push, tabletop/reach"),
    ],
)
def test_an_unknown_task_is_refused_with_the_valid_ones(task: str, message: str) -> None:
    for make in (make_physics, make_renderer):
        with pytest.raises(FarmError, match=message):
            make(TaskSpec(task))
    with pytest.raises(FarmError, match=message):
        check_task(task)


def test_an_option_that_the_simulator_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (make_physics, make_renderer):
        with pytest.raises(FarmError, match="has no option 'gravity' .env.options.: its simulator has none"):
            make(TaskSpec("tabletop/reach", options={"gravity": 3}))
    known = replace(backend("tabletop"), options=("gravity", "friction"))
    monkeypatch.setattr("sim_farm.backends.tabletop.BACKEND", known)
    with pytest.raises(FarmError, match="did you mean gravity"):
        make_physics(TaskSpec("tabletop/reach", options={"gravty": 3}))
    make_physics(TaskSpec("tabletop/reach", options={"gravity": 3})).close()


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_goes_by_its_name_and_resolves_its_tasks(name: str) -> None:
    found = backend(name)
    assert found.name == name and found.tasks()
    for task in found.tasks():
        assert resolve(f"{name}/{task}") == (found, task)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_catalogue_has_every_backend_with_its_tasks(name: str) -> None:
    assert task_names(name) == tuple(backend(name).tasks()) and name in CATALOGUE


@pytest.mark.parametrize("task", ["maniskill/PushCub-v1", "libero/libero_spatial/10", "tabletop/reech"])
def test_a_mistyped_task_is_refused_without_importing_a_simulator(task: str) -> None:
    code = f"""
import sys
from sim_farm.catalogue import check_task
try:
    check_task({task!r})
except Exception as error:
    print(error)
loaded = {{name.partition(".")[0] for name in sys.modules}} & {{"mani_skill", "libero", "mujoco", "torch"}}
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"unknown task {task!r}" in done.stdout


def test_a_backend_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "maniskill", "package_that_is_not_installed.maniskill")
    with pytest.raises(FarmError, match=r"'package_that_is_not_installed': pip install 'embodied-farm\[maniskill\]'"):
        backend("maniskill")


def test_naming_a_task_loads_no_other_simulator() -> None:
    code = """
import sys
import sim_farm
sim_farm.registry.resolve("tabletop/reach")
loaded = {name.partition(".")[0] for name in sys.modules} & {"mani_skill", "sapien", "torch", "ray"}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=ROOT)


def test_the_front_door_gives_both_halves_of_a_task() -> None:
    physics, renderer = sim_farm.make("tabletop/reach", cameras=("side",), size=16)
    with closing(physics), closing(renderer):
        assert isinstance(physics, Physics) and isinstance(renderer, Renderer)
        picture = renderer.render([physics.reset(EpisodeSpec(1)).scene], ["side"])["side"]
    assert picture.shape == (1, 16, 16, 3) and picture.dtype == np.uint8
