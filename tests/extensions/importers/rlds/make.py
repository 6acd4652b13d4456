"""Writes the RLDS fixtures beside this file with TensorFlow Datasets' own builder, and what it reads back from them.

    python -m venv /tmp/tf && /tmp/tf/bin/pip install tensorflow-cpu==2.21.0 tensorflow-datasets==4.9.10
    /tmp/tf/bin/python tests/extensions/importers/rlds/make.py

`libero_tiny_no_noops` has the features of OpenVLA's LIBERO datasets (modified_libero_rlds): 3 episodes in 2 shards.
`arm` has what other datasets of the Open X-Embodiment collection have: other names, kinds of pictures and numbers, two
splits, instructions that change within an episode. EXPECTED/NAME.npz holds all rows as `tfds` decodes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

HERE = Path(__file__).parent
LENGTHS = (4, 6, 5)


def pictures(rng: np.random.Generator, episode: int, step: int) -> np.ndarray:
    """Smooth, so that JPEG keeps it: uint8 [16, 16, 3]."""
    y, x = np.mgrid[:16, :16]
    channels = np.stack([60 * episode + 8 * x, 10 * step + 8 * y, rng.integers(0, 8) + 12 * x], -1)
    return channels.clip(0, 255).astype(np.uint8)


class LiberoTinyNoNoops(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        step = {
            "observation": {
                "image": tfds.features.Image(shape=(16, 16, 3), dtype=np.uint8, encoding_format="jpeg"),
                "wrist_image": tfds.features.Image(shape=(16, 16, 3), dtype=np.uint8, encoding_format="jpeg"),
                "state": tfds.features.Tensor(shape=(8,), dtype=np.float32),
                "joint_state": tfds.features.Tensor(shape=(7,), dtype=np.float32),
            },
            "action": tfds.features.Tensor(shape=(7,), dtype=np.float32),
            "discount": tfds.features.Scalar(dtype=np.float32),
            "reward": tfds.features.Scalar(dtype=np.float32),
            "is_first": tfds.features.Scalar(dtype=np.bool_),
            "is_last": tfds.features.Scalar(dtype=np.bool_),
            "is_terminal": tfds.features.Scalar(dtype=np.bool_),
            "language_instruction": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "steps": tfds.features.Dataset(step),
                    "episode_metadata": tfds.features.FeaturesDict({"file_path": tfds.features.Text()}),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[str, Any]]:
        for episode, length in enumerate(LENGTHS):
            rng = np.random.default_rng(episode)
            steps = []
            for t in range(length):
                # Step 2 moves nothing and leaves the gripper as it was; step 3 closes it.
                arm = np.zeros(6) if t == 2 else rng.uniform(-0.9, 0.9, 6)
                last = t == length - 1
                steps.append(
                    {
                        "observation": {
                            "image": pictures(rng, episode, t),
                            "wrist_image": pictures(rng, 2 - episode, t),
                            "state": rng.normal(size=8).astype(np.float32),
                            "joint_state": rng.normal(size=7).astype(np.float32),
                        },
                        "action": np.array([*arm, -1 if t < 3 else 1], np.float32),
                        "discount": 1.0,
                        # Episode 1 ends without success.
                        "reward": float(last and episode != 1),
                        "is_first": t == 0,
                        "is_last": last,
                        "is_terminal": last and episode != 1,
                        "language_instruction": ("pick up the black bowl", "open the drawer")[episode % 2],
                    }
                )
            yield str(episode), {"steps": steps, "episode_metadata": {"file_path": f"demo_{episode}.hdf5"}}


class Arm(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("0.1.0")

    def _info(self) -> tfds.core.DatasetInfo:
        step = {
            "observation": {
                "rgb": tfds.features.Image(shape=(12, 16, 3), dtype=np.uint8),  # PNG, as TFDS chooses
                "depth": tfds.features.Image(shape=(12, 16, 1), dtype=np.uint16, encoding_format="png"),
                "distance": tfds.features.Image(shape=(12, 16, 1), dtype=np.float32),
                "raw": tfds.features.Tensor(shape=(4, 4, 3), dtype=np.uint8),
                "force": tfds.features.Tensor(shape=(2, 3), dtype=np.float64),
                "packed": tfds.features.Tensor(shape=(2,), dtype=np.float32, encoding="zlib"),
                "points": tfds.features.Sequence(tfds.features.Tensor(shape=(2,), dtype=np.float32)),
                "natural_language_instruction": tfds.features.Text(),
            },
            "action": tfds.features.Tensor(shape=(3,), dtype=np.float64),
            "is_first": tfds.features.Scalar(dtype=np.bool_),
            "is_last": tfds.features.Scalar(dtype=np.bool_),
            "is_terminal": tfds.features.Scalar(dtype=np.bool_),
            "count": tfds.features.Scalar(dtype=np.uint8),
            "note": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step)})
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(0, 2), "val": self._generate_examples(2, 3)}

    def _generate_examples(self, begin: int, end: int) -> Iterator[tuple[str, Any]]:
        for episode in range(begin, end):
            rng = np.random.default_rng(10 + episode)
            length = LENGTHS[episode]
            steps = []
            for t in range(length):
                steps.append(
                    {
                        "observation": {
                            "rgb": pictures(rng, episode, t)[:12],
                            "depth": rng.integers(0, 60000, (12, 16, 1)).astype(np.uint16),
                            "distance": rng.random((12, 16, 1)).astype(np.float32),
                            "raw": rng.integers(0, 256, (4, 4, 3)).astype(np.uint8),
                            "force": rng.normal(size=(2, 3)),
                            "packed": rng.normal(size=2).astype(np.float32),
                            "points": rng.normal(size=(t % 3, 2)).astype(np.float32),
                            "natural_language_instruction": f"push {t // 3}",
                        },
                        "action": rng.normal(size=3) if t < length - 1 else np.zeros(3),
                        "is_first": t == 0,
                        "is_last": t == length - 1,
                        "is_terminal": False,
                        "count": t,
                        "note": f"é{t}",
                    }
                )
            yield str(episode), {"steps": steps}


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def expected(builder: tfds.core.DatasetBuilder) -> dict[str, np.ndarray]:
    """By SPLIT/EPISODE/FEATURE, all steps of the episode as TFDS decodes them; what is ragged is left out."""
    found = {}
    for split in builder.info.splits:
        for number, episode in enumerate(tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False))):
            steps = [dict(flat(step)) for step in episode["steps"]]
            for name in steps[0]:
                if name.endswith("points"):
                    continue
                values = [step[name].decode() if isinstance(step[name], bytes) else step[name] for step in steps]
                found[f"{split}/{number}/{name}"] = np.stack(values)
    return found


def main() -> None:
    for kind, shards in ((LiberoTinyNoNoops, 2), (Arm, None)):
        builder = kind(data_dir=str(HERE))
        shutil.rmtree(HERE / builder.name, ignore_errors=True)
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
        (HERE / "expected").mkdir(exist_ok=True)
        rows: dict[str, Any] = expected(builder)
        np.savez_compressed(HERE / "expected" / builder.name, **rows)


if __name__ == "__main__":
    main()
