# pyrefly: ignore-errors
# LeRobot is not among what the project installs.
"""Makes the datasets of this folder with LeRobot's own code. Runs inside an environment of LeRobot's, one per release.

    LEROBOT_0_3/bin/python make.py FOLDER [NAME ...]    0.3.3: versions 2.1 and 2.0
    LEROBOT_0_4/bin/python make.py FOLDER [NAME ...]    0.4.4: version 3.0, some from what 0.3.3 left in FOLDER
    LEROBOT_0_6/bin/python make.py FOLDER [NAME ...]    0.6.1: version 3.0 with depth maps and annotations

Each dataset is FOLDER/NAME/. FOLDER/NAME.npz holds its rows as LeRobot's own loader returns them, decoded by PyAV as in
the project, and FOLDER/written.json says which release wrote it, and how. Step t of episode e has the state
[n, e, t, ...], with n the number of the dataset, and pictures whose red is 40 + 30 e and green 20 + 9 t.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1"}

import lerobot  # noqa: E402
import numpy as np  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
RELEASE = lerobot.__version__.rpartition(".")[0]
TASKS = ("pick up the red block", "open the drawer", "push the plate")
LENGTHS = (5, 7, 6, 8)
OFF = (0.0, 0.03, 0.01, -0.03, 0.0, 0.04, 0.02, -0.02)
"""Seconds by which a clock is late."""
Described = dict[str, Any]
Recipe = Callable[[Path], None]
RECIPES: dict[str, tuple[Recipe, float | None]] = {}
"""What this release makes, and the tolerance in seconds with which LeRobot reads it; None: LeRobot cannot."""


def by(release: str, tolerance: float = 1e-4, loads: bool = True) -> Callable[[Recipe], Recipe]:
    def keep(recipe: Recipe) -> Recipe:
        if release == RELEASE:
            RECIPES[recipe.__name__] = recipe, tolerance if loads else None
        return recipe

    return keep


# --- what is in a dataset


def picture(height: int, width: int, episode: int, step: int) -> np.ndarray:
    """uint8 [height, width, 3] of its own for each episode and step, neither symmetric nor grey."""
    image = np.empty((height, width, 3), np.uint8)
    image[..., 0], image[..., 1] = 40 + 30 * episode, 20 + 9 * step
    image[..., 2] = np.linspace(0, 170, height)[:, None] + np.linspace(0, 70, width)
    return image


def camera(dtype: str, *shape: int, **info: Any) -> Described:
    names = ["channels", "height", "width"] if shape[0] == 3 else ["height", "width", "channels"]
    return {"dtype": dtype, "shape": shape, "names": names} | ({"info": info} if info else {})


def vector(size: int, dtype: str = "float32") -> Described:
    return {"dtype": dtype, "shape": (size,), "names": None}


FRONT = {
    "observation.state": vector(3),
    "action": vector(2),
    "observation.images.front": camera("video", 24, 32, 3),
    "next.reward": vector(1),
}
FEATURES = FRONT | {"observation.images.still": camera("image", 8, 8, 3)}


def frame(number: int, described: Described, episode: int, step: int) -> dict[str, Any]:
    """One step: numbers and pictures that tell dataset, episode and step."""
    values: dict[str, Any] = {}
    for key, feature in described.items():
        shape = tuple(feature["shape"])
        if feature["dtype"] == "language":
            continue
        if feature["dtype"] in ("video", "image") and shape[-1] == 1:
            values[key] = (np.arange(np.prod(shape)).reshape(shape) * 5 + 100 * episode + 10 * step).astype(np.uint16)
        elif feature["dtype"] in ("video", "image"):
            height, width = shape[1:] if shape[0] == 3 else shape[:2]
            image = picture(height, width, episode, step + (3 if "wrist" in key else 0))
            values[key] = image.transpose(2, 0, 1) if shape[0] == 3 else image
        elif "action" in key:
            values[key] = np.array([10 * episode + step, -step, number, *range(16)][: shape[0]], feature["dtype"])
        else:
            values[key] = np.resize(np.array([number, episode, step, 0.1 * step]), shape).astype(feature["dtype"])
    return values


def several(episode: int, step: int) -> str:
    """Two tasks within every second episode."""
    return TASKS[2 if episode % 2 and step >= 3 else episode % 2]


def record(
    folder: Path,
    described: Described,
    *,
    number: int = 0,
    fps: int = 10,
    task: Callable[[int, int], str] = several,
    late: tuple[float, ...] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    sizes: dict[str, float] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """A dataset written by LeRobot. `late`: what is added to the time of each step of an episode."""
    dataset = LeRobotDataset.create(
        f"local/{folder.name}", fps, described, root=folder, robot_type="simulated", tolerance_s=tolerance,
        use_videos=any(feature["dtype"] == "video" for feature in described.values()),
    )  # fmt: skip
    if RELEASE == "0.3":
        dataset.meta.info |= sizes or {}
    elif sizes:
        dataset.meta.update_chunk_settings(**sizes)
        dataset.meta.metadata_buffer_size = 2  # else all episodes are in one file
    for episode, length in enumerate(lengths):
        for step in range(length):
            values = frame(number, described, episode, step)
            if RELEASE == "0.3":
                time = step / fps + late[step] if late else None
                dataset.add_frame(values, task=task(episode, step), timestamp=time)
            else:  # takes no times
                dataset.add_frame(values | {"task": task(episode, step)})
        dataset.save_episode()
    if RELEASE != "0.3":
        dataset.finalize()
    shutil.rmtree(folder / "images", ignore_errors=True)


def opened(folder: Path, tolerance: float = 1e-4) -> LeRobotDataset:
    return LeRobotDataset(f"local/{folder.name}", root=folder, tolerance_s=tolerance, video_backend="pyav")


def write_rows(folder: Path, tolerance: float) -> None:
    """FOLDER/NAME.npz as LeRobot's loader has it: `column/KEY`, `frames/KEY` (uint8 [rows, H, W, 3]) and `task`."""
    dataset = opened(folder, tolerance)
    rows: dict[str, list[Any]] = {}
    for i in range(len(dataset)):
        item = dataset[i]
        rows.setdefault("task", []).append(item["task"])
        for key, feature in dataset.features.items():
            if feature["dtype"] in ("video", "image"):
                if len(item[key]) == 3:  # else it is a depth map
                    pixels = np.round(item[key].numpy() * 255).astype(np.uint8).transpose(1, 2, 0)
                    rows.setdefault(f"frames/{key}", []).append(pixels)
            elif feature["dtype"] not in ("string", "language"):
                rows.setdefault(f"column/{key}", []).append(item[key].numpy())
    arrays = {key: np.array(values) for key, values in rows.items()}
    assert np.array_equal(arrays["column/index"], np.arange(len(dataset))), "LeRobot's own order is by index"
    np.savez_compressed(folder.with_suffix(".npz"), **arrays)


