"""Stage `draw`: frames per second of the farm's own renderers, on the GPU and in software on all cores.

Each process draws on a core of its own, as render workers do. On the GPU some numbers of processes are tried, and the
fastest counts. Where software cannot draw (Mesa is not installed), its message stands in place of the figure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from threading import Timer

from benchmarks.gpu_stages.work import Figures, Work


@dataclass(frozen=True)
class Scene:
    """What is drawn."""

    task: str
    cameras: int
    size: int


SCENES = {
    "maniskill": Scene("maniskill/PickCube-v1", 1, 224),
    "libero": Scene("libero/libero_spatial/0", 2, 256),
    "tabletop": Scene("tabletop/push", 1, 224),
}
PROCESSES, TINY_PROCESSES = (1, 4, 8), (1,)
"""On the GPU."""
SECONDS, TINY_SECONDS = 3.0, 0.5
CALL, TINY_CALL = 8, 2
"""Scenes that are drawn at once, all different."""
START_S = 150.0
"""Longest time that processes may take to draw their first frames."""


def draw(work: Work) -> Figures:
    """Frames per second of the best number of processes on the GPU, of all cores in software, and their ratio."""
    scene, cores = SCENES[work.variant], sorted(os.sched_getaffinity(0))
    device = "cpu" if work.tiny else "0"
    found: Figures = {"task": scene.task, "cameras": scene.cameras, "image_size": scene.size, "device": device}
    rates: dict[str, float] = {}
    for count in dict.fromkeys(min(n, len(cores)) for n in (TINY_PROCESSES if work.tiny else PROCESSES)):
        try:
            rates[str(count)] = frames_per_s(scene, device, cores[:count], work.tiny)
        except RuntimeError as error:
            if not rates:
                raise
            found["more_processes"] = str(error)  # what fewer draw is a result all the same
            break
        found |= {"frames_per_s": max(rates.values()), "frames_per_s_by_processes": rates}
        work.keep(found)
    try:
        found["software_frames_per_s"] = frames_per_s(scene, "cpu", cores, work.tiny)
        found["ratio_to_software"] = found["frames_per_s"] / found["software_frames_per_s"]
    except RuntimeError as error:
        found["software"] = str(error)
    return found | {"cores": len(cores)}


def frames_per_s(scene: Scene, device: str, cores: list[int], tiny: bool) -> float:
    """Of as many processes as there are cores, which begin at the same time. Raises `RuntimeError` with what the first
    that fails has said last."""
    drawers = [_start(scene, device, core, seed, tiny) for seed, core in enumerate(cores)]
    deadline = Timer(START_S + SECONDS, _kill, [drawers])
    deadline.start()
    try:
        for drawer in drawers:
            _await_ready(drawer)
        for drawer in drawers:
            assert drawer.stdin is not None
            drawer.stdin.write("\n")
            drawer.stdin.flush()
        results = [json.loads(_line(drawer)) for drawer in drawers]
        return float(sum(result["frames"] / result["seconds"] for result in results))
    finally:
        deadline.cancel()
        _kill(drawers)
        for drawer in drawers:
            drawer.communicate()


def _kill(drawers: list[subprocess.Popen[str]]) -> None:
    for drawer in drawers:
        drawer.kill()


def _start(scene: Scene, device: str, core: int, seed: int, tiny: bool) -> subprocess.Popen[str]:
    numbers: dict[str, float] = {"cameras": scene.cameras, "size": scene.size, "core": core, "seed": seed}
    numbers |= {"scenes": TINY_CALL, "seconds": TINY_SECONDS} if tiny else {"scenes": CALL, "seconds": SECONDS}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    # One thread of a process draws in software: the other cores have processes of their own.
    single = {"LP_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_stages.drawer", scene.task, "--device", device, *options],
        env={**os.environ, **single}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _await_ready(drawer: subprocess.Popen[str]) -> None:
    while _line(drawer).strip() != "ready":  # packages print of themselves
        pass


def _line(drawer: subprocess.Popen[str]) -> str:
    assert drawer.stdout is not None and drawer.stderr is not None
    line = drawer.stdout.readline()
    if line:
        return line
    drawer.wait(START_S)
    lines = drawer.stderr.read().strip().splitlines()
    if drawer.returncode == -signal.SIGKILL:
        lines = [f"nothing within {START_S:.0f} s, and was ended"]
    raise RuntimeError(f"a process that draws said: {lines[-1] if lines else f'nothing (status {drawer.returncode})'}")
