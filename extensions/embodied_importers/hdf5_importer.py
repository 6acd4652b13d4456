"""Imports recordings of simulators: replays each episode in the farm, compares it, draws it, and writes the dataset."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import print as show

from embodied.config.schema import Config, EnvConfig
from embodied.demonstrations.layout import DatasetError
from embodied.demonstrations.writer import DatasetWriter, new_folder
from embodied.errors import UserError, nearest
from embodied.execution.session import in_order, open_session, replayers_of
from embodied.reporting.live import steps
from embodied.runtime.handles import Handle
from embodied_importers.formats import IDLE_NORM, ImportRequest, moving, numbered
from embodied_importers.hdf5 import RecordingFile, open_recording
from sim_farm.client.episode_replay import Followed, Recording, Replayer
from sim_farm.contract import Gripper, TaskInfo, TaskSpec

WITHOUT_GRIPPER = ("DrawSVG-v1", "DrawTriangle-v1", "PushT-v1", "TwoRobotPickCube-v1", "TwoRobotStackCube-v1")
"""ManiSkill's tasks whose actions do not end with the one gripper's element."""
FILTER = f"norm(action[:-1]) < {IDLE_NORM:g} and gripper as in the action before (OpenVLA's no-op filter)"


@dataclass(frozen=True)
class _Item:
    """An episode that is to be replayed."""

    name: str
    recording: Recording
    keep: npt.NDArray[np.bool_]
    """[n] False at the actions that are left out as idle."""


def import_source(request: ImportRequest) -> dict[str, Any]:
    """Replay the recording `request.source` and write what reproduces into `request.out`; the result as plain data.

    Raises `UserError` for a source that cannot be read, settings that it does not have, or where nothing reproduces.
    """
    begin = time.monotonic()
    source = open_recording(request.source, request.task)
    if request.tolerance is not None and not 0 <= request.tolerance < math.inf:
        raise UserError(f"--tolerance is a deviation of at least 0, got {request.tolerance}")
    tolerance = source.tolerance if request.tolerance is None else request.tolerance
    names = chosen(source, request.episodes)
    if request.drop_idle:
        check_idle_filter(source)
        if request.drift == "correct":
            raise UserError(
                "--drift correct goes on from recorded states, which belong to all the actions: leave out --drop-idle"
            )
    items = _read(source, names, request.drop_idle, request.env.gripper)
    spec = TaskSpec(
        source.task,
        source.control_mode,
        source.reward,
        max(len(item.recording.actions) for item in items),
        request.env.cameras,
        request.env.image_size,
        0,
        request.env.orientation,
        request.env.gripper,
    )
    config = Config(env=EnvConfig(task=source.task), runtime=request.runtime)
    with new_folder(request.out) as aside, open_session(config) as session:
        replayer = session.runtime.start("replayer 0", Replayer, spec)
        info = replayer.call(Replayer.describe)
        _check_sizes(source, items, info)
        provenance: dict[str, Any] = {
            "task": asdict(info.spec),
            "source": str(request.source),
            "sha256": _sha256(request.source),
            "format": source.format,
            "notes": list(source.notes),
            "tolerance": tolerance,
            "filter": FILTER if request.drop_idle else None,
            "only_successes": request.only_successes,
            "starts": "from the recorded first states; where a row has a seed, that leads to the same state",
        }
        writer = DatasetWriter(aside, info, provenance)
        replayers = replayers_of(replayer, spec, session, len(items))
        outcomes = _write(writer, replayers, items, tolerance, request.only_successes, request.drift == "correct")
        if source.goes_on:
            outcomes = _write_going_on(writer, replayer, source, outcomes, request)
        summary = _summary(source, outcomes, tolerance)
        if not writer.episodes:
            raise UserError(_nothing(source, outcomes))
        provenance |= summary  # the writer holds this table, and writes it when it is closed
        writer.close()
    result = {
        "dataset": str(request.out),
        "source": str(request.source),
        "format": source.format,
        "task": source.task,
        "control_mode": source.control_mode,
        "episodes": writer.episodes,
        "env_steps": writer.frames,
        "cameras": list(info.cameras),
        "notes": list(source.notes),
        **summary,
        "wall_s": time.monotonic() - begin,
    }
    _show(result)
    return result


def chosen(source: RecordingFile, wanted: Sequence[str]) -> tuple[str, ...]:
    """The episodes that are wanted: by ranges such as `0-19,25` of their numbers in the file's order, or by the name of
    one of the file's selections. Raises `UserError`."""
    if not source.episodes:
        raise UserError(f"{source.path} has no episode that can be replayed: {_reasons(source.absent)}")
    found: dict[str, None] = {}
    for word in wanted:
        if word in source.subsets:
            names: Sequence[str] = source.subsets[word]
            if missing := [name for name in names if name not in source.episodes]:
                raise UserError(f"{source.path}: its selection {word!r} names {missing[0]!r}, which it has not")
        elif source.subsets and not word[:1].isdecimal():
            raise UserError(f"{source.path} has no selection {word!r}{nearest(word, list(source.subsets))}")
        else:
            names = [source.episodes[number] for number in numbered(word, len(source.episodes))]
        found.update(dict.fromkeys(names))
    return tuple(found) or source.episodes


