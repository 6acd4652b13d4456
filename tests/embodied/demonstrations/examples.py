"""Episodes to record and to read, and what they are compared by."""

from __future__ import annotations

from pathlib import Path

from embodied.demonstrations import Dataset, DatasetWriter, FileSizes
from sim_farm.client.episode_replay import ReplayedEpisode
from sim_farm.contract import EpisodeSpec, TaskInfo, TaskSpec

Replays = list[tuple[EpisodeSpec, ReplayedEpisode]]

FOREIGN = Path(__file__).parent / "lerobot_dataset"
"""Written by LeRobot 0.4.4 itself (LeRobotDataset.create, add_frame, save_episode): three episodes of 4, 5 and 6 steps
at 10 fps, two AV1 cameras, one camera of encoded images, several files and chunks. Step t of episode e has state
[e, t, e + t], action [10 e + t, -t] and pictures of the grey 40 e + 7 t."""
CODEC_ERROR = 4.0
"""Of 255, mean: 1.8 to 2.2 measured on these scenes, of which halving the colour planes makes 1.8."""
PUSH = TaskSpec("tabletop/push", cameras=2, image_size=32, max_episode_steps=12)
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def write(folder: Path, info: TaskInfo, replays: Replays, sizes: FileSizes | None = None) -> Dataset:
    folder.mkdir(parents=True)
    writer = DatasetWriter(folder, info, {"task": {}}, sizes)
    for spec, replay in replays:
        writer.add(spec, replay)
    writer.close()
    return Dataset(folder)
