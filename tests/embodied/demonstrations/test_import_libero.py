"""LIBERO's and robomimic's recordings (recordings/WRITTEN.md), replayed and imported."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied.commands.importing import Arguments, run
from embodied.config import RuntimeConfig
from embodied.demonstrations import Dataset, DatasetError
from embodied.demonstrations.importer import chosen
from embodied.demonstrations.recordings import RobosuiteFile, kind_of, task_of_bddl
from embodied.demonstrations.sources import Observations
from embodied.errors import UserError
from tests import libero_assets

libero_assets.require()

RECORDINGS = Path(__file__).parent / "recordings/libero"
TASK = "libero/libero_spatial/0"


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str], Path]:
    def unpack(name: str) -> Path:
        path = tmp_path / f"{name}.hdf5"
        path.write_bytes(lzma.decompress((RECORDINGS / f"{name}.hdf5.xz").read_bytes()))
        return path

    return unpack


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Dataset]:
    settings = {"env": Observations(cameras=0), "runtime": RuntimeConfig(mode="inline"), **options}
    return run(Arguments(source, out=out, **settings)), Dataset(out)


def edit(path: Path, change: Callable[[h5py.File], object]) -> Path:
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def test_liberos_dataset_comes_out_as_recorded(opened: Callable[[str], Path], tmp_path: Path) -> None:
    source = opened("dataset")
    result, dataset = imported(source, tmp_path / "out", env=Observations(("agentview",), 32, "rotated"))
    assert (result["task"], result["control_mode"]) == (TASK, "osc_pose")
    assert result["replayed"] == result["reproduced"] == 1
    assert result["largest_deviation"] < 1e-6 and result["tolerance"] == 1e-2
    with h5py.File(source) as file:
        demo = file["data/demo_0"]
        steps = len(demo["actions"])
        batch = dataset.batch(range(steps))
        np.testing.assert_array_equal(batch.actions[:, 0], demo["actions"][()].astype(np.float32))
        # Time, the arm's seven joints, the two of the gripper, with which the dataset's proprioception ends.
        joints = demo["states"][:, 1 + 7 : 1 + 9]
    assert dataset.column("next.success")[-1]
    assert dataset.column("next.done").nonzero()[0].tolist() == [steps - 1]
    assert batch.proprio is not None
    np.testing.assert_allclose(batch.proprio[1:, -2:], joints[1:], atol=2e-3)
    assert batch.frames["agentview"].shape == (steps, 32, 32, 3) and batch.frames["agentview"].std() > 10
    assert dataset.episodes[0].spec is None, "the recording's first state is no reset's"
    about = json.loads((tmp_path / "out/meta/embodied.json").read_text())
    assert about["format"] == "LIBERO's demonstrations" and about["recorded_episodes"] == ["demo_0"]
    assert about["task"]["orientation"] == "rotated"


def test_states_that_were_edited_do_not_reproduce(opened: Callable[[str], Path], tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        file["data/demo_1/states"][4, 3] += 0.1

    with pytest.raises(UserError, match=r"demo_1: step 3: a state is 0\.1 from the recorded one"):
        imported(edit(opened("demo"), spoil), tmp_path / "out")


def model(old: str, new: str) -> Callable[[h5py.File], object]:
    """Changes the recorded model's text, in which `old` stands."""

    def change(file: h5py.File) -> None:
        text = file["data/demo_0"].attrs["model_file"]
        assert old in text
        file["data/demo_0"].attrs["model_file"] = text.replace(old, new)

    return change


def move_stove(file: h5py.File) -> None:
    text = file["data/demo_0"].attrs["model_file"]
    begin = text.index('<body name="flat_stove_1_main" pos="') + len('<body name="flat_stove_1_main" pos="')
    file["data/demo_0"].attrs["model_file"] = text[:begin] + "-0.1 0.1 1.2" + text[text.index('"', begin) :]


