"""The conformance suite as a stranger runs it: what it says of simulators that do not keep the laws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sim_farm.conformance.physics_laws import PHYSICS_LAWS
from sim_farm.conformance.promises import COMPARED, PICTURES, PROMISES
from sim_farm.conformance.render_laws import RENDER_LAWS

ROOT = Path(__file__).parents[2]
POINT = """
import numpy as np
from dataclasses import replace
from own_simulator import PointPhysics
from sim_farm.contract import Backend, FarmError


class Restless(PointPhysics):
    def reset(self, episode):
        self.at, self.goal = np.random.default_rng().uniform(-1, 1, (2, 2))
        self.left = self.limit
        return self._result([], [])


BACKEND = Backend("restless", Restless, None, lambda: ["reach"])
HONEST = replace(BACKEND, exact_replay=False)


class Seen(PointPhysics):
    def __init__(self, spec):
        if spec.cameras not in (0, (), 1, ("top",)):
            raise FarmError(f"the cameras of {spec.name} are top, got {spec.cameras}")
        super().__init__(replace(spec, cameras=0))
        cameras = ("top",) if spec.cameras else ()
        self.info = replace(self.info, spec=replace(self.info.spec, cameras=cameras), cameras=cameras)


class Drawn:
    drawn = 0

    def __init__(self, spec):
        self.info = Seen(spec).info

    def render(self, scenes, cameras, out=None):
        size = self.info.spec.image_size
        frames = np.empty((len(scenes), size, size, 3), np.uint8)
        for frame, scene in zip(frames, scenes):
            frame[:] = np.resize(scene, frame.shape)
            frame[0, 0] = Drawn.drawn % 256
            Drawn.drawn += 1
        return dict.fromkeys(cameras, frames)

    def close(self):
        pass


COUNTS = Backend("counts", Seen, Drawn, lambda: ["reach"])
"""
SPLIT = ["scene_determines_picture", "picture_is_the_same_in_another_process", "renderers_share_nothing"]


def suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "strange.py").write_text(POINT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    command = [sys.executable, "-m", "sim_farm.conformance", "-q", "--tb=line", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def outcomes(folder: Path, reference: str) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """Exit status, what was printed, and the report's entries by law."""
    done = suite(folder, "--backend", f"strange:{reference}/reach", "--report", "report.json")
    report = json.loads((folder / "report.json").read_text())
    assert report["examined"] == f"strange:{reference}/reach"
    return done.returncode, done.stdout, {each["law"]: each for each in report["laws"]}


def test_a_simulator_that_ignores_its_seed_breaks_exact_replay(tmp_path: Path) -> None:
    status, printed, laws = outcomes(tmp_path, "BACKEND")
    assert status == 1
    broken = laws["physics_is_a_function_of_seed_and_actions"]
    assert broken["outcome"] == "broken" and "two resets to the same episode differ" in broken["why"]
    assert "a worker that is lost costs its episodes" in broken["otherwise"]
    assert "BROKEN          physics is a function of seed and actions: two resets to the same" in printed
    assert f"so              {broken['otherwise']}" in printed
    assert laws["info_matches_results"]["outcome"] == "holds" and not laws["info_matches_results"]["otherwise"]
    assert laws["wrong_camera_is_refused"]["outcome"] == "not applicable"


def test_what_a_simulator_declares_is_said_and_no_failure(tmp_path: Path) -> None:
    status, printed, laws = outcomes(tmp_path, "HONEST")
    assert status == 0, printed
    replay = laws["physics_is_a_function_of_seed_and_actions"]
    assert replay["outcome"] == "declared" and "a worker that is lost costs its episodes" in replay["otherwise"]
    assert laws["chunk_equals_single_steps"]["outcome"] == "not applicable"
    assert laws["truncation_at_the_limit"]["outcome"] == "holds"


def test_a_renderer_with_a_state_of_its_own_breaks_exact_split(tmp_path: Path) -> None:
    status, printed, laws = outcomes(tmp_path, "COUNTS")
    assert status == 1
    assert [laws[law]["outcome"] for law in SPLIT] == ["broken"] * 3, printed
    assert "farm.render_workers stays 0" in laws[SPLIT[0]]["otherwise"] and "farm.render_workers stays 0" in printed
    assert {law for law, each in laws.items() if each["outcome"] == "broken"} - set(SPLIT) == {
        "frames_are_drawn_where_they_are_asked_for"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((), "name it with --backend my_package.my_sim:BACKEND/task", marks=pytest.mark.slow),
        (("--backend", "tabletop/rech"), "did you mean tabletop/reach"),
    ],
)
def test_a_mistake_gives_one_message(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = suite(tmp_path, *arguments)
    assert done.returncode == 4 and message in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_without_pytest_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.modules['pytest'] = None; import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'pytest' else find(name, *a); "
        "runpy.run_module('sim_farm.conformance', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "pip install 'embodied-farm[conformance]'" in done.stderr


def test_every_law_belongs_to_one_promise_and_is_a_sentence() -> None:
    laws = [law for promise in PROMISES for law in promise.laws]
    assert len(laws) == len(set(laws)) and {*PHYSICS_LAWS, *RENDER_LAWS} < set(laws)
    assert set(laws) >= COMPARED | PICTURES
    assert all((law.__doc__ or "").strip().partition("\n")[0].endswith(".") for law in laws)
