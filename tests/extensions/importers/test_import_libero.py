"""LIBERO's and robomimic's recordings: replayed on the recorded model, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied.demonstrations import Dataset
from tests.extensions.importers.test_import_maniskill import imported, libero, refused


@pytest.mark.slow
def test_liberos_recording_comes_out_as_recorded(tmp_path: Path) -> None:
    """States within 1e-7, although it begins five env steps after the reset, with the gripper half open. The gripper's
    convention is OpenVLA's."""
    source = libero(tmp_path)
    result = imported(source, tmp_path / "out", env={"gripper": "inverted"})
    assert result["task"] == "libero/libero_spatial/0" and result["reproduced"] == 1
    assert result["largest_deviation"] < 1e-7
    dataset = Dataset(tmp_path / "out")
    assert dataset.episodes[0].spec is None and dataset.column("next.success")[-1]
    with h5py.File(source) as file:
        recorded = file["data/demo_0/actions"][()].astype(np.float32)
    assert np.array_equal(dataset.column("action")[:, :-1], recorded[:, :-1])
    assert np.array_equal(dataset.column("action")[:, -1], (1 - recorded[:, -1]) / 2)


def _edit_model(old: str, new: str) -> Any:
    def edit(data: h5py.Group) -> None:
        model = data["demo_0"].attrs["model_file"]
        assert old in model
        data["demo_0"].attrs["model_file"] = model.replace(old, new)

    return edit


def _edit_actions(data: h5py.Group) -> None:
    data["demo_0/actions"][30:, 2] = 1


def _cut_states(data: h5py.Group) -> None:
    states = data["demo_0/states"][()][:, :-2]
    del data["demo_0/states"]
    data["demo_0/states"] = states


def _move_fixture(data: h5py.Group) -> None:
    model = data["demo_0"].attrs["model_file"]
    begin = model.index('<body name="flat_stove_1_main" pos="') + len('<body name="flat_stove_1_main" pos="')
    data["demo_0"].attrs["model_file"] = model[:begin] + "-0.1 0.1 1.2" + model[model.index('"', begin) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (_edit_actions, "a state is 0."),
        (_cut_states, "the recorded states have"),
        (_move_fixture, "step "),
        (_edit_model('name="plate_1_main"', 'name="dish_main"'), "it also has the bodies dish_main, and lacks plate_1"),
        (_edit_model('"robot0_base" pos="-0.66', '"robot0_base" pos="-0.6'), "robot0_base lies"),
        (_edit_model("<mujoco ", "<!DOCTYPE x><mujoco "), "declares entities"),
        (_edit_model("</mujoco>", ""), "is no XML"),
    ],
)  # fmt: skip
def test_what_does_not_reproduce_is_reported(edit: Any, why: str, tmp_path: Path) -> None:
    message = refused(libero(tmp_path, edit), tmp_path / "out")
    assert "none of the 1 episodes" in message and "demo_0: " in message and why in message


def _edit_env_args(**changes: Any) -> Any:
    def edit(data: h5py.Group) -> None:
        env_args = json.loads(data.attrs["env_args"])
        env_args["env_kwargs"] |= changes
        data.attrs["env_args"] = json.dumps(env_args)

    return edit


def _as_robomimic(data: h5py.Group) -> None:
    """robomimic's Lift, as it is named in its datasets."""
    for name in ("bddl_file_name", "bddl_file_content", "problem_info"):
        del data.attrs[name]
    data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"]}})


def _unknown_task(data: h5py.Group) -> None:
    data.attrs["bddl_file_name"] = "/data/bddl_files/mine/fold_the_towel.bddl"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_edit_env_args(robots=["Sawyer"]), "was recorded with the robots ['Sawyer']"),
        (_edit_env_args(controller_configs={"type": "JOINT_VELOCITY"}), "the controller's type 'JOINT_VELOCITY'"),
        (_edit_env_args(control_freq=10), "was recorded at 10 Hz"),
        (_as_robomimic, "robomimic's recording of 'Lift', and names no .bddl file"),
        (_unknown_task, "'fold_the_towel.bddl', which is none of LIBERO's 130 tasks"),
    ],
)
def test_other_robots_controllers_and_tasks_are_refused(edit: Any, says: str, tmp_path: Path) -> None:
    assert says in refused(libero(tmp_path, edit), tmp_path / "out")


@pytest.mark.slow
def test_robomimics_filter_keys_select_episodes(tmp_path: Path) -> None:
    """In robomimic's layout of a LIBERO task, whose .bddl file stands among the environment's arguments."""

    def edit(data: h5py.Group) -> None:
        env_args = json.loads(data.attrs["env_args"])
        env_args["env_kwargs"]["bddl_file_name"] = data.attrs["bddl_file_name"]
        data.attrs["env_args"] = json.dumps(env_args)
        del data.attrs["bddl_file_name"]
        data.copy("demo_0", "demo_1")
        data.file["mask/valid"] = np.array([b"demo_1"])

    result = imported(libero(tmp_path, edit), tmp_path / "out", episodes=("valid",))
    assert result["recorded_episodes"] == ["demo_1"] and result["format"].startswith("robomimic")