# --- versions 2.1 and 2.0


@by("0.3")
def v21(folder: Path) -> None:
    """create, add_frame(task=), save_episode; chunks of 3 episodes; two tasks within episodes"""
    record(folder, FEATURES, sizes={"chunks_size": 3})


@by("0.3")
def v20(folder: Path) -> None:
    """v21, and LeRobot's converter from 2.0 to 2.1 reversed: meta/stats.json in place of meta/episodes_stats.jsonl"""
    from lerobot.datasets.utils import write_stats

    if not folder.exists():
        shutil.copytree(folder.with_name("v21"), folder)
    write_stats(opened(folder).meta.stats, folder)
    (folder / "meta/episodes_stats.jsonl").unlink()
    info = json.loads((folder / "meta/info.json").read_text()) | {"codebase_version": "v2.0"}
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))


@by("0.3")
def openpi_libero_v20(folder: Path) -> None:
    """keys, shapes and fps of openpi's examples/libero; made to 2.0 as v20 was"""
    pictures = {"image": camera("image", 16, 16, 3), "wrist_image": camera("image", 16, 16, 3)}
    record(folder, pictures | {"state": vector(8), "actions": vector(7)}, lengths=LENGTHS[:3])
    v20(folder)


@by("0.3")
def channels_first_v21(folder: Path) -> None:
    """shapes [3, H, W] of a video and of still pictures, as openpi's examples/aloha_real has them"""
    pictures = {"observation.images.cam_high": camera("video", 3, 24, 32)}
    pictures["observation.images.cam_low"] = camera("image", 3, 8, 12)
    record(folder, {"observation.state": vector(14), "action": vector(14)} | pictures, fps=50, lengths=LENGTHS[:2])


