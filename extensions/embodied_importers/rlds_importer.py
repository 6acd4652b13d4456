"""RLDS to a dataset in LeRobot's layout: steps and encoded pictures as they lie, nothing simulated.

| RLDS | here |
|---|---|
| `action`, or the parts that --action names, joined | `action` |
| `observation/state` | `observation.state` |
| pictures | `observation.images.NAME`, their JPEG or PNG bytes kept |
| `language_instruction`, or `observation/natural_language_instruction`, of each step | the task |
| `reward` | `next.reward`; `next.success` and `next.done` follow from it and from the steps' order |
| other numbers and texts | their path with dots |
| `is_first`, `is_last` | compared with the order of steps |
| `episode_metadata/...` | columns of `meta/episodes` |
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich import print as show

from embodied.demonstrations import layout
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.writer import Episode, EpisodesWriter, new_folder
from embodied.errors import UserError, shown
from embodied.reporting.live import steps as progress
from embodied_importers.formats import ImportRequest, moving, numbered
from embodied_importers.rlds import AGAIN, FEATURES, RLDS, Record, Spec, text

INSTRUCTIONS = ("language_instruction", "observation/natural_language_instruction", "natural_language_instruction")
ORDER = ("is_first", "is_last")
RATES = ((r"libero|liber_o", 20), (r"bridge", 5), (r"fractal", 3), (r"droid", 15))
"""Steps per second of published datasets by the beginning of their names: LIBERO's control rate, and those that the
Open X-Embodiment collection states (arXiv 2310.08864)."""
LIBERO = {"image": (None, None, 3), "wrist_image": (None, None, 3), "state": (8,), "joint_state": (7,)}
"""Observations of OpenVLA's LIBERO datasets."""


def import_source(request: ImportRequest) -> dict[str, Any]:
    """Convert the RLDS dataset `request.source`. Returns the result as plain data. Raises `UserError`."""
    if request.fps is not None and not 1 <= request.fps <= 1000:
        raise UserError(f"--fps is of 1 to 1000 steps per second, got {request.fps}")
    source = RLDS(request.source)
    fps = request.fps or _rate(source, request.source)
    wanted = selected(request.episodes, len(source))
    plan = _Plan.of(source, request.action)
    if request.only_successes and not plan.judges:
        raise UserError(f"{source.folder} has no `reward`, which says what is solved: leave out --only-successes")
    counts = {"failed": 0, "idle throughout": 0}
    odd = {"is_first or is_last do not mark the ends": 0, "the last action is zero": 0}
    dropped, writer, splits = 0, None, dict[str, list[int]]()
    with new_folder(request.out) as aside, progress(f"Importing {source.info.name}", len(wanted)) as bar:
        for record in source.episodes(wanted):
            bar.advance()
            episode, keep = plan.episode(record), None
            if request.drop_idle:
                keep = moving(episode.columns[layout.ACTION])
                dropped += int((~keep).sum())
                if not keep.any():
                    counts["idle throughout"] += 1
                    continue
                episode = _without(episode, keep)
            if request.only_successes and not episode.row["success"]:
                counts["failed"] += 1
                continue
            for what, found in zip(odd, _odd(record, episode), strict=True):
                odd[what] += found
            if writer is None:
                writer = EpisodesWriter(aside, plan.features(record), fps)
            try:
                writer.append(episode)
            except DatasetError as error:
                raise DatasetError(f"{record.where}: {error}; {AGAIN}") from error
            first, _ = splits.setdefault(record.split, [writer.episodes - 1, writer.episodes])
            splits[record.split] = [first, writer.episodes]
        if writer is None:
            raise UserError(f"no episode of {source.folder} is left of {len(wanted)}: {_listed(counts)}")
        writer.splits = {name: f"{begin}:{end}" for name, (begin, end) in splits.items()}
        left_out = {name: str(spec) for name, spec in plan.left_out.items()}
        writer.records[layout.IMPORT] = {
            "format": "RLDS", "source": str(source.folder), "name": source.info.name, "version": source.info.version,
            "fps": fps, "episodes": list(request.episodes), "only_successes": request.only_successes,
            "drop_idle": request.drop_idle, "steps_dropped": dropped, "episodes_left_out": counts,
            "features": {**plan.names, "+".join(plan.action): layout.ACTION, plan.instruction: "task"},
            "features_left_out": left_out, "conventions": _conventions(source),
        }  # fmt: skip
        writer.close()
    result = {
        "dataset": str(request.out), "source": str(source.folder), "episodes": writer.episodes,
        "env_steps": writer.frames, "fps": fps, "cameras": list(plan.cameras), "features_left_out": left_out,
        "episodes_left_out": counts, "steps_dropped": dropped, "odd": odd,
    }  # fmt: skip
    _show(result)
    return result


def selected(ranges: Sequence[str], count: int) -> frozenset[int]:
    """The episodes that texts like `0-19,25` name; all where there are none. Raises `UserError`."""
    found = {number for text in ranges for number in numbered(text, count)}
    return frozenset(found or range(count))


