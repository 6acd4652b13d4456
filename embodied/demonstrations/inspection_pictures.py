"""Pictures of a dataset: a contact sheet of frames, and a histogram of each action dimension."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from embodied.demonstrations.reader import Dataset

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

EPISODES, MOMENTS, CAMERAS = 6, 6, 4
"""Rows and columns of a contact sheet, and cameras of which it has one below the other."""
HEIGHT, MARGIN, LABEL = 128, 4, 16
"""Pixels of a picture, between pictures, and of a line of text."""
BINS = 60


def contact_sheet(dataset: Dataset, episodes: Sequence[int], path: Path) -> None:
    """Write a PNG: a row for each of some episodes, from its first frame to its last, for each camera."""
    cameras = list(dataset.cameras)[:CAMERAS]
    chosen = [episodes[i] for i in np.unique(np.linspace(0, len(episodes) - 1, EPISODES).astype(int))]
    widths = {}
    for camera in cameras:
        height, width = dataset.frames(camera, [dataset.episodes[chosen[0]].begin]).shape[1:3]
        widths[camera] = max(1, round(HEIGHT * width / height))
    sheet = Image.new(
        "RGB",
        (MARGIN + MOMENTS * (max(widths.values()) + MARGIN), len(cameras) * len(chosen) * (HEIGHT + LABEL + MARGIN)),
        "white",
    )
    drawing, top = ImageDraw.Draw(sheet), 0
    for camera in cameras:
        for number in chosen:
            episode = dataset.episodes[number]
            rows = np.linspace(episode.begin, episode.end - 1, MOMENTS).astype(np.int64)
            told = ", ".join(episode.instructions)
            text = f"{camera}, episode {number}, {episode.length} steps: {told}"[: sheet.width // 6]
            drawing.text((MARGIN, top + 2), text.encode("ascii", "replace").decode(), fill="black")
            for place, frame in enumerate(dataset.frames(camera, rows)):
                picture = Image.fromarray(frame).resize((widths[camera], HEIGHT))
                sheet.paste(picture, (MARGIN + place * (widths[camera] + MARGIN), top + LABEL))
            top += HEIGHT + LABEL + MARGIN
    sheet.save(path)


def histograms(
    actions: npt.NDArray[np.float32],
    names: Sequence[str],
    limits: Sequence[tuple[float, float]] | None,
    path: Path,
) -> None:
    """Write a PNG with a histogram of each dimension of the actions [N, A]; the environment's range is shaded."""
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.2 * columns, 2.2 * rows), squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place >= len(names):
            axis.set_axis_off()
            continue
        axis.hist(actions[:, place].astype(np.float64), bins=BINS, color="#3b6ea5")
        axis.set_yscale("log")
        if limits is not None and np.isfinite(limits[place]).all():
            axis.axvspan(*limits[place], color="#5aa469", alpha=0.18, zorder=0)
        axis.set_title(f"action {names[place]}", fontsize=9)
        axis.tick_params(labelsize=7)
    note = "shaded: the range that the environment takes; " if limits is not None else ""
    figure.suptitle(f"{note}counts of env steps, logarithmic", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
