"""Several datasets as one: their episodes for training and for validation, the weights with which rows are drawn, and
the names of features in each.

Episodes are distinguished by their content (`fingerprints`), not by where they lie: what is held out in one dataset is
not learned from as a copy in another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from embodied.config.schema import SFTConfig, indices_of
from embodied.demonstrations import layout
from embodied.demonstrations.data_files import RecordedEpisode
from embodied.demonstrations.layout import Feature
from embodied.demonstrations.reader import ALONE, Batch, Dataset, History
from embodied.errors import UserError, nearest, shown
from embodied.hub import dataset_folder
from embodied.trajectories.random_streams import permutation
from sim_farm.contract import Orientation, TaskInfo
from sim_farm.named_code import entry_point, entry_point_names

CONVERTIBLE = "embodied_farm.convertible_datasets"
"""Group in which packages recognise datasets in other layouts, name to `module:function`. The function takes a path and
returns what lies there with the command that converts it, as the end of a sentence; None where it is nothing that it
knows. It reads little and raises nothing."""

Index = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class GripperMap:
    """The datasets' last action element to the environment's: gripper * scale + offset."""

    scale: float = 1.0
    offset: float = 0.0

    def applied(self, actions: Float32) -> Float32:
        """Actions [..., A] in the environment's convention."""
        if (self.scale, self.offset) == (1.0, 0.0):
            return actions
        actions = actions.copy()
        actions[..., -1] = actions[..., -1] * self.scale + self.offset
        return actions


def gripper_map(name: str, info: TaskInfo) -> GripperMap:
    """The conversion that `sft.gripper` names: which values of the data become the ends of the environment's range."""
    if name == "as_is":
        return GripperMap()
    low, high = info.action_low[-1], info.action_high[-1]
    lower, upper = {"from_0_1": (0, 1), "from_1_0": (1, 0), "from_minus_plus": (-1, 1), "from_plus_minus": (1, -1)}[
        name
    ]
    scale = (high - low) / (upper - lower)
    return GripperMap(scale, low - scale * lower)


@dataclass(frozen=True)
class Source:
    """A dataset, and the episodes of it that are used."""

    dataset: Dataset
    features: str | Mapping[str, str] | None
    """The entry of `sft.features` that renamed its features."""
    train: tuple[int, ...]
    """Positions in `dataset.episodes` of those that are learned from, ascending."""
    held_out: tuple[int, ...]
    copies: int = 0
    """Episodes that are left out, since they are copies of held-out ones."""

    @property
    def episodes(self) -> tuple[int, ...]:
        return tuple(sorted(self.train + self.held_out))

    def rows(self, episodes: Sequence[int], stride: int = 1, left_out: int = 0) -> Index:
        """Rows of the dataset for the episodes: the first row of each episode, and every `stride`-th row after it, but
        for the last `left_out` rows."""
        found = [self.dataset.episodes[i] for i in episodes]
        return np.concatenate([np.empty(0, np.int64), *(np.arange(e.begin, e.end - left_out, stride) for e in found)])


