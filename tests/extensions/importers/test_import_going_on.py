"""Recordings that ManiSkill wrote episode after episode: as recorded, or left out by name; what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied import cli
from embodied.config.schema import RuntimeConfig
from embodied.demonstrations import Dataset, DatasetError
from embodied.demonstrations.mixture import open_dataset
from embodied.errors import UserError
from embodied_importers.command import run
from embodied_importers.formats import ImportRequest, Observations, convertible
from embodied_importers.hdf5 import ManiSkillFile
from sim_farm.client.episode_replay import Replayer
from sim_farm.contract import FarmError, TaskSpec

RECORDINGS = Path(__file__).parent / "recordings"
EE = RECORDINGS / "pushes/trajectory.h5"
INLINE = RuntimeConfig(mode="inline")
NO_FRAMES = Observations(cameras=0)


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Dataset]:
    settings: dict[str, Any] = {"env": NO_FRAMES, **options}
    return run(ImportRequest(source, out=out, runtime=INLINE, **settings)), Dataset(out)


@pytest.fixture(scope="module")
def pushes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Dataset]:
    """Both solved episodes and the other one, drawn at 48 x 48."""
    return imported(EE, tmp_path_factory.mktemp("pushes") / "out", env=Observations(image_size=48))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of `pushes`' file, beside its JSON."""
    return shutil.copytree(EE.parent, tmp_path / "push") / EE.name