def check_idle_filter(source: RecordingFile) -> None:
    """Raise `UserError` where an action of zeros does not mean to stay, or the last element is not the gripper's."""
    if not re.search("delta|vel|osc", source.control_mode):
        raise UserError(
            f"--drop-idle is for actions that are differences; {source.path} has {source.control_mode}, whose zeros "
            "move the robot. Leave it out, or convert the recording with ManiSkill's replay_trajectory first"
        )
    if source.task.rpartition("/")[2] in WITHOUT_GRIPPER:
        raise UserError(f"--drop-idle is for robots with one gripper, moved by the last element; {source.task} has not")


def in_convention(actions: npt.NDArray[np.float32], gripper: Gripper) -> npt.NDArray[np.float32]:
    """The simulator's actions as the convention writes them: `inverted` in [0, 1], 1 opens (`sim_farm.conventions`)."""
    if gripper != "inverted":
        return actions
    turned = actions.copy()
    turned[:, -1] = (1 - np.sign(actions[:, -1])) / 2
    return turned


def _read(source: RecordingFile, names: Sequence[str], drop_idle: bool, gripper: Gripper) -> list[_Item]:
    """All episodes, before anything is simulated: what is damaged is refused now, not after hours."""
    items = []
    with steps(f"Reading {source.path.name}", len(names)) as bar:
        for name in names:
            recording = source.read(name)
            actions = recording.actions
            keep = moving(actions) if drop_idle else np.ones(len(actions), np.bool_)
            converted = Recording(
                recording.spec, recording.start, in_convention(actions, gripper), recording.states, recording.success
            )
            items.append(_Item(name, converted, keep))
            bar.advance()
    return items


def _check_sizes(source: RecordingFile, items: Sequence[_Item], info: TaskInfo) -> None:
    for item in items:
        found = item.recording.actions.shape[1]
        if found != info.action_dim:
            raise DatasetError(
                f"{source.path}: {item.name} has actions of {found} numbers, {info.spec.name} with "
                f"{info.spec.control_mode} takes {info.action_dim}: it was recorded with another robot or task"
            )


def _write(
    writer: DatasetWriter,
    replayers: Sequence[Handle[Replayer]],
    items: Sequence[_Item],
    tolerance: float,
    only_solved: bool,
    correct: bool,
) -> list[tuple[_Item, Followed]]:
    """Replay and compare the episodes, and write those that reproduce. Returns how each came out, without frames."""

    def begin(replayer: Handle[Replayer], item: _Item) -> Followed:
        return replayer.submit(Replayer.follow, item.recording, tolerance, item.keep, only_solved, False, correct)

    outcomes = []
    with steps("Replaying", len(items)) as bar:
        for item, followed in in_order(replayers, items, begin):
            if followed.replay is not None:
                writer.add(item.recording.spec if followed.from_seed else None, followed.replay)
            outcomes.append((item, replace(followed, replay=None)))
            bar.advance()
    return outcomes