@by("0.3", tolerance=0.05)
def drifting_v21(folder: Path) -> None:
    """add_frame(timestamp=) by a clock that is up to 0.04 s off the steps of 0.1 s; tolerance_s=0.05"""
    record(folder, FRONT, late=OFF, lengths=LENGTHS[1:], tolerance=0.05)


# --- version 3.0: converted


def convert(source: str, folder: Path, **sizes: float) -> None:
    from lerobot.datasets.v30.convert_dataset_v21_to_v30 import convert_dataset

    shutil.copytree(folder.with_name(source), folder)
    convert_dataset(folder.name, root=folder.parent, push_to_hub=False, **sizes)
    shutil.rmtree(folder.with_name(f"{folder.name}_old"))


@by("0.4")
def converted(folder: Path) -> None:
    """convert_dataset of v21"""
    convert("v21", folder)


@by("0.4")
def converted_small_files(folder: Path) -> None:
    """convert_dataset(data_file_size_in_mb=0.004, video_file_size_in_mb=0.0016) of v21: the third episode, which begins
    a file, points to the file before"""
    convert("v21", folder, data_file_size_in_mb=0.004, video_file_size_in_mb=0.0016)


@by("0.4")
def converted_tiny_files(folder: Path) -> None:
    """convert_dataset(data_file_size_in_mb=0.001, video_file_size_in_mb=0.001) of v21: episodes point to data files
    0 to 3, and lie in 1 to 4"""
    convert("v21", folder, data_file_size_in_mb=0.001, video_file_size_in_mb=0.001)


@by("0.4", tolerance=0.05)
def drifting_v30(folder: Path) -> None:
    """convert_dataset of drifting_v21"""
    convert("drifting_v21", folder)


# --- version 3.0: written, cut, merged


@by("0.4")
def v30(folder: Path) -> None:
    """create, add_frame, save_episode, finalize; two files of data and episodes, four of video in two chunks"""
    sizes = {"chunks_size": 2, "data_files_size_in_mb": 0.004, "video_files_size_in_mb": 0.0016}
    record(folder, FEATURES, fps=20, sizes=sizes)


@by("0.4")
def other(folder: Path) -> None:
    """as v30, in one file of each kind, with the tasks in another order"""
    record(folder, FEATURES, fps=20, number=1, task=lambda episode, step: TASKS[2 - episode], lengths=(6, 5, 7))


@by("0.4")
def deleted(folder: Path) -> None:
    """delete_episodes([0, 1]) of v30: there is no first file"""
    tools().delete_episodes(opened(folder.with_name("v30")), [0, 1], output_dir=folder)


@by("0.4")
def deleted_within(folder: Path) -> None:
    """delete_episodes([1]) of other: the video is encoded again"""
    tools().delete_episodes(opened(folder.with_name("other")), [1], output_dir=folder)


@by("0.4")
def split(folder: Path) -> None:
    """split_dataset({"rest": [0], "split": [3, 1, 2]}) of v30"""
    cut(folder.with_name("v30"), {"rest": [0], "split": [3, 1, 2]}, folder)


@by("0.4")
def merged(folder: Path) -> None:
    """merge_datasets of v30 and other: videos are appended"""
    parts = [opened(folder.with_name(part)) for part in ("v30", "other")]
    tools().merge_datasets(parts, "local/merged", output_dir=folder)


@by("0.4")
def merged_small_files(folder: Path) -> None:
    """aggregate_datasets(data_files_size_in_mb=0.006, video_files_size_in_mb=0.0016, chunk_size=2) of other, deleted
    and split"""
    parts = [folder.with_name(part) for part in ("other", "deleted", "split")]
    aggregate(parts, folder, data_files_size_in_mb=0.006, video_files_size_in_mb=0.0016, chunk_size=2)