@dataclass(frozen=True)
class _Plan:
    """Plan of the conversion: the target of each feature of a dataset."""

    specs: Mapping[str, Spec]
    action: tuple[str, ...]
    """Features that are joined to the action."""
    instruction: str
    names: Mapping[str, str]
    """The features that are columns or cameras, by their path."""
    left_out: Mapping[str, Spec]

    @classmethod
    def of(cls, source: RLDS, action: Sequence[str]) -> _Plan:
        specs, where = source.steps, source.folder / FEATURES
        read = {name: spec for name, spec in specs.items() if spec.is_read}
        parts = tuple(action) or ("action",)
        vectors = [name for name, spec in read.items() if spec.kind == "numbers" and len(spec.shape) <= 1]
        wrong = [name for name in parts if name not in vectors]
        if wrong:
            of_parts = ",".join(name for name in vectors if name.startswith("action/")) or "action"
            raise UserError(
                f"{where} has no vector of numbers {shown(wrong[0])} for the action; it has: "
                f"{shown(', '.join(vectors), 500)}. Name the action's parts in order, for example --action "
                f"{shown(' '.join(of_parts.split(',')), 300)}"
            )
        instruction = next((name for name in INSTRUCTIONS if name in read and read[name].kind == "text"), None)
        if instruction is None:
            texts = ", ".join(name for name, spec in read.items() if spec.kind == "text") or "none"
            raise UserError(
                f"{where} has no instruction: one of {', '.join(INSTRUCTIONS)} is needed, and its texts are: "
                f"{shown(texts, 300)}"
            )
        names = {n: _name(n, spec) for n, spec in read.items() if n not in (*parts, instruction, *ORDER)}
        taken = [*names.values(), layout.ACTION, layout.SUCCESS, layout.DONE]
        twice = next((name for name in taken if taken.count(name) > 1), None)
        if twice:
            both = [name for name, new in names.items() if new == twice]
            raise UserError(f"{where}: {shown(' and '.join(both))} would both be called {shown(twice)} here")
        left_out = {name: spec for name, spec in specs.items() if not spec.is_read}
        left_out |= {n: s for n, s in source.about.items() if s.kind not in ("numbers", "text") or s.shape}
        return cls(specs, parts, instruction, names, left_out)

    @property
    def judges(self) -> bool:
        """True where the dataset says what is solved."""
        return self.names.get("reward") == layout.REWARD

    @property
    def cameras(self) -> list[str]:
        return [name.removeprefix(layout.IMAGES) for path, name in self.names.items() if _is_picture(self.specs[path])]

    def features(self, record: Record) -> dict[str, Feature]:
        """The new dataset's features; a picture of a size that the spec leaves open has that of the first record."""
        found = {layout.ACTION: Feature("float32", (sum(_width(self.specs[name]) for name in self.action),))}
        for path, name in self.names.items():
            spec = self.specs[path]
            if _is_picture(spec):
                found[name] = Feature("image", _picture_shape(record, path, spec))
            elif spec.kind == "text":
                found[name] = Feature("string", (1,))
            else:
                found[name] = Feature(_dtype(spec), tuple(size or 0 for size in spec.shape) or (1,))
        if self.judges:
            found[layout.SUCCESS] = Feature("bool", (1,))
        return found | {layout.DONE: Feature("bool", (1,))}

    def episode(self, record: Record) -> Episode:
        """The record's steps under their new names. Raises `DatasetError` for actions or states that are not finite."""
        n, values = record.steps, record.values
        parts = [np.asarray(values[name], np.float32).reshape(n, -1) for name in self.action]
        columns: dict[str, npt.NDArray[Any]] = {layout.ACTION: np.concatenate(parts, 1)}
        pictures: dict[str, Sequence[bytes]] = {}
        for path, name in self.names.items():
            spec, found = self.specs[path], values[path]
            if spec.kind == "picture":
                pictures[name] = found  # type: ignore[assignment]
            elif spec.kind == "text":
                columns[name] = np.array([text(record.where, path, item) for item in found], object)
            elif _is_picture(spec):
                pictures[name] = [_png(picture) for picture in np.asarray(found)]
            else:
                columns[name] = np.asarray(found, _dtype(spec))
        for name in {layout.ACTION, layout.PROPRIO, layout.REWARD} & set(columns):
            if not np.isfinite(columns[name]).all():
                raise DatasetError(f"{record.where}: {name} has numbers that are not finite: leave the episode out "
                                   f"(it is number {record.number}; --episodes)")  # fmt: skip
        row = dict(record.about)
        columns[layout.DONE] = np.arange(n) == n - 1
        if self.judges:
            terminal = values.get("is_terminal")
            solved = columns[layout.REWARD][-1] > 0 and (terminal is None or bool(np.all(terminal[-1])))
            row["success"] = bool(solved)
            columns[layout.SUCCESS] = columns[layout.DONE] & row["success"]
        instructions = [text(record.where, self.instruction, item) for item in values[self.instruction]]
        return Episode(columns, pictures, instructions, row)