@dataclass(frozen=True)
class Demonstrations:
    """Datasets as one. Rows are counted through all of them."""

    sources: tuple[Source, ...]
    gripper: GripperMap = GripperMap()
    weights: tuple[float, ...] = ()
    """Weight of each source; empty: every row has the same weight."""
    stride: int = 1
    """Env steps from one row of an episode to the next that is learned from, or measured."""
    left_out: int = 0
    """Number of an episode's last rows that are not learned from, nor measured."""

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        return tuple(source.dataset for source in self.sources)

    @property
    def episodes(self) -> int:
        """Number of episodes that are used."""
        return sum(len(source.episodes) for source in self.sources)

    @cached_property
    def begins(self) -> Index:
        """[sources + 1]: the first row of each dataset, and the number of all rows."""
        return np.concatenate([[0], np.cumsum([len(dataset) for dataset in self.datasets])]).astype(np.int64)

    @cached_property
    def train(self) -> Index:
        """Rows that are learned from."""
        return self._rows([source.train for source in self.sources])

    @cached_property
    def held_out(self) -> Index:
        """Rows of the episodes that are measured."""
        return self._rows([source.held_out for source in self.sources])

    @cached_property
    def chances(self) -> npt.NDArray[np.float64] | None:
        """[rows learned from]: how often each is drawn, with the sum 1; None: all alike."""
        if not self.weights:
            return None
        counts = [len(source.rows(source.train, self.stride, self.left_out)) for source in self.sources]
        shares = np.array(self.weights) / sum(self.weights)
        return np.concatenate([np.full(n, share / n) for n, share in zip(counts, shares, strict=True) if n])

    def by_dataset(self, rows: Index) -> Iterator[Index]:
        """For each dataset that has some of the rows `rows`: their places in `rows`."""
        for begin, end in pairwise(self.begins):
            places = np.flatnonzero((rows >= begin) & (rows < end))
            if len(places):
                yield places

    def batches(
        self, rows: Index, chunk: int, cameras: Sequence[str], history: History = ALONE
    ) -> Iterator[tuple[Index, Batch]]:
        """Yield one batch per dataset that contains any of `rows`, with the positions of the batch's rows in `rows`."""
        for places in self.by_dataset(rows):
            number = int(np.searchsorted(self.begins, rows[places[0]], "right")) - 1
            batch = self.datasets[number].batch(rows[places] - self.begins[number], chunk, cameras, history)
            yield places, replace(batch, actions=self.gripper.applied(batch.actions))

    def column(self, name: str) -> Float32:
        """[env steps of episodes learned from, ...] of a column that all datasets have; actions in the environment's
        convention."""
        parts = [source.dataset.column(name)[source.rows(source.train)] for source in self.sources]
        found = np.concatenate([part.reshape(len(part), -1) for part in parts]).astype(np.float32, copy=False)
        return self.gripper.applied(found) if name == layout.ACTION else found

    def _rows(self, episodes: Sequence[Sequence[int]]) -> Index:
        parts = zip(self.sources, self.begins, episodes, strict=False)
        return np.concatenate(
            [source.rows(chosen, self.stride, self.left_out) + begin for source, begin, chosen in parts]
        )


def open_dataset(path: Path, features: str | Mapping[str, str] | None = None) -> Dataset:
    """The dataset at `path`, or of that Hugging Face name in the cache, its features renamed. Raises `UserError` for
    what has to be converted first, and `DatasetError` for what is no dataset."""
    path = dataset_folder(path, fetch=False)
    if not (path / layout.INFO).exists():
        for name in entry_point_names(CONVERTIBLE):
            if (found := entry_point(CONVERTIBLE, name, UserError)(path)) is not None:
                raise UserError(f"{path} is {found}")
    if features is None:
        return Dataset(path)
    return Dataset(path, rename=renames(features, Dataset(path).features, str(path)))


SOLVED = "solved"
"""The entry of `sft.episodes` that names solved episodes, or begins one that names those of a range."""


def open_sources(sft: SFTConfig, seed: int, check: Callable[[Dataset], None] = lambda _: None) -> tuple[Source, ...]:
    """The datasets of `sft.data` with the episodes that are used of each. `check` is called on each dataset before its
    columns are read. Raises `UserError`."""
    count = len(sft.data)
    entries: tuple[str | Mapping[str, str] | None, ...] = _of_each("sft.features", sft.features, count)
    entries = entries or (None,) * count
    ranges = _of_each("sft.episodes", sft.episodes, count) or ("all",) * count
    if sft.weights and len(sft.weights) != count:
        raise UserError(f"sft.weights has {len(sft.weights)} numbers and sft.data {count} datasets: give one for each")
    opened = [open_dataset(path, entry) for path, entry in zip(sft.data, entries, strict=True)]
    for dataset in opened:
        check(dataset)
    chosen = [_chosen(dataset, text) for dataset, text in zip(opened, ranges, strict=True)]
    for dataset, episodes in zip(opened, chosen, strict=True):
        used = [dataset.episodes[number] for number in episodes]
        dataset.check_finite(np.concatenate([np.arange(0), *(np.arange(e.begin, e.end) for e in used)]))
    marks = [fingerprints(dataset, episodes) for dataset, episodes in zip(opened, chosen, strict=True)]
    _refuse_repeated(opened, marks, "repeated" in sft.insist)
    split = [_held_out(len(episodes), sft.holdout, seed, number) for number, episodes in enumerate(chosen)]
    held_marks = {mark for own, places in zip(marks, split, strict=True) for mark in (own[i] for i in places)}
    sources = []
    for dataset, entry, episodes, own, places in zip(opened, entries, chosen, marks, split, strict=True):
        rest = [i for i in range(len(episodes)) if i not in places]
        train = [episodes[i] for i in rest if own[i] not in held_marks]
        sources.append(
            Source(dataset, entry, tuple(train), tuple(episodes[i] for i in sorted(places)), len(rest) - len(train))
        )
    if not any(source.train for source in sources):
        raise UserError(
            "no episode is left to learn from: every one is held out, or a copy of one that is (--sft.holdout 0)"
        )
    return tuple(sources)