@by("0.4")
def features_changed(folder: Path) -> None:
    """remove_feature("observation.images.front") of other, then add_features of `value` and `label`"""
    removed = folder.with_name("removed")
    source = tools().remove_feature(opened(folder.with_name("other")), "observation.images.front", output_dir=removed)
    value = np.arange(len(source), dtype=np.float32)[:, None] / 2
    added = {"value": (value, vector(1)), "label": (lambda row, episode, step: int(episode), vector(1, "int64"))}
    tools().add_features(source, added, output_dir=folder)
    shutil.rmtree(removed)


# --- version 3.0: as others lay them out


@by("0.4")
def libero_v30_images(folder: Path) -> None:
    """keys, shapes and fps of LeRobot's LIBERO datasets of pictures"""
    pictures = {f"observation.images.{name}": camera("image", 16, 16, 3) for name in ("image", "image2")}
    record(folder, pictures | {"observation.state": vector(8), "action": vector(7)}, lengths=LENGTHS[:3])


@by("0.4")
def libero_v30_videos(folder: Path) -> None:
    """keys, shapes and fps of LeRobot's LIBERO datasets of videos"""
    pictures = {f"observation.images.{name}": camera("video", 32, 32, 3) for name in ("image", "wrist_image")}
    record(folder, pictures | {"observation.state": vector(8), "action": vector(7)}, fps=20, lengths=LENGTHS[:3])


@by("0.4")
def maniskill(folder: Path) -> None:
    """mani_skill/trajectory/convert_to_lerobot.py of ManiSkill 3.0.1, from a trajectory file with pictures made up"""
    import h5py

    (script,) = ROOT.glob(".venv/lib/python3*/site-packages/mani_skill/trajectory/convert_to_lerobot.py")
    with tempfile.TemporaryDirectory() as scratch:
        trajectory = Path(scratch) / "trajectory.h5"
        with h5py.File(trajectory, "w") as file:
            for episode, length in enumerate(LENGTHS[:3]):
                group, seen = file.create_group(f"traj_{episode}"), range(length + 1)
                actions = [frame(0, {"action": vector(7)}, episode, step)["action"] for step in range(length)]
                group["actions"] = np.array(actions)
                group["obs/agent/qpos"] = np.array([[0, episode, step, *range(6)] for step in seen], np.float32)
                rgb = np.stack([picture(32, 32, episode, step) for step in seen])
                group["obs/sensor_data/base_camera/rgb"] = rgb
        metadata = {"env_info": {"env_id": "PushCube-v1"}, "episodes": [{"episode_id": number} for number in range(3)]}
        trajectory.with_suffix(".json").write_text(json.dumps(metadata))
        options = ["--task-name", "Push the cube to the goal", "--image-size", "32"]
        subprocess.run(
            [sys.executable, script, "--traj-path", trajectory, "--output-dir", folder, *options],
            check=True,
            capture_output=True,
        )


# --- recordings of the project


def recorded(color: str, episodes: int, folder: Path) -> Path:
    command = [ROOT / ".venv/bin/python", "-m", "embodied.cli", "record", "tabletop_scripted", "--out", folder]
    options = f"--env.task tabletop/reach_{color} --episodes {episodes} --runtime.mode inline --env.cameras 1"
    options += " --env.image-size 32 --env.max-episode-steps 8"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *options.split()], check=True, capture_output=True, cwd=ROOT, env=env)
    return folder


@by("0.4")
def ours(folder: Path) -> None:
    """embodied record tabletop_scripted --env.task tabletop/reach_red, 4 episodes"""
    recorded("red", 4, folder)


@by("0.4")
def ours_deleted(folder: Path) -> None:
    """delete_episodes([1]) of ours"""
    tools().delete_episodes(opened(folder.with_name("ours")), [1], output_dir=folder)


@by("0.4")
def ours_split(folder: Path) -> None:
    """split_dataset({"rest": [0], "ours_split": [2, 3]}) of ours"""
    cut(folder.with_name("ours"), {"rest": [0], "ours_split": [2, 3]}, folder)


@by("0.4")
def ours_merged(folder: Path) -> None:
    """merge_datasets of ours and of a recording of tabletop/reach_blue"""
    with tempfile.TemporaryDirectory() as scratch:
        blue = opened(recorded("blue", 2, Path(scratch) / "blue"))
        tools().merge_datasets([opened(folder.with_name("ours")), blue], "local/ours_merged", output_dir=folder)


