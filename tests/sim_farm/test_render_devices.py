"""Which device draws: the choice among recorded devices, and what a machine that draws in software makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from sim_farm import render_devices
from sim_farm.backends import mujoco_gl
from sim_farm.client.farm import WorkerFailed
from sim_farm.contract import FarmError
from sim_farm.render_devices import EglDevice, RenderDevice, check_drawn, egl_index, is_software
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from sim_farm.workers.worker import WorkerSetup
from tests.sim_farm.driving import assert_same, drive, run
from tests.sim_farm.test_farm import SPEC
from tests.sim_farm.test_workers import processes, until

ROOT = Path(__file__).resolve().parents[2]
SOFTWARE = EglDevice(None, True)
SEVEN = (*(EglDevice(number, False) for number in (2, 1, 0, 5, 6, 4, 3)), SOFTWARE)
"""EGL's order on a machine of seven GPUs (google-deepmind/mujoco issue 3245), and Mesa's device behind them."""
DRAWN = replace(SPEC, task=replace(SPEC.task, cameras=1, image_size=32), num_envs=2)


# --- the choice


@pytest.mark.parametrize(
    ("devices", "wanted", "visible", "index"),
    [
        (SEVEN, 0, None, 2),
        (SEVEN, 5, None, 3),
        (SEVEN, "cpu", None, 7),
        ((SOFTWARE, EglDevice(0, False)), 0, None, 1),
        # The driver answers with the process's own numbers ...
        ((EglDevice(1, False), EglDevice(0, False), SOFTWARE), 0, "5,3", 1),
        ((EglDevice(0, False), EglDevice(None, False)), 0, "GPU-5a1b", 0),
        # ... or counts all GPUs of the machine.
        (SEVEN, 0, "5,3", 3),
        (SEVEN, 1, "5, 3", 6),
    ],
)
def test_egls_device_is_found_by_cudas_number(
    devices: tuple[EglDevice, ...], wanted: RenderDevice, visible: str | None, index: int
) -> None:
    assert egl_index(devices, wanted, visible) == index


@pytest.mark.parametrize(
    ("devices", "wanted", "visible", "words"),
    [
        (SEVEN, 7, None, ["cuda:7 was asked to draw", "0 (cuda:2)", "7 (software)"]),
        (SEVEN, 2, "5,3", ["cuda:2 was asked to draw"]),
        (SEVEN, 0, "GPU-5a1b", ["CUDA_VISIBLE_DEVICES is 'GPU-5a1b'", "by their numbers"]),
        ((SOFTWARE,), 0, None, ["cuda:0", "0 (software)", "libegl1", "libvulkan1", "graphics", "farm.devices"]),
        ((EglDevice(0, False),), "cpu", None, ["cpu was asked to draw", "0 (cuda:0)", "make system"]),
        ((), 0, "", ["EGL has: none"]),
    ],
)
def test_a_device_that_egl_does_not_offer_is_refused_with_what_there_is(
    devices: tuple[EglDevice, ...], wanted: RenderDevice, visible: str | None, words: list[str]
) -> None:
    with pytest.raises(FarmError) as error:
        egl_index(devices, wanted, visible)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_software_is_known_by_the_names_that_it_gives_itself() -> None:
    for name in ("llvmpipe (LLVM 15.0.6, 256 bits)", "softpipe", "Google SwiftShader", "Software Rasterizer"):
        assert is_software(name)
        with pytest.raises(FarmError, match=r"cuda:1 was asked to draw.*in software.*NVIDIA_DRIVER_CAPABILITIES"):
            check_drawn(1, name, "OpenGL by egl (EGL device 0)")
        check_drawn("cpu", name, "OpenGL by osmesa")
        check_drawn(None, name, "OpenGL by osmesa")
    for name in ("NVIDIA H200/PCIe/SSE2", "Tesla V100-SXM2-32GB", "AMD Radeon RX 7900 XTX (radeonsi)"):
        assert not is_software(name)
        check_drawn(0, name, "OpenGL by egl")
        with pytest.raises(FarmError, match="cpu was asked to draw"):
            check_drawn("cpu", name, "OpenGL by egl")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has drawn nothing."""
    monkeypatch.setattr(render_devices, "_process", render_devices._Process())


def test_a_process_draws_on_one_device(fresh: None) -> None:
    render_devices.ask(1)
    render_devices.ask(None)  # nothing has been drawn: another farm may begin anew
    assert render_devices.requested() is None
    render_devices.ask("cpu")
    render_devices.drawing()
    for device in (None, "cpu"):
        render_devices.ask(device)
    assert render_devices.requested() == "cpu"
    with pytest.raises(FarmError, match=r"cuda:0 was asked to draw in a process that has drawn on cpu"):
        render_devices.ask(0)


def test_devices_are_dealt_out_to_the_workers_that_draw() -> None:
    info = InProcess().describe(DRAWN.task)
    split = replace(DRAWN, num_envs=4, physics_workers=2, render_workers=3, devices=(1, 0))
    devices = [WorkerSetup(split, info, index, None).device for index in range(5)]
    assert devices == [None, None, 1, 0, 1]
    fused = replace(split, render_workers=0)
    assert [WorkerSetup(fused, info, index, None).device for index in range(2)] == [1, 0]
    blind = replace(fused, task=replace(fused.task, cameras=0))
    assert WorkerSetup(blind, InProcess().describe(blind.task), 0, None).device is None


# --- this machine


