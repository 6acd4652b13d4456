"""The simulators of examples/: their environments are the stock ones, they keep the laws, and install as packages."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.backends.mujoco_scene import SceneRenderer, camera_names, scene_of
from sim_farm.backends.tabletop.renderer import TabletopRenderer
from sim_farm.conformance.physics_laws import physics_is_a_function_of_seed_and_actions, reset_of_reused_equals_new
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
STOCK = ROOT / "tests" / "stock_examples.py"
"""Compares an example's tasks with stock environments; runs where the example is installed."""


def test_a_scene_of_poses_gives_the_pictures_of_a_scene_of_positions() -> None:
    """Of a model with a mark that moves, from its own camera and from one that is in no model."""
    physics = make_physics(TaskSpec("tabletop/push", cameras=2, image_size=48))
    renderer = TabletopRenderer(physics.info.spec)
    scene = physics.reset(EpisodeSpec(3)).scene
    theirs = renderer.render([scene], renderer.info.cameras)
    renderer._pose(scene)
    model, data = renderer._model, renderer._data
    view = mujoco.MjvCamera()
    view.distance, view.elevation = 0.6, -30.0
    posed = SceneRenderer(renderer.info, model, views={"free": view})
    drawn = posed.render([scene_of(data)], (*renderer.info.cameras, "free"))
    for name, frame in theirs.items():
        assert np.array_equal(drawn[name], frame), name
    assert drawn["free"].std() > 1
    with pytest.raises(FarmError, match="no camera 'back'; valid: free, front, side, wrist"):
        camera_names(TaskSpec("tabletop/push", cameras=("back",)), model, first=("free",))
    for opened in (posed, renderer, physics):
        opened.close()


@pytest.fixture
def robosuite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES / "robosuite")
    yield
    sys.modules.pop("robosuite_farm", None)


@pytest.mark.slow
def test_every_task_of_robosuite_begins_like_new_and_is_a_function_of_its_seed(robosuite: None) -> None:
    for name in importlib.import_module("robosuite_farm").BACKEND.tasks():
        for law in (reset_of_reused_equals_new, physics_is_a_function_of_seed_and_actions):
            law(TaskSpec(f"robosuite_farm:BACKEND/{name}"))


def python(interpreter: Path | str, folder: Path, *arguments: str) -> str:
    """What a Python prints that is started in `folder`."""
    command = [str(interpreter), "-W", "ignore", *arguments]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_robosuite_shows_what_a_stock_environment_shows(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(EXAMPLES / "robosuite")])
    code = f"import sys; sys.path[:0] = {path.split(os.pathsep)!r}; import runpy; sys.argv = ['', 'robosuite']; "
    said = python(sys.executable, tmp_path, "-c", code + f"runpy.run_path({str(STOCK)!r}, run_name='__main__')")
    assert said.splitlines()[-1] == "equal: 17 tasks"


INSTALLED: dict[str, Any] = {
    "metaworld": ("equal: 50 tasks", ("metaworld/door-open-v3", "metaworld/reach-v3-goal-hidden")),
    "gymnasium_robotics": ("equal: 12 tasks", ("robotics/FetchPush",)),
}
"""Per example: what the comparison says at its end, and the tasks that go through the suite."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", INSTALLED)
def test_an_installed_example_is_the_stock_simulator_and_keeps_the_laws(name: str, tmp_path: Path) -> None:
    """In an environment of its own, with the MuJoCo that the simulator's package asks for."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    interpreter = tmp_path / "venv" / "bin" / "python"
    quiet = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    python(interpreter, tmp_path, *quiet, f"{ROOT}[conformance]", str(EXAMPLES / name))
    said, tasks = INSTALLED[name]
    assert python(interpreter, tmp_path, str(STOCK), name).splitlines()[-1] == said
    for task in tasks:
        laws = python(interpreter, tmp_path, "-m", "pytest", "--pyargs", "sim_farm.conformance", "--backend", task)
        assert re.search(rf"the laws of {re.escape(task)}: \d+ hold, 2 not applicable", laws)
