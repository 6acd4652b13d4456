"""The table of an inspection, for a terminal and, as text, for a file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from rich import get_console
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from embodied.demonstrations.inspection import SHOWN, Dimension, Facts, Inspection
from embodied.demonstrations.reader import Dataset

ROWS = 16
"""Dimensions of a state that are listed; data.json has all."""
WIDTH = 118
"""Columns of the text."""


def show_table(found: Inspection) -> None:
    """Print it: in a terminal at its width, elsewhere as `text`."""
    console = get_console()
    if console.is_terminal:
        console.print(table(found))
    else:
        console.print(Text(text(found).rstrip()), soft_wrap=True)


def table(found: Inspection) -> RenderableType:
    """The whole table: datasets, dimensions, what is done to the data, warnings and refusals."""
    parts: list[RenderableType] = [Text("What was understood of the data", style="bold")]
    for facts in found.datasets:
        parts += [_summary(facts, found), *_dimensions(facts)]
    if found.transforms:
        parts.append(Text("Transforms, in order: " + "; ".join(found.transforms)))
    if found.statistics:
        parts.append(Text(f"Statistics: {found.statistics}"))
    parts += [Text(f"warning: {f.text}", style="yellow") for f in found.warnings]
    parts += [Text(f"refused ({f.check}): {f.text}", style="red") for f in found.refused]
    return Group(*parts)


def text(found: Inspection) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False, color_system=None)
    console.print(table(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _summary(facts: Facts, found: Inspection) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    solved = "" if facts.solved is None else f", {facts.solved} of them solved"
    copies = f", {facts.copies} copies of these left out" if facts.copies else ""
    share = f", {100 * facts.share:.3g}% of the samples" if facts.share < 1 else ""
    learned, held_out = len(facts.learned_from), len(facts.held_out)
    rows = {
        "dataset": f"{facts.folder} ({facts.version})" + share,
        "episodes": f"{facts.episodes}; {learned + held_out} used{solved}: {learned} learned from, "
        f"{held_out} held out{copies}",
        "env steps": f"{facts.rows} in the episodes that are used",
        "instructions": _instructions(facts) + _against(found.instruction, "the task's own"),
        "frames": (", ".join(f"{name} {h} x {w}" for name, (h, w) in facts.cameras.items()) or "none")
        + _against(found.image_size, "env.image_size")
        + _against(found.network_image_size, "the network is shown"),
        "rate": f"{facts.fps:g} frames per second" + _against(found.control_hz, "env steps per second"),
        "numbers": ", ".join(f"{name} {size}" for name, size in facts.sizes.items()) or "none",
    }
    if facts.unread:
        rows["not read"] = ", ".join(facts.unread)
    for name, value in rows.items():
        grid.add_row(name, Text(value))
    for note in facts.notes:
        grid.add_row("note", Text(note, style="yellow"))
    return grid


def _instructions(facts: Facts) -> str:
    some = [f"{text!r} ({count})" for text, count in list(facts.instructions.items())[:SHOWN]]
    more = f", and {len(facts.instructions) - SHOWN} more" if len(facts.instructions) > SHOWN else ""
    return (", ".join(some) or "none") + more


def _against(value: object, name: str) -> str:
    if value is None:
        return ""
    return f"; {name}: {value:g}" if isinstance(value, (int, float)) else f"; {name}: {value!r}"


def _dimensions(facts: Facts) -> Iterator[Table]:
    if facts.action:
        yield _listed("action", facts.action, "environment takes")
    for name, dimensions in (("state", facts.proprio), ("full state", facts.state)):
        if dimensions:
            yield _listed(name, dimensions, "at a reset")


def _listed(title: str, dimensions: Sequence[Dimension], compared: str) -> Table:
    ranged = any(d.environment is not None for d in dimensions)
    beyond = any(d.beyond is not None for d in dimensions)
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    found.add_column(title, no_wrap=True)
    heads = [
        "min",
        "q01",
        "mean",
        "std",
        "q99",
        "max",
        *([compared] if ranged else []),
        *(["beyond"] if beyond else []),
    ]
    for head in heads:
        found.add_column(head, justify="right", no_wrap=True)
    found.add_column("")
    for d in dimensions[:ROWS]:
        cells = [f"{value:.3g}" for value in (d.low, d.q01, d.mean, d.std, d.q99, d.high)]
        if ranged:
            cells.append("" if d.environment is None else " to ".join(f"{end:.3g}" for end in d.environment))
        if beyond:
            cells.append("" if d.beyond is None else f"{100 * d.beyond:.3g}%")
        found.add_row(d.name, *cells, Text(d.remark, style="yellow"))
    if len(dimensions) > ROWS:
        found.add_row("...", *[""] * len(heads), f"and {len(dimensions) - ROWS} more")
    return found


# --- Pictures of a dataset: a contact sheet of frames, and a histogram of each action dimension.


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
            instructions = ", ".join(episode.instructions)
            text = f"{camera}, episode {number}, {episode.length} steps: {instructions}"[: sheet.width // 6]
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
    # Training reads the table of this module; only the pictures wait for matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