def fingerprints(dataset: Dataset, episodes: Sequence[int]) -> list[bytes]:
    """For each of the episodes what tells it from others: a digest of its actions and of the robot's states."""
    names = [name for name in (layout.ACTION, layout.PROPRIO, layout.STATE) if name in dataset.features]
    columns = [dataset.column(name) for name in names]
    found = []
    for number in episodes:
        episode, digest = dataset.episodes[number], hashlib.blake2b(digest_size=16)
        for name, column in zip(names, columns, strict=True):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(column[episode.begin : episode.end], np.float32).tobytes())
        found.append(digest.digest())
    return found


def succeeded(dataset: Dataset, episode: RecordedEpisode) -> bool | None:
    """True if the episode was solved, by `success` in meta/episodes, else by `next.success`; None if the dataset has
    neither."""
    recorded = episode.row.get("success")
    if isinstance(recorded, bool):
        return recorded
    if layout.SUCCESS in dataset.features:
        return bool(dataset.column(layout.SUCCESS)[episode.begin : episode.end].any())
    return None


def numbers_in(text: str, dataset: Dataset) -> list[int]:
    """Positions in `dataset.episodes` of those that an entry of `sft.episodes` names by their episode_index, ascending.
    Raises `UserError`."""
    places = {episode.index: place for place, episode in enumerate(dataset.episodes)}
    if text.strip() == "all":
        return list(places.values())
    found: set[int] = set()
    for part in text.split(","):
        try:
            numbers = indices_of(part)
        except ValueError as error:
            raise UserError(f"sft.episodes: {error} (or all, {SOLVED}, {SOLVED}:0-24)") from None
        if numbers[0] not in places or numbers[-1] not in places:
            raise UserError(
                f"sft.episodes: {dataset.folder} has {len(places)} episodes, {min(places)} to {max(places)}, got {part}"
            )
        found |= {places[number] for number in numbers if number in places}
    return sorted(found)


def _chosen(dataset: Dataset, text: str) -> list[int]:
    """Positions in `dataset.episodes` of those that an entry of `sft.episodes` names. Raises `UserError`."""
    solved, _, among = text.partition(":")
    if solved.strip() != SOLVED:
        return numbers_in(text, dataset)
    numbers = numbers_in(among or "all", dataset)
    outcomes = [succeeded(dataset, dataset.episodes[i]) for i in numbers]
    if None in outcomes:
        raise UserError(
            f"sft.episodes: {SOLVED}: {dataset.folder} does not record which episodes were solved (neither success in "
            f"meta/episodes nor {layout.SUCCESS}): name them by number (0-49,60), or map the feature that does with "
            f"--sft.features '{{KEY: {layout.SUCCESS}}}'"
        )
    found = [i for i, solved in zip(numbers, outcomes, strict=True) if solved]
    if not found:
        raise UserError(f"sft.episodes: {SOLVED}: none of the {len(numbers)} episodes of {dataset.folder} was solved")
    return found


def _held_out(count: int, share: float, seed: int, number: int) -> set[int]:
    """Held-out episodes among a dataset's `count` used ones: at least one where there are two, and never all."""
    held_out = min(max(round(share * count), 1), count - 1) if share > 0 else 0
    return set(permutation(seed, 0, number, count)[:held_out].tolist())


def _refuse_repeated(datasets: Sequence[Dataset], marks: Sequence[Sequence[bytes]], insisted: bool) -> None:
    for (one, mine), (other, its) in combinations(zip(datasets, marks, strict=True), 2):
        common = set(mine) & set(its)
        same_folder = one.folder.resolve() == other.folder.resolve()
        if not insisted and common and (same_folder or len(common) == min(len(set(mine)), len(set(its)))):
            what = (
                "are the same folder" if same_folder else f"have {len(common)} episodes in common, all of one of them"
            )
            raise UserError(
                f"{one.folder} and {other.folder} {what}: rows that are held out of one would be learned from in the "
                "other. Name it once (how often its rows are drawn is sft.weights), choose other episodes of each "
                "(--sft.episodes), or insist: --sft.insist repeated leaves copies of held-out episodes out"
            )