def _without(episode: Episode, keep: npt.NDArray[np.bool_]) -> Episode:
    """The steps that are kept; what came of those that are not counts to the one before."""
    rows = np.flatnonzero(keep).tolist()
    columns = {name: values[rows] for name, values in episode.columns.items()}
    if layout.REWARD in columns:
        columns[layout.REWARD] = columns[layout.REWARD].copy()
        columns[layout.REWARD][:] = 0
        np.add.at(columns[layout.REWARD], np.maximum(keep.cumsum() - 1, 0), episode.columns[layout.REWARD])
    for name in {layout.SUCCESS, layout.DONE, "is_terminal"} & set(columns):
        columns[name][-1:] = episode.columns[name][-1:]
    pictures = {name: [files[row] for row in rows] for name, files in episode.pictures.items()}
    return Episode(columns, pictures, [episode.instructions[row] for row in rows], episode.row)


def _odd(record: Record, episode: Episode) -> tuple[bool, bool]:
    ends = np.zeros((2, record.steps), np.bool_)
    ends[0, 0] = ends[1, -1] = True
    unlike = any(
        not np.array_equal(np.asarray(record.values[name]).reshape(record.steps, -1).all(1), marks)
        for name, marks in zip(ORDER, ends, strict=True)
        if isinstance(record.values.get(name), np.ndarray)
    )
    actions = episode.columns[layout.ACTION]
    return unlike, bool(not actions[-1].any() and actions.any())


def _name(path: str, spec: Spec) -> str:
    """A feature's name in the new dataset."""
    if _is_picture(spec):
        return layout.IMAGES + path.removeprefix("observation/").replace("/", ".")
    if path == "reward" and spec.kind == "numbers" and not spec.shape:
        return layout.REWARD
    name = path.replace("/", ".")
    return f"steps.{name}" if name in (*layout.OWN, "task", "tasks", layout.ACTION) else name


def _is_picture(spec: Spec) -> bool:
    """True for an encoded picture, and for uint8 [H, W, 3] that lie as numbers."""
    as_numbers = spec.kind == "numbers" and spec.dtype == "uint8" and len(spec.shape) == 3 and spec.shape[2] == 3
    return spec.kind == "picture" or as_numbers


def _picture_shape(record: Record, path: str, spec: Spec) -> tuple[int, int, int]:
    height, width = spec.shape[:2]
    if height is None or width is None:
        try:
            first = Image.open(io.BytesIO(record.values[path][0]), formats=("JPEG", "PNG"))
        except Exception as error:  # Pillow's decoders raise all kinds
            raise DatasetError(f"{record.where}: {path} is no JPEG or PNG ({str(error)[:200]}); {AGAIN}") from error
        height, width = first.height, first.width
    return height, width, 3


def _png(picture: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "PNG")
    return file.getvalue()


def _dtype(spec: Spec) -> str:
    """float32 for all floating numbers: a record holds no others."""
    return "float32" if spec.dtype.startswith("float") else spec.dtype


def _width(spec: Spec) -> int:
    return spec.shape[0] or 1 if spec.shape else 1


def _rate(source: RLDS, given: Path) -> int:
    names = [source.info.name, *(part.lower() for part in source.folder.parts[-2:]), given.name]
    for pattern, rate in RATES:
        if any(re.match(pattern, name) for name in names):
            return rate
    raise UserError(
        f"{source.folder}: RLDS does not say how many steps a second there were, and {shown(source.info.name)} is none "
        "of the datasets whose rate is known (LIBERO, Bridge, RT-1's fractal, DROID): give it with --fps"
    )


def _conventions(source: RLDS) -> dict[str, str]:
    """Known conventions of the numbers: those of OpenVLA's LIBERO datasets, from their builder; none for others."""
    found = {name: source.steps.get(f"observation/{name}") for name in LIBERO}
    is_libero = re.match("libero|liber_o", source.info.name) and all(
        spec is not None and len(spec.shape) == len(LIBERO[name]) and spec.shape[-1] == LIBERO[name][-1]
        for name, spec in found.items()
    )
    if not is_libero or source.steps["action"].shape != (7,):
        return {}
    return {
        "orientation": "rotated",
        "gripper": "simulator",
        "observation.state": "position (m), axis-angle (rad) and two finger joints (m) of the end effector",
        "action": "LIBERO's own: pose deltas in [-1, 1], the last element -1 opens and 1 closes",
        "known_from": "the dataset's name and features",
    }


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "none was selected"


def _show(result: Mapping[str, Any]) -> None:
    show(
        f"[bold]{result['dataset']}[/]: {result['episodes']} episodes, {result['env_steps']} steps at {result['fps']} "
        f"a second, cameras: {', '.join(result['cameras']) or 'none'}"
    )
    if any(result["episodes_left_out"].values()) or result["steps_dropped"]:
        left_out = _listed(result["episodes_left_out"])
        show(f"left out: episodes: {left_out}; steps that do nothing: {result['steps_dropped']}")
    for name, what in result["features_left_out"].items():
        show(f"[yellow]left out: {name}, {what.replace('[', '(').replace(']', ')')}[/]")
    for what, count in result["odd"].items():
        if count:
            show(f"[yellow]in {count} of {result['episodes']} episodes {what}[/]")
