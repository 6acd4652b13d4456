"""The folder of a dataset as it is pushed: its files, a card, a record."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.commands.export import version
from embodied.demonstrations import Dataset, layout
from embodied.demonstrations.mixture import fingerprints, succeeded
from embodied.errors import UserError
from embodied.files import read_json, yaml_text
from embodied.hub import Name, dataset_folder
from embodied.reporting.tables import table
from embodied_hub.cards import card_text, licence_text
from embodied_hub.record import CARD, RECORD, Record, files_of
from embodied_hub.settings import without_places
from policies.lerobot.loading import VERSION

OLD_VERSION = "0.3.3"
"""LeRobot's release that reads version 2.1 of its layout."""


def is_dataset(folder: Path) -> bool:
    return (folder / layout.INFO).is_file()


def identity_of(dataset: Dataset) -> str:
    """sha256 over the actions and states of all episodes."""
    marks = fingerprints(dataset, range(len(dataset.episodes)))
    return hashlib.sha256(b"".join(marks)).hexdigest()


def fingerprint(named: str, episodes: int) -> str:
    """The identity of a dataset that a run has learned from, if it still has as many episodes."""
    try:
        dataset = Dataset(dataset_folder(named, fetch=False))
    except UserError:
        return "not here any more"
    return f"`{identity_of(dataset)}`" if len(dataset.episodes) == episodes else "another number of episodes now"


def write(source: Path, name: Name, licence: str | None, folder: Path) -> Dataset:
    """Fill the new folder with links to the dataset's files, a card and a record; what names this machine's folders is
    written anew without them. Raises `UserError`."""
    dataset = Dataset(source)
    for file, path in files_of(source).items():
        if file not in (CARD, RECORD):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).symlink_to(path.resolve())
    for file in (layout.PROVENANCE, layout.IMPORT):
        if (source / file).is_file() and (said := read_json(source / file)) != (public := without_places(said)):
            (folder / file).unlink()
            (folder / file).write_text(json.dumps(public, indent=1) + "\n")
    (folder / CARD).write_text(card(dataset, name, licence))
    Record("dataset", source.resolve().name, identity_of(dataset), version()).written(folder)
    return dataset


def tag_of(dataset: Dataset) -> str:
    """The tag by which LeRobot finds the version of a dataset's layout."""
    return str(read_json(dataset.folder / layout.INFO)["codebase_version"])


def card(dataset: Dataset, name: Name, licence: str | None) -> str:
    """The text of README.md."""
    front: dict[str, Any] = {"license": licence} if licence else {}
    front |= {
        "task_categories": ["robotics"],
        "tags": ["LeRobot", "embodied-farm"],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    sections = {
        "Episodes": _episodes(dataset),
        "Features": _features(dataset),
        "How it was recorded": _recorded(dataset),
        "How it is loaded": _loaded(dataset, name.repository),
        "Licence": licence_text(licence),
    }
    return card_text(yaml_text(front), name.repository, "", sections)


def _episodes(dataset: Dataset) -> str:
    solved = Counter(succeeded(dataset, one) for one in dataset.episodes)
    known = solved[True] + solved[False]
    rows = [
        ("episodes", str(len(dataset.episodes))),
        ("env steps", str(len(dataset))),
        ("solved", f"{solved[True]} of {known}" if known else "not recorded"),
        ("frames per second", f"{dataset.fps:g}"),
        ("layout", f"LeRobot {tag_of(dataset)}"),
    ]
    told = Counter(text for one in dataset.episodes for text in one.instructions)
    said = table(("instruction", "episodes"), [(text, str(count)) for text, count in told.most_common(50)])
    more = [f"and {len(told) - 50} further instructions"] if len(told) > 50 else []
    return "\n".join([*table(("", ""), rows), "", *said, *more])


def _features(dataset: Dataset) -> str:
    rows = [
        (f"`{name}`", one.dtype, " x ".join(map(str, one.shape)))
        for name, one in dataset.features.items() if name not in layout.BOOKKEEPING
    ]  # fmt: skip
    return "\n".join(table(("feature", "type", "shape"), rows))


def _recorded(dataset: Dataset) -> str:
    path = dataset.folder / layout.PROVENANCE
    if not path.is_file():
        converted = dataset.folder / layout.IMPORT
        return (
            f"Converted: `{layout.IMPORT}` says from what." if converted.is_file() else "Nothing is recorded of that."
        )
    said = read_json(path)
    task, policy = said.get("task") or {}, said.get("policy") or {}
    rows = [("task", str(task.get("name"))), ("policy", _policy(policy))]
    rows += [(name.replace("_", " "), str(task.get(name))) for name in ("control_mode", "orientation", "gripper")]
    rows += [
        (name.replace("_", " "), str(said[name])) for name in ("sampling", "only_successes", "disturb") if name in said
    ]
    return "\n".join(table(("", ""), rows)) + f"\n\n`{layout.PROVENANCE}` has all of it."


def _policy(said: Mapping[str, Any]) -> str:
    checkpoint = said.get("checkpoint")
    return str(said.get("kind")) + (f", checkpoint {Path(checkpoint).name}" if checkpoint else "")


def _loaded(dataset: Dataset, name: str) -> str:
    is_old = not tag_of(dataset).startswith("v3")
    lines = f'from lerobot.datasets.lerobot_dataset import LeRobotDataset\n\ndataset = LeRobotDataset("{name}")'
    return (
        f"LeRobot {OLD_VERSION if is_old else VERSION} loads it, and embodied-farm {version()}:\n\n"
        f"```python\n{lines}\n```\n\n```\nembodied sft CONFIG --data {name}\n```"
    )