@by("0.4")
def ours_beside_cut(folder: Path) -> None:
    """aggregate_datasets(video_files_size_in_mb=0.001) of ours and ours_deleted: seeds are floats, and lack in some"""
    parts = [folder.with_name(part) for part in ("ours", "ours_deleted")]
    aggregate(parts, folder, video_files_size_in_mb=0.001)


@by("0.4", loads=False)
def ours_and_cut(folder: Path) -> None:
    """merge_datasets of ours and ours_deleted: H.264 and AV1 in one file, of which no decoder shows the second part"""
    parts = [opened(folder.with_name(part)) for part in ("ours", "ours_deleted")]
    tools().merge_datasets(parts, "local/ours_and_cut", output_dir=folder)


# --- the newest release


@by("0.6")
def newest(folder: Path) -> None:
    """create, add_frame, save_episode; depth maps as video and as pictures; columns of LeRobot's annotation pipeline"""
    depths = {"observation.images.depth": camera("video", 24, 32, 1, is_depth_map=True)}
    depths["observation.images.near"] = camera("image", 8, 8, 1, is_depth_map=True)
    record(folder, FRONT | depths, lengths=LENGTHS[:3])
    annotate(folder)


@by("0.6")
def newest_merged(folder: Path) -> None:
    """merge_datasets of two as v30: a row group per episode"""
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(2):
            record(Path(scratch) / str(number), FEATURES, number=number, lengths=LENGTHS[:2])
        parts = [opened(Path(scratch) / str(number)) for number in range(2)]
        tools().merge_datasets(parts, "local/newest_merged", output_dir=folder)


def annotate(folder: Path) -> None:
    """Adds the two columns that LeRobot's annotation pipeline writes, by its writer."""
    import pyarrow.parquet as pq
    from lerobot.annotations.steerable_pipeline.writer import LanguageColumnsWriter, speech_atom
    from lerobot.datasets.io_utils import write_table_one_row_group_per_episode
    from lerobot.datasets.language import language_feature_info

    info = json.loads((folder / "meta/info.json").read_text())
    info["features"] |= {key: feature | {"shape": [1]} for key, feature in language_feature_info().items()}
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))
    subtask = {"role": "assistant", "content": "reach", "style": "subtask", "timestamp": 0.0}
    subtask |= {"camera": None, "tool_calls": None}
    spoken = {key: value for key, value in speech_atom(0.2, "done").items() if key != "timestamp"}
    for path in folder.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        events = [[spoken] if step == 2 else [] for step in table["frame_index"].to_pylist()]
        table = LanguageColumnsWriter()._materialize_table(table, [[subtask]] * len(table), events, drop_old=True)
        write_table_one_row_group_per_episode(table, path)


# ---


def tools() -> Any:
    return import_module("lerobot.datasets.dataset_tools")


def aggregate(parts: list[Path], folder: Path, **sizes: float) -> None:
    module = import_module("lerobot.datasets.aggregate")
    module.aggregate_datasets([f"local/{part.name}" for part in parts], f"local/{folder.name}", parts, folder, **sizes)


def cut(source: Path, parts: dict[str, list[int]], folder: Path) -> None:
    """The part of a split that is called as `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        tools().split_dataset(opened(source), parts, output_dir=scratch)
        shutil.move(Path(scratch) / folder.name, folder)


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    written = out / "written.json"
    for name, (recipe, tolerance) in RECIPES.items():
        if names and name not in names:
            continue
        shutil.rmtree(out / name, ignore_errors=True)
        recipe(out / name)
        if tolerance is not None:
            write_rows(out / name, tolerance)
        version = json.loads((out / name / "meta/info.json").read_text())["codebase_version"]
        entry = {"lerobot": lerobot.__version__, "version": version, "how": " ".join(recipe.__doc__.split())}
        entries = json.loads(written.read_text()) if written.exists() else {}
        written.write_text(json.dumps(dict(sorted((entries | {name: entry}).items())), indent=1) + "\n")
        print(name, sum(path.stat().st_size for path in (out / name).rglob("*") if path.is_file()) // 1024, "KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