def edit(path: Path, change: Callable[[h5py.File], object]) -> Path:
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def edit_metadata(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    about = path.with_suffix(".json")
    metadata = json.loads(about.read_text())
    change(metadata)
    about.write_text(json.dumps(metadata))
    return path


def put(file: h5py.File, name: str, values: Any) -> None:
    del file[name]
    file[name] = values


# --- what reproduces


@pytest.mark.slow
def test_every_row_is_as_recorded(pushes: tuple[dict[str, Any], Dataset]) -> None:
    result, dataset = pushes
    assert (result["replayed"], result["reproduced"], result["reproduced_exactly"]) == (3, 3, 3)
    assert (result["largest_deviation"], result["left_out"], result["env_steps"]) == (0, {}, 36)
    # traj_1 is as recorded only after traj_0, whose last contacts ManiSkill's reset leaves in PhysX: it comes last.
    assert result["recorded_episodes"] == ["traj_0", "traj_2", "traj_1"]
    with h5py.File(EE) as file:
        for episode, name in zip(dataset.episodes, result["recorded_episodes"], strict=True):
            rows = range(episode.begin, episode.end)
            batch = dataset.batch(rows)
            np.testing.assert_array_equal(batch.actions[:, 0], file[f"{name}/actions"])
            np.testing.assert_array_equal(dataset.column("next.success")[rows], file[f"{name}/success"])
            assert dataset.column("next.done")[rows].tolist() == [False] * 11 + [True]
            # ManiSkill's state begins with the robot's joints and their velocities.
            assert batch.proprio is not None
            robot = file[f"{name}/env_states/articulations/panda"][:-1, 13:]
            np.testing.assert_array_equal(batch.proprio[:, :18], robot)
            assert batch.frames["base_camera"].shape == (12, 48, 48, 3)
            assert batch.frames["base_camera"].std() > 10
    assert [episode.row["success"] for episode in dataset.episodes] == [True, False, True]
    assert [episode.spec and episode.spec.seed for episode in dataset.episodes] == [1000, 1002, None]


@pytest.mark.slow
def test_the_dataset_says_where_it_is_from(pushes: tuple[dict[str, Any], Dataset]) -> None:
    about = json.loads((pushes[1].folder / "meta/embodied.json").read_text())
    assert about["sha256"] == hashlib.sha256(EE.read_bytes()).hexdigest()
    assert about["source"] == str(EE) and about["format"] == "ManiSkill's trajectories"
    assert (about["tolerance"], about["filter"], about["only_successes"]) == (1e-3, None, False)
    assert about["recorded_episodes"] == ["traj_0", "traj_2", "traj_1"] and about["left_out"] == {}
    assert about["task"]["name"] == "maniskill/PushCube-v1" and about["task"]["control_mode"] == "pd_ee_delta_pose"
    assert about["notes"] == ["recorded observations and rewards are not copied: both are made anew"]


@pytest.mark.slow
def test_recorded_starts_replay_again_from_the_dataset(pushes: tuple[dict[str, Any], Dataset]) -> None:
    dataset = pushes[1]
    episode = dataset.episodes[0]
    assert episode.spec is not None and episode.spec.seed == 1000
    batch = dataset.batch(range(episode.begin, episode.end))
    task = TaskSpec("maniskill/PushCube-v1", "pd_ee_delta_pose", max_episode_steps=12)
    with closing(Replayer(task)) as replayer:
        again = replayer.replay(episode.spec, batch.actions[:, 0])
    steps = again.steps  # a task that is solved ends; the recording went on
    assert batch.proprio is not None
    np.testing.assert_array_equal(again.proprio, batch.proprio[:steps])
    assert again.success[-1] and again.success.tolist() == dataset.column("next.success")[:steps].tolist()


@pytest.mark.slow
def test_an_episode_goes_on_from_those_before_it_in_the_file(copied: Path, tmp_path: Path) -> None:
    result, dataset = imported(copied, tmp_path / "out", episodes=("1",))
    assert result["recorded_episodes"] == ["traj_1"] and result["reproduced_exactly"] == 1
    with h5py.File(EE) as file:
        np.testing.assert_array_equal(dataset.batch(range(12)).actions[:, 0], file["traj_1/actions"])
    # Without the one before it, alone or beside a damaged one, it slides by up to 8 mm.
    edit(copied, lambda file: file["traj_0"].pop("actions"))
    with pytest.raises(UserError, match=r"traj_1: step 6: a state is 0\.00186 from the recorded one"):
        imported(copied, tmp_path / "none", episodes=("1",))
    assert imported(copied, tmp_path / "wide", episodes=("1",), tolerance=0.01)[0]["reproduced_exactly"] == 0


# --- what does not, and what is not wanted


@pytest.mark.slow
def test_only_successes_and_what_was_edited_are_left_out_by_name(copied: Path, tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        file["traj_0/actions"][3, 0] += 0.5
        file.move("traj_1", "traj_9")

    edit(copied, spoil)
    with pytest.raises(UserError, match="none of the 2 episodes"):
        imported(copied, tmp_path / "out", only_successes=True)
    edit(copied, lambda file: put(file, "traj_0/actions", h5py.File(EE)["traj_0/actions"][()]))
    edit(copied, lambda file: file.move("traj_9", "traj_1"))
    edit(copied, lambda file: file["traj_1/actions"].write_direct(file["traj_0/actions"][()]))
    result, _ = imported(copied, tmp_path / "out", only_successes=True)
    assert (result["replayed"], result["reproduced"], result["not_reproduced"], result["episodes"]) == (3, 2, 1, 1)
    assert result["recorded_episodes"] == ["traj_0"]
    assert result["left_out"]["traj_1"].startswith("step 0: a state is ")
    assert result["left_out"]["traj_2"] == "it does not end solved"
    about = json.loads((tmp_path / "out/meta/embodied.json").read_text())
    assert about["left_out"] == result["left_out"] and about["only_successes"] is True


@pytest.mark.slow
def test_edited_states_successes_and_entries_are_found(copied: Path, tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        file["traj_0/env_states/actors/cube"][7, 1] += 0.01
        file["traj_1/success"][11] = False
        file.move("traj_2", "traj_9")

    edit_metadata(edit(copied, spoil), lambda metadata: None)
    with pytest.raises(UserError) as caught:
        imported(copied, tmp_path / "out")
    assert "none of the 2 episodes" in str(caught.value) and "--tolerance" in str(caught.value)
    assert "traj_0: step 6: a state is 0.01 from" in str(caught.value)
    assert "traj_1: step 11: recorded as not solved, replayed as solved" in str(caught.value)
    assert list(tmp_path.iterdir()) == [copied.parent], "nothing is left of it"
    result, _ = imported(copied, tmp_path / "out", tolerance=0.02)
    assert result["recorded_episodes"] == ["traj_0"] and result["reproduced_exactly"] == 0
    assert result["largest_deviation"] == pytest.approx(0.01, rel=1e-3)
    assert result["left_out"]["traj_2"] == "the .h5 file has no such group"
    assert result["left_out"]["traj_9"] == "trajectory.json has no entry of it"


def test_a_start_that_no_seed_leads_to_is_used_and_has_no_seed(copied: Path, tmp_path: Path) -> None:
    """The last six steps of an episode: the state in between was recorded as well."""

    def cut(file: h5py.File) -> None:
        for name in ("actions", "success"):
            put(file, f"traj_1/{name}", file[f"traj_1/{name}"][6:])
        for kind in ("actors", "articulations"):
            for body in list(file[f"traj_1/env_states/{kind}"]):
                put(file, f"traj_1/env_states/{kind}/{body}", file[f"traj_1/env_states/{kind}/{body}"][6:])

    edit_metadata(edit(copied, cut), lambda metadata: metadata["episodes"][1].update(elapsed_steps=6))
    result, dataset = imported(copied, tmp_path / "out", episodes=("1",), tolerance=0.05)
    assert result["episodes"] == 1 and dataset.episodes[0].spec is None
    with h5py.File(copied) as file:
        first = file["traj_1/env_states/articulations/panda"][0, 13:22]
    proprio = dataset.batch([0]).proprio
    assert proprio is not None and proprio[0, :9] == pytest.approx(first, abs=1e-6)


def test_another_robots_scene_does_not_reproduce(copied: Path, tmp_path: Path) -> None:
    def rename(file: h5py.File) -> None:
        for name in file:
            file[name].move("env_states/articulations/panda", "env_states/articulations/xarm6")

    with pytest.raises(UserError, match=r"the recorded scene is another one: it has articulations/xarm6.*and lacks"):
        imported(edit(copied, rename), tmp_path / "out")


def test_recordings_of_the_gpu_say_that_they_deviate(copied: Path) -> None:
    edit_metadata(copied, lambda metadata: metadata["env_info"]["env_kwargs"].update(sim_backend="physx_cuda"))
    assert "another solver than PhysX's on the CPU" in ManiSkillFile(copied, None).notes[0]


# --- what is refused

JSON = {
    "unknown task": (lambda t: t["env_info"].update(env_id="PushCub-v1"), "not here: unknown task.*PushCube-v1"),
    "unknown control mode": (lambda t: [e.update(control_mode="pd_warp") for e in t["episodes"]], "pd_warp"),
    "two control modes": (lambda t: t["episodes"][0].update(control_mode="pd_joint_pos"), "2 control modes"),
    "other actions": (lambda t: [e.update(control_mode="pd_joint_pos") for e in t["episodes"]], "7 numbers.*takes 8"),
    "unknown argument": (lambda t: t["env_info"]["env_kwargs"].update(cube_mass=3), "cube_mass=3.*not.*simulated here"),
    "no seed": (lambda t: t["episodes"][0].update(episode_seed=None, reset_kwargs={}), "reset with the seed None"),
    "options": (lambda t: t["episodes"][0]["reset_kwargs"].update(options={"pose": 1}), "option 'pose'"),
    "cut short": (lambda t: t["episodes"][2].update(elapsed_steps=50), "traj_2 has 12 actions, its .json says 50"),
    "twice": (lambda t: t["episodes"].append(t["episodes"][0]), "names an episode twice"),
    "no episode": (lambda t: t["episodes"].clear(), "has episodes of 0 control modes"),
    "not ManiSkill's": (lambda t: t.pop("env_info"), "env_info: Field required"),
}  # fmt: skip
HDF5 = {
    "no states": (lambda f: f["traj_0"].pop("env_states"), "traj_0 has no env_states.*record_env_state=True"),
    "no actions": (lambda f: f["traj_1"].pop("actions"), "traj_1/actions"),
    "flat actions": (lambda f: put(f, "traj_0/actions", np.zeros(12)), r"shape \[12\]"),
    "texts": (lambda f: put(f, "traj_0/actions", [["a"] * 7] * 12), "no numbers"),
    "not finite": (lambda f: put(f, "traj_0/actions", np.full((12, 7), np.nan)), "not finite at step 0"),
    "no steps": (lambda f: put(f, "traj_0/actions", np.zeros((0, 7))), "an episode has 1 to"),
    "short states": (lambda f: put(f, "traj_2/env_states/actors/cube", np.zeros((5, 13))), r"\[5, 13\].*\[13, any\]"),
    "short success": (lambda f: put(f, "traj_2/success", [True]), r"success has shape \[1\]"),
    "maniskill 2": (lambda f: put(f, "traj_0/env_states", np.zeros((13, 40))), "ManiSkill 2 wrote it"),
    "soft link": (lambda f: put(f, "traj_0/actions", h5py.SoftLink("/traj_1/actions")), "links are not followed"),
    "external link": (lambda f: put(f, "traj_0/actions", h5py.ExternalLink("/x", "y")), "links are not followed"),
}  # fmt: skip


@pytest.mark.parametrize("case", JSON)
def test_what_the_json_says_and_is_not_here_is_refused_by_name(case: str, copied: Path, tmp_path: Path) -> None:
    change, says = JSON[case]
    with pytest.raises((UserError, FarmError), match=says):
        imported(edit_metadata(copied, change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", HDF5)
def test_damaged_files_are_refused_before_anything_is_simulated(case: str, copied: Path, tmp_path: Path) -> None:
    change, says = HDF5[case]
    with pytest.raises(DatasetError, match=says) as caught:
        imported(edit(copied, change), tmp_path / "out")
    assert str(copied) in str(caught.value)


def test_numbers_in_another_file_are_not_read(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(12 * 7 * 4))
    edit(copied, lambda f: (f["traj_0"].pop("actions"), f.create_dataset(
        "traj_0/actions", (12, 7), "f4", external=[(str(tmp_path / "secret"), 0, 12 * 7 * 4)])))  # fmt: skip
    with pytest.raises(DatasetError, match="lies in another file, which is not read: h5repack it"):
        imported(copied, tmp_path / "out")


def test_a_file_that_is_cut_or_alone_is_refused(copied: Path, tmp_path: Path) -> None:
    whole = copied.read_bytes()
    copied.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="trajectory.h5"):
        imported(copied, tmp_path / "out")
    copied.write_bytes(whole)
    copied.with_suffix(".json").unlink()
    with pytest.raises(DatasetError, match="lacks trajectory.json beside it.*copy it there"):
        imported(copied, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"episodes": ("3",)}, "0 to 2|0:3|0-2"),
        ({"episodes": ("two",)}, "two"),
        ({"tolerance": -1.0}, "--tolerance is a deviation of at least 0"),
        ({"task": "libero/libero_goal/0"}, "--task names libero/libero_goal/0: name one of maniskill/"),
        ({"fps": 10}, "--fps is not for .*: --task, --env, --episodes"),
        ({"env": Observations(cameras=("nowhere",))}, "nowhere"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, FarmError), match=says):
        imported(EE, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "an empty folder"),
        (lambda path: (path.mkdir(), (path / "notes.txt").touch()), "a folder with notes.txt"),
        (lambda path: path.write_text("hello, world"), "begins with b'hello, w'"),
        (lambda path: h5py.File(path, "w").create_group("images"), "an HDF5 file of another layout"),
        (lambda path: None, "not there"),
    ],
)
def test_what_is_no_recording_is_named_with_what_is_accepted(
    make: Callable[[Path], object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "source")
    assert cli.main(["import", str(tmp_path / "source"), "--out", str(tmp_path / "out")]) == 2
    output = " ".join(capsys.readouterr().err.split())
    for part in (says, "ManiSkill's trajectories", "LIBERO's demonstrations", "robomimic's", "RLDS"):
        assert part in output


def test_training_on_a_recording_names_the_command(tmp_path: Path) -> None:
    said = convertible(EE)
    assert said is not None and said.endswith(f": embodied import {EE} --out {EE.with_suffix('')}-imported")
    with pytest.raises(UserError, match="embodied import .*trajectory.h5 --out .*trajectory-imported"):
        open_dataset(EE)
