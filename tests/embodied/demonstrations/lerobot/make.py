"""Makes the fixtures of this folder with LeRobot's own code. Runs inside a LeRobot environment, not in the project's.

    OLD/bin/python make.py FOLDER     with LeRobot 0.3.3: the datasets of versions 2.1 and 2.0
    NEW/bin/python make.py FOLDER     with LeRobot 0.4.4: those of version 3.0; converts what the old one left in FOLDER

Each dataset is FOLDER/NAME/. FOLDER/NAME.npz holds its rows as LeRobot's own loader returns them (PyAV decodes, as it
does in the project), and FOLDER/written.json says which release wrote it, and how. Step t of episode e of the dataset
with the number n has the state [n, e, t], and pictures whose red is 40 + 30 e, green 20 + 9 t, with a slope in blue.
"""

# mypy: ignore-errors
# LeRobot is not among what the project installs.

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import lerobot  # noqa: E402
import numpy as np  # noqa: E402
from lerobot.datasets.lerobot_dataset import CODEBASE_VERSION, LeRobotDataset  # noqa: E402

TASKS = ("pick up the red block", "open the drawer", "push the plate")
LENGTHS = (5, 7, 6, 8)
Sizes = dict[str, float]


def picture(height: int, width: int, episode: int, step: int) -> np.ndarray:
    """uint8 [height, width, 3] of its own for each episode and step, neither symmetric nor grey."""
    image = np.empty((height, width, 3), np.uint8)
    image[..., 0], image[..., 1] = 40 + 30 * episode, 20 + 9 * step
    image[..., 2] = np.linspace(0, 250, height)[:, None] * 0.7 + np.linspace(0, 70, width)
    return image