def _of_each(name: str, entries: Sequence[T], count: int) -> tuple[T, ...]:
    """One entry for each of `count` datasets, where one stands for all of them."""
    if len(entries) not in (0, 1, count):
        raise UserError(
            f"{name} has {len(entries)} entries and sft.data {count} datasets: give one for all, or one each"
        )
    return tuple(entries) * (count if len(entries) == 1 else 1)


# --- Names of features: what other projects' datasets call what a policy reads and does, and the mapping that fits.


WRIST = re.compile(r"wrist|hand|image_?2|gripper|eye", re.IGNORECASE)
"""Pattern in the names of cameras at a hand."""


@dataclass(frozen=True)
class Shipped:
    """A layout that other projects' tools write."""

    about: str
    names: Mapping[str, str]
    """Our names by theirs. Keys that a dataset does not have are passed over: variants of a tool name cameras
    differently."""
    written_fps: float | None = None
    """Frames per second that the tool writes whatever the recording's rate was."""
    control_hz: float | None = None
    """Rate of the recordings, in env steps per second."""
    orientation: Orientation | None = None
    """Orientation of the frames, as env.orientation has it; None: not always the same."""


_AGENT, _HAND = layout.IMAGES + "agentview", layout.IMAGES + "robot0_eye_in_hand"
SHIPPED: Mapping[str, Shipped] = {
    # Source: meta/info.json of HuggingFaceVLA/libero; robomimic2lerobot and libero2lerobot of any4lerobot, which say
    # wrist_image.
    "lerobot-libero": Shipped(
        "LIBERO as LeRobot and its converters have it",
        {
            "observation.images.image": _AGENT,
            "observation.images.image2": _HAND,
            "observation.images.wrist_image": _HAND,
        },
        written_fps=10,
        control_hz=20,
        orientation="rotated",
    ),
    # Source: examples/libero/convert_libero_data_to_lerobot.py of Physical-Intelligence/openpi.
    "openpi-libero": Shipped(
        "LIBERO as openpi has it",
        {"image": _AGENT, "wrist_image": _HAND, "state": layout.PROPRIO, "actions": layout.ACTION},
        written_fps=10,
        control_hz=20,
        orientation="rotated",
    ),
    # Source: mani_skill/trajectory/convert_to_lerobot.py of haosulab/ManiSkill (which names cameras as the simulator
    # does, and writes 30 unless --fps is given); converters modelled after openpi's have the short keys.
    "maniskill": Shipped(
        "ManiSkill's convert_to_lerobot, and converters after openpi's",
        {
            "image": layout.IMAGES + "base_camera",
            "wrist_image": layout.IMAGES + "hand_camera",
            "state": layout.PROPRIO,
            "actions": layout.ACTION,
        },
        written_fps=30,
        control_hz=20,
    ),
}
"""Shipped mappings by their names in `sft.features`."""


def renames(entry: str | Mapping[str, str], features: Mapping[str, Feature], where: str) -> dict[str, str]:
    """The renaming of a dataset's features that an entry of `sft.features` means: our names by the dataset's keys.

    `where` names the dataset in messages. Raises `UserError` for an unknown name, for a key that the dataset does not
    have, and for a name that is none of ours or would be there twice.
    """
    if isinstance(entry, str):
        if entry not in SHIPPED:
            raise UserError(
                f"sft.features: {shown(entry)} is no shipped mapping{nearest(entry, list(SHIPPED))}; a mapping is "
                "written as '{image: observation.images.front}'"
            )
        names = {key: ours for key, ours in SHIPPED[entry].names.items() if key in features}
        cameras = {ours for ours in SHIPPED[entry].names.values() if ours.startswith(layout.IMAGES)}
        if not names and not cameras & set(features):  # else the tool has named them as we do
            raise UserError(
                f"sft.features {entry}: {where} has none of its keys ({', '.join(SHIPPED[entry].names)}); it has: "
                f"{_listed(features)}"
            )
        entry = names
    for key, ours in entry.items():
        if not is_ours(ours):
            turned = (
                f"; the dataset's key comes first: '{{{ours}: {key}}}'" if ours in features and is_ours(key) else ""
            )
            raise UserError(
                f"sft.features: {shown(ours)} is no name of ours: they are {layout.IMAGES}CAMERA, "
                f"{', '.join(layout.FEATURES[:3])}{turned}"
            )
        if key not in features:
            raise UserError(f"sft.features: {where} has no {shown(key)}{nearest(key, list(features))}")
    kept = [name for name in features if name not in entry]
    for ours in entry.values():
        if [*entry.values(), *kept].count(ours) > 1:
            raise UserError(
                f"sft.features: {where} would have {ours} twice: name one feature so, and the other something else"
            )
    return dict(entry)