def _write_going_on(
    writer: DatasetWriter,
    replayer: Handle[Replayer],
    source: RecordingFile,
    outcomes: Sequence[tuple[_Item, Followed]],
    request: ImportRequest,
) -> list[tuple[_Item, Followed]]:
    """Replay those that did not reproduce by themselves as they were recorded: in one environment, after all episodes
    before them in the file, whose last contacts a reset leaves in PhysX. Returns how each came out at last."""
    tolerance = source.tolerance if request.tolerance is None else request.tolerance
    failed = {item.name: item for item, followed in outcomes if math.isfinite(followed.deviation)
              and not followed.reproduced}  # fmt: skip
    if not failed:
        return list(outcomes)
    last = max(source.episodes.index(name) for name in failed)
    found: dict[str, Followed] = {}
    with steps("Replaying in the recorder's order", last + 1) as bar:
        for name in source.episodes[: last + 1]:
            if item := failed.get(name):
                followed = replayer.call(
                    Replayer.follow, item.recording, tolerance, item.keep, request.only_successes, True
                )
                if followed.replay is not None:
                    writer.add(None, followed.replay)
                found[name] = replace(followed, replay=None)
            else:
                with suppress(DatasetError):  # damaged, and not one that is wanted: those were read before
                    earlier = source.read(name)
                    actions = in_convention(earlier.actions, request.env.gripper)
                    replayer.call(Replayer.pass_through, replace(earlier, actions=actions))
            bar.advance()
    kept = [pair for pair in outcomes if pair[0].name not in found]
    return kept + [(failed[name], followed) for name, followed in found.items()]


def _summary(source: RecordingFile, outcomes: Sequence[tuple[_Item, Followed]], tolerance: float) -> dict[str, Any]:
    """Counts, and the reason for every episode that was left out."""
    reproduced = [followed for _, followed in outcomes if followed.reproduced]
    written = [item for item, followed in outcomes if not followed.why_not]
    left_out = {item.name: followed.why_not for item, followed in outcomes if followed.why_not}
    return {
        "replayed": len(outcomes),
        "reproduced": len(reproduced),
        "reproduced_exactly": sum(followed.deviation == 0 for followed in reproduced),
        "not_reproduced": len(outcomes) - len(reproduced),
        "tolerance": tolerance,
        "corrected_states": sum(followed.corrected for followed in reproduced),
        "largest_deviation": max((followed.deviation for followed in reproduced), default=None),
        "idle_steps_left_out": sum(int((~item.keep).sum()) for item in written),
        "recorded_episodes": [item.name for item in written],
        "left_out": {**left_out, **source.absent},
    }


def _nothing(source: RecordingFile, outcomes: Sequence[tuple[_Item, Followed]]) -> str:
    why = _reasons({item.name: followed.why_not for item, followed in outcomes})
    return (
        f"none of the {len(outcomes)} episodes of {source.path} is left: {why}. --tolerance allows larger deviations "
        "of states, --drift correct goes on from the recorded ones; a recording of another solver or version of the "
        "simulator may not reproduce at all"
    )


def _reasons(left_out: Mapping[str, str]) -> str:
    first = [f"{name}: {why}" for name, why in list(left_out.items())[:3]]
    return "; ".join(first) + (f"; and {len(left_out) - 3} more" if len(left_out) > 3 else "")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show(result: Mapping[str, Any]) -> None:
    show(
        f"[bold]{result['dataset']}[/]: {result['episodes']} episodes, {result['env_steps']} env steps of "
        f"{result['task']}, cameras: {', '.join(result['cameras']) or 'none'}"
    )
    show(
        f"{result['reproduced']} of {result['replayed']} episodes came out as recorded, "
        f"{result['reproduced_exactly']} of them bit for bit (largest deviation {result['largest_deviation']:.3g}, "
        f"allowed {result['tolerance']:g})"
    )
    if result["corrected_states"]:
        show(f"{result['corrected_states']} states were farther away: the recorded ones took their place")
    if result["idle_steps_left_out"]:
        show(f"{result['idle_steps_left_out']} idle env steps were left out")
    if result["left_out"]:
        show(f"left out: {_reasons(result['left_out'])}")
    for note in result["notes"]:
        show(f"[dim]{note}[/]")