def camera(height: int, width: int, dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": (height, width, 3), "names": ["height", "width", "channels"]}


def vector(size: int, dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": (size,), "names": None}


def features(dtype: str = "video") -> dict[str, Any]:
    """A state, an action, a camera of video and a still one, a reward."""
    return {
        "observation.state": vector(3),
        "action": vector(2),
        "observation.images.front": camera(24, 32, dtype),
        "observation.images.still": camera(8, 8, "image"),
        "next.reward": vector(1),
    }


def frame(number: int, described: dict[str, Any], episode: int, step: int) -> dict[str, Any]:
    """One step of `described`: numbers that tell dataset, episode and step."""
    values: dict[str, Any] = {}
    for key, feature in described.items():
        shape = tuple(feature["shape"])
        if feature["dtype"] in ("video", "image"):
            height, width = shape[:2] if shape[2] == 3 else shape[1:]
            image = picture(height, width, episode, step + (3 if "wrist" in key else 0))
            values[key] = image if shape[2] == 3 else image.transpose(2, 0, 1)
        elif feature["dtype"] == "string":
            values[key] = f"step {step} of {episode}"
        elif feature["dtype"] == "bool":
            values[key] = np.array([step == 4])
        elif "action" in key:
            values[key] = np.array([10 * episode + step, -step, number, *range(8)][: shape[0]], feature["dtype"])
        else:
            flat = np.resize(np.array([number, episode, step, 0.1 * step], np.float64), int(np.prod(shape)))
            values[key] = flat.reshape(shape).astype(feature["dtype"])
    return values


def record(
    folder: Path,
    described: dict[str, Any],
    *,
    number: int = 0,
    fps: int = 10,
    tasks: Callable[[int, int], str] = lambda episode, step: TASKS[episode % 2],
    times: Callable[[int], float] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    sizes: Sizes | None = None,
    tolerance: float = 1e-4,
) -> None:
    """A dataset of `described` features, written by LeRobot. `tasks` and `times` are of an episode's steps."""
    old = CODEBASE_VERSION == "v2.1"
    dataset = LeRobotDataset.create(
        f"local/{folder.name}", fps, described, root=folder, robot_type="simulated",
        use_videos=any(feature["dtype"] == "video" for feature in described.values()), tolerance_s=tolerance,
    )  # fmt: skip
    if old:
        dataset.meta.info |= sizes or {}
    elif sizes:
        dataset.meta.update_chunk_settings(**sizes)
        dataset.meta.metadata_buffer_size = 2  # else all episodes are in one file
    for episode, length in enumerate(lengths):
        for step in range(length):
            values, task = frame(number, described, episode, step), tasks(episode, step)
            if old:
                dataset.add_frame(values, task=task, timestamp=times and times(step))
            else:  # takes no timestamps
                dataset.add_frame(values | {"task": task})
        dataset.save_episode()
    if not old:
        dataset.finalize()
    shutil.rmtree(folder / "images", ignore_errors=True)


def opened(folder: Path, tolerance: float = 1e-4) -> LeRobotDataset:
    return LeRobotDataset(f"local/{folder.name}", root=folder, tolerance_s=tolerance, video_backend="pyav")


def write_rows(folder: Path, tolerance: float) -> None:
    """Beside `folder`, its rows as LeRobot's loader returns them: `column/KEY`, `frames/KEY` (uint8) and `task`."""
    dataset = opened(folder, tolerance)
    rows: dict[str, list[Any]] = {}
    for i in range(len(dataset)):
        item = dataset[i]
        rows.setdefault("task", []).append(item["task"])
        for key, feature in dataset.features.items():
            value = item[key] if isinstance(item[key], str) else item[key].numpy()
            if feature["dtype"] in ("video", "image"):
                pixels = np.round(value * 255).astype(np.uint8).transpose(1, 2, 0)
                rows.setdefault(f"frames/{key}", []).append(pixels)
            else:
                rows.setdefault(f"column/{key}", []).append(value)
    arrays = {key: np.array(values) for key, values in rows.items()}
    assert np.array_equal(arrays["column/index"], np.arange(len(dataset))), "LeRobot's own order is by index"
    np.savez_compressed(folder.with_suffix(".npz"), **arrays)


class Maker:
    """Datasets by name in one folder, and what is written of them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "written.json"
        self.written: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    @contextlib.contextmanager
    def dataset(self, name: str, how: str, tolerance: float = 1e-4) -> Iterator[Path]:
        """The folder to be filled; its rows are read by LeRobot afterwards."""
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        yield folder
        write_rows(folder, tolerance)
        entry = {"lerobot": lerobot.__version__, "version": json.loads((folder / "meta/info.json").read_text())}
        entry["version"] = entry["version"]["codebase_version"]
        self.written[name] = entry | {"how": " ".join(how.split())} | ({"tolerance_s": tolerance} if tolerance > 1e-4 else {})
        self.path.write_text(json.dumps(dict(sorted(self.written.items())), indent=1) + "\n")
        print(name, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024, "KB")


def several(episode: int, step: int) -> str:
    """Two tasks within every second episode."""
    return TASKS[2 if episode % 2 and step >= 3 else episode % 2]


def old(make: Maker) -> None:
    """Versions 2.1 and 2.0."""
    with make.dataset("v21", "create, add_frame(task=), save_episode; chunks_size 3; two tasks in an episode") as folder:
        record(folder, features(), tasks=several, sizes={"chunks_size": 3})
    with make.dataset("v20", f"v21, and then {inspect.getdoc(as_v20)}") as folder:
        shutil.copytree(make.out / "v21", folder)
        as_v20(folder)
    libero = {"image": camera(16, 16, "image"), "wrist_image": camera(16, 16, "image")}
    libero |= {"state": vector(8) | {"names": ["state"]}, "actions": vector(7) | {"names": ["actions"]}}
    with make.dataset("openpi_libero_v20", f"keys, shapes and fps of openpi's LIBERO datasets; {inspect.getdoc(as_v20)}") as folder:
        record(folder, libero, lengths=LENGTHS[:3])
        as_v20(folder)


    with make.dataset(
        "drifting_v21", "as v21, tolerance_s=0.05, timestamps of a clock that is up to 0.04 s off the steps of 0.1 s", 0.05
    ) as folder:
        off = (0.0, 0.03, 0.01, -0.03, 0.0, 0.04, 0.02, -0.02)
        front = {key: feature for key, feature in features().items() if "still" not in key}
        record(folder, front, times=lambda step: step / 10 + off[step], lengths=LENGTHS[1:], tolerance=0.05)


def as_v20(folder: Path) -> None:
    """LeRobot's converter from 2.0 to 2.1 reversed: the statistics of all episodes in meta/stats.json in place of
    those of each in meta/episodes_stats.jsonl, and the version."""
    from lerobot.datasets.utils import write_stats

    write_stats(opened(folder).meta.stats, folder)
    (folder / "meta/episodes_stats.jsonl").unlink()
    info = json.loads((folder / "meta/info.json").read_text()) | {"codebase_version": "v2.0"}
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))


def new(make: Maker) -> None:
    """Version 3.0: written, converted, cut, merged."""
    from lerobot.datasets.aggregate import aggregate_datasets
    from lerobot.datasets.dataset_tools import (
        add_features,
        delete_episodes,
        merge_datasets,
        remove_feature,
        split_dataset,
    )
    from lerobot.datasets.v30.convert_dataset_v21_to_v30 import convert_dataset

    def converted(source: str, folder: Path, **sizes: float) -> None:
        shutil.copytree(make.out / source, folder)
        convert_dataset(folder.name, root=folder.parent, push_to_hub=False, **sizes)
        shutil.rmtree(folder.with_name(f"{folder.name}_old"))

    with make.dataset("converted", "convert_dataset of v21") as folder:
        converted("v21", folder)
    with make.dataset(
        "converted_small_files",
        """convert_dataset(data_file_size_in_mb=0.004, video_file_size_in_mb=0.0016) of v21: an episode that begins a new file
        points to the file before""",
    ) as folder:
        converted("v21", folder, data_file_size_in_mb=0.004, video_file_size_in_mb=0.0016)
    with make.dataset(
        "converted_tiny_files", "convert_dataset(data_file_size_in_mb=0.001, video_file_size_in_mb=0.001): there is no file 0"
    ) as folder:
        converted("v21", folder, data_file_size_in_mb=0.001, video_file_size_in_mb=0.001)
    small: Sizes = {"chunks_size": 2, "data_files_size_in_mb": 0.004, "video_files_size_in_mb": 0.0016}
    with make.dataset("v30", f"create, add_frame, save_episode, finalize; {small}; two tasks in an episode") as folder:
        record(folder, features(), fps=20, tasks=several, sizes=small)
    with make.dataset("other", "as v30, one file, tasks in another order") as folder:
        record(folder, features(), fps=20, number=1, tasks=lambda e, t: TASKS[2 - e % 3], lengths=(6, 5, 7))
    with make.dataset("deleted", "delete_episodes([0, 1]) of v30") as folder:
        delete_episodes(opened(make.out / "v30"), [0, 1], output_dir=folder)
    with make.dataset("deleted_within", "delete_episodes([1]) of other: the video is encoded again") as folder:
        delete_episodes(opened(make.out / "other"), [1], output_dir=folder)
    with make.dataset("split", 'split_dataset({"rest": [0], "split": [3, 1, 2]}) of v30') as folder:
        split_dataset(opened(make.out / "v30"), {"rest": [0], "split": [3, 1, 2]}, output_dir=make.out)
        shutil.rmtree(make.out / "rest")
    with make.dataset("merged", "merge_datasets of v30, other") as folder:
        merge_datasets([opened(make.out / "v30"), opened(make.out / "other")], "local/merged", output_dir=folder)
    with make.dataset(
        "merged_small_files", "aggregate_datasets(sizes of v30) of other, deleted, split: what was cut before"
    ) as folder:
        parts = ["other", "deleted", "split"]
        aggregate_datasets(
            [f"local/{part}" for part in parts], "local/all", [make.out / part for part in parts], folder,
            data_files_size_in_mb=0.006, video_files_size_in_mb=0.0016, chunk_size=2,
        )  # fmt: skip
    with make.dataset(
        "features_changed", "remove_feature(observation.images.front), then add_features(value, note) of other"
    ) as folder:
        removed = remove_feature(opened(make.out / "other"), "observation.images.front", output_dir=make.out / "removed")
        value = np.arange(18, dtype=np.float32)[:, None] / 2
        added = {"value": (value, vector(1)), "label": (lambda row, e, t: int(e), vector(1, "int64"))}
        add_features(removed, added, output_dir=folder)
        shutil.rmtree(make.out / "removed")
    with make.dataset("drifting_v30", "convert_dataset of drifting_v21; read with tolerance_s=0.05", 0.05) as folder:
        converted("drifting_v21", folder)
    libero = {"observation.state": vector(8), "action": vector(7)}
    stills = {f"observation.images.{name}": camera(16, 16, "image") for name in ("image", "image2")}
    videos = {f"observation.images.{name}": camera(32, 32, "video") for name in ("image", "wrist_image")}
    with make.dataset("libero_v30_images", "keys, shapes and fps of LeRobot's LIBERO datasets of images") as folder:
        record(folder, stills | libero, lengths=LENGTHS[:3])
    with make.dataset("libero_v30_videos", "keys, shapes and fps of LeRobot's LIBERO datasets of videos") as folder:
        record(folder, videos | libero, lengths=LENGTHS[:3], fps=20)


if __name__ == "__main__":
    (old if CODEBASE_VERSION == "v2.1" else new)(Maker(Path(sys.argv[1]).resolve()))