def is_ours(name: str) -> bool:
    """True for a name that a feature may have."""
    return name in layout.FEATURES or (name.startswith(layout.IMAGES) and len(name) > len(layout.IMAGES))


@dataclass(frozen=True)
class Needed:
    """A feature that a run reads or learns, by our name."""

    name: str
    size: int
    """Numbers of a vector; 0: a camera."""


def fitting(features: Mapping[str, Feature], needed: Sequence[Needed]) -> str | dict[str, str] | None:
    """The entry of `sft.features` that gives a dataset what it lacks of `needed`; None where none suggests itself.

    Cameras are paired wrist with wrist, then in the dataset's order; vectors by size and by what their names end in.
    """
    wanted = [need for need in needed if need.name not in features]
    free = {key: feature for key, feature in features.items() if key not in {need.name for need in needed}}
    for name, shipped in SHIPPED.items():
        names = {key: ours for key, ours in shipped.names.items() if key in free}
        if wanted and {need.name for need in wanted} <= set(names.values()):
            return name
    found: dict[str, str] = {}
    cameras = [key for key, feature in free.items() if feature.is_camera]
    required = [need.name for need in wanted if not need.size]
    for wrist in (True, False):
        ours = [name for name in required if bool(WRIST.search(name.removeprefix(layout.IMAGES))) == wrist]
        theirs = [key for key in cameras if bool(WRIST.search(key.removeprefix(layout.IMAGES))) == wrist]
        found |= dict(zip(theirs, ours, strict=False))
    rest = [key for key in cameras if key not in found]
    found |= dict(zip(rest, [name for name in required if name not in found.values()], strict=False))
    for need in wanted:
        if need.size:
            word = "action" if need.name == layout.ACTION else "state"
            fits = [k for k, f in free.items() if word in k.lower() and f.shape == (need.size,) and k not in found]
            fits.sort(key=lambda key: (not key.lower().rstrip("s").endswith(word), len(key)))
            found |= {fits[0]: need.name} if fits else {}
    return found if len(found) == len(wanted) else None


def check_features(dataset: Dataset, needed: Sequence[Needed], by: str) -> None:
    """Raise `UserError` for a dataset that lacks a feature; it shows the mapping that would fit. `by` needs them."""
    short = {name.removeprefix(layout.IMAGES) for name in dataset.cameras}
    missing = [
        need
        for need in needed
        if need.name not in dataset.features and (need.size or need.name.removeprefix(layout.IMAGES) not in short)
    ]
    if not missing:
        return
    names = ", ".join(need.name for need in missing)
    fits = fitting(dataset.features, needed)
    remedy = (
        f"if these are they: {option(fits)}"
        if fits is not None
        else f"name those that are they: {option({'KEY': missing[0].name})}"
        + (
            ""
            if missing[0].name == layout.ACTION
            else ", or let the policy read something else (policy.reads, env.cameras)"
        )
    )
    raise UserError(f"{dataset.folder} has no {names}, which {by} needs; it has {_listed(dataset.features)}; {remedy}")


def option(entry: str | Mapping[str, str]) -> str:
    """An entry of `sft.features` as the command line takes it."""
    text = entry if isinstance(entry, str) else f"'{yaml.safe_dump(dict(entry), default_flow_style=True, width=10**6)}'"
    return f"--sft.features {text.replace(chr(10), '')}"


def _listed(features: Mapping[str, Feature]) -> str:
    listed = [f"{name} {list(f.shape)}" for name, f in features.items() if name not in layout.BOOKKEEPING]
    return ", ".join(listed) or "nothing"
