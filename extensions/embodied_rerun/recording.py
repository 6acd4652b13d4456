"""One episode as a Rerun recording: numbers as they are, frames uncompressed, over env steps and over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rerun as rr
import rerun.blueprint as rrb

from embodied_rerun.episodes import Episode

FRAMES = 32
"""Frames that are read and written together."""
FACTS = "episode"
"""Name of the recording's property that has the episode's facts."""
INSTRUCTION = "instruction"


def write_recording(path: Path, episode: Episode) -> None:
    """Write the episode to a new file.

    A feature `observation.state` is the entity `/observation/state`. Numbers are `Scalars` (float64, which holds
    float32, bool and integers below 2**53 as they are), texts and the instruction `TextDocument`s, frames `Image`s of
    RGB bytes. The timelines are `step`, from 0, and `time`, in seconds.
    """
    rr.set_strict_mode(True)  # else what cannot be written is a warning, and missing
    with rr.RecordingStream(
        episode.source, recording_id=f"{episode.source}-{episode.number:06d}", send_properties=False
    ) as recording:
        recording.save(path, default_blueprint=_blueprint(episode))
        recording.send_recording_name(f"episode {episode.number}")
        facts: dict[str, Any] = {**episode.facts}
        recording.send_property(FACTS, rr.AnyValues(**facts))
        for name, values in episode.columns.items():
            _send_column(recording, episode, name, values)
        begins = [i for i, text in enumerate(episode.instructions) if not i or text != episode.instructions[i - 1]]
        texts = [episode.instructions[i] for i in begins]
        recording.send_columns(INSTRUCTION, _times(episode, np.array(begins)), rr.TextDocument.columns(text=texts))
        for name in episode.cameras:
            _send_frames(recording, episode, name)


def entity(feature: str) -> str:
    """Path of the feature's entity: `/observation/images/front` of `observation.images.front`."""
    return rr.new_entity_path(feature.split("."))


def _times(episode: Episode, steps: npt.NDArray[np.int64]) -> list[rr.TimeColumn]:
    return [rr.TimeColumn("step", sequence=steps), rr.TimeColumn("time", duration=steps / episode.hz)]


def _send_column(recording: rr.RecordingStream, episode: Episode, name: str, values: npt.NDArray[Any]) -> None:
    times = _times(episode, np.arange(episode.steps))
    if values.dtype.kind not in "biuf":
        texts = rr.TextDocument.columns(text=[str(text) for text in values.reshape(len(values), -1)[:, 0]])
        recording.send_columns(entity(name), times, texts)
        return
    if name in episode.names:
        recording.log(entity(name), rr.SeriesLines(names=list(episode.names[name])), static=True)
    flat = values.reshape(len(values), -1).astype(np.float64)
    recording.send_columns(entity(name), times, rr.Scalars.columns(scalars=flat))


def _send_frames(recording: rr.RecordingStream, episode: Episode, name: str) -> None:
    for begin in range(0, episode.steps, FRAMES):
        steps = slice(begin, min(begin + FRAMES, episode.steps))
        frames = episode.cameras[name](steps)
        count, height, width, _ = frames.shape
        if not begin:
            form = rr.components.ImageFormat(width=width, height=height, color_model="RGB", channel_datatype="U8")
            recording.log(entity(name), rr.Image.from_fields(format=form), static=True)
        times = _times(episode, np.arange(steps.start, steps.stop))
        recording.send_columns(entity(name), times, rr.Image.columns(buffer=frames.reshape(count, -1)))


def _blueprint(episode: Episode) -> rrb.Blueprint:
    """What the viewer shows first: the cameras and the instruction, beside them a plot of each column."""
    text = [rrb.TextDocumentView(origin=INSTRUCTION, name="instruction")]
    pictures = [rrb.Spatial2DView(origin=entity(name), name=name.split(".")[-1]) for name in episode.cameras]
    plots = [
        rrb.TimeSeriesView(origin=entity(name), name=name)
        for name, values in episode.columns.items()
        if values.dtype.kind in "biuf"
    ]
    seen = rrb.Vertical(*pictures, *text, row_shares=[3] * len(pictures) + [1])
    return rrb.Blueprint(rrb.Horizontal(seen, rrb.Vertical(*plots)), collapse_panels=True)