def test_egls_devices_are_those_that_mujoco_counts() -> None:
    code = "import os; os.environ['MUJOCO_GL'] = 'egl'\nfrom mujoco.egl import egl_ext\n"
    code += "print(len(egl_ext.eglQueryDevicesEXT()))"
    counted = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found = mujoco_gl.devices()
    assert len(found) == int(counted) > 0 and mujoco_gl.answers()
    assert any(device.software for device in found), "Mesa's software device is what `make setup` installs"


def drawn(task: str, device: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sim_farm.render_probe", task, device]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.parametrize(
    ("task", "device"), [("tabletop/reach", "cpu"), pytest.param("tabletop/reach", "auto", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("platform", ["egl", "osmesa"])
def test_a_picture_says_what_drew_it(task: str, device: str, platform: str) -> None:
    # Another test of this process may have chosen the other platform.
    result = drawn(task, device, MUJOCO_GL=platform, PYOPENGL_PLATFORM=platform)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert is_software(found["name"]) or device == "auto"
    assert found["picture_s"] > 0 and found["asked"] == device


@pytest.mark.parametrize(
    ("device", "environment", "words"),
    [
        ("cuda:63", {}, ["cuda:63 was asked to draw, and none of EGL's devices is that", "embodied doctor"]),
        ("cuda:63", {"MUJOCO_GL": "osmesa"}, ["cuda:63 was asked to draw", "OpenGL is set to 'osmesa'"]),
        ("gpu", {}, ["auto, cpu or cuda:NUMBER, got 'gpu'"]),
    ],
)
def test_what_cannot_draw_says_so(device: str, environment: dict[str, str], words: list[str]) -> None:
    result = drawn("tabletop/reach", device, **environment)
    assert result.returncode == 1 and result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_sapien_draws_in_software_where_that_is_requested() -> None:
    found = drawn("maniskill/PushCube-v1", "cpu")
    assert found.returncode == 0, found.stderr
    assert is_software(json.loads(found.stdout.splitlines()[-1])["name"])
    refused = drawn("maniskill/PushCube-v1", "cuda:63")
    assert refused.returncode == 1 and "cuda:63 was asked to draw, and SAPIEN finds no such" in refused.stderr
    assert "Traceback" not in refused.stderr


FRAMES = """
import sys
from sim_farm import EpisodeSpec, TaskSpec, make_physics, make_renderer, render_devices
render_devices.ask({"cpu": "cpu", "auto": None}[sys.argv[1]])
spec = TaskSpec("maniskill/PushT-v1", cameras=1, image_size=32)
physics, renderer = make_physics(spec), make_renderer(spec)  # in one process, as fused
scene = physics.reset(EpisodeSpec(3)).scene
(frames,) = renderer.render([scene], renderer.info.cameras).values()
assert frames.std() > 1
print(frames.tobytes().hex())
"""


@pytest.mark.slow
def test_sapien_draws_the_same_where_software_is_requested() -> None:
    """A task whose physics needs a render scene too: both are on the device."""
    found = []
    for device in ("cpu", "auto"):
        result = subprocess.run([sys.executable, "-c", FRAMES, device], capture_output=True, text=True, cwd=ROOT)
        assert result.returncode == 0, result.stderr
        found.append(result.stdout.splitlines()[-1])
    assert found[0] == found[1]


SHAPES: dict[str, dict[str, Any]] = {"fused": {}, "split": {"render_workers": 1}}


@pytest.fixture(scope="module")
def reference() -> Any:
    return run(DRAWN, chunks=3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_software_that_is_requested_draws_what_is_drawn_without_a_request(shape: str, reference: Any) -> None:
    if not is_software(json.loads(drawn("tabletop/reach", "auto").stdout)["name"]):
        pytest.skip("this machine draws on a GPU where nobody asks")
    with processes(replace(DRAWN, **SHAPES[shape], devices=("cpu",))) as (farm, _):
        assert_same(drive(farm, end=3), reference, "drawn in software")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_that_is_not_there_fails_at_the_start_with_one_message(
    shape: str, own_memory: Callable[[], set[Path]]
) -> None:
    spec: FarmSpec = replace(DRAWN, **SHAPES[shape], devices=(63,))
    with processes(spec) as (farm, host):
        with pytest.raises(WorkerFailed) as error:
            until(lambda: farm.check())
        assert own_memory()
        assert str(error.value).startswith("cuda:63 was asked to draw, and none of EGL's devices is that")
        assert "Traceback" not in str(error.value) and "graphics" in str(error.value)
        alive = host.pids()
    assert alive and not any(psutil.pid_exists(pid) for pid in alive)
    assert not own_memory()


IN_ONE_PROCESS = """
from contextlib import closing
from collections.abc import Callable
from dataclasses import replace
from sim_farm import Farm, FarmError, InProcess
from tests.sim_farm.driving import drive
from tests.sim_farm.test_render_devices import DRAWN
for device in (63, 64):
    try:
        Farm.create(replace(DRAWN, devices=(device,)), InProcess())
    except FarmError as error:
        assert str(error).startswith(f"cuda:{device} was asked to draw, and none of EGL's"), error
for devices in ((), ()):
    with closing(Farm.create(replace(DRAWN, devices=devices), InProcess())) as farm:
        drive(farm, end=1)
try:
    Farm.create(replace(DRAWN, devices=(0,)), InProcess())
except FarmError as error:
    print(error)
"""


def test_in_one_process_another_farm_may_follow_and_draws_where_the_first_did() -> None:
    result = subprocess.run([sys.executable, "-c", IN_ONE_PROCESS], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "cuda:0 was asked to draw in a process that has drawn on auto" in result.stdout