OTHER_MODELS = {
    "a fixture on the way": (move_stove, r"step \d+: "),
    "another body": (model('name="plate_1_main"', 'name="dish"'), "also has the bodies dish, and lacks plate_1_main"),
    "another place": (model('"robot0_base" pos="-0.66', '"robot0_base" pos="-0.6'), "robot0_base lies 0.06"),
    "no numbers": (model('"robot0_base" pos="-0.66', '"robot0_base" pos="x'), "'robot0_base' has no pos of numbers"),
    "entities": (model("<mujoco ", "<!DOCTYPE x><mujoco "), "declares entities"),
    "cut short": (model("</mujoco>", ""), "is no XML"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_recordings_of_another_model_do_not_reproduce(
    case: str, opened: Callable[[str], Path], tmp_path: Path
) -> None:
    change, says = OTHER_MODELS[case]
    with pytest.raises(UserError, match=f"none of the 1 episodes .* demo_0: .*{says}"):
        imported(edit(opened("dataset"), change), tmp_path / "out")


def test_robomimics_recording_needs_its_task_named(opened: Callable[[str], Path], tmp_path: Path) -> None:
    source = opened("robomimic")
    assert kind_of(source) == "robomimic"
    with pytest.raises(DatasetError, match="names no .bddl file.*--task libero/SUITE/NUMBER"):
        imported(source, tmp_path / "out")
    file = RobosuiteFile(source, TASK)
    assert file.subsets == {"train": ("demo_2",), "valid": ()} and chosen(file, ("train",)) == ("demo_2",)
    recording = file.read("demo_2")
    with h5py.File(source) as held:
        np.testing.assert_array_equal(recording.states["state"], held["data/demo_2/states"][1:])
        np.testing.assert_array_equal(recording.start["state"], held["data/demo_2/states"][0])
    with pytest.raises(UserError, match=r"the task's \d+: it is a recording of another task or robot"):
        imported(source, tmp_path / "out", task="libero/libero_goal/0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "robomimic"])
def test_the_other_programs_files_come_out_as_recorded(
    name: str, opened: Callable[[str], Path], tmp_path: Path
) -> None:
    result, _ = imported(opened(name), tmp_path / "out", task=TASK)
    assert result["reproduced"] == 1 and result["largest_deviation"] < 1e-6


def attribute(name: str, value: Any) -> Callable[[h5py.File], object]:
    return lambda file: file["data"].attrs.__setitem__(name, value)


def kwargs(**changes: Any) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        told = json.loads(file["data"].attrs["env_args"])
        told["env_kwargs"] |= changes
        file["data"].attrs["env_args"] = json.dumps(told)

    return change


def put(name: str, values: Any) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


REFUSED = {
    "another task": (attribute("bddl_file_name", "bddl_files/libero_spatial/x.bddl"), "'x.bddl', which is none of"),
    "robot": (kwargs(robots=["Sawyer"]), r"robots \['Sawyer'\]"),
    "rate": (kwargs(control_freq=10), "recorded at 10 Hz"),
    "controller": (kwargs(controller_configs={"type": "JOINT_POSITION"}), "controller's type 'JOINT_POSITION'"),
    "gain": (kwargs(controller_configs={"kp": 200}), "controller's kp 200; here it is 150"),
    "no JSON": (attribute("env_args", "{"), "env_args is no JSON"),
    "another group": (lambda f: f.move("data/demo_0", "data/first"), "data/'first' is none of the demonstrations"),
    "no states": (lambda f: f["data/demo_0"].pop("states"), "no dataset /data/demo_0/states"),
    "short states": (lambda f: put("data/demo_0/states", np.zeros((3, 92)))(f), r"states has shape \[3, 92\]"),
    "link": (put("data/demo_0/states", h5py.ExternalLink("/etc/passwd", "x")), "links are not followed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(case: str, opened: Callable[[str], Path], tmp_path: Path) -> None:
    change, says = REFUSED[case]
    with pytest.raises(DatasetError, match=says):
        imported(edit(opened("dataset"), change), tmp_path / "out")


def test_a_task_is_found_by_its_file_in_its_suites_folder() -> None:
    name = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate.bddl"
    assert task_of_bddl(Path("x"), f"C:\\data\\bddl_files\\libero_spatial\\{name}") == TASK
    assert task_of_bddl(Path("x"), name) == TASK
